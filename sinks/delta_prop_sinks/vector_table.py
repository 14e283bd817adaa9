"""One namespace's vectors in memory: a float32 matrix, and per slot the other data of a vector.

Arithmetic and bookkeeping only: `resident.py` decides which rows are folded, and when. A slot belongs to one
vector id until it is released; slots of deleted vectors remain as tombstones.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from delta_prop_sinks.slots import make_slots
from delta_prop_wire.algebra import VectorState, apply_in_place
from delta_prop_wire.batch import Batch, LoggedBatch
from delta_prop_wire.core import core_mode
from delta_prop_wire.delta import PARTIAL_KINDS, Kind, Operation
from delta_prop_wire.metadata import merge

if TYPE_CHECKING:
    from delta_prop_sinks.delta_chain import ChainBase

ABSENT, VECTOR, OPAQUE, OTHER_DIMENSION = 0, 1, 2, 3
"""Values of `forms`: a slot holds nothing (unknown or deleted), a vector, bytes, or a vector of another
dimension than the namespace has here, whose numbers are stored as bytes."""

DIRTY, STALE, IN_FLIGHT = 1, 2, 4
"""Flags of a slot: changed since it was last collected for the store; its norm is out of date; collected and
not yet committed."""

LAMPORT, ORIGIN, COUNTER, OFFSET = 0, 1, 2, 3
"""Columns of `heads`: the canonical key and the log offset of the last delta folded into a slot."""

FOLDED_KINDS = frozenset(map(int, Kind)) - {int(Kind.TRANSFORM)}
"""Kinds that can be folded."""

NO_OFFSET = NO_LAMPORT = -1
SLOT_BYTES = 200
"""Bytes of a slot without its numbers: head, flags, norm, its id, and what finds it by its id."""

_SLOTS_FIRST = 16
_TABLE_BYTES = 2000
_HEAD = struct.Struct("=qqqq")
_NO_HEAD = (NO_LAMPORT, 0, 0, NO_OFFSET)


class Misfit(Exception):
    """A delta that can never be folded into this table; the message names the reason."""


def unknown_kind(kind: int) -> Misfit:
    """Return the error for a delta of a later version."""
    return Misfit(f"operation kind {kind} is unknown here: upgrade, then replay it")


class VectorTable:
    """Columns with one row per slot, and dictionaries by slot for what few vectors have.

    `matrix` is None until the namespace's first vector fixes the dimension. `data`: the bytes of opaque
    vectors and of those of another dimension. `ignored`: the number of deltas without effect.
    `extra_bytes`: the bytes that `data` and `metadata` take. `releases`: how often a slot was released.
    """

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace
        self.dimension: int | None = None
        self.matrix: NDArray[np.float32] | None = None
        self.slots = make_slots()
        self.heads: NDArray[np.int64] = np.zeros((_SLOTS_FIRST, 4), np.int64)
        self.forms: NDArray[np.uint8] = np.zeros(_SLOTS_FIRST, np.uint8)
        self.flags: NDArray[np.uint8] = np.zeros(_SLOTS_FIRST, np.uint8)
        self.norms: NDArray[np.float64] = np.zeros(_SLOTS_FIRST)
        self.median_norm: float | None = None
        self.read_offsets: NDArray[np.int64] = np.zeros(_SLOTS_FIRST, np.int64)
        """By slot: the sink's next offset when the vector was last read; 0: never."""
        self.data: dict[int, bytes] = {}
        self.metadata: dict[int, dict[str, Any]] = {}
        self.ignored: dict[int, int] = {}
        self.extra_bytes_by_slot: dict[int, int] = {}
        self.extra_bytes = 0
        self.counted_size = 0
        """The part of `size` that the sink's sum over its tables already contains."""
        self.releases = 0
        self._head_bytes = self.heads.data.cast("B")

    @property
    def used(self) -> int:
        """The number of slots ever allocated; the columns hold data only below it."""
        return self.slots.used

    @property
    def size(self) -> int:
        """Bytes that the rows take."""
        return _TABLE_BYTES + len(self.slots) * (SLOT_BYTES + 4 * (self.dimension or 0)) + self.extra_bytes

    def slots_of(self, keys: Sequence[str]) -> NDArray[np.intp]:
        """Return the slots of vectors; allocate one for each new vector."""
        return np.fromiter(map(self.slot_of, keys), np.intp, len(keys))

    def find_slots(self, keys: Sequence[str]) -> NDArray[np.intp]:
        """Return the slots of vectors, -1 for each unknown vector."""
        find = self.slots.get
        return np.array([-1 if (slot := find(key)) is None else slot for key in keys], np.intp)

    def extend(
        self,
        keys: list[str],
        heads: NDArray[np.int64],
        forms: NDArray[np.uint8],
        vectors: NDArray[np.float32] | None,
    ) -> NDArray[np.intp]:
        """Add new vectors with their heads and forms; return their slots.

        Raises ValueError if one has a slot already.
        """
        if vectors is not None and self.dimension is None:
            self.fix_dimension(vectors.shape[1])
        count = len(self.slots) + len(keys)
        self.ensure_capacity(self.used + len(keys))
        added = np.array(self.slots.add_all(keys), np.intp)
        if len(self.slots) != count:
            raise ValueError(f"a vector of namespace {self.namespace!r} occurs twice")
        self.heads[added] = heads
        self.forms[added] = forms
        self.flags[added] = STALE
        if vectors is not None and self.matrix is not None:
            self.matrix[added] = vectors
        return added

    def vectors(self) -> Iterator[tuple[str, int]]:
        """Yield each vector id with its slot, slot by slot."""
        for slot in range(self.used):
            vector_id = self.slots.id(slot)
            if vector_id is not None:
                yield vector_id, slot

    def ensure_capacity(self, slots: int) -> None:
        """Grow the columns, by doubling, to at least `slots` slots."""
        capacity = len(self.heads)
        while capacity < slots:
            capacity *= 2
        if capacity > len(self.heads):
            self._grow(capacity)

    def slot_of(self, key: str) -> int:
        """Return the slot of a vector; allocate one for a new vector."""
        slot = self.slots.get(key)
        if slot is None:
            slot = self.slots.add(key)
            self.ensure_capacity(slot + 1)
            self._clear_head(slot)
        return slot

    def release(self, slot: int) -> None:
        """Drop a vector; its slot becomes free for another vector."""
        self.slots.remove(slot)
        self.releases += 1
        self._clear_head(slot)
        self.forms[slot] = ABSENT
        self.flags[slot] = 0
        self.read_offsets[slot] = 0
        self.ignored.pop(slot, None)
        self._drop_extras(slot)

    def head(self, slot: int) -> tuple[int, int, int, int]:
        """Return (Lamport number, origin, counter, offset) of the last delta folded into a slot."""
        lamport, origin, counter, offset = _HEAD.unpack_from(self._head_bytes, slot * _HEAD.size)
        return lamport, origin & _U64, counter, offset

    def set_head(self, slot: int, lamport: int, origin: int, counter: int, offset: int) -> None:
        """Store the last delta folded into a slot."""
        _HEAD.pack_into(self._head_bytes, slot * _HEAD.size, lamport, to_signed(origin), counter, offset)

    def _clear_head(self, slot: int) -> None:
        _HEAD.pack_into(self._head_bytes, slot * _HEAD.size, *_NO_HEAD)

    def fix_dimension(self, dimension: int) -> None:
        """Set the dimension, and allocate the matrix. Called once."""
        assert self.dimension is None
        self.dimension = dimension
        self.matrix = np.zeros((len(self.heads), dimension), np.float32)
        self._bind()

    def _grow(self, slots: int) -> None:
        self.heads = _grow_array(self.heads, slots)
        self.forms = _grow_array(self.forms, slots)
        self.flags = _grow_array(self.flags, slots)
        self.norms = _grow_array(self.norms, slots)
        self.read_offsets = _grow_array(self.read_offsets, slots)
        if self.matrix is not None:
            self.matrix = _grow_array(self.matrix, slots)
            self._bind()
        self._head_bytes = self.heads.data.cast("B")

    def _bind(self) -> None:
        self.slots.bind(self.heads, self.forms, self.flags, self.matrix, self.extra_bytes_by_slot)

    def fold_row(self, batch: Batch, row: int, slot: int) -> None:
        """Fold one delta; count it if it has no effect. Raises Misfit, with nothing changed."""
        width = batch.values_per_row
        if batch.kind != Kind.SPARSE or width is None or self.forms[slot] != VECTOR:
            self.fold_operation(slot, batch.operation(row), batch, row)
            return
        # The most frequent delta needs no Operation; and numpy is fast with indices of its own type only.
        assert self.matrix is not None
        part = slice(row * width, (row + 1) * width)
        try:
            self.matrix[slot][batch.indices[part].astype(np.intp)] = batch.values[part]
        except IndexError:  # numpy raises it before it sets anything
            self.count_ignored(slot)
            return
        if batch.has_metadata and (patch := batch.metadata(row)):
            self.patch(slot, patch)

    def fold_operation(self, slot: int, operation: Operation, batch: Batch, row: int) -> None:
        """Do the same as `fold_row` for a delta whose operation is already decoded."""
        if self._apply_operation(slot, operation) and batch.has_metadata and (patch := batch.metadata(row)):
            self.patch(slot, patch)

    def count_ignored(self, slot: int) -> None:
        """Count a delta without effect."""
        self.ignored[slot] = self.ignored.get(slot, 0) + 1

    def patch(self, slot: int, patch: dict[str, Any]) -> None:
        """Merge a patch into a live vector's metadata."""
        self.set_extra(slot, self.data.get(slot), merge(self.metadata.get(slot, {}), patch))

    def _apply_operation(self, slot: int, operation: Operation) -> bool:
        """Apply an operation; return True if the delta's metadata patch is still to be merged."""
        kind = operation.kind
        if kind == Kind.DELETE:
            self.clear(slot)
            return False
        if kind in PARTIAL_KINDS:
            if not self._change(slot, operation):
                self.count_ignored(slot)
                return False
        elif kind == Kind.OPAQUE:
            self.set_extra(slot, operation.data, self.metadata.get(slot))
            self.forms[slot] = OPAQUE
        elif operation.values is not None:
            if kind == Kind.CREATE:
                self._drop_extras(slot)
            self.set_vector(slot, operation.values)
        else:
            raise unknown_kind(kind)
        return True

    def _change(self, slot: int, operation: Operation) -> bool:
        """Change a part of a live vector; False if that has no effect."""
        form = self.forms[slot]
        if operation.kind == Kind.METADATA:
            return bool(form != ABSENT)
        if form != OTHER_DIMENSION:
            return bool(
                form == VECTOR and self.matrix is not None and apply_in_place(self.matrix[slot], operation)
            )
        vector = vector_of(self, slot)
        if not apply_in_place(vector, operation):
            return False
        self.data[slot] = vector.astype("<f4", copy=False).tobytes()
        return True

    def set_vector(self, slot: int, values: NDArray[np.float32]) -> None:
        """Set a slot to a vector; the first one fixes the dimension."""
        if self.dimension is None:
            self.fix_dimension(len(values))
        has_other_dimension = len(values) != self.dimension
        if has_other_dimension or slot in self.data:
            data = values.astype("<f4", copy=False).tobytes() if has_other_dimension else None
            self.set_extra(slot, data, self.metadata.get(slot))
        if not has_other_dimension:
            assert self.matrix is not None
            self.matrix[slot] = values
        self.forms[slot] = OTHER_DIMENSION if has_other_dimension else VECTOR

    def set_extra(self, slot: int, data: bytes | None, metadata: dict[str, Any] | None) -> None:
        """Set a slot's bytes and metadata, and count their memory. Never changes metadata in place."""
        self._drop_extras(slot)
        size = 0
        if data is not None:
            self.data[slot] = data
            size += 33 + len(data)
        if metadata:
            self.metadata[slot] = metadata
            size += estimate_bytes(metadata)
        if size:
            self.extra_bytes_by_slot[slot] = size
            self.extra_bytes += size

    def clear(self, slot: int) -> None:
        """Make a slot a tombstone."""
        self.forms[slot] = ABSENT
        self._drop_extras(slot)

    def _drop_extras(self, slot: int) -> None:
        size = self.extra_bytes_by_slot.pop(slot, None)
        if size is not None:
            self.extra_bytes -= size
            self.data.pop(slot, None)
            self.metadata.pop(slot, None)

    def fold_sparse(
        self, slot: int, kind: int, indices: NDArray[np.uint32], values: NDArray[np.float32]
    ) -> bool:
        """Fold concatenated sparse changes of one kind; False, with nothing changed, if rows need checks."""
        if self.forms[slot] != VECTOR or self.matrix is None:
            return False
        vector = self.matrix[slot]
        if len(indices) and int(indices.max()) >= len(vector):
            return False
        if kind == Kind.SPARSE:
            vector[indices] = values
            return True
        before = vector.copy()
        with np.errstate(over="ignore"):
            np.add.at(vector, indices, values)
        if np.isfinite(vector).all():
            return True
        vector[:] = before  # a sum left float32's range; folded one by one, each sum saturates
        return False


