"""Control rows, which a log stores besides deltas. The first byte of a row's blob is its type.

The only module that knows the bytes of those blobs. This version writes and uses only rows of type REFUSED.
It skips the other types, so that a log that holds them stays readable.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import numpy as np

from delta_prop_wire.errors import ProtocolError
from delta_prop_wire.layout import Column
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from delta_prop_wire.batch import Batch


class ControlType(IntEnum):
    """The type of a control row; COMMIT and ABORT are reserved."""

    REFUSED = 0
    LEADER_START = 1
    HELLO = 2
    MEMBERSHIP = 3
    LOG_START = 4
    COMMIT = 5
    ABORT = 6


LOG_TYPES = frozenset(
    (ControlType.LEADER_START, ControlType.HELLO, ControlType.MEMBERSHIP, ControlType.LOG_START)
)
"""Types of rows that a log writes on its own: they have origin 0 and no dot."""

_CODE = struct.Struct("<BH")
_CRC = struct.Struct("<BHI")
_FIRST_OFFSET = struct.Struct("<BHIQ")
"""The longest form of a REFUSED row: type, code, refused body's checksum, first copy's offset."""
_SIZES = (_CODE.size, _CRC.size, _FIRST_OFFSET.size)
_NO_FIRST_OFFSET = (1 << 64) - 1
_CODES = frozenset(map(int, ErrorCode))


class NoOp(NamedTuple):
    """The no-op record of refused dots: the code, the refused body's checksum (None: unknown).

    `first_offsets`: if ids were duplicates, maps each row to the offset of its id's first copy, or to None if
    that offset is unknown; else None.
    """

    code: ErrorCode
    crc: int | None
    first_offsets: dict[int, int | None] | None


def control_type(batch: Batch) -> ControlType | None:
    """Return the type of a control batch's rows; None for one that this version does not know."""
    number = int.from_bytes(batch.blob(0)[:1] or b"\xff", "little")
    return ControlType(number) if number <= max(ControlType) else None


def uses_dots(batch: Batch) -> bool:
    """True if the rows use up dots of their origin, as deltas and REFUSED rows do."""
    return not batch.is_control or control_type(batch) is ControlType.REFUSED


def pack_refused(
    count: int, code: int, refused_crc: int | None = None, first_offsets: Sequence[int | None] | None = None
) -> list[bytes]:
    """Pack rows of type REFUSED; `first_offsets` requires `refused_crc`."""
    if refused_crc is None:
        assert first_offsets is None
        return [_CODE.pack(ControlType.REFUSED, code)] * count
    if first_offsets is None:
        return [_CRC.pack(ControlType.REFUSED, code, refused_crc)] * count
    assert len(first_offsets) == count
    offsets = (_NO_FIRST_OFFSET if offset is None else offset for offset in first_offsets)
    return [_FIRST_OFFSET.pack(ControlType.REFUSED, code, refused_crc, offset) for offset in offsets]


def read_noop(batch: Batch) -> NoOp:
    """Read a batch of type REFUSED; fields that a shorter form of its rows lacks are None."""
    blobs = [batch.blob(row) for row in range(batch.count)]
    number = refused_code(batch, 0)
    # Another service's no-op record may have a code of a later version; its dots are used up as well.
    code = ErrorCode(number) if number in _CODES else ErrorCode.INVALID_DELTA
    if len(blobs[0]) < _CRC.size:
        return NoOp(code, None, None)
    *_, crc = _CRC.unpack_from(blobs[0])
    if any(len(blob) < _FIRST_OFFSET.size for blob in blobs):
        return NoOp(code, crc, None)
    first_offsets = dict[int, int | None]()
    for row, blob in enumerate(blobs):
        *_, offset = _FIRST_OFFSET.unpack_from(blob)
        first_offsets[row] = None if offset == _NO_FIRST_OFFSET else offset
    return NoOp(code, crc, first_offsets)


def refused_code(batch: Batch, row: int) -> int:
    """Return the number of the error code in one row of type REFUSED."""
    raw = batch.blob(row)
    return int(_CODE.unpack_from(raw)[1]) if len(raw) >= _CODE.size else 0


def add_type(blob: bytes) -> bytes:
    """Put the type before the blob of a control row of format 1 of the data directory, which has no types."""
    size = max((size for size in _SIZES if size <= 1 + len(blob)), default=_CODE.size)
    return (bytes((ControlType.REFUSED,)) + blob).ljust(_CODE.size, b"\0")[:size]


def check_control_rows(batch: Batch) -> None:
    """Check the rows of a peer's control batch, after its columns. Raises ProtocolError."""
    raw, bounds = batch.column(Column.BLOBS), batch.blob_bounds
    sizes = np.diff(bounds)
    if raw is None or int(sizes.min()) < 1:
        _raise_bad_frame("a control row without a type: start its blob with one")
    types = np.frombuffer(raw, np.uint8)[bounds[:-1]]
    number = int(types[0])
    if (types != number).any():
        _raise_bad_frame(
            f"control rows of type {number} and of another type in one batch: send one type per batch"
        )
    if number > max(ControlType):
        _raise_bad_frame(f"control rows of type {number}: send a type from 0 to {max(ControlType):d}")
    if number == ControlType.REFUSED and not np.isin(sizes, _SIZES).all():
        _raise_bad_frame(
            f"a control row of a refused delta has a wrong size: "
            f"send {_SIZES[0]}, {_SIZES[1]} or {_SIZES[2]} bytes"
        )
    if number in LOG_TYPES and batch.origin:
        _raise_bad_frame(
            f"control rows of type {number} under origin {batch.origin:016x}: send them under origin 0"
        )


def _raise_bad_frame(message: str) -> NoReturn:
    raise ProtocolError(ErrorCode.BAD_FRAME, message)
