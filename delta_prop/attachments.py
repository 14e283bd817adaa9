"""All attached sinks of one service: who is there, what each gets, how each comes and goes.

The chain hands batches to `route`; each sink's feed takes it from there at its own pace.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal, TypeAlias

import anyio
import anyio.lowlevel

from delta_prop.attached import Attached, Start, head_of, history_of
from delta_prop.checks import check_timeout
from delta_prop.pacing import Pacing
from delta_prop.quarantines import Quarantines
from delta_prop.route.feed import Feed
from delta_prop.route.late import ReplayRequest
from delta_prop.route.reasons import cannot_be_rebuilt
from delta_prop.route.rebuild import Rebuilder, can_be_rebuilt, may_have_snapshot
from delta_prop.route.status import FeedLimits, KeptCursor
from delta_prop.route.subscription import Subscription
from delta_prop.route.table import Nothing, Table, Taker
from delta_prop_broker.log.durable import DurableLog
from delta_prop_sinks.bounds import check_sink_name
from delta_prop_sinks.sink import HoldsVectors, Rebuilds, TakesControlRows
from delta_prop_wire.errors import Refused, UsageError
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence

    from anyio.abc import TaskGroup

    from delta_prop.append import Appender
    from delta_prop.config import Settings
    from delta_prop.ports import World
    from delta_prop.route.late import Replayed
    from delta_prop.route.quarantine import SetAside
    from delta_prop.route.status import FeedStatistics
    from delta_prop.route.table import Rows
    from delta_prop_broker.disk import Disk
    from delta_prop_broker.log.contract import Log
    from delta_prop_sinks.sink import Sink
    from delta_prop_wire.batch import Batch, LoggedBatch
    from delta_prop_wire.delta import Head
    from delta_prop_wire.topics import Topic

logger = logging.getLogger("delta_prop")

SLOW_CLOSE_S = 1.5
"""Seconds that a close waits before it says for which sinks."""

OnLogFull: TypeAlias = Literal["refuse", "needs_snapshot"]
"""When a required sink keeps the log full: producers are refused, or the sink loses its place."""

Place: TypeAlias = Literal["earliest", "latest"] | int
"""Where a sink goes on: at what the log still has, at what comes next, at an offset."""


@dataclass(frozen=True, slots=True)
class Terms:
    """How a sink is attached: what it gets, from where, within what limits, and what it may do to others."""

    topics: Sequence[Topic]
    start: Start
    limits: FeedLimits
    required: bool
    pacing: bool = False
    on_log_full: OnLogFull | None = None
    rebuild: bool = False


class Attachments:
    """The sinks by name. What stays of one that goes, its cursor and its quarantine, waits for its return."""

    def __init__(
        self,
        settings: Settings,
        log: Log,
        world: World,
        tasks: TaskGroup,
        *,
        appender: Callable[[], Appender],
        check_open: Callable[[], None],
        on_progress: Callable[[], None],
        kept: Mapping[str, KeptCursor],
        disk: Disk | None = None,
        keep: Callable[[], Awaitable[None]] = anyio.lowlevel.checkpoint,
        written: Callable[[], Mapping[str, KeptCursor]] = dict,
    ) -> None:
        """`kept`: what is remembered of sinks that were attached before the service's last end; `disk`:
        where quarantines are kept, None beside a log in memory; `keep` writes down durably what `cursors`
        gives now, and raises OSError; `written` is what was written down last.
        """
        self.attached: dict[str, Attached] = {}
        self.pacing = Pacing(settings, log)
        self._settings = settings
        self._log = log
        self._world = world
        self._tasks = tasks
        self._appender = appender
        self._check_open = check_open
        self._on_progress = on_progress
        self._keep = keep
        self._written = written
        self._offered = log.visible  # up to there sinks have been offered what is for them
        self._lasting = disk is not None
        self._table: Table[Taker] = Table()
        self._outlets: dict[Taker, None] = {}  # a set that keeps its order
        self._cursors: dict[str, KeptCursor] = dict(kept)
        self._gate: anyio.Event | None = None  # of the sinks that are attached together at present
        self.quarantines = Quarantines(disk, log, world)
        for name, cursor in kept.items():
            self._remember(name, cursor)

    # --- coming and going

    def check_free(self, name: object, sink: object) -> str:
        """The name under which a sink can be attached. Raises UsageError."""
        if isinstance(sink, type):
            raise UsageError(f"{sink.__name__} is a class: attach a sink made from it, as {sink.__name__}()")
        if not isinstance(name, str):
            raise UsageError(f"{sink!r:.80} has no name: give a sink, whose contract is in delta_prop.sinks")
        check_sink_name(name)
        for verb in ("open", "apply", "aclose"):
            if not callable(getattr(sink, verb, None)):
                raise UsageError(
                    f"{sink!r:.80} has no method {verb}: give a sink, whose contract is in delta_prop.sinks"
                )
        for one in self.attached.values():
            if one.sink is sink:
                raise UsageError(
                    f"this sink is attached already, as {one.name!r}: detach it first, or make another one"
                )
        if name in self.attached:
            raise UsageError(f"a sink named {name!r} is attached already: detach it, or give another name")
        return name

    @contextmanager
    def together(self) -> Iterator[None]:
        """Sinks that are attached meanwhile get deltas, and are rebuilt, from the end of the scope on; where
        it fails none is touched.
        """
        self._gate = gate = anyio.Event()
        try:
            yield
            gate.set()
        finally:
            self._gate = None

    async def attach(
        self,
        name: str,
        sink: Sink,
        terms: Terms,
        on_progress: Callable[[], None] | None = None,
    ) -> Feed:
        """Open a sink and start bringing it its deltas.

        Raises Refused, UsageError, QuarantineDamaged, OSError, what the sink raises.
        """
        quarantine = keeper = None
        if not isinstance(sink, Subscription):  # whose name never comes back
            quarantine, keeper = await self.quarantines.open(name, terms.limits)
        topics = frozenset(map(str, terms.topics))
        attached = Attached(name, sink, self._log, self._world, topics, appender=self._appender)
        attached.quarantine, attached.gate = quarantine, self._gate
        rebuilds, kept = can_be_rebuilt(sink, terms.topics), self._cursors.get(name, KeptCursor(0, 0))
        begin, keeps_cursor = await attached.open(terms.start, kept, rebuilds=rebuilds, forced=terms.rebuild)
        try:
            self._check_open()  # while the sink opened much may have happened
            if name in self.attached:
                raise UsageError(f"a sink named {name!r} was attached meanwhile: give this one another name")
            if attached.rebuild is None:
                self._note_past(attached, begin)
        except (UsageError, Refused):
            await sink.aclose()
            raise
        feed = attached.feed = Feed(
            name,
            sink,
            log=self._log,
            table=self._table,
            world=self._world,
            limits=terms.limits,
            start=begin,
            keeps_cursor=keeps_cursor,
            reported=attached.reported,
            quarantine=quarantine,
            keeper=keeper,
            on_progress=on_progress or self._on_progress,
        )
        feed.unhurried = isinstance(sink, Subscription)
        self.attached[name] = attached
        self._table.subscribe(feed, terms.topics, control_rows=isinstance(sink, TakesControlRows))
        attached.required = terms.required
        attached.gives_way = gives_way = self._gives_way(terms, rebuilds=rebuilds)
        if isinstance(sink, Rebuilds) and rebuilds:
            self._make_rebuilder(attached, sink, terms, kept, gives_way=gives_way)
        self._log.release(name)
        if terms.required:
            self._log.hold(name, lambda: self._needed(feed), feed.lose_place if gives_way else None)
        self.pacing.add(
            feed,
            pacing=terms.pacing,
            required=terms.required,
            gives_way=gives_way,
            now=self._world.clock.now(),
        )
        if kept.paused:
            feed.pause()
        self._tasks.start_soon(attached.run)
        return feed

    def _gives_way(self, terms: Terms, *, rebuilds: bool) -> bool:
        """Whether the log goes on without a sink that holds too much of it, rather than refuse producers.

        Where nobody has said so: one that comes back by itself does, from a snapshot that the log makes.
        """
        if terms.on_log_full is None:
            return rebuilds and isinstance(self._log, DurableLog) and self._log.settings.compact
        return terms.on_log_full == "needs_snapshot"

    def _make_rebuilder(
        self, attached: Attached, sink: Rebuilds, terms: Terms, kept: KeptCursor, *, gives_way: bool
    ) -> None:
        """Get ready to rebuild this sink; it is, before anything else, where it was found to need it."""
        feed, log, name = attached.require_feed(), self._log, attached.name
        gives_way = gives_way or not terms.required
        feed.rebuilder = Rebuilder(
            sink,
            log,
            self._table,
            lambda: attached.threads,
            hold=lambda: log.hold(name, lambda: self._needed(feed), feed.lose_place if gives_way else None),
            let_go=lambda: None if terms.required else log.release(name),
            keep=self._keep,
        )
        if attached.rebuild is not None:
            feed.before = kept
            feed.rebuild(attached.rebuild)

    def _needed(self, feed: Feed) -> int:
        """From where on the log must be kept for an attached sink: where it would go on after a crash now."""
        if not self._lasting:
            return feed.needed
        written = self._written().get(feed.name, KeptCursor(0, 0))
        return min(feed.needed, _resumes_at(feed.kept_cursor, written))

    def rebuild(self, name: str) -> None:
        """Have a sink rebuilt, from the newest snapshot or a whole log; one that is away when it comes back.

        Raises UsageError, Refused where there is neither: the sink goes on as it was.
        """
        feed = self.feed(name) if name in self.attached else None
        if feed is not None and feed.rebuilder is None:
            raise UsageError(
                f"sink {name!r} cannot be rebuilt: it is made of deltas, or its topics do not match whole "
                "vectors"
            )
        first_offset = self._log.first_offset
        if first_offset and not may_have_snapshot(self._log):
            raise cannot_be_rebuilt(name, first_offset)
        if feed is None:
            self._remember(name, self._remembered(name)._replace(rebuild_asked=True))
        else:
            feed.rebuild("an operator asked for it", lasting=True)

    async def detach(self, name: str) -> None:
        """Let a sink go; its name is taken, and the log keeps what it needs, until that is done."""
        attached = self.require(name)
        with anyio.CancelScope(shield=True):
            await self._close(attached, goes=True)

    def forget(self, name: str) -> None:
        """Remember nothing more of a sink that is not attached; the log keeps nothing for it."""
        if name in self.attached:
            raise UsageError(f"sink {name!r} is attached: detach it first")
        if name not in self._cursors and not self.quarantines.knows(name):
            raise UsageError(f"no sink named {name!r} is remembered; remembered are {sorted(self._cursors)}")
        self._log.release(name)
        self._cursors.pop(name, None)
        self.quarantines.forget(name)

    def cursors(self) -> dict[str, KeptCursor]:
        """What to remember of each sink, attached or not, for the next start."""
        now = {
            name: one.require_feed().kept_cursor._replace(required=one.required, gives_way=one.gives_way)
            for name, one in self.attached.items()
            if not isinstance(one.sink, Subscription)
        }
        return self._cursors | now

    async def close_all(self) -> list[Exception]:
        """Close all sinks at once, however the service ends: each keeps what it has. What failed."""
        failures: list[Exception] = []

        async def close(attached: Attached) -> None:
            if attached.closing:
                return
            try:
                await self._close(attached)
            except Exception as failure:  # of one sink; the others are to end well
                failures.append(failure)

        with anyio.CancelScope(shield=True):
            async with anyio.create_task_group() as telling:
                telling.start_soon(self._tell_slow_close)
                async with anyio.create_task_group() as closing:
                    for attached in list(self.attached.values()):
                        closing.start_soon(close, attached)
                telling.cancel_scope.cancel()
        return failures

    async def _tell_slow_close(self) -> None:
        """Say for which sinks a close waits, once it has waited a while."""
        await anyio.sleep(SLOW_CLOSE_S)
        logger.warning(
            "closing waits for sinks, for up to %g s (close_timeout_s): %s",
            self._settings.close_timeout_s,
            self.told(list(self.attached)),
        )

    async def _close(self, attached: Attached, *, goes: bool = False) -> None:
        """`goes`: somebody detaches it, so that the log keeps nothing for it any more."""
        name, feed = attached.name, attached.require_feed()
        if attached.closing:
            raise UsageError(f"sink {name!r} is being detached already: wait for that")
        attached.closing = True
        if isinstance(attached.sink, Subscription):
            attached.sink.end()
        try:
            await attached.close(self._settings.close_timeout_s)
        finally:
            self._table.unsubscribe(feed)
            self._log.release(name)
            if not isinstance(attached.sink, Subscription):  # whose name never comes back
                # As long as other sinks are being closed the log keeps what this one needs at the next start.
                required, gives_way = attached.required and not goes, attached.gives_way
                self._remember(name, feed.kept_cursor._replace(required=required, gives_way=gives_way))
            self.pacing.remove(feed, self._world.clock.now())
            try:
                if not isinstance(attached.sink, Subscription):
                    await self.quarantines.close(name)
            finally:
                del self.attached[name]

    def _note_past(self, attached: Attached, begin: int) -> None:
        """Go on above what a sink holds of an earlier log: its Lamport numbers, its vectors."""
        appender = self._appender()
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

    # --- what the chain asks

    def route(self, logged: LoggedBatch) -> None:
        """Offer a batch to every sink that wants something of it."""
        for feed, rows in self._table.plan(logged.batch):
            feed.offer(logged, rows)
        if not self.attached:  # nobody in this process looks at rows
            logged.batch.let_names_go()

    def note_visible(self) -> None:
        """The visible mark has moved: sinks for which nothing of that was meant have dealt with it."""
        self._offered = self._log.visible
        for attached in self.attached.values():
            attached.require_feed().note_visible()
        for outlet in self._outlets:
            outlet.note_visible()

    def note_recovered(self) -> None:
        """The log was recovered in place, and may end elsewhere than it did."""
        for attached in self.attached.values():
            attached.require_feed().note_offered(self._offered)
            attached.require_feed().note_recovered()
        for outlet in self._outlets:
            outlet.note_recovered()

    # --- outlets: what takes deltas and is no sink, so that nothing is kept for it

    def add_outlet(self, outlet: Taker, topics: Iterable[Topic]) -> None:
        """Offer it every batch with rows of these topics, until `remove_outlet`; again: other topics."""
        self._outlets[outlet] = None
        self._table.subscribe(outlet, topics)

    def remove_outlet(self, outlet: Taker) -> None:
        """Offer it nothing more."""
        self._outlets.pop(outlet, None)
        self._table.unsubscribe(outlet)

    def rows_for(self, outlet: Taker, batch: Batch) -> Rows | Nothing:
        """The rows of a batch that match an outlet's topics, None for all."""
        return self._table.rows_for(outlet, batch)

    def note_vectors_of_past(self) -> None:
        """The chain's state was read back from the log: what sinks hold of an earlier one counts too."""
        for attached in self.attached.values():
            if attached.has_past and isinstance(attached.sink, HoldsVectors):
                self._appender().vectors.note_past(attached.sink.dimensions())

    def load_head(self, namespace: str, vector_id: str) -> Head | None:
        """The head of a vector that the table of heads does not hold: from the log, else from a sink."""
        found = head_of(history_of(self._log, [(namespace, vector_id)]))
        for attached in self.attached.values():
            if attached.require_feed().rebuilding:
                continue  # what it holds is void
            if found is None and isinstance(attached.sink, HoldsVectors):
                found = attached.sink.head(namespace, vector_id)
        return found

    def watch(self, now: float) -> None:
        """Break off calls that take too long."""
        for attached in self.attached.values():
            attached.require_feed().watch(now)

    # --- what operators ask

    def require(self, name: str) -> Attached:
        """The attached sink of that name. Raises UsageError."""
        if name not in self.attached:
            raise UsageError(f"no sink named {name!r} is attached; attached are {sorted(self.attached)}")
        return self.attached[name]

    def feed(self, name: str) -> Feed:
        """That sink's feed. Raises UsageError."""
        return self.require(name).require_feed()

    def listed(self) -> Iterator[str]:
        """The attached sinks that are no subscriptions."""
        return (name for name, one in self.attached.items() if not isinstance(one.sink, Subscription))

    def statistics(self) -> dict[str, FeedStatistics]:
        """A snapshot of each."""
        return {name: one.require_feed().statistics() for name, one in self.attached.items()}

    def told(self, names: Sequence[str]) -> str:
        """What these sinks are doing, for people."""
        told = [self.attached[name].require_feed().statistics() for name in names if name in self.attached]
        return ", ".join(
            f"{one.name!r} is {one.state}, {one.lag} deltas behind"
            + (f" ({' '.join(one.reason.split()):.300})" if one.reason else "")
            for one in told
        )

    async def wait(self, names: Sequence[str], first: int, offset: int, *, committed: bool) -> None:
        """Wait until these sinks have dealt with all below `offset`.

        Raises Refused where one has set aside something from `first` on: it is not to be seen there.
        """
        for feed in [self.feed(name) for name in names]:
            await feed.wait(offset, committed=committed)
            held = feed.quarantine.holds_any(first, offset)
            if held is not None:
                raise _set_aside(feed, held)

    def pause(self, name: str) -> None:
        """Bring a sink nothing until `resume`, in later processes neither. Raises UsageError."""
        self._set_paused(name, True)

    def resume(self, name: str) -> None:
        """End a pause; a sink that has stopped goes on too. Raises UsageError."""
        self._set_paused(name, False)

    def _set_paused(self, name: str, paused: bool) -> None:
        if name in self.attached:
            feed = self.feed(name)
            (feed.pause if paused else feed.resume)()
        else:
            self._remember(name, self._remembered(name)._replace(paused=paused))

    async def reset(self, name: str, to: Place, timeout_s: float) -> int:
        """Have a sink whose cursor is kept here go on from another offset; return that.

        Raises Refused, TimeoutError, UsageError.
        """
        check_timeout(timeout_s)
        offset = self._offset(to)
        feed = self.feed(name) if name in self.attached else None
        if (feed.kept_cursor if feed is not None else self._remembered(name)).own:
            raise UsageError(
                f"sink {name!r} keeps its cursor with its data, which would not follow: rebuild it, or give "
                "it data and a name of its own"
            )
        if feed is None:
            self._remember(name, self._remembered(name)._replace(reported=0, dealt_with=offset))
            return offset
        request = ReplayRequest(None, drop=False, reset_to=offset)
        feed.request(request)
        with anyio.fail_after(timeout_s):
            await request.wait()
        return offset

    def _offset(self, to: Place) -> int:
        log = self._log
        offset = {"earliest": log.first_offset, "latest": log.visible}.get(to) if isinstance(to, str) else to
        if type(offset) is not int or not log.first_offset <= offset <= log.visible:
            raise UsageError(
                f"to={to!r:.80}: give earliest, latest or an offset from {log.first_offset} to {log.visible}"
            )
        return offset

    def _remembered(self, name: str) -> KeptCursor:
        if name not in self._cursors:
            known = sorted(self._cursors.keys() | self.attached.keys())
            raise UsageError(f"no sink named {name!r} is attached or remembered; there are {known}")
        return self._cursors[name]

    def _remember(self, name: str, cursor: KeptCursor) -> None:
        """Of a sink that is not attached; the log keeps what it needs."""
        self._cursors[name] = cursor
        self._log.release(name)
        if cursor.required:
            self._log.hold(
                name,
                lambda: _resumes_at(cursor, self._written().get(name, cursor)),
                partial(self._lose_place, name) if cursor.gives_way else None,
            )

    def _lose_place(self, name: str) -> None:
        """The log keeps nothing for a sink that is away any more."""
        logger.warning("sink %r is away and keeps the log full: nothing is kept for it any more", name)
        self._cursors[name] = self._cursors[name]._replace(required=False)

    async def replay(self, name: str, named: Sequence[int], *, drop: bool, timeout_s: float) -> Replayed:
        """Have quarantined deltas (none named: all) applied, or dropped.

        Raises Refused, TimeoutError, UsageError.
        """
        check_timeout(timeout_s)
        feed = self.feed(name)
        for offset in named:
            if not isinstance(offset, int):
                raise UsageError(f"offset {offset!r:.80}: give whole numbers, one by one")
            if offset not in feed.quarantine:
                raise UsageError(f"offset {offset} is not in the quarantine of sink {name!r}")
            held = feed.quarantine[offset]
            if held.behind != offset:
                raise UsageError(
                    f"offset {offset} was not rejected, it waits behind offset {held.behind}: name that one"
                )
            if drop and held.reason is None:
                raise UsageError(f"offset {offset} was not rejected: replay it")
        request = ReplayRequest(frozenset(named) or None, drop=drop)
        feed.request(request)
        try:
            with anyio.fail_after(timeout_s):
                return await request.wait()
        except TimeoutError:
            raise TimeoutError(
                f"sink {name!r} has not answered within {timeout_s} s; its quarantine holds "
                f"{len(feed.quarantine)} deltas: see its state in statistics(), and ask again"
            ) from None


def _resumes_at(now: KeptCursor, written: KeptCursor) -> int:
    """Where a sink goes on after a crash, when it stands here and the file of cursors says this of it."""
    at = min(now.dealt_with, written.dealt_with)
    return max(now.reported, at) if now.own else at


def _set_aside(feed: Feed, held: SetAside) -> Refused:
    head = feed.quarantine[held.behind]
    waits = "" if head is held else f"it waits behind offset {head.offset}: "
    why = f"rejected: {head.reason}; replay or drop it" if head.reason is not None else "to be replayed"
    return Refused(
        ErrorCode.PROCESSING_FAILED,
        f"sink {feed.name!r} has offset {held.offset} in its quarantine: {waits}{why}",
        details={"sink": feed.name, "offset": held.offset},
    )
