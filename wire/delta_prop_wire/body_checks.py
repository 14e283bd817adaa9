"""Checks a peer's body before anything reads it: lengths, bounds, checksum, agreement of columns.

`batch.py` reads a body that passes without raising an error; a body that fails raises ProtocolError.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from delta_prop_wire.batch import U64, Batch, directory_layout, ends_struct
from delta_prop_wire.control_rows import check_control_rows
from delta_prop_wire.core import core_mode
from delta_prop_wire.crc import crc32c
from delta_prop_wire.delta import Kind
from delta_prop_wire.errors import ProtocolError
from delta_prop_wire.layout import (
    COLUMN_MASK,
    ENTRY_WIDTHS,
    NAME_LENGTH,
    POSITION_FORM,
    ROW_WIDTHS,
    TAG,
    Column,
)
from delta_prop_wire.packed_metadata import read_packed
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

SMALLEST_BODY_BYTES = BODY_HEADER_BYTES + COLUMN_MASK.size + CRC_BYTES
"""The bytes of the header, the mask of columns and the checksum, which every body has."""
RESERVED_ATTRIBUTES = 0xC000
_KNOWN_COLUMNS = (1 << len(Column)) - 1
_COLUMN_OF_FLAG = {
    Attribute.IDS: Column.IDS,
    Attribute.PARENTS: Column.PARENTS,
    Attribute.CLOCK: Column.CLOCK,
    Attribute.MIXED_KINDS: Column.KINDS,
    Attribute.MIXED_NAMESPACES: Column.NAMESPACE_INDEX,
    Attribute.ROW_OFFSETS: Column.ROW_OFFSETS,
    Attribute.COUNTER_GAPS: Column.COUNTERS,
    Attribute.STATE_ROWS: Column.STATE_ORIGINS,
}

FLAGS = sum(_COLUMN_OF_FLAG)
_FLAGGED_COLUMNS = sum(1 << column for column in _COLUMN_OF_FLAG.values())
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
        Column.BLOB_ENDS,
        Column.BLOBS,
    )
)
"""Columns that few batches have; their checks are skipped for other batches."""

_REQUIRED_STATE_COLUMNS = sum(
    1 << column
    for column in (Column.STATE_ORIGINS, Column.STATE_COUNTERS, Column.STATE_LAMPORTS, Column.ROW_OFFSETS)
)
_STATE_COLUMNS = (_REQUIRED_STATE_COLUMNS | 1 << Column.STATE_IGNORED) & ~(1 << Column.ROW_OFFSETS)
_CHANGE_ONLY_COLUMNS = sum(
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
    """Read a peer's body (with its padding and CRC), checking every length. Raises ProtocolError."""
    parsed = core_mode.core.parse_batch(body)
    if parsed is not None:
        return parsed
    batch = read_header(body)
    check_batch(batch)
    return batch


def read_header(body: bytes | memoryview) -> Batch:
    """Return the batch of a body of which only the size is checked. Raises ProtocolError."""
    if not SMALLEST_BODY_BYTES <= len(body) <= FRAME_PAYLOAD_BYTES_MAX or len(body) % ALIGNMENT:
        _raise_bad_frame(
            f"a body of {len(body)} bytes: send a multiple of 8 from {SMALLEST_BODY_BYTES} to "
            f"{FRAME_PAYLOAD_BYTES_MAX}"
        )
    return Batch(body)


def check_batch(batch: Batch) -> None:
    """Check all but the size of a body. Raises ProtocolError."""
    _check_header(batch)
    _check_directory(batch)
    _check_columns(batch)


