"""Checks bodies whose rows differ in namespace, kind or length: by columns, many bodies together.

Pure. A body that is malformed or unusual is left to `batch.py`, which decodes column by column, and to
`body_checks.py` and `validate.py`, which raise the error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from delta_prop_wire.batch import DIRECTORY_AT, F32, PRINTABLE, SPARSE_KINDS, U32, Batch, directory_layout
from delta_prop_wire.bounds import BYTES_MAX, NUMBERS_MAX, NUMBERS_MIN, all_finite, name_is_valid
from delta_prop_wire.delta import Kind
from delta_prop_wire.fast.homogeneous import KeyColumns, body_is_valid, decode_keys
from delta_prop_wire.layout import ENTRY_WIDTHS, ROW_WIDTHS, Column, read_names
from delta_prop_wire.spec import (
    ALIGNMENT,
    DIMENSION_MAX,
    NAMESPACE_BYTES_MAX,
    VECTOR_ID_BYTES_MAX,
    Attribute,
)
from delta_prop_wire.validate import COMMON_COLUMNS, RARE_ATTRIBUTES

if TYPE_CHECKING:
    from numpy.typing import NDArray

_REQUIRED_COLUMNS = 1 << Column.KEY_ENDS | 1 << Column.KEYS | 1 << Column.NAMESPACES
_BOTH_BLOBS = 1 << Column.BLOB_ENDS | 1 << Column.BLOBS
_MIXED_COLUMNS = 1 << Column.KINDS | 1 << Column.NAMESPACE_INDEX
_ANNOUNCING_FLAGS = {
    0: 0,
    1 << Column.KINDS: int(Attribute.MIXED_KINDS),
    1 << Column.NAMESPACE_INDEX: int(Attribute.MIXED_NAMESPACES),
    _MIXED_COLUMNS: int(Attribute.MIXED_KINDS | Attribute.MIXED_NAMESPACES),
}
"""Maps each combination of these two columns to the attributes that announce it."""
_FLAGS = RARE_ATTRIBUTES | Attribute.MIXED_KINDS | Attribute.MIXED_NAMESPACES
_VECTOR_KINDS = (Kind.CREATE, Kind.DENSE)
_VECTOR_BITS = sum(1 << kind for kind in _VECTOR_KINDS)
_EXTRA_CHECK_BITS = 1 << Kind.TRANSFORM | 1 << Kind.METADATA
"""Kinds that need more checks: of a transform's name, or of metadata, which no batch here has."""
_IS_SPARSE = np.array([kind in SPARSE_KINDS for kind in range(256)], np.uint32)
_TABLE_BYTES_MAX = 4_096
_NUMBER_BYTES = 4
_MAXIMUM, _ADD, _ANY = np.maximum.reduce, np.add, np.logical_or.reduce


def heterogeneous_is_intact(batch: Batch) -> bool:
    """Check, validate and decode a batch. Return True if it passes all checks of a body and of its rows."""
    return body_is_valid(batch) and decode_heterogeneous(batch)


def decode_heterogeneous(batch: Batch) -> bool:
    """Decode and validate a batch that has only names, kinds, numbers and bytes. Return True if it is valid.

    Return False if it is invalid or a vector id is not printable ASCII; its columns are decoded later, one by
    one.
    """
    key_columns = decode_columns(batch)
    if key_columns is None or not rows_are_valid([batch]) or not decode_keys([batch], [key_columns]):
        return False
    return mark_validated(batch)


def mark_validated(batch: Batch) -> bool:
    """Note that rows and vector ids of a batch are valid; return False if a vector id is too long."""
    batch.validated = batch.key_bytes_bound <= VECTOR_ID_BYTES_MAX
    return batch.validated


