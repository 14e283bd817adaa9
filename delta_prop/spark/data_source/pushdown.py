"""Pushes some of Spark's filters down to the service: one equality, offsets, and partitions.

Results do not depend on it, as Spark applies every filter again. So filters that are not clearly safe are
ignored.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    LessThan,
    LessThanOrEqual,
)

from delta_prop_wire.errors import UsageError
from delta_prop_wire.topics import ALL, Topic

TOPICS_MAX = 256
"""Maximum number of topics in one subscription."""
_PREFIXES = {"vector_id": "v:", "namespace": "ns:", "op": "op:"}
"""Columns that topics select by, the most selective one first."""


@dataclass(frozen=True)
class ReadFilter:
    """A filter of reads: passes these topics, at offsets from `first` up to `end` (exclusive; None: all).

    `partitions`: passes only these partitions; None: all.
    """

    topics: tuple[Topic, ...]
    first: int = 0
    end: int | None = None
    partitions: frozenset[int] | None = None

    def passes(self, partition: int) -> bool:
        """True if rows of a partition may pass."""
        return self.partitions is None or partition in self.partitions

    def clip(self, start: int, end: int) -> tuple[int, int]:
        """Return the part of a range that passes the filter."""
        first = min(max(start, self.first), end)
        return first, max(min(end, end if self.end is None else self.end), first)


def narrow(current: ReadFilter, filters: Iterable[Filter]) -> ReadFilter:
    """Return `current` narrowed so that it still passes every row that passes all of `filters`."""
    topics_by_column: dict[str, tuple[Topic, ...]] = {}
    first, end, partitions = current.first, current.end, current.partitions
    for filter_ in filters:
        path: tuple[str, ...] = getattr(filter_, "attribute", ())  # a filter that wraps another has none
        column = path[0] if len(path) == 1 else ""
        if column == "offset":
            low, high = _offset_range_of(filter_)
            first = max(first, low)
            if high is not None:
                end = high if end is None else min(end, high)
        elif column == "partition":
            numbers = _numbers_of(filter_)
            if numbers is not None:
                partitions = numbers if partitions is None else partitions & numbers
        elif column in _PREFIXES:
            topics = _topics_of(_PREFIXES[column], filter_)
            if topics:
                topics_by_column.setdefault(column, topics)
    best = next(
        (topics_by_column[column] for column in _PREFIXES if column in topics_by_column), current.topics
    )
    # Topics are alternatives, so more topics would widen the choice of the user.
    topics = best if current.topics == (ALL,) else current.topics
    return replace(current, topics=topics, first=first, end=end, partitions=partitions)


def _offset_range_of(filter_: Filter) -> tuple[int, int | None]:
    """Return the first offset that passes, and the offset after the last one that does (None: no bound)."""
    match filter_:
        case EqualTo(value=int(offset)) | EqualNullSafe(value=int(offset)):
            return offset, offset + 1
        case GreaterThan(value=int(offset)):
            return offset + 1, None
        case GreaterThanOrEqual(value=int(offset)):
            return offset, None
        case LessThan(value=int(offset)):
            return 0, offset
        case LessThanOrEqual(value=int(offset)):
            return 0, offset + 1
    return 0, None


def _numbers_of(filter_: Filter) -> frozenset[int] | None:
    """Return the partitions that pass; None if the filter does not list them."""
    match filter_:
        case EqualTo(value=int(number)) | EqualNullSafe(value=int(number)):
            return frozenset([number])
        case In(value=values) if all(isinstance(value, int) for value in values):
            return frozenset(values)
    return None


def _topics_of(prefix: str, filter_: Filter) -> tuple[Topic, ...]:
    """Return the topics of the values that pass; none if the filter cannot be expressed by topics."""
    match filter_:
        case EqualTo(value=value) | EqualNullSafe(value=value):
            values: tuple[Any, ...] = (value,)
        case In(value=value):
            values = tuple(value)
        case _:
            return ()
    if not 1 <= len(values) <= TOPICS_MAX or not all(isinstance(value, str) for value in values):
        return ()
    try:
        return tuple(Topic.parse(prefix + value) for value in values)
    except UsageError:  # an invalid name: Spark finds that no row passes
        return ()
