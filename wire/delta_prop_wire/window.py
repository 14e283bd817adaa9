"""A window: how many more deltas and bytes may be sent in one direction of a connection.

A frame with deltas may be sent while both balances are above 0; it is then charged in full, so that a
balance may go below 0. Grants add.
"""

from __future__ import annotations

from delta_prop_wire.frames import Credit

NOTHING = Credit(0, 0)
_MOST = (1 << 63) - 1


class Window:
    """Two balances, in deltas and in bytes of frames; None for neither: anything may be sent."""

    __slots__ = ("_bytes", "_deltas", "_unbounded")

    def __init__(self, credit: Credit | None) -> None:
        self.begin(credit)

    def begin(self, credit: Credit | None) -> None:
        """Forget what was, and begin with this much."""
        self._unbounded = credit is None
        self._deltas, self._bytes = (min(part, _MOST) for part in credit or NOTHING)

    @property
    def open(self) -> bool:
        """Whether one more frame may be sent, however large."""
        return self._unbounded or (self._deltas > 0 and self._bytes > 0)

    @property
    def left(self) -> Credit | None:
        """What may still be sent, no part of it below 0; None where nothing bounds it."""
        return None if self._unbounded else Credit(max(self._deltas, 0), max(self._bytes, 0))

    def spend(self, deltas: int, size: int) -> None:
        """Charge a frame of so many deltas and bytes that is sent."""
        self._deltas -= deltas
        self._bytes -= size

    def grant(self, credit: Credit) -> None:
        """Add to what may be sent. Where nothing bounds it, nothing changes."""
        self._deltas = min(self._deltas + credit.deltas, _MOST)
        self._bytes = min(self._bytes + credit.bytes, _MOST)
