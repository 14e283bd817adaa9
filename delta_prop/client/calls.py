"""Calls of one simple delta each, gathered: while all goes well they are one offer, told in one go.

Pure. Whatever treats one of them in another way than the rest first has them `split` into offers of their
own: that is the long way, and to each caller it tells the same.
"""

from __future__ import annotations

from itertools import repeat
from typing import TYPE_CHECKING

from delta_prop.client.offer import Offer, Place
from delta_prop.published import Published
from delta_prop_wire.delta import Dot

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from delta_prop.client.lane import OpenFrame
    from delta_prop.waking import Waker
    from delta_prop_wire.delta import AckLevel, Delta, Priority
    from delta_prop_wire.errors import Refused

CALLS_MAX = 1_000
CALLS_BYTES_MAX = 256 * 1024
CALLS_S_MAX = 0.01
"""How much later than the first of them a call may come: all of them wait until the same time."""
_NO_DUPLICATES: Mapping[int, int | None] = {}


class Calls(Offer):
    """Deltas of which `validate.is_simple` is true, each with the waker of its caller.

    `Outgoing.call` adds to them as long as nothing stands behind them.
    """

    __slots__ = ("gathered", "parts", "wakers")

    def __init__(self, priority: Priority, now: float, tell: Callable[[Published | Refused], None]) -> None:
        """`tell` is called when callers were told."""
        self.gathered: list[Delta] = []
        super().__init__(priority, self.gathered, tell)
        self.at = now
        self.waited_for = self.simple = True
        self.wakers: list[Waker] = []
        self.parts: list[Offer] = []

    @property
    def calls(self) -> int:
        """See `Offer`."""
        return self.count

    def encoded(self, frame: OpenFrame) -> None:
        """See `Offer`."""
        super().encoded(frame)
        self.gathered = []

    def split(self) -> list[Offer]:
        """The same as offers of their own, which stand where these stand."""
        parts = self.parts = [Offer(self.priority, (), self._teller(waker)) for waker in self.wakers]
        drawn, size = self.place.counter, self.size // self.count
        for row, part in enumerate(parts):
            part.count, part.size = 1, size
            part.deltas = self.gathered[row : row + 1]  # nothing where a batch holds it
            part.at, part.frame, part.refusal, part.waited_for = self.at, self.frame, self.refusal, True
            part.place = Place(self.place.origin)
            part.place.counter = drawn and drawn - len(parts) + 1 + row
        return parts

    def acknowledge(self, offset: int, dot: Dot, level: AckLevel) -> None:
        """Tell each caller its place: offsets and dots are those from here on, in order."""
        wakers, (origin, counter) = self._finish(), dot
        offsets = range(offset, offset + len(wakers))
        dots = map(Dot, repeat(origin), range(counter, counter + len(wakers)))
        for waker, at, each in zip(wakers, offsets, dots, strict=True):
            if not waker.done():
                waker.set_result(Published(at, each, 1, level, _NO_DUPLICATES))
        self.tell(Published(offset, dot, len(wakers), level, _NO_DUPLICATES))

    def settle(self, outcome: Published | Refused) -> None:
        """Tell all callers the same: why none of this happens."""
        for waker in self._finish():
            if not waker.done():
                waker.set_result(outcome)
        self.tell(outcome)

    def _finish(self) -> list[Waker]:
        assert not self.done, "told twice"
        self.done = True
        wakers = self.wakers
        self.deltas, self.frame, self.gathered, self.wakers = (), None, [], []
        return wakers

    def _teller(self, waker: Waker) -> Callable[[Published | Refused], None]:
        def told(outcome: Published | Refused) -> None:
            if not waker.done():
                waker.set_result(outcome)
            self.tell(outcome)

        return told
