"""The deltas that a quarantine holds, found by offset, by vector, and by the names of parents. Pure."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from delta_prop_wire.batch import LoggedBatch
from delta_prop_wire.delta import Delta, Dot

Vector = tuple[str, str]
Name = Dot | bytes


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
    def is_blocked(self) -> bool:
        """True if it waits for another delta."""
        return self.blocked_by != self.offset

    @property
    def vector(self) -> Vector:
        """The namespace and vector id of the delta."""
        return self.logged.batch.namespaces[self.row], self.logged.batch.keys[self.row]

    @property
    def delta(self) -> Delta:
        """The decoded delta."""
        return self.logged.batch.delta(self.row, self.logged.source)

    def names(self) -> Iterator[Name]:
        """Yield the names by which a parent is named: its dot, its id, and the dot that ends its batch."""
        batch = self.logged.batch
        yield batch.dot(self.row)
        if self.row < batch.count - 1:
            yield batch.dot(batch.count - 1)
        if batch.ids is not None:
            yield batch.ids[self.row]


class HeldDeltas:
    """Held deltas by offset; each stands in all indexes from `add` to `remove`."""

    def __init__(self) -> None:
        self.records: dict[int, QuarantinedDelta] = {}
        self.bytes = 0  # of the batches that the records keep in memory
        self.has_stale_blockers = False  # True after a removal, until `blocked_by` is updated
        self.vector_ids: Counter[str] = Counter()  # vector id -> number of its held deltas
        self._batches: dict[int, int] = {}  # offset of a batch -> number of its held rows
        self._vectors: dict[Vector, list[int]] = {}  # -> its held offsets, ascending
        self._names: dict[Name, set[int]] = {}  # name of a parent -> the held offsets that it may mean

    def sorted_records(self) -> list[QuarantinedDelta]:
        """Return all records, in log order."""
        return sorted(self.records.values(), key=lambda record: record.offset)

    def extra_bytes(self, logged: LoggedBatch) -> int:
        """Return the bytes of memory that the first held row of a batch costs; 0 if one is held already."""
        return 0 if logged.offset in self._batches else logged.batch.size

    def may_affect(self, logged: LoggedBatch) -> bool:
        """Return False if no row of a batch is held, or can depend on a held delta."""
        batch = logged.batch
        parents = batch.parents
        return (
            not self.vector_ids.keys().isdisjoint(batch.keys)
            or logged.offset in self._batches
            or bool(parents and not self._names.keys().isdisjoint(parent for _, parent in parents))
        )

    def first_offset_of(self, vector: Vector) -> int | None:
        """Return the first held offset of a vector; None if none is held."""
        offsets = self._vectors.get(vector)
        return offsets[0] if offsets else None

    def add(self, record: QuarantinedDelta) -> None:
        """Hold a delta, which is not held yet."""
        base = record.logged.offset
        self.records[record.offset] = record
        self.bytes += self.extra_bytes(record.logged)
        self._batches[base] = self._batches.get(base, 0) + 1
        insort(self._vectors.setdefault(record.vector, []), record.offset)
        self.vector_ids[record.vector[1]] += 1
        for name in record.names():
            self._names.setdefault(name, set()).add(record.offset)

    def remove(self, offset: int) -> None:
        """Remove a held delta; what it blocked may be blocked by another one from now on."""
        record = self.records.pop(offset)
        self.has_stale_blockers = True
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
        self.vector_ids[vector_id] -= 1
        if not self.vector_ids[vector_id]:
            del self.vector_ids[vector_id]

    def update_blockers(self) -> None:
        """Update `blocked_by` of all records."""
        if not self.has_stale_blockers:
            return
        self.has_stale_blockers = False
        vectors: dict[Vector, int] = {}
        names: dict[Name, int] = {}
        for record in self.sorted_records():
            if record.reason is None:
                blockers = (vectors.get(record.vector), *(names.get(parent) for parent in record.parents))
                record.blocked_by = next((offset for offset in blockers if offset is not None), record.offset)
            vectors[record.vector] = record.blocked_by
            for name in record.names():
                names.setdefault(name, record.blocked_by)

    def find_blocker(self, record: QuarantinedDelta) -> int:
        """Return the offset of the rejected delta that a delta depends on; -1 if there is none."""
        offsets = self._vectors.get(record.vector)
        if offsets is not None and offsets[0] < record.offset:
            return self.records[offsets[0]].blocked_by
        for parent in record.parents:
            held_offsets = self._names.get(parent)
            if held_offsets is not None:
                return self.records[min(held_offsets)].blocked_by
        return -1


def parents_of(logged: LoggedBatch, row: int) -> tuple[Name, ...]:
    """Return the names of the parents of one row."""
    return tuple(parent for parent_row, parent in logged.batch.parents if parent_row == row)


def parents_by_row(logged: LoggedBatch) -> dict[int, tuple[Name, ...]]:
    """Return the names of the parents of each row that has some."""
    named: dict[int, list[Name]] = {}
    for row, parent in logged.batch.parents:
        named.setdefault(row, []).append(parent)
    return {row: tuple(names) for row, names in named.items()}
