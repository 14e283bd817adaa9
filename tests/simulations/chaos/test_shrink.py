"""Failing plans are shrunk as far as the failure allows, within the allowed runs."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from delta_prop_simulations.chaos.shrink import shrink, size_of

PLAN: dict[str, Any] = {
    "seed": 4711,
    "nodes": [{"name": "a", "log": {"bytes_max": 4096, "compact": True}}, {"name": "b", "log": None}],
    "strikes": [{"at_s": float(second), "kind": "kill" if second == 7 else "cut"} for second in range(20)],
    "duration_s": 64.0,
}


def kinds(plan: Any) -> list[Any]:
    return [strike.get("kind") for strike in plan.get("strikes", ())]


def test_shrinking_keeps_only_what_the_failure_needs() -> None:
    shrunk = shrink(PLAN, lambda plan: "kill" in kinds(plan))
    assert shrunk.data == {"seed": 4711, "strikes": [{"kind": "kill"}]}
    assert shrunk.is_minimal


def test_two_items_needed_together_both_remain() -> None:
    plan = {"seed": 1, "strikes": list(range(40))}
    shrunk = shrink(plan, lambda candidate: {3, 31} <= set(candidate.get("strikes", ())))
    assert shrunk.data == {"seed": 1, "strikes": [3, 31]}


def test_numbers_shrink_while_the_plan_still_fails() -> None:
    shrunk = shrink(
        {"deltas": 400, "gap_s": 8.0, "on": True}, lambda candidate: candidate.get("deltas", 0) >= 30
    )
    assert shrunk.data == {"deltas": 50}


def test_invalid_candidates_are_neither_counted_nor_used() -> None:
    candidates = []

    def fails(candidate: Any) -> bool | None:
        candidates.append(candidate)
        return None if "name" not in candidate else True

    shrunk = shrink({"name": "a", "size": 3}, fails)
    assert shrunk.data == {"name": "a"}
    assert shrunk.run_count == 1
    assert len(candidates) > shrunk.run_count


def test_shrinking_stops_after_maximum_runs() -> None:
    runs = []
    shrunk = shrink(PLAN, lambda plan: runs.append(plan) or False, runs_max=7)
    assert (len(runs), shrunk.run_count, shrunk.is_minimal) == (7, 7, False)
    assert shrunk.data is PLAN


@given(st.lists(st.integers(0, 50), max_size=12), st.integers(0, 50))
def test_shrunk_plan_still_fails_and_is_never_larger(items: list[int], needed: int) -> None:
    def fails(plan: Any) -> bool:
        return needed in plan.get("items", ())

    plan: Any = {"seed": 1, "items": [*items, needed]}
    shrunk = shrink(plan, fails, runs_max=1_000)
    assert fails(shrunk.data)
    assert shrunk.data == {"seed": 1, "items": [needed]}
    assert size_of(shrunk.data) <= size_of(plan)
