"""The layout of a batch's body: its header and the order of its columns.

`docs/protocol.md` repeats this table for other languages. The order never changes; columns are only
added at the end.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from functools import lru_cache

BODY_HEADER = struct.Struct("<BBHIQIIQQQIIQ")
"""version, header length in 8 bytes, attributes, count, origin, epoch, schema, base counter,
hybrid time, kinds mask, dimension, body length, previous counter: 64 bytes."""

COLUMN_MASK = struct.Struct("<Q")
"""Follows the header: bit k is set if column k is present; then comes the u32 length of each such column."""


class Column(IntEnum):
    """Columns of a body, in the order in which they are stored; each starts on a multiple of 8 bytes."""

    CLOCK = 0
    KEY_ENDS = 1
    KEYS = 2
    NAMESPACES = 3
    NAMESPACE_INDEX = 4
    KINDS = 5
    IDS = 6
    COUNTERS = 7
    PARENTS = 8
    ROW_OFFSETS = 9
    TIMES = 10
    VALUE_ENDS = 11
    INDICES = 12
    VALUES = 13
    BLOB_ENDS = 14
    BLOBS = 15
    METADATA_ENDS = 16
    METADATA = 17
    TAG_NAMES = 18
    TAGS = 19
    EXPECTS = 20
    STATE_ORIGINS = 21
    STATE_COUNTERS = 22
    STATE_LAMPORTS = 23
    STATE_IGNORED = 24


CLOCK_ENTRY = struct.Struct("<QQ")
"""origin, counter."""

PARENT = struct.Struct("<II16s")
"""row, form (0: a dot, 1: an id, 2: the log position of the dot before it), 16 bytes (a dot: origin u64,
counter u64, little-endian; a log position: see `POSITION`)."""

POSITION_FORM = 2
"""The form of a `PARENT` entry that holds a log position."""
POSITION = struct.Struct("<IIQ")
"""partition, leader epoch, offset."""

TAG = struct.Struct("<II")
"""row, index in the table of tag names."""

EXPECT = struct.Struct("<IIQQ")
"""row, 0, origin, counter."""

NAME_LENGTH = struct.Struct("<H")
"""A table of names is a sequence of entries: length u16, then that many bytes of UTF-8."""
NAME_BYTES_MAX = (1 << 8 * NAME_LENGTH.size) - 1
"""The longest name that the format of a table can hold; the bounds of each kind of name are lower."""

ROW_WIDTHS: dict[int, int] = {
    Column.KEY_ENDS: 4,
    Column.NAMESPACE_INDEX: 2,
    Column.KINDS: 1,
    Column.IDS: 16,
    Column.COUNTERS: 8,
    Column.ROW_OFFSETS: 8,
    Column.TIMES: 8,
    Column.VALUE_ENDS: 4,
    Column.BLOB_ENDS: 4,
    Column.METADATA_ENDS: 4,
    Column.STATE_ORIGINS: 8,
    Column.STATE_COUNTERS: 8,
    Column.STATE_LAMPORTS: 8,
    Column.STATE_IGNORED: 8,
}
"""Bytes per row of the columns that have one entry per row."""

ENTRY_WIDTHS: dict[int, int] = {
    Column.CLOCK: CLOCK_ENTRY.size,
    Column.PARENTS: PARENT.size,
    Column.INDICES: 4,
    Column.VALUES: 4,
    Column.TAGS: TAG.size,
    Column.EXPECTS: EXPECT.size,
}
"""Bytes per entry of the columns whose number of entries does not follow from the number of rows."""


SHORT_NAMES_BYTES = 256


def read_names(raw: bytes) -> tuple[str, ...]:
    """Read a table of names. Raises ValueError if it ends within an entry or a name is not UTF-8."""
    names, position = [], 0
    while position < len(raw):
        start = position + NAME_LENGTH.size
        position = start + int.from_bytes(raw[position:start], "little")
        names.append(str(raw[start:position], "utf-8"))
    if position > len(raw):
        raise ValueError("the table ends within an entry")
    return tuple(names)


read_short_names = lru_cache(maxsize=1024)(read_names)
"""Reads a table of up to `SHORT_NAMES_BYTES` once, since the same names arrive with many batches. Routing
compares tables by identity.
"""
