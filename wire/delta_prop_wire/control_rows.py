"""Control rows: what a log keeps beside deltas. The first byte of a row's blob is its type.

The only module that knows the bytes of those blobs. This version writes rows of type `REFUSED` and acts on
them alone; it passes over the others, so that a log that holds them stays readable.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import numpy as np

from delta_prop_wire.errors import PeerError
from delta_prop_wire.layout import Column
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from collections.abc import Sequence

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


OF_THE_LOG = frozenset(
    (ControlType.LEADER_START, ControlType.HELLO, ControlType.MEMBERSHIP, ControlType.LOG_START)
)
"""Types that a log writes for itself: they have origin 0 and no dot."""

_CODE = struct.Struct("<BH")
_CRC = struct.Struct("<BHI")
_FIRST = struct.Struct("<BHIQ")
"""The three sizes of a row of type REFUSED: type, code; checksum of the body that was sent; first copy."""
_SIZES = (_CODE.size, _CRC.size, _FIRST.size)
_NO_FIRST = (1 << 64) - 1
_CODES = frozenset(map(int, ErrorCode))


class Void(NamedTuple):
    """Why dots are void: the code, the refused body's checksum; `firsts` of rows whose ids are repeats."""

    code: ErrorCode
    crc: int | None
    firsts: dict[int, int | None] | None


def control_type(batch: Batch) -> ControlType | None:
    """Return the type of a control batch's rows; None for one that this version does not know."""
    number = int.from_bytes(batch.blob(0)[:1] or b"\xff", "little")
    return ControlType(number) if number <= max(ControlType) else None


def uses_dots(batch: Batch) -> bool:
    """True if the rows use up dots of their origin: deltas do, and control rows of refused ones."""
    return not batch.is_control or control_type(batch) is ControlType.REFUSED


def pack_refused(
    count: int, code: int, refused_crc: int | None = None, firsts: Sequence[int | None] | None = None
) -> list[bytes]:
    """Pack rows of type REFUSED; those with `firsts` have a checksum too."""
    if refused_crc is None:
        assert firsts is None
        return [_CODE.pack(ControlType.REFUSED, code)] * count
    if firsts is None:
        return [_CRC.pack(ControlType.REFUSED, code, refused_crc)] * count
    assert len(firsts) == count
    places = (_NO_FIRST if at is None else at for at in firsts)
    return [_FIRST.pack(ControlType.REFUSED, code, refused_crc, place) for place in places]


def read_void(batch: Batch) -> Void:
    """Read a batch of type REFUSED; of one that says less than is known today, what it says."""
    rows = [batch.blob(row) for row in range(batch.count)]
    number = refused_code(batch, 0)
    # Another service's void may name a code of a later version: it is void all the same.
    code = ErrorCode(number) if number in _CODES else ErrorCode.INVALID_DELTA
    if len(rows[0]) < _CRC.size:
        return Void(code, None, None)
    *_, crc = _CRC.unpack_from(rows[0])
    if any(len(row) < _FIRST.size for row in rows):
        return Void(code, crc, None)
    firsts = dict[int, int | None]()
    for number, row in enumerate(rows):
        *_, at = _FIRST.unpack_from(row)
        firsts[number] = None if at == _NO_FIRST else at
    return Void(code, crc, firsts)


def refused_code(batch: Batch, row: int) -> int:
    """Return the number of the error code in one row of type REFUSED."""
    raw = batch.blob(row)
    return int(_CODE.unpack_from(raw)[1]) if len(raw) >= _CODE.size else 0


def add_type(row: bytes) -> bytes:
    """Return the blob of a control row without a type, as format 1 of the data directory has it, with one."""
    size = max((size for size in _SIZES if size <= 1 + len(row)), default=_CODE.size)
    return (bytes((ControlType.REFUSED,)) + row).ljust(_CODE.size, b"\0")[:size]


def check_control_rows(batch: Batch) -> None:
    """Check the rows of a foreign control batch, whose columns are sound. Raises PeerError."""
    raw, bounds = batch.column(Column.BLOBS), batch.blob_bounds
    sizes = np.diff(bounds)
    if raw is None or int(sizes.min()) < 1:
        _bad("a control row without a type")
    types = np.frombuffer(raw, np.uint8)[bounds[:-1]]
    number = int(types[0])
    if (types != number).any():
        _bad(f"control rows of type {number} and of another one in one batch; each batch has one type")
    if number > max(ControlType):
        _bad(f"control rows of type {number}; known are 0 to {max(ControlType):d}")
    if number == ControlType.REFUSED and not np.isin(sizes, _SIZES).all():
        _bad(f"a control row of a refused delta of other than {_SIZES[0]}, {_SIZES[1]} or {_SIZES[2]} bytes")
    if number in OF_THE_LOG and batch.origin:
        _bad(f"control rows of type {number} under origin {batch.origin:016x}; they have origin 0")


def _bad(message: str) -> NoReturn:
    raise PeerError(ErrorCode.BAD_FRAME, message)
