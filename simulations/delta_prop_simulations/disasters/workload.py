"""Writers as users write them: they send again what has no outcome, under the same dot or id, over all lives
of theirs and of the service; and they tell the shadow whatever they are told.

What outlives a process, the deltas without an outcome and their numbers, is in the writer itself.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import anyio

from delta_prop.client import ClientSettings
from delta_prop.client import Producer as RemoteProducer
from delta_prop_simulations.disasters.shadow import Ack
from delta_prop_simulations.disasters.words import HOT, Words
from delta_prop_wire.delta import AckLevel, Dot, Priority
from delta_prop_wire.errors import Refused, UsageError
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from delta_prop import Propagator
    from delta_prop.ports import World
    from delta_prop.producer import Producer
    from delta_prop.published import Published
    from delta_prop.receipt import Receipt
    from delta_prop_simulations.chance import Random
    from delta_prop_simulations.disasters.shadow import Shadow
    from delta_prop_simulations.disasters.sinks import Life
    from delta_prop_simulations.disasters.words import Said
    from delta_prop_wire.delta import Delta

    Publish: TypeAlias = Callable[..., Awaitable[Published]]

AGAIN_S = 0.05
NUMBERED_SHARE = 0.6
IDENTIFIED_SHARE = 0.5
UNKNOWN_MAX = 3
"""So often is asked what became of something, by sending it again under its id or number."""
CLIENT = ClientSettings(
    heartbeat_s=1.0,
    silence_s_max=4.0,
    delivery_s_max=60.0,
    close_s_max=1.0,
    open_s_max=20.0,
    offline_s_max=30.0,
)


@dataclass(slots=True)
class Item:
    """What goes out together: one delta under a number, or several published at once."""

    number: int
    said: list[Said]
    settled: bool = False
    standing: bool = False  # refused, and it may pass
    unknown: int = 0  # how often nobody could tell what became of it

    @property
    def deltas(self) -> list[Delta]:
        """What is sent."""
        return [one.delta for one in self.said]


@dataclass(slots=True)
class _Box:
    """What has no outcome yet, by number."""

    items: dict[int, Item] = field(default_factory=dict)
    made: int = 0
    last: int = 0


class Writer:
    """One who writes to one service, under a name.

    Some number their deltas themselves and go on from their numbers; others publish, with ids, which they
    send again, or without, of which nobody knows when the answer gets lost.
    """

    def __init__(
        self,
        name: str,
        chance: Random,
        shadow: Shadow,
        *,
        node: str,
        deltas: int,
        burst: int,
        gap_s: float,
        level: AckLevel | None,
        poison: float = 0.0,
        patience_s: float = 20.0,
        offers: bool = False,
        hot: bool = False,
    ) -> None:
        self.name = name
        self.node = node
        self._chance = chance
        self._shadow = shadow
        self._deltas, self._burst, self._gap_s, self._level = deltas, burst, gap_s, level
        self._words = Words(name, chance, poison=poison, hot=hot)
        self._numbered = chance.random() < NUMBERED_SHARE
        self._identified = chance.random() < IDENTIFIED_SHARE
        self._patience_s = patience_s
        self._offers = offers
        self._box = _Box()
        self._heads: list[tuple[str, str, Dot]] = []
        self._life = 0
        self._log_level = AckLevel.MEMORY

    @property
    def done(self) -> bool:
        """Whether every delta was sent and has its outcome, so far as it can be had."""
        return self._box.made >= self._deltas and not self._box.items

    def waits_for(self) -> str:
        """What is left to do."""
        box = self._box
        first = next(iter(box.items.values()), None)
        what = "" if first is None else f", the first number {first.number} ({first.said[0].token})"
        return f"writer {self.name}: {box.made} of {self._deltas} deltas, {len(box.items)} open{what}"

    async def embedded(self, propagator: Propagator, life: Life | None = None) -> None:
        """One life within the service's own process, until all is done."""
        while not self.done:
            with suppress(Refused):
                if self._numbered:
                    await self._number(propagator, life)
                elif self._offers:
                    await self._publish_all(partial(_offered, propagator), level=True)
                elif self._chance.random() < 0.5:
                    await self._publish_all(propagator.producer(self.name, ack_level=self._level).publish)
                else:
                    await self._publish_all(propagator.publish, level=True)
            await anyio.sleep(AGAIN_S)

    async def remote(self, world: World, addresses: str | Sequence[str]) -> None:
        """One life in a process of its own, until all is done."""
        while not self.done:
            with suppress(Refused, OSError, UsageError):  # the last: it is another log, which was in memory
                async with RemoteProducer(
                    addresses, name=self.name, ack_level=self._level, settings=CLIENT, world=world
                ) as producer:
                    if self._numbered:
                        await self._number_remotely(producer)
                    else:
                        await self._publish_all(producer.publish)
            await anyio.sleep(AGAIN_S)

    # --- under numbers of its own

    async def _number(self, propagator: Propagator, life: Life | None) -> None:
        """Send what is open, then what is new; again what may pass. Raises Refused."""
        producer = propagator.producer(self.name, ack_level=self._level)
        self._log_level = propagator.inside().log.level
        self._life += 1
        of_life = self._life

        def then(item: Item) -> Callable[[Receipt], None]:
            return lambda told: self._note(item, told, of_life, life)

        for item in list(self._box.items.values()):
            item.standing = False
            await self._offer(producer, item, then(item))
        while not self.done:
            if self._box.made < self._deltas:
                item = self._make(1)
                await self._offer(producer, item, then(item))
                await self._rest_behind_burst()
            else:
                await anyio.sleep(AGAIN_S)
                self._resend(producer)

    async def _offer(self, producer: Producer, item: Item, then: Callable[[Receipt], None]) -> None:
        """Have it taken, or told what became of it in a former life."""
        self._send(item)
        while True:
            try:
                sent = producer.offer_numbered(item.number, item.said[0].delta, then)
            except Refused as refusal:
                if refusal.voids:
                    self._refuse(item, refusal)
                    return
                if not refusal.retryable:
                    raise
                await anyio.sleep(AGAIN_S)
                self._resend(producer)
            else:
                break
        if not sent:
            self._former(item, await producer.outcome(item.number, item.said[0].delta.priority))

    def _resend(self, producer: Producer) -> None:
        if any(item.standing for item in self._box.items.values()):
            try:
                producer.resend()
            except Refused as refusal:
                if not refusal.retryable:
                    raise

    def _former(self, item: Item, outcome: int | ErrorCode | None) -> None:
        if outcome is ErrorCode.OUTCOME_UNKNOWN:
            self._settle(item, self._shadow.unknown)
        elif isinstance(outcome, ErrorCode):
            self._settle(item, lambda token: self._shadow.refused(token, outcome))
        elif outcome is None:
            self._settle(item, self._shadow.unknown)
        else:  # what is told of a former life is kept as well as this log can
            ack = Ack(self._log_level, outcome, duplicate=True)
            self._settle(item, lambda token: self._shadow.acknowledged(token, ack))

    def _note(self, item: Item, told: Receipt, of_life: int, life: Life | None) -> None:
        """An outcome came. What a process hears after its end, it does not hear."""
        if item.settled or of_life != self._life or (life is not None and life.over):
            return
        refusal = told.refusal()
        if refusal is None:
            if told.acknowledged:
                self._acknowledge(item, told.result())
        elif refusal.retryable:
            item.standing = True
        elif refusal.code is ErrorCode.DOT_REUSED or refusal.voids:
            self._refuse(item, refusal)
        elif refusal.code is ErrorCode.OUTCOME_UNKNOWN:
            item.standing = True
            self._note_unknown(item)
        else:
            item.standing = True  # the handle is void, not the delta: FENCED, SHUTTING_DOWN for good

    async def _number_remotely(self, producer: RemoteProducer) -> None:
        self._life += 1
        of_life = self._life

        async def offer(item: Item) -> None:
            self._send(item)
            item.standing = False
            while True:
                try:
                    producer.offer_numbered(
                        item.number, item.said[0].delta, lambda told: self._note(item, told, of_life, None)
                    )
                except Refused as refusal:
                    if refusal.voids:
                        self._refuse(item, refusal)
                        return
                    if refusal.code is not ErrorCode.QUEUE_FULL:
                        raise
                    await anyio.sleep(AGAIN_S)
                else:
                    return

        for item in list(self._box.items.values()):
            await offer(item)
        while not self.done:
            if any(item.standing for item in self._box.items.values()):
                return  # a client gives a number up once; the next one sends it again
            if self._box.made < self._deltas:
                await offer(self._make(1))
                await self._rest_behind_burst()
            else:
                await anyio.sleep(AGAIN_S)
                await producer.flush()

    # --- published

    async def _publish_all(self, publish: Publish, *, level: bool = False) -> None:
        for item in list(self._box.items.values()):
            await self._publish(publish, item, level=level)
        while self._box.made < self._deltas:
            item = self._make(self._chance.randint(1, self._burst))
            await self._publish(publish, item, level=level)
            await self._rest()

    async def _publish(self, publish: Publish, item: Item, *, level: bool) -> None:
        self._send(item)
        if not self._identified:  # it is not sent again: nobody could tell a second one from the first
            del self._box.items[item.number]
        more = {"ack_level": self._level} if level else {}
        doubtful = True
        try:
            published = await publish(*item.deltas, timeout_s=self._patience_s, **more)
            doubtful = False
            self._acknowledge(item, published)
        except Refused as refusal:
            doubtful = refusal.code is ErrorCode.OUTCOME_UNKNOWN
            if refusal.voids or not (doubtful or self._identified):
                self._refuse(item, refusal)  # it has not happened, and is not sent again
            elif not (doubtful or refusal.retryable):
                raise
        finally:
            if doubtful:
                self._note_unknown(item)

    # --- what all do

    def _make(self, count: int) -> Item:
        box = self._box
        chance, priority = self._chance, Priority.NORMAL
        if box.made and chance.random() < 0.2:
            priority = chance.choice(list(Priority))
        causes = self._shadow.dots()
        identified = chance.random() < 0.2 if self._numbered else self._identified
        said = [] if box.made else [self._words.first(identified=identified)]
        while len(said) < min(count, max(self._deltas - box.made, 1)):
            said.append(self._words.next(priority, causes, self._heads, identified=identified))
        box.made += len(said)
        box.last += 1
        item = box.items[box.last] = Item(box.last, said)
        return item

    def _send(self, item: Item) -> None:
        for one in item.said:
            ref = (one.delta.namespace, one.delta.vector_id)
            self._shadow.sent(one.token, self.node, self.name, ref, self._level)

    def _note_unknown(self, item: Item) -> None:
        """Count an unknown outcome; give the item up after UNKNOWN_MAX, as the log has let go of it."""
        item.unknown += 1
        for one in item.said:
            self._shadow.unknown(one.token)
        if item.unknown == UNKNOWN_MAX:
            self._settle(item, self._shadow.unknown)

    def _settle(self, item: Item, tell: Callable[[str], None]) -> None:
        item.settled = True
        self._box.items.pop(item.number, None)
        for one in item.said:
            tell(one.token)

    def _refuse(self, item: Item, refusal: Refused) -> None:
        self._words.forget()
        self._settle(item, lambda token: self._shadow.refused(token, refusal.code))

    def _acknowledge(self, item: Item, published: Published) -> None:
        item.settled = True
        self._box.items.pop(item.number, None)
        for one, (offset, dot, duplicate) in zip(item.said, published.places(), strict=True):
            ack = Ack(published.level, offset, duplicate=duplicate)
            lasting = dot if published.level is AckLevel.DURABLE else None
            self._shadow.acknowledged(one.token, ack, lasting)
            if lasting is not None and one.delta.vector_id in HOT:
                head = (one.delta.namespace, one.delta.vector_id, lasting)
                self._heads = [*self._heads, head][-4:]

    async def _rest_behind_burst(self) -> None:
        if self._box.made % self._burst == 0:
            await self._rest()

    async def _rest(self) -> None:
        await anyio.sleep(self._chance.expovariate(1 / self._gap_s) if self._gap_s > 0 else 0)


async def _offered(
    propagator: Propagator, *deltas: Delta, timeout_s: float, ack_level: AckLevel | None
) -> Published:
    """Offer, and wait for what the receipt says, however long that takes. Raises Refused."""
    return await propagator.offer(*deltas, ack_level=ack_level)
