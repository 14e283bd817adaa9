"""One namespace's vectors in memory: a float32 matrix, and per slot the other data of a vector.

Arithmetic and bookkeeping only: `resident.py` decides which rows are folded, and when. A slot belongs to one
vector id until it is released; slots of deleted vectors remain as tombstones.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from delta_prop_sinks.cold_slots import ColdSlots
from delta_prop_wire.algebra import VectorState, apply_in_place, saturate
from delta_prop_wire.batch import Batch, LoggedBatch
from delta_prop_wire.delta import PARTIAL_KINDS, Kind, Operation
from delta_prop_wire.metadata import merge

if TYPE_CHECKING:
    from delta_prop_sinks.delta_chain import ChainBase
    from delta_prop_sinks.fold_run import FoldRun

ABSENT, VECTOR, OPAQUE, OTHER_DIMENSION = 0, 1, 2, 3
"""Values of `forms`: a slot holds nothing (unknown or deleted), a vector, bytes, or a vector of another
dimension than the namespace has here, whose numbers are stored as bytes."""

DIRTY, STALE, IN_FLIGHT = 1, 2, 4
"""Flags of a slot: changed since it was last collected for the store; its norm is out of date; collected and
not yet committed."""

LAMPORT, ORIGIN, COUNTER, OFFSET = 0, 1, 2, 3
"""Columns of `heads`: the canonical key and the log offset of the last delta folded into a slot."""

BLOCK_ROWS_MIN = 5
"""From this many rows of one kind on, a few calls over arrays are faster than one call per row."""

BLOCK_KINDS = frozenset(
    {Kind.CREATE, Kind.DENSE, Kind.SPARSE, Kind.SPARSE_ADD, Kind.SCALE, Kind.OFFSET, Kind.DELETE}
)
"""Kinds that can be folded as blocks."""

FOLDED_KINDS = frozenset(map(int, Kind)) - {int(Kind.TRANSFORM)}
"""Kinds that can be folded."""

NO_OFFSET = NO_LAMPORT = -1
SLOT_BYTES = 200
"""Bytes of a slot without its numbers: head, flags, norm, its id and the id's dictionary entry."""

