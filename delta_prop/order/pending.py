"""Pending deltas: those held for their dependencies, by owner, with deadlines and bounds.

Holds and counts only; `waiters.py` indexes the dependencies. Call `shortage` before each `add`: so
bounds are never exceeded.
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
"""Stale tickets that the queue may hold beyond twice the number of held entries."""


class Verdict(Enum):
    """Action for a released entry."""

    APPEND = "append"
    """All its dependencies are delivered: append it."""
    DUPLICATE = "repeat"
    """All of it was delivered meanwhile in other batches: acknowledge it as a duplicate."""
    OVERLAP = "overlap"
    """A part of it was delivered meanwhile: refuse it with `overlap(entry)`; its dependents stay."""


@dataclass(slots=True, eq=False)
class Entry:
    """One run of an origin's deltas with its dependencies; `item` belongs to the caller.

    `previous` is the counter of the origin before `first`: `first - 1` unless counters have gaps. An entry
    that has no dot yet gets a negative origin, used once, as a stand-in for its order. Items of `clock` and
    `parents` that name the run itself or earlier deltas of its origin have no effect.
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
    is_withdrawn: bool = False
    """True if it was withdrawn: a control row fills its position."""
    deadline: float = 0.0
    ticket: int = 0
    missing_count: int = 0
    missing_counters: Sequence[tuple[int, int]] = ()
    """Counters of other origins that were missing when the entry was parked."""
    missing_ids: Sequence[bytes] = ()
    verdict: Verdict = Verdict.APPEND
    """Action for the entry once it is released."""

    @property
    def dot(self) -> Dot:
        """The run's first dot."""
        return Dot(self.origin, self.first)


@dataclass(frozen=True, slots=True)
class Shortage:
    """A bound that an entry would exceed, and its present use."""

    what: str
    depth: int
    capacity: int


@dataclass(slots=True)
class OwnerUsage:
    """Amounts that one owner has pending."""

    deltas: int = 0
    bytes: int = 0


class PendingEntries:
    """The held entries by ticket, in order of arrival; all have the same timeout."""

    def __init__(
        self,
        *,
        deltas_max: int,
        bytes_max: int,
        timeout_s: float,
        owner_share: float,
        reserve_share: float,
    ) -> None:
        assert deltas_max > 0
        assert bytes_max > 0
        assert timeout_s > 0
        assert 0 < owner_share <= 1
        assert 0 <= reserve_share < 1
        self._deltas_max = deltas_max
        self._bytes_max = bytes_max
        self.deltas = 0
        self.bytes = 0
        self.entries: dict[int, Entry] = {}
        self.owners: dict[Hashable, OwnerUsage] = {}
        self._timeout_s = timeout_s
        self._owner_deltas_max = int(deltas_max * owner_share)
        self._owner_bytes_max = int(bytes_max * owner_share)
        # Entries that no other waits for leave this reserve free for those that would release others.
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
        """Tickets in the deadline queue, stale ones included."""
        return len(self._queue)

    def can_hold(self, entry: Entry) -> bool:
        """True if the entry fits without the reserve."""
        deltas, size = entry.count, entry.size
        share = self.owners.get(entry.owner)
        return (
            self.deltas + deltas <= self._open_deltas_max
            and self.bytes + size <= self._open_bytes_max
            and (deltas if share is None else share.deltas + deltas) <= self._owner_deltas_max
            and (size if share is None else share.bytes + size) <= self._owner_bytes_max
        )

    def shortage(self, entry: Entry, *, is_wanted: bool) -> Shortage | None:
        """Return the first bound that the entry would exceed; a wanted entry may use the reserve."""
        deltas_max = self._deltas_max if is_wanted else self._open_deltas_max
        bytes_max = self._bytes_max if is_wanted else self._open_bytes_max
        share = self.owners.get(entry.owner) or OwnerUsage()
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
        entry.deadline = now + self._timeout_s
        self.entries[ticket] = entry
        self.deltas += entry.count
        self.bytes += entry.size
        share = self.owners.get(entry.owner)
        if share is None:
            share = self.owners[entry.owner] = OwnerUsage()
        share.deltas += entry.count
        share.bytes += entry.size
        self._queue.append(ticket)
        if len(self._queue) > 2 * len(self.entries) + STALE_TICKETS_MAX:
            self._queue = deque(self.entries)  # a dict keeps the order of arrival

    def remove(self, entry: Entry) -> None:
        """Remove an entry."""
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
        """Return the entry that was parked first."""
        queue = self._queue
        while queue:
            entry = self.entries.get(queue[0])
            if entry is not None:
                return entry
            queue.popleft()
        return None

    def iter_expired(self, now: float) -> Iterator[Entry]:
        """Yield expired entries, oldest first; the caller removes each before it asks for the next."""
        while (entry := self.oldest()) is not None and entry.deadline <= now:
            yield entry
