"""Plans: equal for equal seeds, unchanged by JSON, and together covering every kind of strike."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from delta_prop_simulations.chaos.plan import STRIKES, Plan, check_plan
from delta_prop_simulations.chaos.plan_generator import draw
from delta_prop_wire.errors import UsageError

SEED_COUNT = 300


def test_plan_depends_on_seed_and_round_trips_through_json() -> None:
    for number in range(50):
        plan = draw(number)
        assert plan == draw(number)
        assert Plan.from_json(plan.to_json()) == plan
    assert draw(1) != draw(2)


def test_plans_cover_every_kind_only_together() -> None:
    plans = [draw(number) for number in range(SEED_COUNT)]
    kinds = Counter(strike.kind for plan in plans for strike in plan.strikes)
    assert kinds.keys() == STRIKES.keys()
    assert max(len({strike.kind for strike in plan.strikes}) for plan in plans) < len(STRIKES) * 0.6
    assert {len(plan.nodes) for plan in plans} == {1, 2, 3}
    assert {plan.nodes[0].log is None for plan in plans} == {True, False}
    sinks = {sink.kind for plan in plans for node in plan.nodes for sink in node.sinks}
    assert sinks == {"transactional", "plain", "volatile", "rebuildable", "cache", "index"}
    assert {writer.embedded for plan in plans for writer in plan.writers} == {True, False}


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"seed": 1, "nodes": [{}], "writers": []}'])
def test_invalid_plan_text_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="plan is not valid"):
        Plan.from_json(text)


def test_drawn_plans_are_valid() -> None:
    for number in range(SEED_COUNT):
        check_plan(draw(number))


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("duration_s",), -5, "duration_s = -5: give 0.1 to 600"),
        (("duration_s",), "long", "duration_s = 'long'"),
        (("duration_s",), float("nan"), "duration_s = nan"),
        (("nodes",), [], "nodes: there are 0: give 1 to 8"),
        (("nodes", 0, "forward_to"), ["nobody"], "forward_to = 'nobody'"),
        (("nodes", 0, "sinks", 0, "kind"), "odd", "kind = 'odd': give one of transactional"),
        (("writers", 0, "deltas"), -3, "writers.0..deltas = -3"),
        (("writers", 0, "node"), "nobody", "writers.0..node = 'nobody'"),
        (("writers", 0, "name"), "node-0", "host name 'node-0': used for two hosts"),
        (("strikes", 0, "kind"), "meteor", "strikes.0..kind = 'meteor': give one of kill"),
        (("strikes", 0, "at_s"), -1, "strikes.0..at_s = -1"),
        (("strikes", 0, "on"), "nobody", "strikes.0..on = 'nobody'"),
    ],
)
def test_invalid_plan_value_is_refused_with_its_path(
    path: tuple[str | int, ...], value: object, message: str
) -> None:
    data: Any = json.loads(draw(3).to_json())
    container = data
    for key in path[:-1]:
        container = container[key]
    container[path[-1]] = value
    with pytest.raises(UsageError, match=message):
        check_plan(Plan.from_json(json.dumps(data)))
