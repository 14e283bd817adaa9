"""Times as people read them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
US = timedelta(microseconds=1)


def shown_time(time_us: int) -> str:
    """Return a time, given in microseconds since 1970, as text in UTC, to the millisecond."""
    return (EPOCH + time_us * US).isoformat(timespec="milliseconds").replace("+00:00", "Z")
