"""What comes out of a quarantine late: an operator's request, and quarantined deltas as deliveries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel
import numpy as np

from delta_prop.route.quarantine import Release
from delta_prop.route.reasons import rejected_another
from delta_prop_sinks.sink import Delivery, RejectDelta, StopSink, TryAgain

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from delta_prop.route.feed import Feed
    from delta_prop.route.quarantine import SetAside
    from delta_prop_wire.batch import LoggedBatch
    from delta_prop_wire.errors import Refused


@dataclass(frozen=True, slots=True)
class Replayed:
    """What became of a request: deltas applied, deltas dropped, deltas still in the quarantine."""

    applied: int
    dropped: int
    left: int


class ReplayRequest:
    """Apply (or drop) what the sink rejected at these offsets (None: all of it), and what that frees.

    With `reset_to` nothing of that: go on from another offset.
    """

    def __init__(self, offsets: frozenset[int] | None, *, drop: bool, reset_to: int | None = None) -> None:
        self.offsets = offsets
        self.drop = drop
        self.reset_to = reset_to
        self.withdrawn = False
        self._answer: Replayed | Refused | None = None
        self._answered = anyio.Event()

    def end(self, answer: Replayed | Refused) -> None:
        """Tell what became of it."""
        self._answer = answer
        self._answered.set()

    async def wait(self) -> Replayed:
        """Wait for the answer. Raises Refused; cancelled, what is not begun yet is not begun any more."""
        try:
            await self._answered.wait()
        finally:
            self.withdrawn = True
        if isinstance(self._answer, Replayed):
            return self._answer
        assert self._answer is not None
        raise self._answer.with_traceback(None)


async def answer_request(feed: Feed, request: ReplayRequest) -> Replayed:
    """Apply or drop what a request names, and apply what that frees, until it is done or withdrawn."""
    quarantine = feed.quarantine
    held, dropped = len(quarantine), 0
    leaving = {one.offset for one in quarantine.records() if one.reason is not None}
    if request.offsets is not None:
        leaving &= request.offsets
    if request.drop:
        dropped = len(leaving)
        for offset in leaving:
            quarantine.drop(offset)
    release = Release(quarantine.records(), leaving)
    count_max = count = feed.limits.merge_deltas_max
    while await feed.kept() and (records := release.take(count)):
        with quarantine.coming_out(records):
            failure = await feed.call(late_deliveries(records))
        applied = _applied(records, failure)
        for one in records[:applied]:
            quarantine.replay(one.offset)
        if failure is None:
            count = min(2 * count, count_max)
        elif isinstance(failure, RejectDelta) and _rejects(records, failure):
            one = records[applied]
            quarantine.reject(one.logged, one.row, failure.reason, one.at_us)
            release.give_back(records[applied + 1 :], rejected=one)
            count = max(count // 2, 1)  # where most are rejected, each call is to bring few
        elif isinstance(failure, RejectDelta):
            feed.stop(feed.failed(rejected_another(failure)))
        elif isinstance(failure, StopSink):
            feed.stop(feed.failed(failure.reason))
        else:
            release.give_back(records[applied:])
            count = applied or max(len(records) // 2, 1)
            if applied:
                feed.breaker.progressed()
            await feed.back_off(failure)
        await anyio.lowlevel.checkpoint()  # a sink that never waits must not keep others waiting
        if feed.ended or request.withdrawn or feed.resetting:
            break
    await feed.kept()
    return Replayed(held - dropped - len(quarantine), dropped, len(quarantine))


def _rejects(records: Sequence[SetAside], failure: RejectDelta) -> bool:
    return any(one.offset == failure.offset for one in records)


def _applied(records: Sequence[SetAside], failure: Exception | None) -> int:
    """How many of the records, in log order, a call has applied."""
    if failure is None:
        return len(records)
    below = 0
    if isinstance(failure, TryAgain):
        below = failure.done_offset or 0
    elif isinstance(failure, RejectDelta) and _rejects(records, failure):
        below = failure.offset
    return sum(one.offset < below for one in records)


def means(delivery: Delivery, offset: int) -> bool:
    """Whether a delivery brings the row at that offset."""
    row = offset - delivery.first_offset
    return 0 <= row < delivery.logged.count and (delivery.rows is None or row in delivery.rows)


def rows_of(delivery: Delivery) -> NDArray[np.intp]:
    """The rows that are meant, as numbers."""
    return np.arange(delivery.logged.count) if delivery.rows is None else delivery.rows


def late_deliveries(records: Sequence[SetAside]) -> list[Delivery]:
    """Quarantined deltas in log order as deliveries, those of one batch together."""
    rows: dict[int, tuple[LoggedBatch, list[int]]] = {}
    for one in records:
        rows.setdefault(one.logged.offset, (one.logged, []))[1].append(one.row)
    return [Delivery(logged, np.array(some, np.intp), late=True) for logged, some in rows.values()]
