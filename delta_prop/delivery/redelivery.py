"""Release from a quarantine: an operator's request, and the deliveries of released deltas."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel
import numpy as np
from numpy.typing import NDArray

from delta_prop.delivery.feed_state import FeedEvent
from delta_prop.delivery.held_deltas import QuarantinedDelta
from delta_prop.delivery.quarantine import ReplayPlan
from delta_prop.delivery.reasons import rejected_unknown
from delta_prop_sinks.sink import Delivery, HoldsTombstones, RejectDelta, StopSink, TryAgain
from delta_prop_wire.batch import LoggedBatch
from delta_prop_wire.errors import Refused

if TYPE_CHECKING:
    from delta_prop.delivery.feed import Feed

logger = logging.getLogger("delta_prop")


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """Result of a request: the numbers of deltas applied, dropped, and left in the quarantine."""

    applied: int
    dropped: int
    left: int


class FeedRequest:
    """Request to a feed, which carries it out between two deliveries. `is_withdrawn`: nobody waits for it."""

    def __init__(self) -> None:
        self.is_withdrawn = False
        self._answer: ReplayResult | Refused | None = None
        self._answered = anyio.Event()

    def finish(self, answer: ReplayResult | Refused) -> None:
        """Set the result."""
        self._answer = answer
        self._answered.set()

    async def wait(self) -> ReplayResult:
        """Wait for the result. Raises Refused. A cancelled wait withdraws the request."""
        try:
            await self._answered.wait()
        finally:
            self.is_withdrawn = True
        if isinstance(self._answer, ReplayResult):
            return self._answer
        assert self._answer is not None
        raise self._answer.with_traceback(None)


class ForgetRequest(FeedRequest):
    """Request to remove tombstones from the sink: of `erased` vectors, and of those deleted `before`."""

    def __init__(self, erased: Sequence[tuple[str, str]], before: int) -> None:
        super().__init__()
        self.erased = erased
        self.before = before


class ReplayRequest(FeedRequest):
    """Request to apply (or drop) the rejected deltas at these offsets (None: all), then their dependents.

    The dependents of dropped deltas are applied. With `reset_to`, the feed restarts at that offset instead.
    """

    def __init__(self, offsets: frozenset[int] | None, *, drop: bool, reset_to: int | None = None) -> None:
        super().__init__()
        self.offsets = offsets
        self.drop = drop
        self.reset_to = reset_to


class ReplayQueue:
    """Requests of operators for one sink, oldest first; the feed carries them out between deliveries."""

    def __init__(self) -> None:
        self.waiting: deque[FeedRequest] = deque()

    @property
    def is_resetting(self) -> bool:
        """True if a request moves the cursor, so that the present delivery no longer matters."""
        return any(
            isinstance(request, ReplayRequest) and request.reset_to is not None and not request.is_withdrawn
            for request in self.waiting
        )

    def add(self, request: FeedRequest) -> None:
        """Queue a request, and drop those that were withdrawn, except the first, which may be running."""
        still_open = [
            queued for queued in self.waiting if queued is self.waiting[0] or not queued.is_withdrawn
        ]
        self.waiting = deque([*still_open, request])

    def finish_all(self, answer: Refused) -> None:
        """Answer all requests: none will be carried out."""
        for request in self.waiting:
            request.finish(answer)


async def execute_forget(feed: Feed, request: ForgetRequest) -> ReplayResult:
    """Have the sink forget tombstones, until that has succeeded, or nobody waits, or the sink has stopped."""
    sink, invoker, control = feed.sink, feed.invoker, feed.control
    if request.erased and feed.deliverer.writer is not None:
        feed.deliverer.writer.rewrite_next()
        await feed.deliverer.wait_quarantine_written()
    if isinstance(sink, HoldsTombstones):
        forget = partial(sink.forget, request.erased, request.before)
        while (failure := await invoker.attempt(forget, FeedEvent.CALL, 0)) is not None:
            if isinstance(failure, StopSink):
                control.stop_because(failure.reason)
            else:
                await invoker.back_off(failure)
            if feed.has_ended or request.is_withdrawn or control.requests.is_resetting:
                break
    elif request.erased:
        logger.warning("sink %r cannot erase: what it has stored of an erased vector stays there", feed.name)
    return ReplayResult(0, 0, len(feed.quarantine))


async def execute_replay(feed: Feed, request: ReplayRequest) -> ReplayResult:
    """Apply or drop the deltas of a request, and apply their dependents, until done or withdrawn."""
    quarantine = feed.quarantine
    count_before, dropped = len(quarantine), 0
    released = {record.offset for record in quarantine.records() if record.reason is not None}
    if request.offsets is not None:
        released &= request.offsets
    if request.drop:
        dropped = len(released)
        for offset in released:
            quarantine.drop(offset)
    plan = ReplayPlan(quarantine.records(), released)
    invoker, deliverer, control = feed.invoker, feed.deliverer, feed.control
    count_max = count = feed.limits.merge_deltas_max
    while await deliverer.wait_quarantine_written() and (records := plan.take(count)):
        with quarantine.applying(records):
            failure = await invoker.call(make_released_deliveries(records))
        applied = _count_applied(records, failure)
        for record in records[:applied]:
            quarantine.replay(record.offset)
        if failure is None:
            count = min(2 * count, count_max)
        elif isinstance(failure, RejectDelta) and _is_rejected_in(records, failure):
            record = records[applied]
            quarantine.reject(record.logged, record.row, failure.reason, record.at_us)
            plan.put_back(records[applied + 1 :], rejected=record)
            count = max(count // 2, 1)  # if most are rejected, a small call wastes less work
        elif isinstance(failure, RejectDelta):
            control.stop_because(rejected_unknown(failure))
        elif isinstance(failure, StopSink):
            control.stop_because(failure.reason)
        else:
            plan.put_back(records[applied:])
            count = applied or max(len(records) // 2, 1)
            if applied:
                control.backoff.breaker.note_progress()
            await invoker.back_off(failure)
        await anyio.lowlevel.checkpoint()  # a sink that never waits must not block other tasks
        if feed.has_ended or request.is_withdrawn or control.requests.is_resetting:
            break
    await deliverer.wait_quarantine_written()
    return ReplayResult(count_before - dropped - len(quarantine), dropped, len(quarantine))


def _is_rejected_in(records: Sequence[QuarantinedDelta], failure: RejectDelta) -> bool:
    return any(record.offset == failure.offset for record in records)


def _count_applied(records: Sequence[QuarantinedDelta], failure: Exception | None) -> int:
    if failure is None:
        return len(records)
    done_offset = 0
    if isinstance(failure, TryAgain):
        done_offset = failure.done_offset or 0
    elif isinstance(failure, RejectDelta) and _is_rejected_in(records, failure):
        done_offset = failure.offset
    return sum(record.offset < done_offset for record in records)


def contains_offset(delivery: Delivery, offset: int) -> bool:
    """True if a delivery includes the row at that offset."""
    row = offset - delivery.first_offset
    return 0 <= row < delivery.logged.count and (delivery.rows is None or row in delivery.rows)


def row_numbers(delivery: Delivery) -> NDArray[np.intp]:
    """Return the numbers of the rows in a delivery."""
    return np.arange(delivery.logged.count) if delivery.rows is None else delivery.rows


def make_released_deliveries(records: Sequence[QuarantinedDelta]) -> list[Delivery]:
    """Return released deltas, which are in log order, as deliveries, one for each batch."""
    batches: dict[int, tuple[LoggedBatch, list[int]]] = {}
    for record in records:
        batches.setdefault(record.logged.offset, (record.logged, []))[1].append(record.row)
    return [Delivery(logged, np.array(rows, np.intp), redelivered=True) for logged, rows in batches.values()]
