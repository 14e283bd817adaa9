"""Looks a foreign body over before anyone reads it: lengths, bounds, checksum, agreement of columns.

What passes here can be read by `batch.py` without an exception; every failure is a PeerError.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from delta_prop_wire.batch import U64, Batch
from delta_prop_wire.control_rows import check_control_rows
from delta_prop_wire.crc import crc32c
from delta_prop_wire.delta import Kind
from delta_prop_wire.errors import PeerError
from delta_prop_wire.forms import note_form, parse_known
from delta_prop_wire.layout import (
    BODY_HEADER,
    COLUMN_MASK,
    ENTRY_WIDTHS,
    NAME_LENGTH,
    PLACE_FORM,
    ROW_WIDTHS,
    TAG,
    Column,
)
from delta_prop_wire.mixed import decode_mixed
from delta_prop_wire.packed_metadata import read_packed
from delta_prop_wire.plain import decode_plain
from delta_prop_wire.spec import (
    ALIGNMENT,
    BATCH_ROWS_MAX,
    BODY_HEADER_BYTES,
    BODY_VERSION,
    COUNTER_MAX,
    CRC_BYTES,
    FRAME_PAYLOAD_BYTES_MAX,
    METADATA_BYTES_MAX,
    Attribute,
    ErrorCode,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

_VERSION_AND_WORDS = bytes((BODY_VERSION, BODY_HEADER_BYTES // 8))
SMALLEST_BODY_BYTES = BODY_HEADER_BYTES + COLUMN_MASK.size + CRC_BYTES
"""A body of fewer bytes has no room for what every one begins and ends with."""
_ATTRIBUTES_ZERO = 0xC000
_KNOWN_COLUMNS = (1 << len(Column)) - 1
_FLAGGED = {
    Attribute.IDS: Column.IDS,
    Attribute.PARENTS: Column.PARENTS,
    Attribute.CLOCK: Column.CLOCK,
    Attribute.MIXED_KINDS: Column.KINDS,
    Attribute.MIXED_NAMESPACES: Column.NAMESPACE_INDEX,
    Attribute.ROW_OFFSETS: Column.ROW_OFFSETS,
    Attribute.COUNTERS_LEAP: Column.COUNTERS,
    Attribute.STATE_ROWS: Column.STATE_ORIGINS,
}

_FLAGS = sum(_FLAGGED)
_FLAGGED_COLUMNS = sum(1 << column for column in _FLAGGED.values())
_RARE_COLUMNS = _KNOWN_COLUMNS & ~sum(
    1 << column
    for column in (
        Column.KEY_ENDS,
        Column.KEYS,
        Column.NAMESPACES,
        Column.NAMESPACE_INDEX,
        Column.KINDS,
        Column.IDS,
        Column.VALUE_ENDS,
        Column.INDICES,
        Column.VALUES,
    )
)
"""Columns that few batches have; what checks them is not called for the others."""

_STATE_COLUMNS_NEEDED = sum(
    1 << column
    for column in (Column.STATE_ORIGINS, Column.STATE_COUNTERS, Column.STATE_LAMPORTS, Column.ROW_OFFSETS)
)
_STATE_COLUMNS = (_STATE_COLUMNS_NEEDED | 1 << Column.STATE_IGNORED) & ~(1 << Column.ROW_OFFSETS)
_NOT_IN_STATES = sum(
    1 << column
    for column in (
        Column.CLOCK,
        Column.IDS,
        Column.COUNTERS,
        Column.PARENTS,
        Column.INDICES,
        Column.TAGS,
        Column.EXPECTS,
    )
)
_STATE_KINDS = 1 << Kind.CREATE | 1 << Kind.OPAQUE | 1 << Kind.DELETE


def parse_batch(body: bytes | memoryview) -> Batch:
    """Read a body (with its padding and CRC) from elsewhere, every length checked. Raises PeerError."""
    known = parse_known(body)
    if known is not None:
        return known
    if len(body) >= SMALLEST_BODY_BYTES:
        batch = Batch(body)
        if batch.plain:
            if plain_is_whole(batch):
                note_form(batch)
                return batch
        elif mixed_is_whole(batch):
            return batch
    check_body(memoryview(body))
    batch = Batch(body)
    check_columns(batch)
    return batch


def plain_is_whole(batch: Batch) -> bool:
    """The short way, of what most bodies are: plain, and passing all the checks there are; then decoded too.

    Where anything is otherwise it gives False, and the long way says what.
    """
    return plain_body_is_sound(batch) and decode_plain(batch)


def plain_body_is_sound(batch: Batch) -> bool:
    """Whether header, padding and checksum of a plain batch are in order; its columns are for `plain.py`."""
    return not batch.attributes & _FLAGS and body_is_sound(batch)


def mixed_is_whole(batch: Batch) -> bool:
    """`plain_is_whole` for batches whose rows differ in kind, namespace or length; they are valid, too."""
    return body_is_sound(batch) and decode_mixed(batch)


def body_is_sound(batch: Batch) -> bool:
    """Whether header, padding and checksum are in order."""
    body, count, length = batch.raw, batch.count, batch.length
    size = len(body)
    return (
        0 <= size - CRC_BYTES - length < ALIGNMENT
        and size % ALIGNMENT == 0
        and size <= FRAME_PAYLOAD_BYTES_MAX
        and bytes(body[:2]) == _VERSION_AND_WORDS
        and not batch.attributes & _ATTRIBUTES_ZERO
        and 1 <= count <= BATCH_ROWS_MAX
        and 1 <= batch.base <= COUNTER_MAX + 1 - count
        and batch.kinds_mask != 0
        and crc32c(memoryview(body)[:-CRC_BYTES]) == batch.crc
        and not any(body[length:-CRC_BYTES])
    )


def check_body(body: memoryview) -> None:
    """Check checksum, header and the directory of columns. Raises PeerError."""
    if not SMALLEST_BODY_BYTES <= len(body) <= FRAME_PAYLOAD_BYTES_MAX or len(body) % ALIGNMENT:
        _bad(
            f"a body has {len(body)} bytes, not a multiple of 8 from {SMALLEST_BODY_BYTES} to "
            f"{FRAME_PAYLOAD_BYTES_MAX}"
        )
    told = int.from_bytes(body[-CRC_BYTES:], "little")
    found = crc32c(body[:-CRC_BYTES])
    if told != found:
        raise PeerError(ErrorCode.CHECKSUM, f"body checksum is {found:#010x}, the frame says {told:#010x}")
    header = BODY_HEADER.unpack_from(body)
    version, words, attributes, count = header[:4]
    base, kinds_mask, length = header[7], header[9], header[11]
    if version != BODY_VERSION or words * 8 != BODY_HEADER_BYTES:
        raise PeerError(
            ErrorCode.UNSUPPORTED_VERSION, f"body version {version}, header {words * 8} bytes; known: 1, 64"
        )
    if attributes & _ATTRIBUTES_ZERO:
        raise PeerError(
            ErrorCode.UNSUPPORTED_FLAG, f"attributes {attributes:#06x} have reserved bits 14 or 15 set"
        )
    if not 1 <= count <= BATCH_ROWS_MAX:
        _bad(f"{count} rows in a batch; allowed are 1 to {BATCH_ROWS_MAX}")
    if not 1 <= base <= COUNTER_MAX + 1 - count:
        _bad(f"base counter {base} is not from 1 to {COUNTER_MAX + 1 - count}")
    if kinds_mask == 0:
        _bad("the kinds mask is 0; it has one bit set for each kind in the batch")
    if not 0 <= len(body) - CRC_BYTES - length < ALIGNMENT or any(body[length:-CRC_BYTES]):
        _bad(f"body length {length} does not fit {len(body)} bytes with zero padding and checksum")
    _check_directory(body, length, count)


def check_columns(batch: Batch) -> None:
    """Check that the columns agree with each other and with the header. Raises PeerError."""
    present = batch.columns_mask
    if present & _FLAGGED_COLUMNS != _columns_told(batch.attributes & _FLAGS):
        _bad_flags(batch)
    _check_ends(batch, Column.KEY_ENDS, Column.KEYS)
    _check_names(batch, Column.NAMESPACES, 1 if not batch.is_control else 0, batch.count)
    _check_texts(batch)
    _check_kinds(batch)
    _check_numbers(batch)
    if present & _RARE_COLUMNS:
        _check_ends(batch, Column.BLOB_ENDS, Column.BLOBS)
        _check_ends(batch, Column.METADATA_ENDS, Column.METADATA)
        tags = batch.column(Column.TAGS)
        _check_names(batch, Column.TAG_NAMES, 0, 0 if tags is None else len(tags) // TAG.size)
        _check_tag_texts(batch)
        _check_entries(batch)
        _check_states(batch)
        _check_metadata(batch)
    if batch.is_control:
        check_control_rows(batch)


@lru_cache(maxsize=1024)
def _columns_told(attributes: int) -> int:
    """The columns that these attribute bits announce, as a mask."""
    return sum(1 << column for attribute, column in _FLAGGED.items() if attributes & attribute)


def _bad_flags(batch: Batch) -> NoReturn:
    wrong = (batch.columns_mask & _FLAGGED_COLUMNS) ^ _columns_told(batch.attributes & _FLAGS)
    attribute, column = next((a, c) for a, c in _FLAGGED.items() if wrong >> c & 1)
    _bad(f"attribute {attribute.name} and column {column.name} do not agree")


@lru_cache(maxsize=1024)
def _widths(mask: int) -> tuple[tuple[Column, int, int], ...]:
    """(column, bytes a row, bytes an entry) of the columns in a mask; 0 where that is not fixed."""
    present = [Column(k) for k in range(len(Column)) if mask >> k & 1]
    return tuple((column, ROW_WIDTHS.get(column, 0), ENTRY_WIDTHS.get(column, 0)) for column in present)


def _check_directory(body: memoryview, length: int, count: int) -> None:
    mask = COLUMN_MASK.unpack_from(body, BODY_HEADER_BYTES)[0]
    if mask & ~_KNOWN_COLUMNS:
        _bad(f"columns mask {mask:#x} names columns above {len(Column) - 1}")
    present = _widths(mask)
    at = BODY_HEADER_BYTES + COLUMN_MASK.size
    if at + 4 * len(present) > length:
        _bad("the directory of columns goes past the body")
    lengths = struct.unpack_from(f"<{len(present)}I", body, at)
    at += _padded(4 * len(present))
    for (column, row_width, entry_width), size in zip(present, lengths, strict=True):
        if row_width and size != row_width * count:
            _bad(f"column {column.name} has {size} bytes for {count} rows")
        if entry_width and size % entry_width:
            _bad(f"column {column.name} has {size} bytes, not a multiple of {entry_width}")
        at += _padded(size)
    if at != length:
        _bad(f"the columns end at {at}, the body at {length}")


def _check_ends(batch: Batch, ends: Column, content: Column) -> None:
    raw, stops = batch.column(content), batch.column(ends)
    if (raw is None) != (stops is None):
        _bad(f"columns {ends.name} and {content.name} come together or not at all")
    if raw is not None and stops is not None:
        _check_rising(stops, len(raw), ends)


def _check_rising(raw: memoryview, total: int, column: Column) -> None:
    count = len(raw) // 4
    if count < 200:  # numpy's overhead pays above so many
        rising = struct.unpack(f"<{count}I", raw)
        sound = rising[-1] == total and sorted(rising) == list(rising)
    else:
        stops = np.frombuffer(raw, "<u4")
        sound = bool(stops[-1] == total and (stops[1:] >= stops[:-1]).all())
    if not sound:
        _bad(f"column {column.name} does not rise to {total}")


def _check_names(batch: Batch, column: Column, least: int, most: int) -> None:
    raw = batch.column(column)
    at, found = 0, 0
    while raw is not None and at < len(raw):
        if at + NAME_LENGTH.size > len(raw):
            _bad(f"column {column.name} ends within a length")
        at += NAME_LENGTH.size + NAME_LENGTH.unpack_from(raw, at)[0]
        found += 1
        if found > most:
            _bad(f"column {column.name} holds more names than the {most} that rows can use")
    if raw is not None and at != len(raw):
        _bad(f"column {column.name} ends within a name")
    if found < least:
        _bad(f"column {column.name} holds {found} names; at least {least} is needed")


def _check_texts(batch: Batch) -> None:
    try:
        names = len(batch.namespace_names)
        batch.keys  # noqa: B018 - decoding is the check
    except UnicodeDecodeError as error:
        _bad(f"a name is not UTF-8: {error.reason}")
    if not batch.is_control and batch.column(Column.KEYS) is None and names:
        _bad("a batch without vector ids")
    index = batch.column(Column.NAMESPACE_INDEX)
    if index is not None and int(np.frombuffer(index, "<u2").max()) >= names:
        _bad(f"a row names a namespace above the {names} in the table")
    if index is None and names > 1:
        _bad(f"{names} namespaces, but no row says which is its own")


def _check_tag_texts(batch: Batch) -> None:
    try:
        batch._names(Column.TAG_NAMES)
    except UnicodeDecodeError as error:
        _bad(f"a custom topic is not UTF-8: {error.reason}")


def _check_kinds(batch: Batch) -> None:
    raw = batch.column(Column.KINDS)
    if raw is None:
        if batch.kind is None:
            _bad("several kinds in the mask, but no row says which is its own")
        return
    mask = 0
    for kind in set(bytes(raw)):
        if kind > 63:
            _bad(f"kind {kind} is above 63")
        mask |= 1 << kind
    if mask != batch.kinds_mask:
        _bad(f"the rows' kinds give mask {mask:#x}, the header says {batch.kinds_mask:#x}")


def _check_numbers(batch: Batch) -> None:
    ends = batch.column(Column.VALUE_ENDS)
    values = len(batch.values)
    if ends is not None:
        _check_rising(ends, values, Column.VALUE_ENDS)
    elif values % batch.count:
        _bad(f"{values} numbers do not share out over {batch.count} rows")
    kind = batch.kind
    wanted = (
        values
        if kind in (Kind.SPARSE, Kind.SPARSE_ADD)
        else 0
        if kind is not None
        else int(batch.index_bounds[-1])
    )
    if len(batch.indices) != wanted:
        _bad(f"{len(batch.indices)} indices where the sparse rows have {wanted} numbers")


def _check_entries(batch: Batch) -> None:
    for column in (Column.PARENTS, Column.TAGS, Column.EXPECTS):
        raw = batch.column(column)
        if raw is None or not len(raw):
            continue
        width = ENTRY_WIDTHS[column]
        words = np.frombuffer(raw, "<u4").reshape(-1, width // 4)
        if int(words[:, 0].max()) >= batch.count:
            _bad(f"column {column.name} names a row above {batch.count - 1}")
        if column is Column.PARENTS:
            _check_parents(words[:, 0], words[:, 1])
        if column is Column.TAGS:
            names = len(batch._names(Column.TAG_NAMES))
            if int(words[:, 1].max()) >= names:
                _bad(f"a row names a custom topic above the {names} in the table")
    counters = batch.counters
    if counters is not None:
        steps = counters.tolist()
        rising = all(a < b for a, b in pairwise((batch.previous, *steps)))
        if steps[0] != batch.base or not rising or steps[-1] > COUNTER_MAX:
            _bad("counters do not rise from the previous counter, starting at the base counter")


def _check_parents(rows: NDArray[np.uint32], forms: NDArray[np.uint32]) -> None:
    if int(forms.max()) > PLACE_FORM:
        _bad(f"a parent of form {int(forms.max())}; known are 0 (dot), 1 (id) and 2 (the place of a dot)")
    places = np.flatnonzero(forms == PLACE_FORM)
    if len(places) and (
        places[0] == 0 or (forms[places - 1] != 0).any() or (rows[places - 1] != rows[places]).any()
    ):
        _bad("the place of a parent that does not follow its dot")


def _check_states(batch: Batch) -> None:
    present = batch.columns_mask
    if not batch.is_state:
        if present & _STATE_COLUMNS:
            _bad("columns of state rows in a batch of changes")
        return
    if present & _STATE_COLUMNS_NEEDED != _STATE_COLUMNS_NEEDED or present & _NOT_IN_STATES:
        _bad(f"columns {present:#x} are not those of state rows")
    if batch.is_control or batch.kinds_mask & ~_STATE_KINDS:
        _bad(f"kinds {batch.kinds_mask:#x} in state rows; a state is a create, opaque or delete row")
    lamports, counters = (batch._array(c, U64) for c in (Column.STATE_LAMPORTS, Column.STATE_COUNTERS))
    for numbers in (lamports, counters, batch.row_offsets, batch.state_ignored):
        if numbers is not None and int(numbers.max()) > COUNTER_MAX:
            _bad(f"a number of a state row is above {COUNTER_MAX}")
    if counters is not None and int(counters.min()) < 1:
        _bad("the dot of a state row has counter 0; counters start at 1")


def _check_metadata(batch: Batch) -> None:
    if not batch.has_metadata:
        return
    # A change is bounded; a state's metadata are what any number of changes made of them.
    bytes_max = FRAME_PAYLOAD_BYTES_MAX if batch.is_state else METADATA_BYTES_MAX
    for row in range(batch.count):
        packed = batch.packed_metadata(row)
        if not packed:
            continue
        try:
            read = read_packed(packed, bytes_max)
        except ValueError as error:
            _bad(f"row {row}: the metadata change is not a msgpack map: {error}")
        if read is None and batch.unreadable_row is None:
            batch.unreadable_row = row


def _padded(length: int) -> int:
    return -(-length // ALIGNMENT) * ALIGNMENT


def _bad(message: str) -> NoReturn:
    raise PeerError(ErrorCode.BAD_FRAME, message)
