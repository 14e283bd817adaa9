"""One namespace's vectors in memory: a float32 matrix, and per slot what is known of its vector.

Arithmetic and bookkeeping only: which rows may be folded, and when, is decided in `resident.py`.
A slot belongs to one vector id until it is released; slots of deleted vectors stay, as tombstones.
"""

from __future__ import annotations

import struct
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from delta_prop_sinks.cold_slots import ColdSlots
from delta_prop_wire.algebra import State, change, saturate
from delta_prop_wire.delta import PARTIAL_KINDS, Kind, Operation
from delta_prop_wire.metadata import merge

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from delta_prop_sinks.chain import Checkpoint
    from delta_prop_sinks.runs import Run
    from delta_prop_wire.batch import Batch, LoggedBatch

ABSENT, VECTOR, OPAQUE, ODD = 0, 1, 2, 3
"""What a slot holds: nothing (unknown or deleted), a vector, bytes, a vector of another dimension than the
namespace has here, whose numbers stand among the bytes."""

DIRTY, STALE, FLYING = 1, 2, 4
"""Marks of a slot: changed since it was last gathered for the store; its norm is out of date; gathered,
not yet committed."""

LAMPORT, ORIGIN, COUNTER, OFFSET = 0, 1, 2, 3
"""Columns of `heads`: canonical key and log offset of the last delta folded into a slot."""

BLOCK_ROWS_MIN = 5
"""From this many rows of one kind on, a few calls over arrays are faster than a call a row."""

BLOCK_KINDS = frozenset(
    {Kind.CREATE, Kind.DENSE, Kind.SPARSE, Kind.SPARSE_ADD, Kind.SCALE, Kind.OFFSET, Kind.DELETE}
)
"""Kinds that can be folded as blocks."""

FOLDED_KINDS = frozenset(map(int, Kind)) - {int(Kind.TRANSFORM)}
"""Kinds that can be folded."""

VOID_OFFSET = NO_LAMPORT = -1
SLOT_BYTES = 200
"""What a slot costs beside its numbers: heads, marks, norm, its id and that id's place in a dictionary."""

COLD_SLOTS_MIN = 200_000
"""A table of fewer vectors gets its dictionary at once."""

_SLOTS_FIRST = 16
_TABLE_BYTES = 2000
_HEAD = struct.Struct("=qqqq")
_NO_HEAD = (NO_LAMPORT, 0, 0, VOID_OFFSET)


class Misfit(Exception):
    """A delta that can never be folded into this table; the message says why."""


def unknown_kind(kind: int) -> Misfit:
    """Why a delta of a later version cannot be folded."""
    return Misfit(f"operation kind {kind} is unknown here: upgrade, then replay it")


