"""What holds at every step of a service: marks in order, nothing shown too early, everything in its bounds.

Attributes are read, nothing is called that could change anything, nothing waits. Marks and feeds are looked
at each time, the rest each `REST_EVERY`-th.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from delta_prop.server.hot import BATCH_OVERHEAD_BYTES
from delta_prop_broker.log.durable import DurableLog
from delta_prop_simulations.disasters.violation import Violation
from delta_prop_wire.delta import AckLevel

if TYPE_CHECKING:
    from delta_prop.inside import Inside
    from delta_prop.route.feed import Feed
    from delta_prop.server.peer import Peer
    from delta_prop.server.service import Service
    from delta_prop_broker.log.memory import MemoryLog
    from delta_prop_simulations.disasters.record import Record

REST_EVERY = 16


@dataclass(frozen=True, slots=True)
class Marks:
    """A log's marks at one moment. `recovered`: how often it was recovered in this life."""

    first: int
    synced: int
    written: int
    next: int
    visible: int
    recovered: int = 0
    failed: bool = False


class Steps:
    """Looks at one service through one of its lives."""

    def __init__(self, node: str, inside: Inside, record: Record) -> None:
        self.looked = 0
        self._node = node
        self._inside = inside
        self._record = record
        self._log = inside.log
        self._durable = self._log if isinstance(self._log, DurableLog) else None
        self._marks = marks_of(self._log)
        self._raw: tuple[int, ...] = ()
        self._handed: dict[str, int] = {}
        self._ever_failed = False

    def look(self, service: Service | None) -> None:
        """Now. Raises Violation."""
        self.looked += 1
        log = self._durable
        raw = (
            (self._log.next_offset,)
            if log is None
            else (log.next_offset, log.written, log.synced, log.first_offset, log.failure is None)
        )
        if raw != self._raw:
            self._raw = raw
            self._look_at_marks()
        visible = self._log.visible
        for name, attached in self._inside.sinks.attached.items():
            feed = attached.feed
            if feed is not None:
                self._look_at_feed(name, feed, visible)
        if self.looked % REST_EVERY == 0:
            self._look_at_rest(service)

    def _look_at_marks(self) -> None:
        now = marks_of(self._log)
        if now.failed:
            self._ever_failed = True
            self._record.look()
        check_marks(self._node, self._marks, now, self._record.visible_level)
        self._marks = now

    def _look_at_feed(self, name: str, feed: Feed, visible: int) -> None:
        """What was handed over, applied, committed: none of it is beyond what is shown."""
        if self._ever_failed and self._record.visible_level is not AckLevel.DURABLE:
            return  # what was shown may have gone with a failed sync, as the level says
        handed = feed._handing
        if handed > visible and feed._called_at != inf:
            raise Violation(
                "early", f"{self._node}: sink {name!r} is brought {handed - 1}, {visible} is shown"
            )
        if feed._applied > visible or feed._committed > visible:
            raise Violation(
                "cursor",
                f"{self._node}: sink {name!r} has applied {feed._applied} and committed {feed._committed}, "
                f"{visible} is shown",
            )

    def _look_at_rest(self, service: Service | None) -> None:
        node, inside = self._node, self._inside
        lanes, pending = inside.chain.lanes, inside.chain.orderer._pending
        check_bound(node, "deltas queued", lanes.depth, lanes.capacity_deltas)
        check_bound(node, "bytes queued", lanes.depth_bytes, lanes.capacity_bytes)
        check_bound(node, "deltas pending", pending.deltas, pending._deltas_max)
        check_bound(node, "bytes pending", pending.bytes, pending._bytes_max)
        log = self._durable
        if log is not None and len(log._growing.pieces) > 1:  # one batch finds room in any empty log
            check_bound(node, "bytes unwritten", log.unwritten_bytes, log.settings.unwritten_bytes_max)
        for name, attached in inside.sinks.attached.items():
            if attached.feed is not None:
                _look_at_room(f"{node}, sink {name!r}", attached.feed)
        for peer in () if service is None else service._peers.values():
            look_at_peer(node, peer)


def marks_of(log: DurableLog | MemoryLog) -> Marks:
    """The marks as they are."""
    if not isinstance(log, DurableLog):
        return Marks(log.first_offset, log.next_offset, log.next_offset, log.next_offset, log.visible)
    failed = log.failure is not None
    return Marks(
        log.first_offset, log.synced, log.written, log.next_offset, log.visible, log._reopened, failed
    )


def check_marks(node: str, before: Marks, now: Marks, level: AckLevel) -> None:
    """They stand in order, and none went back, but where the log failed or was recovered."""
    in_order = 0 <= now.first <= now.synced <= now.written <= now.next
    shown = now.synced if level is AckLevel.DURABLE else now.written if level is AckLevel.LOGGED else now.next
    if not in_order or now.visible != shown:
        raise Violation("marks", f"{node}: {now}")
    goes_on = now.synced >= before.synced
    if now.recovered == before.recovered:  # else the oldest may be there again, whose removal failed
        goes_on = goes_on and now.first >= before.first and now.next >= before.next
        goes_on = goes_on and (now.failed or now.written >= before.written)
    if not goes_on:
        raise Violation("marks", f"{node}: {now} behind {before}")


def check_bound(who: str, what: str, amount: int, bound: int) -> None:
    """As much as is allowed, and not below nothing."""
    if not 0 <= amount <= bound:
        raise Violation("bounds", f"{who}: {amount} {what}, allowed are {bound}")


def check_credit(who: str, credit: tuple[int, int, int], granted: int) -> None:
    """What may still come, what came and is not settled, what is to be given back: not above the grant."""
    left, unsettled, owed = credit
    if owed < 0 or unsettled < 0 or left + unsettled + owed > granted:
        raise Violation("credit", f"{who}: {left} may come, {unsettled} came, {owed} owed, of {granted}")


def look_at_peer(node: str, peer: Peer) -> None:
    """One connection: the producer's credit is conserved, what waits for the subscriber is bounded."""
    who = f"{node}, connection {peer.number}"
    intake, outlet, connection = peer.intake, peer.outlet, peer._connection
    if intake is not None and connection.phase.name == "OPEN" and not connection.allowance._unbounded:
        unsettled = [one for one in intake._open if not one.done]
        settings, allowance = intake._settings, connection.allowance
        credit = (allowance._deltas, sum(one.count for one in unsettled), intake._owed_deltas)
        check_credit(f"{who}, deltas", credit, settings.producer_deltas_credit)
        credit = (allowance._bytes, sum(one.size for one in unsettled), intake._owed_bytes)
        check_credit(f"{who}, bytes", credit, settings.producer_bytes_credit)
    if (
        outlet is not None and len(outlet._queue.waiting) > 1
    ):  # the last one may have found little room, or none
        queue = outlet._queue
        last = queue.waiting[-1][0].batch.size
        before = queue.bytes - BATCH_OVERHEAD_BYTES * len(queue.waiting) - last
        check_bound(who, "bytes to send", before, outlet._settings.outlet_bytes_max)


def _look_at_room(who: str, feed: Feed) -> None:
    mailbox, quarantine = feed._mailbox, feed.quarantine
    if len(mailbox) > 1:  # a delivery of any size finds room in an empty one
        check_bound(who, "deltas in its mailbox", mailbox.deltas, mailbox._deltas_max)
        check_bound(who, "bytes in its mailbox", mailbox.bytes, mailbox._bytes_max)
    check_bound(who, "deltas set aside", len(quarantine), quarantine.deltas_max)
