"""The errors of the project: one root class, and one class per remedy.

Facts are attributes; the message names the value, its bound and the fix.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from delta_prop_wire.spec import FINAL, RETRYABLE, ErrorCode


class DeltaPropError(Exception):
    """Root of all errors of the project."""


class Refused(DeltaPropError):
    """The refusal of a delta, batch or request.

    `code` is the reason; `retry_after_ms` the time to wait before a retry (None: something has to be changed
    first); `row` the first bad row of a batch; `field` its bad field; `details` further facts by name
    (`depth`, `capacity`, `missing`, `blocked_by`, `watermark`, `current`).
    """

    def __init__(
        self,
        code: ErrorCode,
        message: str,
        *,
        retry_after_ms: int | None = None,
        row: int | None = None,
        field: str | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(f"{code.name}: {message}")
        self.code = code
        self.message = message
        self.retry_after_ms = retry_after_ms
        self.row = row
        self.field = field
        self.details: dict[str, Any] = dict(details or {})

    @property
    def retryable(self) -> bool:
        """True if the same delta, under the same dot, may be accepted later."""
        return self.code in RETRYABLE

    @property
    def is_final(self) -> bool:
        """True if the refusal uses up the delta's dot."""
        return self.code in FINAL


class InvalidDelta(Refused):
    """The refusal of a delta that breaks a bound.

    `field` names the part, the message its value, bound and fix; `reason` is the message without row and
    field.
    """

    def __init__(self, field: str, message: str, *, row: int | None = None) -> None:
        row_prefix = "" if row is None else f"row {row}: "
        super().__init__(ErrorCode.INVALID_DELTA, f"{row_prefix}{field}: {message}", row=row, field=field)
        self.reason = message


class ProtocolError(DeltaPropError):
    """A breach of the protocol by the peer, whose connection ends. `code` is the reason."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(f"{code.name}: {message}")
        self.code = code
        self.message = message


class UsageError(DeltaPropError):
    """A wrong use of the library by the calling program; the message holds the fix."""
