"""The causal orderer: holds a delta as pending until all its causal dependencies have been delivered.

Pure: it returns the entries to append and those to refuse, and does neither itself. Only `note_delivered`
moves `watermarks`, so the dot of a refused or failed delta stays open.

    if orderer.check(entry):
        append(entry); orderer.note_delivered(entry.origin, entry.last, entry.ids)
        while (entry := orderer.next_ready()) is not None:
            ...append and note each released entry, too, or `refuse` it if the append fails
    else:
        report(orderer.hold_pending(entry, now))
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from delta_prop.partition.order.missing import (
    DotRange,
    MissingDependencies,
    blocked_by_refused,
    overlap,
    pending_full,
    timed_out,
)
from delta_prop.partition.order.pending import Entry, PendingEntries, Verdict
from delta_prop.partition.order.waiters import Waiters
from delta_prop_wire.delta import Dot
from delta_prop_wire.errors import Refused

__all__ = ["Entry", "Orderer", "OrdererStatistics", "RefusedEntry", "Verdict"]

PENDING_DELTAS_MAX = 10_000
PENDING_BYTES_MAX = 64 * 1024 * 1024
PENDING_TIMEOUT_S = 30.0
OWNER_SHARE = 0.25
RESERVE_SHARE = 0.1


class RefusedEntry(NamedTuple):
    """An entry and the refusal for its producer; the entry's dots stay open."""

    entry: Entry
    error: Refused


@dataclass(frozen=True, slots=True)
class OrdererStatistics:
    """Statistics of an orderer. The fields up to `index_length` are 0 while nothing is pending; the others
    count events since the start.

    `pending_runs`: the pending entries. `awaited_origins`: origins that have pending entries, or that entries
    wait for. `awaited_ids`: ids that entries wait for. `index_length`: items of all indexes, including stale
    ones. `became_pending`: entries that became pending. `overtaken`: released entries whose deltas had been
    delivered in other batches, all or in part. `refused_dependents`: entries that were refused because they
    depended on a refused one.
    """

    pending_runs: int
    pending_deltas: int
    pending_bytes: int
    pending_owners: int
    awaited_origins: int
    awaited_ids: int
    index_length: int
    became_pending: int
    released: int
    overtaken: int
    refused_full: int
    refused_timeout: int
    refused_dependents: int


class KnownIds(Protocol):
    """The ids of the deltas in the log, as far as they are known."""

    kept_since: int
    """Offset from which on every id is known."""

    def __contains__(self, delta_id: object, /) -> bool:
        """True if the id is known."""


