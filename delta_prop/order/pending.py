"""Deltas that wait for their causes: what is held, for whom, until when, and how much room is left.

Holds and counts only; who waits for what stands in `waiters.py`. Bounds are never exceeded: `shortage`
is asked before each `add`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from delta_prop_wire.delta import Dot

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Sequence

STALE_TICKETS_MAX = 64
"""Tickets of entries that left may stay in the queue up to this many beyond twice those that are held."""


class Verdict(Enum):
    """What to do with a released entry."""

    APPEND = "append"
    """Everything before it is delivered: it is next."""
    REPEAT = "repeat"
    """All of it was delivered while it waited, under other cuts: acknowledge it as a repeat."""
    OVERLAP = "overlap"
    """Some of it was: refuse it with `overlap(entry)`; nothing behind it is touched."""


@dataclass(slots=True, eq=False)
class Entry:
    """One run of an origin's deltas, with what must come before it; `item` belongs to the caller.

    `previous` is the counter of the origin before `first`: `first - 1` unless counters leap. An entry
    that has no dot yet is given an origin below zero, used once, as a stand-in for its order.
    `clock` and `parents` that name the run itself or what its origin had before it ask for nothing.
    """

    origin: int
    first: int
    last: int
    previous: int
    count: int
    size: int
    owner: Hashable
    item: object
    clock: Sequence[Dot] = ()
    parents: Sequence[Dot | bytes] = ()
    ids: Sequence[bytes] = ()
    void: bool = False
    """Withdrawn: only its place is left to fill, by a control row."""
    deadline: float = 0.0
    ticket: int = 0
    missing: int = 0
    needs: Sequence[tuple[int, int]] = ()
    """Counters of other origins that were missing when it was parked."""
    needs_ids: Sequence[bytes] = ()
    verdict: Verdict = Verdict.APPEND
    """Once released: what to do with it."""

    @property
    def dot(self) -> Dot:
        """The run's first dot."""
        return Dot(self.origin, self.first)


@dataclass(frozen=True, slots=True)
class Shortage:
    """Which bound an entry would break, and how far it is used up."""

    what: str
    depth: int
    capacity: int


@dataclass(slots=True)
class Share:
    """What one owner has pending."""

    deltas: int = 0
    bytes: int = 0


class Pending:
    """The entries held, by ticket, in order of arrival; all wait equally long."""

    def __init__(
        self,
        *,
        deltas_max: int,
        bytes_max: int,
        time_s_max: float,
        owner_share: float,
        reserve_share: float,
    ) -> None:
        assert deltas_max > 0
        assert bytes_max > 0
        assert time_s_max > 0
        assert 0 < owner_share <= 1
        assert 0 <= reserve_share < 1
        self._deltas_max = deltas_max
        self._bytes_max = bytes_max
        self.deltas = 0
        self.bytes = 0
        self.entries: dict[int, Entry] = {}
        self.owners: dict[Hashable, Share] = {}
        self._time_s_max = time_s_max
        self._owner_deltas_max = int(deltas_max * owner_share)
        self._owner_bytes_max = int(bytes_max * owner_share)
        # What nothing waits for leaves this much free, for what would unblock the others.
        self._open_deltas_max = deltas_max - int(deltas_max * reserve_share)
        self._open_bytes_max = bytes_max - int(bytes_max * reserve_share)
        self._ticket = 0
        self._queue: deque[int] = deque()

    def __len__(self) -> int:
        return len(self.entries)

    def __contains__(self, entry: Entry) -> bool:
        return self.entries.get(entry.ticket) is entry

    @property
    def queue_length(self) -> int:
        """Tickets in the queue of deadlines, stale ones included."""
        return len(self._queue)

    def fits(self, entry: Entry) -> bool:
        """Whether it has room without the reserve."""
        deltas, size = entry.count, entry.size
        share = self.owners.get(entry.owner)
        return (
            self.deltas + deltas <= self._open_deltas_max
            and self.bytes + size <= self._open_bytes_max
            and (deltas if share is None else share.deltas + deltas) <= self._owner_deltas_max
            and (size if share is None else share.bytes + size) <= self._owner_bytes_max
        )

    def shortage(self, entry: Entry, *, wanted: bool) -> Shortage | None:
        """The first bound that keeps this entry out; the reserve is open to what is wanted."""
        deltas_max = self._deltas_max if wanted else self._open_deltas_max
        bytes_max = self._bytes_max if wanted else self._open_bytes_max
        share = self.owners.get(entry.owner) or Share()
        bounds = (
            Shortage("deltas of this producer pending", share.deltas, self._owner_deltas_max),
            Shortage("bytes of this producer pending", share.bytes, self._owner_bytes_max),
            Shortage("deltas pending", self.deltas, deltas_max),
            Shortage("bytes pending", self.bytes, bytes_max),
        )
        amounts = (entry.count, entry.size, entry.count, entry.size)
        return next(
            (
                bound
                for bound, amount in zip(bounds, amounts, strict=True)
                if bound.depth + amount > bound.capacity
            ),
            None,
        )

    def add(self, entry: Entry, now: float) -> None:
        """Hold an entry; it gets a ticket and a deadline."""
        self._ticket = ticket = self._ticket + 1
        entry.ticket = ticket
        entry.deadline = now + self._time_s_max
        self.entries[ticket] = entry
        self.deltas += entry.count
        self.bytes += entry.size
        share = self.owners.get(entry.owner)
        if share is None:
            share = self.owners[entry.owner] = Share()
        share.deltas += entry.count
        share.bytes += entry.size
        self._queue.append(ticket)
        if len(self._queue) > 2 * len(self.entries) + STALE_TICKETS_MAX:
            self._queue = deque(self.entries)  # a dict keeps the order of arrival

    def remove(self, entry: Entry) -> None:
        """Let an entry go."""
        del self.entries[entry.ticket]
        self.deltas -= entry.count
        self.bytes -= entry.size
        share = self.owners[entry.owner]
        share.deltas -= entry.count
        share.bytes -= entry.size
        if not share.deltas:
            del self.owners[entry.owner]
        if not self.entries:
            self._queue.clear()

    def oldest(self) -> Entry | None:
        """The entry that was parked first."""
        queue = self._queue
        while queue:
            entry = self.entries.get(queue[0])
            if entry is not None:
                return entry
            queue.popleft()
        return None

    def expired(self, now: float) -> Iterator[Entry]:
        """Entries whose time is over, oldest first; the caller removes each before it asks for the next."""
        while (entry := self.oldest()) is not None and entry.deadline <= now:
            yield entry
