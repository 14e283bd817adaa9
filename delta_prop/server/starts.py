"""Where a connection's cursor begins: what a Subscribe asks for, as an offset of this log.

Never skips what is missing: a place that the log does not have, any more or yet, is refused with what there
is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from delta_prop_broker.log.durable import DurableLog
from delta_prop_wire.cursor import Cursor
from delta_prop_wire.errors import Refused
from delta_prop_wire.frames import StartAt
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from delta_prop_broker.log.contract import Log
    from delta_prop_wire.frames import Start


def offset_of(start: Start, log: Log) -> int:
    """The offset that a start means, but for one of a group. Raises Refused (BAD_REQUEST, CURSOR_TOO_OLD),
    LogDamaged, OSError.
    """
    value = start.value
    if start.at is StartAt.EARLIEST:
        return log.first_offset
    if start.at is StartAt.LATEST:
        return log.visible
    if start.at is StartAt.CURSOR and isinstance(value, Cursor):
        return check_held(check_cursor(value, log), log)
    assert isinstance(value, int), "the frame's own form says so"
    if start.at is StartAt.TIME:
        return _offset_at(value, log)
    return check_place(value, log)


def check_cursor(cursor: Cursor, log: Log) -> int:
    """The offset of a cursor that this log can have given. Raises Refused (BAD_REQUEST)."""
    if cursor.log_id != log.log_id:
        raise Refused(
            ErrorCode.BAD_REQUEST,
            f"the cursor is of log {cursor.log_id.hex()}, this one is {log.log_id.hex()}: connect to the "
            "service that it is of, or start anew, at earliest or latest",
            details={"log_id": log.log_id.hex()},
        )
    end = log.epoch_end(cursor.epoch)  # behind it that epoch's tail was lost
    end = log.next_offset if end is None else end
    if cursor.epoch > log.epoch or cursor.next_offset > end:
        raise _ahead(f"the cursor is of epoch {cursor.epoch} up to offset {cursor.next_offset}", end)
    return cursor.next_offset


def check_place(offset: int, log: Log) -> int:
    """The same offset, if the log has it, or gives it next. Raises Refused (BAD_REQUEST, CURSOR_TOO_OLD)."""
    if offset > log.next_offset:
        raise _ahead(f"offset {offset} is asked for", log.next_offset)
    return check_held(offset, log)


def check_held(offset: int, log: Log) -> int:
    """The same offset, if the log still has what lies there. Raises Refused (CURSOR_TOO_OLD)."""
    if offset < log.first_offset:
        raise Refused(
            ErrorCode.CURSOR_TOO_OLD,
            f"offset {offset} is no longer in the log, which starts at {log.first_offset}: start at earliest "
            "to take what is left, or at latest",
            details={"offset": offset, "start_offset": log.first_offset},
        )
    return offset


def _offset_at(time_us: int, log: Log) -> int:
    if isinstance(log, DurableLog):
        return log.offset_at(time_us)
    raise Refused(
        ErrorCode.BAD_REQUEST,
        "a log in memory keeps no times: start at earliest, latest, an offset or a cursor",
    )


def _ahead(what: str, end: int) -> Refused:
    return Refused(
        ErrorCode.BAD_REQUEST,
        f"{what}, which is ahead: the log ends at offset {end}; what lay behind was lost with a failure of "
        "its disk, or never was: start at an offset up to there",
        details={"next_offset": end},
    )