class Table:
    """Columns by slot; `matrix` is None until the namespace's first vector fixes the dimension."""

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace
        self.dimension: int | None = None
        self.matrix: NDArray[np.float32] | None = None
        self.slots: dict[str, int] = {}
        self.ids: list[str | None] = []
        self.heads: NDArray[np.int64] = np.zeros((_SLOTS_FIRST, 4), np.int64)
        self.forms: NDArray[np.uint8] = np.zeros(_SLOTS_FIRST, np.uint8)
        self.marks: NDArray[np.uint8] = np.zeros(_SLOTS_FIRST, np.uint8)
        self.norms: NDArray[np.float64] = np.zeros(_SLOTS_FIRST)
        self.median_norm: float | None = None
        self.reads: NDArray[np.int64] = np.zeros(_SLOTS_FIRST, np.int64)
        self.data: dict[int, bytes] = {}
        self.metadata: dict[int, dict[str, Any]] = {}
        self.ignored: dict[int, int] = {}
        self.weights: dict[int, int] = {}
        self.weight = 0
        self.counted = 0
        self.releases = 0
        self._free: list[int] = []
        self._head_bytes = self.heads.data.cast("B")

    # --- slots

    @property
    def used(self) -> int:
        """Slots below this number have been given out; the columns' parts below it are meaningful."""
        return len(self.ids)

    @property
    def size(self) -> int:
        """Bytes that the rows take."""
        return _TABLE_BYTES + len(self.slots) * (SLOT_BYTES + 4 * (self.dimension or 0)) + self.weight

    def slots_of(self, keys: Sequence[str]) -> NDArray[np.intp]:
        """The slots of some vectors; those not yet there get one."""
        slots = self.slots
        if isinstance(slots, ColdSlots):
            slots.warm(keys)
        try:
            found = itemgetter(*keys)(slots)
        except KeyError:
            if self._free:
                found = [self.slot_of(key) for key in keys]
            else:
                warm = partial(dict.__contains__, slots)
                self._append([key for key in dict.fromkeys(keys) if not warm(key)])
                found = itemgetter(*keys)(slots)
        return np.array(found, np.intp).reshape(len(keys))

    def known(self, keys: Sequence[str]) -> NDArray[np.intp]:
        """The slots of some vectors, -1 for those that are not there."""
        slots = self.slots
        if isinstance(slots, ColdSlots):
            slots.warm(keys)
        try:
            found = itemgetter(*keys)(slots)
        except KeyError:
            found = [dict.get(slots, key, -1) for key in keys]
        return np.array(found, np.intp).reshape(len(keys))

    def _append(self, keys: Sequence[str], *, cold: bool = False) -> slice:
        """Give slots in a row to vectors that have none, each named once; `cold`: not to be found by name."""
        begin, end = self.used, self.used + len(keys)
        self.make_room(end)
        if not cold:
            self.slots.update(zip(keys, range(begin, end), strict=True))
        self.ids += keys
        self.heads[begin:end] = _NO_HEAD
        return slice(begin, end)

    def extend(
        self,
        keys: Sequence[str],
        heads: NDArray[np.int64],
        forms: NDArray[np.uint8],
        vectors: NDArray[np.float32] | None,
        *,
        cold: bool = False,
    ) -> None:
        """Take in vectors that are not there yet, as a store holds them. Raises ValueError where some are.

        `cold`: they can be found by name only when `name` has been called behind the last of them.
        """
        if vectors is not None and self.dimension is None:
            self.reserve(vectors.shape[1])
        added = self._append(keys, cold=cold)
        if not cold and len(self.slots) != self.used - len(self._free):
            raise ValueError(f"a vector of namespace {self.namespace!r} comes twice")
        self.heads[added] = heads
        self.forms[added] = forms
        self.marks[added] = STALE
        if vectors is not None and self.matrix is not None:
            self.matrix[added] = vectors

    def name(self, hashes: NDArray[np.uint32]) -> None:
        """Have all slots found by their ids, of which these are the hashes. Raises ValueError where one comes
        twice.
        """
        found = ColdSlots.of(self.ids, hashes) if self.used >= COLD_SLOTS_MIN else None
        self.slots = {key: slot for slot, key in enumerate(self.ids) if key} if found is None else found
        if len(self.slots) != self.used:
            raise ValueError(f"a vector of namespace {self.namespace!r} comes twice")

    def make_room(self, slots: int) -> None:
        """Grow the columns, by doubling, until they have so many slots."""
        room = len(self.heads)
        while room < slots:
            room *= 2
        if room > len(self.heads):
            self._grow(room)

    def slot_of(self, key: str) -> int:
        """The slot of a vector; one that is not yet there gets one."""
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
        """Forget a vector; its slot may serve another."""
        key = self.ids[slot]
        assert key is not None
        self.releases += 1
        del self.slots[key]
        self.ids[slot] = None
        self._clear_head(slot)
        self.forms[slot] = ABSENT
        self.marks[slot] = 0
        self.reads[slot] = 0
        self.ignored.pop(slot, None)
        self._drop_extras(slot)
        self._free.append(slot)

    def head(self, slot: int) -> tuple[int, int, int, int]:
        """(Lamport number, origin, counter, offset) of the last delta folded into a slot."""
        lamport, origin, counter, offset = _HEAD.unpack_from(self._head_bytes, slot * _HEAD.size)
        return lamport, origin & _U64, counter, offset

    def set_head(self, slot: int, lamport: int, origin: int, counter: int, offset: int) -> None:
        """Note the last delta folded into a slot."""
        _HEAD.pack_into(self._head_bytes, slot * _HEAD.size, lamport, signed(origin), counter, offset)

    def _clear_head(self, slot: int) -> None:
        _HEAD.pack_into(self._head_bytes, slot * _HEAD.size, *_NO_HEAD)

    def reserve(self, dimension: int) -> None:
        """Fix the dimension, once."""
        assert self.dimension is None
        self.dimension = dimension
        self.matrix = np.zeros((len(self.heads), dimension), np.float32)

    def _grow(self, slots: int) -> None:
        self.heads = _grown(self.heads, slots)
        self.forms = _grown(self.forms, slots)
        self.marks = _grown(self.marks, slots)
        self.norms = _grown(self.norms, slots)
        self.reads = _grown(self.reads, slots)
        if self.matrix is not None:
            self.matrix = _grown(self.matrix, slots)
        self._head_bytes = self.heads.data.cast("B")

    # --- one row

    def fold_row(self, batch: Batch, row: int, slot: int) -> None:
        """Fold one delta; one without effect is counted. Raises Misfit, with nothing changed."""
        kind = batch.kind
        if kind == Kind.SPARSE and (width := batch.row_values) is not None:
            # The commonest delta, without the detour over an Operation.
            part = slice(row * width, (row + 1) * width)
            if not self._set_sparse(slot, batch.indices[part], batch.values[part]):
                self.ignore(slot)
                return
        else:
            self.fold_operation(slot, batch.operation(row), batch, row)
            return
        if batch.has_metadata and (patch := batch.metadata(row)):
            self.patch(slot, patch)

    def fold_operation(self, slot: int, operation: Operation, batch: Batch, row: int) -> None:
        """Likewise, one whose operation is at hand."""
        if self._fold_operation(slot, operation) and batch.has_metadata and (patch := batch.metadata(row)):
            self.patch(slot, patch)

    def ignore(self, slot: int) -> None:
        """Count a delta without effect."""
        self.ignored[slot] = self.ignored.get(slot, 0) + 1

    def patch(self, slot: int, patch: dict[str, Any]) -> None:
        """Change the metadata of what lives."""
        self.set_extra(slot, self.data.get(slot), merge(self.metadata.get(slot, {}), patch))

    def _fold_operation(self, slot: int, operation: Operation) -> bool:
        kind = operation.kind
        if kind == Kind.DELETE:
            self.clear(slot)
            return False
        if kind in PARTIAL_KINDS:
            if not self._change(slot, operation):
                self.ignore(slot)
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
        except IndexError:  # raised before anything is set
            return False
        return True

    def _change(self, slot: int, operation: Operation) -> bool:
        """Change a part of what lives; False where it has no effect."""
        form = self.forms[slot]
        if operation.kind == Kind.METADATA:
            return bool(form != ABSENT)
        if form != ODD:
            return bool(form == VECTOR and self.matrix is not None and change(self.matrix[slot], operation))
        vector = vector_of(self, slot)
        if not change(vector, operation):
            return False
        self.data[slot] = vector.astype("<f4", copy=False).tobytes()
        return True

    def set_vector(self, slot: int, values: NDArray[np.float32]) -> None:
        """Set a slot to a vector; the first one fixes the dimension."""
        if self.dimension is None:
            self.reserve(len(values))
        odd = len(values) != self.dimension
        if odd or slot in self.data:
            data = values.astype("<f4", copy=False).tobytes() if odd else None
            self.set_extra(slot, data, self.metadata.get(slot))
        if not odd:
            assert self.matrix is not None
            self.matrix[slot] = values
        self.forms[slot] = ODD if odd else VECTOR

    def set_extra(self, slot: int, data: bytes | None, metadata: dict[str, Any] | None) -> None:
        """Set what a slot holds beside numbers, and weigh it. Metadata is never changed in place."""
        self._drop_extras(slot)
        weight = 0
        if data is not None:
            self.data[slot] = data
            weight += 33 + len(data)
        if metadata:
            self.metadata[slot] = metadata
            weight += weigh(metadata)
        if weight:
            self.weights[slot] = weight
            self.weight += weight

    def clear(self, slot: int) -> None:
        """Make a slot a tombstone."""
        self.forms[slot] = ABSENT
        self._drop_extras(slot)

    def _drop_extras(self, slot: int) -> None:
        weight = self.weights.pop(slot, None)
        if weight is not None:
            self.weight -= weight
            self.data.pop(slot, None)
            self.metadata.pop(slot, None)

    def fold_sparse(
        self, slot: int, kind: int, indices: NDArray[np.uint32], values: NDArray[np.float32]
    ) -> bool:
        """Fold sparse changes of one kind, which stand end to end; False, and nothing changed, where they
        need a closer look.
        """
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
        vector[:] = before  # a sum left float32's range: one by one, each sum is brought back
        return False

    # --- blocks: the same arithmetic over many rows of one kind

    def fold_block(
        self, batch: Batch | Run, kind: int, rows: NDArray[np.intp] | None, slots: NDArray[np.intp]
    ) -> bool:
        """Fold rows of one kind in a few calls; False, and nothing changed, where they need a closer look.

        Where a vector comes twice, later rows win (numpy assigns in order) or add up.
        """
        width = batch.row_values
        if width is None or self.matrix is None:
            return False
        patched = batch.has_metadata and kind != Kind.DELETE
        if patched and kind == Kind.CREATE and len(set(slots.tolist())) < len(slots):
            return False
        if not self._fold_numbers(batch, kind, rows, slots, width):
            return False
        if patched:
            for row, slot in zip(
                range(batch.count) if rows is None else rows.tolist(), slots.tolist(), strict=True
            ):
                if patch := batch.metadata(row):
                    self.patch(slot, patch)
        return True

    def _fold_numbers(
        self,
        batch: Batch | Run,
        kind: int,
        rows: NDArray[np.intp] | None,
        slots: NDArray[np.intp],
        width: int,
    ) -> bool:
        assert self.matrix is not None
        if kind == Kind.DELETE:
            self.forms[slots] = ABSENT
            if self.weights:
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
            chosen = indices if rows is None else indices[rows]
            return self._sparse_block(kind, slots, chosen, values, batch.index_highest)
        if kind in (Kind.SCALE, Kind.OFFSET) and len(set(slots.tolist())) == len(slots):
            return self._whole_block(kind, slots, values)
        return False

    def _set_block(self, kind: int, slots: NDArray[np.intp], values: NDArray[np.float32]) -> bool:
        assert self.matrix is not None
        if values.shape[1] != self.dimension:
            return False
        self.matrix[slots] = values
        if self.weights:
            for slot in slots.tolist():
                if kind == Kind.CREATE:
                    self._drop_extras(slot)
                elif slot in self.data:
                    self.set_extra(slot, None, self.metadata.get(slot))
        self.forms[slots] = VECTOR
        return True

    def _whole_block(self, kind: int, slots: NDArray[np.intp], values: NDArray[np.float32]) -> bool:
        assert self.matrix is not None
        vectors = self.matrix[slots]
        with np.errstate(over="ignore"):
            (np.multiply if kind == Kind.SCALE else np.add)(vectors, values, out=vectors)
        saturate(vectors)
        self.matrix[slots] = vectors
        return True

    def _sparse_block(
        self,
        kind: int,
        slots: NDArray[np.intp],
        indices: NDArray[np.uint32],
        values: NDArray[np.float32],
        highest: int,
    ) -> bool:
        """`highest`: no index is above it."""
        assert self.matrix is not None
        assert self.dimension is not None
        if highest >= self.dimension:
            return False
        places = (indices + (slots * self.dimension)[:, None]).reshape(-1)
        numbers, flat = values.reshape(-1), self.matrix.reshape(-1)
        if kind == Kind.SPARSE:
            flat[places] = numbers  # as put, in half the time
            return True
        before = flat[places]
        with np.errstate(over="ignore"):
            np.add.at(flat, places, numbers)
        if np.isfinite(flat[places]).all():
            return True
        flat[places] = before  # a sum left float32's range: row by row, each sum is brought back
        return False


