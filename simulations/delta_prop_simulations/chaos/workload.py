"""Writers and readers that use the clients as users' programs do.

A writer resends deltas without an outcome under the same dot or id, across restarts of itself and of
the service, and records every outcome in the client history. A reader saves what it read together with the
cursor after it, and resumes from that cursor. What they hold outlives their processes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import anyio

from delta_prop import Propagator
from delta_prop.calls.outcomes import Delivered, PublishAck
from delta_prop.client import ClientSettings, Subscriber
from delta_prop.client import Producer as RemoteProducer
from delta_prop.client.consumer_state import CREDIT
from delta_prop_simulations.chaos.delta_generator import HOT, DeltaGenerator, TaggedDelta
from delta_prop_simulations.chaos.histories import Ack, ClientHistory
from delta_prop_simulations.chaos.plan import ReaderPlan, WriterPlan
from delta_prop_wire.cursor import Cursor
from delta_prop_wire.delta import AckLevel, Delta, Dot, Priority
from delta_prop_wire.errors import ProtocolError, Refused, UsageError
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from delta_prop.api.producer import Producer
    from delta_prop.calls.receipt import Receipt
    from delta_prop.platform.ports import World
    from delta_prop_simulations.machine import Process
    from delta_prop_simulations.rng import Random

    Publish: TypeAlias = Callable[..., Awaitable[PublishAck]]
    from delta_prop.client.positions import StartPosition

RETRY_S = 0.05
NUMBERED_SHARE = 0.6
"""The share of writers that number their deltas themselves."""
IDENTIFIED_SHARE = 0.5
"""The share of the other writers that give each delta an id."""
UNKNOWN_MAX = 3
"""Maximum number of unknown outcomes of a delta; then the writer stops resending it."""
CLIENT = ClientSettings(
    heartbeat_interval_s=1.0,
    peer_timeout_s=4.0,
    delivery_timeout_s=60.0,
    close_timeout_s=1.0,
    open_timeout_s=20.0,
    reconnect_timeout_s=30.0,
)


@dataclass(slots=True)
class Item:
    """A unit of sending: one delta with a counter, or several deltas that are published in one call."""

    number: int
    tagged: list[TaggedDelta]
    is_settled: bool = False  # has its final outcome
    can_retry: bool = False  # refused, with a retryable code
    unknown_count: int = 0  # the number of unknown outcomes

    @property
    def deltas(self) -> list[Delta]:
        """The deltas to send."""
        return [one.delta for one in self.tagged]


@dataclass(slots=True)
class _Outbox:
    """The items without an outcome, by number."""

    items: dict[int, Item] = field(default_factory=dict)
    deltas_made: int = 0
    last_number: int = 0


class Writer:
    """A client that writes to one service, under a name.

    Some writers number their deltas themselves, and resume after their last number. Others publish with ids,
    and resend after a lost answer; or without ids: then the outcome stays unknown after a lost answer.
    """

    def __init__(self, plan: WriterPlan, rng: Random, history: ClientHistory) -> None:
        self.name = plan.name
        self._plan = plan
        self._level = None if plan.level is None else AckLevel[plan.level.upper()]
        self._rng = rng
        self._history = history
        self._generator = DeltaGenerator(plan.name, rng, poison=plan.poison, hot=plan.hot)
        self._is_numbered = rng.random() < NUMBERED_SHARE
        self._has_ids = rng.random() < IDENTIFIED_SHARE
        self._outbox = _Outbox()
        self._heads: list[tuple[str, str, Dot]] = []
        self._run_number = 0
        self._log_level = AckLevel.MEMORY

    @property
    def is_done(self) -> bool:
        """True once every delta was sent and has its final outcome."""
        return self._outbox.deltas_made >= self._plan.deltas and not self._outbox.items

    def waits_for(self) -> str:
        """Return a line about the unfinished work."""
        outbox = self._outbox
        first = next(iter(outbox.items.values()), None)
        first_open = f", the first is number {first.number} ({first.tagged[0].token})" if first else ""
        return (
            f"writer {self.name}: {outbox.deltas_made} of {self._plan.deltas} deltas made, "
            f"{len(outbox.items)} items open{first_open}"
        )

    async def run_embedded(self, propagator: Propagator, process: Process | None = None) -> None:
        """Run within the service's process until all deltas have an outcome."""
        while not self.is_done:
            with suppress(Refused):
                if self._is_numbered:
                    await self._offer_numbered(propagator, process)
                elif self._plan.offers:
                    await self._publish_all(partial(_offer_and_wait, propagator), takes_level=True)
                elif self._rng.random() < 0.5:
                    await self._publish_all(propagator.producer(self.name, ack_level=self._level).publish)
                else:
                    await self._publish_all(propagator.publish, takes_level=True)
            await anyio.sleep(RETRY_S)

    async def run(self, world: World, addresses: str | Sequence[str], **log: Any) -> None:
        """Run in a process of its own until all deltas have an outcome."""
        while not self.is_done:
            with suppress(Refused, OSError, UsageError):  # UsageError: the log was in memory, and is lost
                async with RemoteProducer(
                    addresses, name=self.name, ack_level=self._level, settings=CLIENT, world=world, **log
                ) as producer:
                    if self._is_numbered:
                        await self._offer_numbered_remotely(producer)
                    else:
                        await self._publish_all(producer.publish)
            await anyio.sleep(RETRY_S)

    async def _offer_numbered(self, propagator: Propagator, process: Process | None) -> None:
        """Offer the items without an outcome again, then new ones; resend refused ones. Raises Refused."""
        producer = propagator.producer(self.name, ack_level=self._level)
        self._log_level = propagator.internals().partition.log.ack_level
        self._run_number += 1
        run_number = self._run_number

        def callback(item: Item) -> Callable[[Receipt], None]:
            return lambda receipt: self._note_outcome(item, receipt, run_number, process)

        for item in list(self._outbox.items.values()):
            item.can_retry = False
            await self._offer(producer, item, callback(item))
        while not self.is_done:
            if self._outbox.deltas_made < self._plan.deltas:
                item = self._make_item(1)
                await self._offer(producer, item, callback(item))
                await self._pause_after_burst()
            else:
                await anyio.sleep(RETRY_S)
                self._resend(producer)

    async def _offer(self, producer: Producer, item: Item, callback: Callable[[Receipt], None]) -> None:
        """Offer an item until it is accepted; if it was sent in a former process, note its outcome."""
        self._note_sent(item)
        while True:
            try:
                is_new = producer.offer_numbered(item.number, item.tagged[0].delta, callback)
            except Refused as refusal:
                if refusal.is_final:
                    self._refuse(item, refusal)
                    return
                if not refusal.retryable:
                    raise
                await anyio.sleep(RETRY_S)
                self._resend(producer)
            else:
                break
        if not is_new:
            self._note_former_outcome(
                item, await producer.outcome(item.number, item.tagged[0].delta.priority)
            )

    def _resend(self, producer: Producer) -> None:
        if any(item.can_retry for item in self._outbox.items.values()):
            try:
                producer.resend()
            except Refused as refusal:
                if not refusal.retryable:
                    raise

    def _note_former_outcome(self, item: Item, outcome: int | ErrorCode | None) -> None:
        if outcome is ErrorCode.OUTCOME_UNKNOWN or outcome is None:
            self._settle(item, self._history.note_unknown)
        elif isinstance(outcome, ErrorCode):
            self._settle(item, lambda token: self._history.note_refused(token, outcome))
        else:  # an outcome of a former process is at the highest level of this log
            ack = Ack(self._log_level, outcome, duplicate=True)
            self._settle(item, lambda token: self._history.note_acknowledged(token, ack))

    def _note_outcome(self, item: Item, receipt: Receipt, run_number: int, process: Process | None) -> None:
        """Note an outcome, unless it arrives after the end of the process that sent the item."""
        if item.is_settled or run_number != self._run_number or (process is not None and process.has_ended):
            return
        refusal = receipt.refusal()
        if refusal is None:
            if receipt.acknowledged:
                self._acknowledge(item, receipt.result())
        elif not refusal.retryable and (refusal.code is ErrorCode.DOT_REUSED or refusal.is_final):
            self._refuse(item, refusal)
        else:  # FENCED and SHUTTING_DOWN make the producer object unusable, not the delta
            item.can_retry = True
            if refusal.code is ErrorCode.OUTCOME_UNKNOWN and not refusal.retryable:
                self._note_unknown(item)

    async def _offer_numbered_remotely(self, producer: RemoteProducer) -> None:
        self._run_number += 1
        run_number = self._run_number

        async def offer(item: Item) -> None:
            self._note_sent(item)
            item.can_retry = False
            while True:
                try:
                    producer.offer_numbered(
                        item.number,
                        item.tagged[0].delta,
                        lambda receipt: self._note_outcome(item, receipt, run_number, None),
                    )
                except Refused as refusal:
                    if refusal.is_final:
                        self._refuse(item, refusal)
                        return
                    if refusal.code is not ErrorCode.QUEUE_FULL:
                        raise
                    await anyio.sleep(RETRY_S)
                else:
                    return

        for item in list(self._outbox.items.values()):
            await offer(item)
        while not self.is_done:
            if any(item.can_retry for item in self._outbox.items.values()):
                return  # this client cannot offer a refused number again; the next one can
            if self._outbox.deltas_made < self._plan.deltas:
                await offer(self._make_item(1))
                await self._pause_after_burst()
            else:
                await anyio.sleep(RETRY_S)
                await producer.flush()

    async def _publish_all(self, publish: Publish, *, takes_level: bool = False) -> None:
        for item in list(self._outbox.items.values()):
            await self._publish(publish, item, takes_level=takes_level)
        while self._outbox.deltas_made < self._plan.deltas:
            item = self._make_item(self._rng.randint(1, self._plan.burst))
            await self._publish(publish, item, takes_level=takes_level)
            await self._pause()

    async def _publish(self, publish: Publish, item: Item, *, takes_level: bool) -> None:
        self._note_sent(item)
        if not self._has_ids:  # never resend it: without an id the service cannot detect the duplicate
            del self._outbox.items[item.number]
        options = {"ack_level": self._level} if takes_level else {}
        is_in_doubt = True
        try:
            ack = await publish(*item.deltas, timeout_s=self._plan.patience_s, **options)
            is_in_doubt = False
            self._acknowledge(item, ack)
        except Refused as refusal:
            is_in_doubt = refusal.code is ErrorCode.OUTCOME_UNKNOWN
            if refusal.is_final or not (is_in_doubt or self._has_ids):
                self._refuse(item, refusal)  # it has not taken effect, and is not resent
            elif not (is_in_doubt or refusal.retryable):
                raise
        finally:
            if is_in_doubt:
                self._note_unknown(item)

    def _make_item(self, count: int) -> Item:
        outbox = self._outbox
        rng, priority = self._rng, Priority.NORMAL
        if outbox.deltas_made and rng.random() < 0.2:
            priority = rng.choice(list(Priority))
        parents = self._history.durable_dots()
        with_id = rng.random() < 0.2 if self._is_numbered else self._has_ids
        deltas = [] if outbox.deltas_made else [self._generator.create_sum(with_id=with_id)]
        while len(deltas) < min(count, max(self._plan.deltas - outbox.deltas_made, 1)):
            deltas.append(self._generator.next(priority, parents, self._heads, with_id=with_id))
        outbox.deltas_made += len(deltas)
        outbox.last_number += 1
        item = outbox.items[outbox.last_number] = Item(outbox.last_number, deltas)
        return item

    def _note_sent(self, item: Item) -> None:
        for one in item.tagged:
            ref = (one.delta.namespace, one.delta.vector_id)
            self._history.note_sent(one.token, self._plan.node, self.name, ref, self._level)

    def _note_unknown(self, item: Item) -> None:
        """Count an unknown outcome; give the item up after UNKNOWN_MAX, as the log has lost its row."""
        item.unknown_count += 1
        for one in item.tagged:
            self._history.note_unknown(one.token)
        if item.unknown_count == UNKNOWN_MAX:
            self._settle(item, self._history.note_unknown)

    def _settle(self, item: Item, note: Callable[[str], None]) -> None:
        item.is_settled = True
        self._outbox.items.pop(item.number, None)
        for one in item.tagged:
            note(one.token)

    def _refuse(self, item: Item, refusal: Refused) -> None:
        self._generator.forget()
        self._settle(item, lambda token: self._history.note_refused(token, refusal.code))

    def _acknowledge(self, item: Item, publish_ack: PublishAck) -> None:
        item.is_settled = True
        self._outbox.items.pop(item.number, None)
        for one, (offset, dot, duplicate) in zip(item.tagged, publish_ack.row_acks(), strict=True):
            ack = Ack(publish_ack.level, offset, duplicate=duplicate)
            durable_dot = dot if publish_ack.level is AckLevel.DURABLE else None
            self._history.note_acknowledged(one.token, ack, durable_dot)
            if durable_dot is not None and one.delta.vector_id in HOT:
                head = (one.delta.namespace, one.delta.vector_id, durable_dot)
                self._heads = [*self._heads, head][-4:]

    async def _pause_after_burst(self) -> None:
        if self._outbox.deltas_made % self._plan.burst == 0:
            await self._pause()

    async def _pause(self) -> None:
        await anyio.sleep(self._rng.expovariate(1 / self._plan.gap_s) if self._plan.gap_s > 0 else 0)


