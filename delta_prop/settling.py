"""Between a place in the log and what it means: who is shown a batch, who is told, once a mark has passed it.

A batch has its offset before it is written. Sinks are shown it when the log's visible mark has passed it,
its caller is told when the mark of the level asked for has. A log in memory has all marks at its end, so
beside it nothing ever waits here. Pure.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections import deque
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from delta_prop_wire.delta import AckLevel

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from delta_prop.receipt import Receipt
    from delta_prop_broker.log.contract import Log
    from delta_prop_wire.batch import LoggedBatch
    from delta_prop_wire.errors import Refused

    Tell = Callable[[Refused | None], None]
    Part = tuple[int, Tell]
    """The next offset of one batch of several that wait together, and its own `Tell`."""


logger = logging.getLogger("delta_prop")

_LEVELS = tuple(AckLevel)
assert [*map(int, _LEVELS)] == [*range(len(_LEVELS))]
_next_offset = attrgetter("next_offset")


class _Waiting(NamedTuple):
    """An answer that waits for a mark. `receipt`: of the delta that it is about; None: it is about none.
    `split`: gives the batches one by one that it is about, where these are several.
    """

    next_offset: int
    tell: Tell
    receipt: Receipt | None
    split: Callable[[], list[Part]] | None


class Settling:
    """What waits for the log's marks, each in order of offset."""

    def __init__(
        self, log: Log, show: Callable[[LoggedBatch], None], on_wait: Callable[[], None] = lambda: None
    ) -> None:
        """`on_wait` is called when something begins to wait, so that somebody moves the marks."""
        self._log = log
        self._show = show
        self._on_wait = on_wait
        self._suspended = False
        self._unseen: deque[LoggedBatch] = deque()
        self._untold: tuple[deque[_Waiting], ...] = tuple(deque() for _ in AckLevel)
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

    def when_kept(
        self,
        next_offset: int,
        level: AckLevel,
        tell: Tell,
        receipt: Receipt | None = None,
        split: Callable[[], list[Part]] | None = None,
    ) -> bool:
        """Call `tell(None)` once all below `next_offset` is kept at this level; with why not, if never.

        `receipt`: of the delta that this is about. If the log fails first, that delta is in doubt, and `tell`
        waits until a recovery has decided; without a receipt `tell` is called with the failure at once.
        `split`: gives the batches one by one that this is about, where these may turn out differently.
        Returns whether it is later: False where it was told at once.
        """
        if next_offset <= self._log.reached(level):
            tell(None)
            return False
        if level >= AckLevel.DURABLE:  # a repeat may ask for more than its first copy did
            self._log.want_sync()
            self._on_wait()
        waiting = self._untold[level]
        one = _Waiting(next_offset, tell, receipt, split)
        if waiting and next_offset < waiting[-1].next_offset:  # a repeat, which waits for its first copy
            waiting.insert(bisect_right(waiting, next_offset, key=_next_offset), one)
        else:
            waiting.append(one)
        return True

    def settle(self) -> None:
        """The marks have moved: show and tell what they have passed, sinks first."""
        if self._suspended:
            return
        unseen, log = self._unseen, self._log
        visible = log.visible
        while unseen and unseen[0].next_offset <= visible:
            self._show(unseen.popleft())
        for level, waiting in zip(_LEVELS, self._untold, strict=True):
            if waiting:
                mark = log.reached(level)
                while waiting and waiting[0].next_offset <= mark:
                    _call(waiting.popleft().tell, None)

    def suspend(self, refusal: Refused) -> None:
        """The log has failed: nothing that waits is shown, and nothing is told until `resume` or `fail`.

        A delta that waits for its mark is in doubt: it may be found when the log is recovered.
        """
        self._suspended = True
        self._unseen.clear()
        about_none: list[_Waiting] = []
        for waiting in self._untold:
            for one in [*waiting]:
                if one.receipt is None:
                    waiting.remove(one)
                    about_none.append(one)
                else:
                    one.receipt.doubt()
        for one in about_none:
            _call(one.tell, refusal)

    def resume(self, end: int, refusal: Refused) -> None:
        """The log was recovered up to offset `end`: what lies below is kept at every level, the rest never
        happened and is told the refusal.
        """
        self._suspended = False
        self._decide(end, refusal)

    def fail(self, refusal: Refused) -> None:
        """The marks move no more: nothing that waits is shown, everybody is told."""
        self._unseen.clear()
        self._decide(0, refusal)

    def _decide(self, end: int, refusal: Refused) -> None:
        """Tell all that waits: what lies below `end` is kept, the rest is told the refusal."""
        untold, self._untold = self._untold, tuple(deque() for _ in AckLevel)
        for one in [one for waiting in untold for one in waiting]:
            whole = one.next_offset <= end or one.split is None
            parts = [(one.next_offset, one.tell)] if whole or one.split is None else one.split()
            for next_offset, tell in parts:
                _call(tell, None if next_offset <= end else refusal)


def _call(tell: Tell, refusal: Refused | None) -> None:
    """A callback of whoever is told may fail: nobody is on the stack to hear of it, and others wait too."""
    try:
        tell(refusal)
    except Exception:
        logger.exception("a callback failed that was told of an outcome")
