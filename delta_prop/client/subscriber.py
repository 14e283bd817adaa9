"""A subscriber over the network: deltas of its topics in the order of the log, each once.

It waits and wakes; what comes, comes again and is dealt with is `incoming.py`'s.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, Literal, TypeAlias

import anyio

from delta_prop.checks import parse_topics
from delta_prop.client.addresses import parse_addresses
from delta_prop.client.arguments import check_connection, credit_of, members_of, settings_of
from delta_prop.client.ending import end_tasks
from delta_prop.client.incoming import CREDIT, Incoming
from delta_prop.client.link import Link
from delta_prop.dates import EXAMPLES, check_past, time_of
from delta_prop.published import Delivered
from delta_prop_wire.bounds import check_name, check_whole
from delta_prop_wire.compression import available
from delta_prop_wire.cursor import Cursor
from delta_prop_wire.delta import Priority, Source
from delta_prop_wire.errors import PeerError, Refused, UsageError
from delta_prop_wire.frames import Filter, Hello, Start, StartAt, Subscription
from delta_prop_wire.spec import BATCH_ROWS_MAX, VECTOR_ID_BYTES_MAX

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Sequence
    from types import TracebackType

    from delta_prop.client.delivered import DeliveredBatch
    from delta_prop.client.incoming import Answer
    from delta_prop.client.session import Session
    from delta_prop.client.settings import ClientSettings
    from delta_prop.ports import Tls, World
    from delta_prop_wire.frames import Backpressure, Frame, Welcome

Place: TypeAlias = str | int | datetime | Cursor
"""Where to start: at an end of the log (`earliest`, `latest`), an offset, a time (a datetime, or text such as
`1h`, `yesterday`, `2026-01-31T12:00:00Z`), or where a cursor stopped.
"""

LAST_ACK_S_MAX = 1.0
"""How long the end waits until what was dealt with is said."""
GROUP_BYTES_MAX = 64
WAIT_MS_MAX = 60_000
MEMBER_BYTES = 16


class Subscriber:
    """`async with Subscriber("host:port", "ns:docs") as s: async for offset, lamport, delta in s: …`

    It goes on where it was when a connection breaks. With `group` the service remembers how far the reader
    has come: what it has come back from (`ack="auto"`), or what it says with `ack(offset)` (`"manual"`). One
    reader of a group at a time gets deltas; the others stand by until it has gone.

    *Resources*: a connection and its tasks; they end with the `async with`.
    *Errors*: Refused: CURSOR_TOO_OLD where the log no longer has what comes next, UNKNOWN_TOPIC,
    UNAUTHORIZED; UsageError; Unreachable.
    """

    def __init__(
        self,
        addresses: str | Iterable[str],
        *topics: str,
        start: Place | None = None,
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
        log_id: bytes | None = None,
        settings: ClientSettings | None = None,
        world: World | None = None,
    ) -> None:
        """`start`: where to begin, without it at the end. With `group` it is where a new group begins,
        without it at the beginning of the log; any other goes on where it has come to. `sources`,
        `priorities`: of what matches, only these. `deltas`: have single deltas sent instead of batches.
        `credit`: deltas and bytes that may lie here unread. `compressed`: take compressed batches too, whose
        content may be larger than the credit says. `name`: for people. `log_id`: the only log that the
        service may have.
        """
        if ack not in ("auto", "manual"):
            raise UsageError(f"ack {ack!r}: give auto or manual")
        check_name("name", name, VECTOR_ID_BYTES_MAX)
        if group is not None:
            check_name("group", group, GROUP_BYTES_MAX)
        check_whole("batch_deltas_max", batch_deltas_max, BATCH_ROWS_MAX)
        check_whole("wait_ms_max", wait_ms_max, WAIT_MS_MAX)
        self.settings = settings_of(settings)
        check_connection(token, tls, world)
        self.name = name
        self._auto = ack == "auto"
        self._addresses = parse_addresses(addresses)
        self._token = token
        self._tls = tls
        self._features = tuple(one.name.lower() for one in available()) if compressed else ()
        self._given_world = world
        self._template = Subscription(
            1,
            tuple(parse_topics(topics)),
            _start(start, group),
            batch_deltas_max=batch_deltas_max,
            wait_ms_max=wait_ms_max,
            group=group,
            filter=_filter(sources, priorities),
            deltas=deltas,
        )
        self._start = start
        self._credit, self._log_id = credit_of(credit), log_id
        self._numbers = 1
        self._sending = False
        self._bell: Callable[[], None] = _silent
        self._in = Incoming(self._template, credit=self._credit, log_id=log_id)
        self._exit = AsyncExitStack()
        self._state = "not open yet"

    # --- life

    async def __aenter__(self) -> Subscriber:
        await self.begin()
        try:
            while not self._in.started:
                self._check_going_on()
                await self._change()
        except BaseException as error:
            await self._leave(error)
            raise
        return self

    async def begin(self, bell: Callable[[], None] | None = None) -> None:
        """Open without waiting until the service answers; `__aexit__` ends it. `bell` rings when there may be
        something for `take_batch`.
        """
        if self._state != "not open yet":
            raise UsageError(f"this subscriber is {self._state}: make another one")
        world = self._given_world or _real_world()
        if world.network is None:
            raise UsageError("this world has no network to connect over")
        self._resolve_time(world.clock.wall_us())
        self._changed = anyio.Event()
        self._bell = bell or _silent
        if self._template.group is not None:
            self._in.member = world.randomness.bytes(MEMBER_BYTES)
        self._link = Link(
            self._addresses,
            self,
            world=world,
            network=world.network,
            tls=self._tls,
            settings=self.settings,
        )
        await self._exit.__aenter__()
        tasks = await self._exit.enter_async_context(anyio.create_task_group())
        self._exit.callback(tasks.cancel_scope.cancel)
        tasks.start_soon(self._run)
        self._state = "open"

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if not isinstance(error, anyio.get_cancelled_exc_class()):
                with anyio.move_on_after(LAST_ACK_S_MAX):
                    await self._say_all()
        except BaseException as cancelled:
            await self._leave(cancelled)
            raise
        await self._leave(error)

    async def _leave(self, error: BaseException | None) -> None:
        self._state = "closed"
        self._in.fail(UsageError("the subscriber is closed"))
        self._note()
        await end_tasks(self._exit, error)

    async def _say_all(self) -> None:
        while (self._in.unsaid or self._sending) and self._in.failure is None:
            self._in.say_now()
            self._link.ring()
            await self._change()

    async def _run(self) -> None:
        try:
            await self._link.run()
        except (Refused, UsageError) as failure:
            self._in.fail(failure)
        except PeerError as failure:
            self._in.fail(Refused(failure.code, failure.message))
        self._note()

    # --- reading

    def __aiter__(self) -> Subscriber:
        return self

    async def __anext__(self) -> Delivered:
        self._come_back()
        while (taken := self._in.take_row()) is None:
            self._check_going_on()
            await self._change()
        batch, row = taken
        if row + 1 == batch.count or self._template.group is not None:  # there may be something to say
            self._link.ring()
        return batch.row(row)

    def batches(self) -> AsyncIterator[DeliveredBatch]:
        """The same in whole batches, as they come."""
        return _Batches(self)

    async def next_batch(self) -> DeliveredBatch:
        """The next batch. Raises why nothing comes any more."""
        self._come_back()
        while (batch := self._in.take()) is None:
            self._check_going_on()
            await self._change()
        self._link.ring()
        return batch

    def take_batch(self) -> DeliveredBatch | None:
        """The next batch if there is one now. Raises why nothing comes any more."""
        self._come_back()
        batch = self._in.take()
        if batch is None:
            self._check_going_on()
        else:
            self._link.ring()
        return batch

    def check(self) -> None:
        """Raise why nothing comes any more."""
        self._check_going_on()

    @property
    def log_id(self) -> bytes | None:
        """The log of the service; None before it has answered."""
        return self._in.log_id

    @property
    def started(self) -> bool:
        """True if the service has answered."""
        return self._in.started

    @property
    def standing_by(self) -> bool:
        """True while another reader of the group gets the deltas; this one goes on when that has gone."""
        return self._in.standing_by

    def ack(self, offset: int) -> None:
        """Everything up to this offset is done with. Never waits; said within 0.1 s. Raises UsageError."""
        self._in.ack(offset)
        self._link.ring()

    @property
    def manual(self) -> bool:
        """Whether only `ack` acknowledges."""
        return not self._auto

    @property
    def cursor(self) -> Cursor | None:
        """Where to start another time: everything below it is done with."""
        return self._in.cursor

    @property
    def log_end(self) -> int | None:
        """Where the log ended when the service answered."""
        return self._in.log_end

    @property
    def received(self) -> int:
        """Everything below this offset came, or is none of this subscriber's business."""
        return self._in.received

    @property
    def warning(self) -> Backpressure | None:
        """How near the reader is to the end of what the log keeps; None: it is not."""
        return self._in.warning

    @property
    def waits_for(self) -> Exception | None:
        """The reason why there is no connection, where that is known."""
        return None if self._state == "not open yet" else self._link.cause

    @property
    def reconnects(self) -> int:
        """How often the connection was made anew."""
        return self._link.reconnects

    async def add(
        self, *topics: str, sources: Sequence[Source] = (), priorities: Sequence[Priority] = ()
    ) -> int:
        """Ask for more topics, from wherever this subscriber is; their number. Raises Refused, UsageError."""
        self._check_going_on()
        self._numbers += 1
        subscription = Subscription(
            self._numbers,
            tuple(parse_topics(topics)),
            filter=_filter(sources, priorities),
            deltas=self._template.deltas,
        )
        await self._answered(self._in.add(subscription))
        return self._numbers

    async def remove(self, number: int) -> None:
        """End topics that were added. Raises UsageError."""
        self._check_going_on()
        await self._answered(self._in.remove(number))

    async def _answered(self, answer: Answer) -> None:
        self._link.ring()
        while not answer.done:
            await self._change()
        if answer.refusal is not None:
            raise answer.refusal

    # --- what the link asks

    def hello(self) -> Hello:
        """What opens a connection."""
        return Hello(features=self._features, token=self._token, client=self.name[:60])

    def welcomed(self, welcome: Welcome, *, same_address: bool) -> None:
        """A hello was answered."""
        self._in.welcomed(welcome)

    def take(self, frame: Frame, size: int, now: float) -> bool:
        """A frame came."""
        got_on = self._in.take_in(frame, size, now)
        self._note()
        return got_on

    def to_send(self, session: Session, now: float) -> list[bytes]:
        """Requests, grants, acknowledgements."""
        parts = self._in.to_send(session, now)
        self._sending = bool(parts)
        return parts

    def sent(self) -> None:
        """What was said is on its way."""
        self._sending = False
        self._note()

    def wait_s(self, now: float) -> float | None:
        """When an acknowledgement is due."""
        return self._in.wait_s(now)

    def dealt_with(self) -> int | None:
        """What a heartbeat says."""
        return self._in.dealt_with

    def disconnected(self) -> None:
        """The connection is gone."""
        self._sending = False
        self._in.disconnected()
        self._note()

    # --- helpers

    def _resolve_time(self, now_us: int) -> None:
        """Have the start say which time is meant by a word. Raises UsageError where that is still to come."""
        given, start = self._start, self._template.start
        if start is None or start.at is not StartAt.TIME:
            return
        time_us = time_of(given, now_us) if isinstance(given, str) else start.value
        assert isinstance(time_us, int), "looked at when this was made"
        check_past("start", str(given), time_us, now_us)
        self._template = replace(self._template, start=Start(StartAt.TIME, max(time_us, 0)))
        self._in = Incoming(self._template, credit=self._credit, log_id=self._log_id)

    def _come_back(self) -> None:
        if self._auto:
            self._in.come_back()

    def _check_going_on(self) -> None:
        if self._state != "open":
            raise UsageError(f"subscriber {self.name!r} is {self._state}: use it inside its `async with`")
        if self._in.failure is not None:
            raise self._in.failure.with_traceback(None)

    def _note(self) -> None:
        self._changed.set()
        self._bell()

    async def _change(self) -> None:
        if self._changed.is_set():
            self._changed = anyio.Event()
        await self._changed.wait()


