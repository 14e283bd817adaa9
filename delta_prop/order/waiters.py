"""Who waits for what: indexes from a missing dot or id to the entries that need it.

Nothing here walks over what is pending. Three questions, each answered by the entries it returns:
what does this delivery complete, what stands behind this delta, is anything waiting for this delta.

Indexes hold (counter, ticket) and are cleaned lazily: a ticket that is no longer held is skipped, and
what is mostly stale is rebuilt, so their length is bounded by what is pending.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from delta_prop.order.pending import Entry

T = TypeVar("T", int, tuple[int, int])

STALE_MAX = 64
"""Index items of an origin that may be stale beyond three for each live one."""


class LazyHeap(Generic[T]):
    """A heap that is appended to often and looked at seldom: items are sifted when its top is asked for."""

    __slots__ = ("_heap", "append", "fresh")

    def __init__(self) -> None:
        self._heap: list[T] = []
        self.fresh: list[T] = []
        self.append: Callable[[T], None] = self.fresh.append

    def __len__(self) -> int:
        return len(self._heap) + len(self.fresh)

    def heap(self) -> list[T]:
        """All items as a heap, to be popped from."""
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
    """What waits for one origin's deltas; dropped when nothing does."""

    __slots__ = ("added", "awaited", "behind", "foreign", "runs", "starts")

    def __init__(self) -> None:
        self.runs: dict[int, Entry] = {}  # the origin's own parked runs, by the counter before each
        self.starts: LazyHeap[int] = LazyHeap()  # the keys of `runs`: finds runs that were overtaken
        self.foreign: list[tuple[int, int]] = []  # lowest missing counter first: finds what is released
        # Own runs too, highest missing counter (negative) first: finds what stands behind a delta.
        self.behind: LazyHeap[tuple[int, int]] = LazyHeap()
        self.awaited = 0  # of `foreign`, how many are not stale
        self.added = 0  # items added to the three heaps since they were rebuilt


