"""Dependency indexes: from a missing dot or id to the entries that wait for it.

The indexes answer three queries: which entries a delivery completes (nothing is missing for them any more),
which entries depend on a delta, and whether any entry waits for a delta. No operation iterates over all
pending entries.

The heaps hold (counter, ticket) and are cleaned lazily: a ticket whose entry is no longer pending is skipped,
and a mostly stale heap is rebuilt, so the number of pending entries bounds its length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from delta_prop.partition.order.pending import Entry

T = TypeVar("T", int, tuple[int, int])

STALE_MAX = 64
"""Maximum number of stale items in an origin's indexes, in addition to three per item in use."""


class LazyHeap(Generic[T]):
    """A heap with cheap appends and rare reads: appended items are in `fresh` until `heap` is called."""

    __slots__ = ("_heap", "append", "fresh")

    def __init__(self) -> None:
        self._heap: list[T] = []
        self.fresh: list[T] = []
        self.append: Callable[[T], None] = self.fresh.append

    def __len__(self) -> int:
        return len(self._heap) + len(self.fresh)

    def heap(self) -> list[T]:
        """Return all items as a heap, to pop from."""
        if self.fresh:
            for item in self.fresh:
                heappush(self._heap, item)
            self.fresh.clear()
        return self._heap

    def rebuild(self, items: Iterable[T]) -> None:
        """Replace all items."""
        self.fresh.clear()
        self._heap = list(items)
        heapify(self._heap)


class OriginWaiters:
    """The runs of one origin that are pending, and the entries that wait for its deltas."""

    __slots__ = ("added", "dependents", "foreign", "live_foreign", "runs", "starts")

    def __init__(self) -> None:
        self.runs: dict[int, Entry] = {}  # the origin's own pending runs, by the counter before each
        self.starts: LazyHeap[int] = LazyHeap()  # the keys of `runs`, to find overtaken runs
        # Entries of other origins that wait for this one, as (missing counter, ticket): a heap, lowest
        # counter first, to find completed entries.
        self.foreign: list[tuple[int, int]] = []
        # These entries and own runs, as (negative missing counter, ticket), to find dependents of a delta.
        self.dependents: LazyHeap[tuple[int, int]] = LazyHeap()
        self.live_foreign = 0  # items of `foreign` that are not stale
        self.added = 0  # items added to the three heaps since their last rebuild


