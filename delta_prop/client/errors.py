"""Errors of a client itself: no service can be reached, or a connection must be replaced.

Every other error that a client raises is the service's own refusal, or UsageError.
"""

from __future__ import annotations

from delta_prop_wire.errors import Refused
from delta_prop_wire.spec import ErrorCode


class Unreachable(Refused):
    """No address answered in time. Nothing was refused: start the service, or correct the addresses."""

    def __init__(self, message: str) -> None:
        super().__init__(ErrorCode.SHUTTING_DOWN, message, retry_after_ms=1000)
        self.args = (message,)


class Reconnect(Exception):
    """The connection is unusable: open another one, not before `after_s`. Callers never see this error.

    `is_requested`: the client itself wants another connection; nothing has failed.
    """

    def __init__(
        self, after_s: float = 0.0, cause: Refused | None = None, *, is_requested: bool = False
    ) -> None:
        super().__init__()
        self.after_s = after_s
        self.cause = cause
        self.is_requested = is_requested
