"""Writes deltas as JSON lines to standard output, up to a number of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from delta_prop.platform import system
from delta_prop_wire.jsonlines import to_line

if TYPE_CHECKING:
    from delta_prop_wire.delta import Delta


class LineWriter:
    """Writes lines until it has written `count`; None: without end."""

    def __init__(self, count: int | None) -> None:
        self._remaining = count

    @property
    def is_done(self) -> bool:
        """True once all lines are written."""
        return self._remaining == 0

    def put(self, delta: Delta, offset: int, partition: int | None = None) -> None:
        """Write a delta. `partition`: None if the lines are of one partition. Raises OSError."""
        system.put(to_line(delta, offset, partition))
        if self._remaining is not None:
            self._remaining -= 1
