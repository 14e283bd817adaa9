"""One attached sink: what it is lent, where it starts, its tasks, its end.

Decides nothing about deltas; `route/feed.py` brings them.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from functools import partial
from inspect import isawaitable
from typing import TYPE_CHECKING, Literal, TypeAlias

import anyio

from delta_prop.refusals import HoldsOtherData
from delta_prop.route.late import ReplayRequest
from delta_prop.route.reasons import cannot_be_rebuilt
from delta_prop.route.rebuild import has_snapshot, newest_snapshot, told_from
from delta_prop.route.status import FeedState, text_of
from delta_prop_sinks.pace import Pace
from delta_prop_sinks.sink import HasBackground, ResumePoint, TryAgain
from delta_prop_wire.delta import WHOLE_KINDS, AckLevel, Head, Kind
from delta_prop_wire.errors import DeltaPropError, Refused, UsageError
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping
    from contextlib import AbstractAsyncContextManager

    from delta_prop.append import Appender
    from delta_prop.ports import Clock, Threads, World
    from delta_prop.route.feed import Feed
    from delta_prop.route.quarantine import Quarantine
    from delta_prop.route.status import KeptCursor
    from delta_prop_broker.log.contract import Log
    from delta_prop_sinks.sink import Sink
    from delta_prop_wire.batch import LoggedBatch
    from delta_prop_wire.cursor import Cursor

Start: TypeAlias = Literal["resume", "earliest", "latest"] | int
"""Where a sink begins: where it stopped, at what the log still has, at what comes next, at an offset."""

logger = logging.getLogger("delta_prop")

READ_AGAIN_S = 0.5
"""When a sink reads on for which the log could not be read."""
_READ_ROWS_MAX = 500
_READ_BYTES_MAX = 1024 * 1024
"""What is read of the log at once for the history of vectors: some milliseconds of the event loop."""


class Attached:
    """A sink with its feed; also the `SinkContext` that the sink is lent."""

    def __init__(
        self,
        name: str,
        sink: Sink,
        log: Log,
        world: World,
        topics: frozenset[str] = frozenset("*"),
        *,
        appender: Callable[[], Appender] | None = None,
    ) -> None:
        """`appender`: of the chain, None where there is none."""
        self.name = name
        self.topics = topics
        self.sink = sink
        self.feed: Feed | None = None
        self.quarantine: Quarantine | None = None  # what the feed will have
        self.lamport = 0
        self.reported = 0
        self.closing = False
        self.required = self.gives_way = False
        self.has_past = False  # holds deltas of an earlier log
        self.rebuild: str | None = None  # why it has to be rebuilt before it gets deltas
        self.gate: anyio.Event | None = None  # until this is set it is brought nothing
        self._log = log
        self._world = world
        self._appender = appender
        self._threads: Threads | None = None
        self._scope = anyio.CancelScope()
        self._ended = anyio.Event()

    # --- what the sink is lent

    @property
    def log_id(self) -> bytes:
        """The log that deliveries come from."""
        return self._log.log_id

    @property
    def epoch(self) -> int:
        """That log's epoch."""
        return self._log.epoch

    @property
    def log_start(self) -> int:
        """The oldest offset that the log still holds, or what its snapshot counts in; 0 where that is all."""
        return told_from(self._log)

    @property
    def clock(self) -> Clock:
        """Elapsed and wall time."""
        return self._world.clock

    @property
    def threads(self) -> Threads:
        """A thread of this sink's own, made when first asked for."""
        if self._threads is None:
            self._threads = self._world.new_threads()
        return self._threads

    def own_thread(self) -> AbstractAsyncContextManager[Threads]:
        """A new thread, as long as the scope lasts."""
        return self._world.own_thread()

    def background_thread(self) -> AbstractAsyncContextManager[Threads]:
        """A new thread of low priority, as long as the scope lasts."""
        return self._world.background_thread()

    def committed(self, next_offset: int) -> None:
        """The sink is durable up to here."""
        if self.feed is not None:
            self.feed.note_committed(next_offset)

    def dimension(self, namespace: str) -> int | None:
        """How many numbers the vectors of a namespace have; None while it has none."""
        if self._appender is None or (self.feed is None and self._log.level is AckLevel.MEMORY):
            return None  # what a sink brings to a log in memory is of a past one, whose dimensions are told
        return self._appender().vectors.dimension(namespace) or None

    def first_missing(self, watermarks: Mapping[int, int]) -> int | None:
        """Where the first delta stands that a log with these watermarks lacks; None: none, or not known."""
        return None if self._appender is None else self._appender().first_missing(watermarks)

    def go_back(self, offset: int) -> None:
        """Have deliveries go on from an offset. Raises Refused."""
        if offset < self._log.first_offset:
            raise Refused(ErrorCode.CURSOR_TOO_OLD, f"the log starts at offset {self._log.first_offset}")
        self.require_feed().request(ReplayRequest(None, drop=False, reset_to=offset))

    async def history(self, vectors: Collection[tuple[str, str]]) -> AsyncIterator[tuple[LoggedBatch, int]]:
        """The deltas that the log still holds of some vectors, in log order, as (batch, row).

        Without those in this sink's quarantine, and those dropped from it. However long the log is, reading
        it does not make a call of the sink too long. Raises TryAgain.
        """
        quarantine = self.quarantine if self.feed is None else self.feed.quarantine
        clock = self._world.clock
        pace, since = Pace(clock), clock.now()
        try:
            for place in history_of(self._log, vectors):
                if pace.is_due:
                    await pace.rest()
                    if self.feed is not None:
                        self.feed.note_read(clock.now() - since)
                    since = clock.now()
                if place is None:
                    continue
                logged, row = place
                if (
                    logged.batch.is_state
                    or quarantine is None
                    or not quarantine.withholds(logged.offset + row)
                ):
                    yield place
        except Refused as refused:
            raise TryAgain(f"the log cannot tell what it held: {refused.message}") from None

    # --- life

    def require_feed(self) -> Feed:
        """The feed; it is there once the sink is attached."""
        assert self.feed is not None
        return self.feed

    async def open(
        self, start: Start, kept: KeptCursor, *, rebuilds: bool, forced: bool = False
    ) -> tuple[int, bool]:
        """Open the sink; return its first offset and whether it keeps its cursor itself.

        `kept` is what the service remembers of this name. `rebuilds`: it can be rebuilt, and is where it
        holds nothing whole, or the log no longer has what comes next; with `forced` whatever it holds.
        Raises Refused, what the sink raises.
        """
        opening = self.sink.open(self)
        if not isawaitable(opening):
            raise UsageError(f"sink {self.name!r}: its open() is a plain function: make it an `async def`")
        resume = await opening
        try:
            if resume is not None and not isinstance(resume, ResumePoint):
                raise UsageError(f"sink {self.name!r}: open() gave {resume!r:.80}, not a ResumePoint or None")
            if forced:
                self.rebuild = "its owner asked for it"
            elif kept.rebuilding or (resume is not None and resume.rebuilding):
                self.rebuild = "a rebuild was begun and did not come to its end"
            elif kept.rebuild_asked and await self._can_be_rebuilt(rebuilds):
                self.rebuild = "an operator asked for it"
            if self.rebuild is not None:
                await self._check_can_be_rebuilt(rebuilds)
                return self._log.first_offset, resume is not None
            begin, stopped = self._resumed(start, kept, resume, rebuilds=rebuilds)
            first = self._log.first_offset
            if (
                start in ("resume", "earliest")
                and stopped < first
                and rebuilds
                and await self._has_snapshot()
            ):
                self.rebuild = f"it had come to offset {stopped}, and the log starts at {first}"
                return self._log.first_offset, resume is not None
            self._check_begin(begin, rebuilds=rebuilds)
            return begin, resume is not None
        except (DeltaPropError, OSError):  # the snapshot's disk may fail too
            await self.sink.aclose()
            raise

    def _resumed(
        self, start: Start, kept: KeptCursor, resume: ResumePoint | None, *, rebuilds: bool
    ) -> tuple[int, int]:
        """Where to begin, and how far it is, by what the sink and the service know."""
        if resume is None:
            return self._begin(start, kept.dealt_with), kept.dealt_with
        self.lamport = resume.lamport
        self.has_past = resume.lamport > 0 and resume.cursor.log_id != self._log.log_id
        cursor = resume.cursor
        stopped = cursor.next_offset if cursor.log_id == self._log.log_id else 0
        if cursor.log_id == self._log.log_id:
            self._check_not_ahead(cursor.epoch, max(cursor.next_offset, resume.reach), rebuilds=rebuilds)
            self.reported = stopped
            if stopped >= kept.reported:  # else it lost something since, and reads on from its own
                stopped = max(stopped, kept.dealt_with)
        if self.has_past and self._log.level > AckLevel.MEMORY:
            raise self._of_another_log(cursor, rebuilds=rebuilds)
        # Beside a log in memory a cursor of another log is normal: the sink keeps its data and
        # begins with the new log; Lamport numbers go on above what it holds.
        return self._begin(start, stopped), stopped

    async def _has_snapshot(self) -> bool:
        return await self.threads.run(partial(has_snapshot, self._log))

    async def _can_be_rebuilt(self, rebuilds: bool) -> bool:
        """True if it can be; else the wish is told and passed over, so that the sink goes on as it was."""
        try:
            await self._check_can_be_rebuilt(rebuilds)
        except (UsageError, Refused) as error:
            logger.warning("rebuild of sink %r, as asked, was not done: %s", self.name, error)
            return False
        return True

    async def _check_can_be_rebuilt(self, rebuilds: bool) -> None:
        if not rebuilds:
            raise UsageError(
                f"sink {self.name!r} has to be rebuilt ({self.rebuild or 'an operator asked for it'}), and "
                "cannot be: it is made of deltas, or its topics do not match whole vectors: give it data and "
                "a name of its own"
            )
        if self._log.first_offset and not await self._has_snapshot():
            raise cannot_be_rebuilt(self.name, self._log.first_offset)

    async def run(self) -> None:
        """Deliver, and do the sink's own background work, until closed."""
        feed = self.require_feed()
        try:
            with self._scope:
                if self.gate is not None:
                    await self.gate.wait()
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._background)
                    tasks.start_soon(self._deliver)
        finally:
            self._ended.set()
            if not self._scope.cancel_called:  # ended from outside: nobody is to wait for it
                feed.give_up()

    async def close(self, timeout_s: float) -> None:
        """Bring the sink what the log holds, end its tasks, close it; all under one deadline.

        Of the time, a fifth is left for the end of the tasks and a fifth for the sink's own closing. A sink
        that fails on and on is not waited for.
        """
        feed, deadline = self.require_feed(), self._world.clock.now() + timeout_s
        begun = self.gate is None or self.gate.is_set()
        if begun and feed.state is not FeedState.BREAKER_OPEN:
            with anyio.move_on_after(0.6 * timeout_s), suppress(Refused):
                await feed.wait(self._log.visible)  # if it had stopped, statistics say why
        self._scope.cancel()
        with anyio.move_on_after(deadline - 0.2 * timeout_s - self._world.clock.now()):
            await self._ended.wait()  # a sink that detaches itself cannot end before this does
        feed.give_up()
        with anyio.move_on_after(deadline - self._world.clock.now()):
            await self.sink.aclose()

    # --- helpers

    async def _deliver(self) -> None:
        """Bring the sink its deltas; where that breaks, whatever the sink did, it stops alone."""
        feed = self.require_feed()
        try:
            while True:
                try:
                    await feed.run()
                except OSError as failure:  # of the log's disk, which may get well
                    feed.last_failure = failure
                    await anyio.sleep(READ_AGAIN_S)
        except Exception as failure:
            feed.stop(
                feed.failed(f"its delivery broke with {text_of(failure)}: detach it, and attach it again")
            )

    async def _background(self) -> None:
        """The sink's own work; where that fails, the sink stops alone."""
        if not isinstance(self.sink, HasBackground):
            return
        try:
            await self.sink.background()
        except Exception as failure:
            self.require_feed().stop(
                Refused(
                    ErrorCode.PROCESSING_FAILED,
                    f"sink {self.name!r} has stopped: its background work failed with {text_of(failure)}; "
                    "detach it, and attach it again when that is cured",
                )
            )

    def _begin(self, start: Start, stopped: int) -> int:
        log = self._log
        named: dict[Start, int] = {
            "resume": stopped,
            "earliest": log.first_offset,
            "latest": log.visible,
        }
        begin = named.get(start, start) if isinstance(start, str | int) else -1
        if isinstance(begin, bool) or not isinstance(begin, int) or not 0 <= begin <= log.visible:
            raise UsageError(
                f"start {start!r}: give resume, earliest, latest or an offset from 0 to {log.visible}"
            )
        return begin

    def _check_begin(self, begin: int, *, rebuilds: bool) -> None:
        log = self._log
        if begin < log.first_offset:
            more = "let the log compact, so that it can be rebuilt from a snapshot, " if rebuilds else ""
            raise Refused(
                ErrorCode.CURSOR_TOO_OLD,
                f"sink {self.name!r} needs offset {begin}, but the log starts at {log.first_offset}: "
                f'attach it with start="earliest" to take what is left, {more}or raise the bounds of the log',
                details={"offset": begin, "start_offset": log.first_offset},
            )

    def _of_another_log(self, cursor: Cursor, *, rebuilds: bool) -> Refused:
        empty = "" if self._log.next_offset else ", which is empty"
        return HoldsOtherData(
            f"sink {self.name!r} holds data of another log ({cursor.log_id.hex()}, up to offset "
            f"{cursor.next_offset}), this one is {self._log.log_id.hex()}{empty}",
            rebuilds=rebuilds,
            details={"offset": cursor.next_offset},
        )

    def _check_not_ahead(self, epoch: int, next_offset: int, *, rebuilds: bool) -> None:
        end = self._log.epoch_end(epoch)  # behind it that epoch's tail was lost
        end = self._log.next_offset if end is None else end
        if epoch > self._log.epoch or next_offset > end:
            raise HoldsOtherData(
                f"sink {self.name!r} is ahead: it holds epoch {epoch} up to offset {next_offset}, the log "
                f"epoch {self._log.epoch} up to {end}",
                rebuilds=rebuilds,
                details={"offset": next_offset, "next_offset": end},
            )