async def _offer_and_wait(
    propagator: Propagator, *deltas: Delta, timeout_s: float, ack_level: AckLevel | None
) -> PublishAck:
    """Offer the deltas, and wait for the outcome; `offer` has no timeout to set. Raises Refused."""
    return await propagator.offer(*deltas, ack_level=ack_level)


READ_RETRY_S = 0.2
SAVE_EVERY = 5
"""A reader of single deltas saves its cursor after this many."""
_LOST_CURSOR_CODES = frozenset({ErrorCode.CURSOR_TOO_OLD, ErrorCode.BAD_REQUEST})
"""Codes of an unusable cursor: the next row was removed from the log, or the cursor is of another log."""


@dataclass(slots=True)
class ReadSession:
    """The rows that one subscriber object received. `begin`: the saved cursor at which it asked to start;
    None if it asked for the group's cursor, or for the earliest row. `first`: the offset at which it started.
    `saved_end`: the offset after the saved rows. `is_from_start`: no cursor could be used, as none was saved,
    or the saved one was unusable.
    """

    begin: Cursor | None
    is_from_start: bool
    log_id: bytes = b""
    first: int | None = None
    saved_end: int = 0
    rows: list[tuple[int, Dot | None]] = field(default_factory=list)


class Reader:
    """One subscriber, across all its processes."""

    def __init__(self, plan: ReaderPlan) -> None:
        self.plan = plan
        self.name = plan.name
        self.is_stalled = False
        """True while a fault of the plan makes the reader read nothing."""
        self.sessions: list[ReadSession] = []
        self._saved_cursor: Cursor | None = None
        self._is_from_start = True

    @property
    def saved_offset(self) -> int:
        """The offset after the saved rows, in the log that was read last."""
        return self.sessions[-1].saved_end if self.sessions else 0

    async def run(self, world: World, addresses: str | Sequence[str], **log: Any) -> None:
        """Read until cancelled, and reconnect after errors."""
        while True:
            try:
                await self._read(world, addresses, log)
            except Refused as refusal:
                if refusal.code in _LOST_CURSOR_CODES:  # the removed rows cannot be read
                    self._saved_cursor, self._is_from_start = None, True
            except UsageError:  # the service has another log: the previous one was in memory, and is lost
                self._saved_cursor, self._is_from_start = None, True
            except (ProtocolError, OSError):
                pass
            await anyio.sleep(READ_RETRY_S)

    async def _read(self, world: World, addresses: str | Sequence[str], log: dict[str, Any]) -> None:
        start: StartPosition | None = self._saved_cursor or "earliest"
        if self.plan.group and not self._is_from_start:
            start = None
        async with Subscriber(
            addresses,
            self.plan.topics,
            start=start,
            group=f"group of {self.name}" if self.plan.group else None,
            deltas=not self.plan.batches,
            credit=(self.plan.credit, CREDIT.bytes),
            name=self.name,
            settings=CLIENT,
            world=world,
            **log,
        ) as subscriber:
            session = ReadSession(None if self.plan.group else self._saved_cursor, self._is_from_start)
            self.sessions.append(session)
            self._save_cursor(session, subscriber)
            while True:
                await anyio.sleep(READ_RETRY_S if self.is_stalled else 0)
                if not self.is_stalled:
                    with anyio.move_on_after(READ_RETRY_S):
                        await self._receive(session, subscriber)
                    self._save_cursor(session, subscriber)

    async def _receive(self, session: ReadSession, subscriber: Subscriber) -> None:
        if self.plan.batches:
            for delivered in await subscriber.next_batch():
                _add(session, delivered)
            return
        for _ in range(SAVE_EVERY):
            _add(session, await anext(subscriber))

    def _save_cursor(self, session: ReadSession, subscriber: Subscriber) -> None:
        cursor = subscriber.cursor
        if cursor is not None:
            self._is_from_start = False
            if session.first is None:
                session.first, session.log_id = cursor.next_offset, cursor.log_id
            session.saved_end = max(session.saved_end, cursor.next_offset)
            if not self.plan.group:
                self._saved_cursor = cursor


def _add(session: ReadSession, delivered: Delivered) -> None:
    session.rows.append((delivered.offset, delivered.delta.dot))
