"""A producer over the network: deltas under dots of its own, sent until each has its outcome.

It waits and wakes; what is sent, sent again and told is `outgoing.py`'s.
"""

from __future__ import annotations

import math
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import anyio

from delta_prop.checks import (
    cause_of,
    check_columns,
    check_deltas,
    looked_over,
    timeout_or,
    with_parents,
)
from delta_prop.client.addresses import parse_addresses
from delta_prop.client.arguments import check_connection, member_of, settings_of
from delta_prop.client.ending import end_tasks
from delta_prop.client.link import Link
from delta_prop.client.offer import Columns, Offer
from delta_prop.client.producing import Producing
from delta_prop.client.refusing import late, left_over
from delta_prop.published import Published, State
from delta_prop.receipt import Receipt
from delta_prop.waking import waker_maker
from delta_prop_wire.bounds import check_level, check_whole
from delta_prop_wire.delta import DEFAULT_NAMESPACE, Delta, Kind, Priority, Source
from delta_prop_wire.errors import PeerError, Refused, UsageError
from delta_prop_wire.spec import PARTITION_BITS, ErrorCode
from delta_prop_wire.validate import is_simple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from types import TracebackType

    from numpy.typing import ArrayLike

    from delta_prop.checks import Cause
    from delta_prop.client.calls import Calls
    from delta_prop.client.counts import Counts
    from delta_prop.client.offer import Place
    from delta_prop.client.settings import ClientSettings
    from delta_prop.ports import Tls, World
    from delta_prop.waking import Waker
    from delta_prop_wire.delta import AckLevel, Dot

_EXPIRE_S = 1.0
"""How often it is looked for what has waited too long."""
_EXPIRE_S_MIN = 0.001


