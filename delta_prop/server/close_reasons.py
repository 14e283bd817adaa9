"""The reasons for which a server closes or refuses a connection, as refusals and texts. Pure."""

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


def silence_reason(silent_s: float, settings: ServerSettings) -> str | None:
    """Return the reason to close a connection after `silent_s` without a frame; None if it stays open."""
    return f"no frame for {settings.peer_timeout_s} s" if silent_s > settings.peer_timeout_s else None


def slowness_reason(receiving_s: float, received_bytes: int, settings: ServerSettings) -> str | None:
    """Return the reason to close a connection whose frame arrives too slowly; None if it stays open.

    `received_bytes`: how much of the incomplete frame has arrived in `receiving_s`.
    """
    if receiving_s <= settings.peer_timeout_s or received_bytes >= receiving_s * settings.receive_rate_min:
        return None
    return (
        f"a frame arrived at less than {settings.receive_rate_min} bytes per second for {receiving_s:.0f} s"
    )
