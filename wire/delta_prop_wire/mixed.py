"""Bodies whose rows differ in namespace, kind or length: looked over by columns, many at a time.

Pure. What is not in order here is decoded column by column (`batch.py`); `soundness.py` and `validate.py` say
what is wrong with it.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from delta_prop_wire.batch import DIRECTORY_AT, F32, PRINTABLE, SPARSE_KINDS, U32, directory_of
from delta_prop_wire.bounds import BYTES_MAX, NUMBERS_MAX, NUMBERS_MIN, finite, name_is_sound
from delta_prop_wire.delta import Kind
from delta_prop_wire.layout import ENTRY_WIDTHS, NAME_LENGTH, ROW_WIDTHS, Column
from delta_prop_wire.plain import Names, decode_names
from delta_prop_wire.spec import (
    ALIGNMENT,
    DIMENSION_MAX,
    NAMESPACE_BYTES_MAX,
    VECTOR_ID_BYTES_MAX,
    Attribute,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from delta_prop_wire.batch import Batch

_NEEDED = 1 << Column.KEY_ENDS | 1 << Column.KEYS | 1 << Column.NAMESPACES
_MIXED = 1 << Column.KINDS | 1 << Column.NAMESPACE_INDEX
_BOTH_BLOBS = 1 << Column.BLOB_ENDS | 1 << Column.BLOBS
_KNOWN = _NEEDED | _MIXED | _BOTH_BLOBS | 1 << Column.VALUE_ENDS | 1 << Column.INDICES | 1 << Column.VALUES
_TOLD = {
    0: 0,
    1 << Column.KINDS: int(Attribute.MIXED_KINDS),
    1 << Column.NAMESPACE_INDEX: int(Attribute.MIXED_NAMESPACES),
    _MIXED: int(Attribute.MIXED_KINDS | Attribute.MIXED_NAMESPACES),
}
"""Which attributes announce these columns."""
_RARE = sum(
    (
        *(Attribute.IDS, Attribute.PARENTS, Attribute.CLOCK, Attribute.CONTROL),
        *(Attribute.ROW_OFFSETS, Attribute.COUNTERS_LEAP, Attribute.STATE_ROWS),
    )
)
_FLAGS = _RARE | Attribute.MIXED_KINDS | Attribute.MIXED_NAMESPACES
_VECTOR_KINDS = (Kind.CREATE, Kind.DENSE)
_VECTOR_BITS = sum(1 << kind for kind in _VECTOR_KINDS)
_NOT_ALONE_BITS = 1 << Kind.TRANSFORM | 1 << Kind.METADATA
"""Kinds of rows that need another look: at a name in their bytes, at metadata, which no batch has here."""
_IS_SPARSE = np.array([kind in SPARSE_KINDS for kind in range(256)], np.uint32)
_TABLE_BYTES_MAX = 4_096
_NUMBER_BYTES = 4
_MOST, _SUMS, _ANY = np.maximum.reduce, np.add, np.logical_or.reduce


def is_simple(batch: Batch) -> bool:
    """Whether it is plain but that rows may differ in kind, namespace and length."""
    return batch.plain or (not batch.columns_mask & ~_KNOWN and not batch.attributes & _RARE)


def decode_mixed(batch: Batch) -> bool:
    """Decode the names of a batch that has names, kinds, numbers and bytes alone; whether all of it is sound.

    Where it is not, or a vector id is not printable ASCII, ask for each column, which may be unsound.
    """
    names = decode_columns(batch)
    if names is None or not rows_are_sound([batch]) or not decode_names([batch], [names]):
        return False
    note_sound(batch)
    return batch.sound


def note_sound(batch: Batch) -> None:
    """Of a batch whose rows were found to be sound and whose vector ids are decoded: whether all of it is."""
    batch.sound = (
        batch.key_bytes_bound <= VECTOR_ID_BYTES_MAX or max(map(len, batch.keys)) <= VECTOR_ID_BYTES_MAX
    )


def decode_columns(batch: Batch) -> Names | None:
    """Find the columns of such a batch, and give those of its vector ids for `decode_names`; None where they
    are not as `decode_mixed` wants them. What rows say is left to `rows_are_sound`.
    """
    raw, columns, count = batch.raw, batch.columns_mask, batch.count
    if columns & ~_KNOWN or columns & _NEEDED != _NEEDED or columns & _BOTH_BLOBS not in (0, _BOTH_BLOBS):
        return None
    lengths, at = directory_of(columns)[1:]
    if batch.attributes & _FLAGS != _TOLD[columns & _MIXED] or at > batch.length:
        return None
    bounds: list[int] = []
    sizes = lengths.unpack_from(raw, DIRECTORY_AT)
    for size, (row_bytes, entry_bytes) in zip(sizes, _widths(columns), strict=False):
        if size % entry_bytes or (row_bytes and size != row_bytes * count):
            return None
        bounds += at, at + size
        at += size + -size % ALIGNMENT
    if at != batch.length:
        return None
    batch._bounds_of = tuple(bounds)
    # The first columns in turn: where vector ids end, the ids, the table of namespaces.
    ends_at, ends_stop, text_at, text_stop, table_at, table_stop = bounds[:6]
    if not _kinds_agree(batch) or not _decode_namespaces(batch, bytes(raw[table_at:table_stop])):
        return None
    names = Names(bytes(raw[ends_at:ends_stop]), bytes(raw[text_at:text_stop]))
    whole = names.ends[-_NUMBER_BYTES:] == len(names.text).to_bytes(_NUMBER_BYTES, "little")
    return names if whole and not names.text.translate(None, PRINTABLE) else None


def rows_are_sound(batches: Sequence[Batch]) -> bool:
    """Whether all rows of batches whose columns were found have a namespace, and the numbers and bytes that
    their kinds may have. Which namespace a row has, and the highest index, are decoded by that.
    """
    alike: dict[tuple[int, int], list[Batch]] = {}
    for batch in batches:
        alike.setdefault((batch.columns_mask, batch.dimension), []).append(batch)
    return all(_alike_are_sound(_Alike.of(some)) for some in alike.values())


# --- one batch


def _decode_namespaces(batch: Batch, table: bytes) -> bool:
    names = _table(table) if len(table) <= _TABLE_BYTES_MAX else None
    if not names or len(names) > batch.count:
        return False
    batch.namespace_names, batch.namespace = names, names[0] if len(names) == 1 else None
    return batch.columns_mask >> Column.NAMESPACE_INDEX & 1 == 1 or len(names) == 1


def _kinds_agree(batch: Batch) -> bool:
    """Whether the rows' kinds are those that the header tells, and need no other look."""
    mask = batch.kinds_mask
    dimension_max = DIMENSION_MAX if mask & _VECTOR_BITS else 0
    if mask & _NOT_ALONE_BITS or not (dimension_max > 0) <= batch.dimension <= dimension_max:
        return False
    told = _kinds_in(mask)
    if not batch.columns_mask >> Column.KINDS & 1:
        return len(told) == 1
    kinds = batch.kinds
    return not kinds.translate(None, told) and all(map(kinds.__contains__, told))