def decode_columns(batch: Batch) -> KeyColumns | None:
    """Locate the columns of a batch, and decode its kinds and table of namespaces.

    Return the columns of the vector ids, for `decode_keys`; None if the batch has rare columns, its columns
    do not agree with the header, or an id is not printable ASCII. `rows_are_valid` checks the rows.
    """
    raw, columns, count = batch.raw, batch.columns_mask, batch.count
    if (
        columns & ~COMMON_COLUMNS
        or columns & _REQUIRED_COLUMNS != _REQUIRED_COLUMNS
        or columns & _BOTH_BLOBS not in (0, _BOTH_BLOBS)
    ):
        return None
    lengths, position = directory_layout(columns)[1:]
    if batch.attributes & _FLAGS != _ANNOUNCING_FLAGS[columns & _MIXED_COLUMNS] or position > batch.length:
        return None
    bounds: list[int] = []
    sizes = lengths.unpack_from(raw, DIRECTORY_AT)
    for size, (row_bytes, entry_bytes) in zip(sizes, _widths(columns), strict=False):
        if size % entry_bytes or (row_bytes and size != row_bytes * count):
            return None
        bounds += position, position + size
        position += size + -size % ALIGNMENT
    if position != batch.length:
        return None
    batch._column_bounds = tuple(bounds)
    # The first columns are: the ends of vector ids, the ids, the table of namespaces.
    ends_at, ends_stop, text_at, text_stop, table_at, table_stop = bounds[:6]
    if not _kinds_agree(batch) or not _decode_namespaces(batch, bytes(raw[table_at:table_stop])):
        return None
    key_columns = KeyColumns(bytes(raw[ends_at:ends_stop]), bytes(raw[text_at:text_stop]))
    is_complete = key_columns.ends[-_NUMBER_BYTES:] == len(key_columns.text).to_bytes(_NUMBER_BYTES, "little")
    return key_columns if is_complete and not key_columns.text.translate(None, PRINTABLE) else None


def rows_are_valid(batches: Sequence[Batch]) -> bool:
    """Check the rows of batches that have passed `decode_columns`.

    Return True if each row has a namespace, and as many numbers and bytes as its kind may have. Also decodes
    the rows' namespace indexes and the highest vector index.
    """
    groups: dict[tuple[int, int], list[Batch]] = {}
    for batch in batches:
        groups.setdefault((batch.columns_mask, batch.dimension), []).append(batch)
    return all(_group_is_valid(_Group.of(group)) for group in groups.values())


# --- one batch


def _decode_namespaces(batch: Batch, table: bytes) -> bool:
    names = _decode_name_table(table) if len(table) <= _TABLE_BYTES_MAX else None
    if not names or len(names) > batch.count:
        return False
    batch.namespace_names, batch.namespace = names, names[0] if len(names) == 1 else None
    return batch.columns_mask >> Column.NAMESPACE_INDEX & 1 == 1 or len(names) == 1


def _kinds_agree(batch: Batch) -> bool:
    """True if the rows have exactly the kinds in the header's mask, and these need no further checks."""
    mask = batch.kinds_mask
    dimension_max = DIMENSION_MAX if mask & _VECTOR_BITS else 0
    if mask & _EXTRA_CHECK_BITS or not (dimension_max > 0) <= batch.dimension <= dimension_max:
        return False
    announced = _kinds_in(mask)
    if not batch.columns_mask >> Column.KINDS & 1:
        return len(announced) == 1
    kinds = batch.kinds
    return not kinds.translate(None, announced) and all(map(kinds.__contains__, announced))


@lru_cache(maxsize=1024)
def _kinds_in(mask: int) -> bytes:
    return bytes(kind for kind in range(64) if mask >> kind & 1)


@lru_cache(maxsize=1024)
def _widths(mask: int) -> tuple[tuple[int, int], ...]:
    """Return for each column in a mask: bytes per row (0 if they vary), and bytes per entry."""
    present = [column for column in Column if mask >> column & 1]
    return tuple((ROW_WIDTHS.get(column, 0), ENTRY_WIDTHS.get(column, 1)) for column in present)


@lru_cache(maxsize=256)
def _decode_name_table(raw: bytes) -> tuple[str, ...] | None:
    """Decode a table of names, None if one is invalid; cached, since batches reuse a few tables."""
    try:
        names = read_names(raw)
    except ValueError:
        return None
    return names if all(name_is_valid(name, NAMESPACE_BYTES_MAX) for name in names) else None


# --- batches with the same columns and dimension


