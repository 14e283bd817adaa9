"""The body of a batch, drawn: its header and the order of its columns.

`docs/protocol.md` repeats this table for other languages; the order never changes, columns are only
added at the end.
"""

from __future__ import annotations

import struct
from enum import IntEnum

BODY_HEADER = struct.Struct("<BBHIQIIQQQIIQ")
"""version, header length in 8 bytes, attributes, count, origin, epoch, schema, base counter,
hybrid time, kinds mask, dimension, body length, previous counter: 64 bytes."""

COLUMN_MASK = struct.Struct("<Q")
"""Follows the header: bit k set where column k is present; then one u32 length for each."""


class Column(IntEnum):
    """Columns of a body, in the order in which they lie; each starts on 8 bytes."""

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


COLUMNS_MAX = 64

CLOCK_ENTRY = struct.Struct("<QQ")
"""origin, counter."""

PARENT = struct.Struct("<II16s")
"""row, form (0: a dot, 1: an id, 2: the place of the dot before it), 16 bytes (a dot: origin u64, counter
u64, little-endian; a place: see `PLACE`)."""

PLACE_FORM = 2
PLACE = struct.Struct("<IIQ")
"""partition, leader epoch, offset."""

TAG = struct.Struct("<II")
"""row, place in the table of tag names."""

EXPECT = struct.Struct("<IIQQ")
"""row, 0, origin, counter."""

NAME_LENGTH = struct.Struct("<H")
"""Tables of names: length u16, then that many bytes of UTF-8, again and again."""
NAME_BYTES_MAX = (1 << 8 * NAME_LENGTH.size) - 1
"""What a table of names can say, whatever may be said."""

ROW_WIDTHS = {
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
"""Bytes a row of the columns that have one entry a row."""

ENTRY_WIDTHS = {
    Column.CLOCK: CLOCK_ENTRY.size,
    Column.PARENTS: PARENT.size,
    Column.INDICES: 4,
    Column.VALUES: 4,
    Column.TAGS: TAG.size,
    Column.EXPECTS: EXPECT.size,
}
"""Bytes an entry of the columns whose number of entries is their own."""