@lru_cache(maxsize=1024)
def _kinds_in(mask: int) -> bytes:
    return bytes(kind for kind in range(64) if mask >> kind & 1)


@lru_cache(maxsize=1024)
def _widths(mask: int) -> tuple[tuple[int, int], ...]:
    """Of each column in a mask: bytes a row, 0 where that is not fixed, and bytes an entry."""
    present = [column for column in Column if mask >> column & 1]
    return tuple((ROW_WIDTHS.get(column, 0), ENTRY_WIDTHS.get(column, 1)) for column in present)


@lru_cache(maxsize=256)
def _table(raw: bytes) -> tuple[str, ...] | None:
    """The names of a table, None where one is unsound; the same few tables come with batch after batch."""
    names, at = [], 0
    while at < len(raw):
        if at + NAME_LENGTH.size > len(raw):
            return None
        end = at + NAME_LENGTH.size + NAME_LENGTH.unpack_from(raw, at)[0]
        try:
            names.append(str(raw[at + NAME_LENGTH.size : end], "utf-8"))
        except UnicodeDecodeError:
            return None
        at = end
    sound = at == len(raw) and all(name_is_sound(name, NAMESPACE_BYTES_MAX) for name in names)
    return tuple(names) if sound else None


# --- batches with the same columns and dimension


