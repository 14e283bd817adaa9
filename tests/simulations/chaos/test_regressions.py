"""Bugs that the simulation found stay fixed, and their plans find them if the fix is reverted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from delta_prop_simulations.chaos.chaos_run import run
from delta_prop_simulations.chaos.mutants.mutant import Mutant, apply_mutant
from delta_prop_simulations.chaos.regressions import DESCRIPTIONS, REVERTED_FIXES, SEEDS, plan_of

SEEDS_MAX = 100
"""Maximum seeds per plan: a strike must hit the right moment, which changes of the code shift."""
FINDING_SEEDS = {"judged-too-early": 35}
"""Seeds that are tried before the plan's: those of the plans no longer find the bugs."""
COVERED_BY_LATER_FIXES = {"forwarder-not-notified-of-a-loss", "queued-before-a-hello"}
"""Plans whose bug later fixes prevent, too: data are stored before they are sent or reported, and a duplicate
in other bytes is compared by its rows.
"""


@pytest.mark.parametrize("name", [*DESCRIPTIONS, *(f"seed-{seed}" for seed in SEEDS)])
def test_plan_of_fixed_bug_finds_no_violation(name: str) -> None:
    outcome = run(plan_of(name))
    assert outcome.violation is None
    assert outcome.delta_count


@pytest.mark.parametrize("reverted", REVERTED_FIXES, ids=[fix.name for fix in REVERTED_FIXES])
def test_reverted_fix_is_found_by_its_plan(reverted: Mutant) -> None:
    plan = plan_of(reverted.name)
    for seed in (FINDING_SEEDS.get(reverted.name, plan.seed), plan.seed, *range(SEEDS_MAX)):
        with apply_mutant(reverted) as calls:
            outcome = run(replace(plan, seed=seed))
        if outcome.violation is not None and calls.count:
            return
    pytest.fail(f"{reverted.name}: the plan should find it with one of {SEEDS_MAX} seeds")


def test_each_bug_has_a_description_and_a_fix() -> None:
    reverted = {fix.name for fix in REVERTED_FIXES}
    assert reverted | COVERED_BY_LATER_FIXES == set(DESCRIPTIONS)
    assert not reverted & COVERED_BY_LATER_FIXES
