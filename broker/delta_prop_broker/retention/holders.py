"""Holders: consumers that still need rows of a log, each with its oldest needed offset."""

from __future__ import annotations

from collections.abc import Callable


class Holders:
    """The holders; each is asked for its oldest needed offset when capacity is short."""

    def __init__(self) -> None:
        self._needed: dict[str, Callable[[], int]] = {}
        self._evictable: dict[str, Callable[[], None]] = {}

    def hold(self, holder: str, needed: Callable[[], int], evict: Callable[[], None] | None = None) -> None:
        """Add a holder that needs all rows from the result of `needed` on; `evict` is called to evict it."""
        self._needed[holder] = needed
        if evict is not None:
            self._evictable[holder] = evict

    def release(self, holder: str) -> None:
        """Remove a holder."""
        self._needed.pop(holder, None)
        self._evictable.pop(holder, None)

    def floor(self, default: int) -> int:
        """Return the oldest offset that a holder needs; `default` if there is no holder."""
        return min((needed() for needed in self._needed.values()), default=default)

    def unevictable_floor(self, default: int) -> int:
        """Return the oldest offset that a holder without `evict` needs; `default` if there is none."""
        unevictable = (needed() for holder, needed in self._needed.items() if holder not in self._evictable)
        return min(unevictable, default=default)

    def slowest(self) -> str | None:
        """Return the holder that needs the oldest offset; None if there is no holder."""
        return min(self._needed, key=lambda holder: self._needed[holder](), default=None)

    def evict_slowest(self) -> bool:
        """Evict the slowest holder, if it can be evicted; return True if it was."""
        holder = self.slowest()
        evict = None if holder is None else self._evictable.get(holder)
        if holder is None or evict is None:
            return False
        self.release(holder)
        evict()
        return True
