"""Between a place in the log and what it means: who is shown a batch, who is told, once a mark has passed it.

A batch has its offset before it is written. Sinks are shown it when the log's visible mark has passed it,
its caller is told when the mark of the level asked for has. A log in memory has all marks at its end, so
beside it nothing ever waits here. Pure.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections import deque
from operator import itemgetter
from typing import TYPE_CHECKING

from delta_prop_wire.delta import AckLevel

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from delta_prop_broker.log.contract import Log
    from delta_prop_wire.batch import LoggedBatch
    from delta_prop_wire.errors import Refused

    Tell = Callable[[Refused | None], None]


logger = logging.getLogger("delta_prop")

_LEVELS = tuple(AckLevel)
assert [*map(int, _LEVELS)] == [*range(len(_LEVELS))]
_first = itemgetter(0)


class Settling:
    """What waits for the log's marks, each in order of offset."""

    def __init__(
        self, log: Log, show: Callable[[LoggedBatch], None], on_wait: Callable[[], None] = lambda: None
    ) -> None:
        """`on_wait` is called when something begins to wait, so that somebody moves the marks."""
        self._log = log
        self._show = show
        self._on_wait = on_wait
        self._unseen: deque[LoggedBatch] = deque()
        self._untold: tuple[deque[tuple[int, Tell]], ...] = tuple(deque() for _ in AckLevel)
        """By level, each in order of offset."""

    @property
    def untold(self) -> int:
        """How many outcomes wait for a mark."""
        return sum(map(len, self._untold))

    def placed(self, logged: LoggedBatch) -> None:
        """A batch has its place: show it to the sinks, now or as soon as it may be read."""
        if not self._unseen and logged.next_offset <= self._log.visible:
            self._show(logged)
        else:
            self._unseen.append(logged)
            self._on_wait()

    def placed_run(self, placed: Sequence[LoggedBatch]) -> None:
        """The same for batches that got their places one behind the other."""
        if not self._unseen and placed[-1].next_offset <= self._log.visible:
            for logged in placed:
                self._show(logged)
        else:
            self._unseen.extend(placed)
            self._on_wait()

    def when_kept(self, next_offset: int, level: AckLevel, tell: Tell) -> bool:
        """Call `tell(None)` once all below `next_offset` is kept at this level; with why not, if never.

        Whether that is later: False where it was told at once.
        """
        if next_offset <= self._log.reached(level):
            tell(None)
            return False
        if level >= AckLevel.DURABLE:  # a repeat may ask for more than its first copy did
            self._log.want_sync()
            self._on_wait()
        waiting = self._untold[level]
        if waiting and next_offset < waiting[-1][0]:  # a repeat, which waits for its first copy
            waiting.insert(bisect_right(waiting, next_offset, key=_first), (next_offset, tell))
        else:
            waiting.append((next_offset, tell))
        return True

    def settle(self) -> None:
        """The marks have moved: show and tell what they have passed, sinks first."""
        unseen, log = self._unseen, self._log
        visible = log.visible
        while unseen and unseen[0].next_offset <= visible:
            self._show(unseen.popleft())
        for level, waiting in zip(_LEVELS, self._untold, strict=True):
            if waiting:
                mark = log.reached(level)
                while waiting and waiting[0][0] <= mark:
                    _call(waiting.popleft()[1], None)

    def fail(self, refusal: Refused) -> None:
        """The marks move no more: nothing that waits is shown, everybody is told."""
        self._unseen.clear()
        untold, self._untold = self._untold, tuple(deque() for _ in AckLevel)
        for waiting in untold:
            for _, tell in waiting:
                _call(tell, refusal)


def _call(tell: Tell, refusal: Refused | None) -> None:
    """A callback of whoever is told may fail: nobody is on the stack to hear of it, and others wait too."""
    try:
        tell(refusal)
    except Exception:
        logger.exception("a callback failed that was told of an outcome")
