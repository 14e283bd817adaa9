"""A credit window: the deltas and bytes that may still be sent in one direction of a connection.

A frame with deltas may be sent while both balances are above 0. It is then charged in full, so a balance may
go below 0. Grants add to the balances.
"""

from __future__ import annotations

from delta_prop_wire.frames import Credit

NO_CREDIT = Credit(0, 0)
_CREDIT_MAX = (1 << 63) - 1


class CreditWindow:
    """Two balances, in deltas and in bytes of frames; created with None it is unbounded."""

    __slots__ = ("_bytes", "_deltas", "_unbounded")

    def __init__(self, credit: Credit | None) -> None:
        self.reset(credit)

    def reset(self, credit: Credit | None) -> None:
        """Replace both balances; None makes the window unbounded."""
        self._unbounded = credit is None
        self._deltas, self._bytes = (min(amount, _CREDIT_MAX) for amount in credit or NO_CREDIT)

    @property
    def is_open(self) -> bool:
        """True if one more frame of any size may be sent."""
        return self._unbounded or (self._deltas > 0 and self._bytes > 0)

    @property
    def remaining(self) -> Credit | None:
        """The credit left, neither part below 0; None if unbounded."""
        return None if self._unbounded else Credit(max(self._deltas, 0), max(self._bytes, 0))

    def bounded(self, budget: Credit) -> CreditWindow:
        """Return a window with the smaller ones of the credit left and of a budget."""
        remaining = self.remaining
        if remaining is None:
            return CreditWindow(budget)
        return CreditWindow(Credit(min(remaining.deltas, budget.deltas), min(remaining.bytes, budget.bytes)))

    def spend(self, delta_count: int, size: int) -> None:
        """Charge a sent frame of `delta_count` deltas and `size` bytes."""
        self._deltas -= delta_count
        self._bytes -= size

    def grant(self, credit: Credit) -> None:
        """Add to both balances. Has no effect if unbounded."""
        self._deltas = min(self._deltas + credit.deltas, _CREDIT_MAX)
        self._bytes = min(self._bytes + credit.bytes, _CREDIT_MAX)
