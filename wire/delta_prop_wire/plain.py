"""Plain bodies, decoded at once: the columns of each, and the vector ids of all that came together.

Pure. What is not in shape here is decoded column by column (`batch.py`), and `soundness.py` says what is
wrong with it.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from delta_prop_wire.batch import (
    DIRECTORY_AT,
    F32,
    NO_INDICES,
    NO_VALUES,
    PRINTABLE,
    SPARSE_KINDS,
    U32,
    directory_of,
    stops_of,
)
from delta_prop_wire.layout import NAME_LENGTH, Column
from delta_prop_wire.spec import ALIGNMENT, NAMESPACE_BYTES_MAX, VECTOR_ID_BYTES_MAX

if TYPE_CHECKING:
    from collections.abc import Sequence

    from delta_prop_wire.batch import Batch

_INDICES, _VALUES, _BLOBS = (1 << column for column in (Column.INDICES, Column.VALUES, Column.BLOBS))
_NAME_BYTES_MAX = NAME_LENGTH.size + NAMESPACE_BYTES_MAX
_END = struct.Struct("<I")
_FEW_ROWS = 300
"""Up to so many, a Python loop is quicker than numpy's calls."""
_LEAST, _MOST, _SUMS = np.minimum.reduce, np.maximum.reduce, np.add.accumulate


class Names(NamedTuple):
    """The columns of a batch's vector ids, of printable ASCII: where each ends, and all end to end.

    The last one ends with them; whether the others rise is left to `decode_names`.
    """

    ends: bytes
    text: bytes


def decode_plain(batch: Batch) -> bool:
    """Decode all columns of a plain batch at once, in half the time; whether they are.

    They are not where the batch is not plain, an id is empty or not printable ASCII, or the columns are
    not what the header tells: ask for each column then.
    """
    if not batch.decoded and batch.plain:
        names = decode_columns(batch)
        if names is not None:
            decode_names([batch], [names])
    return batch.decoded


def decode_columns(batch: Batch) -> Names | None:
    """Decode all columns of a plain batch but its vector ids, which it gives for `decode_names`; None where
    they are not as in `decode_plain`.
    """
    body, columns = batch.raw, batch.columns_mask
    _, lengths, ends_at = directory_of(columns)
    if batch.kind is None or ends_at > batch.length:
        return None
    ends, texts, names, *rest = lengths.unpack_from(body, DIRECTORY_AT)
    keys_at = ends_at + ends + -ends % ALIGNMENT
    names_at = keys_at + texts + -texts % ALIGNMENT
    at = rest_at = names_at + names + -names % ALIGNMENT
    for size in rest:
        at += size + -size % ALIGNMENT
    if at != batch.length or ends != 4 * batch.count or names > _NAME_BYTES_MAX:
        return None
    text = bytes(body[keys_at : keys_at + texts])
    named = name_in(bytes(body[names_at : names_at + names]))
    if named is None or text.translate(None, PRINTABLE):
        return None
    batch.namespace_names, batch.namespace = named, named[0]
    if columns & _BLOBS:
        whole = _decode_blobs(batch, rest_at, *rest)
    else:
        whole = _decode_numbers(batch, columns, rest_at, rest)
    stops = bytes(body[ends_at : ends_at + ends])
    return Names(stops, text) if whole and stops[-_END.size :] == _END.pack(texts) else None


def decode_names(batches: Sequence[Batch], names: Sequence[Names]) -> int:
    """Decode the vector ids of batches whose other columns are decoded; of how many of the first they are.

    All in one go: a column of names costs little more than one of them.
    """
    counts = [batch.count for batch in batches]
    rows = sum(counts)
    found = _split(counts, names) if rows > _FEW_ROWS else None
    if found is None:
        for place, (batch, one) in enumerate(zip(batches, names, strict=True)):
            if not _decode_few(batch, one):
                return place
        return len(batches)
    keys, longest = found
    at = 0
    for batch in batches:
        batch.keys, batch.key_bytes_bound, batch.decoded = keys[at : at + batch.count], longest, True
        at += batch.count
    return len(batches)