class Producer:
    """`async with Producer("host:port", name="orders") as p: await p.publish(delta)`.

    Deltas are known by (name, counter), so each has one effect however often it is sent. What one turn of the
    event loop publishes goes as one batch a priority. A second producer of the same name fences this one.

    *Resources*: a connection and its tasks; they end with the `async with`, which waits for what is open.
    *Errors*: Refused for a delta; once the producer cannot go on (fenced, not allowed, nobody answers), every
    call raises that.
    """

    def __init__(
        self,
        addresses: str | Iterable[str],
        *,
        name: str,
        token: str | None = None,
        tls: Tls | None = None,
        ack_level: AckLevel | str | None = None,
        source: Source = Source.LOCAL,
        partition: int = 0,
        log_id: bytes | None = None,
        numbered: bool = False,
        settings: ClientSettings | None = None,
        world: World | None = None,
    ) -> None:
        """`addresses`: of one service, tried in turn. `numbered`: all deltas are offered by
        `offer_numbered`, and so share batches. `ack_level`: what an acknowledgement is to promise;
        None: the most that the service grants. `partition`: where this producer writes under the same name to
        several services, the number of this one. `log_id`: the only log that the service may have.
        """
        self.name = name
        self.settings = settings_of(settings)
        check_connection(token, tls, world)
        self._addresses = parse_addresses(addresses)
        self._token = token
        self._tls = tls
        self._ack_level = None if ack_level is None else check_level(ack_level)
        self._source = member_of("source", source, Source)
        check_whole("partition", partition, (1 << PARTITION_BITS) - 1)
        self._partition = partition
        self._log_id = log_id
        self._numbered = numbered
        self._given_world = world
        self._exit = AsyncExitStack()
        self._state = "not open yet"
        self._make(lambda: 0.0)

    def _make(self, chance: Callable[[], float]) -> None:
        self._producing = Producing(
            self.name,
            token=self._token,
            source=self._source,
            ack_level=self._ack_level,
            chance=chance,
            partition=self._partition,
            log_id=self._log_id,
            splits=self._numbered,
        )
        self._out = self._producing.out

    # --- life

    async def __aenter__(self) -> Producer:
        await self.begin()
        try:
            await self.answered()
        except BaseException as error:
            await self._leave(error)
            raise
        return self

    async def begin(self) -> None:
        """Open without waiting until the service answers; `__aexit__` ends it."""
        if self._state != "not open yet":
            raise UsageError(f"this producer is {self._state}: make another one")
        world = self._world = self._given_world or _real_world()
        if world.network is None:
            raise UsageError("this world has no network to connect over")
        self._now = world.clock.now
        self._make(world.randomness.fork("producer").random)
        self._changed = anyio.Event()
        self._waker = waker_maker()
        self._link = Link(
            self._addresses,
            self._producing,
            world=world,
            network=world.network,
            tls=self._tls,
            settings=self.settings,
        )
        await self._exit.__aenter__()
        tasks = await self._exit.enter_async_context(anyio.create_task_group())
        self._exit.callback(tasks.cancel_scope.cancel)
        tasks.start_soon(self._run)
        tasks.start_soon(self._expire)
        self._state = "open"

    async def answered(self) -> None:
        """Wait until the service has answered. Raises Unreachable, Refused, UsageError."""
        await self._link.welcomed.wait()
        self._out.check_open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if not isinstance(error, anyio.get_cancelled_exc_class()):
                with anyio.move_on_after(self.settings.close_s_max):
                    while self._out.open_offers:
                        await self._change()
        except BaseException as cancelled:
            await self._leave(cancelled)
            raise
        left = self._out.open_offers
        await self._leave(error)
        if left and error is None:
            raise left_over(self.name, left)

    async def _leave(self, error: BaseException | None) -> None:
        self._state = "closed"
        self._out.close()
        await end_tasks(self._exit, error)

    async def _run(self) -> None:
        try:
            await self._link.run()
        except (Refused, UsageError) as failure:
            self._out.fail(failure)
        except PeerError as failure:
            self._out.fail(Refused(failure.code, failure.message))
        self._link.welcomed.set()
        self._changed.set()

    async def _expire(self) -> None:
        """Give up what has waited too long, connected or not; who waits in `publish` on the dot."""
        offers_s = self.settings.delivery_s_max
        calls_s = min(self.settings.publish_s_max, offers_s)
        while True:
            oldest, now = self._out.oldest_at(waited_for=True), self._now()
            left_s = calls_s if oldest is None else max(oldest + calls_s - now, _EXPIRE_S_MIN)
            await anyio.sleep(min(_EXPIRE_S, offers_s / 4, left_s))
            self._out.expire(self._now(), offers_s, calls_s)

    # --- what is asked

    @property
    def open_offers(self) -> int:
        """Calls whose outcome is not known yet."""
        return self._out.open_offers

    @property
    def log_id(self) -> bytes | None:
        """The log of the service; None before it has answered."""
        return self._out.log_id

    @property
    def waits_for(self) -> Exception | None:
        """The obstacle for what is open: why there is no connection, or a refusal that may pass."""
        if self._state == "not open yet":
            return None
        return self._link.cause or self._out.waits_for

    def check(self) -> None:
        """Raise why nothing goes any more, or Refused (QUEUE_FULL) where nothing goes now."""
        self._out.check_open()
        self._out.check_room()

    @property
    def reconnects(self) -> int:
        """How often the connection was made anew."""
        return self._link.reconnects

    def watermark(self, priority: Priority = Priority.NORMAL) -> int:
        """The counter up to which the service had dealt with this producer's deltas when it answered."""
        return self._out.watermark(priority)

    def statistics(self) -> Counts:
        """What was sent and what became of it, since this producer was made."""
        return self._out.counts

    # --- what programs call

    def offer(self, *deltas: Delta, after: Sequence[Receipt | Cause] = ()) -> Receipt:
        """Send deltas of one priority. Never waits; the outcome stands in the receipt.

        What may pass is sent again, up to `delivery_s_max`. Raises InvalidDelta, UsageError; Refused
        (QUEUE_FULL) where too much is open, or why the producer cannot go on. No dot is drawn then.
        """
        priority, simple = looked_over(deltas)
        return self._offer(priority, deltas, after, simple=simple)

    async def publish(
        self,
        *deltas: Delta,
        after: Sequence[Receipt | Cause] = (),
        timeout_s: float | None = None,
    ) -> Published:
        """Send and wait for the acknowledgement, through full queues and lost connections.

        Raises Refused; after `timeout_s` with the last refusal, whose text says whether it may have happened
        all the same. Cancelled, it is taken back where it was not under way.
        """
        short = len(deltas) == 1 and not after and timeout_s is None and not self._numbered
        delta = deltas[0] if short else None
        if type(delta) is Delta and is_simple(delta) and self._state == "open":
            waker = self._waker()
            calls = self._out.call(delta, waker, self._now(), self._told)
            if calls is not None:  # the short way
                row = calls.count - 1
                if row == 0:  # who comes later joins before the link has looked
                    self._link.ring()
                del deltas, delta  # while it is under way a batch holds it, and nobody else need
                try:
                    outcome = await waker
                except anyio.get_cancelled_exc_class():
                    outcome = self._call_cancelled(calls, row, waker)
                    if outcome is None:
                        raise
                if type(outcome) is Published:
                    return outcome
                raise outcome
        priority, simple = looked_over(deltas)
        return await self.publish_checked(priority, deltas, simple=simple, after=after, timeout_s=timeout_s)

    async def publish_checked(
        self,
        priority: Priority,
        deltas: Sequence[Delta],
        *,
        simple: bool,
        after: Sequence[Receipt | Cause] = (),
        timeout_s: float | None = None,
    ) -> Published:
        """The rest of `publish`, for who has looked them over."""
        return await self._publish(lambda: self._offer(priority, deltas, after, simple=simple), timeout_s)

    async def publish_many(
        self,
        ids: Sequence[str],
        matrix: ArrayLike,
        *,
        namespace: str = DEFAULT_NAMESPACE,
        kind: Kind = Kind.CREATE,
        priority: Priority = Priority.NORMAL,
        timeout_s: float | None = None,
    ) -> Published:
        """Publish whole vectors as columns: row i of `matrix` (n × dimension) is the vector `ids[i]`.

        `kind` is CREATE or DENSE. Raises as `publish` does.
        """
        rows = check_columns(ids, matrix, namespace=namespace, kind=kind, priority=priority)
        columns = Columns(ids, rows, namespace, kind)
        return await self._publish(lambda: self._offer(priority, (), (), columns=columns), timeout_s)

    def offer_numbered(self, counter: int, delta: Delta, then: Callable[[Receipt], None]) -> None:
        """Send a delta under a counter of the caller's, which rises within a priority and may leave gaps.

        A producer that is `numbered` sends those of one turn as one batch, another one each by itself. `then`
        is called once, with the receipt that tells the outcome, and must not block. A counter that was
        dealt with in a former life is asked about: it is acknowledged as a duplicate with its first offset,
        where that is known, or refused as it was then. Never waits. Raises as `offer` does, and sends nothing
        then.
        """
        self._offer(check_deltas([delta]), [delta], (), counter=counter).when_done(then)

    async def flush(self, timeout_s: float | None = None) -> None:
        """Wait until everything offered so far has its outcome. Raises TimeoutError, or why nothing goes."""
        with anyio.fail_after(timeout_or(timeout_s, self.settings.delivery_s_max)):
            while self._out.open_offers:
                await self._change()
        self._out.check_open()

    # --- helpers

    def _call_cancelled(self, calls: Calls, row: int, waker: Waker) -> Published | Refused | None:
        """Take a call back; its outcome where it was told in the very turn of the cancellation.

        Then it has happened, and a cancelled scope asks again at the next wait.
        """
        if waker.done() and not waker.cancelled() and anyio.current_effective_deadline() == -math.inf:
            outcome: Published | Refused = waker.result()
            return outcome
        self._out.give_up_call(calls, row)
        self._link.ring()
        self._changed.set()
        return None

    def _told(self, outcome: Published | Refused) -> None:
        self._changed.set()

    def _offer(
        self,
        priority: Priority,
        deltas: Sequence[Delta],
        after: Sequence[Receipt | Cause],
        *,
        columns: Columns | None = None,
        counter: int | None = None,
        simple: bool = False,
    ) -> Receipt:
        if self._state != "open":
            raise UsageError(f"producer {self.name!r} is {self._state}: use it inside its `async with`")
        if self._numbered and counter is None:
            raise UsageError(f"producer {self.name!r} is numbered: use offer_numbered")
        causes, places = _named(after)
        if len(deltas) and causes:
            deltas = with_parents(deltas, causes)
        receipt = Receipt()

        def tell(outcome: Published | Refused) -> None:
            if not receipt.done:
                if isinstance(outcome, Published):
                    receipt.acknowledge(outcome)
                else:
                    receipt.refuse(outcome)
            self._changed.set()

        simple = simple and not after
        offer = Offer(priority, deltas, tell, columns=columns, after=places, counter=counter, simple=simple)
        self._out.offer(offer, self._now())
        receipt.item = offer
        receipt.waits(State.QUEUED, lambda: self._give_up(offer))
        self._link.ring()
        return receipt

    def _give_up(self, offer: Offer) -> bool:
        gone = self._out.give_up(offer)
        self._link.ring()
        self._changed.set()
        return gone

    async def _publish(self, send: Callable[[], Receipt], timeout_s: float | None) -> Published:
        limit_s = timeout_or(timeout_s, self.settings.publish_s_max)
        receipt: Receipt | None = None
        offer: object = None
        with anyio.move_on_after(limit_s):
            while receipt is None:
                try:
                    receipt = send()
                    offer = receipt.item
                except Refused as refused:
                    if refused.code is not ErrorCode.QUEUE_FULL or self._out.failure is not None:
                        raise
                    await self._change()
            return await receipt.wait()
        if receipt is None:
            self._out.check_room()
        if receipt is not None and receipt.done and receipt.state is not State.WITHDRAWN:
            return receipt.result()
        raise late(
            offer if isinstance(offer, Offer) else None,
            limit_s,
            gone=receipt is None or receipt.state is State.WITHDRAWN,
        )

    async def _change(self) -> None:
        if self._changed.is_set():
            self._changed = anyio.Event()
        await self._changed.wait()


def _named(after: Sequence[Receipt | Cause]) -> tuple[list[Dot | bytes], list[Place]]:
    """What is known by name already, and what still waits here. Raises UsageError."""
    causes: list[Dot | bytes] = []
    places: list[Place] = []
    for one in after:
        if not isinstance(one, Receipt):
            causes.append(cause_of(one))
        elif isinstance(one.item, Offer):
            places.append(one.item.place)
        else:
            causes.append(cause_of(one.result()))
    return causes, places


def _real_world() -> World:
    from delta_prop.world import real_world

    return real_world()
