"""The reasons for which a server closes connections, as texts. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from delta_prop_wire.errors import Refused
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from delta_prop.server.settings import ServerSettings


def log_recovered() -> Refused:
    """Return the reason after an in-place recovery of the log."""
    return Refused(
        ErrorCode.SHUTTING_DOWN,
        "the log was recovered after a disk failure, and may have lost rows: reconnect, and resend what was "
        "not acknowledged",
        retry_after_ms=50,
    )


def server_closing() -> Refused:
    """Return the reason when the server shuts down."""
    return Refused(
        ErrorCode.SHUTTING_DOWN,
        "the server is shutting down: reconnect, and resend what was not acknowledged",
        retry_after_ms=1_000,
    )


def connection_in_use() -> Refused:
    """Return the refusal of a part of a job on a connection that sends something else."""
    return Refused(
        ErrorCode.BAD_REQUEST,
        "this connection publishes or stages something else already: open another one for each part of a job",
    )


def silence_reason(for_s: float, settings: ServerSettings) -> str | None:
    """Return why a connection ends that received no frame for `for_s`; None if it goes on."""
    return f"no frame for {settings.peer_timeout_s} s" if for_s > settings.peer_timeout_s else None


def slowness_reason(for_s: float, received: int, settings: ServerSettings) -> str | None:
    """Return why a connection ends whose current frame takes `for_s` already; None if it goes on."""
    if for_s <= settings.peer_timeout_s or received >= for_s * settings.receive_rate_min:
        return None
    return f"a frame arrived at less than {settings.receive_rate_min} bytes per second for {for_s:.0f} s"
