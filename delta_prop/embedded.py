"""The propagator: the whole service inside a program. `async with Propagator() as p:` and publish.

It owns every task and every limit; nothing outlives the `async with`.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import anyio
import anyio.lowlevel
import numpy as np

from delta_prop.attached import Attached, Start, vector_history
from delta_prop.checks import (
    Cause,
    check_columns,
    check_deltas,
    check_level,
    is_transform,
    parse_topics,
    with_parents,
)
from delta_prop.config import Settings
from delta_prop.ingest.lanes import Lanes
from delta_prop.ingest.origins import Origins
from delta_prop.ingest.seen_ids import SeenIds
from delta_prop.ingest.vectors import Vectors
from delta_prop.ingest.work import Draft, MatrixDraft
from delta_prop.line import ROOM_CODES, Line
from delta_prop.order.orderer import Orderer
from delta_prop.pipeline import Chain
from delta_prop.producer import Producer
from delta_prop.receipt import Published, Receipt, State
from delta_prop.route.feed import Feed
from delta_prop.route.status import FeedLimits, KeptCursor
from delta_prop.route.subscription import Subscription
from delta_prop.route.table import Table
from delta_prop.transforms import Transforms
from delta_prop.world import real_world
from delta_prop_broker.log.memory import MemoryLog
from delta_prop_sinks.sink import HoldsVectors
from delta_prop_wire.delta import DEFAULT_NAMESPACE, AckLevel, Delta, Dot, Kind, Priority, Source
from delta_prop_wire.errors import Refused, UsageError
from delta_prop_wire.spec import PRODUCER_ID_BITS, ErrorCode
from delta_prop_wire.topics import Topic

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import TracebackType

    from numpy.typing import ArrayLike, NDArray

    from delta_prop.ingest.lanes import LanesStatistics
    from delta_prop.order.orderer import OrdererStatistics
    from delta_prop.ports import World
    from delta_prop.route.status import FeedStatistics
    from delta_prop_broker.log.contract import Log
    from delta_prop_broker.log.memory import MemoryLogStatistics
    from delta_prop_sinks.sink import Sink
    from delta_prop_wire.batch import LoggedBatch

    S = TypeVar("S", bound=Sink)

Named: TypeAlias = Receipt | Cause
"""What `after=` takes: a receipt, an acknowledgement, a dot, a 16-byte id."""

PASSING_CODES = ROOM_CODES | {ErrorCode.PENDING_FULL, ErrorCode.RATE_LIMITED}
"""Refusals that `publish` waits out."""
_TICK_S_MAX = 1.0
_GIVE_WAY_S = 0.0005


@dataclass(frozen=True, slots=True)
class Statistics:
    """A snapshot of everything, in deltas, bytes and offsets as named."""

    accepted: int
    duplicates: int
    voided: int
    refused: int
    conflicts: int
    queue: LanesStatistics
    pending: OrdererStatistics
    log: MemoryLogStatistics
    sinks: Mapping[str, FeedStatistics]
    memory_bytes_max: int


class Propagator:
    """Takes deltas, orders them, logs them in memory, brings them to every attached sink.

    *Resources*: one task a sink, one for time-outs; a thread for a sink that asks for one. All end with
    the `async with`, sinks closed under `close_timeout_s`.
    *Errors*: what a caller gets is `Refused` with a code; a failing sink stops alone and says why in
    `statistics()`.
    """

    def __init__(self, settings: Settings | None = None, *, world: World | None = None) -> None:
        self.settings = settings or Settings()
        self._given_world = world
        self._exit = AsyncExitStack()
        self._attached: dict[str, Attached] = {}
        self._cursors: dict[str, KeptCursor] = {}
        self._transforms = Transforms()
        self._subscriptions = 0
        self._line = Line()
        self._yielded_at = 0.0
        self._open = self._closing = False

    # --- life

    async def __aenter__(self) -> Propagator:
        if self._open:
            raise UsageError("this propagator is open already: make another one")
        self._world = self._given_world or real_world()
        randomness, settings = self._world.randomness, self.settings
        self._cursors.clear()  # they were of another log
        self._log: Log = MemoryLog(
            randomness.bytes(16), deltas_max=settings.log_deltas_max, bytes_max=settings.log_bytes_max
        )
        self._table: Table[Feed] = Table()
        self._chain = self._make_chain(int.from_bytes(randomness.bytes(6), "big") >> (48 - PRODUCER_ID_BITS))
        await self._exit.__aenter__()
        self._tasks = await self._exit.enter_async_context(anyio.create_task_group())
        self._open = True
        self._tasks.start_soon(self._tick)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        self._open, self._closing = False, True
        self._chain.close(self._now())
        failures = await self._close_all()
        self._closing = False
        self._tasks.cancel_scope.cancel()
        if isinstance(error, anyio.get_cancelled_exc_class()):
            return await self._exit.__aexit__(kind, error, trace)
        # The program's own exception goes on as it is; handed to the task group it would come out in a group.
        await self._exit.__aexit__(None, None, None)
        if error is None and failures:
            raise failures[0] if len(failures) == 1 else ExceptionGroup("sinks failed to close", failures)
        return None

    # --- sinks

    async def attach(
        self,
        sink: S,
        *,
        topics: str | Iterable[str] = "*",
        name: str | None = None,
        start: Start = "resume",
        required: bool = True,
        batch_deltas: int | None = None,
        linger_ms_max: float | None = None,
    ) -> S:
        """Open a sink and bring it every delta of these topics, from where it stopped; return it.

        `start`: `resume` (its own cursor, else offset 0), `earliest` (what the log still has), `latest`,
        or an offset. `required`: the log keeps what this sink has not dealt with, and refuses
        publishes rather than drop it. Raises Refused (CURSOR_TOO_OLD), UsageError, what the sink raises.
        """
        self._check_open()
        name = name or getattr(sink, "name", None)
        if not isinstance(name, str):
            raise UsageError(f"{sink!r:.80} has no name: give a sink, whose contract is in delta_prop.sinks")
        if any(one.sink is sink for one in self._attached.values()):
            raise UsageError("this sink is attached already, under another name: make another one")
        if name in self._attached:
            raise UsageError(f"a sink named {name!r} is attached already: detach it, or give another name")
        limits = self._limits(batch_deltas, linger_ms_max)
        await self._attach(name, sink, parse_topics(topics), start, required=required, limits=limits)
        return sink

    async def _attach(
        self,
        name: str,
        sink: Sink,
        topics: Sequence[Topic],
        start: Start,
        *,
        required: bool,
        limits: FeedLimits,
        on_progress: Callable[[], None] | None = None,
    ) -> Feed:
        asked = frozenset(map(str, topics))
        attached = Attached(name, sink, self._log, self._world, asked)
        begin, keeps_cursor = await attached.open(start, self._cursors.get(name, KeptCursor(0, 0)))
        if name in self._attached or not self._open:  # while the sink opened
            await sink.aclose()
            self._check_open()
            raise UsageError(f"a sink named {name!r} was attached meanwhile: give this one another name")
        try:
            self._note_past(attached, begin)
        except UsageError:
            await sink.aclose()
            raise
        feed = Feed(
            name,
            sink,
            log=self._log,
            table=self._table,
            world=self._world,
            limits=limits,
            start=begin,
            keeps_cursor=keeps_cursor,
            reported=attached.reported,
            on_progress=on_progress or self._line.ring,
        )
        attached.feed = feed
        self._attached[name] = attached
        self._table.subscribe(feed, topics)
        if required:
            self._log.hold(name, lambda: feed.committed)
        self._tasks.start_soon(attached.run)
        return feed

    async def detach(self, name: str) -> None:
        """Let a sink go: it is closed, its cursor stays with it, the log keeps nothing for it."""
        self._require(name)
        with anyio.CancelScope(shield=True):
            await self._close(name)

    def restart(self, name: str) -> None:
        """Let a stopped sink go on from its cursor."""
        self._require(name).require_feed().restart()

    async def wait_visible(
        self,
        published: Published | Receipt | int,
        *,
        sinks: Iterable[str] | None = None,
        committed: bool = False,
        timeout_s: float | None = None,
    ) -> None:
        """Wait until these sinks (all, if none are named) have applied a delta: read your own write.

        `committed`: until it is durable there. A subscription counts only where it is named, as its
        reader may be the caller. Raises TimeoutError, Refused if a sink stops or is detached.
        """
        self._check_open()
        if isinstance(published, Receipt):
            published = await published.wait()
        offset = published.next_offset if isinstance(published, Published) else published
        if not isinstance(offset, int):
            raise UsageError(f"{published!r:.80}: give what publish returned, a receipt, or an offset")
        if offset > self._log.visible:
            raise UsageError(f"offset {offset} is not in the log yet, which ends at {self._log.visible}")
        names = list(self._listed() if sinks is None else sinks)
        feeds = [self._require(name).require_feed() for name in names]
        limit = self.settings.publish_timeout_s if timeout_s is None else timeout_s
        with anyio.fail_after(limit):
            for feed in feeds:
                await feed.wait(offset, committed=committed)

    # --- publishing

    def offer(
        self, *deltas: Delta, after: Sequence[Named] = (), ack_level: AckLevel | None = None
    ) -> Receipt:
        """Send deltas down the chain; never waits. The receipt tells what became of them.

        All deltas of one call have one priority and share one fate. Raises InvalidDelta.
        """
        return self._send(self._draft(deltas, after, ack_level))

    async def publish(
        self,
        *deltas: Delta,
        after: Sequence[Named] = (),
        ack_level: AckLevel | None = None,
        timeout_s: float | None = None,
    ) -> Published:
        """Send deltas and wait for the acknowledgement, through a full queue or log too, in order.

        Raises Refused; where the cause might have passed, after `timeout_s`. Cancelled (by a
        scope of anyio's): it never happened. A task cancelled past anyio in the very tick of the
        acknowledgement cannot be told; the receipt that `offer` gives tells always.
        """
        self._check_open()
        if any(map(is_transform, deltas)):
            return await self._publish_transform(deltas, after, ack_level, timeout_s)
        priority = deltas[0].priority if deltas else Priority.NORMAL
        return await self._put(lambda: self._draft(deltas, after, ack_level), priority, timeout_s)

    async def publish_many(
        self,
        ids: Sequence[str],
        matrix: ArrayLike,
        *,
        namespace: str = DEFAULT_NAMESPACE,
        kind: Kind = Kind.CREATE,
        priority: Priority = Priority.NORMAL,
        ack_level: AckLevel | None = None,
        timeout_s: float | None = None,
    ) -> Published:
        """Publish whole vectors as columns: row i of `matrix` (n × dimension) is the vector `ids[i]`.

        `kind` is CREATE or DENSE. Raises as `publish` does.
        """
        self._check_open()
        rows = check_columns(ids, matrix, namespace=namespace, kind=kind, priority=priority)
        level = self._level(ack_level)

        def make() -> MatrixDraft:
            return MatrixDraft(
                keys=ids,
                matrix=rows,
                namespace=namespace,
                kind=kind,
                receipt=Receipt(),
                priority=priority,
                ack_level=level,
            )

        return await self._put(make, priority, timeout_s)

    def producer(
        self, name: str, *, ack_level: AckLevel | None = None, source: Source = Source.LOCAL
    ) -> Producer:
        """A handle with dots of its own; whoever held the name before is fenced. Raises Refused."""
        self._check_open()
        level = self._level(ack_level)
        return Producer(name, self._chain, now=self._now, ack_level=level, source=source)

    def register_transform(
        self, name: str, function: Callable[[NDArray[np.float32]], ArrayLike], *, reads: str
    ) -> None:
        """Let deltas apply `function` to a vector, as `transform(name)`; it is read from the sink `reads`."""
        self._transforms.register(name, function, reads)

    # --- reading

    def subscribe(self, *topics: str, start: Start = "latest", name: str | None = None) -> Subscription:
        """An async iterator over the deltas of these topics (all, if none), as `Delivered`.

        It is pulled at the reader's pace: a slow one reads the log. It holds nothing back, so one that
        falls behind the log's bounds gets Refused (CURSOR_TOO_OLD).
        """
        self._check_open()
        self._subscriptions += 1
        parsed = parse_topics(topics or "*")
        begin: Start = self._log.visible if start == "latest" else start

        async def attach(subscription: Subscription) -> Feed:
            self._check_open()
            return await self._attach(
                subscription.name,
                subscription,
                parsed,
                begin,
                required=False,
                limits=self._limits(None, None),
                on_progress=subscription.ring,
            )

        return Subscription(name or f"subscription-{self._subscriptions}", attach, self.detach)

    def head(self, vector_id: str, namespace: str = DEFAULT_NAMESPACE) -> Dot | None:
        """The dot of a vector's last delta, for `expect=`; None where none is known."""
        self._check_open()
        head = self._chain.appender.vectors.head(namespace, vector_id)
        if head is None and self._chain.appender.vectors.may_lack(namespace):
            head = self._load_head(namespace, vector_id)
        return head

    def sink(self, name: str) -> Sink:
        """The attached sink of that name."""
        return self._require(name).sink

    def statistics(self) -> Statistics:
        """A snapshot of everything."""
        chain, counters = self._chain, self._chain.appender.counters
        log = self._log
        assert isinstance(log, MemoryLog)
        return Statistics(
            accepted=counters.accepted,
            duplicates=counters.duplicates,
            voided=counters.voided,
            refused=chain.refused,
            conflicts=chain.appender.vectors.conflicts,
            queue=chain.lanes.statistics(),
            pending=chain.orderer.statistics(),
            log=log.statistics(),
            sinks={name: one.require_feed().statistics() for name, one in self._attached.items()},
            memory_bytes_max=self.settings.memory_bytes_max(len(self._attached)),
        )

    # --- inside

    def _make_chain(self, own_producer_id: int) -> Chain:
        settings = self.settings
        ids = SeenIds(generation_ids=settings.id_generation, generations_max=settings.id_generations_max)
        return Chain(
            self._log,
            own_producer_id=own_producer_id,
            lanes=Lanes(
                capacity_deltas=settings.queue_deltas_max,
                capacity_bytes=settings.queue_bytes_max,
                high=settings.queue_high_mark,
                low=settings.queue_low_mark,
                ageing_s=settings.queue_ageing_s,
            ),
            orderer=Orderer(
                knows_id=ids.__contains__,
                ids_kept_since=lambda: f"offset {ids.kept_since}",
                pending_deltas_max=settings.pending_deltas_max,
                pending_bytes_max=settings.pending_bytes_max,
                pending_time_s_max=settings.pending_time_s_max,
            ),
            ids=ids,
            route=self._route,
            wall_us=self._world.clock.wall_us,
            origins=Origins(origins_max=settings.origins_max, per_owner_max=settings.origins_per_owner_max),
            vectors=Vectors(heads_max=settings.heads_max),
            load_head=self._load_head,
        )

    def _limits(self, batch_deltas: int | None, linger_ms_max: float | None) -> FeedLimits:
        settings = self.settings
        if batch_deltas is not None and not 1 <= batch_deltas <= settings.merge_deltas_max:
            raise UsageError(
                f"batch_deltas {batch_deltas}: give 1 to {settings.merge_deltas_max} (merge_deltas_max)"
            )
        if linger_ms_max is not None and not linger_ms_max >= 0:
            raise UsageError(f"linger_ms_max {linger_ms_max}: give 0 or more")
        return FeedLimits(
            mailbox_deltas_max=settings.mailbox_deltas_max,
            mailbox_bytes_max=settings.mailbox_bytes_max,
            batch_deltas=settings.batch_deltas if batch_deltas is None else batch_deltas,
            linger_ms_max=settings.linger_ms_max if linger_ms_max is None else linger_ms_max,
            merge_deltas_max=settings.merge_deltas_max,
        )

    def _now(self) -> float:
        return self._world.clock.now()

    def _require(self, name: str) -> Attached:
        if name not in self._attached:
            raise UsageError(f"no sink named {name!r} is attached; attached are {sorted(self._attached)}")
        return self._attached[name]

    def _level(self, asked: AckLevel | None) -> AckLevel:
        return self._log.level if asked is None else check_level(asked)

    def _listed(self) -> Iterator[str]:
        """The attached sinks that are no subscriptions."""
        return (name for name, one in self._attached.items() if not isinstance(one.sink, Subscription))

    def _check_open(self) -> None:
        if self._closing:
            raise Refused(
                ErrorCode.SHUTTING_DOWN,
                "the propagator is closing: publish before the `async with` ends, or in the next one",
                retry_after_ms=1000,
            )
        if not self._open:
            raise UsageError("the propagator is not open: use it inside `async with Propagator() as p:`")

    def _route(self, logged: LoggedBatch) -> None:
        for feed, rows in self._table.plan(logged.batch):
            feed.offer(logged, rows)

    def _load_head(self, namespace: str, vector_id: str) -> Dot | None:
        """The last dot of a vector that the table of heads does not hold: from the log, else from a sink."""
        found: Dot | None = None
        for logged, row in vector_history(self._log, namespace, vector_id):
            found = logged.batch.dot(row)
        for attached in self._attached.values():
            if found is None and isinstance(attached.sink, HoldsVectors):
                found = attached.sink.head(namespace, vector_id)
        return found

    def _note_past(self, attached: Attached, begin: int) -> None:
        """Go on above what a sink holds of an earlier log: its Lamport numbers, its vectors."""
        appender = self._chain.appender
        if not attached.has_past and attached.lamport <= appender.lamport:
            return
        if begin < self._log.visible:
            # Their Lamport numbers are below those of the past: they would be folded underneath it.
            raise UsageError(
                f"sink {attached.name!r} holds deltas of an earlier log, and {self._log.visible - begin} "
                'were published before it: attach it first, or with start="latest" to go without those'
            )
        dimensions = attached.sink.dimensions() if isinstance(attached.sink, HoldsVectors) else {}
        appender.vectors.note_past(dimensions)
        appender.lamport = max(appender.lamport, attached.lamport)

    def _draft(self, deltas: Sequence[Delta], after: Sequence[Named], ack_level: AckLevel | None) -> Draft:
        self._check_open()
        check_deltas(deltas)
        deltas = with_parents(deltas, [one for one in after if not isinstance(one, Receipt)])
        return Draft(
            deltas=deltas,
            receipt=Receipt(),
            priority=deltas[0].priority,
            ack_level=self._level(ack_level),
            source=deltas[0].source,
            after=tuple(one for one in after if isinstance(one, Receipt)),
        )

    def _send(self, draft: Draft | MatrixDraft) -> Receipt:
        self._check_open()
        return self._chain.offer(draft, self._now())

    async def _put(
        self, make: Callable[[], Draft | MatrixDraft], priority: Priority, timeout_s: float | None
    ) -> Published:
        """Offer; while there is no room, wait in line and offer again."""
        receipt = _NO_RECEIPT

        def send() -> Receipt:
            nonlocal receipt
            receipt = self._send(make())
            return receipt

        if not self._line.waited_for(priority):
            send()
            if receipt.state is State.ACKNOWLEDGED or (receipt.done and not _may_pass(receipt)):
                await self._give_way()
                return receipt.result()
        limit = self.settings.publish_timeout_s if timeout_s is None else timeout_s
        with anyio.move_on_after(limit):
            while True:
                if receipt is _NO_RECEIPT or _needs_room(receipt):
                    await self._line.until_room(send, priority)
                try:
                    return await receipt.wait()
                except Refused as refused:
                    if refused.code in (ErrorCode.PENDING_FULL, ErrorCode.RATE_LIMITED):
                        await anyio.sleep((refused.retry_after_ms or 10) / 1000)
                        send()
                    elif refused.code not in ROOM_CODES:
                        raise
        raise receipt.refusal() or _late(limit)

    async def _give_way(self) -> None:
        """Let the sinks' tasks run now and then, or a busy publisher would starve them.

        Shielded: a cancelled caller must not take what has happened for what has not.
        """
        now = self._now()
        if now - self._yielded_at >= _GIVE_WAY_S:
            await anyio.lowlevel.cancel_shielded_checkpoint()
            self._yielded_at = self._now()

    async def _publish_transform(
        self,
        deltas: Sequence[Delta],
        after: Sequence[Named],
        ack_level: AckLevel | None,
        timeout_s: float | None,
    ) -> Published:
        if len(deltas) != 1:
            raise UsageError("a transform reads before it writes: publish it alone")

        async def publish(resolved: Delta) -> Published:
            return await self._put(
                lambda: self._draft([resolved], after, ack_level), resolved.priority, timeout_s
            )

        async def catch_up(name: str) -> None:
            await self.wait_visible(self._log.visible, sinks=[name], timeout_s=timeout_s)

        return await self._transforms.publish(deltas[0], reader=self.sink, catch_up=catch_up, publish=publish)

    async def _tick(self) -> None:
        while True:
            deadline = self._chain.tick(self._now())
            wait_s = _TICK_S_MAX if deadline is None else min(max(deadline - self._now(), 0), _TICK_S_MAX)
            await anyio.sleep(max(wait_s, 0.001))

    async def _close_all(self) -> list[Exception]:
        """Close all sinks at once, however the block ends: each keeps what it has."""
        failures: list[Exception] = []

        async def close(name: str) -> None:
            if self._attached[name].closing:
                return
            try:
                await self._close(name)
            except Exception as failure:  # of one sink; the others are to end well
                failures.append(failure)

        with anyio.CancelScope(shield=True):
            async with anyio.create_task_group() as closing:
                for name in list(self._attached):
                    closing.start_soon(close, name)
        return failures

    async def _close(self, name: str) -> None:
        """Let a sink go; its name is taken, and the log keeps what it needs, until that is done."""
        attached = self._attached[name]
        if attached.closing:
            raise UsageError(f"sink {name!r} is being detached already: wait for that")
        attached.closing = True
        feed = attached.require_feed()
        if isinstance(attached.sink, Subscription):
            attached.sink.end()
        try:
            await attached.close(self.settings.close_timeout_s)
        finally:
            self._cursors[name] = feed.kept_cursor
            self._table.unsubscribe(feed)
            self._log.release(name)
            del self._attached[name]


def _may_pass(receipt: Receipt) -> bool:
    refusal = receipt.refusal()
    return refusal is not None and refusal.code in PASSING_CODES


def _needs_room(receipt: Receipt) -> bool:
    refusal = receipt.refusal()
    return refusal is not None and refusal.code in ROOM_CODES


def _late(limit_s: float) -> Refused:
    return Refused(
        ErrorCode.DEP_TIMEOUT,
        f"not acknowledged within {limit_s} s and withdrawn: send it again, or allow more time",
        retry_after_ms=1000,
    )


_NO_RECEIPT = Receipt()
