"""Between a place in the log and what it means: who is shown a batch, who is told, once a mark has passed it.

A batch has its offset before it is written. Sinks are shown it when the log's visible mark has passed it,
its caller is told when the mark of the level asked for has. A log in memory has all marks at its end, so
beside it nothing ever waits here. Pure.
"""

from __future__ import annotations

import heapq
import logging
from collections import deque
from typing import TYPE_CHECKING

from delta_prop_wire.delta import AckLevel

if TYPE_CHECKING:
    from collections.abc import Callable

    from delta_prop_broker.log.contract import Log
    from delta_prop_wire.batch import LoggedBatch
    from delta_prop_wire.errors import Refused

    Tell = Callable[[Refused | None], None]


logger = logging.getLogger("delta_prop")


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
        self._untold: dict[AckLevel, list[tuple[int, int, Tell]]] = {level: [] for level in AckLevel}
        self._order = 0

    @property
    def untold(self) -> int:
        """How many outcomes wait for a mark."""
        return sum(map(len, self._untold.values()))

    def placed(self, logged: LoggedBatch) -> None:
        """A batch has its place: show it to the sinks, now or as soon as it may be read."""
        if not self._unseen and logged.next_offset <= self._log.visible:
            self._show(logged)
        else:
            self._unseen.append(logged)
            self._on_wait()

    def when_kept(self, next_offset: int, level: AckLevel, tell: Tell) -> bool:
        """Call `tell(None)` once all below `next_offset` is kept at this level; with why not, if never.

        Whether that is later: False where it was told at once.
        """
        if next_offset <= self._log.reached(level):
            tell(None)
            return False
        self._order += 1
        heapq.heappush(self._untold[level], (next_offset, self._order, tell))
        return True

    def settle(self) -> None:
        """The marks have moved: show and tell what they have passed, sinks first."""
        while self._unseen and self._unseen[0].next_offset <= self._log.visible:
            self._show(self._unseen.popleft())
        for level, waiting in self._untold.items():
            mark = self._log.reached(level) if waiting else 0
            while waiting and waiting[0][0] <= mark:
                _call(heapq.heappop(waiting)[2], None)

    def fail(self, refusal: Refused) -> None:
        """The marks move no more: nothing that waits is shown, everybody is told."""
        self._unseen.clear()
        for level in list(self._untold):
            waiting, self._untold[level] = self._untold[level], []
            for _, _, tell in sorted(waiting, key=lambda one: one[:2]):
                _call(tell, refusal)


def _call(tell: Tell, refusal: Refused | None) -> None:
    """A callback of whoever is told may fail: nobody is on the stack to hear of it, and others wait too."""
    try:
        tell(refusal)
    except Exception:
        logger.exception("a callback failed that was told of an outcome")
