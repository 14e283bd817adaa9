"""A subscriber over the network: deltas of its topics in log order, each once.

This module waits and wakes; `consumer_state.py` handles deliveries, redeliveries and acknowledgements.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from datetime import datetime
from types import TracebackType
from typing import Literal

import anyio

from delta_prop.calls.argument_checks import parse_topics
from delta_prop.calls.outcomes import Delivered
from delta_prop.client.arguments import parse_credit, parse_members
from delta_prop.client.change_signal import ChangeSignal
from delta_prop.client.closing import close_tasks
from delta_prop.client.connector import Connector
from delta_prop.client.consumer_state import CREDIT, ConsumerState, RequestOutcome
from delta_prop.client.delivered_batch import DeliveredBatch
from delta_prop.client.partition_choice import DEFAULT_STREAM, PartitionChoice
from delta_prop.client.positions import StartPosition, parse_position, resolve_time, time_start
from delta_prop.client.queries import Query
from delta_prop.client.reconnecting_link import ReconnectingLink
from delta_prop.client.session import Session
from delta_prop.client.settings import ClientSettings
from delta_prop.client.stream_lookup import find_partition
from delta_prop.platform.ports import Tls, World
from delta_prop_wire.bounds import check_integer, check_name
from delta_prop_wire.compression import available_codecs
from delta_prop_wire.cursor import Cursor
from delta_prop_wire.delta import Priority, Source
from delta_prop_wire.errors import ProtocolError, Refused, UsageError
from delta_prop_wire.frames import (
    Backpressure,
    Filter,
    FindOffsets,
    Frame,
    Hello,
    Start,
    StartAt,
    Subscription,
    Welcome,
)
from delta_prop_wire.spec import BATCH_ROWS_MAX, VECTOR_ID_BYTES_MAX
from delta_prop_wire.stamp import DEFAULT_LOG, LogName

LAST_ACK_TIMEOUT_S = 1.0
"""Seconds for which closing waits until the last acknowledgement is sent."""
GROUP_BYTES_MAX = 64
WAIT_MS_MAX = 60_000
MEMBER_BYTES = 16


class Subscriber:
    """`async with Subscriber("host:port", "ns:docs") as s: async for offset, lamport, delta in s: …`

    It resumes from its cursor when a connection breaks. With `group`, the service stores the reader's
    cursor: after all deltas before the last one returned (`ack="auto"`), or after `ack(offset)`
    (`"manual"`). One reader of a group at a time gets deltas; the others stand by until it leaves. `seek`
    changes the position, `pause` stops the deltas for a while.

    *Resources*: a connection and its tasks; they end with the `async with`.
    *Errors*: Refused: CURSOR_TOO_OLD if the log no longer has the next rows, UNKNOWN_TOPIC, UNAUTHORIZED;
    UsageError; Unreachable.
    """

    def __init__(
        self,
        addresses: str | Iterable[str],
        *topics: str,
        start: StartPosition | None = None,
        group: str | None = None,
        ack: Literal["auto", "manual"] = "auto",
        sources: Sequence[Source] = (),
        priorities: Sequence[Priority] = (),
        deltas: bool = False,
        credit: tuple[int, int] = CREDIT,
        batch_deltas_max: int = 100,
        wait_ms_max: int = 10,
        compressed: bool = False,
        name: str = "subscriber",
        token: str | None = None,
        tls: Tls | None = None,
        stream: str | int = DEFAULT_STREAM,
        partition: int | None = None,
        log_id: bytes | None = None,
        settings: ClientSettings | None = None,
        world: World | None = None,
    ) -> None:
        """`start`: the position to start at, by default the end of the log. With `group`, only a new group
        starts there, by default at the start of the log; an existing one resumes from its cursor. `sources`,
        `priorities`: deliver only matching deltas with these. `deltas`: request single deltas instead of
        batches. `credit`: the deltas and bytes that may be here and not taken yet. `compressed`: accept
        compressed batches too, whose content may exceed the credit. `name`: shown to operators. `stream` (its
        name or id), `partition`: what it reads; the partition may be left out if the stream has only one.
        `log_id`: the only log that the partition may have.
        """
        if ack not in ("auto", "manual"):
            raise UsageError(f"ack {ack!r}: give auto or manual")
        check_name("name", name, VECTOR_ID_BYTES_MAX)
        if group is not None:
            check_name("group", group, GROUP_BYTES_MAX)
        check_integer("batch_deltas_max", batch_deltas_max, BATCH_ROWS_MAX)
        check_integer("wait_ms_max", wait_ms_max, WAIT_MS_MAX)
        self._connector = Connector(addresses, token=token, tls=tls, settings=settings, world=world)
        self.settings = self._connector.settings
        self.name = name
        self._auto = ack == "auto"
        features = tuple(codec.name.lower() for codec in available_codecs()) if compressed else ()
        self._choice = PartitionChoice(stream, partition)
        log = self._choice.known or DEFAULT_LOG
        self._hello = Hello(
            features=features,
            token=token,
            client=name[:60],
            stream=log.stream,
            partition=log.partition,
        )
        self._template = Subscription(
            1,
            tuple(parse_topics(topics)),
            _parse_start(start, group),
            batch_deltas_max=batch_deltas_max,
            wait_ms_max=wait_ms_max,
            group=group,
            filter=_make_filter(sources, priorities),
            deltas=deltas,
        )
        self._start = start
        self._credit, self._log_id = parse_credit(credit), log_id
        self._last_subscription = 1
        self._sending = self._is_paused = False
        self._on_ready: Callable[[], None] = _ignore
        self._consumer_state = ConsumerState(self._template, credit=self._credit, log_id=log_id)
        self._exit = AsyncExitStack()
        self._state = "not open yet"

    # --- opening and closing

    async def __aenter__(self) -> Subscriber:
        self.begin()
        await self._start_tasks()
        try:
            while not self._consumer_state.started:
                self._check_open()
                await self._changes.wait()
        except BaseException as error:
            await self._close(error)
            raise
        return self

    def begin(self, on_ready: Callable[[], None] | None = None) -> None:
        """Open, for a caller that awaits `run` next, which connects.

        `on_ready` is called when there may be something for `take_batch` or `take_row`.
        """
        if self._state != "not open yet":
            raise UsageError(f"this subscriber is {self._state}: create another one")
        world = self._connector.open()
        self._resolve_start(world.clock.wall_us())
        self._changes = ChangeSignal()
        self._on_ready = on_ready or _ignore
        if self._template.group is not None:
            self._consumer_state.member = world.randomness.bytes(MEMBER_BYTES)
        self._link = ReconnectingLink(self._connector, self)
        self._state = "open"

    async def run(self, is_ended: anyio.Event) -> None:
        """Keep the connection until the event is set, and close; `begin` has been called before."""
        await self._start_tasks()
        try:
            await is_ended.wait()
        except BaseException as error:
            await self.__aexit__(type(error), error, None)
            raise
        await self.__aexit__(None, None, None)

    async def _start_tasks(self) -> None:
        await self._exit.__aenter__()
        tasks = await self._exit.enter_async_context(anyio.create_task_group())
        self._exit.callback(tasks.cancel_scope.cancel)
        tasks.start_soon(self._run)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if not isinstance(error, anyio.get_cancelled_exc_class()):
                with anyio.move_on_after(LAST_ACK_TIMEOUT_S):
                    await self._ack_all()
        except BaseException as cancelled:
            await self._close(cancelled)
            raise
        await self._close(error)

    async def _close(self, error: BaseException | None) -> None:
        self._state = "closed"
        self._consumer_state.fail(UsageError("the subscriber is closed"))
        self._notify()
        await close_tasks(self._exit, error)

    async def _ack_all(self) -> None:
        while (self._consumer_state.has_unacked or self._sending) and self._consumer_state.failure is None:
            self._consumer_state.ack_now()
            self._link.notify()
            await self._changes.wait()

    async def _run(self) -> None:
        try:
            log = await find_partition(self._choice, self._connector)
            self._hello = replace(self._hello, stream=log.stream, partition=log.partition)
            await self._link.run()
        except (Refused, UsageError) as failure:
            self._consumer_state.fail(failure)
        except ProtocolError as failure:
            self._consumer_state.fail(Refused(failure.code, failure.message))
        self._notify()

    # --- reading

    def __aiter__(self) -> Subscriber:
        return self

    async def __anext__(self) -> Delivered:
        while (taken := self.take_row()) is None:
            await self._changes.wait()
        batch, row = taken
        return batch.row(row)

    def batches(self) -> AsyncIterator[DeliveredBatch]:
        """Return an iterator over complete batches, as they come."""
        return _Batches(self)

    async def next_batch(self) -> DeliveredBatch:
        """Wait for the next batch, and return it. Raises the reason why none will come."""
        while (batch := self.take_batch()) is None:
            await self._changes.wait()
        return batch

    def take_batch(self) -> DeliveredBatch | None:
        """Return the next batch if there is one now, else None. Raises the reason why none will come."""
        self._mark_processed()
        batch = None if self._is_paused else self._consumer_state.take()
        if batch is None:
            self._check_open()
        else:
            self._link.notify()
        return batch

    def take_row(self) -> tuple[DeliveredBatch, int] | None:
        """Return the next delta, as its batch and its row there, if there is one now, else None.

        Raises the reason why none will come.
        """
        self._mark_processed()
        taken = None if self._is_paused else self._consumer_state.take_row()
        if taken is None:
            self._check_open()
        elif taken[1] + 1 == taken[0].count or self._template.group is not None:
            self._link.notify()  # the previous row may be acknowledged now, and credit granted
        return taken

    def pause(self) -> None:
        """Return no deltas until `resume`; up to `credit` of them wait here, the others in the log."""
        self._is_paused = True

    def resume(self) -> None:
        """Return deltas again."""
        self._is_paused = False
        if self._state == "open":
            self._notify()

    def mark_processed(self) -> None:
        """Note that all that was returned is processed, if `ack` is auto; requesting more does so, too."""
        self._mark_processed()
        if self._template.group is not None:
            self._link.notify()

    def check(self) -> None:
        """Raise the reason why nothing more comes, if there is one."""
        self._check_open()

    @property
    def log_id(self) -> bytes | None:
        """The log of the service; None before it has answered."""
        return self._consumer_state.log_id

    @property
    def started(self) -> bool:
        """True if the service has answered."""
        return self._consumer_state.started

    @property
    def standing_by(self) -> bool:
        """True while another reader of the group gets the deltas; this one resumes when that one leaves."""
        return self._consumer_state.standing_by

    def ack(self, offset: int) -> None:
        """Note that all deltas up to and including `offset` are processed; this is sent within 0.1 s.

        Raises UsageError.
        """
        self._consumer_state.ack(offset)
        self._link.notify()

    def seek(self, position: StartPosition) -> None:
        """Return the deltas from `position` on next, and drop those received: an offset, "earliest",
        "latest", a time or a cursor of this log.

        A position that the log does not have ends the subscriber, as `start` does. The cursor of a group
        moves with the next acknowledgement; if the position is before the deltas received, it moves there.
        Raises UsageError.
        """
        self._check_open()
        start = parse_position("position", position)
        start = resolve_time("position", position, start, self._connector.world.clock.wall_us())
        self._consumer_state.seek(start, LogName(self._hello.stream, self._hello.partition))
        self._link.notify()

    async def end_offset(self) -> int:
        """Ask for the offset after the last delta that readers can see now. Raises Refused, UsageError."""
        return await self.find_offset(Start(StartAt.LATEST))

    async def offset_for_time(self, time: datetime) -> int:
        """Ask for the offset of the first delta logged at `time` or later; if none is, for the end.

        Raises Refused (BAD_REQUEST if the log is in memory), UsageError.
        """
        return await self.find_offset(time_start("time", time))

    async def find_offset(self, start: Start, partition: int | None = None) -> int:
        """Ask for the offset of a start in the log; `partition`: in another one of the stream.

        Raises Refused, UsageError.
        """
        self._check_open()
        log = LogName(self._hello.stream, self._hello.partition if partition is None else partition)
        queries = self._consumer_state.queries
        query = queries.add(Query(FindOffsets((start,), *log)))
        try:
            self._link.notify()
            while not query.done:
                self._check_open()
                await self._changes.wait()
        finally:
            queries.discard(query)
        if query.found is None:
            assert query.refusal is not None
            raise query.refusal
        return query.found.offsets[0]

    @property
    def manual(self) -> bool:
        """True if only `ack` acknowledges."""
        return not self._auto

    @property
    def cursor(self) -> Cursor | None:
        """The cursor for `start` of a later subscriber: all rows below it are processed."""
        return self._consumer_state.cursor

    @property
    def log_end(self) -> int | None:
        """The end of the log when the service answered."""
        return self._consumer_state.log_end

    @property
    def received(self) -> int:
        """The offset below which everything was received or matches no topic of this subscriber."""
        return self._consumer_state.received

    @property
    def warning(self) -> Backpressure | None:
        """The service's warning that the reader is close to the log start; None: it is not close."""
        return self._consumer_state.warning

    @property
    def waits_for(self) -> Exception | None:
        """The reason why there is no connection, if known."""
        return None if self._state == "not open yet" else self._link.cause

    @property
    def reconnects(self) -> int:
        """Number of reconnects."""
        return self._link.reconnects

    async def add(
        self, *topics: str, sources: Sequence[Source] = (), priorities: Sequence[Priority] = ()
    ) -> int:
        """Add topics, from the current cursor on; return a number for `remove`.

        Raises Refused, UsageError.
        """
        self._check_open()
        self._last_subscription += 1
        subscription = Subscription(
            self._last_subscription,
            tuple(parse_topics(topics)),
            filter=_make_filter(sources, priorities),
            deltas=self._template.deltas,
        )
        await self._wait_request(self._consumer_state.add(subscription))
        return self._last_subscription

    async def remove(self, number: int) -> None:
        """Remove the topics with the number that `add` returned. Raises UsageError."""
        self._check_open()
        await self._wait_request(self._consumer_state.remove(number))

    async def _wait_request(self, outcome: RequestOutcome) -> None:
        self._link.notify()
        while not outcome.done:
            await self._changes.wait()
        if outcome.refusal is not None:
            raise outcome.refusal

    # --- for the link

    def hello(self) -> Hello:
        """Return the hello that opens a connection."""
        return self._hello

    def on_welcome(self, welcome: Welcome, *, same_address: bool) -> None:
        """Note that a hello was answered."""
        self._consumer_state.on_welcome(welcome)

    def on_frame(self, frame: Frame, size: int, now: float) -> bool:
        """Handle a frame; return True if it made progress."""
        made_progress = self._consumer_state.on_frame(frame, size, now)
        self._notify()
        return made_progress

    def data_to_send(self, session: Session, now: float) -> list[bytes]:
        """Return requests, credit and acknowledgements that are due."""
        parts = self._consumer_state.data_to_send(session, now)
        self._sending = bool(parts)
        return parts

    def on_sent(self) -> None:
        """Note that all that `data_to_send` returned was sent."""
        self._sending = False
        self._notify()

    def wait_s(self, now: float) -> float | None:
        """Return the seconds until an acknowledgement is due; None: none will be."""
        return self._consumer_state.wait_s(now)

    def processed_offset(self) -> int | None:
        """Return the processed offset for a heartbeat."""
        return self._consumer_state.processed

    def on_disconnect(self) -> None:
        """Note that the connection is lost."""
        self._sending = False
        self._consumer_state.on_disconnect()
        self._notify()

    # --- helpers

    def _resolve_start(self, now_us: int) -> None:
        """Resolve a start given as a time. Raises UsageError if it lies in the future."""
        start = resolve_time("start", self._start, self._template.start, now_us)
        if start == self._template.start:
            return
        self._template = replace(self._template, start=start)
        self._consumer_state = ConsumerState(self._template, credit=self._credit, log_id=self._log_id)

    def _mark_processed(self) -> None:
        if self._auto:
            self._consumer_state.mark_all_processed()

    def _check_open(self) -> None:
        if self._state != "open":
            raise UsageError(f"subscriber {self.name!r} is {self._state}: use it inside its `async with`")
        if self._consumer_state.failure is not None:
            raise self._consumer_state.failure.with_traceback(None)

    def _notify(self) -> None:
        self._changes.notify()
        self._on_ready()


def _ignore() -> None:
    """Do nothing: no one else waits for this subscriber."""


class _Batches:
    """A subscriber's batches, one after another."""

    def __init__(self, subscriber: Subscriber) -> None:
        self._subscriber = subscriber

    def __aiter__(self) -> _Batches:
        return self

    async def __anext__(self) -> DeliveredBatch:
        return await self._subscriber.next_batch()


def _parse_start(start: StartPosition | None, group: str | None) -> Start:
    if start is None:
        return Start(StartAt.LATEST if group is None else StartAt.GROUP)
    return parse_position("start", start)


def _make_filter(sources: Sequence[Source], priorities: Sequence[Priority]) -> Filter | None:
    if not sources and not priorities:
        return None
    return Filter(
        parse_members("sources", sources, Source), parse_members("priorities", priorities, Priority)
    )
