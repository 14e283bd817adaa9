"""Pending deltas: deltas that wait for their dependencies, counted per owner, with deadlines and bounds.

This module only holds and counts them; `waiters.py` indexes the dependencies. The caller calls
`find_shortage` before each `add`, so bounds are never exceeded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from delta_prop_wire.delta import Dot

STALE_TICKETS_MAX = 64
"""The deadline queue is rebuilt when it exceeds twice the number of pending entries by more than this."""


class Verdict(Enum):
    """The action for a released entry."""

    APPEND = "append"
    """All its dependencies are delivered: append it."""
    DUPLICATE = "duplicate"
    """All its deltas were delivered meanwhile in other batches: acknowledge it as a duplicate."""
    OVERLAP = "overlap"
    """Some of its deltas were delivered meanwhile: refuse it with `overlap(entry)`; its dependents stay."""


@dataclass(slots=True, eq=False)
class Entry:
    """One run of an origin's deltas with its dependencies; `item` belongs to the caller.

    `previous` is the origin's counter before `first`: `first - 1` unless counters have gaps. `count` deltas
    of `size` bytes count towards the bounds of `owner`. An entry that has no dot yet gets a negative
    placeholder origin, used only once. Items of `clock` and `parents` that name the run itself or earlier
    deltas of its origin have no effect.
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
    """True if it was withdrawn: a control row fills its counters."""
    deadline: float = 0.0
    ticket: int = 0
    """The entry's number in order of arrival, set when it becomes pending."""
    missing_count: int = 0
    """Number of dependencies that are still missing; at 0 the entry is released."""
    missing_counters: Sequence[tuple[int, int]] = ()
    """(origin, highest missing counter) for each other origin, as of when the entry became pending."""
    missing_ids: Sequence[bytes] = ()
    """The ids of parents that were missing when the entry became pending."""
    verdict: Verdict = Verdict.APPEND
    """The action for the entry once it is released."""

    @property
    def dot(self) -> Dot:
        """The run's first dot."""
        return Dot(self.origin, self.first)


@dataclass(frozen=True, slots=True)
class Shortage:
    """A bound that an entry would exceed. `depth`: how many units of it are in use."""

    unit: str
    depth: int
    capacity: int


@dataclass(slots=True)
class OwnerUsage:
    """The pending deltas and bytes of one owner."""

    delta_count: int = 0
    bytes: int = 0


class PendingEntries:
    """The pending entries by ticket, in order of arrival; all have the same timeout."""

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
        self.delta_count = 0
        self.bytes = 0
        self.entries: dict[int, Entry] = {}
        self.owners: dict[Hashable, OwnerUsage] = {}
        self._timeout_s = timeout_s
        self._owner_deltas_max = int(deltas_max * owner_share)
        self._owner_bytes_max = int(bytes_max * owner_share)
        # An entry that no pending entry waits for must leave a reserve free for entries that release others.
        self._unreserved_deltas_max = deltas_max - int(deltas_max * reserve_share)
        self._unreserved_bytes_max = bytes_max - int(bytes_max * reserve_share)
        self._ticket = 0
        self._queue: deque[int] = deque()

    def __len__(self) -> int:
        return len(self.entries)

    def __contains__(self, entry: Entry) -> bool:
        return self.entries.get(entry.ticket) is entry

    @property
    def queue_length(self) -> int:
        """Number of tickets in the deadline queue, including stale ones."""
        return len(self._queue)

    def can_hold(self, entry: Entry) -> bool:
        """Return True if the entry fits without the reserve."""
        deltas, size = entry.count, entry.size
        usage = self.owners.get(entry.owner)
        return (
            self.delta_count + deltas <= self._unreserved_deltas_max
            and self.bytes + size <= self._unreserved_bytes_max
            and (deltas if usage is None else usage.delta_count + deltas) <= self._owner_deltas_max
            and (size if usage is None else usage.bytes + size) <= self._owner_bytes_max
        )

    def find_shortage(self, entry: Entry, *, is_awaited: bool) -> Shortage | None:
        """Return the first bound that the entry would exceed; None if it fits.

        `is_awaited`: a pending entry waits for it, so it may use the reserve.
        """
        deltas_max = self._deltas_max if is_awaited else self._unreserved_deltas_max
        bytes_max = self._bytes_max if is_awaited else self._unreserved_bytes_max
        usage = self.owners.get(entry.owner) or OwnerUsage()
        bounds = (
            Shortage("pending deltas of this producer", usage.delta_count, self._owner_deltas_max),
            Shortage("bytes of pending deltas of this producer", usage.bytes, self._owner_bytes_max),
            Shortage("pending deltas", self.delta_count, deltas_max),
            Shortage("bytes of pending deltas", self.bytes, bytes_max),
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
        """Add an entry, and set its ticket and deadline."""
        self._ticket = ticket = self._ticket + 1
        entry.ticket = ticket
        entry.deadline = now + self._timeout_s
        self.entries[ticket] = entry
        self.delta_count += entry.count
        self.bytes += entry.size
        usage = self.owners.get(entry.owner)
        if usage is None:
            usage = self.owners[entry.owner] = OwnerUsage()
        usage.delta_count += entry.count
        usage.bytes += entry.size
        self._queue.append(ticket)
        if len(self._queue) > 2 * len(self.entries) + STALE_TICKETS_MAX:
            self._queue = deque(self.entries)  # a dict keeps the order of arrival

    def remove(self, entry: Entry) -> None:
        """Remove an entry."""
        del self.entries[entry.ticket]
        self.delta_count -= entry.count
        self.bytes -= entry.size
        usage = self.owners[entry.owner]
        usage.delta_count -= entry.count
        usage.bytes -= entry.size
        if not usage.delta_count:
            del self.owners[entry.owner]
        if not self.entries:
            self._queue.clear()

    def oldest(self) -> Entry | None:
        """Return the entry that has been pending for the longest time; None if there is none."""
        queue = self._queue
        while queue:
            entry = self.entries.get(queue[0])
            if entry is not None:
                return entry
            queue.popleft()
        return None

    def iter_expired(self, now: float) -> Iterator[Entry]:
        """Yield expired entries, oldest first; the caller removes each entry before it takes the next."""
        while (entry := self.oldest()) is not None and entry.deadline <= now:
            yield entry
