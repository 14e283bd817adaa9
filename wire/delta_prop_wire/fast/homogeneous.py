"""Decodes homogeneous bodies fast: all columns of each in one pass, and the vector ids of many together.

Pure. A body that is malformed or unusual is left to `batch.py`, which decodes column by column, and to
`body_checks.py`, which raises the error.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from delta_prop_wire.batch import (
    DIRECTORY_AT,
    F32,
    NO_INDICES,
    NO_VALUES,
    PRINTABLE,
    SPARSE_KINDS,
    U32,
    Batch,
    directory_layout,
    ends_struct,
)
from delta_prop_wire.body_checks import FLAGS, RESERVED_ATTRIBUTES
from delta_prop_wire.bounds import BYTES_MAX, NUMBERS_MAX, NUMBERS_MIN, all_finite
from delta_prop_wire.crc import crc32c
from delta_prop_wire.delta import Kind
from delta_prop_wire.layout import NAME_LENGTH, Column, read_single_name
from delta_prop_wire.spec import (
    ALIGNMENT,
    BATCH_ROWS_MAX,
    BODY_HEADER_BYTES,
    BODY_VERSION,
    COUNTER_MAX,
    CRC_BYTES,
    DELTA_BYTES_MAX,
    DIMENSION_MAX,
    FRAME_PAYLOAD_BYTES_MAX,
    NAMESPACE_BYTES_MAX,
    VECTOR_ID_BYTES_MAX,
)
from delta_prop_wire.validate import namespace_is_valid

_INDICES, _VALUES, _BLOBS = (1 << column for column in (Column.INDICES, Column.VALUES, Column.BLOBS))
_NAME_BYTES_MAX = NAME_LENGTH.size + NAMESPACE_BYTES_MAX
_END = struct.Struct("<I")
_VERSION_AND_WORDS = bytes((BODY_VERSION, BODY_HEADER_BYTES // 8))
_FULL_VECTOR_KINDS = frozenset({Kind.CREATE, Kind.DENSE})
_KINDS_WITH_CHECKED_BYTES = frozenset({Kind.TRANSFORM, Kind.METADATA})
_LOOP_ROWS_MAX = 300
"""Up to this many rows, a Python loop is faster than numpy's calls."""
_MINIMUM, _MAXIMUM, _RUNNING_SUM = np.minimum.reduce, np.maximum.reduce, np.add.accumulate


class KeyColumns(NamedTuple):
    """The columns of a batch's vector ids, in printable ASCII: the end of each id, and all ids end to end.

    The last end is the length of `text`; `decode_keys` checks that the others rise.
    """

    ends: bytes
    text: bytes


def homogeneous_is_intact(batch: Batch) -> bool:
    """Check and decode a homogeneous batch. Return True if it passes all checks of a body."""
    return homogeneous_body_is_valid(batch) and decode_homogeneous(batch)


def homogeneous_body_is_valid(batch: Batch) -> bool:
    """True if the header, padding and checksum of a homogeneous batch are valid."""
    return not batch.attributes & FLAGS and body_is_valid(batch)


def body_is_valid(batch: Batch) -> bool:
    """True if header, padding and checksum are valid."""
    body, count, length = batch.raw, batch.count, batch.length
    size = len(body)
    return (
        0 <= size - CRC_BYTES - length < ALIGNMENT
        and size % ALIGNMENT == 0
        and size <= FRAME_PAYLOAD_BYTES_MAX
        and bytes(body[:2]) == _VERSION_AND_WORDS
        and not batch.attributes & RESERVED_ATTRIBUTES
        and 1 <= count <= BATCH_ROWS_MAX
        and 1 <= batch.base <= COUNTER_MAX + 1 - count
        and batch.kinds_mask != 0
        and crc32c(memoryview(body)[:-CRC_BYTES]) == batch.crc
        and not any(body[length:-CRC_BYTES])
    )


