"""Credit: how many deltas and bytes one sink may hold that are admitted and not yet applied. Pure.

The amount out is counted in one of two ways: by `take` and `release`, or by setting it (`set_out`), which
corrects every difference.
"""

from __future__ import annotations

from delta_prop_wire.errors import UsageError


class Credits:
    """A window of deltas and bytes. Nothing is admitted beyond it, but for one larger batch by itself."""

    __slots__ = ("bytes_max", "bytes_out", "deltas_max", "deltas_out")

    def __init__(self, deltas_max: int, bytes_max: int) -> None:
        if deltas_max < 1 or bytes_max < 1:
            raise UsageError(f"credits for {deltas_max} deltas, {bytes_max} bytes: give at least 1 of each")
        self.deltas_max = deltas_max
        self.bytes_max = bytes_max
        self.deltas_out = 0
        self.bytes_out = 0

    @property
    def available(self) -> tuple[int, int]:
        """Deltas and bytes that may still be admitted; never below 0."""
        return max(self.deltas_max - self.deltas_out, 0), max(self.bytes_max - self.bytes_out, 0)

    @property
    def used_share(self) -> float:
        """Share of the window that is out, the larger of the two; above 1 with a larger batch."""
        return max(self.deltas_out / self.deltas_max, self.bytes_out / self.bytes_max)

    def can_take(self, count: int, size: int) -> bool:
        """True if a batch may be admitted. One larger than the window may if nothing else is out."""
        return (
            self.deltas_out + count <= self.deltas_max and self.bytes_out + size <= self.bytes_max
        ) or self.deltas_out == self.bytes_out == 0

    def take(self, count: int, size: int) -> None:
        """Spend the credit of an admitted batch. Raises UsageError if it does not fit."""
        if count < 0 or size < 0 or not self.can_take(count, size):
            deltas, size_left = self.available
            raise UsageError(
                f"{count} deltas of {size} bytes: only {deltas} deltas, {size_left} bytes are left: "
                "call can_take first"
            )
        self.deltas_out += count
        self.bytes_out += size

    def release(self, count: int, size: int) -> None:
        """Return the credit of deltas that were applied or skipped. Raises UsageError beyond what is out."""
        if not (0 <= count <= self.deltas_out and 0 <= size <= self.bytes_out):
            raise UsageError(
                f"{count} deltas of {size} bytes: only {self.deltas_out} and {self.bytes_out} are out: "
                "release what was taken"
            )
        self.deltas_out -= count
        self.bytes_out -= size

    def set_out(self, deltas: int, size: int) -> None:
        """Set the amount that is out, as at a start or after a stop. It may exceed the window."""
        if deltas < 0 or size < 0:
            raise UsageError(f"{deltas} deltas of {size} bytes: give at least 0")
        self.deltas_out = deltas
        self.bytes_out = size
