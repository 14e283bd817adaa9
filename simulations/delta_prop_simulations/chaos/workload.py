"""Writers that use the clients as users' programs do.

A writer resends deltas without an outcome under the same dot or id, across restarts of itself and of
the service, and records every outcome in the client history.

Deltas without an outcome, and their counters, outlive the writer's process: the `Writer` object holds them.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import anyio

from delta_prop.client import ClientSettings
from delta_prop.client import Producer as RemoteProducer
from delta_prop_simulations.chaos.client_history import Ack
from delta_prop_simulations.chaos.delta_generator import HOT, DeltaGenerator
from delta_prop_wire.delta import AckLevel, Dot, Priority
from delta_prop_wire.errors import Refused, UsageError
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from delta_prop import Propagator
    from delta_prop.api.producer import Producer
    from delta_prop.calls.outcomes import PublishAck
    from delta_prop.calls.receipt import Receipt
    from delta_prop.platform.ports import World
    from delta_prop_simulations.chaos.client_history import ClientHistory
    from delta_prop_simulations.chaos.delta_generator import TaggedDelta
    from delta_prop_simulations.chaos.sinks import Process
    from delta_prop_simulations.rng import Random
    from delta_prop_wire.delta import Delta

    Publish: TypeAlias = Callable[..., Awaitable[PublishAck]]

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


@dataclass(frozen=True, slots=True)
class _Options:
    """Options of a writer's calls, from its plan."""

    deltas: int
    burst: int
    gap_s: float
    level: AckLevel | None
    patience_s: float
    use_offer: bool


