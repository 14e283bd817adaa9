"""Converts rows between resident tables and the storage file.

The event loop collects rows, and the sink's thread encodes them. This module knows the file's columns;
`storage_file.py` has SQL and transactions.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, repeat
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from delta_prop_sinks.delta_chain import ChainBase
from delta_prop_sinks.storage_image import Block
from delta_prop_sinks.vector_table import (
    ABSENT,
    COUNTER,
    DIRTY,
    IN_FLIGHT,
    LAMPORT,
    NO_OFFSET,
    OFFSET,
    OPAQUE,
    ORIGIN,
    OTHER_DIMENSION,
    VECTOR,
    VectorTable,
    to_signed,
    to_unsigned,
)
from delta_prop_wire.algebra import VectorState
from delta_prop_wire.state_rows import StateRow

COLUMNS = (
    "namespace",
    "vector_id",
    "form",
    "dimension",
    "written",
    "value",
    "metadata",
    "ignored",
    "lamport",
    "origin",
    "counter",
    "log",
    "offset",
)
"""The columns of a row; `origin` is signed in the file, `written` numbers the commit that wrote the row."""

Record: TypeAlias = tuple[Any, ...]
"""The values of a row, in the order of COLUMNS."""

ROWS_MAX = 4096
"""Maximum number of rows per transaction."""
BYTES_MAX = 16 << 20
"""Maximum bytes of numbers per transaction."""


class DirtyRows:
    """Copies of one table's changed rows, made on the event loop; their slots are in flight until the commit
    returns.
    """

    def __init__(self, table: VectorTable, slots: NDArray[np.intp]) -> None:
        self._table, self._slots = table, slots
        self._forms = table.forms[slots]
        self._heads = table.heads[slots]
        self._values = None if table.matrix is None else table.matrix[slots]
        slot_list = slots.tolist()
        self._ids = list(map(table.slots.id, slot_list))
        self._data = list(map(table.data.get, slot_list)) if table.data else None
        self._metadata = list(map(table.metadata.get, slot_list)) if table.metadata else None
        self._ignored = [table.ignored.get(slot, 0) for slot in slot_list] if table.ignored else None
        table.flags[slots] = table.flags[slots] & ~np.uint8(DIRTY) | IN_FLIGHT

    def __len__(self) -> int:
        return len(self._slots)

    def records(self, log_number: int, commit_number: int) -> Iterator[Record]:
        """Yield the rows as the file stores them. Reads no data that the event loop changes."""
        forms, heads = self._forms.tolist(), self._heads
        width = 0 if self._values is None else self._values.shape[1]
        values: Iterable[bytes | None] = self._vectors(width)
        dimensions: Iterable[int | None] = repeat(width)
        if (self._forms != VECTOR).any():
            data = self._data or [None] * len(forms)
            values = [
                vector if form == VECTOR else other
                for form, vector, other in zip(forms, values, data, strict=True)
            ]
            dimensions = [
                width if form == VECTOR else len(value or b"") // 4 if form == OTHER_DIMENSION else None
                for form, value in zip(forms, values, strict=True)
            ]
            # The file needs no OTHER_DIMENSION: each row stores its own dimension.
            forms = [VECTOR if form == OTHER_DIMENSION else form for form in forms]
        return zip(
            repeat(self._table.namespace, len(forms)),
            self._ids,
            forms,
            dimensions,
            repeat(commit_number),
            values,
            repeat(None) if self._metadata is None else map(_metadata_text, self._metadata),
            repeat(0) if self._ignored is None else self._ignored,
            heads[:, LAMPORT].tolist(),
            heads[:, ORIGIN].tolist(),
            heads[:, COUNTER].tolist(),
            repeat(log_number),
            heads[:, OFFSET].tolist(),
            strict=False,
        )

    def note_committed(self) -> None:
        """Mark the rows durable: they may be evicted unless they changed meanwhile."""
        self._table.flags[self._slots] &= ~np.uint8(IN_FLIGHT)

    def note_failed(self) -> None:
        """Mark the rows dirty, as before."""
        flags = self._table.flags
        flags[self._slots] = flags[self._slots] & ~np.uint8(IN_FLIGHT) | DIRTY

    def _vectors(self, width: int) -> list[bytes | None]:
        if self._values is None:
            return [None] * len(self)
        size = 4 * width
        numbers = self._values.astype("<f4", copy=False).tobytes()
        starts = range(0, size * len(self), size or 1)
        return [numbers[start : start + size] for start in starts] or [b""] * len(self)


class StoredRow(NamedTuple):
    """A row as the file holds it; `offset` is NO_OFFSET if the row is of another log than the present one."""

    namespace: str
    vector_id: str
    base: ChainBase
    offset: int

    @classmethod
    def of(cls, record: Record, log_number: int | None) -> StoredRow:
        """Decode a row. `log_number`: that of the present log."""
        namespace, vector_id, form, _, _, value, text, ignored, lamport, origin, counter, row_log, offset = (
            record
        )
        base = ChainBase(
            key=(lamport, to_unsigned(origin), counter),
            form=form,
            vector=np.frombuffer(value, "<f4") if form == VECTOR else None,
            data=value if form == OPAQUE else None,
            metadata=None if text is None else json.loads(text),
            ignored=ignored,
        )
        return cls(namespace, vector_id, base, offset if row_log == log_number else NO_OFFSET)

    @property
    def state(self) -> VectorState:
        """The row as a vector state."""
        return self.base.state


def records_of(rows: Iterable[StateRow], log_number: int, commit_number: int) -> list[Record]:
    """Return states as the file stores them, in the file's order, so that neighbours share pages."""
    return sorted((_record_of(row, log_number, commit_number) for row in rows), key=itemgetter(0, 1))


