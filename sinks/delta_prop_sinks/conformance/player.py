"""Plays the delivery loop for one sink: opens, delivers, tries again, sets aside; and looks at the result."""

from __future__ import annotations

import warnings
from dataclasses import FrozenInstanceError, dataclass, fields, is_dataclass
from functools import partial
from inspect import isawaitable
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
import anyio.lowlevel

from delta_prop_sinks.conformance.loop_watch import InStretches
from delta_prop_sinks.conformance.rules import NotConforming
from delta_prop_sinks.conformance.steps import cancelled_at, let_go, reference, watched
from delta_prop_sinks.conformance.world import FalseLog, Shadow, lamport_below, offsets_of
from delta_prop_sinks.sink import (
    Backlog,
    Delivery,
    HasBackground,
    HasBacklog,
    HoldsVectors,
    RejectDelta,
    ResumePoint,
    SinkFailure,
    StopSink,
    TryAgain,
)
from delta_prop_wire.algebra import State
from delta_prop_wire.delta import Dot, Head
from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from anyio.abc import TaskGroup

    from delta_prop_sinks.conformance.loop_watch import LoopWatch
    from delta_prop_sinks.conformance.world import Applied, Ref
    from delta_prop_sinks.sink import Sink

    Probe = Callable[[Any], Awaitable[object]]
    Expected = Callable[[Sequence[Applied]], object]
    Failing = Callable[[int | None], None]

T = TypeVar("T")

_ATTEMPTS_MAX = 6
_UNFROZEN = (dict, list, set, bytearray)
_METHODS = {"open": "open", "apply": "order", "aclose": "close", "statistics": "name"}
"""What each sink has, and the rule that tells what it is for."""


@dataclass(frozen=True)
class Settings:
    """What the caller of the kit gave it."""

    make: Callable[[], Sink]
    probe: Probe | None
    expected: Expected | None
    failing: Failing | None
    forgets: bool
    pause_s: float
    deadline_s: float


class _Beside:
    """The background work of a sink that is open."""

    def __init__(self) -> None:
        self.scope = anyio.CancelScope()
        self.ended = anyio.Event()


