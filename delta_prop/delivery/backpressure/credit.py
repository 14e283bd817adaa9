"""Credit: bounds the deltas and bytes that are admitted and not yet applied by one sink. Pure.

The outstanding amount is counted in one of two ways: by `take` and `release`, or by setting it
(`set_outstanding`), which corrects any drift.
"""

from __future__ import annotations

from delta_prop_wire.errors import UsageError


class Credits:
    """A window of deltas and bytes. It is never exceeded, except by one larger batch alone."""

    __slots__ = ("bytes_max", "bytes_outstanding", "deltas_max", "deltas_outstanding")

    def __init__(self, deltas_max: int, bytes_max: int) -> None:
        if deltas_max < 1 or bytes_max < 1:
            raise UsageError(f"credits for {deltas_max} deltas, {bytes_max} bytes: give at least 1 of each")
        self.deltas_max = deltas_max
        self.bytes_max = bytes_max
        self.deltas_outstanding = 0
        self.bytes_outstanding = 0

    @property
    def available(self) -> tuple[int, int]:
        """Deltas and bytes that may still be admitted; never below 0."""
        deltas, size = self.deltas_max - self.deltas_outstanding, self.bytes_max - self.bytes_outstanding
        return max(deltas, 0), max(size, 0)

    @property
    def used_share(self) -> float:
        """Used share of the window, of deltas or bytes, whichever is larger.

        It is above 1 while a batch larger than the window is outstanding.
        """
        return max(self.deltas_outstanding / self.deltas_max, self.bytes_outstanding / self.bytes_max)

    def can_take(self, count: int, size: int) -> bool:
        """Return True if a batch may be admitted: it fits, or nothing is outstanding."""
        return (
            self.deltas_outstanding + count <= self.deltas_max
            and self.bytes_outstanding + size <= self.bytes_max
        ) or self.deltas_outstanding == self.bytes_outstanding == 0

    def take(self, count: int, size: int) -> None:
        """Spend the credit of an admitted batch. Raises UsageError if it does not fit."""
        if count < 0 or size < 0 or not self.can_take(count, size):
            deltas, size_left = self.available
            raise UsageError(
                f"{count} deltas of {size} bytes: only {deltas} deltas, {size_left} bytes are left: "
                "call can_take first"
            )
        self.deltas_outstanding += count
        self.bytes_outstanding += size

    def release(self, count: int, size: int) -> None:
        """Return the credit of applied or skipped deltas. Raises UsageError if more than is outstanding."""
        if not (0 <= count <= self.deltas_outstanding and 0 <= size <= self.bytes_outstanding):
            raise UsageError(
                f"{count} deltas of {size} bytes: only {self.deltas_outstanding} and "
                f"{self.bytes_outstanding} are outstanding: release what was taken"
            )
        self.deltas_outstanding -= count
        self.bytes_outstanding -= size

    def set_outstanding(self, deltas: int, size: int) -> None:
        """Set the outstanding amount, e.g. at a start or after a stop. It may exceed the window."""
        if deltas < 0 or size < 0:
            raise UsageError(f"{deltas} deltas of {size} bytes: give at least 0")
        self.deltas_outstanding = deltas
        self.bytes_outstanding = size