def fold_leading(
    tables: Sequence[VectorTable | None], logged: LoggedBatch, rows: NDArray[np.intp] | None, *, adds: bool
) -> tuple[int, int]:
    """Fold the leading rows of a batch that the native core takes, as `fold_row` would; none on the twin.

    `tables`: that of each of the batch's namespaces, or None. With `adds`, new vectors get slots; else rows
    that change a part of a vector without a slot are taken, and not folded. Returns how many were taken, and
    how many folded.
    """
    return core_mode.core.fold_rows(tables, logged.batch.raw, (logged.offset, logged.lamport), rows, adds)


def tombstones_before(table: VectorTable, start: int, end: int, offset: int) -> list[str]:
    """Return the ids of tombstones in slots from `start` to below `end`, whose last delta has an offset below
    `offset`, or an unknown one.
    """
    heads = table.heads[start:end]
    is_expired = (table.forms[start:end] == ABSENT) & (heads[:, LAMPORT] != NO_LAMPORT)
    is_expired &= heads[:, OFFSET] < offset
    return [str(table.slots.id(start + slot)) for slot in is_expired.nonzero()[0].tolist()]


def state_of(table: VectorTable, slot: int) -> VectorState:
    """Return a slot's state as an independent value."""
    form = int(table.forms[slot])
    return VectorState(
        alive=form != ABSENT,
        vector=vector_of(table, slot) if form in (VECTOR, OTHER_DIMENSION) else None,
        data=table.data[slot] if form == OPAQUE else None,
        metadata=table.metadata.get(slot, {}),
        ignored=table.ignored.get(slot, 0),
        key=table.head(slot)[:3],
    )