def state_of(table: Table, slot: int) -> State:
    """A slot's state as a value of its own."""
    form = int(table.forms[slot])
    return State(
        alive=form != ABSENT,
        vector=vector_of(table, slot) if form in (VECTOR, ODD) else None,
        data=table.data[slot] if form == OPAQUE else None,
        metadata=table.metadata.get(slot, {}),
        ignored=table.ignored.get(slot, 0),
        key=table.head(slot)[:3],
    )


def vector_of(table: Table, slot: int) -> NDArray[np.float32]:
    """A copy of a slot's vector."""
    if table.forms[slot] == ODD:
        return np.frombuffer(table.data[slot], "<f4").astype(np.float32)
    assert table.matrix is not None
    return np.array(table.matrix[slot])


def restore(table: Table, slot: int, state: State | Checkpoint) -> None:
    """Set all that a slot holds, its head aside."""
    table.set_extra(slot, state.data, dict(state.metadata) if state.metadata else None)
    table.forms[slot] = ABSENT if state.data is None else OPAQUE
    if state.vector is not None:
        table.set_vector(slot, state.vector)
    table.ignored.pop(slot, None)
    if state.ignored:
        table.ignored[slot] = state.ignored


def put(table: Table, vector_id: str, stored: State | Checkpoint, offset: int) -> None:
    """Set a vector, there already or not, to what a store holds of it."""
    assert stored.key is not None, "the state of a vector names its last delta"
    slot = table.slot_of(vector_id)
    restore(table, slot, stored)
    table.set_head(slot, *stored.key, offset)
    table.marks[slot] = STALE


