"""A sink's quarantine: deltas that it rejected, and their dependents.

Without a rejected delta, later deltas of its vector would lead to a state that is no fold of the log. So they
are held, and so is each delta that names a held delta as a parent, until an operator replays the rejected
delta, or drops it. Other vectors proceed. Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from delta_prop.delivery.held_deltas import (
    HeldDeltas,
    Name,
    QuarantinedDelta,
    Vector,
    parents_by_row,
    parents_of,
)
from delta_prop_wire.batch import LoggedBatch

if TYPE_CHECKING:
    from delta_prop_sinks.sink import Delivery

DROPPED_MAX = 100_000
"""Maximum number of remembered dropped offsets."""


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
        # Numbers of deltas since the sink was attached or rebuilt.
        self.rejected = 0
        self.held_dependents = 0
        self.dropped = 0
        self.replayed = 0
        self._dropped = _DroppedOffsets()
        self._held = HeldDeltas()
        self._applying: frozenset[int] = frozenset()  # offsets in a running call of the sink
        self.touched: set[int] | None = None
        """The offsets that changed, for the writer, which clears the set; None if there is no writer."""

    def __len__(self) -> int:
        return len(self._held.records)

    def __contains__(self, offset: int) -> bool:
        return offset in self._held.records

    def __getitem__(self, offset: int) -> QuarantinedDelta:
        self._held.update_blockers()
        return self._held.records[offset]

    @property
    def bytes(self) -> int:
        """Bytes of the batches that the held deltas keep in memory."""
        return self._held.bytes

    @property
    def has_content(self) -> bool:
        """True if the quarantine must be saved for the next attachment of its sink."""
        return bool(self._held.records or self._dropped.offsets)

    def can_affect(self, offset: int) -> bool:
        """Return True if a delivery from `offset` on must be split by `hold_dependents`."""
        return bool(self._held.records) or offset < self._dropped.end

    def is_withheld(self, offset: int) -> bool:
        """Return True if the delta at `offset` is held or was dropped, so it must have no effect."""
        if offset in self._applying:
            return False
        return offset in self._held.records or offset in self._dropped.offsets

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
        return self._held.records.get(offset)

    @property
    def dropped_offsets(self) -> list[int]:
        """The dropped offsets, in the order in which they were dropped."""
        return list(self._dropped.offsets)

    def records(self) -> list[QuarantinedDelta]:
        """Return all held records, in log order."""
        self._held.update_blockers()
        return self._held.sorted_records()

    def first_held(self, start: int, end: int) -> QuarantinedDelta | None:
        """Return the first held record from offset `start` up to `end` (exclusive); None if none is held."""
        self._held.update_blockers()
        records = self._held.records
        if end - start > len(records):
            return next((record for record in self.records() if start <= record.offset < end), None)
        return next((records[offset] for offset in range(start, end) if offset in records), None)

    def first_offset_of(self, vector: Vector) -> int | None:
        """Return the first held offset of a vector; None if none is held."""
        return self._held.first_offset_of(vector)

    def reject(self, logged: LoggedBatch, row: int, reason: str, at_us: int) -> bool:
        """Quarantine a delta that the sink rejected; return False, with nothing changed, if it is full."""
        offset = logged.offset + row
        held = self._held.records.get(offset)
        if held is not None:
            held.reason, held.blocked_by = reason, offset
            self.rejected += 1
            self._held.has_stale_blockers = True
            self._touch(offset)
            return True
        if not self._has_capacity(logged):
            return False
        self._hold(QuarantinedDelta(logged, row, at_us, offset, parents_of(logged, row), reason))
        self.rejected += 1
        return True

    def hold_dependents(self, delivery: Delivery, at_us: int) -> HeldSplit:
        """Hold rows that depend on a held delta, skip those held or dropped already; the others pass."""
        logged, batch, index = delivery.logged, delivery.batch, self._held
        if logged.offset >= self._dropped.end and not index.may_affect(logged):
            return HeldSplit(delivery, [], None)
        index.update_blockers()
        passing: list[int] = []
        held: list[int] = []
        full_at = None
        keys, named = batch.keys, parents_by_row(logged)
        for row in range(logged.count) if delivery.rows is None else delivery.rows.tolist():
            if logged.offset + row in self._dropped.offsets:
                continue
            if keys[row] not in index.vector_ids and row not in named:
                passing.append(row)
                continue
            if logged.offset + row in index.records:
                continue
            record = QuarantinedDelta(logged, row, at_us, -1, named.get(row, ()))
            record.blocked_by = index.find_blocker(record)
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

    def replay(self, offset: int) -> None:
        """Remove a delta that a replay has applied."""
        if offset in self._held.records:
            self._remove(offset)
        self.replayed += 1

    def drop(self, offset: int) -> None:
        """Remove a delta for good, without applying it."""
        self._remove(offset)
        self._note_dropped(offset)
        self.dropped += 1

    def forget(self, offset: int) -> None:
        """Remove a delta that will be redelivered."""
        if offset in self._held.records:
            self._remove(offset)
        self.held_dependents -= 1

    def resume_from(self, start: int) -> None:
        """Keep only the records below `start`, as the others are redelivered; reset the counters."""
        for record in self._held.sorted_records():
            if record.offset >= start:
                self._remove(record.offset)
        self.rejected = self.held_dependents = self.dropped = self.replayed = 0

    def truncate(self, end: int) -> None:
        """Forget all offsets from `end` on: the log has lost them, and assigns them to other deltas."""
        for offset in [offset for offset in self._held.records if offset >= end]:
            self._remove(offset)
        for offset in self._dropped.remove(end, inf):
            self._touch(offset)

    def restore(self, logged: LoggedBatch, row: int, reason: str | None, at_us: int) -> None:
        """Hold a record of an earlier process, even beyond the capacity."""
        self._hold(QuarantinedDelta(logged, row, at_us, logged.offset + row, parents_of(logged, row), reason))
        self._held.has_stale_blockers = True

    def restore_dropped(self, offsets: Iterable[int]) -> None:
        """Restore the offsets that were dropped in an earlier process."""
        for offset in offsets:
            self._note_dropped(offset)

    def clear(self, below: int) -> None:
        """Remove all records below an offset: the sink was rebuilt, and its states include those deltas."""
        for record in self._held.sorted_records():
            if record.offset < below:
                self._remove(record.offset)
        for offset in self._dropped.remove(0, below):
            self._touch(offset)
        self.rejected = self.held_dependents = self.dropped = self.replayed = 0

    def _touch(self, offset: int) -> None:
        if self.touched is not None:
            self.touched.add(offset)

    def _note_dropped(self, offset: int) -> None:
        for forgotten in self._dropped.add(offset):
            self._touch(forgotten)
        self._touch(offset)

    def _remove(self, offset: int) -> None:
        self._held.remove(offset)
        self._touch(offset)

    def _has_capacity(self, logged: LoggedBatch) -> bool:
        held = self._held
        more = held.extra_bytes(logged)
        return len(held.records) < self.deltas_max and (
            not held.records or held.bytes + more <= self.bytes_max
        )

    def _hold(self, record: QuarantinedDelta) -> None:
        self._held.add(record)
        self._touch(record.offset)


class _DroppedOffsets:
    """The offsets that operators dropped, the last `DROPPED_MAX` of them, in the order of the drops."""

    def __init__(self) -> None:
        self.offsets: dict[int, None] = {}
        self.end = 0  # after the highest offset

    def add(self, offset: int) -> list[int]:
        """Add an offset; return those that are forgotten for it."""
        self.offsets[offset] = None
        self.end = max(self.end, offset + 1)
        if len(self.offsets) <= DROPPED_MAX:
            return []
        oldest = next(iter(self.offsets))
        del self.offsets[oldest]
        return [oldest]

    def remove(self, start: int, end: float) -> list[int]:
        removed = [offset for offset in self.offsets if start <= offset < end]
        for offset in removed:
            del self.offsets[offset]
        return removed


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
        """Put back records taken last and not applied; `rejected`: the one before them, which stays."""
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
