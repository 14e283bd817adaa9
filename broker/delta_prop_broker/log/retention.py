"""What may go: who holds the log back, how long it is kept, and how large it may become."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from delta_prop_wire.delta import AckLevel
from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

MIB = 1024 * 1024
SEGMENTS_MIN = 4
"""The hard limit holds at least so many segments: one is written to, whole ones are removed."""


@dataclass(frozen=True, slots=True)
class LogSettings:
    """Bounds of a log on disk. Raises UsageError where they contradict each other.

    `level`: DURABLE shows readers what is synced, LOGGED what is written (a commit is synced then only where
    a batch in it asks for it). `bytes_max` is the hard limit, at which an append is refused as long as a
    holder needs the oldest; `keep_bytes_max` and `keep_s` are how much and how long is kept beyond need.
    """

    level: AckLevel = AckLevel.DURABLE
    segment_bytes_max: int = 64 * MIB
    segment_s_max: float = 24 * 3600.0
    bytes_max: int = 10 * 1024 * MIB
    keep_bytes_max: int = 8 * 1024 * MIB
    keep_s: float = 7 * 24 * 3600.0
    unwritten_bytes_max: int = 64 * MIB
    tail_bytes_max: int = 64 * MIB
    free_bytes_min: int = 64 * MIB
    made_by: str = ""

    def __post_init__(self) -> None:
        if self.level not in (AckLevel.LOGGED, AckLevel.DURABLE):
            raise UsageError(f"a log on disk shows what is logged or durable, not {self.level.name.lower()}")
        if self.segment_bytes_max < 1 or self.bytes_max < SEGMENTS_MIN * self.segment_bytes_max:
            raise UsageError(
                f"bytes_max is {self.bytes_max}, segment_bytes_max {self.segment_bytes_max}: a log holds at "
                f"least {SEGMENTS_MIN} segments; make it larger, or its segments smaller"
            )
        if self.keep_bytes_max > self.bytes_max:
            raise UsageError(
                f"keep_bytes_max is {self.keep_bytes_max}, above bytes_max ({self.bytes_max}): lower it"
            )
        if min(self.unwritten_bytes_max, self.tail_bytes_max, self.segment_s_max, self.keep_s) <= 0:
            raise UsageError("a bound of the log is 0 or below: give it a positive value")


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