def _record_of(row: StateRow, log_number: int, commit_number: int) -> Record:
    state = row.state
    assert state.key is not None, "the state has no key of a last delta"
    lamport, origin, counter = state.key
    form, dimension, value = ABSENT, None, state.data
    if state.data is not None:
        form = OPAQUE
    elif state.vector is not None:
        form, dimension = VECTOR, len(state.vector)
        value = state.vector.astype("<f4", copy=False).tobytes()
    metadata = _metadata_text(dict(state.metadata))
    return (
        *(row.namespace, row.vector_id, form, dimension, commit_number, value, metadata, state.ignored),
        *(lamport, to_signed(origin), counter, log_number, row.offset),
    )


def blocks_of(records: Sequence[Record], log_number: int | None) -> Iterator[Block]:
    """Yield rows in the file's order as blocks, one per namespace. `log_number`: that of the present log.

    A block has the dimension of its first vector; vectors of another dimension are marked `OTHER_DIMENSION`,
    and the loader may reclassify them.
    """
    for namespace, group in groupby(records, itemgetter(0)):
        columns: list[tuple[Any, ...]] = list(zip(*group, strict=True))
        _, vector_ids, forms, dimensions, _, values, metadata, ignored, *key_columns, logs, offsets = columns
        dimension = next((d for form, d in zip(forms, dimensions, strict=True) if form == VECTOR), None)
        is_other = [form == VECTOR and d != dimension for form, d in zip(forms, dimensions, strict=True)]
        block_forms = np.array(forms, np.uint8)
        block_forms[is_other] = OTHER_DIMENSION
        vector_rows = (block_forms == VECTOR).nonzero()[0]
        vectors = None
        if dimension is not None:
            vectors = np.zeros((len(vector_ids), dimension), np.float32)
            has_only_vectors = len(vector_rows) == len(vector_ids)
            numbers_of_rows = values if has_only_vectors else [values[row] for row in vector_rows.tolist()]
            numbers_joined = np.frombuffer(b"".join(numbers_of_rows), "<f4")
            vectors[vector_rows] = numbers_joined.reshape(len(vector_rows), dimension)
        is_of_log = np.array([number == log_number for number in logs])
        heads = np.stack([np.array(column, np.int64) for column in (*key_columns, offsets)], axis=1)
        heads[~is_of_log, OFFSET] = NO_OFFSET
        extras = {
            row: (
                values[row] if block_forms[row] in (OPAQUE, OTHER_DIMENSION) else None,
                None if metadata[row] is None else json.loads(metadata[row]),
                ignored[row],
            )
            for row in range(len(vector_ids))
            if block_forms[row] in (OPAQUE, OTHER_DIMENSION) or metadata[row] is not None or ignored[row]
        }
        yield Block(namespace, dimension, list(vector_ids), heads, block_forms, vectors, extras)


def dirty_groups(tables: Iterable[VectorTable]) -> list[list[tuple[VectorTable, NDArray[np.intp]]]]:
    """Return the changed slots of tables, in groups small enough for one transaction each."""
    groups: list[list[tuple[VectorTable, NDArray[np.intp]]]] = []
    capacity = 0.0
    for table in tables:
        slots = dirty_slots(table).nonzero()[0]
        # The part of a group's capacity that one row takes.
        row_share = max(1 / ROWS_MAX, 4 * (table.dimension or 0) / BYTES_MAX)
        while len(slots):
            if capacity < row_share:
                groups.append([])
                capacity = 1.0
            fit = max(1, int(capacity / row_share))
            groups[-1].append((table, slots[:fit]))
            capacity -= row_share * len(slots[:fit])
            slots = slots[fit:]
    return groups


def dirty_slots(table: VectorTable) -> NDArray[np.bool_]:
    """Return a mask of the slots that have changed since they were last collected."""
    changed: NDArray[np.bool_] = (table.flags[: table.used] & DIRTY) != 0
    return changed


def _metadata_text(metadata: dict[str, Any] | None) -> str | None:
    return json.dumps(metadata, ensure_ascii=False, separators=(",", ":")) if metadata else None
