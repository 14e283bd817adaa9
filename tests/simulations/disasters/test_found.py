"""What the simulation found once stays mended, and its plans would find it again."""

from __future__ import annotations

import pytest

from delta_prop_simulations.disasters.found import STORIES, plan_of
from delta_prop_simulations.disasters.found.undone import UNDONE
from delta_prop_simulations.disasters.mutants import applied
from delta_prop_simulations.disasters.story import run

QUICK = "leap-over-another-lane"


@pytest.mark.parametrize("name", STORIES)
def test_what_was_found_is_mended(name: str) -> None:
    outcome = run(plan_of(name))
    assert outcome.violation is None
    assert outcome.deltas


def test_without_its_mend_it_is_found_again(full: bool) -> None:
    tried = [one for one in UNDONE if full or one.name == QUICK]
    print(f"{len(tried)} of {len(UNDONE)} mends taken back")
    for undone in tried:
        with applied(undone) as strikes:
            outcome = run(plan_of(undone.name))
        assert outcome.violation is not None, undone.name
        assert strikes.count, undone.name


def test_each_has_a_story_and_a_mend() -> None:
    assert list(STORIES) == [one.name for one in UNDONE]
