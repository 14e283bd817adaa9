"""Plans: the same for a seed, whole through JSON, and all of them together strike with everything."""

from __future__ import annotations

from collections import Counter

import pytest

from delta_prop_simulations.disasters.drawing import draw
from delta_prop_simulations.disasters.plan import STRIKES, Plan
from delta_prop_wire.errors import UsageError

MANY = 300


def test_a_plan_is_the_same_for_its_seed_and_through_json() -> None:
    for number in range(50):
        plan = draw(number)
        assert plan == draw(number)
        assert Plan.from_json(plan.to_json()) == plan
    assert draw(1) != draw(2)


def test_many_plans_have_everything_and_each_leaves_most_out() -> None:
    plans = [draw(number) for number in range(MANY)]
    kinds = Counter(strike.kind for plan in plans for strike in plan.strikes)
    assert kinds.keys() == STRIKES.keys()
    assert max(len({strike.kind for strike in plan.strikes}) for plan in plans) < len(STRIKES) * 0.6
    assert {len(plan.nodes) for plan in plans} == {1, 2, 3}
    assert {plan.nodes[0].log is None for plan in plans} == {True, False}
    sinks = {sink.kind for plan in plans for node in plan.nodes for sink in node.sinks}
    assert sinks == {"transactional", "plain", "volatile", "rebuildable", "cache", "index"}
    assert {writer.embedded for plan in plans for writer in plan.writers} == {True, False}


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"seed": 1, "nodes": [{}], "writers": []}'])
def test_what_is_no_plan_is_told(text: str) -> None:
    with pytest.raises(UsageError, match="no plan"):
        Plan.from_json(text)
