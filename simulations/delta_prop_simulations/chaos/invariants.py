"""Checks invariants at every step: offsets are in order, nothing is visible too early, all bounds hold.

The checks only read attributes: they change nothing and never wait. Log offsets and feeds are checked at
every step, the bounds at every `BOUNDS_EVERY`-th.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from delta_prop.server.send_queue import BATCH_OVERHEAD_BYTES
from delta_prop_broker.log.durable import DurableLog
from delta_prop_simulations.chaos.violation import Violation
from delta_prop_wire.delta import AckLevel

if TYPE_CHECKING:
    from delta_prop.api.internals import Internals
    from delta_prop.delivery.feed import Feed
    from delta_prop.server.connection_handler import ConnectionHandler
    from delta_prop.server.service import Service
    from delta_prop_broker.log.memory import MemoryLog
    from delta_prop_simulations.chaos.histories import LogHistory

BOUNDS_EVERY = 16


@dataclass(frozen=True, slots=True)
class LogOffsets:
    """A log's offsets at one moment. `recoveries`: how often this process has recovered the log in place."""

    first: int
    synced: int
    written: int
    next: int
    high_watermark: int
    recoveries: int = 0
    failed: bool = False


class StepChecker:
    """Checks one service during one of its processes."""

    def __init__(self, node: str, internals: Internals, history: LogHistory) -> None:
        self.check_count = 0
        self._node = node
        self._internals = internals
        self._history = history
        self._log = internals.partition.log
        self._durable_log = self._log if isinstance(self._log, DurableLog) else None
        self._offsets = log_offsets(self._log)
        self._raw_offsets: tuple[int, ...] = ()
        self._ever_failed = False

    def check(self, service: Service | None) -> None:
        """Check the service now. Raises Violation."""
        self.check_count += 1
        log = self._durable_log
        raw = (
            (self._log.next_offset,)
            if log is None
            else (log.next_offset, log.written, log.synced, log.start_offset, log.failure is None)
        )
        if raw != self._raw_offsets:
            self._raw_offsets = raw
            self._check_offsets()
        visible = self._log.high_watermark
        for name, runtime in self._internals.sinks.runtimes.items():
            self._check_feed(name, runtime.feed, visible)
        if self.check_count % BOUNDS_EVERY == 0:
            self._check_bounds(service)

    def _check_offsets(self) -> None:
        now = log_offsets(self._log)
        if now.failed:
            self._ever_failed = True
            self._history.note_failure()
        check_log_offsets(self._node, self._offsets, now, self._history.visible_level)
        self._offsets = now

    def _check_feed(self, name: str, feed: Feed, visible: int) -> None:
        """Check that nothing above the high watermark was delivered, applied or committed."""
        if self._ever_failed and self._history.visible_level is not AckLevel.DURABLE:
            return  # visible rows may be lost with a failed sync, as the read level permits
        cursor = feed.cursor
        in_call_end = feed.inbox.in_call_end
        if in_call_end > visible and feed.invoker.called_at != inf:
            raise Violation(
                "early",
                f"{self._node}: sink {name!r} got offset {in_call_end - 1}, the high watermark is {visible}",
            )
        if cursor.noted_applied > visible or cursor.noted_committed > visible:
            raise Violation(
                "cursor",
                f"{self._node}: sink {name!r} has applied {cursor.noted_applied} and committed "
                f"{cursor.noted_committed}, "
                f"the high watermark is {visible}",
            )

    def _check_bounds(self, service: Service | None) -> None:
        node, internals = self._node, self._internals
        queue, pending = internals.partition.pipeline.queue, internals.partition.pipeline.orderer._pending
        check_bound(node, "deltas queued", queue.depth, queue.capacity_deltas)
        check_bound(node, "bytes queued", queue.depth_bytes, queue.capacity_bytes)
        check_bound(node, "deltas pending", pending.delta_count, pending._deltas_max)
        check_bound(node, "bytes pending", pending.bytes, pending._bytes_max)
        log = self._durable_log
        # A log without unwritten batches takes one batch of any size.
        if log is not None and len(log.commit_queue.writes) > 1:
            check_bound(node, "bytes unwritten", log.unwritten_bytes, log.settings.unwritten_bytes_max)
        for name, runtime in internals.sinks.runtimes.items():
            _check_capacity(f"{node}, sink {name!r}", runtime.feed)
        for handler in () if service is None else service._handlers.values():
            check_connection(node, handler)


