"""Who needs what of a log: what must be kept, and for whose sake it is full."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class Holders:
    """Who still needs what, asked when room is short."""

    def __init__(self) -> None:
        self._needed: dict[str, Callable[[], int]] = {}
        self._yielding: dict[str, Callable[[], None]] = {}

    def hold(
        self, holder: str, needed: Callable[[], int], give_way: Callable[[], None] | None = None
    ) -> None:
        """Keep everything from what `needed` gives on; who has `give_way` is let go where it must be."""
        self._needed[holder] = needed
        if give_way is not None:
            self._yielding[holder] = give_way

    def release(self, holder: str) -> None:
        """Forget what a holder needed."""
        self._needed.pop(holder, None)
        self._yielding.pop(holder, None)

    def floor(self, default: int) -> int:
        """The oldest offset that somebody needs."""
        return min((needed() for needed in self._needed.values()), default=default)

    def staying_floor(self, default: int) -> int:
        """The same, of those who do not give way."""
        staying = (needed() for holder, needed in self._needed.items() if holder not in self._yielding)
        return min(staying, default=default)

    def slowest(self) -> str | None:
        """The holder furthest behind."""
        return min(self._needed, key=lambda holder: self._needed[holder](), default=None)

    def let_go(self) -> bool:
        """Let the holder furthest behind go, if it gives way."""
        holder = self.slowest()
        give_way = None if holder is None else self._yielding.get(holder)
        if holder is None or give_way is None:
            return False
        self.release(holder)
        give_way()
        return True