class Waiters:
    """The indexes of all origins and ids. `entries`: the pending entries by ticket, only read here."""

    def __init__(self, entries: Mapping[int, Entry], watermarks: Mapping[int, int]) -> None:
        self._entries = entries
        self._watermarks = watermarks
        self._origins: dict[int, OriginWaiters] = {}
        self._ids: dict[bytes, set[int]] = {}

    @property
    def origin_count(self) -> int:
        """Number of origins that have pending entries, or that entries wait for."""
        return len(self._origins)

    @property
    def id_count(self) -> int:
        """Number of ids that entries wait for."""
        return len(self._ids)

    @property
    def index_length(self) -> int:
        """Number of items in all indexes, including stale ones."""
        return sum(map(len, self._ids.values())) + sum(
            len(w.runs) + len(w.starts) + len(w.foreign) + len(w.dependents) for w in self._origins.values()
        )

    def find_run(self, origin: int, previous: int) -> Entry | None:
        """Return the pending run of this origin that follows this counter; None if there is none."""
        waiters = self._origins.get(origin)
        return None if waiters is None else waiters.runs.get(previous)

    def find_runs(self, origin: int) -> list[Entry]:
        """Return all pending runs of an origin, in order of their counters."""
        waiters = self._origins.get(origin)
        return [] if waiters is None else [waiters.runs[previous] for previous in sorted(waiters.runs)]

    def add(self, entry: Entry) -> None:
        """Index a pending entry by `previous` and by its missing dependencies, and count the latter."""
        origin, previous = entry.origin, entry.previous
        waiters = self._origins.get(origin)
        if waiters is None:
            waiters = self._origins[origin] = OriginWaiters()
        assert previous not in waiters.runs, "a run after this counter is already pending"
        waiters.runs[previous] = entry
        waiters.starts.append(previous)
        waiters.added += 2
        if self._watermarks.get(origin, 0) < previous:
            entry.missing_count = 1
            waiters.dependents.append((-previous, entry.ticket))
        else:
            entry.missing_count = 0
        if entry.missing_counters or entry.missing_ids:
            self._add_missing(entry)

    def discard(self, entry: Entry) -> None:
        """Remove an entry from every index, whether it is complete or not."""
        if entry.missing_count and (entry.missing_counters or entry.missing_ids):
            self._discard_missing(entry)
        waiters = self._origins[entry.origin]
        del waiters.runs[entry.previous]
        live = len(waiters.runs) + waiters.live_foreign
        if not live or waiters.added > 4 * live + STALE_MAX:
            self._clean_index(entry.origin, waiters)

    def note_reached(self, origin: int, before: int, counter: int) -> tuple[list[Entry], list[Entry]]:
        """Note a delivery; return the entries that it completes, and the origin's runs that it overtook.

        These entries stay in the indexes until the caller discards them. `before`, `counter`: the watermark
        before and after the delivery.
        """
        waiters = self._origins.get(origin)
        if waiters is None:
            return [], []
        complete = []
        run = waiters.runs.get(counter)
        if run is not None:
            run.missing_count -= 1
            if not run.missing_count:
                complete.append(run)
        overtaken = _find_overtaken(waiters, before, counter)
        foreign = waiters.foreign
        while foreign and foreign[0][0] <= counter:
            entry = self._entries.get(heappop(foreign)[1])
            if entry is not None:
                waiters.live_foreign -= 1
                entry.missing_count -= 1
                if not entry.missing_count:
                    complete.append(entry)
        if overtaken:
            complete = [entry for entry in complete if entry not in overtaken]
        if not waiters.runs and not waiters.live_foreign:
            del self._origins[origin]
        return complete, overtaken

    def note_known(self, delta_id: bytes) -> list[Entry]:
        """Note the delivery of an id; return the entries that it completes."""
        complete = []
        for ticket in self._ids.pop(delta_id, ()):
            entry = self._entries[ticket]
            entry.missing_count -= 1
            if not entry.missing_count:
                complete.append(entry)
        return complete

    def find_waiting(self, ids: Iterable[bytes]) -> list[Entry]:
        """Find the pending entries that wait for one of these ids."""
        if not self._ids:
            return []
        tickets = {ticket for delta_id in ids for ticket in self._ids.get(delta_id, ())}
        return [self._entries[ticket] for ticket in tickets]

    def is_awaited(self, entry: Entry) -> bool:
        """True if a pending entry waits for a delta of this entry, or for a later one of its origin."""
        waiters = self._origins.get(entry.origin)
        if waiters is not None:
            dependents = waiters.dependents.heap()
            while dependents and dependents[0][1] not in self._entries:
                heappop(dependents)
            if dependents and -dependents[0][0] >= entry.first:
                return True
        return bool(self._ids) and any(delta_id in self._ids for delta_id in entry.ids)

    def find_dependents(self, entry: Entry) -> list[Entry]:
        """Find pending entries that wait for one of this entry's deltas, or for a later one of its origin.

        The caller must discard them, since each is found only once.
        """
        entries_by_ticket: dict[int, Entry] = {}
        waiters = self._origins.get(entry.origin)
        if waiters is not None:
            dependents = waiters.dependents.heap()
            while dependents and -dependents[0][0] >= entry.first:
                ticket = heappop(dependents)[1]
                if ticket in self._entries:
                    entries_by_ticket[ticket] = self._entries[ticket]
        if self._ids:
            for delta_id in entry.ids:
                for ticket in self._ids.get(delta_id, ()):
                    entries_by_ticket[ticket] = self._entries[ticket]
        return list(entries_by_ticket.values())

    def _add_missing(self, entry: Entry) -> None:
        ticket = entry.ticket
        for origin, counter in entry.missing_counters:
            waiters = self._origins.get(origin)
            if waiters is None:
                waiters = self._origins[origin] = OriginWaiters()
            waiters.live_foreign += 1
            waiters.added += 2
            heappush(waiters.foreign, (counter, ticket))
            waiters.dependents.append((-counter, ticket))
        for delta_id in entry.missing_ids:
            self._ids.setdefault(delta_id, set()).add(ticket)
        entry.missing_count += len(entry.missing_counters) + len(entry.missing_ids)

    def _discard_missing(self, entry: Entry) -> None:
        for origin, counter in entry.missing_counters:
            # No entry waits for an origin whose watermark was dropped, since its deltas were delivered.
            waiters = self._origins.get(origin)
            if waiters is not None and self._watermarks.get(origin, 0) < counter:
                waiters.live_foreign -= 1
                self._clean_index(origin, waiters)
        for delta_id in entry.missing_ids:
            tickets = self._ids.get(delta_id)
            if tickets is not None:
                tickets.discard(entry.ticket)
                if not tickets:
                    del self._ids[delta_id]

    def _clean_index(self, origin: int, waiters: OriginWaiters) -> None:
        """Drop an origin's indexes if they are unused; rebuild them if they are mostly stale."""
        live = len(waiters.runs) + waiters.live_foreign
        if not live:
            del self._origins[origin]
        elif waiters.added > 4 * live + STALE_MAX:
            entries, watermark = self._entries, self._watermarks.get(origin, 0)
            waiters.starts.rebuild(waiters.runs)
            waiters.foreign = [item for item in waiters.foreign if item[1] in entries]
            heapify(waiters.foreign)
            # An item below the watermark is stale, too, since its wait is over.
            dependents = [
                item for item in waiters.dependents.heap() if item[0] < -watermark and item[1] in entries
            ]
            waiters.dependents.rebuild(dependents)
            waiters.added = len(waiters.starts) + len(waiters.foreign) + len(dependents)


def _find_overtaken(waiters: OriginWaiters, before: int, counter: int) -> list[Entry]:
    """Find the pending runs that begin below `counter`: other batches delivered their first deltas."""
    if counter == before + 1:  # such a run can only begin after `before`
        run = waiters.runs.get(before)
        return [] if run is None else [run]
    starts, overtaken = waiters.starts.heap(), []
    while starts and starts[0] < counter:
        start = heappop(starts)
        run = waiters.runs.get(start)
        # If a run was removed and added again, its start is in the heap twice.
        if run is not None and not (starts and starts[0] == start):
            overtaken.append(run)
    return overtaken
