"""Checks invariants at every step: offsets in order, nothing visible too early, everything within bounds.

It reads attributes only: it calls nothing that could change anything, and never waits. It checks log offsets
and feeds at every step, the rest at every `REST_EVERY`-th.
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
    from delta_prop.internals import Internals
    from delta_prop.route.feed import Feed
    from delta_prop.server.connection_handler import ConnectionHandler
    from delta_prop.server.service import Service
    from delta_prop_broker.log.memory import MemoryLog
    from delta_prop_simulations.chaos.log_history import LogHistory

REST_EVERY = 16


@dataclass(frozen=True, slots=True)
class LogOffsets:
    """A log's offsets at one moment. `recovered`: the number of its recoveries in this life."""

    first: int
    synced: int
    written: int
    next: int
    high_watermark: int
    recovered: int = 0
    failed: bool = False


class StepChecker:
    """Checks one service through one of its lives."""

    def __init__(self, node: str, internals: Internals, history: LogHistory) -> None:
        self.checks = 0
        self._node = node
        self._internals = internals
        self._history = history
        self._log = internals.log
        self._durable = self._log if isinstance(self._log, DurableLog) else None
        self._offsets = log_offsets(self._log)
        self._raw: tuple[int, ...] = ()
        self._handed: dict[str, int] = {}
        self._ever_failed = False

    def check(self, service: Service | None) -> None:
        """Check the service now. Raises Violation."""
        self.checks += 1
        log = self._durable
        raw = (
            (self._log.next_offset,)
            if log is None
            else (log.next_offset, log.written, log.synced, log.start_offset, log.failure is None)
        )
        if raw != self._raw:
            self._raw = raw
            self._check_offsets()
        visible = self._log.high_watermark
        for name, attached in self._internals.sinks.runtimes.items():
            feed = attached.feed
            if feed is not None:
                self._check_feed(name, feed, visible)
        if self.checks % REST_EVERY == 0:
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
        handed = feed._in_call_end
        if handed > visible and feed._called_at != inf:
            raise Violation(
                "early", f"{self._node}: sink {name!r} got {handed - 1}, the high watermark is {visible}"
            )
        if feed._applied > visible or feed._committed > visible:
            raise Violation(
                "cursor",
                f"{self._node}: sink {name!r} has applied {feed._applied} and committed {feed._committed}, "
                f"the high watermark is {visible}",
            )

    def _check_bounds(self, service: Service | None) -> None:
        node, inside = self._node, self._internals
        lanes, pending = inside.pipeline.queue, inside.pipeline.orderer._pending
        check_bound(node, "deltas queued", lanes.depth, lanes.capacity_deltas)
        check_bound(node, "bytes queued", lanes.depth_bytes, lanes.capacity_bytes)
        check_bound(node, "deltas pending", pending.deltas, pending._deltas_max)
        check_bound(node, "bytes pending", pending.bytes, pending._bytes_max)
        log = self._durable
        # An empty log takes one batch of any size.
        if log is not None and len(log._active_segment.pending_writes) > 1:
            check_bound(node, "bytes unwritten", log.unwritten_bytes, log.settings.unwritten_bytes_max)
        for name, attached in inside.sinks.runtimes.items():
            if attached.feed is not None:
                _check_capacity(f"{node}, sink {name!r}", attached.feed)
        for peer in () if service is None else service._handlers.values():
            check_connection(node, peer)


def log_offsets(log: DurableLog | MemoryLog) -> LogOffsets:
    """Return the log's current offsets."""
    if not isinstance(log, DurableLog):
        return LogOffsets(
            log.start_offset, log.next_offset, log.next_offset, log.next_offset, log.high_watermark
        )
    failed = log.failure is not None
    return LogOffsets(
        log.start_offset,
        log.synced,
        log.written,
        log.next_offset,
        log.high_watermark,
        log._recoveries,
        failed,
    )


def check_log_offsets(node: str, before: LogOffsets, now: LogOffsets, level: AckLevel) -> None:
    """Check the order of the offsets, and that none went back unless the log failed or was recovered."""
    in_order = 0 <= now.first <= now.synced <= now.written <= now.next
    shown = now.synced if level is AckLevel.DURABLE else now.written if level is AckLevel.LOGGED else now.next
    if not in_order or now.high_watermark != shown:
        raise Violation("marks", f"{node}: {now}")
    goes_on = now.synced >= before.synced
    if now.recovered == before.recovered:  # else the oldest segments may be back, if their removal failed
        goes_on = goes_on and now.first >= before.first and now.next >= before.next
        goes_on = goes_on and (now.failed or now.written >= before.written)
    if not goes_on:
        raise Violation("marks", f"{node}: {now} after {before}")


def check_bound(who: str, what: str, amount: int, bound: int) -> None:
    """Check that the amount is between 0 and its bound. Raises Violation."""
    if not 0 <= amount <= bound:
        raise Violation("bounds", f"{who}: {amount} {what}, the bound is {bound}")


def check_credit(who: str, credit: tuple[int, int, int], granted: int) -> None:
    """Check that remaining, unsettled and owed credit are not above the grant. Raises Violation."""
    left, unsettled, owed = credit
    if owed < 0 or unsettled < 0 or left + unsettled + owed > granted:
        raise Violation("credit", f"{who}: {left} left, {unsettled} unsettled, {owed} owed, of {granted}")


def check_connection(node: str, peer: ConnectionHandler) -> None:
    """Check one connection: the producer's credit is conserved, the subscriber's queue is bounded."""
    who = f"{node}, connection {peer.number}"
    intake, outlet, connection = peer.produce_handler, peer.consumer_session, peer._connection
    if intake is not None and connection.phase.name == "OPEN" and not connection.receive_window._unbounded:
        unsettled = [one for one in intake._pending if not one.done]
        settings, allowance = intake._settings, connection.receive_window
        credit = (allowance._deltas, sum(one.count for one in unsettled), intake._owed_deltas)
        check_credit(f"{who}, deltas", credit, settings.producer_deltas_credit)
        credit = (allowance._bytes, sum(one.size for one in unsettled), intake._owed_bytes)
        check_credit(f"{who}, bytes", credit, settings.producer_bytes_credit)
    if outlet is not None and len(outlet._queue.waiting) > 1:  # the last batch may have exceeded the bound
        queue = outlet._queue
        last = queue.waiting[-1][0].batch.size
        before = queue.bytes - BATCH_OVERHEAD_BYTES * len(queue.waiting) - last
        check_bound(who, "bytes to send", before, outlet._settings.subscriber_bytes_max)


def _check_capacity(who: str, feed: Feed) -> None:
    mailbox, quarantine = feed._mailbox, feed.quarantine
    if len(mailbox) > 1:  # an empty mailbox takes a delivery of any size
        check_bound(who, "deltas in its mailbox", mailbox.deltas, mailbox._deltas_max)
        check_bound(who, "bytes in its mailbox", mailbox.bytes, mailbox._bytes_max)
    check_bound(who, "deltas quarantined", len(quarantine), quarantine.deltas_max)
