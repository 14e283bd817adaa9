"""Why a server ends connections that did nothing wrong, in words. Pure."""

from __future__ import annotations

from delta_prop_wire.errors import Refused
from delta_prop_wire.spec import ErrorCode


def recovered() -> Refused:
    """The log was recovered in place."""
    return Refused(
        ErrorCode.SHUTTING_DOWN,
        "the log was recovered after a failure of its disk, and may have less than it had: connect again, "
        "and send again what was not acknowledged",
        retry_after_ms=50,
    )


def shutting_down() -> Refused:
    """The server ends."""
    return Refused(
        ErrorCode.SHUTTING_DOWN,
        "the server is ending: connect again, and send again what was not acknowledged",
        retry_after_ms=1_000,
    )
