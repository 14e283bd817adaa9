"""Credits: how much one sink may hold that is admitted and not yet applied, in deltas and in bytes. Pure.

What is out may be kept in two ways: by `take` and `give_back`, or by setting it to what was counted
(`set_out`), which forgives every difference.
"""

from __future__ import annotations

from delta_prop_wire.errors import UsageError


class Credits:
    """A window of deltas and bytes. Nothing is let in beyond it, but for one batch that is larger alone."""

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
        """Deltas and bytes that may still be let in; never below 0."""
        return max(self.deltas_max - self.deltas_out, 0), max(self.bytes_max - self.bytes_out, 0)

    @property
    def full(self) -> float:
        """The share of the window that is out, the larger of the two; above 1 with a batch that is larger."""
        return max(self.deltas_out / self.deltas_max, self.bytes_out / self.bytes_max)

    def fits(self, count: int, size: int) -> bool:
        """Whether a batch may come in. One larger than the window may when nothing else is out."""
        return (
            self.deltas_out + count <= self.deltas_max and self.bytes_out + size <= self.bytes_max
        ) or self.deltas_out == self.bytes_out == 0

    def take(self, count: int, size: int) -> None:
        """Spend the credits of a batch that was let in. Raises UsageError where it does not fit."""
        if count < 0 or size < 0 or not self.fits(count, size):
            deltas, size_left = self.available
            raise UsageError(
                f"{count} deltas of {size} bytes do not fit in {deltas} deltas, {size_left} bytes: ask first"
            )
        self.deltas_out += count
        self.bytes_out += size

    def give_back(self, count: int, size: int) -> None:
        """What was taken is applied, or was not for this sink. Raises UsageError above what is out."""
        if not (0 <= count <= self.deltas_out and 0 <= size <= self.bytes_out):
            raise UsageError(
                f"{count} deltas of {size} bytes given back, of {self.deltas_out} and {self.bytes_out} out"
            )
        self.deltas_out -= count
        self.bytes_out -= size

    def set_out(self, deltas: int, size: int) -> None:
        """What is out is this much, whatever was noted: at a start, after a stop. May exceed the window."""
        if deltas < 0 or size < 0:
            raise UsageError(f"{deltas} deltas of {size} bytes cannot be out: give at least 0")
        self.deltas_out = deltas
        self.bytes_out = size
