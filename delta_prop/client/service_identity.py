"""Checks that a service has the same log as before, and that it grants the requested ack level.

Pure. Services are identified by the ids of their logs, never by their addresses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias

from delta_prop_wire.bounds import check_ack_level
from delta_prop_wire.cursor import LOG_ID_BYTES
from delta_prop_wire.delta import AckLevel
from delta_prop_wire.errors import Refused, UsageError
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from delta_prop_wire.frames import Welcome


class LogMismatch(UsageError):
    """The service has another log than the expected one."""

    def __init__(self, message: str, log_id: bytes) -> None:
        super().__init__(message)
        self.log_id = log_id


HIGHEST: Literal["highest"] = "highest"
RequestedLevel: TypeAlias = AckLevel | Literal["highest"] | None


class ServiceIdentity:
    """The log that a client's service has, and the ack level that it grants."""

    def __init__(self, expected: bytes | None = None, requested_level: RequestedLevel = None) -> None:
        """`expected`: the id of the only log accepted; None: any. `requested_level`: None: the default."""
        self.log_id: bytes | None = None
        self.level = requested_level if isinstance(requested_level, AckLevel) else AckLevel.MEMORY
        """The ack level to write with."""
        self._requested_level = requested_level
        self._expected = None if expected is None else check_log_id(expected)

    def grant_level(self, welcome: Welcome) -> None:
        """Note the level that is granted. Raises Refused (LEVEL_UNAVAILABLE) if it is too low."""
        requested = welcome.default_level if self._requested_level is None else self._requested_level
        self.level = granted_level(requested, welcome.level)

    def check(self, welcome: Welcome, *, may_change_log: bool = False) -> None:
        """Raise UsageError if this is another log. `may_change_log`: accept another log that is in memory."""
        log = welcome.log
        if log is None:
            return
        if self._expected is not None and self._expected != log.log_id:
            raise LogMismatch(
                f"log {log.log_id.hex()}: log {self._expected.hex()} is expected here: give the addresses of "
                "its service, and its stream and partition",
                log.log_id,
            )
        previous_id = self.log_id
        is_changed = previous_id not in (None, log.log_id)
        may_change = may_change_log and welcome.level is AckLevel.MEMORY
        if is_changed and previous_id is not None and not may_change:
            raise UsageError(
                f"log {log.log_id.hex()}: the service connected to before has log {previous_id.hex()}, and "
                "one client cannot go on in another log: give addresses of one service, or open another "
                "client"
            )
        self.log_id = log.log_id


def check_log_id(log_id: bytes) -> bytes:
    """Return the id of a log. Raises UsageError."""
    if not isinstance(log_id, bytes) or len(log_id) != LOG_ID_BYTES:
        raise UsageError(f"log id {log_id!r:.60}: give {LOG_ID_BYTES} bytes")
    return log_id


def check_requested_level(level: AckLevel | str | None) -> RequestedLevel:
    """Return what a client requests: a level, by its name too; `highest`; None. Raises UsageError."""
    if level is None:
        return None
    return HIGHEST if level == HIGHEST else check_ack_level(level)


def granted_level(requested: RequestedLevel, available: AckLevel | None) -> AckLevel:
    """Return the ack level to write with. Raises Refused (LEVEL_UNAVAILABLE) if the service grants less."""
    if requested is None or requested == HIGHEST:
        return AckLevel.MEMORY if available is None else available
    if available is not None and requested > available:
        raise Refused(
            ErrorCode.LEVEL_UNAVAILABLE,
            f"ack level {requested.name.lower()}: this service grants up to {available.name.lower()}: "
            "request that, or keep its log on disk",
        )
    return requested
