"""What the simulation found once stays mended, and its plans would find it again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from delta_prop_simulations.disasters.found import SEEDS, STORIES, plan_of
from delta_prop_simulations.disasters.found.undone import UNDONE
from delta_prop_simulations.disasters.mutants import Mutant, applied
from delta_prop_simulations.disasters.story import run

SEEDS_MAX = 100
"""What strikes at the right moment is chance: where the code has changed, another seed of a plan may do."""
KEPT_WHOLE_BY_OTHERS = {"forwarder-not-told-of-a-loss", "queued-before-a-hello"}
"""Plans that later mends keep whole as well: what they send or tell is kept first; a repeat in other bytes is
compared by its rows.
"""


@pytest.mark.parametrize("name", [*STORIES, *(f"seed-{seed}" for seed in SEEDS)])
def test_what_was_found_is_mended(name: str) -> None:
    outcome = run(plan_of(name))
    assert outcome.violation is None
    assert outcome.deltas


@pytest.mark.parametrize("undone", UNDONE, ids=[one.name for one in UNDONE])
def test_without_its_mend_it_is_found_again(undone: Mutant) -> None:
    plan = plan_of(undone.name)
    for seed in (plan.seed, *range(SEEDS_MAX)):
        with applied(undone) as strikes:
            outcome = run(replace(plan, seed=seed))
        if outcome.violation is not None and strikes.count:
            return
    pytest.fail(f"{undone.name}: its plan finds it with none of {SEEDS_MAX} seeds")


def test_each_has_a_story_and_a_mend() -> None:
    undone = {one.name for one in UNDONE}
    assert undone | KEPT_WHOLE_BY_OTHERS == set(STORIES)
    assert not undone & KEPT_WHOLE_BY_OTHERS