def _silent() -> None:
    """Nobody else waits for this subscriber."""


class _Batches:
    """A subscriber's batches, one after the other."""

    def __init__(self, subscriber: Subscriber) -> None:
        self._subscriber = subscriber

    def __aiter__(self) -> _Batches:
        return self

    async def __anext__(self) -> DeliveredBatch:
        return await self._subscriber.next_batch()


def _start(start: Place | None, group: str | None) -> Start:
    if start is None:
        return Start(StartAt.LATEST if group is None else StartAt.GROUP)
    if isinstance(start, Cursor):
        return Start(StartAt.CURSOR, start)
    if isinstance(start, datetime):
        if start.tzinfo is None:
            raise UsageError(f"start {start}: a time needs its time zone, such as datetime.timezone.utc")
        return Start(StartAt.TIME, round(start.timestamp() * 1_000_000))
    if isinstance(start, int) and not isinstance(start, bool) and start >= 0:
        return Start(StartAt.OFFSET, start)
    if start in ("earliest", "latest"):
        return Start(StartAt(start))
    if isinstance(start, str) and time_of(start, 0) is not None:
        return Start(StartAt.TIME, 0)  # which time is meant is known when it opens
    raise UsageError(
        f"start {start!r:.60}: give earliest, latest, an offset, a datetime, a Cursor, or {EXAMPLES}"
    )


def _filter(sources: Sequence[Source], priorities: Sequence[Priority]) -> Filter | None:
    if not sources and not priorities:
        return None
    return Filter(members_of("sources", sources, Source), members_of("priorities", priorities, Priority))


def _real_world() -> World:
    from delta_prop.world import real_world

    return real_world()