class _Alike(NamedTuple):
    """Their rows, end to end: kinds; first and last row of each batch, None where there is but one batch."""

    batches: Sequence[Batch]
    places: Mapping[int, int]
    kinds: NDArray[np.uint8]
    firsts: NDArray[np.int64] | None
    lasts: NDArray[np.int64] | None

    @classmethod
    def of(cls, batches: Sequence[Batch]) -> _Alike:
        """All rows of these."""
        places = directory_of(batches[0].columns_mask)[0]
        if len(batches) == 1:
            return cls(batches, places, np.frombuffer(batches[0].kinds, np.uint8), None, None)
        stops = np.array([*accumulate([batch.count for batch in batches], initial=0)])
        kinds = np.frombuffer(b"".join([batch.kinds for batch in batches]), np.uint8)
        return cls(batches, places, kinds, stops[:-1], stops[1:] - 1)

    def sizes(self, column: Column) -> list[int]:
        """Of each batch how many entries of 4 bytes, or bytes of text, a column has."""
        place = self.places.get(column)
        if place is None:
            return [0] * len(self.batches)
        unit = ENTRY_WIDTHS.get(column, 1)
        return [(batch._bounds_of[place + 1] - batch._bounds_of[place]) // unit for batch in self.batches]

    def joined(self, column: Column, dtype: np.dtype[Any]) -> NDArray[Any]:
        """A column that all have, end to end."""
        place = self.places[column]
        if self.firsts is None:
            batch = self.batches[0]
            start, stop = batch._bounds_of[place : place + 2]
            return np.frombuffer(batch.raw, dtype, (stop - start) // dtype.itemsize, start)
        parts = [batch.raw[batch._bounds_of[place] : batch._bounds_of[place + 1]] for batch in self.batches]
        return np.frombuffer(b"".join(parts), dtype)

    def lengths(self, column: Column, totals: list[int]) -> NDArray[np.uint32] | None:
        """How long each row's part is, where this column tells its end; None where the last of a batch do not
        end at these totals. One that ends before it begins is longer than anything may be.
        """
        ends = self.joined(column, U32)
        if (ends[-1:] if self.lasts is None else ends[self.lasts]).tolist() != totals:
            return None
        lengths = ends.copy()
        lengths[1:] -= ends[:-1]
        if self.firsts is not None:
            lengths[self.firsts] = ends[self.firsts]
        return lengths

    def sums(self, rows: NDArray[np.uint32]) -> list[int]:
        """Of each batch the sum over its rows, in all not more than a frame has bytes."""
        return (
            [int(_SUMS.reduce(rows))] if self.firsts is None else _SUMS.reduceat(rows, self.firsts).tolist()
        )


def _alike_are_sound(alike: _Alike) -> bool:
    least, span, bytes_most = _shapes(alike.batches[0].dimension).take(alike.kinds, 1)
    widths = _row_widths(alike)
    # Fewer than the least wrap around, to more than any span.
    if widths is None or _ANY(widths - least > span):
        return False
    if Column.BLOBS in alike.places:
        lengths = alike.lengths(Column.BLOB_ENDS, alike.sizes(Column.BLOBS))
        if lengths is None or _ANY(lengths > bytes_most):
            return False
    if alike.sums(widths * _IS_SPARSE.take(alike.kinds)) != alike.sizes(Column.INDICES):
        return False
    if Column.VALUES in alike.places and not finite(alike.joined(Column.VALUES, F32)):
        return False
    return all(_decode_indices(batch) for batch in alike.batches)


@lru_cache(maxsize=64)
def _shapes(dimension: int) -> NDArray[np.uint32]:
    """Of each kind the fewest numbers of a row, how many more it may have, and the most bytes, where vectors
    have this dimension.
    """
    shapes = np.array([NUMBERS_MIN, NUMBERS_MAX, BYTES_MAX], np.int64)
    for kind in _VECTOR_KINDS:
        shapes[:2, kind] = dimension
    shapes[1] -= shapes[0]
    return shapes.astype(np.uint32)


def _row_widths(alike: _Alike) -> NDArray[np.uint32] | None:
    """How many numbers each row has, None where they do not share them out."""
    totals = alike.sizes(Column.VALUES)
    if Column.VALUE_ENDS in alike.places:
        return alike.lengths(Column.VALUE_ENDS, totals)
    counts = [batch.count for batch in alike.batches]
    if any(total % count for total, count in zip(totals, counts, strict=True)):
        return None
    widths = [total // count for total, count in zip(totals, counts, strict=True)]
    return np.repeat(np.array(widths, np.uint32), counts)


def _decode_indices(batch: Batch) -> bool:
    """Which namespace of the table each row has, and the highest index; whether these are within bounds."""
    index = batch.namespace_index
    indices = batch.indices
    batch.index_highest = highest = int(_MOST(indices)) if len(indices) else -1
    return highest < DIMENSION_MAX and (index is None or max(index) < len(batch.namespace_names))
