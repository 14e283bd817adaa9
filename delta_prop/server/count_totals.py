"""Totals over all partitions since the start, also over those that have closed. Pure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol, Self, TypeVar

if TYPE_CHECKING:
    from delta_prop.api.propagator import Propagator
    from delta_prop.api.statistics import Statistics
    from delta_prop.server.server_context import JobCounts


@dataclass(slots=True)
class DeltaCounts:
    """Counts of deltas since the start, of a partition or of all. From `queue_full` on: refusals."""

    accepted: int = 0
    duplicates: int = 0
    noops: int = 0
    refused: int = 0
    concurrent_updates: int = 0
    queue_full: int = 0
    pending_full: int = 0
    pending_timeouts: int = 0

    @classmethod
    def of(cls, statistics: Statistics) -> DeltaCounts:
        """Return the counts of a partition."""
        return cls(
            accepted=statistics.accepted,
            duplicates=statistics.duplicates,
            noops=statistics.noops,
            refused=statistics.refused,
            concurrent_updates=statistics.concurrent_updates,
            queue_full=statistics.queue.refused_full,
            pending_full=statistics.pending.refused_full,
            pending_timeouts=statistics.pending.refused_timeout,
        )

    def add(self, other: DeltaCounts) -> None:
        """Add the counts of another partition."""
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))


class _Counts(Protocol):
    """Counts that can be added up."""

    def add(self, other: Self, /) -> None:
        """Add other counts."""


SourceT = TypeVar("SourceT")
CountsT = TypeVar("CountsT", bound=_Counts)


class _CountTotals(ABC, Generic[SourceT, CountsT]):
    """Adds up the counts of sources that come and go, such as partitions; a total never falls.

    A source that goes may count for another moment, so its last counts are read at the second `settle` after
    it went; it is held until then.
    """

    def __init__(self, zero: CountsT) -> None:
        """`zero`: the counts of no source; this object changes them."""
        self._closed = zero
        self._seen: dict[int, SourceT] = {}
        self._leaving: set[int] = set()

    def note(self, present: Iterable[SourceT]) -> None:
        """Take note of the present sources; to be called before one goes."""
        self._seen |= {id(source): source for source in present}

    def settle(self, present: Sequence[SourceT]) -> None:
        """Keep the counts of sources that went before the last call, and let go of these."""
        self.note(present)
        absent = self._seen.keys() - {id(source) for source in present}
        for key in absent & self._leaving:
            self._closed.add(self._count(self._seen.pop(key)))
        self._leaving = absent - self._leaving

    def total(self, present: Iterable[SourceT]) -> CountsT:
        """Return the counts of all sources so far."""
        self.note(present)
        total = copy(self._closed)
        for source in self._seen.values():
            total.add(self._count(source))
        return total

    @abstractmethod
    def _count(self, source: SourceT) -> CountsT:
        """Return the counts of a source."""


class DeltaTotals(_CountTotals["Propagator", DeltaCounts]):
    """Totals of deltas."""

    def _count(self, source: Propagator) -> DeltaCounts:
        return DeltaCounts.of(source.statistics())


class JobTotals(_CountTotals["JobCounts", "JobCounts"]):
    """Totals of jobs, whose counts are their own sources."""

    def _count(self, source: JobCounts) -> JobCounts:
        return source


class Totals(NamedTuple):
    """The totals of one server."""

    deltas: DeltaTotals
    jobs: JobTotals
