"""Bodies whose rows differ in namespace, kind or length, decoded at once and by columns.

Pure. What is not in shape here is decoded column by column (`batch.py`), and `soundness.py` says what is
wrong with it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from delta_prop_wire.batch import (
    DIRECTORY_AT,
    F32,
    PRINTABLE,
    SPARSE_KINDS,
    U16,
    U32,
    directory_of,
    stops_of,
)
from delta_prop_wire.layout import NAME_LENGTH, Column
from delta_prop_wire.spec import ALIGNMENT, Attribute

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from delta_prop_wire.batch import Batch

_KEY_ENDS, _KEYS, _NAMESPACES = int(Column.KEY_ENDS), int(Column.KEYS), int(Column.NAMESPACES)
_INDEX, _KINDS, _ENDS = int(Column.NAMESPACE_INDEX), int(Column.KINDS), int(Column.VALUE_ENDS)
_INDICES, _VALUES = int(Column.INDICES), int(Column.VALUES)
_BLOB_ENDS, _BLOBS = int(Column.BLOB_ENDS), int(Column.BLOBS)
_NEEDED = 1 << _KEY_ENDS | 1 << _KEYS | 1 << _NAMESPACES
_KNOWN = _NEEDED | sum(
    1 << column for column in (_INDEX, _KINDS, _ENDS, _INDICES, _VALUES, _BLOB_ENDS, _BLOBS)
)
_BOTH_BLOBS = 1 << _BLOB_ENDS | 1 << _BLOBS
_TOLD = {
    0: 0,
    1 << _KINDS: int(Attribute.MIXED_KINDS),
    1 << _INDEX: int(Attribute.MIXED_NAMESPACES),
    1 << _KINDS | 1 << _INDEX: int(Attribute.MIXED_KINDS | Attribute.MIXED_NAMESPACES),
}
"""Which attributes announce these columns."""
_MIXED = 1 << _KINDS | 1 << _INDEX
_RARE = sum(
    (
        *(Attribute.IDS, Attribute.PARENTS, Attribute.CLOCK, Attribute.CONTROL),
        *(Attribute.ROW_OFFSETS, Attribute.COUNTERS_LEAP, Attribute.STATE_ROWS),
    )
)
_FLAGS = _RARE | Attribute.MIXED_KINDS | Attribute.MIXED_NAMESPACES
_IS_SPARSE = bytes(kind in SPARSE_KINDS for kind in range(256))
_BIT = [1 << kind for kind in range(64)]
_TABLE_BYTES_MAX = 4_096
_LEAST, _MOST, _SUMS = np.minimum.reduce, np.maximum.reduce, np.add.accumulate


def is_simple(batch: Batch) -> bool:
    """Whether it is plain but that rows may differ in kind, namespace and length."""
    return batch.plain or (not batch.columns_mask & ~_KNOWN and not batch.attributes & _RARE)


def decode_mixed(batch: Batch) -> bool:
    """Decode all columns of a batch that has names, kinds, numbers and bytes alone; whether they are.

    They are not where columns do not agree, or a vector id is not printable ASCII: then each column is
    decoded when it is asked for, and may be unsound.
    """
    columns, count = batch.columns_mask, batch.count
    if columns & ~_KNOWN or columns & _NEEDED != _NEEDED:
        return False
    places, lengths, at = directory_of(columns)
    if batch.attributes & _FLAGS != _TOLD[columns & _MIXED] or at > batch.length:
        return False
    found: dict[int, tuple[int, int]] = {}
    for column, size in zip(places, lengths.unpack_from(batch.raw, DIRECTORY_AT), strict=True):
        found[column] = (at, size)
        at += size + -size % ALIGNMENT
    batch.decoded = (
        at == batch.length
        and found[_KEY_ENDS][1] == 4 * count
        and _decode_keys(batch, found)
        and _decode_names(batch, found)
        and _decode_kinds(batch, found)
        and _decode_numbers(batch, found)
        and _decode_blobs(batch, found)
    )
    return batch.decoded


def _decode_keys(batch: Batch, found: dict[int, tuple[int, int]]) -> bool:
    at, size = found[_KEYS]
    raw = bytes(batch.raw[at : at + size])
    if raw.translate(None, PRINTABLE):
        return False
    text, stops = raw.decode("ascii"), stops_of(batch.count).unpack_from(batch.raw, found[_KEY_ENDS][0])
    keys = [text[start:stop] for start, stop in zip((0, *stops), stops, strict=False)]
    batch.keys, batch.key_bytes_bound = keys, max(map(len, keys))
    # Where none is empty all ends rise, up to the last one.
    return stops[-1] == size and all(keys)


def _decode_names(batch: Batch, found: dict[int, tuple[int, int]]) -> bool:
    at, size = found[_NAMESPACES]
    names = _table(bytes(batch.raw[at : at + size])) if size <= _TABLE_BYTES_MAX else None
    if not names or len(names) > batch.count:
        return False
    batch.namespace_names, batch.namespace = names, names[0] if len(names) == 1 else None
    if _INDEX not in found:
        return len(names) == 1
    at, size = found[_INDEX]
    if size != 2 * batch.count:
        return False
    index = np.frombuffer(batch.raw, U16, batch.count, at).tolist()
    if max(index) >= len(names):
        return False
    batch.namespaces = list(map(names.__getitem__, index))
    return True


def _decode_kinds(batch: Batch, found: dict[int, tuple[int, int]]) -> bool:
    if _KINDS not in found:
        return batch.kind is not None
    at, size = found[_KINDS]
    batch.kinds = bytes(batch.raw[at : at + size])
    kinds = {*batch.kinds}
    if size != batch.count or max(kinds) >= len(_BIT):
        return False
    return batch.kinds_mask == sum(map(_BIT.__getitem__, kinds))


def _decode_numbers(batch: Batch, found: dict[int, tuple[int, int]]) -> bool:
    count, (at, size) = batch.count, found.get(_VALUES, (0, 0))
    values = size >> 2
    if (
        size & 3
        or (_ENDS not in found and values % count)
        or found.get(_ENDS, (0, 4 * count))[1] != 4 * count
    ):
        return False
    batch.values = np.frombuffer(batch.raw, F32, values, at)
    if _ENDS in found:
        batch.value_bounds, widths = _bounds(batch, found[_ENDS][0])
    else:
        widths = np.diff(batch.value_bounds)
    if int(batch.value_bounds[-1]) != values or int(_LEAST(widths)) < 0:
        return False
    batch.index_bounds = np.zeros(count + 1, np.int64)
    sparse = np.frombuffer(batch.kinds.translate(_IS_SPARSE), np.uint8)
    _SUMS(widths * sparse, out=batch.index_bounds[1:])
    at, size = found.get(_INDICES, (0, 0))
    batch.indices = np.frombuffer(batch.raw, U32, size >> 2, at)
    batch.index_highest = int(_MOST(batch.indices)) if size >> 2 else -1
    return not size & 3 and int(batch.index_bounds[-1]) == size >> 2


def _decode_blobs(batch: Batch, found: dict[int, tuple[int, int]]) -> bool:
    both = batch.columns_mask & _BOTH_BLOBS
    if not both:
        return True
    if both != _BOTH_BLOBS or found[_BLOB_ENDS][1] != 4 * batch.count:
        return False
    batch.blob_bounds, widths = _bounds(batch, found[_BLOB_ENDS][0])
    return int(batch.blob_bounds[-1]) == found[_BLOBS][1] and int(_LEAST(widths)) >= 0


def _bounds(batch: Batch, at: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where each row's part of a column begins and ends, and how long it is."""
    bounds = np.zeros(batch.count + 1, np.int64)
    bounds[1:] = np.frombuffer(batch.raw, U32, batch.count, at)
    return bounds, bounds[1:] - bounds[:-1]


@lru_cache(maxsize=256)
def _table(raw: bytes) -> tuple[str, ...] | None:
    """The names of a table, None where it is not whole; the same few come with batch after batch."""
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
    return tuple(names) if at == len(raw) else None