def decode_homogeneous(batch: Batch) -> bool:
    """Decode all columns of a homogeneous batch at once, in half the time. Return True if they are decoded.

    Return False if the batch is not homogeneous, an id is empty or not printable ASCII, or the columns do not
    agree with the header; the columns are decoded later, one by one.
    """
    if not batch.decoded and batch.homogeneous:
        key_columns = decode_columns(batch)
        return key_columns is not None and decode_keys([batch], [key_columns]) == 1
    return batch.decoded


def decode_columns(batch: Batch) -> KeyColumns | None:
    """Decode all columns of a homogeneous batch but its vector ids.

    Return the columns of the vector ids, for `decode_keys`; None if the columns do not agree with the header
    or an id is not printable ASCII.
    """
    body, columns = batch.raw, batch.columns_mask
    _, lengths, ends_at = directory_layout(columns)
    if batch.kind is None or ends_at > batch.length:
        return None
    ends_size, text_size, namespaces_size, *rest_sizes = lengths.unpack_from(body, DIRECTORY_AT)
    keys_at = ends_at + ends_size + -ends_size % ALIGNMENT
    namespaces_at = keys_at + text_size + -text_size % ALIGNMENT
    position = rest_at = namespaces_at + namespaces_size + -namespaces_size % ALIGNMENT
    for size in rest_sizes:
        position += size + -size % ALIGNMENT
    if position != batch.length or ends_size != 4 * batch.count or namespaces_size > _NAME_BYTES_MAX:
        return None
    text = bytes(body[keys_at : keys_at + text_size])
    namespace_names = read_single_name(bytes(body[namespaces_at : namespaces_at + namespaces_size]))
    if namespace_names is None or text.translate(None, PRINTABLE):
        return None
    batch.namespace_names, batch.namespace = namespace_names, namespace_names[0]
    if columns & _BLOBS:
        is_valid = _decode_blobs(batch, rest_at, *rest_sizes)
    else:
        is_valid = _decode_numbers(batch, columns, rest_at, rest_sizes)
    ends = bytes(body[ends_at : ends_at + ends_size])
    return KeyColumns(ends, text) if is_valid and ends[-_END.size :] == _END.pack(text_size) else None


def decode_keys(batches: Sequence[Batch], key_columns: Sequence[KeyColumns]) -> int:
    """Decode the vector ids of batches whose other columns are decoded.

    Return the number of batches before the first one with an invalid id. Many ids are split together, since
    that costs little more than for one batch.
    """
    counts = [batch.count for batch in batches]
    split_keys = _split_keys(counts, key_columns) if sum(counts) > _LOOP_ROWS_MAX else None
    if split_keys is None:
        for index, (batch, columns) in enumerate(zip(batches, key_columns, strict=True)):
            if not _decode_batch_keys(batch, columns):
                return index
        return len(batches)
    keys, longest = split_keys
    start = 0
    for batch in batches:
        batch.keys, batch.key_bytes_bound, batch.decoded = keys[start : start + batch.count], longest, True
        start += batch.count
    return len(batches)


def _split_keys(counts: list[int], key_columns: Sequence[KeyColumns]) -> tuple[list[str], int] | None:
    """Return the vector ids of all batches, end to end, and the length of the longest.

    None if an id is empty, or longer than is allowed. Inserts a zero byte after each id, so that one call
    splits them.
    """
    text = b"".join([columns.text for columns in key_columns])
    ends = np.frombuffer(b"".join([columns.ends for columns in key_columns]), U32).astype(np.intp)
    widths = ends.copy()
    widths[1:] -= ends[:-1]
    row = 0
    for row_count in counts[:-1]:
        row += row_count
        widths[row] = ends[row]
    # If no id is empty, all ends rise up to the last one of each batch, which `decode_columns` checked.
    longest = int(_MAXIMUM(widths))
    if int(_MINIMUM(widths)) < 1 or longest > VECTOR_ID_BYTES_MAX:
        return None
    widths += 1
    stops = _RUNNING_SUM(widths)
    spread = np.zeros(int(stops[-1]), np.uint8)
    is_text = np.ones(len(spread), np.bool_)
    is_text[stops - 1] = False
    spread[is_text] = np.frombuffer(text, np.uint8)
    keys = spread.tobytes().decode("ascii").split("\0")
    del keys[-1]
    return keys, longest