COLD_SLOTS_MIN = 200_000
"""From this many vectors on, `index_ids` makes them findable by sorted hashes of their ids, and the
dictionary fills as ids are looked up (`cold_slots.py`)."""

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
        self.slots: dict[str, int] = {}  # by vector id
        self.ids: list[str | None] = []  # None for a released slot
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
        self._free: list[int] = []
        self._head_bytes = self.heads.data.cast("B")

    @property
    def used(self) -> int:
        """The number of slots ever allocated; the columns hold data only below it."""
        return len(self.ids)

    @property
    def size(self) -> int:
        """Bytes that the rows take."""
        return _TABLE_BYTES + len(self.slots) * (SLOT_BYTES + 4 * (self.dimension or 0)) + self.extra_bytes

    def slots_of(self, keys: Sequence[str]) -> NDArray[np.intp]:
        """Return the slots of vectors; allocate one for each new vector."""
        slots = self.slots
        if isinstance(slots, ColdSlots):
            slots.warm(keys)
        try:
            found_slots = itemgetter(*keys)(slots)
        except KeyError:
            if self._free:
                found_slots = [self.slot_of(key) for key in keys]
            else:
                is_known = partial(dict.__contains__, slots)
                self._append([key for key in dict.fromkeys(keys) if not is_known(key)])
                found_slots = itemgetter(*keys)(slots)
        return np.array(found_slots, np.intp).reshape(len(keys))

    def find_slots(self, keys: Sequence[str]) -> NDArray[np.intp]:
        """Return the slots of vectors, -1 for each unknown vector."""
        slots = self.slots
        if isinstance(slots, ColdSlots):
            slots.warm(keys)
        try:
            found_slots = itemgetter(*keys)(slots)
        except KeyError:
            found_slots = [dict.get(slots, key, -1) for key in keys]
        return np.array(found_slots, np.intp).reshape(len(keys))

    def _append(self, keys: Sequence[str], *, cold: bool = False) -> slice:
        """Allocate adjacent slots to distinct new vectors; with `cold`, without dictionary entries."""
        start, end = self.used, self.used + len(keys)
        self.ensure_capacity(end)
        if not cold:
            self.slots.update(zip(keys, range(start, end), strict=True))
        self.ids += keys
        self.heads[start:end] = _NO_HEAD
        return slice(start, end)

    def extend(
        self,
        keys: Sequence[str],
        heads: NDArray[np.int64],
        forms: NDArray[np.uint8],
        vectors: NDArray[np.float32] | None,
        *,
        cold: bool = False,
    ) -> None:
        """Add new vectors with their heads and forms. Raises ValueError if one has a slot already.

        `cold`: lookups by id find the vectors only after `index_ids`, which must follow the last `extend`.
        """
        if vectors is not None and self.dimension is None:
            self.fix_dimension(vectors.shape[1])
        added = self._append(keys, cold=cold)
        if not cold and len(self.slots) != self.used - len(self._free):
            raise ValueError(f"a vector of namespace {self.namespace!r} occurs twice")
        self.heads[added] = heads
        self.forms[added] = forms
        self.flags[added] = STALE
        if vectors is not None and self.matrix is not None:
            self.matrix[added] = vectors

    def index_ids(self, hashes: NDArray[np.uint32]) -> None:
        """Make all slots findable by their ids, given the ids' hashes. Raises ValueError for equal ids."""
        cold_slots = ColdSlots.from_hashes(self.ids, hashes) if self.used >= COLD_SLOTS_MIN else None
        self.slots = (
            {key: slot for slot, key in enumerate(self.ids) if key} if cold_slots is None else cold_slots
        )
        if len(self.slots) != self.used:
            raise ValueError(f"a vector of namespace {self.namespace!r} occurs twice")

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
        if slot is not None:
            return slot
        if self._free:
            slot = self._free.pop()
            self.ids[slot] = key
        else:
            slot = len(self.ids)
            if slot == len(self.heads):
                self._grow(2 * slot)
            self.ids.append(key)
        self.slots[key] = slot
        self._clear_head(slot)
        return slot

    def release(self, slot: int) -> None:
        """Drop a vector; its slot becomes free for another vector."""
        key = self.ids[slot]
        assert key is not None
        self.releases += 1
        del self.slots[key]
        self.ids[slot] = None
        self._clear_head(slot)
        self.forms[slot] = ABSENT
        self.flags[slot] = 0
        self.read_offsets[slot] = 0
        self.ignored.pop(slot, None)
        self._drop_extras(slot)
        self._free.append(slot)

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

    def _grow(self, slots: int) -> None:
        self.heads = _grow_array(self.heads, slots)
        self.forms = _grow_array(self.forms, slots)
        self.flags = _grow_array(self.flags, slots)
        self.norms = _grow_array(self.norms, slots)
        self.read_offsets = _grow_array(self.read_offsets, slots)
        if self.matrix is not None:
            self.matrix = _grow_array(self.matrix, slots)
        self._head_bytes = self.heads.data.cast("B")

    def fold_row(self, batch: Batch, row: int, slot: int) -> None:
        """Fold one delta; count it if it has no effect. Raises Misfit, with nothing changed."""
        kind = batch.kind
        if kind == Kind.SPARSE and (width := batch.values_per_row) is not None:
            # The most frequent delta takes a shortcut without an Operation.
            part = slice(row * width, (row + 1) * width)
            if not self._set_sparse(slot, batch.indices[part], batch.values[part]):
                self.count_ignored(slot)
                return
        else:
            self.fold_operation(slot, batch.operation(row), batch, row)
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

    def _set_sparse(self, slot: int, indices: NDArray[np.uint32], values: NDArray[np.float32]) -> bool:
        if self.forms[slot] != VECTOR or self.matrix is None:
            return self._change(slot, Operation(Kind.SPARSE, values, indices))
        try:
            self.matrix[slot][indices] = values
        except IndexError:  # numpy raises it before it sets anything
            return False
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

    # --- blocks: many rows of one kind, folded in a few calls over arrays

    def fold_block(
        self, batch: Batch | FoldRun, kind: int, rows: NDArray[np.intp] | None, slots: NDArray[np.intp]
    ) -> bool:
        """Fold rows of one kind in a few calls; False, with nothing changed, if they need checks one by one.

        If a vector occurs twice, the later row wins (numpy assigns in order); with SPARSE_ADD both rows are
        added.
        """
        width = batch.values_per_row
        if width is None or self.matrix is None:
            return False
        has_patches = batch.has_metadata and kind != Kind.DELETE
        if has_patches and kind == Kind.CREATE and len(set(slots.tolist())) < len(slots):
            return False
        if not self._fold_numbers(batch, kind, rows, slots, width):
            return False
        if has_patches:
            for row, slot in zip(
                range(batch.count) if rows is None else rows.tolist(), slots.tolist(), strict=True
            ):
                if patch := batch.metadata(row):
                    self.patch(slot, patch)
        return True

    def _fold_numbers(
        self,
        batch: Batch | FoldRun,
        kind: int,
        rows: NDArray[np.intp] | None,
        slots: NDArray[np.intp],
        width: int,
    ) -> bool:
        assert self.matrix is not None
        if kind == Kind.DELETE:
            self.forms[slots] = ABSENT
            if self.extra_bytes_by_slot:
                for slot in slots.tolist():
                    self._drop_extras(slot)
            return True
        values = batch.values.reshape(batch.count, width)
        if rows is not None:
            values = values[rows]
        if kind in (Kind.CREATE, Kind.DENSE):
            return self._set_block(kind, slots, values)
        if self.forms.take(slots).tobytes().count(VECTOR) != len(slots):
            return False
        if kind in (Kind.SPARSE, Kind.SPARSE_ADD):
            indices = batch.indices.reshape(batch.count, width)
            row_indices = indices if rows is None else indices[rows]
            return self._change_sparse_block(kind, slots, row_indices, values, batch.highest_index)
        if kind in (Kind.SCALE, Kind.OFFSET) and len(set(slots.tolist())) == len(slots):
            return self._change_block(kind, slots, values)
        return False

    def _set_block(self, kind: int, slots: NDArray[np.intp], values: NDArray[np.float32]) -> bool:
        assert self.matrix is not None
        if values.shape[1] != self.dimension:
            return False
        self.matrix[slots] = values
        if self.extra_bytes_by_slot:
            for slot in slots.tolist():
                if kind == Kind.CREATE:
                    self._drop_extras(slot)
                elif slot in self.data:
                    self.set_extra(slot, None, self.metadata.get(slot))
        self.forms[slots] = VECTOR
        return True

    def _change_block(self, kind: int, slots: NDArray[np.intp], values: NDArray[np.float32]) -> bool:
        assert self.matrix is not None
        vectors = self.matrix[slots]
        with np.errstate(over="ignore"):
            (np.multiply if kind == Kind.SCALE else np.add)(vectors, values, out=vectors)
        saturate(vectors)
        self.matrix[slots] = vectors
        return True

    def _change_sparse_block(
        self,
        kind: int,
        slots: NDArray[np.intp],
        indices: NDArray[np.uint32],
        values: NDArray[np.float32],
        highest: int,
    ) -> bool:
        """Set, or add to, the numbers at `indices`; False, with nothing changed, if an index or a
        sum is out of range. `highest`: an upper bound of all indices.
        """
        assert self.matrix is not None
        assert self.dimension is not None
        if highest >= self.dimension:
            return False
        positions = (indices + (slots * self.dimension)[:, None]).reshape(-1)
        numbers, flat = values.reshape(-1), self.matrix.reshape(-1)
        if kind == Kind.SPARSE:
            flat[positions] = numbers  # the same as np.put, in half the time
            return True
        before = flat[positions]
        with np.errstate(over="ignore"):
            np.add.at(flat, positions, numbers)
        if np.isfinite(flat[positions]).all():
            return True
        flat[positions] = before  # a sum left float32's range; folded row by row, each sum saturates
        return False


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