def _check_header(batch: Batch) -> None:
    body, length, count = batch.body, batch.length, batch.count
    computed = crc32c(body[:-CRC_BYTES])
    if batch.crc != computed:
        raise ProtocolError(
            ErrorCode.CHECKSUM,
            f"body checksum is {computed:#010x}; the frame states {batch.crc:#010x}: send the frame again",
        )
    version, header_words = body[0], body[1]
    if version != BODY_VERSION or header_words * 8 != BODY_HEADER_BYTES:
        raise ProtocolError(
            ErrorCode.UNSUPPORTED_VERSION,
            f"body version {version}, header of {header_words * 8} bytes: send version 1, with a header of "
            "64 bytes",
        )
    if batch.attributes & RESERVED_ATTRIBUTES:
        raise ProtocolError(
            ErrorCode.UNSUPPORTED_FLAG,
            f"attributes {batch.attributes:#06x}: send the reserved bits 14 and 15 as 0",
        )
    if not 1 <= count <= BATCH_ROWS_MAX:
        _raise_bad_frame(f"{count} rows in a batch: send 1 to {BATCH_ROWS_MAX}")
    if not 1 <= batch.base <= COUNTER_MAX + 1 - count:
        _raise_bad_frame(f"base counter {batch.base}: send one from 1 to {COUNTER_MAX + 1 - count}")
    if batch.kinds_mask == 0:
        _raise_bad_frame("the kinds mask is 0: set one bit for each kind in the batch")
    if not 0 <= len(body) - CRC_BYTES - length < ALIGNMENT or any(body[length:-CRC_BYTES]):
        _raise_bad_frame(
            f"body length {length} does not match {len(body)} bytes: give the length without zero padding "
            "and checksum"
        )


def _check_columns(batch: Batch) -> None:
    """Check that the columns agree with each other and with the header. Raises ProtocolError."""
    present = batch.columns_mask
    if present & _FLAGGED_COLUMNS != _announced_columns(batch.attributes & FLAGS):
        _raise_flag_mismatch(batch)
    _check_ends(batch, Column.KEY_ENDS, Column.KEYS)
    _check_names(batch, Column.NAMESPACES, 1 if not batch.is_control else 0, batch.count)
    _check_texts(batch)
    _check_kinds(batch)
    _check_numbers(batch)
    _check_ends(batch, Column.BLOB_ENDS, Column.BLOBS)
    if present & _RARE_COLUMNS:
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
def _announced_columns(attributes: int) -> int:
    """Return the mask of the columns that these attribute bits announce."""
    return sum(1 << column for attribute, column in _COLUMN_OF_FLAG.items() if attributes & attribute)


def _raise_flag_mismatch(batch: Batch) -> NoReturn:
    differing = (batch.columns_mask & _FLAGGED_COLUMNS) ^ _announced_columns(batch.attributes & FLAGS)
    attribute, column = next((a, c) for a, c in _COLUMN_OF_FLAG.items() if differing >> c & 1)
    _raise_bad_frame(
        f"attribute {attribute.name} and column {column.name} do not agree: send both, or neither"
    )


def _check_directory(batch: Batch) -> None:
    if batch.columns_mask & ~_KNOWN_COLUMNS:
        _raise_bad_frame(f"columns mask {batch.columns_mask:#x}: send no columns above {len(Column) - 1}")
    _, _, position = directory_layout(batch.columns_mask)
    if position > batch.length:
        _raise_bad_frame("the directory of columns ends after the body: give one length per column")
    for column, (start, end) in batch.column_bounds.items():
        size, row_width = end - start, ROW_WIDTHS.get(column)
        if row_width is not None:
            if size != row_width * batch.count:
                _raise_bad_frame(
                    f"column {Column(column).name} has {size} bytes for {batch.count} rows: "
                    f"send {row_width} per row"
                )
        elif size % ENTRY_WIDTHS.get(column, 1):
            _raise_bad_frame(
                f"column {Column(column).name} has {size} bytes: send a multiple of {ENTRY_WIDTHS[column]}"
            )
        position = end + -end % ALIGNMENT
    if position != batch.length:
        _raise_bad_frame(
            f"the columns end at {position}, the body at {batch.length}: pad each column to 8 bytes"
        )


def _check_ends(batch: Batch, ends: Column, content: Column) -> None:
    bounds, stops = batch.column_bounds.get(content), batch.column(ends)
    if (bounds is None) != (stops is None):
        _raise_bad_frame(f"only one of the columns {ends.name} and {content.name}: send both, or neither")
    if bounds is not None and stops is not None:
        _check_ascending(stops, bounds[1] - bounds[0], ends)


