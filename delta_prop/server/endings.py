"""Why a server ends connections, in words. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from delta_prop_wire.errors import Refused
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from delta_prop.server.settings import ServerSettings


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


def one_way() -> Refused:
    """A part of a job is to be staged where something else is sent."""
    return Refused(
        ErrorCode.BAD_REQUEST,
        "this connection publishes or stages something else already: open another one for each part of a job",
    )


def silent(for_s: float, settings: ServerSettings) -> str | None:
    """Return why a connection ends on which no frame has come for so long; None where it goes on."""
    return f"not a frame for {settings.silence_s_max} s" if for_s > settings.silence_s_max else None


def too_slow(for_s: float, came: int, settings: ServerSettings) -> str | None:
    """Return why a connection ends on which a frame has been coming for so long; None where it goes on."""
    if for_s <= settings.silence_s_max or came >= for_s * settings.receive_rate_min:
        return None
    return f"a frame came at less than {settings.receive_rate_min} bytes a second for {for_s:.0f} s"
