"""Whether the service that answers is the one that was talked to before, and grants what is asked.

Pure. Services are told apart by the ids of their logs, never by their addresses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from delta_prop_wire.cursor import LOG_ID_BYTES
from delta_prop_wire.delta import AckLevel
from delta_prop_wire.errors import Refused, UsageError
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from delta_prop_wire.frames import Welcome


class OtherLog(UsageError):
    """A service has another log than its place is for."""

    def __init__(self, message: str, log_id: bytes) -> None:
        super().__init__(message)
        self.log_id = log_id


class KnownService:
    """The log that a client talks to. `wanted`: the only one that it may be."""

    def __init__(self, wanted: bytes | None = None) -> None:
        self.log_id: bytes | None = None
        self._wanted = None if wanted is None else check_log_id(wanted)

    def check(self, welcome: Welcome, *, may_begin_anew: bool = False) -> None:
        """Raise UsageError where this is another log than before. `may_begin_anew`: one in memory may be."""
        log = welcome.log
        if log is None:
            return
        if self._wanted is not None and self._wanted != log.log_id:
            raise OtherLog(
                f"the log here is {log.log_id.hex()}, and this place is that of log {self._wanted.hex()}: "
                "give each service the place that it had",
                log.log_id,
            )
        before = self.log_id
        new = before not in (None, log.log_id)
        if new and before is not None and not (may_begin_anew and welcome.level is AckLevel.MEMORY):
            raise UsageError(
                f"the log here is {log.log_id.hex()}, that of the service connected to before is "
                f"{before.hex()}: one client cannot go on in another log; give addresses of one service, or "
                "open another client"
            )
        self.log_id = log.log_id


def check_log_id(log_id: bytes) -> bytes:
    """The id of a log. Raises UsageError."""
    if not isinstance(log_id, bytes) or len(log_id) != LOG_ID_BYTES:
        raise UsageError(f"log id {log_id!r:.60}: give {LOG_ID_BYTES} bytes")
    return log_id


def granted_level(asked: AckLevel | None, most: AckLevel | None) -> AckLevel:
    """The ack level to write under. Raises Refused (LEVEL_UNAVAILABLE) where the service grants less."""
    if asked is None:
        return AckLevel.MEMORY if most is None else most
    if most is not None and asked > most:
        raise Refused(
            ErrorCode.LEVEL_UNAVAILABLE,
            f"ack level {asked.name.lower()} is asked for, this service grants {most.name.lower()} at most: "
            "ask for that, or have its log kept on disk",
        )
    return asked
