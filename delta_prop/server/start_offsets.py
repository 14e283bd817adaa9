"""Resolves the start of a subscription to an offset of this log.

Missing rows are never skipped: an offset that the log no longer has, or does not have yet, is refused with
the bounds of the log.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from delta_prop_wire.cursor import Cursor
from delta_prop_wire.errors import Refused
from delta_prop_wire.frames import Start, StartAt
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from delta_prop_broker.log.contract import Log


def resolve_start(start: Start, log: Log) -> int:
    """Return the offset of a start other than a group's.

    Raises Refused (BAD_REQUEST, CURSOR_TOO_OLD), LogCorrupted, OSError.
    """
    value = start.value
    if start.kind is StartAt.EARLIEST:
        return log.start_offset
    if start.kind is StartAt.LATEST:
        return log.high_watermark
    if start.kind is StartAt.CURSOR and isinstance(value, Cursor):
        return check_in_log(check_cursor(value, log), log)
    assert isinstance(value, int), "the frame's decoder has checked it"
    if start.kind is StartAt.TIME:
        return log.offset_at(value)
    return check_offset(value, log)


def check_cursor(cursor: Cursor, log: Log) -> int:
    """Return the offset of a cursor, if this log may have issued it. Raises Refused (BAD_REQUEST)."""
    if cursor.log_id != log.log_id:
        raise Refused(
            ErrorCode.BAD_REQUEST,
            f"the cursor is of log {cursor.log_id.hex()}; this log is {log.log_id.hex()}: connect to the "
            "service of that log, or start over, at earliest or latest",
            details={"log_id": log.log_id.hex()},
        )
    end = log.epoch_end(cursor.epoch)  # rows of the epoch from this offset on were lost
    end = log.next_offset if end is None else end
    if cursor.epoch > log.epoch or cursor.next_offset > end:
        raise _ahead_error(f"the cursor is of epoch {cursor.epoch} up to offset {cursor.next_offset}", end)
    return cursor.next_offset


def check_offset(offset: int, log: Log) -> int:
    """Return `offset`, if the log has it or assigns it next. Raises Refused (BAD_REQUEST, CURSOR_TOO_OLD)."""
    if offset > log.next_offset:
        raise _ahead_error(f"offset {offset}", log.next_offset)
    return check_in_log(offset, log)


def check_in_log(offset: int, log: Log) -> int:
    """Return `offset`, if the log still has its row. Raises Refused (CURSOR_TOO_OLD)."""
    if offset < log.start_offset:
        raise Refused(
            ErrorCode.CURSOR_TOO_OLD,
            f"offset {offset}: no longer in the log, which starts at {log.start_offset}: start at earliest "
            "to read the rest, or at latest",
            details={"offset": offset, "start_offset": log.start_offset},
        )
    return offset


def _ahead_error(position: str, end: int) -> Refused:
    return Refused(
        ErrorCode.BAD_REQUEST,
        f"{position}: ahead: the log ends at offset {end}; later rows were lost in a disk failure, or never "
        "existed: start at an offset up to there",
        details={"next_offset": end},
    )
