"""Makes plain data smaller for as long as it still fails: fewer of everything first, then smaller numbers.

Pure and greedy: what may go goes, from large parts to small ones, until a whole round brings nothing or the
runs are used up. It knows nothing of plans; `fails` says of each proposal whether it is the same failure.
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
class Shrunk:
    """The smallest that was found, and how many runs that took; `whole`: no single step makes it smaller."""

    data: Plain
    runs: int = 0
    whole: bool = False


def shrink(
    data: Plain,
    fails: Callable[[Plain], bool | None],
    *,
    runs_max: int = RUNS_MAX,
    kept: Collection[str] = ("seed",),
) -> Shrunk:
    """Make `data`, which fails, smaller. `fails` gives None for what means nothing and was not run. `kept`:
    entries of these names stay as they are.
    """
    shrunk = Shrunk(data)
    while not shrunk.whole:
        before = shrunk.data
        for step in (_shorten, _leave_out, _lessen):
            for proposal in step(shrunk, kept):
                if shrunk.runs >= runs_max:
                    return shrunk
                failed = fails(proposal)
                shrunk.runs += failed is not None
                if failed:
                    shrunk.data = proposal
        shrunk.whole = shrunk.data is before
    return shrunk


def size_of(data: Plain) -> int:
    """How large it is, in bytes of JSON."""
    return len(json.dumps(data, separators=(",", ":")))


# --- steps: each yields a proposal, and looks at `shrunk.data` afterwards to see whether it was taken


def _shorten(shrunk: Shrunk, kept: Collection[str]) -> Iterator[Plain]:
    """Lists without some of their items: half of them, a quarter, … one; the largest list first."""
    paths = [path for path, part in _walk(shrunk.data, kept) if isinstance(part, list) and part]
    paths.sort(key=lambda path: -size_of(_at_or_none(shrunk.data, path)))
    for path in paths:
        items = _list_at(shrunk.data, path)
        size = (len(items) + 1) // 2
        while size:
            at = 0
            while at < len(items):
                proposal = _with(shrunk.data, path, items[:at] + items[at + size :])
                yield proposal
                if shrunk.data is not proposal:
                    at += size
                items = _list_at(shrunk.data, path)
            size //= 2


def _leave_out(shrunk: Shrunk, kept: Collection[str]) -> Iterator[Plain]:
    """Mappings without one of their entries: what is said by default then."""
    for path in [path for path, _ in _walk(shrunk.data, kept) if path and isinstance(path[-1], str)]:
        above = _at_or_none(shrunk.data, path[:-1])
        if isinstance(above, dict) and path[-1] in above:
            rest = {name: part for name, part in above.items() if name != path[-1]}
            yield _with(shrunk.data, path[:-1], rest)


def _lessen(shrunk: Shrunk, kept: Collection[str]) -> Iterator[Plain]:
    """Single values made nothing, or less, as far as that goes."""
    for path in [path for path, part in _walk(shrunk.data, kept) if not isinstance(part, list | dict)]:
        for less in _less_than(_at_or_none(shrunk.data, path)):
            proposal = _with(shrunk.data, path, less)
            yield proposal
            if shrunk.data is proposal:
                break


def _less_than(value: Plain) -> list[Plain]:
    """What may stand for a value, the least first."""
    if value is None or isinstance(value, str | list | dict):
        return []
    if isinstance(value, bool):
        return [False] if value else []
    parts: list[Plain] = [type(value)(0)]
    parts += [value // by if isinstance(value, int) else round(value / by, 3) for by in (8, 4, 2)]
    return [one for one in dict.fromkeys(parts) if one != value]


# --- plain data


def _walk(data: Plain, kept: Collection[str], path: Path = ()) -> Iterator[tuple[Path, Plain]]:
    """Every part, what holds it first."""
    yield path, data
    if isinstance(data, dict):
        for name, part in data.items():
            if name not in kept:
                yield from _walk(part, kept, (*path, name))
    elif isinstance(data, list):
        for place, part in enumerate(data):
            yield from _walk(part, kept, (*path, place))


def _at_or_none(data: Plain, path: Path) -> Plain:
    """What is there; None where it went with what held it."""
    for step in path:
        try:
            data = data[step]  # type: ignore[index]
        except (LookupError, TypeError):
            return None
    return data


def _list_at(data: Plain, path: Path) -> list[Plain]:
    found = _at_or_none(data, path)
    return found if isinstance(found, list) else []


def _with(data: Plain, path: Path, part: Plain) -> Plain:
    """A copy with another part there; what is not on the way to it is shared."""
    if not path:
        return part
    step, rest = path[0], path[1:]
    if isinstance(data, dict):
        assert isinstance(step, str)
        return {**data, step: _with(data[step], rest, part)}
    assert isinstance(data, list)
    assert isinstance(step, int)
    return [*data[:step], _with(data[step], rest, part), *data[step + 1 :]]
