"""The clock entries of one origin: those that its batches have named, and those that they must name again.

Pure. A batch names the dots of other origins that come before it; a dot is named once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from delta_prop_wire.delta import Dot


class HeadDot(Protocol):
    """A dot, or the dot that an offer will get; `counter`: 0 until it has one."""

    @property
    def origin(self) -> int:
        """The origin."""
        ...

    @property
    def counter(self) -> int:
        """The counter."""
        ...


class SentClocks:
    """The highest counter by origin, of the dots that clocks have named."""

    __slots__ = ("_owed", "_processed", "_sent")

    def __init__(self) -> None:
        self._sent: dict[int, int] = {}
        self._processed: dict[int, int] = {}  # of the clocks of batches with an outcome
        self._owed: dict[int, int] = {}  # to be named again, since the service lost deltas

    def make(
        self, predecessors: Iterable[HeadDot], is_lost: Callable[[Dot], bool] = lambda _dot: False
    ) -> list[Dot]:
        """Return the predecessors that no sent clock has named, and the owed dots."""
        new_dots = [
            dot
            for head in predecessors
            if head.counter > self._sent.get(head.origin, 0)
            and not is_lost(dot := Dot(head.origin, head.counter))
        ]
        if not (new_dots or self._owed):
            return []
        owed = [Dot(*entry) for entry in self._owed.items()]
        return highest_dots([*new_dots, *(dot for dot in owed if not is_lost(dot))])

    def on_drawn(self, clock: Iterable[Dot]) -> None:
        """Note that a batch names these dots, and with them the owed ones."""
        for dot in clock:
            self._sent[dot.origin] = dot.counter
        self._owed.clear()

    def on_processed(self, clock: Iterable[Dot]) -> None:
        """Note that a batch with this clock has its outcome."""
        for dot in clock:
            if dot.counter > self._processed.get(dot.origin, 0):
                self._processed[dot.origin] = dot.counter

    def owe_processed(self) -> None:
        """Name all processed dots again: the service has lost deltas."""
        self._owed = dict(self._processed)

    def take_owed(self) -> list[Dot]:
        """Return the dots to name again; the caller names them."""
        owed = [Dot(*entry) for entry in self._owed.items()]
        self._owed.clear()
        return owed

    def forget_sent(self) -> None:
        """Forget what was named: each dot is named again by the next batch that it must precede."""
        self._sent.clear()


def highest_dots(dots: Iterable[Dot]) -> list[Dot]:
    """Return the dot with the highest counter of each origin, in order."""
    highest: dict[int, int] = {}
    for origin, counter in dots:
        highest[origin] = max(counter, highest.get(origin, 0))
    return [Dot(*entry) for entry in sorted(highest.items())]