class Player:
    """One sink at a time, and what the service would remember of it."""

    def __init__(self, settings: Settings, tasks: TaskGroup, watch: LoopWatch) -> None:
        self.settings = settings
        self._watch = watch
        self._tasks = tasks
        self._beside: _Beside | None = None
        self.log = FalseLog(watch)
        self.shadow = Shadow()
        self.sink = self.make()
        self.start = 0
        self.rejected: list[int] = []
        self.outlives = False
        """Whether what is in the sink is there again when it is made anew."""
        self._remembered = 0  # behind what apply has returned for
        self._named = 0  # the highest cursor that open has named
        self._breach: NotConforming | None = None
        self.rebuild_begun = False
        """Whether a rebuild has begun and has not ended."""
        self.foreign: int | None = None
        """The offset of a row that the sink was given and that the log, for rebuilds, never had."""
        self._unseen: dict[Ref, None] | None = None  # vectors to look at, in the order they came; None: all
        self._touched: dict[Ref, None] = {}  # since the sink was opened

    # --- calls

    def make(self) -> Sink:
        """The sink anew. Raises NotConforming where it is none."""
        sink = self.settings.make()
        for method, part in _METHODS.items():
            if not callable(getattr(sink, method, None)):
                raise NotConforming(part, f"make() gave a {type(sink).__name__}, which has no {method}()")
        return sink

    async def call(self, what: str, call: Callable[[], Awaitable[T]], part: str = "deadline") -> T:
        """Await a call of the sink, within the deadline."""

        async def made() -> T:
            return await call()

        limit = self.settings.deadline_s
        self._watch.begin(what)
        with anyio.move_on_after(limit) as scope:
            return await InStretches(made(), self._watch)
        assert scope.cancelled_caught
        raise NotConforming(part, f"{what} had not ended after {limit:g} s")

    async def make_and_open(self, what: str = "open()") -> None:
        """Make the sink anew, open it, and deliver what it lacks."""
        self.sink = self.make()
        # What was there after the last opening is looked at again only where `look_at_all` is called.
        if self._unseen is not None:
            self._unseen |= self._touched
        self._touched = {}
        try:
            point = await self.call(what, lambda: self.sink.open(self.log))
        except NotConforming:
            raise
        except Exception as error:
            raise NotConforming("open", f"{what} raised {error!r:.300}") from error
        self._check_void(what, point)
        if self.rebuild_begun:  # its cursor says nothing then
            self.start_background()
            return
        handed_over = self.log.deliveries(0, self.log.delivered)
        self.start = self._check_point(what, point, handed_over)
        self.log.reported = 0
        self.start_background()
        if self.start == 0:
            self.shadow.clear()
        # What the cursor covers is in the sink, if it is right: what a cancelled apply had done, too.
        self.shadow.apply(handed_over, self.start)
        await self.deliver(self.log.deliveries(self.start, self.log.delivered))

    def _check_point(self, what: str, point: object, handed_over: Sequence[Delivery]) -> int:
        log = self.log
        if point is None:
            return self._remembered if self.outlives else 0
        if not isinstance(point, ResumePoint):
            raise NotConforming("resume", f"{what} returned {point!r:.80}, not a ResumePoint or None")
        cursor = point.cursor
        if cursor.log_id != log.log_id or not 0 <= cursor.next_offset <= log.delivered:
            raise NotConforming(
                "resume",
                f"{what} named the cursor {cursor}, but only what is below {log.delivered} was delivered",
            )
        lowest = lamport_below(handed_over, cursor.next_offset)
        if point.lamport < lowest:
            raise NotConforming(
                "resume",
                f"{what} named the Lamport number {point.lamport}, but below its cursor, "
                f"{cursor.next_offset}, lies a row with {lowest}",
            )
        if self.outlives and cursor.next_offset < log.reported:
            raise NotConforming(
                "committed",
                f"{what} named the cursor {cursor.next_offset}, after committed({log.reported})",
            )
        if self.outlives and cursor.next_offset < self._named:
            raise NotConforming(
                "resume", f"{what} named the cursor {cursor.next_offset}, after it had named {self._named}"
            )
        self._named = cursor.next_offset
        return cursor.next_offset

    def _check_void(self, what: str, point: object) -> None:
        """A sink that keeps its cursor says whether it was left amid a rebuild."""
        if not isinstance(point, ResumePoint) or point.rebuilding is (self.rebuild_begun and self.outlives):
            return
        if not self.rebuild_begun:
            raise NotConforming("rebuild", f"{what} told of a rebuild, and none was under way")
        if not point.rebuilding:
            raise NotConforming("rebuild", f"{what} named the cursor {point.cursor} and told of no rebuild")

    def rebuilt(self, offset: int) -> None:
        """The sink has the states as of an offset, and goes on from there."""
        self.rebuild_begun = False
        self.shadow = Shadow()
        self.shadow.apply(self.log.deliveries(0, offset))
        self.start = self.log.reported = self._remembered = self._named = offset

    def hide_foreign(self) -> None:
        """What the states do not have the log does not have either."""
        if self.foreign is not None:
            self.log.hide(self.foreign)

    async def check_foreign(self, vector_id: str, when: str) -> None:
        """What the states did not have is gone."""
        get = getattr(self.sink, "get", None)
        if get is None:
            return
        found = get("default", vector_id)
        found = await found if isawaitable(found) else found
        if isinstance(found, State) and found.alive:
            raise NotConforming("rebuild", f"{when}, {vector_id!r}, which no state told of, was there still")

    async def apply(self, deliveries: Sequence[Delivery], part: str = "failure") -> SinkFailure | None:
        """One call of apply; what it says is applied goes into the shadow."""
        self._note_delivered(deliveries)
        failure: SinkFailure | None = None
        try:
            await self.call("apply()", lambda: self.sink.apply(deliveries))
        except (TryAgain, RejectDelta, StopSink) as raised:
            failure = raised
        except NotConforming:
            raise
        except Exception as error:
            raise NotConforming(part, f"apply() raised {error!r:.200}") from error
        self.note(deliveries, failure)
        return failure

    def _note_delivered(self, deliveries: Sequence[Delivery]) -> None:
        self.log.delivered = max(self.log.delivered, _reached_in_order(deliveries))
        for one in deliveries:  # rows for others too: they must have no effect
            refs = self.log.refs(one.logged)
            self._touched |= refs
            if self._unseen is not None:
                self._unseen |= refs

    def note(self, deliveries: Sequence[Delivery], failure: SinkFailure | None = None) -> None:
        """Check what a call of apply said, and believe it."""
        self._check_background()
        if self.log.committed_beyond is not None:
            raise NotConforming(
                "committed",
                f"the sink said committed({self.log.committed_beyond}), but only what is below "
                f"{self.log.delivered} was delivered",
            )
        self._check_backlog()
        if failure is None:
            self.shadow.apply(deliveries)
            self._remembered = max(self._remembered, _reached_in_order(deliveries))
            return
        reached = (
            failure.offset if isinstance(failure, RejectDelta) else getattr(failure, "done_offset", None)
        )
        if reached is None:
            return
        self._check_reached(deliveries, failure, reached)
        self.shadow.apply(deliveries, reached)
        self._remembered = max(self._remembered, min(reached, _reached_in_order(deliveries)))

    def _check_reached(self, deliveries: Sequence[Delivery], failure: SinkFailure, reached: int) -> None:
        offsets = [at for one in deliveries for at in offsets_of(one)]
        if isinstance(failure, RejectDelta) and reached not in offsets:
            raise NotConforming(
                "failure", f"{_told(failure)}, which is not among the rows delivered, {_span(offsets)}"
            )
        if not deliveries[0].first_offset <= reached <= deliveries[-1].next_offset:
            raise NotConforming(
                "failure", f"{_told(failure)}, outside of what was delivered, {_span(offsets)}"
            )

    async def deliver(self, deliveries: Sequence[Delivery], part: str = "failure") -> None:
        """Until all is applied or set aside, as the delivery loop does where nothing is in the way."""
        left = list(deliveries)
        for _ in range(_ATTEMPTS_MAX):
            while left:
                failure = await self.apply(left, part)
                if failure is None:
                    return
                if isinstance(failure, StopSink):
                    raise NotConforming(
                        part, f"apply() stopped though nothing was in the way: {failure.reason}"
                    )
                left = self.rest(left, failure)
                if isinstance(failure, TryAgain):
                    break
            else:
                return
            await self.pause()
        raise NotConforming(
            part, f"apply() raised {failure!r:.200} {_ATTEMPTS_MAX} times though nothing was in the way"
        )

    def rest(self, deliveries: Sequence[Delivery], failure: SinkFailure) -> list[Delivery]:
        """What the delivery loop delivers again after a failure; a rejected delta is set aside."""
        reached, aside = 0, set[int]()
        if isinstance(failure, RejectDelta):
            reached = failure.offset
            aside = self._set_aside(deliveries, failure.offset)
        elif isinstance(failure, TryAgain):
            reached = failure.done_offset or 0
        left = (
            self.log.delivery(
                one.logged,
                [at - one.first_offset for at in offsets_of(one) if at >= reached and at not in aside],
                late=one.late,
                end=one.end,
            )
            for one in deliveries
        )
        return [one for one in left if one is not None]

    def _set_aside(self, deliveries: Sequence[Delivery], offset: int) -> set[int]:
        """Set a delta aside, and its vector's later ones, as the quarantine does; return their offsets."""
        self.rejected.append(offset)
        one = next(one for one in deliveries if offset in offsets_of(one))
        batch, row = one.batch, offset - one.first_offset
        aside = set(self.log.later_rows_of((batch.namespaces[row], batch.keys[row]), offset))
        self.log.aside |= aside
        return aside

    async def cancel_apply(self, wait: int, deliveries: Sequence[Delivery]) -> int:
        """Cancel apply at its `wait`-th wait; return how often it waited."""
        self._note_delivered(deliveries)
        failure: SinkFailure | None = None
        try:
            result = await self.call(
                "a cancelled apply()", lambda: cancelled_at(wait, lambda: self.sink.apply(deliveries))
            )
        except (TryAgain, RejectDelta, StopSink) as raised:
            failure = raised
        except NotConforming:
            raise
        except Exception as error:
            raise NotConforming(
                "cancellation", f"apply(), cancelled at wait {wait}, raised {error!r:.200}"
            ) from error
        if failure is None and not result.returned:
            return result.waits
        self.note(deliveries, failure)
        return wait if failure is not None else result.waits

    async def close(self, what: str = "aclose()") -> None:
        """Close the sink. TryAgain says that something could not be finished."""
        await self.stop_background()
        try:
            await self.call(what, self.sink.aclose, "close")
        except TryAgain:
            pass
        except NotConforming:
            raise
        except Exception as error:
            raise NotConforming("close", f"{what} raised {error!r:.200}") from error

    async def reopen(self, what: str = "open() after aclose()") -> None:
        """Close, and open anew."""
        await self.close()
        await self.make_and_open(what)

    async def crash(self, what: str) -> None:
        """Throw the sink away as it is, and open it anew."""
        await self.stop_background()
        told = reference(self.sink)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            del self.sink
        if told is None or told() is not None:
            let_go()
        try:
            await self.make_and_open(what)
        except NotConforming as breach:
            if breach.part != "open":
                raise
            let_go()  # its file may still be locked
            await self.make_and_open(what)

    # --- background work

    def start_background(self, *, cancel_at: int | None = None) -> None:
        """Run the sink's background work, if it has any, until it is stopped or waits so many times."""
        if isinstance(self.sink, HasBackground):
            self._beside = beside = _Beside()
            self._tasks.start_soon(self._background, self.sink, beside, cancel_at)

    async def stop_background(self) -> None:
        """Cancel it, as it is before a sink is closed."""
        beside, self._beside = self._beside, None
        if beside is not None:
            beside.scope.cancel()
            await self.call("background(), cancelled,", beside.ended.wait, "background")
            await anyio.lowlevel.checkpoint()  # its task is gone, and does not refer to the sink any more
        self._check_background()

    async def _background(self, sink: HasBackground, beside: _Beside, cancel_at: int | None) -> None:
        waits = 0

        def on_wait() -> None:
            nonlocal waits
            waits += 1
            if waits == cancel_at:
                beside.scope.cancel()

        with beside.scope:
            try:
                await watched(sink.background(), on_wait)
            except Exception as error:
                self._breach = NotConforming("background", f"background() raised {error!r:.200}")
        beside.ended.set()

    def _check_background(self) -> None:
        breach, self._breach = self._breach, None
        if breach is not None:
            raise breach

    async def pause(self) -> None:
        """A slow caller: much time on the sink's clock, little on the loop's."""
        self.log.clock.time += 3600.0
        await anyio.sleep(self.settings.pause_s)

    # --- looking

    def look_at_all(self) -> None:
        """Next time, whatever has been looked at before."""
        self._unseen = None

    async def look(self, part: str, when: str) -> None:
        """What readers see is what the rows applied so far give."""
        self._check_background()
        shadow, sink = self.shadow, self.sink
        get = getattr(sink, "get", None)
        if get is not None:
            await self.call("get()", partial(self._check_states, get, part, when))
        if isinstance(sink, HoldsVectors):
            self._check_vectors(sink, when)
        self._unseen = {}
        self._check_backlog()
        if self.settings.probe is not None and self.settings.expected is not None:
            seen, due = await self._probed(), self.settings.expected(shadow.rows())
            if seen != due:
                raise NotConforming(part, f"{when}, the probe saw {_differing(seen, due)}")

    async def seen(self) -> object:
        """What the probe and `get` see, comparable."""
        get = getattr(self.sink, "get", None)
        seen = await self._probed()
        states: list[tuple[tuple[str, str], object]] = []
        if get is None or self.settings.forgets:
            return seen, states
        for ref in self.shadow.states:
            found = get(*ref)
            found = await found if isawaitable(found) else found
            states.append((ref, found.content if isinstance(found, State) else found))
        return seen, states

    async def _probed(self) -> object:
        probe = self.settings.probe
        if probe is None:
            return None
        seen: object = probe(self.sink)
        if not isawaitable(seen):
            raise UsageError(f"probe(sink) gave {seen!r:.80}, which cannot be awaited: make it `async def`")
        return await seen

    async def _check_states(self, get: Callable[[str, str], Any], part: str, when: str) -> None:
        for ref, expected in self._to_look_at():
            found = get(*ref)
            if isawaitable(found):
                found = await found
            if found is None and (self.settings.forgets or not expected.alive):
                continue
            if not isinstance(found, State) or found.content != expected.content:
                raise NotConforming(
                    part,
                    f"{when}, get({ref[0]!r}, {ref[1]!r}) gave {_state(found)}, and the fold of its deltas "
                    f"is {_state(expected)}",
                )

    def _to_look_at(self) -> list[tuple[Ref, State]]:
        states = self.shadow.states
        refs = states if self._unseen is None else self._unseen
        return [(ref, states.get(ref, State())) for ref in refs]

    def _check_vectors(self, sink: HoldsVectors, when: str) -> None:
        dimensions = sink.dimensions()
        for ref, state in self._to_look_at():
            if state.key is None:
                continue
            head, due = sink.head(*ref), Head(Dot(state.key[1], state.key[2]), state.alive)
            if head is not None and head != due:
                raise NotConforming(
                    "vectors", f"{when}, head({ref[0]!r}, {ref[1]!r}) gave {head}, but the last dot is {due}"
                )
        widths: dict[str, set[int]] = {}
        for (namespace, _), state in self.shadow.states.items():
            if state.vector is not None:  # one may have another width than most of its namespace
                widths.setdefault(namespace, set()).add(len(state.vector))
        for namespace, found in widths.items():
            width = dimensions.get(namespace)
            if width is not None and width not in found:
                raise NotConforming(
                    "vectors",
                    f"{when}, dimensions() gave {width} for {namespace!r}, whose vectors have {min(found)}",
                )

    def _check_backlog(self) -> None:
        if not isinstance(self.sink, HasBacklog):
            return
        backlog: object = self.sink.backlog()
        if not isinstance(backlog, Backlog):
            if isawaitable(backlog) and hasattr(backlog, "close"):
                backlog.close()
            raise NotConforming("backlog", f"backlog() returned {backlog!r:.80}, not a Backlog")
        if not 0 <= backlog.rows <= backlog.rows_max or not 0 <= backlog.before < backlog.rows_max:
            raise NotConforming(
                "backlog", f"backlog() told {backlog.rows} rows of at most {backlog.rows_max}"
            )

    def check_outside(self) -> None:
        """The name and the numbers."""
        name: object = getattr(self.sink, "name", None)
        if not isinstance(name, str) or not name:
            raise NotConforming("name", f"name is {name!r:.80}, not a text that operators can use")
        try:
            statistics = self.sink.statistics()
        except Exception as error:
            raise NotConforming("name", f"statistics() raised {error!r:.200}") from error
        check_frozen(statistics)


