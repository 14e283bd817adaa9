"""Which of Spark's filters the service can look at, so that it sends less: one equality, and offsets.

Nothing depends on it: Spark looks at every filter again. So whatever is not plainly safe is left to it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    LessThan,
    LessThanOrEqual,
)

from delta_prop_wire.errors import UsageError
from delta_prop_wire.topics import ALL, Topic

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pyspark.sql.datasource import Filter

VALUES_MAX = 256
"""Topics of one subscription."""
_PREFIXES = {"vector_id": "v:", "namespace": "ns:", "op": "op:"}
"""Columns that a topic asks for, the one first that leaves out most."""


@dataclass(frozen=True)
class Narrowed:
    """What is read: these topics, offsets from `first` up to `end`."""

    topics: tuple[Topic, ...]
    first: int = 0
    end: int | None = None

    def within(self, start: int, end: int) -> tuple[int, int]:
        """Of a range what is left of it."""
        first = min(max(start, self.first), end)
        return first, max(min(end, end if self.end is None else self.end), first)


def narrowed(before: Narrowed, filters: Iterable[Filter]) -> Narrowed:
    """What is to be read so that all rows come that pass all of these filters."""
    asked: dict[str, tuple[Topic, ...]] = {}
    first, end = before.first, before.end
    for one in filters:
        path: tuple[str, ...] = getattr(one, "attribute", ())  # what wraps another filter has none
        column = path[0] if len(path) == 1 else ""
        if column == "offset":
            low, high = _offsets(one)
            first = max(first, low)
            end = high if end is None else end if high is None else min(end, high)
        elif column in _PREFIXES:
            topics = _topics(_PREFIXES[column], one)
            if topics:
                asked.setdefault(column, topics)
    best = next((asked[column] for column in _PREFIXES if column in asked), before.topics)
    # Topics add to each other: those that the user named would be widened.
    return replace(before, topics=best if before.topics == (ALL,) else before.topics, first=first, end=end)


def _offsets(one: Filter) -> tuple[int, int | None]:
    """The first offset that passes, and the one behind the last."""
    match one:
        case EqualTo(value=int(at)) | EqualNullSafe(value=int(at)):
            return at, at + 1
        case GreaterThan(value=int(at)):
            return at + 1, None
        case GreaterThanOrEqual(value=int(at)):
            return at, None
        case LessThan(value=int(at)):
            return 0, at
        case LessThanOrEqual(value=int(at)):
            return 0, at + 1
    return 0, None


def _topics(prefix: str, one: Filter) -> tuple[Topic, ...]:
    match one:
        case EqualTo(value=value) | EqualNullSafe(value=value):
            values: tuple[Any, ...] = (value,)
        case In(value=value):
            values = tuple(value)
        case _:
            return ()
    if not 1 <= len(values) <= VALUES_MAX or not all(isinstance(value, str) for value in values):
        return ()
    try:
        return tuple(Topic.parse(prefix + value) for value in values)
    except UsageError:  # no name of ours: Spark finds that no row passes
        return ()