def _split(counts: list[int], names: Sequence[Names]) -> tuple[list[str], int] | None:
    """The vector ids of all, end to end, and the length of the longest; None where one is empty.

    A zero is put behind each, so that they can be taken apart in one call.
    """
    text = b"".join([one.text for one in names])
    ends = np.frombuffer(b"".join([one.ends for one in names]), U32).astype(np.intp)
    widths = ends.copy()
    widths[1:] -= ends[:-1]
    at = 0
    for rows in counts[:-1]:
        at += rows
        widths[at] = ends[at]
    # Where none is empty all ends rise, up to that of the last one of each batch, which was looked at.
    if int(_LEAST(widths)) < 1:
        return None
    longest = int(_MOST(widths))
    widths += 1
    places = _SUMS(widths)
    spread = np.zeros(int(places[-1]), np.uint8)
    kept = np.ones(len(spread), np.bool_)
    kept[places - 1] = False
    spread[kept] = np.frombuffer(text, np.uint8)
    keys = spread.tobytes().decode("ascii").split("\0")
    del keys[-1]
    return keys, longest


def _decode_few(batch: Batch, names: Names) -> bool:
    text, stops = names.text.decode("ascii"), stops_of(batch.count).unpack(names.ends)
    keys = [text[start:stop] for start, stop in zip((0, *stops), stops, strict=False)]
    # Where none is empty all ends rise, up to the last one, which was looked at.
    if not all(keys):
        return False
    bound = len(text)
    batch.keys, batch.decoded = keys, True
    batch.key_bytes_bound = bound if bound <= VECTOR_ID_BYTES_MAX else max(map(len, keys))
    return True


def _decode_numbers(batch: Batch, columns: int, at: int, sizes: list[int]) -> bool:
    """Numbers from there on; whether there are as many as there must be."""
    count, indices, values = batch.count, NO_INDICES, NO_VALUES
    if columns & _INDICES:
        size = sizes[0]
        indices = np.frombuffer(batch.raw, U32, size >> 2, at)
        at += size + -size % ALIGNMENT
    else:
        batch.index_highest = -1
    if columns & _VALUES:
        values = np.frombuffer(batch.raw, F32, sizes[-1] >> 2, at)
    batch.indices, batch.values, batch.row_values = indices, values, len(values) // count
    needed = len(values) if batch.kind in SPARSE_KINDS else 0
    whole = sum(sizes) == 4 * (len(indices) + len(values))
    return whole and len(values) % count == 0 and len(indices) == needed


def _decode_blobs(batch: Batch, at: int, ends: int, size: int) -> bool:
    """Where bytes end, from there on; whether they rise as they must."""
    batch.indices, batch.values, batch.row_values, batch.index_highest = NO_INDICES, NO_VALUES, 0, -1
    return ends == 4 * batch.count and _rise_to(size, bytes(batch.raw[at : at + ends]), batch.count)


def _rise_to(total: int, ends: bytes, count: int) -> bool:
    """Whether these ends of so many texts rise to the end of the last."""
    if total % count == 0 and ends == _even_ends(count, total // count):
        return True
    stops = stops_of(count).unpack(ends)
    return stops[-1] == total and sorted(stops) == list(stops)


@lru_cache(maxsize=64)
def _even_ends(count: int, size: int) -> bytes:
    """The ends of texts of one size."""
    if not size:
        return bytes(_END.size * count)
    return stops_of(count).pack(*range(size, size * count + 1, size))


@lru_cache(maxsize=1024)
def name_in(raw: bytes) -> tuple[str] | None:
    """A table of one name, None unless it is one."""
    if len(raw) < NAME_LENGTH.size or len(raw) != NAME_LENGTH.size + NAME_LENGTH.unpack_from(raw)[0]:
        return None
    try:
        return (str(raw[NAME_LENGTH.size :], "utf-8"),)
    except UnicodeDecodeError:
        return None