def check_frozen(statistics: object) -> None:
    """Raise NotConforming where a snapshot of numbers can be changed."""
    if isinstance(statistics, _UNFROZEN):
        raise NotConforming(
            "name", f"statistics() gave a {type(statistics).__name__}, which is not a frozen dataclass"
        )
    if not is_dataclass(statistics) or isinstance(statistics, type):
        if isinstance(statistics, (int, float, str, tuple)):
            return
        raise NotConforming("name", f"statistics() gave {statistics!r:.80}, which is not a frozen dataclass")
    for one in fields(statistics)[:1]:
        try:
            setattr(statistics, one.name, getattr(statistics, one.name))
        except FrozenInstanceError:
            continue
        raise NotConforming("name", "statistics() can be changed: make the dataclass frozen")


def _reached_in_order(deliveries: Sequence[Delivery]) -> int:
    """Behind the last row that does not come late, 0 for none: late ones move no cursor."""
    return max((one.next_offset for one in deliveries if not one.late), default=0)


def _told(failure: SinkFailure) -> str:
    if isinstance(failure, RejectDelta):
        return f"apply() raised RejectDelta for offset {failure.offset}"
    return f"apply() raised TryAgain with done_offset {getattr(failure, 'done_offset', None)}"


def _span(offsets: Sequence[int]) -> str:
    return f"{offsets[0]} to {offsets[-1]}" if offsets else "none"


def _state(state: object) -> str:
    if not isinstance(state, State):
        return f"{state!r:.120}"
    if not state.alive:
        return "a tombstone"
    what = f"bytes {state.data!r:.40}" if state.data is not None else "nothing"
    if state.vector is not None:
        what = f"the vector {state.vector.tolist()!r:.80}"
    return f"{what} with metadata {dict(state.metadata)!r:.80}"


def _differing(seen: object, due: object) -> str:
    """Two values, or only where they differ, for the long ones."""
    if isinstance(seen, dict) and isinstance(due, dict):
        for key in [*due, *seen]:
            if seen.get(key) != due.get(key):
                return f"{seen.get(key)!r:.80} instead of {due.get(key)!r:.80} under {key!r:.80}"
    if isinstance(seen, (list, tuple)) and isinstance(due, (list, tuple)):
        at = next(
            (at for at, (a, b) in enumerate(zip(seen, due, strict=False)) if a != b), min(len(seen), len(due))
        )
        return (
            f"{len(seen)} entries instead of {len(due)}, first differing at {at}: "
            f"{list(seen[at : at + 3])!r:.100} instead of {list(due[at : at + 3])!r:.100}"
        )
    return f"{seen!r:.150} instead of {due!r:.150}"