class _Group(NamedTuple):
    """Batches with the same columns and dimension, their rows end to end.

    `bounds_at`: maps each column to the index of its bounds. `kinds`: the kind of each row. `first_rows`,
    `last_rows`: the first and last row of each batch, None for a single batch.
    """

    batches: Sequence[Batch]
    bounds_at: Mapping[int, int]
    kinds: NDArray[np.uint8]
    first_rows: NDArray[np.int64] | None
    last_rows: NDArray[np.int64] | None

    @classmethod
    def of(cls, batches: Sequence[Batch]) -> _Group:
        """Group batches that have the same columns and dimension."""
        bounds_at = directory_layout(batches[0].columns_mask)[0]
        if len(batches) == 1:
            return cls(batches, bounds_at, np.frombuffer(batches[0].kinds, np.uint8), None, None)
        stops = np.array([*accumulate([batch.count for batch in batches], initial=0)])
        kinds = np.frombuffer(b"".join([batch.kinds for batch in batches]), np.uint8)
        return cls(batches, bounds_at, kinds, stops[:-1], stops[1:] - 1)

    def sizes(self, column: Column) -> list[int]:
        """Return for each batch the number of 4-byte entries, or bytes of text, in a column."""
        index = self.bounds_at.get(column)
        if index is None:
            return [0] * len(self.batches)
        unit = ENTRY_WIDTHS.get(column, 1)
        return [
            (batch._column_bounds[index + 1] - batch._column_bounds[index]) // unit for batch in self.batches
        ]

    def join(self, column: Column, dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return a column of all batches, end to end."""
        index = self.bounds_at[column]
        if self.first_rows is None:
            batch = self.batches[0]
            start, stop = batch._column_bounds[index : index + 2]
            return np.frombuffer(batch.raw, dtype, (stop - start) // dtype.itemsize, start)
        parts = [
            batch.raw[batch._column_bounds[index] : batch._column_bounds[index + 1]] for batch in self.batches
        ]
        return np.frombuffer(b"".join(parts), dtype)

    def lengths(self, column: Column, totals: list[int]) -> NDArray[np.uint32] | None:
        """Return the length of each row's part, from a column of ends.

        None if the last end of a batch is not its total. An end below the previous one wraps around to a
        length above every bound.
        """
        ends = self.join(column, U32)
        if (ends[-1:] if self.last_rows is None else ends[self.last_rows]).tolist() != totals:
            return None
        lengths = ends.copy()
        lengths[1:] -= ends[:-1]
        if self.first_rows is not None:
            lengths[self.first_rows] = ends[self.first_rows]
        return lengths

    def sums(self, row_numbers: NDArray[np.uint32]) -> list[int]:
        """Return for each batch the sum of its rows' numbers; a frame's size keeps it below 2**32."""
        return (
            [int(_ADD.reduce(row_numbers))]
            if self.first_rows is None
            else _ADD.reduceat(row_numbers, self.first_rows).tolist()
        )


def _group_is_valid(group: _Group) -> bool:
    numbers_min, numbers_span, bytes_max = _operand_bounds(group.batches[0].dimension).take(group.kinds, 1)
    widths = _row_widths(group)
    # A width below `numbers_min` wraps around to a number above any `numbers_span`.
    if widths is None or _ANY(widths - numbers_min > numbers_span):
        return False
    if Column.BLOBS in group.bounds_at:
        lengths = group.lengths(Column.BLOB_ENDS, group.sizes(Column.BLOBS))
        if lengths is None or _ANY(lengths > bytes_max):
            return False
    if group.sums(widths * _IS_SPARSE.take(group.kinds)) != group.sizes(Column.INDICES):
        return False
    if Column.VALUES in group.bounds_at and not all_finite(group.join(Column.VALUES, F32)):
        return False
    return all(_decode_indices(batch) for batch in group.batches)


def _row_widths(group: _Group) -> NDArray[np.uint32] | None:
    """Return the number of values of each row, None if they do not add up."""
    totals = group.sizes(Column.VALUES)
    if Column.VALUE_ENDS in group.bounds_at:
        return group.lengths(Column.VALUE_ENDS, totals)
    counts = [batch.count for batch in group.batches]
    if any(total % count for total, count in zip(totals, counts, strict=True)):
        return None
    widths = [total // count for total, count in zip(totals, counts, strict=True)]
    return np.repeat(np.array(widths, np.uint32), counts)


@lru_cache(maxsize=64)
def _operand_bounds(dimension: int) -> NDArray[np.uint32]:
    """Return three rows with a column per kind: a row's minimum of numbers, how many more it may have, and
    its maximum of bytes.

    `dimension`: the dimension of full vectors.
    """
    bounds = np.array([NUMBERS_MIN, NUMBERS_MAX, BYTES_MAX], np.int64)
    for kind in _VECTOR_KINDS:
        bounds[:2, kind] = dimension
    bounds[1] -= bounds[0]
    return bounds.astype(np.uint32)


def _decode_indices(batch: Batch) -> bool:
    """Decode the namespace indexes and the highest vector index. True if all are within bounds."""
    namespace_index = batch.namespace_index
    indices = batch.indices
    batch.highest_index = highest = int(_MAXIMUM(indices)) if len(indices) else -1
    return highest < DIMENSION_MAX and (
        namespace_index is None or max(namespace_index) < len(batch.namespace_names)
    )
