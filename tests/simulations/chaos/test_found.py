"""Bugs the simulation found: they stay fixed, and their plans find them again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from delta_prop_simulations.chaos.chaos_run import run
from delta_prop_simulations.chaos.mutants import Mutant, apply_mutant
from delta_prop_simulations.chaos.regressions import DESCRIPTIONS, SEEDS, plan_of
from delta_prop_simulations.chaos.regressions.reverted_fixes import REVERTED_FIXES

SEEDS_MAX = 100
"""Most seeds tried per plan: a strike must hit the right moment, which changes of the code shift."""
KEPT_WHOLE_BY_OTHERS = {"forwarder-not-told-of-a-loss", "queued-before-a-hello"}
"""Plans that later mends keep whole as well: what they send or tell is kept first; a repeat in other bytes is
compared by its rows.
"""


@pytest.mark.parametrize("name", [*DESCRIPTIONS, *(f"seed-{seed}" for seed in SEEDS)])
def test_what_was_found_is_mended(name: str) -> None:
    outcome = run(plan_of(name))
    assert outcome.violation is None
    assert outcome.deltas


@pytest.mark.parametrize("undone", REVERTED_FIXES, ids=[one.name for one in REVERTED_FIXES])
def test_without_its_mend_it_is_found_again(undone: Mutant) -> None:
    plan = plan_of(undone.name)
    for seed in (plan.seed, *range(SEEDS_MAX)):
        with apply_mutant(undone) as strikes:
            outcome = run(replace(plan, seed=seed))
        if outcome.violation is not None and strikes.count:
            return
    pytest.fail(f"{undone.name}: its plan finds it with none of {SEEDS_MAX} seeds")


def test_each_has_a_story_and_a_mend() -> None:
    undone = {one.name for one in REVERTED_FIXES}
    assert undone | KEPT_WHOLE_BY_OTHERS == set(DESCRIPTIONS)
    assert not undone & KEPT_WHOLE_BY_OTHERS
