"""The propagator: the whole service inside a program. `async with Propagator() as p:` and publish.

It owns every task and every limit; nothing outlives the `async with`.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AsyncExitStack
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING, TypeVar, get_args

import anyio
import anyio.lowlevel

from delta_prop.attached import Start
from delta_prop.attachments import Attachments, OnLogFull, Place, Terms
from delta_prop.backpressure.controller import INTERVAL_S
from delta_prop.checks import check_instance, parse_topics, timeout_or
from delta_prop.config import Settings
from delta_prop.fullness import RoomWatch
from delta_prop.gathering import Gathering
from delta_prop.ingest.epochs import epochs_above, epochs_until
from delta_prop.ingest.lanes import Lanes
from delta_prop.ingest.origins import Origins
from delta_prop.ingest.seen_ids import WAITING_MAX, SeenIds
from delta_prop.ingest.vectors import Vectors
from delta_prop.inside import Inside
from delta_prop.operating import Operating
from delta_prop.order.orderer import Orderer
from delta_prop.outcome_query import outcome_of, settled, until_running
from delta_prop.pacing import differs
from delta_prop.pipeline import Chain
from delta_prop.publishing import Publishing
from delta_prop.receipt import Published, Receipt
from delta_prop.refusals import closed, lost
from delta_prop.route.feed import Feed
from delta_prop.route.subscription import Subscription
from delta_prop.service_log import ServiceLog, check_data
from delta_prop.statistics import Statistics
from delta_prop.turns import Turn
from delta_prop.world import real_world, this_thread
from delta_prop_sinks.bounds import check_sink_name, check_texts
from delta_prop_wire.delta import DEFAULT_NAMESPACE, AckLevel, Dot
from delta_prop_wire.errors import Refused, UsageError
from delta_prop_wire.spec import PRODUCER_ID_BITS, ErrorCode

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path
    from types import TracebackType

    from delta_prop.backpressure.pacer import Pressure
    from delta_prop.ports import World
    from delta_prop.route.feed import Feed
    from delta_prop.route.late import Replayed
    from delta_prop.route.quarantine import SetAside
    from delta_prop_broker.log.parts.recovered import RecoveryReport
    from delta_prop_broker.log.settings import LogSettings
    from delta_prop_sinks.sink import Sink

    S = TypeVar("S", bound=Sink)

_TICK_S_MAX = 1.0
_TICK_S_MIN = 0.001


class Propagator(Publishing):
    """Takes deltas, orders them, logs them in memory, brings them to every attached sink.

    *Resources*: one task a sink, one for time-outs; a thread for a sink that asks for one. All end with
    the `async with`, sinks closed under `close_timeout_s`.
    *Errors*: what a caller gets is `Refused` with a code; a failing sink stops alone and says why in
    `statistics()`.
    """

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        data: str | Path | None = None,
        log: LogSettings | None = None,
        world: World | None = None,
    ) -> None:
        """`data`: the directory that the log is kept in, within `log`; without it, in memory."""
        super().__init__()
        settings = Settings() if settings is None else settings
        self.settings = check_instance("settings", settings, Settings, "delta_prop.Settings(…)")
        self.recovery: RecoveryReport | None = None
        """What was found in the data directory at the last start, or when its log had failed since."""
        self._data, self._log_settings = check_data(data, log)
        self._given_world = world
        self._exit = AsyncExitStack()
        self._subscriptions = 0

    # --- life

    async def __aenter__(self) -> Propagator:
        if self._open_on:
            raise UsageError("this propagator is open already: make another one")
        self._world = self._given_world or real_world()
        self._turn = Turn(self._world.clock.now, self._world.soon)
        settings = self.settings
        if self._data is None:
            self._service_log = ServiceLog.in_memory(settings, self._world)
        else:
            self._service_log = await ServiceLog.in_directory(self._data, self._log_settings, self._world)
        self._log, self.recovery = self._service_log.log, self._service_log.recovery
        self._room = RoomWatch(self._log, self._world.clock)
        self._service_log.commits(
            self._world,
            on_moved=self._note_moved,
            on_failed=self._note_failed,
            on_recovered=self._note_recovered,
            rebuild=self._rebuild,
            turn=self._turn,
        )
        own_producer_id = self._draw_producer_id()
        await self._exit.__aenter__()
        try:
            self._tasks = await self._exit.enter_async_context(anyio.create_task_group())
            self._sinks = Attachments(
                settings,
                self._log,
                self._world,
                self._tasks,
                appender=lambda: self._chain.appender,
                check_open=self._check_open,
                on_progress=self._note_progress,
                kept=self._service_log.cursors,
                disk=self._service_log.disk,
                keep=self._keep_cursors,
                written=lambda: self._service_log.cursors,
            )
            self._chain = self._make_chain(own_producer_id)
            await self._service_log.restore(self._chain, self._world)
            self._operating = await self._see_to_operators()
            self._gathering = Gathering(
                self._chain,
                turn=self._turn,
                now=self._world.clock.now,
                soon=self._world.soon,
            )
        except BaseException:
            try:
                await self._exit.aclose()
            finally:
                await self._service_log.close()
            raise
        self._bell, self._stepped, self._armed = anyio.Event(), anyio.Event(), False
        self._open_on = this_thread()
        self._tasks.start_soon(self._tick)
        self._tasks.start_soon(self._turn.run)
        self._tasks.start_soon(self._gathering.run)
        self._tasks.start_soon(self._pace)
        self._tasks.start_soon(self._service_log.run, self._world)
        self._tasks.start_soon(self._service_log.write_checkpoints)
        self._tasks.start_soon(
            self._service_log.keep_house, self._sinks.cursors, lambda: self._chain.origins, self._world
        )
        self._tasks.start_soon(self._service_log.compress, self._world)
        self._tasks.start_soon(self._service_log.compact, self._world)
        if self._operating is not None:
            self._tasks.start_soon(self._operating.run)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        self._open_on, self._closing = 0, True
        try:
            failures = await self._finish()
        except BaseException as broken_off:  # the interpreter's own: no task stays, and none of its scopes
            self._tasks.cancel_scope.cancel()
            await self._exit.__aexit__(type(broken_off), broken_off, broken_off.__traceback__)
            raise
        self._closing = False
        self._stepped.set()
        self._tasks.cancel_scope.cancel()
        if isinstance(error, anyio.get_cancelled_exc_class()):
            try:
                return await self._exit.__aexit__(kind, error, trace)
            finally:
                await self._close_log()
        # The program's own exception goes on as it is; handed to the task group it would come out in a group.
        await self._exit.__aexit__(None, None, None)
        await self._close_log()
        if error is None and failures:
            raise failures[0] if len(failures) == 1 else ExceptionGroup("sinks failed to close", failures)
        return None

    async def _finish(self) -> list[Exception]:
        """Bring what is on its way to where it is kept, and end the sinks; what failed in that."""
        self._gathering.send()
        self._chain.close(self._now())
        with anyio.CancelScope(shield=True):
            await self._service_log.drain(self.settings.close_timeout_s)
        failures = await self._sinks.close_all()
        try:
            with anyio.CancelScope(shield=True):
                await self._sinks.quarantines.tidy()
                await self._service_log.write_cursors(self._sinks.cursors, self._world.new_threads())
        except OSError as failure:  # told at the end: all else is to end well
            failures.append(failure)
        return failures

    async def _close_log(self) -> None:
        """Commit what is left, and tell those who still wait what became of theirs. Raises OSError."""
        try:
            await self._service_log.close()
        finally:
            self._chain.settling.settle()
            self._chain.settling.fail(closed())

    async def _see_to_operators(self) -> Operating | None:
        """Who does what operators ask through the directory; what was asked meanwhile is done."""
        disk, threads = self._service_log.disk, self._world.new_threads()
        if disk is None:
            return None

        async def keep_cursors() -> None:
            await self._service_log.write_cursors(self._sinks.cursors, threads)

        operating = Operating(disk, self._log.log_id, self._sinks, self._world, keep_cursors)
        await operating.begin()
        return operating

    # --- sinks

    async def attach(
        self,
        sink: S,
        *,
        topics: str | Iterable[str] = "*",
        name: str | None = None,
        start: Start = "resume",
        required: bool = True,
        pacing: bool = False,
        on_log_full: OnLogFull | None = None,
        batch_deltas: int | None = None,
        linger_ms_max: float | None = None,
        rebuild: bool = False,
    ) -> S:
        """Open a sink and bring it every delta of these topics, from where it stopped; return it.

        `start`: `resume` (its own cursor, else offset 0), `earliest` (what the log still has), `latest`,
        or an offset. `required`: the log keeps what this sink has not dealt with; from `pacing_from` of
        its bounds on the sink paces producers, and at the bound `on_log_full` decides: `refuse`
        producers, or let the sink lose its place (`needs_snapshot`: what a sink that can be rebuilt does
        where nothing is said, beside a log that makes snapshots). `pacing`: producers go at this sink's
        pace always, within its mailbox.

        A sink that can be rebuilt is, from a snapshot, where it resumes below what the log still has, or
        where a rebuild was broken off; with `rebuild` whatever it holds, as of another log. What it held is
        replaced. Raises Refused (CURSOR_TOO_OLD, SHUTTING_DOWN), UsageError, OSError and QuarantineDamaged
        where its quarantine cannot be read, what the sink raises.
        """
        self._check_open()
        name = self._sinks.check_free(getattr(sink, "name", None) if name is None else name, sink)
        if not all(isinstance(one, bool) for one in (required, pacing, rebuild)):
            raise UsageError(
                f"required={required!r}, pacing={pacing!r}, rebuild={rebuild!r}: give True or False"
            )
        if on_log_full not in (None, *get_args(OnLogFull)):
            raise UsageError(f"on_log_full {on_log_full!r}: give one of {', '.join(get_args(OnLogFull))}")
        terms = Terms(
            topics=parse_topics(topics),
            start=start,
            limits=self.settings.feed_limits(batch_deltas, linger_ms_max),
            required=required,
            pacing=pacing,
            on_log_full=on_log_full,
            rebuild=rebuild,
        )
        await self._sinks.attach(name, sink, terms)
        return sink

    async def detach(self, name: str) -> None:
        """Let a sink go: it is closed, its cursor and its quarantine wait for its return."""
        self._check_open()
        await self._sinks.detach(name)

    def forget(self, name: str) -> None:
        """Remember nothing of a detached sink: its cursor, its quarantine, what the log kept for it."""
        self._check_open()
        self._sinks.forget(name)

    def restart(self, name: str) -> None:
        """Let a stopped sink go on from its cursor; one whose breaker is open is tried at once."""
        self._check_opened()
        self._sinks.feed(name).restart()

    def rebuild(self, name: str) -> None:
        """Have a sink's data replaced by the newest snapshot of the log and what follows it, or, where the
        log still has all it ever got, by that. `statistics()` tells how far it is, `wait_visible` waits for
        its end. Deltas in its quarantine are in the states, so it is emptied. One that is away is rebuilt
        when it comes back; one whose rebuild has not begun at the end, at the next start. Raises UsageError,
        Refused (CURSOR_TOO_OLD) where there is neither: the sink goes on as it was.
        """
        self._check_open()
        self._sinks.rebuild(name)

    def pause(self, name: str) -> None:
        """Bring a sink nothing until `resume`, after a restart neither; the log keeps what it needs, as for
        one that is away. Raises UsageError.
        """
        self._check_open()
        self._sinks.pause(name)

    def resume(self, name: str) -> None:
        """End a pause: the sink goes on from its cursor, one that has stopped too. Raises UsageError."""
        self._check_open()
        self._sinks.resume(name)

    async def reset(self, name: str, to: Place, *, timeout_s: float = 30.0) -> int:
        """Have a sink go on at `to` (`earliest`, `latest`, an offset); return the offset. What lies behind
        it comes, again or not; what was dropped does not. For sinks whose cursor is kept beside the log.
        Raises Refused, TimeoutError, UsageError.
        """
        self._check_open()
        return await self._sinks.reset(name, to, timeout_s)

    def quarantine(self, sink: str) -> list[SetAside]:
        """What this sink has set aside, in log order: what it rejected, and what lines up behind that."""
        self._check_opened()
        return self._sinks.feed(sink).quarantine.records()

    async def replay(self, sink: str, *offsets: int, timeout_s: float = 30.0) -> Replayed:
        """Have the deltas that a sink rejected at these offsets (none given: all) applied once more, and
        what waits behind them; those rejected again stay. Raises Refused, TimeoutError, UsageError.
        """
        self._check_open()
        return await self._sinks.replay(sink, offsets, drop=False, timeout_s=timeout_s)

    async def drop(self, sink: str, *offsets: int, timeout_s: float = 30.0) -> Replayed:
        """Give up the deltas that a sink rejected at these offsets (none given: all); what waits behind them
        is applied without them. Raises as `replay` does.
        """
        self._check_open()
        return await self._sinks.replay(sink, offsets, drop=True, timeout_s=timeout_s)

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
        reader may be the caller. While the log has failed, what is not synced waits for its
        recovery. Raises TimeoutError, which withdraws nothing; Refused if a sink stops, is detached, or has
        set the delta aside, or (LOG_FAILED) if the log was recovered without the delta.
        """
        self._check_open()
        self._gathering.send()
        limit = timeout_or(timeout_s, self.settings.publish_timeout_s)
        began = self._now()
        if isinstance(published, Receipt):
            published = await settled(published, limit)
        offset = published.next_offset if isinstance(published, Published) else published
        if type(offset) is not int or offset < 0:
            raise UsageError(f"{published!r:.80}: give what publish returned, a receipt, or an offset")
        if offset > self._log.reached(AckLevel.DURABLE):
            try:
                with anyio.fail_after(max(began + limit - self._now(), 0)):
                    await until_running(self._chain)
            except TimeoutError:
                raise TimeoutError(f"the log has failed and was not recovered within {limit} s") from None
        if isinstance(published, Published) and not self._keeps(published):
            raise lost()
        if offset > self._log.next_offset:
            raise UsageError(f"offset {offset} is not in the log yet, which ends at {self._log.next_offset}")
        if isinstance(sinks, str) or not isinstance(sinks, Iterable | None):
            raise UsageError(f"sinks={sinks!r}: give a list of names, like [{str(sinks)!r}]")
        names = list(self._sinks.listed() if sinks is None else sinks)
        for name in names:
            self._sinks.require(name)
        first = published.offset if isinstance(published, Published) else offset
        first = offset if first is None else first
        try:
            with anyio.fail_after(max(began + limit - self._now(), 0)):
                await self._sinks.wait(names, first, offset, committed=committed)
        except TimeoutError:
            raise TimeoutError(
                f"not all below offset {offset} is visible within {limit} s: {self._sinks.told(names)}"
            ) from None

    async def outcome(self, dot: Dot, *, timeout_s: float | None = None) -> int | ErrorCode | None:
        """Return the offset of the delta with this dot; None if it has not happened.

        Returns the code if the dot is void: that of the refusal, DOT_REUSED if its producer left the counter
        out, OUTCOME_UNKNOWN if the log no longer tells. A delta of `publish` and `offer` without a place in
        the log has no dot; one that `producer` sends may still come. Waits for a recovery of the log, and
        until what it returns is kept. Raises Refused: OUTCOME_UNKNOWN after `timeout_s`, LOG_FAILED if the
        log has stopped for good.
        """
        self._check_open()
        if not isinstance(dot, Dot):
            raise UsageError(f"{dot!r:.80} is not a Dot: give the dot of an acknowledgement or of a refusal")
        limit = timeout_or(timeout_s, self.settings.publish_timeout_s)
        return await outcome_of(self._chain, dot, limit)

    # --- reading

    def subscribe(self, *topics: str, start: Start = "latest", name: str | None = None) -> Subscription:
        """An async iterator over the deltas of these topics (all, if none), as `Delivered`.

        It is pulled at the reader's pace: a slow one reads the log. It holds nothing back, so one that
        falls behind the log's bounds gets Refused (CURSOR_TOO_OLD).
        """
        self._check_open()
        self._gathering.send()
        self._subscriptions += 1
        parsed = parse_topics(topics or "*")
        name = f"subscription-{self._subscriptions}" if name is None else check_sink_name(name)
        begin: Start = self._log.visible if start == "latest" else start

        async def attach(subscription: Subscription) -> Feed:
            self._check_open()
            # A reader takes its time, and gains nothing from deltas that gather first.
            limits = replace(self.settings.feed_limits(None, 0), apply_s_max=inf)
            return await self._sinks.attach(
                subscription.name,
                subscription,
                Terms(topics=parsed, start=begin, limits=limits, required=False),
                on_progress=subscription.note_progress,
            )

        return Subscription(name, attach, self._sinks.detach)

    def head(self, vector_id: str, namespace: str = DEFAULT_NAMESPACE) -> Dot | None:
        """The dot of a vector's last delta, for `expect=`; None where none is known.

        Raises Refused (LOG_FAILED) while the log has failed.
        """
        self._check_open()
        self._gathering.send()
        self._chain.check_running()
        check_texts(vector_id=vector_id, namespace=namespace)
        dot = self._chain.appender.vectors.head(namespace, vector_id)
        if dot is None and self._chain.appender.vectors.may_lack(namespace):
            head = self._sinks.load_head(namespace, vector_id)
            dot = None if head is None else head.dot
        return dot

    def sink(self, name: str) -> Sink:
        """The attached sink of that name."""
        self._check_opened()
        return self._sinks.require(name).sink

    def pressure(self) -> Pressure:
        """How pressed producers are: level, rate, depth, capacity, time to retry, and which sink paces."""
        self._check_opened()
        lanes = self._chain.lanes
        return self._room.press(self._sinks.pacing.pressure(lanes.depth, lanes.capacity_deltas))

    async def pressure_changes(self) -> AsyncGenerator[Pressure, None]:
        """The pressure now, and again whenever its level, its cause or its rate (by a tenth) changes."""
        self._check_open()
        told: Pressure | None = None
        while self._open_on:
            now = self.pressure()
            if told is None or differs(told, now):
                told = now
                yield now
            else:
                await self._stepped.wait()

    def statistics(self) -> Statistics:
        """A snapshot of everything."""
        self._check_opened()
        self._gathering.send()
        chain, counters = self._chain, self._chain.appender.counters
        log = self._log
        return Statistics(
            accepted=counters.accepted,
            duplicates=counters.duplicates,
            voided=counters.voided,
            refused=chain.refused,
            conflicts=chain.appender.vectors.conflicts,
            ids=chain.appender.ids.statistics(),
            queue=chain.lanes.statistics(),
            pending=chain.orderer.statistics(),
            log=log.statistics(),
            sinks=self._sinks.statistics(),
            pressure=self.pressure(),
            full=self._room.full(),
            memory_bytes_max=self.settings.memory_bytes_max(len(self._sinks.attached)),
            reopening=None if (reopening := self._service_log.reopening) is None else reopening.statistics(),
        )

    def inside(self) -> Inside:
        """The parts that a server talks to, while this is open; not for programs that embed it."""
        self._check_open()
        self._gathering.send()
        return Inside(
            chain=self._chain,
            log=self._log,
            sinks=self._sinks,
            world=self._world,
            settings=self.settings,
            disk=self._service_log.disk,
            now=self._world.clock.now,
            turn=self._turn,
            room=self._room,
            operating=self._operating,
        )

    # --- inside

    def _keeps(self, published: Published) -> bool:
        """Return False if the log was recovered without these deltas since they were acknowledged."""
        if published.dot is None:
            return True
        origin, counter = published.dot
        return self._chain.holds(origin, counter)

    def _draw_producer_id(self) -> int:
        return int.from_bytes(self._world.randomness.bytes(6), "big") >> (48 - PRODUCER_ID_BITS)

    def _make_chain(self, own_producer_id: int) -> Chain:
        settings = self.settings
        if self._service_log.committer is None:
            ids = SeenIds(generation_ids=settings.memory_id_generation, kept_min=settings.ids_kept_min)
        else:
            ids = SeenIds(
                generation_ids=settings.id_generation,
                kept_min=settings.ids_kept_min,
                waiting_max=WAITING_MAX,
                index_bytes_max=settings.id_index_bytes_max,
            )
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
            route=self._sinks.route,
            wall_us=self._world.clock.wall_us,
            origins=Origins(
                origins_max=settings.origins_max,
                per_owner_max=settings.origins_per_owner_max,
                epochs_above=epochs_above(self._service_log.openings),
                epochs_until=epochs_until(self._service_log.openings),
            ),
            vectors=Vectors(heads_max=settings.heads_max),
            load_head=self._sinks.load_head,
            gate=self._sinks.pacing,
            on_queued=self._note_queued,
            on_placed=committer.ring if (committer := self._service_log.committer) else None,
        )

    def _check_opened(self) -> None:
        """Once it was open, it can be looked at after its end too."""
        if not hasattr(self, "_chain"):
            raise UsageError("the propagator is not open: use it inside `async with Propagator() as p:`")

    async def _tick(self) -> None:
        """Do what is due: what waited too long, what is queued and may go now."""
        while True:
            self._bell = anyio.Event()
            now = self._now()
            deadline, gate_s = self._chain.tick(now), self._chain.gate_wait_s(now)
            wait_s = _TICK_S_MAX if deadline is None else min(max(deadline - now, 0), _TICK_S_MAX)
            self._armed = gate_s is not None
            with anyio.move_on_after(max(wait_s if gate_s is None else min(wait_s, gate_s), _TICK_S_MIN)):
                await self._bell.wait()

    async def _pace(self) -> None:
        """Look at the sinks ten times a second; let the source go as fast as suits them."""
        while True:
            await anyio.sleep(INTERVAL_S)
            self._sinks.watch(self._now())
            self._sinks.pacing.step(self._now(), waiting=self._chain.lanes.depth > 0)
            self._room.look(self._chain)
            self._log.mark_time()
            self._stepped.set()
            self._stepped = anyio.Event()
            if self._chain.lanes.depth:
                self._bell.set()

    async def _keep_cursors(self) -> None:
        """Write down now what is remembered of each sink. Raises OSError."""
        await self._service_log.write_cursors(self._sinks.cursors, self._world.new_threads())

    def _note_queued(self) -> None:
        """Somebody waits at the gate: see to it when it opens, unless that is seen to already."""
        if not self._armed:
            self._bell.set()

    def _note_moved(self) -> None:
        """The log's marks have moved: sinks are shown what may be read, callers are told what is kept."""
        with self._turn:
            self._chain.settling.settle()
            self._sinks.note_visible()
        self._line.ring()
        if self._chain.lanes.depth:
            self._bell.set()

    def _note_failed(self, refusal: Refused) -> None:
        """The log has stopped: what is not kept by now may be lost, and is refused."""
        self._chain.stop(refusal, self._now())
        self._line.ring()

    def _note_recovered(self) -> None:
        """The log goes on, in the same tick: nobody may take what it has for what they had of it."""
        assert self._chain.stopped is not None
        self.recovery = self._service_log.recovery
        self._sinks.note_recovered()

    async def _rebuild(self) -> None:
        """Read the chain's state back from a log that was recovered, as at a start; then go on."""
        restored = self._make_chain(self._draw_producer_id())
        await self._service_log.restore(restored, self._world)
        if self._service_log.failure is not None:  # it failed again while it was read
            raise self._service_log.failure
        self._chain.take_over(restored)
        self._sinks.note_vectors_of_past()
        self._line.ring()
        self._bell.set()

    def _note_progress(self) -> None:
        """A sink got on: whoever waits for that may try again; what waits for a time does not."""
        if self._sinks.pacing.counts:
            self._sinks.pacing.note_progress(self._now())
        self._line.ring()
        if self._chain.lanes.depth and not self._armed:
            self._bell.set()