def heads_of(logged: LoggedBatch, rows: NDArray[np.intp] | None) -> NDArray[np.int64]:
    """What `heads` shall hold after each row."""
    batch = logged.batch
    if batch.counters is None and (rows is None or len(rows) == batch.count):
        return rising_heads(logged, batch.count)
    at = np.arange(batch.count) if rows is None else rows
    block = np.empty((len(at), 4), np.int64)
    block[:, LAMPORT] = at + logged.lamport
    block[:, ORIGIN] = signed(batch.origin)
    counters = batch.counters
    block[:, COUNTER] = at + batch.base if counters is None else counters[at]
    block[:, OFFSET] = at + logged.offset
    return block


def rising_heads(first: LoggedBatch, count: int) -> NDArray[np.int64]:
    """The same for so many rows, side by side from a batch's first on, whichever batches bring them."""
    batch = first.batch
    numbers = (first.lamport, signed(batch.origin), batch.base, first.offset)
    steps = _STEPS[:count] if count <= _STEPS_MAX else np.arange(count)[:, None] * _STEP
    heads: NDArray[np.int64] = steps + np.array(numbers, np.int64)
    return heads


_U64 = (1 << 64) - 1
_STEPS_MAX = 1024
_STEP = np.array([1, 0, 1, 1])
_STEPS = np.arange(_STEPS_MAX, dtype=np.int64)[:, None] * _STEP
"""By how much a row's head is above that of its batch's first row."""


def signed(origin: int) -> int:
    """An unsigned 64-bit number as the signed one with the same bits."""
    return origin - (1 << 64) if origin >> 63 else origin


def unsigned(number: int) -> int:
    """The inverse of `signed`."""
    return number & _U64


def weigh(value: Any) -> int:
    """About how many bytes a JSON value takes in memory."""
    if isinstance(value, str):
        return 50 + len(value)
    if isinstance(value, dict):
        return 64 + sum(50 + len(key) + weigh(item) for key, item in value.items())
    if isinstance(value, list):
        return 56 + sum(8 + weigh(item) for item in value)
    return 32


def _grown(array: NDArray[Any], rows: int) -> NDArray[Any]:
    larger = np.zeros((rows, *array.shape[1:]), array.dtype)
    larger[: len(array)] = array
    return larger