def _check_ascending(raw: memoryview, total: int, column: Column) -> None:
    count = len(raw) // 4
    if count < 200:  # numpy is faster from this many on
        ends = ends_struct(count).unpack(raw)
        is_valid = ends[-1] == total and sorted(ends) == list(ends)
    else:
        array = np.frombuffer(raw, "<u4")
        is_valid = bool(array[-1] == total and (array[1:] >= array[:-1]).all())
    if not is_valid:
        _raise_bad_frame(f"column {column.name} does not rise to {total}: send rising ends")


def _check_names(batch: Batch, column: Column, count_min: int, count_max: int) -> None:
    raw = batch.column(column)
    position, count = 0, 0
    while raw is not None and position < len(raw):
        if position + NAME_LENGTH.size > len(raw):
            _raise_bad_frame(f"column {column.name} ends within a length: send whole entries")
        position += NAME_LENGTH.size + NAME_LENGTH.unpack_from(raw, position)[0]
        count += 1
        if count > count_max:
            _raise_bad_frame(
                f"column {column.name} holds more names than its rows can use: send up to {count_max}"
            )
    if raw is not None and position != len(raw):
        _raise_bad_frame(f"column {column.name} ends within a name: send whole entries")
    if count < count_min:
        _raise_bad_frame(f"column {column.name} holds {count} names: send at least {count_min}")


def _check_texts(batch: Batch) -> None:
    try:
        name_count = len(batch.namespace_names)
        batch.keys  # noqa: B018 - reading it decodes, which is the check
    except UnicodeDecodeError as error:
        _raise_bad_frame(f"a name is not UTF-8 ({error.reason}): encode names as UTF-8")
    if not batch.is_control and batch.column(Column.KEYS) is None and name_count:
        _raise_bad_frame("a batch without vector ids: send one for each row")
    index = batch.column(Column.NAMESPACE_INDEX)
    if index is not None and int(np.frombuffer(index, "<u2").max()) >= name_count:
        _raise_bad_frame(
            f"a row has a namespace index of {name_count} or more, with {name_count} names in the table: "
            "count from 0"
        )
    if index is None and name_count > 1:
        _raise_bad_frame(f"{name_count} namespaces without an index per row: send column NAMESPACE_INDEX")


def _check_tag_texts(batch: Batch) -> None:
    try:
        batch._name_table(Column.TAG_NAMES)
    except UnicodeDecodeError as error:
        _raise_bad_frame(f"a custom topic is not UTF-8 ({error.reason}): encode names as UTF-8")


def _check_kinds(batch: Batch) -> None:
    raw = batch.column(Column.KINDS)
    if raw is None:
        if batch.kind is None:
            _raise_bad_frame("several kinds in the mask without a kind per row: send column KINDS")
        return
    mask = 0
    for kind in set(bytes(raw)):
        if kind > 63:
            _raise_bad_frame(f"kind {kind} is above 63: send a lower one")
        mask |= 1 << kind
    if mask != batch.kinds_mask:
        _raise_bad_frame(
            f"the rows' kinds give mask {mask:#x}, the header has {batch.kinds_mask:#x}: send the rows' mask"
        )


def _check_numbers(batch: Batch) -> None:
    ends = batch.column(Column.VALUE_ENDS)
    value_count = len(batch.values)
    if ends is not None:
        _check_ascending(ends, value_count, Column.VALUE_ENDS)
    elif value_count % batch.count:
        _raise_bad_frame(
            f"{value_count} numbers do not divide over {batch.count} rows: send column VALUE_ENDS"
        )
    kind = batch.kind
    index_count = (
        value_count
        if kind in (Kind.SPARSE, Kind.SPARSE_ADD)
        else 0
        if kind is not None
        else int(batch.index_bounds[-1])
    )
    if len(batch.indices) != index_count:
        _raise_bad_frame(
            f"{len(batch.indices)} indices for the {index_count} numbers of sparse rows: send one per number"
        )


