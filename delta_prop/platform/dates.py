"""Formats times for people, and parses those that they write. Pure: the current time is an argument."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

from delta_prop_wire.errors import UsageError

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
US = timedelta(microseconds=1)
UNITS_S = {"s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800}
TIME_EXAMPLES = (
    "a time like 2026-01-31T12:00:00Z, today or yesterday, or how long ago, like 90s, 10m, 1h or 2d"
)
"""Fix in the error for a text that is not a time."""
CLOCK_SKEW_S = 60
"""Seconds by which the clock of a service may be ahead of this one."""

TIME_US_MAX = (datetime(9999, 12, 31, tzinfo=UTC) - EPOCH) // US
"""Last time that can be formatted."""
_TIME_US_MIN = (datetime(1, 1, 2, tzinfo=UTC) - EPOCH) // US

_SPAN = re.compile(r"([0-9]{1,10}(?:\.[0-9]{1,6})?)([smhdw])( ago)?")
_LONG_SPAN = re.compile(r"[0-9]+(?:\.[0-9]*)?[smhdw](?: ago)?")
_DAY_US = 86_400 * 1_000_000


def format_time(time_us: int) -> str:
    """Return a time, given in microseconds since 1970, as text in UTC, to the millisecond."""
    return (EPOCH + time_us * US).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def parse_span_us(text: str) -> int | None:
    """Convert `90s`, `10m`, `1.5h`, `2d` or `1w` to microseconds; None if it is not a span."""
    match = _SPAN.fullmatch(text)
    if match is None or match[3]:
        return None
    return round(float(match[1]) * UNITS_S[match[2]] * 1_000_000)


def parse_time(text: str, now_us: int) -> int | None:
    """Return the time that a text means, in microseconds since 1970; None if it is not a time.

    A span means that long ago, days begin at midnight UTC, and a time without a zone is in UTC.
    """
    today_us = now_us - now_us % _DAY_US
    words = {"now": now_us, "today": today_us, "yesterday": today_us - _DAY_US}
    if text in words:
        return words[text]
    ago_us = parse_span_us(text.removesuffix(" ago"))
    if ago_us is not None:
        time_us = now_us - ago_us
        return time_us if time_us >= _TIME_US_MIN else None
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        return None
    return ((time if time.tzinfo is not None else time.replace(tzinfo=UTC)) - EPOCH) // US


def explain_bad_time(text: str) -> str:
    """Return, for an error message, why a text that resembles a time is not one; else ""."""
    if _LONG_SPAN.fullmatch(text):
        return "is too long, or too precise (10 digits, 6 of a fraction): "
    try:
        datetime.fromisoformat(text)
    except ValueError as error:
        why = str(error)  # "month must be in 1..12", or only "Invalid isoformat string"
        return "" if why.startswith("Invalid isoformat") else f"is not a time, {why}: "
    return ""


def check_past(option: str, text: object, time_us: int, now_us: int) -> None:
    """Raise UsageError for a time at which nothing can have happened yet."""
    if time_us > now_us + CLOCK_SKEW_S * 1_000_000:
        raise UsageError(
            f"{option} {text!r:.60}: lies in the future (now is {format_time(now_us)}): give an earlier "
            "time, or latest"
        )
