"""Shrinks plain data for as long as it still fails: fewer of everything first, then smaller numbers.

Pure and greedy: it removes parts, from large to small, until a full round removes nothing or the runs are
used up. It knows nothing of plans; `fails` tests if a proposal has the same failure.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

Plain: TypeAlias = "bool | int | float | str | list[Plain] | dict[str, Plain] | None"
Path: TypeAlias = tuple[str | int, ...]

RUNS_MAX = 300


@dataclass(slots=True)
class ShrinkResult:
    """The smallest data found, and the number of runs; `is_minimal`: no single step makes it smaller."""

    data: Plain
    runs: int = 0
    is_minimal: bool = False


def shrink(
    data: Plain,
    fails: Callable[[Plain], bool | None],
    *,
    runs_max: int = RUNS_MAX,
    fixed: Collection[str] = ("seed",),
) -> ShrinkResult:
    """Shrink `data`, which fails. `fails` returns None for an invalid proposal, which was not run. `fixed`:
    names of entries that stay as they are.
    """
    shrunk = ShrinkResult(data)
    while not shrunk.is_minimal:
        before = shrunk.data
        for step in (_shorten, _leave_out, _reduce_values):
            for proposal in step(shrunk, fixed):
                if shrunk.runs >= runs_max:
                    return shrunk
                failed = fails(proposal)
                shrunk.runs += failed is not None
                if failed:
                    shrunk.data = proposal
        shrunk.is_minimal = shrunk.data is before
    return shrunk


def size_of(data: Plain) -> int:
    """Return the size of the data, in bytes of JSON."""
    return len(json.dumps(data, separators=(",", ":")))


# --- steps: each yields a proposal, and checks `shrunk.data` afterwards to see if it was adopted


def _shorten(shrunk: ShrinkResult, fixed: Collection[str]) -> Iterator[Plain]:
    """Yield lists without some of their items: half of them, a quarter, … one; the largest list first."""
    paths = [path for path, part in _walk(shrunk.data, fixed) if isinstance(part, list) and part]
    paths.sort(key=lambda path: -size_of(_get_or_none(shrunk.data, path)))
    for path in paths:
        items = _list_at(shrunk.data, path)
        size = (len(items) + 1) // 2
        while size:
            at = 0
            while at < len(items):
                proposal = _replace_at(shrunk.data, path, items[:at] + items[at + size :])
                yield proposal
                if shrunk.data is not proposal:
                    at += size
                items = _list_at(shrunk.data, path)
            size //= 2


def _leave_out(shrunk: ShrinkResult, fixed: Collection[str]) -> Iterator[Plain]:
    """Yield mappings without one of their entries, which then takes its default."""
    for path in [path for path, _ in _walk(shrunk.data, fixed) if path and isinstance(path[-1], str)]:
        above = _get_or_none(shrunk.data, path[:-1])
        if isinstance(above, dict) and path[-1] in above:
            rest = {name: part for name, part in above.items() if name != path[-1]}
            yield _replace_at(shrunk.data, path[:-1], rest)


def _reduce_values(shrunk: ShrinkResult, fixed: Collection[str]) -> Iterator[Plain]:
    """Yield single values set to zero, or reduced."""
    for path in [path for path, part in _walk(shrunk.data, fixed) if not isinstance(part, list | dict)]:
        for less in _smaller_values(_get_or_none(shrunk.data, path)):
            proposal = _replace_at(shrunk.data, path, less)
            yield proposal
            if shrunk.data is proposal:
                break


def _smaller_values(value: Plain) -> list[Plain]:
    """Return candidates to replace a value, the least first."""
    if value is None or isinstance(value, str | list | dict):
        return []
    if isinstance(value, bool):
        return [False] if value else []
    parts: list[Plain] = [type(value)(0)]
    parts += [value // by if isinstance(value, int) else round(value / by, 3) for by in (8, 4, 2)]
    return [one for one in dict.fromkeys(parts) if one != value]


# --- plain data


def _walk(data: Plain, fixed: Collection[str], path: Path = ()) -> Iterator[tuple[Path, Plain]]:
    """Yield every part with its path, a container before its parts."""
    yield path, data
    if isinstance(data, dict):
        for name, part in data.items():
            if name not in fixed:
                yield from _walk(part, fixed, (*path, name))
    elif isinstance(data, list):
        for place, part in enumerate(data):
            yield from _walk(part, fixed, (*path, place))


def _get_or_none(data: Plain, path: Path) -> Plain:
    """Return the part at a path; None if it was removed with its container."""
    for step in path:
        try:
            data = data[step]  # type: ignore[index]
        except (LookupError, TypeError):
            return None
    return data


def _list_at(data: Plain, path: Path) -> list[Plain]:
    found = _get_or_none(data, path)
    return found if isinstance(found, list) else []


def _replace_at(data: Plain, path: Path, part: Plain) -> Plain:
    """Return a copy with another part at the path; it shares the parts beside the path."""
    if not path:
        return part
    step, rest = path[0], path[1:]
    if isinstance(data, dict):
        assert isinstance(step, str)
        return {**data, step: _replace_at(data[step], rest, part)}
    assert isinstance(data, list)
    assert isinstance(step, int)
    return [*data[:step], _replace_at(data[step], rest, part), *data[step + 1 :]]
