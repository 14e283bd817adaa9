"""One root for everything the project raises on purpose; one class per remedy.

Facts are attributes, the message names the value, its bound and the cure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from delta_prop_wire.spec import RETRYABLE, VOIDING, ErrorCode

if TYPE_CHECKING:
    from collections.abc import Mapping


class DeltaPropError(Exception):
    """Root of all errors of the project."""


class Refused(DeltaPropError):
    """A delta, batch or request was refused.

    `code` says why, `retry_after_ms` when to try again (None: not before something is changed),
    `row` the first bad row of a batch, `field` what was wrong with it, `details` further facts
    (`depth`, `capacity`, `waits_for`, `held_by`, `watermark`, `present`), by name.
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
        """Whether the same delta, under the same dot, may be accepted later."""
        return self.code in RETRYABLE

    @property
    def voids(self) -> bool:
        """Whether the refusal uses up the delta's dot."""
        return self.code in VOIDING


class InvalidDelta(Refused):
    """A delta breaks a bound. `field` names the part, the message its value, bound and cure; `reason` is the
    message without row and field.
    """

    def __init__(self, field: str, message: str, *, row: int | None = None) -> None:
        where = "" if row is None else f"row {row}: "
        super().__init__(ErrorCode.INVALID_DELTA, f"{where}{field}: {message}", row=row, field=field)
        self.reason = message


class PeerError(DeltaPropError):
    """The peer sent bytes that break the protocol; its connection ends. `code` says how."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(f"{code.name}: {message}")
        self.code = code
        self.message = message


class UsageError(DeltaPropError):
    """The calling program used the library wrongly; the message holds the cure."""
