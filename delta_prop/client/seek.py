"""A change of the position that a subscriber reads at, from the reader's call until it is there.

Pure. Without a group, the client subscribes at the position on a new connection. A group always starts at its
cursor, so there the client first finds the offset. If the reader has not got there yet, the client drops the
rows below it. Otherwise the client moves the group's cursor back, and then subscribes on a new connection.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

from delta_prop.client.queries import Query
from delta_prop_wire.cursor import Cursor
from delta_prop_wire.errors import Refused
from delta_prop_wire.frames import FindOffsets, FoundOffsets, Start, StartAt
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from delta_prop_wire.stamp import LogName


class SeekStage(Enum):
    """The next step of a seek. In all but the first, rows that arrive are ignored."""

    FIND = auto()
    """The service finds the offset; only for a group. Rows that arrive may be those sought."""
    MOVE_BACK = auto()
    """The group's cursor is moved back next."""
    CONFIRM = auto()
    """The service confirms by an answer that it has moved the cursor: it handles frames in order."""
    RECONNECT = auto()
    """Another connection is needed."""
    SUBSCRIBE = auto()
    """The next answer to the first subscription says where the reader is."""


@dataclass(slots=True)
class Seek:
    """A seek that is not done. `query`: asks the service; `target`: the offset in a group, once known.

    `has_gap`: True if rows were ignored for a former seek, so that this one needs another connection.
    """

    start: Start
    stage: SeekStage
    query: Query | None = None
    target: int | None = None
    has_gap: bool = False

    def on_disconnect(self) -> None:
        """Note that the next connection subscribes at the position, or at the group's cursor."""
        if self.stage is not SeekStage.FIND:
            self.stage = SeekStage.SUBSCRIBE


def bounds_query(start: Start, log: LogName) -> Query:
    """Return the query for the bounds of the log, and for the offset of a time."""
    times = (start,) if start.kind is StartAt.TIME else ()
    return Query(FindOffsets((Start(StartAt.EARLIEST), Start(StartAt.LATEST), *times), *log))


def target_of(start: Start, found: FoundOffsets) -> int:
    """Return the offset of a position in a log with these bounds. Raises Refused if the log does not have it.

    The group's cursor must not move out of the log: no member could read then.
    """
    earliest, latest, *times = found.offsets
    match start.kind, start.value:
        case StartAt.EARLIEST, _:
            return earliest
        case StartAt.LATEST, _:
            return latest
        case StartAt.TIME, _:
            return times[0]
        case _, Cursor() as cursor:
            offset = cursor.next_offset
        case _, value:
            assert isinstance(value, int), "the caller has checked it"
            offset = value
    if offset < earliest:
        raise Refused(
            ErrorCode.CURSOR_TOO_OLD,
            f"offset {offset}: no longer in the log, which starts at {earliest}: seek to earliest",
        )
    if offset > latest:
        raise Refused(
            ErrorCode.BAD_REQUEST,
            f"offset {offset}: ahead: the log ends at offset {latest}: seek up to there",
        )
    return offset