def _decode_batch_keys(batch: Batch, key_columns: KeyColumns) -> bool:
    text, stops = key_columns.text.decode("ascii"), ends_struct(batch.count).unpack(key_columns.ends)
    keys = [text[start:stop] for start, stop in zip((0, *stops), stops, strict=False)]
    # If no id is empty, all ends rise up to the last one, which `decode_columns` checked.
    if not all(keys):
        return False
    bound = len(text)
    batch.keys, batch.decoded = keys, True
    batch.key_bytes_bound = bound if bound <= VECTOR_ID_BYTES_MAX else max(map(len, keys))
    return True


def _decode_numbers(batch: Batch, columns: int, position: int, sizes: list[int]) -> bool:
    """Decode the number columns from `position` on. Return True if they hold what the rows need."""
    count, indices, values = batch.count, NO_INDICES, NO_VALUES
    if columns & _INDICES:
        size = sizes[0]
        indices = np.frombuffer(batch.raw, U32, size >> 2, position)
        position += size + -size % ALIGNMENT
    else:
        batch.highest_index = -1
    if columns & _VALUES:
        values = np.frombuffer(batch.raw, F32, sizes[-1] >> 2, position)
    batch.indices, batch.values, batch.values_per_row = indices, values, len(values) // count
    index_count = len(values) if batch.kind in SPARSE_KINDS else 0
    is_complete = sum(sizes) == 4 * (len(indices) + len(values))
    return is_complete and len(values) % count == 0 and len(indices) == index_count


def _decode_blobs(batch: Batch, position: int, ends_size: int, text_size: int) -> bool:
    """Set the number columns of rows with bytes. Return True if the bytes' ends, at `position`, are valid."""
    batch.indices, batch.values, batch.values_per_row, batch.highest_index = NO_INDICES, NO_VALUES, 0, -1
    return ends_size == 4 * batch.count and _ends_are_valid(
        text_size, bytes(batch.raw[position : position + ends_size]), batch.count
    )


def _ends_are_valid(total: int, ends: bytes, count: int) -> bool:
    """True if the ends of `count` texts rise to `total`."""
    if total % count == 0 and ends == _equal_ends(count, total // count):
        return True
    stops = ends_struct(count).unpack(ends)
    return stops[-1] == total and sorted(stops) == list(stops)


@lru_cache(maxsize=64)
def _equal_ends(count: int, size: int) -> bytes:
    """Return the ends of `count` texts of `size` bytes each."""
    if not size:
        return bytes(_END.size * count)
    return ends_struct(count).pack(*range(size, size * count + 1, size))


def homogeneous_is_valid(batch: Batch) -> bool:
    """True if a batch is homogeneous and valid; if not, `validate_batch` may still accept it."""
    if batch.validated:
        return True
    if not batch.decoded and not decode_homogeneous(batch):
        return False
    kind, width, namespace = batch.kind, batch.values_per_row, batch.namespace
    return (
        kind is not None
        and width is not None
        and namespace is not None
        and NUMBERS_MIN[kind] <= width <= NUMBERS_MAX[kind]
        and kind not in _KINDS_WITH_CHECKED_BYTES
        and (BYTES_MAX[kind] == DELTA_BYTES_MAX or not batch.columns_mask & _BLOBS)
        and batch.dimension == (width if kind in _FULL_VECTOR_KINDS else 0)
        and batch.key_bytes_bound <= VECTOR_ID_BYTES_MAX
        and namespace_is_valid(namespace)
        and (not width or all_finite(batch.values))
        and batch.highest_index < DIMENSION_MAX
        # All rows together are within the bound, so each row is; a row's numbers alone cannot exceed it.
        and (batch.size <= DELTA_BYTES_MAX or not batch.columns_mask & _BLOBS)
    )
