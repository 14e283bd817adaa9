"""Many seeds of disasters on all cores: everything that can strike does, and nothing is found."""

from __future__ import annotations

from delta_prop_simulations.disasters.plan import STRIKES
from delta_prop_simulations.disasters.sweep import Summary, sweep
from delta_prop_simulations.processes import cores

RARE = {"read error"}  # services seldom read: their newest batches are in memory


def test_in_many_seeds_all_that_can_strike_does_and_nothing_is_found(full) -> None:
    summary = Summary()
    for part in sweep(0, 2_000 if full else 64, cores()):
        summary.add_all(part)
    print(f"{summary.seeds} seeds, {summary.deltas:,} deltas acknowledged")
    assert summary.found == []
    struck = summary.struck
    assert {kind for kind in STRIKES if not struck[f"strike: {kind}"]} <= (set() if full else RARE)
    for what in ("disk: torn", "disk: sectors lost", "network: bytes lost by a reset", "machine: power cut"):
        assert struck[what] > 0, what
    assert summary.deltas > 50 * summary.seeds
