"""What people write: names, and places in a log (an offset, a time, its start or its end)."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from delta_prop.dates import EPOCH, EXAMPLES, US, check_past, shown_time, span_us, time_fault, time_of
from delta_prop_wire.bounds import check_name
from delta_prop_wire.errors import InvalidDelta, Refused, UsageError
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from delta_prop.client.subscriber import Place
    from delta_prop_broker.log.durable import DurableLog
    from delta_prop_broker.log.files.snapshot import Snapshot

_DIGITS_MAX = 20
"""Of the highest offset that there can be."""


class At(NamedTuple):
    """An offset, or a time in microseconds since 1970; neither: the start or the end of the log."""

    offset: int | None = None
    time_us: int | None = None
    earliest: bool = False


EARLIEST, LATEST = At(earliest=True), At()


def parse_at(option: str, text: str, now_us: int, *, ends: bool = True, future: bool = False) -> At:
    """Read what somebody wrote; `ends`: earliest and latest too; `future`: times to come too.

    Raises UsageError.
    """
    if ends and text in ("earliest", "latest"):
        return EARLIEST if text == "earliest" else LATEST
    if text.isascii() and text.isdigit() and len(text) <= _DIGITS_MAX:
        return At(offset=int(text))
    time_us = time_of(text, now_us)
    if time_us is None:
        names = "earliest, latest, " if ends else ""
        raise UsageError(f"{option} {text!r:.60}: {time_fault(text)}give {names}an offset, {EXAMPLES}")
    if not future:
        check_past(option, text, time_us, now_us)
    return At(time_us=time_us)


def name_fault(option: str, name: str, bytes_max: int) -> str | None:
    """What is wrong with a name, None where nothing is."""
    try:
        check_name(option, name, bytes_max)
    except InvalidDelta as error:
        return error.message
    return None


def offset_of(at: At, log: DurableLog) -> int:
    """The offset that is meant: of a time the first that was appended then or later."""
    if at.offset is not None:
        return at.offset
    if at.time_us is not None:
        return log.offset_at(at.time_us)
    return log.first_offset if at.earliest else log.visible


def reached_offset(at: At, log: DurableLog) -> int:
    """The offset that is meant, where the log has come so far. Raises UsageError."""
    offset = offset_of(at, log)
    check_reached(offset, log)
    return offset


def check_reached(offset: int, log: DurableLog) -> None:
    """Refuse an offset behind the end of the log. Raises UsageError."""
    if offset > log.visible:
        raise UsageError(f"--start {offset}: the log ends at offset {log.visible}: give that, or latest")


def place_of(at: At) -> Place:
    """Where that is, as a subscriber says it."""
    if at.time_us is not None:
        return EPOCH + at.time_us * US
    if at.offset is not None:
        return at.offset
    return "earliest" if at.earliest else "latest"


def parse_span_s(option: str, text: str) -> float:
    """How long somebody wants: 90s, 10m, 2h, 1d. Raises UsageError."""
    found_us = span_us(text)
    if found_us is None:
        raise UsageError(f"{option} {text!r:.60}: give a time like 90s, 10m, 2h or 1d")
    return found_us / 1_000_000


def printable(text: str) -> str:
    """What others wrote in one line: it cannot pretend to be another one, nor steer a terminal."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def check_within(at: At, snapshot: Snapshot) -> None:
    """Raise Refused (CURSOR_TOO_OLD) for a place before the snapshot: what the log held there has gone."""
    early = at.offset is not None and at.offset + 1 < snapshot.offset
    if early or (at.time_us is not None and at.time_us < snapshot.time_us):
        raise Refused(
            ErrorCode.CURSOR_TOO_OLD,
            f"deltas are kept one by one from offset {snapshot.offset} ({shown_time(snapshot.time_us)}) on, "
            "before that only what they came to: give that place or a later one",
            details={"start_offset": snapshot.offset},
        )