def head_of(history: Iterable[tuple[LoggedBatch, int] | None]) -> Head | None:
    """The head of the vector whose deltas these are, given in log order; None where there are none."""
    rows = [place for place in history if place is not None]
    alive = False
    for logged, row in sorted(rows, key=lambda one: one[0].key(one[1])):
        kind = logged.batch.kinds[row]
        alive = kind in WHOLE_KINDS or (alive and kind != Kind.DELETE)
    return Head(rows[-1][0].batch.dot(rows[-1][1]), alive) if rows else None


def history_of(log: Log, vectors: Collection[tuple[str, str]]) -> Iterator[tuple[LoggedBatch, int] | None]:
    """The deltas that a log still holds of some vectors, in log order. Reads the whole log.

    Where the log starts later than at 0, its snapshot's rows of the vectors come first. None comes now and
    then, so that who has other things to do need not wait for the next delta. Raises Refused, LogDamaged,
    OSError.
    """
    offset = log.first_offset
    snapshot = newest_snapshot(log) if offset else None
    if snapshot is not None:
        offset = snapshot.offset
        try:
            for namespace, vector_id in sorted(vectors):
                yield snapshot.find(namespace, vector_id)
        finally:
            snapshot.close()
    wanted: dict[str, set[str]] = {}
    for namespace, vector_id in vectors:
        wanted.setdefault(namespace, set()).add(vector_id)
    while batches := log.read(offset, rows_max=_READ_ROWS_MAX, bytes_max=_READ_BYTES_MAX):
        for logged in batches:
            yield from _rows_among(logged, wanted)
        yield None
        offset = batches[-1].next_offset


def _rows_among(logged: LoggedBatch, wanted: Mapping[str, set[str]]) -> Iterator[tuple[LoggedBatch, int]]:
    """The rows of a batch that are of vectors that are wanted."""
    batch = logged.batch
    if batch.is_control:
        return
    if batch.namespace is not None:
        ids = wanted.get(batch.namespace)
        if ids is not None and not ids.isdisjoint(batch.keys):
            yield from ((logged, row) for row, key in enumerate(batch.keys) if key in ids)
    elif not wanted.keys().isdisjoint(batch.namespace_names):
        for row, (namespace, key) in enumerate(zip(batch.namespaces, batch.keys, strict=True)):
            if key in wanted.get(namespace, ()):
                yield logged, row
