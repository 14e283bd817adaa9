"""Parses log positions as people write them (an offset, a time, earliest or latest), and checks names."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from delta_prop.platform.dates import (
    EPOCH,
    TIME_EXAMPLES,
    US,
    check_past,
    explain_bad_time,
    format_time,
    parse_span_us,
    parse_time,
)
from delta_prop_wire.bounds import check_name
from delta_prop_wire.errors import InvalidDelta, Refused, UsageError
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from delta_prop.client.positions import StartPosition
    from delta_prop_broker.log.durable import DurableLog
    from delta_prop_broker.retention.snapshot import Snapshot

_DIGITS_MAX = 20
"""Digits of the highest possible offset."""


class LogPosition(NamedTuple):
    """An offset, or a time in microseconds since 1970. If it has neither, it is the start of the log if
    `earliest`, else the end.
    """

    offset: int | None = None
    time_us: int | None = None
    earliest: bool = False


EARLIEST, LATEST = LogPosition(earliest=True), LogPosition()


def parse_position(
    option: str, text: str, now_us: int, *, allow_ends: bool = True, allow_future: bool = False
) -> LogPosition:
    """Parse a position. `allow_ends`: accept earliest and latest; `allow_future`: accept future times.

    Raises UsageError.
    """
    if allow_ends and text in ("earliest", "latest"):
        return EARLIEST if text == "earliest" else LATEST
    if text.isascii() and text.isdigit() and len(text) <= _DIGITS_MAX:
        return LogPosition(offset=int(text))
    time_us = parse_time(text, now_us)
    if time_us is None:
        names = "earliest, latest, " if allow_ends else ""
        raise UsageError(
            f"{option} {text!r:.60}: {explain_bad_time(text)}give {names}an offset, {TIME_EXAMPLES}"
        )
    if not allow_future:
        check_past(option, text, time_us, now_us)
    return LogPosition(time_us=time_us)


def check_name_argument(option: str, name: str, bytes_max: int) -> None:
    """Check a name that an option gives. Raises UsageError."""
    try:
        check_name(option, name, bytes_max)
    except InvalidDelta as error:
        raise UsageError(error.message) from None


def offset_of(position: LogPosition, log: DurableLog) -> int:
    """Return the offset of a position; for a time, the offset of the first row appended then or later."""
    if position.offset is not None:
        return position.offset
    if position.time_us is not None:
        return log.offset_at(position.time_us)
    return log.start_offset if position.earliest else log.high_watermark


def reached_offset(position: LogPosition, log: DurableLog) -> int:
    """Return the offset of a position that the log has reached. Raises UsageError."""
    offset = offset_of(position, log)
    check_reached(offset, log)
    return offset


def offset_to_reset_to(to: str, log: DurableLog, now_us: int) -> int:
    """Return the offset that `--to` means now, so that a request means the same if it is carried out later.

    Raises UsageError if the log does not have it.
    """
    offset = offset_of(parse_position("--to", to, now_us), log)
    start, end = log.start_offset, log.high_watermark
    if not start <= offset <= end:
        raise UsageError(f"--to {to:.40}: give earliest, latest, a time or an offset from {start} to {end}")
    return offset


def check_reached(offset: int, log: DurableLog) -> None:
    """Refuse an offset after the end of the log. Raises UsageError."""
    if offset > log.high_watermark:
        raise UsageError(
            f"--start {offset}: the log ends at offset {log.high_watermark}: give that, or latest"
        )


def check_start_of_all(position: LogPosition | None, stream: str, partitions: int) -> None:
    """Refuse an offset for several partitions, each of which has its own. Raises UsageError."""
    if position is not None and position.offset is not None:
        raise UsageError(
            f"--start {position.offset}: stream {stream!r} has {partitions} partitions, each with its own "
            "offsets: name one with --partition, or give earliest, latest or a time"
        )


def subscribe_start_of(position: LogPosition) -> StartPosition:
    """Return the position as a subscriber's start."""
    if position.time_us is not None:
        return EPOCH + position.time_us * US
    if position.offset is not None:
        return position.offset
    return "earliest" if position.earliest else "latest"


def parse_span_s(option: str, text: str) -> float:
    """Parse a span like 90s, 10m, 2h, 1d into seconds. Raises UsageError."""
    span_us = parse_span_us(text)
    if span_us is None:
        raise UsageError(f"{option} {text!r:.60}: give a time like 90s, 10m, 2h or 1d")
    return span_us / 1_000_000


def escape_unprintable(text: str) -> str:
    """Escape text from outside, so that it stays on one line and cannot control a terminal."""
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)


def check_not_before(position: LogPosition, snapshot: Snapshot) -> None:
    """Raise Refused (CURSOR_TOO_OLD) for a position before the snapshot, where the log has no rows."""
    is_early = position.offset is not None and position.offset + 1 < snapshot.offset
    if is_early or (position.time_us is not None and position.time_us < snapshot.time_us):
        raise Refused(
            ErrorCode.CURSOR_TOO_OLD,
            f"the log holds uncompacted deltas from offset {snapshot.offset} "
            f"({format_time(snapshot.time_us)}) on, and only a snapshot of the earlier ones: give that "
            "position or a later one",
            details={"start_offset": snapshot.offset},
        )