class Orderer:
    """Causal order over all origins of one partition, with bounded pending entries.

    Deltas and bytes are bounded. One owner may use `owner_share` of each bound. `reserve_share` of each bound
    is reserved for entries that a pending entry waits for: otherwise, at the bound, pending entries would
    keep out the delta that releases them.
    """

    def __init__(
        self,
        known_ids: KnownIds,
        *,
        watermarks: Mapping[int, int] | None = None,
        pending_deltas_max: int = PENDING_DELTAS_MAX,
        pending_bytes_max: int = PENDING_BYTES_MAX,
        pending_timeout_s: float = PENDING_TIMEOUT_S,
        owner_share: float = OWNER_SHARE,
        reserve_share: float = RESERVE_SHARE,
    ) -> None:
        self.watermarks: dict[int, int] = dict(watermarks or {})
        """The watermark of each origin: the highest counter up to which none is missing. Read only."""
        self._known_ids = known_ids
        self._timeout_s = pending_timeout_s
        self._pending = PendingEntries(
            deltas_max=pending_deltas_max,
            bytes_max=pending_bytes_max,
            timeout_s=pending_timeout_s,
            owner_share=owner_share,
            reserve_share=reserve_share,
        )
        self._waiters = Waiters(self._pending.entries, self.watermarks)
        self._ready: deque[Entry] = deque()
        self._became_pending = self._released = self._overtaken = 0
        self._refused_full = self._refused_timeout = self._refused_dependents = 0

    # --- arrivals

    def check(self, entry: Entry) -> bool:
        """Return True if the entry can be appended: all that it depends on is delivered."""
        watermarks, origin = self.watermarks, entry.origin
        if watermarks.get(origin, 0) != entry.previous:
            return False
        for other, counter in entry.clock:
            if watermarks.get(other, 0) < counter and other != origin:
                return False
        return not entry.parents or self._has_parents(entry)

    def is_pending(self, entry: Entry) -> bool:
        """Return True if `entry` itself is pending, not only another entry with the same dots."""
        return entry in self._pending

    def find_pending(self, entry: Entry) -> Entry | None:
        """Return the pending entry with the same origin and `previous`; it may end at another counter."""
        return self._waiters.find_run(entry.origin, entry.previous)

    def hold_pending(self, entry: Entry, now: float) -> list[RefusedEntry]:
        """Hold an entry as pending; return its refusal and those of its dependents if it cannot be held.

        Call it if `check` has returned False and the entry is not pending yet. Without capacity, the entry is
        refused with all its dependents. An entry that begins below its origin's watermark is refused without
        its dependents.
        """
        if entry.previous < self.watermarks.get(entry.origin, 0):
            return [RefusedEntry(entry, self.overlap(entry))]
        pending = self._pending
        if not pending.can_hold(entry):
            shortage = pending.find_shortage(entry, is_awaited=self._waiters.is_awaited(entry))
            if shortage is not None:
                self._refused_full += 1
                return self._refuse(entry, pending_full(self.missing(entry), shortage))
        self._hold(entry, now)
        return []

    def note_delivered(self, origin: int, last: int, ids: Sequence[bytes] = ()) -> None:
        """Note that deltas up to counter `last`, or a control row in their place, were appended.

        The caller then takes the released entries with `next_ready`.
        """
        before = self.watermarks.get(origin, 0)
        assert last > before, "delivered twice"
        self.watermarks[origin] = last
        if self._pending.entries:
            self._release(origin, before, last, ids)

    @property
    def has_pending(self) -> bool:
        """True while an entry waits for its dependencies."""
        return bool(self._pending.entries)

    @property
    def has_ready(self) -> bool:
        """True if `next_ready` has an entry to return."""
        return bool(self._ready)

    def next_ready(self) -> Entry | None:
        """Return the next released entry, in order of release; None if there is none.

        Act on its verdict before the next call.
        """
        if not self._ready:
            return None
        entry = self._ready.popleft()
        watermark = self.watermarks.get(entry.origin, 0)
        if watermark == entry.previous:
            self._released += 1  # the verdict stays APPEND
        else:
            entry.verdict = Verdict.DUPLICATE if entry.last <= watermark else Verdict.OVERLAP
            self._overtaken += 1
        return entry

    # --- refusals

    def refuse(self, entry: Entry, error: Refused) -> list[RefusedEntry]:
        """Refuse an entry that is pending or could not be appended, and all its dependents."""
        if entry in self._pending:
            self._remove(entry)
        return self._refuse(entry, error)

    def expire(self, now: float) -> list[RefusedEntry]:
        """Refuse the entries that have waited too long, and all their dependents."""
        refusals: list[RefusedEntry] = []
        for entry in self._pending.iter_expired(now):
            self._remove(entry)
            self._refused_timeout += 1
            error = timed_out(self.missing(entry), self._timeout_s, self._known_ids.kept_since)
            refusals += self._refuse(entry, error)
        return refusals

    def next_deadline(self) -> float | None:
        """Return the earliest time at which `expire` has an entry to refuse; None if none is pending."""
        oldest = self._pending.oldest()
        return None if oldest is None else oldest.deadline

    def withdraw(self, entry: Entry, now: float) -> bool:
        """Withdraw a pending entry: it becomes a no-op that only fills its counters in its origin's order.

        It no longer waits for its parents, but still for its clock, since later runs of its origin rely on
        that. Once it is released, maybe by this call, the caller appends a control row, so its dependents
        proceed. Return False if it is not pending.
        """
        if entry not in self._pending:
            return False
        self._remove(entry)
        entry.is_withdrawn = True
        entry.parents = entry.missing_counters = entry.missing_ids = ()
        if self.check(entry):
            self._ready.append(entry)
        else:
            self._hold(entry, now)  # takes the capacity that its removal freed
        return True

    def find_waiting(self, ids: Iterable[bytes]) -> list[Entry]:
        """Find the pending entries that wait for a delta with one of these ids, in order of arrival."""
        return sorted(self._waiters.find_waiting(ids), key=_arrival_order)

    def take_origin(self, origin: int) -> list[Entry]:
        """Remove and return all pending runs of an origin, after its producer was fenced."""
        entries = self._waiters.find_runs(origin)
        for entry in entries:
            self._remove(entry)
        return entries

    def drain(self) -> list[Entry]:
        """Remove and return all entries: the released ones, then the pending ones in order of arrival."""
        entries = [*self._ready, *self._pending.entries.values()]
        self._ready.clear()
        for entry in list(self._pending.entries.values()):
            self._remove(entry)
        return entries

    def forget(self, origin: int) -> None:
        """Drop the watermark of a draft's placeholder origin after its use, or of an origin idle for long."""
        self.watermarks.pop(origin, None)

    # --- queries

    def missing(self, entry: Entry) -> MissingDependencies:
        """Return the missing dependencies of an entry, its own origin first."""
        watermarks, dot_ranges = self.watermarks, []
        watermark = watermarks.get(entry.origin, 0)
        if watermark < entry.previous:
            dot_ranges.append(DotRange(entry.origin, watermark + 1, entry.previous))
        missing_counters, ids = self._find_missing(entry)
        for origin, last in sorted(missing_counters):
            dot_ranges.append(DotRange(origin, watermarks.get(origin, 0) + 1, last))
        return MissingDependencies(tuple(dot_ranges), tuple(ids))

    def overlap(self, entry: Entry) -> Refused:
        """Return the refusal of an entry of which a part was delivered, or is pending, in another batch."""
        return overlap(entry, self.watermarks.get(entry.origin, 0), self.find_pending(entry))

    def statistics(self) -> OrdererStatistics:
        """Return the statistics of the pending entries, and of the events so far."""
        pending, waiters = self._pending, self._waiters
        return OrdererStatistics(
            pending_runs=len(pending),
            pending_deltas=pending.delta_count,
            pending_bytes=pending.bytes,
            pending_owners=len(pending.owners),
            awaited_origins=waiters.origin_count,
            awaited_ids=waiters.id_count,
            index_length=waiters.index_length + pending.queue_length,
            became_pending=self._became_pending,
            released=self._released,
            overtaken=self._overtaken,
            refused_full=self._refused_full,
            refused_timeout=self._refused_timeout,
            refused_dependents=self._refused_dependents,
        )

    # --- internals

    def _has_parents(self, entry: Entry) -> bool:
        return not any(self._is_missing(entry, parent) for parent in entry.parents)

    def _is_missing(self, entry: Entry, parent: Dot | bytes) -> bool:
        if isinstance(parent, bytes):
            return parent not in self._known_ids and parent not in entry.ids
        origin, counter = parent
        if origin == entry.origin and counter <= entry.last:
            return False  # the order within the run covers it
        if origin < 0:  # a placeholder, whose watermark is dropped after its use
            return self._waiters.find_run(origin, 0) is not None
        return self.watermarks.get(origin, 0) < counter

    def _find_missing(self, entry: Entry) -> tuple[Sequence[tuple[int, int]], Sequence[bytes]]:
        """Find the highest missing counter of each origin, and the missing ids."""
        watermarks = self.watermarks
        missing_counters: dict[int, int] = {}
        for origin, counter in entry.clock:
            if watermarks.get(origin, 0) < counter and origin != entry.origin:
                missing_counters[origin] = max(counter, missing_counters.get(origin, 0))
        if not entry.parents:
            return tuple(missing_counters.items()), ()
        absent = [parent for parent in entry.parents if self._is_missing(entry, parent)]
        for parent in absent:
            if isinstance(parent, tuple):
                missing_counters[parent.origin] = max(parent.counter, missing_counters.get(parent.origin, 0))
        return tuple(missing_counters.items()), tuple(
            dict.fromkeys(parent for parent in absent if isinstance(parent, bytes))
        )

    def _hold(self, entry: Entry, now: float) -> None:
        if entry.clock or entry.parents:
            entry.missing_counters, entry.missing_ids = self._find_missing(entry)
        self._pending.add(entry, now)
        self._waiters.add(entry)
        self._became_pending += 1
        assert entry.missing_count, "nothing is missing, so nothing would release it: append it"

    def _remove(self, entry: Entry) -> None:
        self._pending.remove(entry)
        self._waiters.discard(entry)

    def _release(self, origin: int, before: int, last: int, ids: Sequence[bytes]) -> None:
        complete, overtaken = self._waiters.note_reached(origin, before, last)
        for entry in overtaken:
            self._remove(entry)
        if ids and self._waiters.id_count:
            for delta_id in ids:
                complete += self._waiters.note_known(delta_id)
        if len(complete) > 1:
            complete.sort(key=_arrival_order)
        remove, discard = self._pending.remove, self._waiters.discard
        for entry in complete:
            remove(entry)
            discard(entry)
        self._ready += complete
        self._ready += overtaken

    def _refuse(self, root: Entry, error: Refused) -> list[RefusedEntry]:
        """Return the refusals of an entry that was already removed, and of all its dependents."""
        dependents: list[Entry] = []
        unexplored = [root]
        while unexplored:
            for entry in self._waiters.find_dependents(unexplored.pop()):
                self._remove(entry)
                dependents.append(entry)
                unexplored.append(entry)
        dependents.sort(key=_arrival_order)
        self._refused_dependents += len(dependents)
        refusals = [
            RefusedEntry(entry, blocked_by_refused(root, error, self.missing(entry))) for entry in dependents
        ]
        return [RefusedEntry(root, error), *refusals]


def _arrival_order(entry: Entry) -> int:
    return entry.ticket
