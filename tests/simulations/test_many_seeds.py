"""Chaos seeds that no run has tried before, on all cores: they find no violation."""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING

from delta_prop_simulations.chaos.plan import STRIKES
from delta_prop_simulations.chaos.sweep import Summary, sweep
from delta_prop_simulations.processes import cores

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

RUN_S, RUN_SEEDS_MIN = 40.0, 100
"""How long a normal run tries new seeds, in seconds, and the minimum number of seeds."""
VACUOUS_SHARE_MAX = 0.02
"""Maximum share of seeds whose strikes all missed their targets: these runs prove nothing."""
FULL_SEEDS = 2_000
RARE = {"read error"}  # services seldom read the disk, as their newest batches are in memory
KINDS_SHARE_MIN = 0.6
"""Minimum share of the kinds of strikes that the few seeds of a normal run cover."""


def test_fresh_seeds_find_no_violation(
    full: bool, pytestconfig: pytest.Config, print_at_end: Callable[[str], None]
) -> None:
    first: int = pytestconfig.getoption("--first-seed")
    summary, end = Summary(), monotonic() + RUN_S
    for results in sweep(first, FULL_SEEDS, cores()):
        summary.add_all(results)
        if not full and monotonic() > end and summary.seeds >= RUN_SEEDS_MIN:
            break
    print_at_end(f"{summary.seeds:,} chaos seeds from {first} on, {summary.deltas:,} deltas acknowledged")
    assert [finding for finding in summary.findings if finding.check != "vacuous"] == []
    assert len(summary.findings) <= VACUOUS_SHARE_MAX * summary.seeds, summary.findings
    struck = summary.struck
    missing = {kind for kind in STRIKES if not struck[f"strike: {kind}"]}
    assert missing <= RARE if full else len(missing) < (1 - KINDS_SHARE_MIN) * len(STRIKES)
    for what in ("disk: sectors lost", "network: bytes lost by a reset", "machine: power cut"):
        assert struck[what] > 0, what
    assert summary.deltas > 50 * summary.seeds