def log_offsets(log: DurableLog | MemoryLog) -> LogOffsets:
    """Return the log's current offsets."""
    if not isinstance(log, DurableLog):
        return LogOffsets(
            log.start_offset, log.next_offset, log.next_offset, log.next_offset, log.high_watermark
        )
    failed = log.failure is not None
    return LogOffsets(
        log.start_offset, log.synced, log.written, log.next_offset, log.high_watermark, log.recoveries, failed
    )


def check_log_offsets(node: str, before: LogOffsets, now: LogOffsets, level: AckLevel) -> None:
    """Check that the offsets are in order, and that none went back unless the log failed or was recovered."""
    in_order = 0 <= now.first <= now.synced <= now.written <= now.next
    visible = (
        now.synced if level is AckLevel.DURABLE else now.written if level is AckLevel.LOGGED else now.next
    )
    if not in_order or now.high_watermark != visible:
        raise Violation("marks", f"{node}: {now}")
    is_monotonic = now.synced >= before.synced
    if now.recoveries == before.recoveries:  # else the oldest segments may be back, if their removal failed
        is_monotonic = is_monotonic and now.first >= before.first and now.next >= before.next
        is_monotonic = is_monotonic and (now.failed or now.written >= before.written)
    if not is_monotonic:
        raise Violation("marks", f"{node}: {now} after {before}")


def check_bound(who: str, what: str, amount: int, bound: int) -> None:
    """Check that the amount is between 0 and its bound. Raises Violation."""
    if not 0 <= amount <= bound:
        raise Violation("bounds", f"{who}: {amount} {what}, the bound is {bound}")


def check_credit(who: str, credit: tuple[int, int, int], granted: int) -> None:
    """Check that the sum of remaining, unsettled and owed credit is not above the grant. Raises Violation."""
    left, unsettled, owed = credit
    if owed < 0 or unsettled < 0 or left + unsettled + owed > granted:
        raise Violation("credit", f"{who}: {left} left, {unsettled} unsettled, {owed} owed, of {granted}")


def check_connection(node: str, handler: ConnectionHandler) -> None:
    """Check one connection: the producer's credit is conserved, the subscriber's queue is bounded."""
    who = f"{node}, connection {handler.client.number}"
    producer, consumer = handler.dispatcher.produce_handler, handler.deliveries.session
    connection = handler.connection
    if producer is not None and connection.phase.name == "OPEN" and not connection.receive_window._unbounded:
        outcomes = producer.outcomes
        unsettled = [entry for entry in outcomes.pending if not entry.done]
        settings, window = handler._context.settings, connection.receive_window
        credit = (window._deltas, sum(entry.count for entry in unsettled), outcomes.owed_deltas)
        check_credit(f"{who}, deltas", credit, settings.producer_deltas_credit)
        credit = (window._bytes, sum(entry.size for entry in unsettled), outcomes.owed_bytes)
        check_credit(f"{who}, bytes", credit, settings.producer_bytes_credit)
    if consumer is not None and len(consumer._queue.waiting) > 1:  # the last batch may exceed the bound
        queue = consumer._queue
        last_bytes = queue.waiting[-1][0].batch.size
        without_last = queue.bytes - BATCH_OVERHEAD_BYTES * len(queue.waiting) - last_bytes
        check_bound(who, "bytes to send", without_last, queue.bytes_max)


def _check_capacity(who: str, feed: Feed) -> None:
    mailbox, quarantine = feed.inbox.mailbox, feed.quarantine
    if len(mailbox) > 1:  # an empty mailbox takes a delivery of any size
        check_bound(who, "deltas in its mailbox", mailbox.delta_count, mailbox._deltas_max)
        check_bound(who, "bytes in its mailbox", mailbox.bytes, mailbox._bytes_max)
    check_bound(who, "deltas quarantined", len(quarantine), quarantine.deltas_max)