def vector_of(table: VectorTable, slot: int) -> NDArray[np.float32]:
    """Return a copy of a slot's vector."""
    if table.forms[slot] == OTHER_DIMENSION:
        return np.frombuffer(table.data[slot], "<f4").astype(np.float32)
    assert table.matrix is not None
    return np.array(table.matrix[slot])


def restore(table: VectorTable, slot: int, state: VectorState | ChainBase) -> None:
    """Set all of a slot's content except its head."""
    table.set_extra(slot, state.data, dict(state.metadata) if state.metadata else None)
    table.forms[slot] = ABSENT if state.data is None else OPAQUE
    if state.vector is not None:
        table.set_vector(slot, state.vector)
    table.ignored.pop(slot, None)
    if state.ignored:
        table.ignored[slot] = state.ignored


def put(table: VectorTable, vector_id: str, stored: VectorState | ChainBase, offset: int) -> None:
    """Set a new or existing vector to a stored state."""
    assert stored.key is not None, "the state has no key of a last delta"
    slot = table.slot_of(vector_id)
    restore(table, slot, stored)
    table.set_head(slot, *stored.key, offset)
    table.flags[slot] = STALE


_U64 = (1 << 64) - 1


def to_signed(origin: int) -> int:
    """Return the signed 64-bit number with the same bits as an unsigned one."""
    return origin - (1 << 64) if origin >> 63 else origin


def to_unsigned(number: int) -> int:
    """Return the inverse of `to_signed`."""
    return number & _U64


def estimate_bytes(value: Any) -> int:
    """Return the approximate bytes of a JSON value in memory."""
    if isinstance(value, str):
        return 50 + len(value)
    if isinstance(value, dict):
        return 64 + sum(50 + len(key) + estimate_bytes(item) for key, item in value.items())
    if isinstance(value, list):
        return 56 + sum(8 + estimate_bytes(item) for item in value)
    return 32


def _grow_array(array: NDArray[Any], rows: int) -> NDArray[Any]:
    larger = np.zeros((rows, *array.shape[1:]), array.dtype)
    larger[: len(array)] = array
    return larger