class Writer:
    """A client that writes to one service, under a name.

    Some writers number their deltas themselves, and resume after their last number. Others publish with ids,
    and resend after a lost answer; or without ids: then the outcome stays unknown after a lost answer. The
    parameters are fields of `WriterPlan`.
    """

    def __init__(
        self,
        name: str,
        rng: Random,
        history: ClientHistory,
        *,
        node: str,
        deltas: int,
        burst: int,
        gap_s: float,
        level: AckLevel | None,
        poison: float = 0.0,
        patience_s: float = 20.0,
        use_offer: bool = False,
        hot: bool = False,
    ) -> None:
        self.name = name
        self.node = node
        self._rng = rng
        self._history = history
        self._options = _Options(deltas, burst, gap_s, level, patience_s, use_offer)
        self._generator = DeltaGenerator(name, rng, poison=poison, hot=hot)
        self._is_numbered = rng.random() < NUMBERED_SHARE
        self._has_ids = rng.random() < IDENTIFIED_SHARE
        self._outbox = _Outbox()
        self._heads: list[tuple[str, str, Dot]] = []
        self._run_number = 0
        self._log_level = AckLevel.MEMORY

    @property
    def is_done(self) -> bool:
        """True once every delta was sent and has its final outcome."""
        return self._outbox.deltas_made >= self._options.deltas and not self._outbox.items

    def waits_for(self) -> str:
        """Return a line about the unfinished work."""
        outbox = self._outbox
        first = next(iter(outbox.items.values()), None)
        first_open = (
            "" if first is None else f", the first is number {first.number} ({first.tagged[0].token})"
        )
        return (
            f"writer {self.name}: {outbox.deltas_made} of {self._options.deltas} deltas made, "
            f"{len(outbox.items)} items open{first_open}"
        )

    async def run_embedded(self, propagator: Propagator, process: Process | None = None) -> None:
        """Run within the service's process until all deltas have an outcome."""
        while not self.is_done:
            with suppress(Refused):
                if self._is_numbered:
                    await self._offer_numbered(propagator, process)
                elif self._options.use_offer:
                    await self._publish_all(partial(_offer_and_wait, propagator), takes_level=True)
                elif self._rng.random() < 0.5:
                    await self._publish_all(
                        propagator.producer(self.name, ack_level=self._options.level).publish
                    )
                else:
                    await self._publish_all(propagator.publish, takes_level=True)
            await anyio.sleep(RETRY_S)

    async def run_remote(self, world: World, addresses: str | Sequence[str]) -> None:
        """Run in a process of its own until all deltas have an outcome."""
        while not self.is_done:
            with suppress(Refused, OSError, UsageError):  # UsageError: the log was in memory, and is lost
                async with RemoteProducer(
                    addresses, name=self.name, ack_level=self._options.level, settings=CLIENT, world=world
                ) as producer:
                    if self._is_numbered:
                        await self._offer_numbered_remotely(producer)
                    else:
                        await self._publish_all(producer.publish)
            await anyio.sleep(RETRY_S)

    # --- with its own numbers

    async def _offer_numbered(self, propagator: Propagator, process: Process | None) -> None:
        """Offer the items without an outcome again, then new ones, and resend after retryable refusals.
        Raises Refused.
        """
        producer = propagator.producer(self.name, ack_level=self._options.level)
        self._log_level = propagator.internals().partition.log.ack_level
        self._run_number += 1
        run_number = self._run_number

        def callback(item: Item) -> Callable[[Receipt], None]:
            return lambda receipt: self._note_outcome(item, receipt, run_number, process)

        for item in list(self._outbox.items.values()):
            item.can_retry = False
            await self._offer(producer, item, callback(item))
        while not self.is_done:
            if self._outbox.deltas_made < self._options.deltas:
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
        if outcome is ErrorCode.OUTCOME_UNKNOWN:
            self._settle(item, self._history.note_unknown)
        elif isinstance(outcome, ErrorCode):
            self._settle(item, lambda token: self._history.note_refused(token, outcome))
        elif outcome is None:
            self._settle(item, self._history.note_unknown)
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
        elif refusal.retryable:
            item.can_retry = True
        elif refusal.code is ErrorCode.DOT_REUSED or refusal.is_final:
            self._refuse(item, refusal)
        elif refusal.code is ErrorCode.OUTCOME_UNKNOWN:
            item.can_retry = True
            self._note_unknown(item)
        else:
            item.can_retry = True  # the producer object is unusable, not the delta: FENCED, SHUTTING_DOWN

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
            if self._outbox.deltas_made < self._options.deltas:
                await offer(self._make_item(1))
                await self._pause_after_burst()
            else:
                await anyio.sleep(RETRY_S)
                await producer.flush()

    # --- published

    async def _publish_all(self, publish: Publish, *, takes_level: bool = False) -> None:
        for item in list(self._outbox.items.values()):
            await self._publish(publish, item, takes_level=takes_level)
        while self._outbox.deltas_made < self._options.deltas:
            item = self._make_item(self._rng.randint(1, self._options.burst))
            await self._publish(publish, item, takes_level=takes_level)
            await self._pause()

    async def _publish(self, publish: Publish, item: Item, *, takes_level: bool) -> None:
        self._note_sent(item)
        if not self._has_ids:  # never resend it: without an id the service cannot detect the duplicate
            del self._outbox.items[item.number]
        options = {"ack_level": self._options.level} if takes_level else {}
        is_in_doubt = True
        try:
            ack = await publish(*item.deltas, timeout_s=self._options.patience_s, **options)
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

    # --- common parts

    def _make_item(self, count: int) -> Item:
        outbox = self._outbox
        rng, priority = self._rng, Priority.NORMAL
        if outbox.deltas_made and rng.random() < 0.2:
            priority = rng.choice(list(Priority))
        parents = self._history.durable_dots()
        with_id = rng.random() < 0.2 if self._is_numbered else self._has_ids
        deltas = [] if outbox.deltas_made else [self._generator.create_sum(with_id=with_id)]
        while len(deltas) < min(count, max(self._options.deltas - outbox.deltas_made, 1)):
            deltas.append(self._generator.next(priority, parents, self._heads, with_id=with_id))
        outbox.deltas_made += len(deltas)
        outbox.last_number += 1
        item = outbox.items[outbox.last_number] = Item(outbox.last_number, deltas)
        return item

    def _note_sent(self, item: Item) -> None:
        for one in item.tagged:
            ref = (one.delta.namespace, one.delta.vector_id)
            self._history.note_sent(one.token, self.node, self.name, ref, self._options.level)

    def _note_unknown(self, item: Item) -> None:
        """Count an unknown outcome. After UNKNOWN_MAX of them, give the item up: the log no longer holds its
        row, so no other answer will come.
        """
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
        if self._outbox.deltas_made % self._options.burst == 0:
            await self._pause()

    async def _pause(self) -> None:
        await anyio.sleep(self._rng.expovariate(1 / self._options.gap_s) if self._options.gap_s > 0 else 0)


async def _offer_and_wait(
    propagator: Propagator, *deltas: Delta, timeout_s: float, ack_level: AckLevel | None
) -> PublishAck:
    """Offer the deltas, and wait for the outcome; `offer` has no timeout to set. Raises Refused."""
    return await propagator.offer(*deltas, ack_level=ack_level)