def heads_of(logged: LoggedBatch, rows: NDArray[np.intp] | None) -> NDArray[np.int64]:
    """Return the head of each row's vector once the row is folded, as in a table's `heads`."""
    batch = logged.batch
    if batch.counters is None and (rows is None or len(rows) == batch.count):
        return consecutive_heads(logged, batch.count)
    indexes = np.arange(batch.count) if rows is None else rows
    heads = np.empty((len(indexes), 4), np.int64)
    heads[:, LAMPORT] = indexes + logged.lamport
    heads[:, ORIGIN] = to_signed(batch.origin)
    counters = batch.counters
    heads[:, COUNTER] = indexes + batch.base if counters is None else counters[indexes]
    heads[:, OFFSET] = indexes + logged.offset
    return heads


def consecutive_heads(first: LoggedBatch, count: int) -> NDArray[np.int64]:
    """Return the heads of `count` rows, with consecutive numbers, from the first row of `first` on."""
    batch = first.batch
    numbers = (first.lamport, to_signed(batch.origin), batch.base, first.offset)
    steps = _STEPS[:count] if count <= _STEPS_MAX else np.arange(count)[:, None] * _STEP
    heads: NDArray[np.int64] = steps + np.array(numbers, np.int64)
    return heads


_U64 = (1 << 64) - 1
_STEPS_MAX = 1024
_STEP = np.array([1, 0, 1, 1])
_STEPS = np.arange(_STEPS_MAX, dtype=np.int64)[:, None] * _STEP
"""The difference between the head of a row and the head of the first row."""


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
