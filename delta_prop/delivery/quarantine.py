"""A sink's quarantine: deltas that it rejected, and their dependents.

Without a rejected delta, later deltas of its vector would lead to a state that is no fold of the log. So they
are held, and so is each delta that names a held delta as a parent, until an operator replays the rejected
delta, or drops it. Other vectors proceed. Pure.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, deque
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from delta_prop_sinks.sink import Delivery
    from delta_prop_wire.batch import LoggedBatch
    from delta_prop_wire.delta import Delta, Dot

    Vector = tuple[str, str]
    Name = Dot | bytes


DROPPED_MAX = 100_000
"""Maximum number of remembered dropped offsets."""


@dataclass(slots=True, eq=False)
class QuarantinedDelta:
    """One delta in the quarantine. `reason`: why it was rejected; None: it is held for `blocked_by`.

    `blocked_by`: the offset of the rejected delta that it waits for. This is its own offset if it was
    rejected itself, or if it waits for none any more because a replay was cancelled half-way.
    """

    logged: LoggedBatch
    row: int
    at_us: int
    blocked_by: int
    parents: tuple[Name, ...] = ()
    reason: str | None = None

    @property
    def offset(self) -> int:
        """The offset of the delta in the log."""
        return self.logged.offset + self.row

    @property
    def vector(self) -> Vector:
        """The namespace and vector id of the delta."""
        return self.logged.batch.namespaces[self.row], self.logged.batch.keys[self.row]

    @property
    def delta(self) -> Delta:
        """The decoded delta."""
        return self.logged.batch.delta(self.row, self.logged.source)

    def names(self) -> Iterator[Name]:
        """Yield the names by which another delta may name this one as a parent: its dot and id, and the dot
        of the last delta of its batch, which stands for the whole publish.
        """
        batch = self.logged.batch
        yield batch.dot(self.row)
        if self.row < batch.count - 1:
            yield batch.dot(batch.count - 1)
        if batch.ids is not None:
            yield batch.ids[self.row]


class HeldSplit(NamedTuple):
    """Result of `hold_dependents`: the rows to apply now, and the offsets that are now held.

    `full_at`: the offset from which on the quarantine was full; None: it was not.
    """

    passing: Delivery | None
    held_dependents: list[int]
    full_at: int | None


class Quarantine:
    """Quarantined deltas, bounded in number and in bytes of the batches that they keep in memory."""

    def __init__(self, deltas_max: int, bytes_max: int) -> None:
        self.deltas_max = deltas_max
        self.bytes_max = bytes_max
        self.bytes = 0
        # Numbers of deltas since the sink was attached or rebuilt.
        self.rejected = 0
        self.held_dependents = 0
        self.dropped = 0
        self.replayed = 0
        # Dropped offsets, the last `DROPPED_MAX` of them.
        self._dropped_offsets: dict[int, None] = {}
        self._dropped_end = 0  # after the highest dropped offset
        self._held: dict[int, QuarantinedDelta] = {}
        self._batches: dict[int, int] = {}  # offset of a batch -> number of its held rows
        self._vectors: dict[Vector, list[int]] = {}  # -> its held offsets, ascending
        self._ids: Counter[str] = Counter()  # vector id -> number of its held deltas
        self._names: dict[Name, set[int]] = {}  # name of a parent -> the held offsets that it may mean
        self._has_stale_blockers = False  # after a removal, until `blocked_by` is updated
        self._applying: frozenset[int] = frozenset()  # offsets in a running call of the sink
        self.touched: set[int] | None = None
        """The offsets that changed, for the writer, which clears the set; None if there is no writer."""

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, offset: int) -> bool:
        return offset in self._held

    def __getitem__(self, offset: int) -> QuarantinedDelta:
        self._update_blockers()
        return self._held[offset]

    @property
    def has_content(self) -> bool:
        """True if the quarantine must be saved for the next attachment of its sink."""
        return bool(self._held or self._dropped_offsets)

    def can_affect(self, offset: int) -> bool:
        """Return True if a delivery from `offset` on must be split by `hold_dependents`."""
        return bool(self._held) or offset < self._dropped_end

    def is_withheld(self, offset: int) -> bool:
        """Return True if the delta at `offset` is held or was dropped, so it must have no effect."""
        if offset in self._applying:
            return False
        return offset in self._held or offset in self._dropped_offsets

    @contextmanager
    def applying(self, records: Iterable[QuarantinedDelta]) -> Iterator[None]:
        """Mark records as being applied, so that their dependents are not withheld."""
        self._applying = frozenset(record.offset for record in records)
        try:
            yield
        finally:
            self._applying = frozenset()

    def get(self, offset: int) -> QuarantinedDelta | None:
        """Return the record held at `offset`; its `blocked_by` may be stale."""
        return self._held.get(offset)

    @property
    def dropped_offsets(self) -> list[int]:
        """The dropped offsets, in the order in which they were dropped."""
        return list(self._dropped_offsets)

    def records(self) -> list[QuarantinedDelta]:
        """Return all held records, in log order."""
        self._update_blockers()
        return self._sorted_records()

    def _sorted_records(self) -> list[QuarantinedDelta]:
        return sorted(self._held.values(), key=lambda record: record.offset)

    def first_held(self, start: int, end: int) -> QuarantinedDelta | None:
        """Return the first held record from offset `start` up to `end` (exclusive); None if none is held."""
        self._update_blockers()
        if end - start > len(self._held):
            return next((record for record in self.records() if start <= record.offset < end), None)
        return next((self._held[offset] for offset in range(start, end) if offset in self._held), None)

    def first_offset_of(self, vector: Vector) -> int | None:
        """Return the first held offset of a vector; None if none is held."""
        self._update_blockers()
        offsets = self._vectors.get(vector)
        return offsets[0] if offsets else None

    # --- adding

    def reject(self, logged: LoggedBatch, row: int, reason: str, at_us: int) -> bool:
        """Quarantine a delta that the sink rejected; return False, with nothing changed, if it is full."""
        offset = logged.offset + row
        held = self._held.get(offset)
        if held is not None:
            held.reason, held.blocked_by = reason, offset
            self.rejected += 1
            self._has_stale_blockers = True
            self._touch(offset)
            return True
        if not self._has_capacity(logged):
            return False
        self._hold(QuarantinedDelta(logged, row, at_us, offset, _parents_of(logged, row), reason))
        self.rejected += 1
        return True

    def hold_dependents(self, delivery: Delivery, at_us: int) -> HeldSplit:
        """Hold the rows that depend on a held delta, and skip those that are held already or were dropped.

        The other rows pass.
        """
        logged, batch = delivery.logged, delivery.batch
        parents = batch.parents
        if (
            self._ids.keys().isdisjoint(batch.keys)
            and logged.offset not in self._batches
            and logged.offset >= self._dropped_end
            and (not parents or self._names.keys().isdisjoint(parent for _, parent in parents))
        ):
            return HeldSplit(delivery, [], None)
        self._update_blockers()
        passing: list[int] = []
        held: list[int] = []
        full_at = None
        ids, keys, named = self._ids, batch.keys, _parents_by_row(logged)
        for row in range(logged.count) if delivery.rows is None else delivery.rows.tolist():
            if logged.offset + row in self._dropped_offsets:
                continue
            if keys[row] not in ids and row not in named:
                passing.append(row)
                continue
            if logged.offset + row in self._held:
                continue
            record = QuarantinedDelta(logged, row, at_us, -1, named.get(row, ()))
            record.blocked_by = self._find_blocker(record)
            if record.blocked_by < 0:
                passing.append(row)
            elif self._has_capacity(logged):
                self._hold(record)
                held.append(record.offset)
            else:
                full_at = record.offset
                break
        self.held_dependents += len(held)
        passed = replace(
            delivery,
            rows=np.array(passing, np.intp),
            end=delivery.end if full_at is None else full_at,  # bounds the sink's own cursor
        )
        return HeldSplit(passed if passing else None, held, full_at)

    # --- removing

    def replay(self, offset: int) -> None:
        """Remove a delta that a replay has applied."""
        if offset in self._held:
            self._remove(offset)
        self.replayed += 1

    def drop(self, offset: int) -> None:
        """Remove a delta for good, without applying it."""
        self._remove(offset)
        self._note_dropped(offset)
        self.dropped += 1

    def forget(self, offset: int) -> None:
        """Remove a delta that will be redelivered."""
        if offset in self._held:
            self._remove(offset)
        self.held_dependents -= 1

    def resume_from(self, start: int) -> None:
        """Resume from `start`, after the sink was attached, and reset the counters.

        Rows from `start` on, except dropped ones, are redelivered, so only records below it stay.
        """
        for record in self._sorted_records():
            if record.offset >= start:
                self._remove(record.offset)
        self.rejected = self.held_dependents = self.dropped = self.replayed = 0

    def truncate(self, end: int) -> None:
        """Forget all offsets from `end` on: the log has lost them, and assigns them to other deltas."""
        for offset in [offset for offset in self._held if offset >= end]:
            self._remove(offset)
        for offset in [offset for offset in self._dropped_offsets if offset >= end]:
            del self._dropped_offsets[offset]
            self._touch(offset)

    def restore(self, logged: LoggedBatch, row: int, reason: str | None, at_us: int) -> None:
        """Hold a record of an earlier process, even beyond the capacity."""
        self._hold(
            QuarantinedDelta(logged, row, at_us, logged.offset + row, _parents_of(logged, row), reason)
        )
        self._has_stale_blockers = True

    def restore_dropped(self, offsets: Iterable[int]) -> None:
        """Restore the offsets that were dropped in an earlier process."""
        for offset in offsets:
            self._note_dropped(offset)

    def clear(self, below: int) -> None:
        """Remove all records below an offset: the sink was rebuilt, and its states include those deltas."""
        for record in self._sorted_records():
            if record.offset < below:
                self._remove(record.offset)
        for offset in [offset for offset in self._dropped_offsets if offset < below]:
            del self._dropped_offsets[offset]
            self._touch(offset)
        self.rejected = self.held_dependents = self.dropped = self.replayed = 0

    # --- helpers

    def _touch(self, offset: int) -> None:
        if self.touched is not None:
            self.touched.add(offset)

    def _note_dropped(self, offset: int) -> None:
        self._dropped_offsets[offset] = None
        self._dropped_end = max(self._dropped_end, offset + 1)
        self._touch(offset)
        if len(self._dropped_offsets) > DROPPED_MAX:
            oldest = next(iter(self._dropped_offsets))
            del self._dropped_offsets[oldest]
            self._touch(oldest)

    def _remove(self, offset: int) -> None:
        record = self._held.pop(offset)
        self._has_stale_blockers = True
        self._touch(offset)
        base = record.logged.offset
        self._batches[base] -= 1
        if not self._batches[base]:
            del self._batches[base]
            self.bytes -= record.logged.batch.size
        for name in record.names():
            self._names[name].remove(offset)
            if not self._names[name]:
                del self._names[name]
        namespace, vector_id = record.vector
        offsets = self._vectors[namespace, vector_id]
        del offsets[bisect_left(offsets, offset)]
        if not offsets:
            del self._vectors[namespace, vector_id]
        self._ids[vector_id] -= 1
        if not self._ids[vector_id]:
            del self._ids[vector_id]

    def _update_blockers(self) -> None:
        """Update `blocked_by` of all records."""
        if not self._has_stale_blockers:
            return
        self._has_stale_blockers = False
        vectors: dict[Vector, int] = {}
        names: dict[Name, int] = {}
        for record in self._sorted_records():
            if record.reason is None:
                blockers = (vectors.get(record.vector), *(names.get(parent) for parent in record.parents))
                record.blocked_by = next((offset for offset in blockers if offset is not None), record.offset)
            vectors[record.vector] = record.blocked_by
            for name in record.names():
                names.setdefault(name, record.blocked_by)

    def _find_blocker(self, record: QuarantinedDelta) -> int:
        """Return the offset of the rejected delta that a delta depends on; -1 if there is none."""
        offsets = self._vectors.get(record.vector)
        if offsets is not None and offsets[0] < record.offset:
            return self._held[offsets[0]].blocked_by
        for parent in record.parents:
            held_offsets = self._names.get(parent)
            if held_offsets is not None:
                return self._held[min(held_offsets)].blocked_by
        return -1

    def _has_capacity(self, logged: LoggedBatch) -> bool:
        more = 0 if logged.offset in self._batches else logged.batch.size
        return len(self._held) < self.deltas_max and (not self._held or self.bytes + more <= self.bytes_max)

    def _hold(self, record: QuarantinedDelta) -> None:
        base = record.logged.offset
        self._held[record.offset] = record
        self._touch(record.offset)
        if base not in self._batches:
            self.bytes += record.logged.batch.size
        self._batches[base] = self._batches.get(base, 0) + 1
        insort(self._vectors.setdefault(record.vector, []), record.offset)
        self._ids[record.vector[1]] += 1
        for name in record.names():
            self._names.setdefault(name, set()).add(record.offset)


class ReplayPlan:
    """The order of a replay: yields the records that can be applied, in log order.

    Rejected records at the offsets `released` are replayed; other rejected records stay, and so do their
    dependents. Each record is examined once, and again if it is put back.
    """

    def __init__(self, records: list[QuarantinedDelta], released: Collection[int]) -> None:
        self._records = iter(records)
        self._released = released
        self._staying = _BlockerSet()
        self._returned: deque[QuarantinedDelta] = deque()
        self._rejected = _BlockerSet()  # rejected in this replay; they precede all returned records

    def take(self, count: int) -> list[QuarantinedDelta]:
        """Return up to `count` next records that do not depend on a record that stays."""
        taken: list[QuarantinedDelta] = []
        while self._returned and len(taken) < count:
            record = self._returned.popleft()
            if self._rejected.blocks(record):
                self._rejected.add(record)
            else:
                taken.append(record)
        while len(taken) < count and (next_record := next(self._records, None)) is not None:
            stays = next_record.reason is not None and next_record.offset not in self._released
            if stays or self._staying.blocks(next_record) or self._rejected.blocks(next_record):
                self._staying.add(next_record)
            else:
                taken.append(next_record)
        return taken

    def put_back(self, records: Sequence[QuarantinedDelta], rejected: QuarantinedDelta | None = None) -> None:
        """Put back the records that were taken last and not applied.

        `rejected`: the record before them, if the sink rejected it again, so that it stays.
        """
        self._returned.extendleft(reversed(records))
        if rejected is not None:
            self._rejected.add(rejected)


class _BlockerSet:
    """Records that stay, indexed by vector and by the names that their dependents use."""

    def __init__(self) -> None:
        self._vectors: set[Vector] = set()
        self._names: set[Name] = set()

    def add(self, record: QuarantinedDelta) -> None:
        self._vectors.add(record.vector)
        self._names.update(record.names())

    def blocks(self, record: QuarantinedDelta) -> bool:
        return record.vector in self._vectors or not self._names.isdisjoint(record.parents)


def _parents_of(logged: LoggedBatch, row: int) -> tuple[Name, ...]:
    return tuple(parent for parent_row, parent in logged.batch.parents if parent_row == row)


def _parents_by_row(logged: LoggedBatch) -> dict[int, tuple[Name, ...]]:
    named: dict[int, list[Name]] = {}
    for row, parent in logged.batch.parents:
        named.setdefault(row, []).append(parent)
    return {row: tuple(names) for row, names in named.items()}
