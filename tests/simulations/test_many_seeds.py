"""Chaos runs with seeds that no run has tried before, on all cores, find no violation."""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING

from delta_prop_simulations.chaos.plan import STRIKES
from delta_prop_simulations.commands.sweep import Summary, sweep
from delta_prop_simulations.processes import cores

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

RUN_S, RUN_SEEDS_MIN = 20.0, 50
"""How long a normal run tries new seeds, in seconds, and the minimum number of seeds."""
VACUOUS_MAX, VACUOUS_SHARE_MAX = 2, 0.02
"""Maximum number, or share if that is more, of seeds whose strikes all missed their targets: these runs prove
nothing.
"""
FULL_SEEDS = 2_000
RARE = {"read error"}
"""Kinds of strikes that often miss: services seldom read the disk, since their newest batches are in memory.
"""
KINDS_SHARE_MIN = 0.6
"""Minimum share of the kinds of strikes that the few seeds of a normal run cover."""


def test_fresh_seeds_find_no_violation(
    full: bool, pytestconfig: pytest.Config, print_at_end: Callable[[str], None]
) -> None:
    first: int = pytestconfig.getoption("--first-seed")
    summary, end = Summary(), monotonic() + RUN_S
    for task_summary in sweep(first, FULL_SEEDS, cores()):
        summary.add_all(task_summary)
        if not full and monotonic() > end and summary.seed_count >= RUN_SEEDS_MIN:
            break
    print_at_end(
        f"{summary.seed_count:,} chaos seeds from {first} on, {summary.delta_count:,} deltas acknowledged"
    )
    assert [finding for finding in summary.findings if finding.check != "vacuous"] == []
    vacuous_max = max(VACUOUS_MAX, VACUOUS_SHARE_MAX * summary.seed_count)
    assert len(summary.findings) <= vacuous_max, summary.findings
    event_counts = summary.event_counts
    missing_kinds = {kind for kind in STRIKES if not event_counts[f"strike: {kind}"]}
    assert missing_kinds <= RARE if full else len(missing_kinds) < (1 - KINDS_SHARE_MIN) * len(STRIKES)
    for event in ("disk: sectors lost", "network: bytes lost by a reset", "machine: power cut"):
        assert event_counts[event] > 0, event
    assert summary.delta_count > 50 * summary.seed_count
