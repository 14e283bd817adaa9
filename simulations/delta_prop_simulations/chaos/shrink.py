"""Shrinks a plan, or other JSON data, while it still fails: first removes parts, then reduces numbers.

It is greedy: it removes parts, large ones first, until a full round changes nothing or the allowed runs are
used up. `shrink` does not know plans; `fails` tests whether a proposal still has the same failure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from delta_prop_simulations.chaos.chaos_run import run
from delta_prop_simulations.chaos.plan import Plan, check_plan
from delta_prop_simulations.chaos.violation import Violation
from delta_prop_wire.errors import UsageError

JsonValue: TypeAlias = "bool | int | float | str | list[JsonValue] | dict[str, JsonValue] | None"
Path: TypeAlias = tuple[str | int, ...]

RUNS_MAX = 300


@dataclass(slots=True)
class ShrinkResult:
    """The smallest data found, and the runs. `is_minimal`: no single step makes it smaller."""

    data: JsonValue
    run_count: int = 0
    is_minimal: bool = False


def shrink(
    data: JsonValue,
    fails: Callable[[JsonValue], bool | None],
    *,
    runs_max: int = RUNS_MAX,
    fixed: Collection[str] = ("seed",),
) -> ShrinkResult:
    """Shrink `data`, which fails. `fails` returns None for an invalid proposal, which then does not count as
    a run. `fixed`: names of entries that must not change.
    """
    shrunk = ShrinkResult(data)
    while not shrunk.is_minimal:
        before = shrunk.data
        for step in (_shorten, _leave_out, _reduce_values):
            for proposal in step(shrunk, fixed):
                if shrunk.run_count >= runs_max:
                    return shrunk
                failed = fails(proposal)
                shrunk.run_count += failed is not None
                if failed:
                    shrunk.data = proposal
        shrunk.is_minimal = shrunk.data is before
    return shrunk


def size_of(data: JsonValue) -> int:
    """Return the size of the data, in bytes of JSON."""
    return len(json.dumps(data, separators=(",", ":")))


# --- steps: each yields a proposal; then `shrunk.data` shows whether the proposal was adopted


def _shorten(shrunk: ShrinkResult, fixed: Collection[str]) -> Iterator[JsonValue]:
    """Yield proposals with a shorter list, the largest first: without half of its items, a quarter, … one."""
    paths = [path for path, part in _walk(shrunk.data, fixed) if isinstance(part, list) and part]
    paths.sort(key=lambda path: -size_of(_get_or_none(shrunk.data, path)))
    for path in paths:
        items = _list_at(shrunk.data, path)
        size = (len(items) + 1) // 2
        while size:
            start = 0
            while start < len(items):
                proposal = _replace_at(shrunk.data, path, items[:start] + items[start + size :])
                yield proposal
                if shrunk.data is not proposal:
                    start += size
                items = _list_at(shrunk.data, path)
            size //= 2


def _leave_out(shrunk: ShrinkResult, fixed: Collection[str]) -> Iterator[JsonValue]:
    """Yield proposals without one entry of a mapping; the entry then has its default."""
    for path in [path for path, _ in _walk(shrunk.data, fixed) if path and isinstance(path[-1], str)]:
        parent = _get_or_none(shrunk.data, path[:-1])
        if isinstance(parent, dict) and path[-1] in parent:
            rest = {name: part for name, part in parent.items() if name != path[-1]}
            yield _replace_at(shrunk.data, path[:-1], rest)


def _reduce_values(shrunk: ShrinkResult, fixed: Collection[str]) -> Iterator[JsonValue]:
    for path in [path for path, part in _walk(shrunk.data, fixed) if not isinstance(part, list | dict)]:
        for smaller in _smaller_values(_get_or_none(shrunk.data, path)):
            proposal = _replace_at(shrunk.data, path, smaller)
            yield proposal
            if shrunk.data is proposal:
                break


def _smaller_values(value: JsonValue) -> list[JsonValue]:
    """Return candidates to replace a value, the smallest first."""
    if value is None or isinstance(value, str | list | dict):
        return []
    if isinstance(value, bool):
        return [False] if value else []
    candidates: list[JsonValue] = [type(value)(0)]
    candidates += [value // by if isinstance(value, int) else round(value / by, 3) for by in (8, 4, 2)]
    return [candidate for candidate in dict.fromkeys(candidates) if candidate != value]


def _walk(data: JsonValue, fixed: Collection[str], path: Path = ()) -> Iterator[tuple[Path, JsonValue]]:
    """Yield every part with its path, a container before its parts."""
    yield path, data
    if isinstance(data, dict):
        for name, part in data.items():
            if name not in fixed:
                yield from _walk(part, fixed, (*path, name))
    elif isinstance(data, list):
        for index, part in enumerate(data):
            yield from _walk(part, fixed, (*path, index))


def _get_or_none(data: JsonValue, path: Path) -> JsonValue:
    """Return the part at a path; None if it was removed with its container."""
    for step in path:
        try:
            data = data[step]  # type: ignore[index]
        except (LookupError, TypeError):
            return None
    return data


def _list_at(data: JsonValue, path: Path) -> list[JsonValue]:
    part = _get_or_none(data, path)
    return part if isinstance(part, list) else []


def _replace_at(data: JsonValue, path: Path, part: JsonValue) -> JsonValue:
    """Return a copy with `part` at the path; the copy shares all other parts with the original."""
    if not path:
        return part
    step, rest = path[0], path[1:]
    if isinstance(data, dict):
        assert isinstance(step, str)
        return {**data, step: _replace_at(data[step], rest, part)}
    assert isinstance(data, list)
    assert isinstance(step, int)
    return [*data[:step], _replace_at(data[step], rest, part), *data[step + 1 :]]


_ERROR = re.compile(r"\b([A-Z]\w+): ")
"""Finds the types of the errors in the evidence of a crash."""


def shrink_plan(
    plan: Plan,
    violation: Violation,
    *,
    runs_max: int = RUNS_MAX,
    report: Callable[[int, Plan], None] = lambda runs, plan: None,
) -> Plan:
    """Shrink the plan of a run that found `violation`; `report` gets the runs so far and the smaller plan."""
    run_count = 0

    def fails(data: JsonValue) -> bool | None:
        nonlocal run_count
        try:
            proposal = Plan.from_json(json.dumps(data))
            check_plan(proposal)
        except UsageError:
            return None
        run_count += 1
        proposal_violation = run(proposal).violation
        if proposal_violation is None or not is_same_violation(proposal_violation, violation):
            return False
        report(run_count, proposal)
        return True

    shrunk = shrink(
        json.loads(plan.to_json()), fails, runs_max=runs_max, fixed=("seed", "name", "node", "on")
    )
    return Plan.from_json(json.dumps(shrunk.data))


def is_same_violation(one: Violation, other: Violation) -> bool:
    """True if two violations are of the same check; two crashes must also have the same error type."""
    if one.check != other.check:
        return False
    return one.check != "crash" or _ERROR.findall(one.what)[:1] == _ERROR.findall(other.what)[:1]