class Waiters:
    """The indexes over all origins and ids. `held` is the pending entries by ticket, read only."""

    def __init__(self, held: Mapping[int, Entry], have: Mapping[int, int]) -> None:
        self._held = held
        self._have = have
        self._origins: dict[int, OriginWaiters] = {}
        self._ids: dict[bytes, set[int]] = {}

    @property
    def origins(self) -> int:
        """Origins that something waits for, or waits in."""
        return len(self._origins)

    @property
    def ids(self) -> int:
        """Ids that something waits for."""
        return len(self._ids)

    @property
    def index_length(self) -> int:
        """Items in all indexes, stale ones included."""
        return sum(map(len, self._ids.values())) + sum(
            len(w.runs) + len(w.starts) + len(w.foreign) + len(w.behind) for w in self._origins.values()
        )

    def run(self, origin: int, previous: int) -> Entry | None:
        """The parked run of this origin that starts behind this counter."""
        waiters = self._origins.get(origin)
        return None if waiters is None else waiters.runs.get(previous)

    def runs(self, origin: int) -> list[Entry]:
        """All parked runs of an origin, in order of their counters."""
        waiters = self._origins.get(origin)
        return [] if waiters is None else [waiters.runs[previous] for previous in sorted(waiters.runs)]

    def add(self, entry: Entry) -> None:
        """Register a held entry under its place and everything it misses; count what that is."""
        origin, previous = entry.origin, entry.previous
        waiters = self._origins.get(origin)
        if waiters is None:
            waiters = self._origins[origin] = OriginWaiters()
        assert previous not in waiters.runs, "parked twice"
        waiters.runs[previous] = entry
        waiters.starts.append(previous)
        waiters.added += 2
        if self._have.get(origin, 0) < previous:
            entry.missing = 1
            waiters.behind.append((-previous, entry.ticket))
        else:
            entry.missing = 0
        if entry.needs or entry.needs_ids:
            self._add_needs(entry)

    def discard(self, entry: Entry) -> None:
        """Take an entry out of every index, whether all it waited for has come or not."""
        if entry.missing and (entry.needs or entry.needs_ids):
            self._discard_needs(entry)
        waiters = self._origins[entry.origin]
        del waiters.runs[entry.previous]
        live = len(waiters.runs) + waiters.awaited
        if not live or waiters.added > 4 * live + STALE_MAX:
            self._tidy(entry.origin, waiters)

    def reached(self, origin: int, before: int, counter: int) -> tuple[list[Entry], list[Entry]]:
        """Note a delivery: entries that miss nothing more, and runs of the origin that were overtaken.

        They stay registered; the caller discards them. `before` was the watermark.
        """
        waiters = self._origins.get(origin)
        if waiters is None:
            return [], []
        complete = []
        run = waiters.runs.get(counter)
        if run is not None:
            run.missing -= 1
            if not run.missing:
                complete.append(run)
        overtaken = _overtaken(waiters, before, counter)
        foreign = waiters.foreign
        while foreign and foreign[0][0] <= counter:
            entry = self._held.get(heappop(foreign)[1])
            if entry is not None:
                waiters.awaited -= 1
                entry.missing -= 1
                if not entry.missing:
                    complete.append(entry)
        if overtaken:
            complete = [entry for entry in complete if entry not in overtaken]
        if not waiters.runs and not waiters.awaited:
            del self._origins[origin]
        return complete, overtaken

    def known(self, delta_id: bytes) -> list[Entry]:
        """Note an id's delivery: entries that miss nothing more."""
        complete = []
        for ticket in self._ids.pop(delta_id, ()):
            entry = self._held[ticket]
            entry.missing -= 1
            if not entry.missing:
                complete.append(entry)
        return complete

    def waiting_for(self, ids: Iterable[bytes]) -> list[Entry]:
        """Find the held entries that wait for one of these ids."""
        if not self._ids:
            return []
        tickets = {ticket for delta_id in ids for ticket in self._ids.get(delta_id, ())}
        return [self._held[ticket] for ticket in tickets]

    def wanted(self, entry: Entry) -> bool:
        """Whether anything pending waits for this entry, or for what comes after it in its origin."""
        waiters = self._origins.get(entry.origin)
        if waiters is not None:
            behind = waiters.behind.heap()
            while behind and behind[0][1] not in self._held:
                heappop(behind)
            if behind and -behind[0][0] >= entry.first:
                return True
        return bool(self._ids) and any(delta_id in self._ids for delta_id in entry.ids)

    def behind(self, entry: Entry) -> list[Entry]:
        """Held entries that wait for one of this entry's deltas, or for a later one of its origin.

        They must be discarded: this finds each only once.
        """
        found: dict[int, Entry] = {}
        waiters = self._origins.get(entry.origin)
        if waiters is not None:
            behind = waiters.behind.heap()
            while behind and -behind[0][0] >= entry.first:
                ticket = heappop(behind)[1]
                if ticket in self._held:
                    found[ticket] = self._held[ticket]
        if self._ids:
            for delta_id in entry.ids:
                for ticket in self._ids.get(delta_id, ()):
                    found[ticket] = self._held[ticket]
        return list(found.values())

    def _add_needs(self, entry: Entry) -> None:
        ticket = entry.ticket
        for origin, counter in entry.needs:
            waiters = self._origins.get(origin)
            if waiters is None:
                waiters = self._origins[origin] = OriginWaiters()
            waiters.awaited += 1
            waiters.added += 2
            heappush(waiters.foreign, (counter, ticket))
            waiters.behind.append((-counter, ticket))
        for delta_id in entry.needs_ids:
            self._ids.setdefault(delta_id, set()).add(ticket)
        entry.missing += len(entry.needs) + len(entry.needs_ids)

    def _discard_needs(self, entry: Entry) -> None:
        for origin, counter in entry.needs:
            # Nobody waits for an origin whose watermark has been forgotten: what it had came before that.
            waiters = self._origins.get(origin)
            if waiters is not None and self._have.get(origin, 0) < counter:
                waiters.awaited -= 1
                self._tidy(origin, waiters)
        for delta_id in entry.needs_ids:
            tickets = self._ids.get(delta_id)
            if tickets is not None:
                tickets.discard(entry.ticket)
                if not tickets:
                    del self._ids[delta_id]

    def _tidy(self, origin: int, waiters: OriginWaiters) -> None:
        """Drop what nothing uses; rebuild what is mostly stale."""
        live = len(waiters.runs) + waiters.awaited
        if not live:
            del self._origins[origin]
        elif waiters.added > 4 * live + STALE_MAX:
            held, reached = self._held, -self._have.get(origin, 0)
            waiters.starts.rebuild(waiters.runs)
            waiters.foreign = [item for item in waiters.foreign if item[1] in held]
            heapify(waiters.foreign)
            # A wait that is over is as stale as one whose entry has gone.
            behind = [item for item in waiters.behind.heap() if item[0] < reached and item[1] in held]
            waiters.behind.rebuild(behind)
            waiters.added = len(waiters.starts) + len(waiters.foreign) + len(behind)


def _overtaken(waiters: OriginWaiters, before: int, counter: int) -> list[Entry]:
    """Runs that would have started below `counter`: other cuts of what has been delivered."""
    if counter == before + 1:  # then there is one place where such a run can start
        run = waiters.runs.get(before)
        return [] if run is None else [run]
    starts, overtaken = waiters.starts.heap(), []
    while starts and starts[0] < counter:
        start = heappop(starts)
        run = waiters.runs.get(start)
        # A run that was taken out and parked again has left its start twice.
        if run is not None and not (starts and starts[0] == start):
            overtaken.append(run)
    return overtaken