def _check_entries(batch: Batch) -> None:
    for column in (Column.PARENTS, Column.TAGS, Column.EXPECTS):
        raw = batch.column(column)
        if raw is None or not len(raw):
            continue
        width = ENTRY_WIDTHS[column]
        words = np.frombuffer(raw, "<u4").reshape(-1, width // 4)
        if int(words[:, 0].max()) >= batch.count:
            _raise_bad_frame(f"column {column.name} names a row above {batch.count - 1}: count rows from 0")
        if column is Column.PARENTS:
            _check_parents(words[:, 0], words[:, 1])
        if column is Column.TAGS:
            name_count = len(batch._name_table(Column.TAG_NAMES))
            if int(words[:, 1].max()) >= name_count:
                _raise_bad_frame(
                    f"a row has a custom topic's index of {name_count} or more, with {name_count} names in "
                    "the table: count from 0"
                )
    counters = batch.counters
    if counters is not None:
        counter_list = counters.tolist()
        is_rising = all(a < b for a, b in pairwise((batch.previous, *counter_list)))
        if counter_list[0] != batch.base or not is_rising or counter_list[-1] > COUNTER_MAX:
            _raise_bad_frame(
                f"counters do not rise from the previous counter {batch.previous}: start at the base counter "
                f"{batch.base} and send rising counters up to {COUNTER_MAX}"
            )


def _check_parents(rows: NDArray[np.uint32], forms: NDArray[np.uint32]) -> None:
    if int(forms.max()) > POSITION_FORM:
        _raise_bad_frame(
            f"parent form {int(forms.max())} is unknown: send 0 (dot), 1 (id) or 2 (a dot's log position)"
        )
    positions = np.flatnonzero(forms == POSITION_FORM)
    if len(positions) and (
        positions[0] == 0
        or (forms[positions - 1] != 0).any()
        or (rows[positions - 1] != rows[positions]).any()
    ):
        _raise_bad_frame("a parent's log position does not follow its dot: send it right after the dot")


def _check_states(batch: Batch) -> None:
    present = batch.columns_mask
    if not batch.is_state:
        if present & _STATE_COLUMNS:
            _raise_bad_frame("columns of state rows in a batch of changes: leave them out")
        return
    if present & _REQUIRED_STATE_COLUMNS != _REQUIRED_STATE_COLUMNS or present & _CHANGE_ONLY_COLUMNS:
        _raise_bad_frame(f"columns {present:#x} are not those of state rows: send the columns of a snapshot")
    if batch.is_control or batch.kinds_mask & ~_STATE_KINDS:
        _raise_bad_frame(
            f"kinds {batch.kinds_mask:#x} in state rows: send create, opaque and delete rows only"
        )
    lamports, counters = (batch._array(c, U64) for c in (Column.STATE_LAMPORTS, Column.STATE_COUNTERS))
    for numbers in (lamports, counters, batch.row_offsets, batch.state_ignored):
        if numbers is not None and int(numbers.max()) > COUNTER_MAX:
            _raise_bad_frame(f"a number of a state row is above {COUNTER_MAX}: send a lower one")
    if counters is not None and int(counters.min()) < 1:
        _raise_bad_frame("the dot of a state row has counter 0: count from 1")


def _check_metadata(batch: Batch) -> None:
    if not batch.has_metadata:
        return
    # A change is bounded; the metadata of a state is the result of any number of changes.
    bytes_max = FRAME_PAYLOAD_BYTES_MAX if batch.is_state else METADATA_BYTES_MAX
    for row in range(batch.count):
        packed = batch.packed_metadata(row)
        if not packed:
            continue
        try:
            members = read_packed(packed, bytes_max)
        except ValueError as error:
            _raise_bad_frame(f"row {row}: the metadata change is not a msgpack map ({error}): send one map")
        if members is None and batch.unreadable_row is None:
            batch.unreadable_row = row


def _padded_length(length: int) -> int:
    return -(-length // ALIGNMENT) * ALIGNMENT


def _raise_bad_frame(message: str) -> NoReturn:
    raise ProtocolError(ErrorCode.BAD_FRAME, message)
