"""Acts as the delivery loop for one sink: opens, delivers, retries, quarantines; and checks the result."""

from __future__ import annotations

import warnings
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import FrozenInstanceError, dataclass, fields, is_dataclass
from functools import partial
from inspect import isawaitable
from typing import Any, TypeVar

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup

from delta_prop_sinks.conformance.fakes import (
    Applied,
    FakeLog,
    Ref,
    ReferenceModel,
    lamport_below,
    offsets_of,
)
from delta_prop_sinks.conformance.loop_watch import LoopWatch, WatchedCall
from delta_prop_sinks.conformance.rules import ContractViolation, allow_only
from delta_prop_sinks.conformance.steps import (
    call_and_cancel_at,
    collect_garbage,
    observe_waits,
    weak_reference,
)
from delta_prop_sinks.sink import (
    Backlog,
    Delivery,
    HasBackground,
    HasBacklog,
    RejectDelta,
    ResumePoint,
    Sink,
    SinkFailure,
    StopSink,
    TryAgain,
    VectorHolder,
)
from delta_prop_wire.algebra import VectorState
from delta_prop_wire.delta import Dot, Head
from delta_prop_wire.errors import UsageError

Probe = Callable[[Any], Awaitable[object]]
Expected = Callable[[Sequence[Applied]], object]
Failing = Callable[[int | None], None]

T = TypeVar("T")

_ATTEMPTS_MAX = 6
_MUTABLE_TYPES = (dict, list, set, bytearray)
_METHODS = {"open": "open", "apply": "order", "aclose": "close", "statistics": "name"}
"""Methods of every sink, and the rule that describes each."""


@dataclass(frozen=True)
class CheckSettings:
    """The arguments of `check_sink`."""

    make: Callable[[], Sink]
    probe: Probe | None
    expected: Expected | None
    failing: Failing | None
    forgets: bool
    pause_s: float
    deadline_s: float


class _BackgroundRun:
    """The background work of an open sink."""

    def __init__(self) -> None:
        self.scope = anyio.CancelScope()
        self.ended = anyio.Event()


class Player:
    """Plays the service for one sink at a time, and records the rows that the sink must hold."""

    def __init__(self, settings: CheckSettings, tasks: TaskGroup, watch: LoopWatch) -> None:
        self.settings = settings
        self._watch = watch
        self._tasks = tasks
        self._background_run: _BackgroundRun | None = None
        self.log = FakeLog(watch)
        self.model = ReferenceModel()
        self.sink = self.make()
        self.start = 0
        """The offset at which the sink resumed when it was last opened."""
        self.rejected_offsets: list[int] = []
        self.is_persistent = False
        """True if the sink's data survives when a new sink is made."""
        self._applied_offset = 0  # below it, all rows are applied, as apply() has reported
        self._opened_cursor = 0  # the cursor that the last open() returned
        self._violation: ContractViolation | None = None
        self.rebuild_begun = False
        """True from the start of a rebuild to its end."""
        self.foreign_offset: int | None = None
        """The offset of a row that was delivered to the sink and then hidden from the log: a rebuild removes
        it.
        """
        self._unchecked: dict[Ref, None] | None = None  # the vectors to check, in order of arrival; None: all
        self._touched: dict[Ref, None] = {}  # the vectors delivered since the sink was opened

    def make(self) -> Sink:
        """Return a new sink. Raises ContractViolation if it lacks a method."""
        sink = self.settings.make()
        for method, part in _METHODS.items():
            if not callable(getattr(sink, method, None)):
                raise ContractViolation(part, f"make() gave a {type(sink).__name__}, which has no {method}()")
        return sink

    async def call(self, label: str, call: Callable[[], Awaitable[T]], part: str = "deadline") -> T:
        """Await a call of the sink, within the deadline."""

        async def run_call() -> T:
            return await call()

        deadline_s = self.settings.deadline_s
        self._watch.begin(label)
        with anyio.move_on_after(deadline_s) as scope:
            return await WatchedCall(run_call(), self._watch)
        assert scope.cancelled_caught
        raise ContractViolation(part, f"{label} had not ended after {deadline_s:g} s")

    async def make_and_open(self, label: str = "open()") -> None:
        """Make a new sink, open it, and deliver the rows that it lacks."""
        self.sink = self.make()
        # Vectors from before the last opening are checked again only after `recheck_all`.
        if self._unchecked is not None:
            self._unchecked |= self._touched
        self._touched = {}
        with allow_only(rule="open", call=label):
            point = await self.call(label, lambda: self.sink.open(self.log))
        self._check_rebuilding(label, point)
        if self.rebuild_begun:  # its cursor is invalid until the rebuild is complete
            self.start_background()
            return
        delivered = self.log.deliveries(0, self.log.delivered_offset)
        self.start = self._check_point(label, point, delivered)
        self.log.committed_offset = 0
        self.start_background()
        if self.start == 0:
            self.model.clear()
        # A correct sink holds all rows below its cursor, including those that a cancelled apply applied.
        self.model.apply(delivered, self.start)
        await self.deliver(self.log.deliveries(self.start, self.log.delivered_offset))

    def _check_point(self, label: str, point: object, delivered: Sequence[Delivery]) -> int:
        """Check what open returned; return the offset at which deliveries resume."""
        log = self.log
        if point is None:
            return self._applied_offset if self.is_persistent else 0
        if not isinstance(point, ResumePoint):
            raise ContractViolation("resume", f"{label} returned {point!r:.80}, not a ResumePoint or None")
        cursor = point.cursor
        if cursor.log_id != log.log_id or not 0 <= cursor.next_offset <= log.delivered_offset:
            raise ContractViolation(
                "resume",
                f"{label} returned the cursor {cursor}, but only rows below {log.delivered_offset} were "
                "delivered",
            )
        highest = lamport_below(delivered, cursor.next_offset)
        if point.lamport < highest:
            raise ContractViolation(
                "resume",
                f"{label} returned the Lamport number {point.lamport}, but below its cursor, "
                f"{cursor.next_offset}, is a row with {highest}",
            )
        if self.is_persistent and cursor.next_offset < log.committed_offset:
            raise ContractViolation(
                "committed",
                f"{label} returned the cursor {cursor.next_offset}, after committed({log.committed_offset})",
            )
        if self.is_persistent and cursor.next_offset < self._opened_cursor:
            raise ContractViolation(
                "resume",
                f"{label} returned the cursor {cursor.next_offset}, after an earlier {self._opened_cursor}",
            )
        self._opened_cursor = cursor.next_offset
        return cursor.next_offset

    def _check_rebuilding(self, label: str, point: object) -> None:
        """Check that a sink with its own cursor reports an unfinished rebuild."""
        if not isinstance(point, ResumePoint) or point.rebuilding is (
            self.rebuild_begun and self.is_persistent
        ):
            return
        if not self.rebuild_begun:
            raise ContractViolation("rebuild", f"{label} reported a rebuild, and none was in progress")
        if not point.rebuilding:
            raise ContractViolation(
                "rebuild", f"{label} returned the cursor {point.cursor} and reported no rebuild"
            )

    def note_rebuilt(self, offset: int) -> None:
        """Note that the sink has the states as of an offset, and continues from there."""
        self.rebuild_begun = False
        self.model = ReferenceModel()
        self.model.apply(self.log.deliveries(0, offset))
        self.start = self.log.committed_offset = self._applied_offset = self._opened_cursor = offset

    def hide_foreign(self) -> None:
        """Hide the foreign row from the log, so that no state contains it."""
        if self.foreign_offset is not None:
            self.log.hide(self.foreign_offset)

    async def check_foreign(self, vector_id: str, when: str) -> None:
        """Check that a rebuild has removed a vector that no state contained."""
        get = getattr(self.sink, "get", None)
        if get is None:
            return
        state = get("default", vector_id)
        state = await state if isawaitable(state) else state
        if isinstance(state, VectorState) and state.alive:
            raise ContractViolation(
                "rebuild", f"{when}, {vector_id!r}, which no state contained, still existed"
            )

    async def apply(self, deliveries: Sequence[Delivery], part: str = "failure") -> SinkFailure | None:
        """Call apply once, and note in the reference model which rows it reports as applied."""
        self._note_delivered(deliveries)
        failure: SinkFailure | None = None
        try:
            with allow_only(TryAgain, RejectDelta, StopSink, rule=part, call="apply()"):
                await self.call("apply()", lambda: self.sink.apply(deliveries))
        except (TryAgain, RejectDelta, StopSink) as raised:
            failure = raised
        self.note_outcome(deliveries, failure)
        return failure

    def _note_delivered(self, deliveries: Sequence[Delivery]) -> None:
        self.log.delivered_offset = max(self.log.delivered_offset, _in_order_end(deliveries))
        for delivery in deliveries:  # also the rows for other sinks, which must have no effect
            refs = self.log.refs(delivery.logged)
            self._touched |= refs
            if self._unchecked is not None:
                self._unchecked |= refs

    def note_outcome(self, deliveries: Sequence[Delivery], failure: SinkFailure | None = None) -> None:
        """Check the outcome of a call of apply, and note the rows that it has applied."""
        self._check_background()
        if self.log.committed_beyond is not None:
            raise ContractViolation(
                "committed",
                f"the sink reported committed({self.log.committed_beyond}), but only rows below "
                f"{self.log.delivered_offset} were delivered",
            )
        self._check_backlog()
        if failure is None:
            self.model.apply(deliveries)
            self._applied_offset = max(self._applied_offset, _in_order_end(deliveries))
            return
        done_offset = (
            failure.offset if isinstance(failure, RejectDelta) else getattr(failure, "done_offset", None)
        )
        if done_offset is None:
            return
        self._check_done_offset(deliveries, failure, done_offset)
        self.model.apply(deliveries, done_offset)
        self._applied_offset = max(self._applied_offset, min(done_offset, _in_order_end(deliveries)))

    def _check_done_offset(
        self, deliveries: Sequence[Delivery], failure: SinkFailure, done_offset: int
    ) -> None:
        offsets = [offset for delivery in deliveries for offset in offsets_of(delivery)]
        if isinstance(failure, RejectDelta) and done_offset not in offsets:
            raise ContractViolation(
                "failure",
                f"{_format_failure(failure)}, which is not a delivered row, {_format_span(offsets)}",
            )
        if not deliveries[0].first_offset <= done_offset <= deliveries[-1].next_offset:
            raise ContractViolation(
                "failure", f"{_format_failure(failure)}, outside the delivered rows, {_format_span(offsets)}"
            )

    async def deliver(self, deliveries: Sequence[Delivery], part: str = "failure") -> None:
        """Deliver until all rows are applied or quarantined, as the delivery loop does without a fault."""
        remaining = list(deliveries)
        for _ in range(_ATTEMPTS_MAX):
            while remaining:
                failure = await self.apply(remaining, part)
                if failure is None:
                    return
                if isinstance(failure, StopSink):
                    raise ContractViolation(
                        part, f"apply() raised StopSink without a fault: {failure.reason}"
                    )
                remaining = self.remaining(remaining, failure)
                if isinstance(failure, TryAgain):
                    break
            else:
                return
            await self.pause()
        raise ContractViolation(
            part, f"apply() raised {failure!r:.200} {_ATTEMPTS_MAX} times without a fault"
        )

    def remaining(self, deliveries: Sequence[Delivery], failure: SinkFailure) -> list[Delivery]:
        """Return the rows that the delivery loop redelivers after a failure; quarantine a rejected delta."""
        done_offset, quarantined = 0, set[int]()
        if isinstance(failure, RejectDelta):
            done_offset = failure.offset
            quarantined = self._quarantine(deliveries, failure.offset)
        elif isinstance(failure, TryAgain):
            done_offset = failure.done_offset or 0
        remaining = (
            self.log.delivery(
                delivery.logged,
                [
                    offset - delivery.first_offset
                    for offset in offsets_of(delivery)
                    if offset >= done_offset and offset not in quarantined
                ],
                redelivered=delivery.redelivered,
                end=delivery.end,
            )
            for delivery in deliveries
        )
        return [delivery for delivery in remaining if delivery is not None]

    def _quarantine(self, deliveries: Sequence[Delivery], offset: int) -> set[int]:
        """Quarantine a delta and the later ones of its vector; return their offsets."""
        self.rejected_offsets.append(offset)
        delivery = next(delivery for delivery in deliveries if offset in offsets_of(delivery))
        batch, row = delivery.batch, offset - delivery.first_offset
        quarantined = set(self.log.later_offsets_of((batch.namespaces[row], batch.keys[row]), offset))
        self.log.quarantined |= quarantined
        return quarantined

    async def cancel_apply(self, wait: int, deliveries: Sequence[Delivery]) -> int:
        """Cancel apply at wait number `wait`; return the number of its waits."""
        self._note_delivered(deliveries)
        failure: SinkFailure | None = None
        label = f"apply(), cancelled at wait {wait},"
        try:
            with allow_only(TryAgain, RejectDelta, StopSink, rule="cancellation", call=label):
                call = partial(call_and_cancel_at, wait, partial(self.sink.apply, deliveries))
                result = await self.call("a cancelled apply()", call)
        except (TryAgain, RejectDelta, StopSink) as raised:
            failure = raised
        if failure is None and not result.returned:
            return result.waits
        self.note_outcome(deliveries, failure)
        return wait if failure is not None else result.waits

    async def close(self, label: str = "aclose()") -> None:
        """Close the sink; it may raise TryAgain if something could not be finished."""
        await self.stop_background()
        with suppress(TryAgain), allow_only(TryAgain, rule="close", call=label):
            await self.call(label, self.sink.aclose, "close")

    async def reopen(self, label: str = "open() after aclose()") -> None:
        """Close the sink, and open a new one."""
        await self.close()
        await self.make_and_open(label)

    async def crash(self, label: str) -> None:
        """Drop the sink without closing it, and open a new one."""
        await self.stop_background()
        reference = weak_reference(self.sink)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            del self.sink
        if reference is None or reference() is not None:
            collect_garbage()
        try:
            await self.make_and_open(label)
        except ContractViolation as violation:
            if violation.rule != "open":
                raise
            collect_garbage()  # the old sink may still lock the file
            await self.make_and_open(label)

    def start_background(self, *, cancel_at: int | None = None) -> None:
        """Run the sink's background work, if any, until it is stopped; cancel it at wait `cancel_at`."""
        if isinstance(self.sink, HasBackground):
            self._background_run = run = _BackgroundRun()
            self._tasks.start_soon(self._background, self.sink, run, cancel_at)

    async def stop_background(self) -> None:
        """Cancel the background work, as the delivery loop does before it closes a sink."""
        run, self._background_run = self._background_run, None
        if run is not None:
            run.scope.cancel()
            await self.call("background(), cancelled,", run.ended.wait, "background")
            await anyio.lowlevel.checkpoint()  # its task has ended, and no longer refers to the sink
        self._check_background()

    async def _background(
        self, sink: HasBackground, background_run: _BackgroundRun, cancel_at: int | None
    ) -> None:
        waits = 0

        def on_wait() -> None:
            nonlocal waits
            waits += 1
            if waits == cancel_at:
                background_run.scope.cancel()

        with background_run.scope:
            try:
                await observe_waits(sink.background(), on_wait)
            except Exception as error:
                self._violation = ContractViolation("background", f"background() raised {error!r:.200}")
        background_run.ended.set()

    def _check_background(self) -> None:
        violation, self._violation = self._violation, None
        if violation is not None:
            raise violation

    async def pause(self) -> None:
        """Pause as a slow caller does: for an hour by the sink's clock, for `pause_s` by the event loop's."""
        self.log.clock.time += 3600.0
        await anyio.sleep(self.settings.pause_s)

    def recheck_all(self) -> None:
        """Check all vectors next time, also those that were checked before."""
        self._unchecked = None

    async def check_view(self, part: str, when: str) -> None:
        """Check that readers see the fold of the rows applied so far."""
        self._check_background()
        model, sink = self.model, self.sink
        get = getattr(sink, "get", None)
        if get is not None:
            await self.call("get()", partial(self._check_states, get, part, when))
        if isinstance(sink, VectorHolder):
            self._check_vectors(sink, when)
        self._unchecked = {}
        self._check_backlog()
        if self.settings.probe is not None and self.settings.expected is not None:
            view, expected = await self._probe(), self.settings.expected(model.rows())
            if view != expected:
                raise ContractViolation(part, f"{when}, the probe saw {_format_difference(view, expected)}")

    async def read_view(self) -> object:
        """Return the view of the probe and of `get`, as a value that can be compared."""
        get = getattr(self.sink, "get", None)
        view = await self._probe()
        states: list[tuple[tuple[str, str], object]] = []
        if get is None or self.settings.forgets:
            return view, states
        for ref in self.model.states:
            state = get(*ref)
            state = await state if isawaitable(state) else state
            states.append((ref, state.content if isinstance(state, VectorState) else state))
        return view, states

    async def _probe(self) -> object:
        probe = self.settings.probe
        if probe is None:
            return None
        actual: object = probe(self.sink)
        if not isawaitable(actual):
            raise UsageError(
                f"probe: probe(sink) returned {actual!r:.80}, not an awaitable: make it `async def`"
            )
        return await actual

    async def _check_states(self, get: Callable[[str, str], Any], part: str, when: str) -> None:
        for ref, expected in self._vectors_to_check():
            actual = get(*ref)
            if isawaitable(actual):
                actual = await actual
            if actual is None and (self.settings.forgets or not expected.alive):
                continue
            if not isinstance(actual, VectorState) or actual.content != expected.content:
                raise ContractViolation(
                    part,
                    f"{when}, get({ref[0]!r}, {ref[1]!r}) returned {_format_state(actual)}, and the fold of "
                    f"its deltas is {_format_state(expected)}",
                )

    def _vectors_to_check(self) -> list[tuple[Ref, VectorState]]:
        states = self.model.states
        refs = states if self._unchecked is None else self._unchecked
        return [(ref, states.get(ref, VectorState())) for ref in refs]

    def _check_vectors(self, sink: VectorHolder, when: str) -> None:
        dimensions = sink.dimensions()
        for ref, state in self._vectors_to_check():
            if state.key is None:
                continue
            head, expected = sink.head(*ref), Head(Dot(state.key[1], state.key[2]), state.alive)
            if head is not None and head != expected:
                raise ContractViolation(
                    "vectors",
                    f"{when}, head({ref[0]!r}, {ref[1]!r}) returned {head}, but the last dot is {expected}",
                )
        widths_by_namespace: dict[str, set[int]] = {}
        for (namespace, _), state in self.model.states.items():
            if state.vector is not None:  # it may have another width than most of its namespace
                widths_by_namespace.setdefault(namespace, set()).add(len(state.vector))
        for namespace, widths in widths_by_namespace.items():
            dimension = dimensions.get(namespace)
            if dimension is not None and dimension not in widths:
                raise ContractViolation(
                    "vectors",
                    f"{when}, dimensions() returned {dimension} for {namespace!r} with vectors of "
                    f"{min(widths)}",
                )

    def _check_backlog(self) -> None:
        if not isinstance(self.sink, HasBacklog):
            return
        backlog: object = self.sink.backlog()
        if not isinstance(backlog, Backlog):
            if isawaitable(backlog) and hasattr(backlog, "close"):
                backlog.close()
            raise ContractViolation("backlog", f"backlog() returned {backlog!r:.80}, not a Backlog")
        if not 0 <= backlog.rows <= backlog.rows_max or not 0 <= backlog.before < backlog.rows_max:
            raise ContractViolation(
                "backlog", f"backlog() returned {backlog.rows} rows of at most {backlog.rows_max}"
            )

    def check_name_and_statistics(self) -> None:
        """Check the sink's name and statistics."""
        name: object = getattr(self.sink, "name", None)
        if not isinstance(name, str) or not name:
            raise ContractViolation("name", f"name is {name!r:.80}, not a text that operators can use")
        with allow_only(rule="name", call="statistics()"):
            statistics = self.sink.statistics()
        check_frozen(statistics)


def check_frozen(statistics: object) -> None:
    """Raise ContractViolation if a statistics snapshot can be modified."""
    if isinstance(statistics, _MUTABLE_TYPES):
        raise ContractViolation(
            "name", f"statistics() returned a {type(statistics).__name__}, which is not a frozen dataclass"
        )
    if not is_dataclass(statistics) or isinstance(statistics, type):
        if isinstance(statistics, (int, float, str, tuple)):
            return
        raise ContractViolation(
            "name", f"statistics() returned {statistics!r:.80}, which is not a frozen dataclass"
        )
    for field in fields(statistics)[:1]:
        try:
            setattr(statistics, field.name, getattr(statistics, field.name))
        except FrozenInstanceError:
            continue
        raise ContractViolation("name", "statistics() can be changed: make the dataclass frozen")


def _in_order_end(deliveries: Sequence[Delivery]) -> int:
    """Return the offset after the last row, 0 for none; rows from quarantine move no cursor."""
    return max((delivery.next_offset for delivery in deliveries if not delivery.redelivered), default=0)


def _format_failure(failure: SinkFailure) -> str:
    if isinstance(failure, RejectDelta):
        return f"apply() raised RejectDelta for offset {failure.offset}"
    return f"apply() raised TryAgain with done_offset {getattr(failure, 'done_offset', None)}"


def _format_span(offsets: Sequence[int]) -> str:
    return f"{offsets[0]} to {offsets[-1]}" if offsets else "none"


def _format_state(state: object) -> str:
    if not isinstance(state, VectorState):
        return f"{state!r:.120}"
    if not state.alive:
        return "a tombstone"
    content = f"bytes {state.data!r:.40}" if state.data is not None else "nothing"
    if state.vector is not None:
        content = f"the vector {state.vector.tolist()!r:.80}"
    return f"{content} with metadata {dict(state.metadata)!r:.80}"


def _format_difference(actual: object, expected: object) -> str:
    """Return two values as text, of long values only the first difference."""
    if isinstance(actual, dict) and isinstance(expected, dict):
        for key in [*expected, *actual]:
            if actual.get(key) != expected.get(key):
                return f"{actual.get(key)!r:.80} instead of {expected.get(key)!r:.80} under {key!r:.80}"
    if isinstance(actual, (list, tuple)) and isinstance(expected, (list, tuple)):
        index = next(
            (index for index, (a, b) in enumerate(zip(actual, expected, strict=False)) if a != b),
            min(len(actual), len(expected)),
        )
        return (
            f"{len(actual)} entries instead of {len(expected)}, first differing at {index}: "
            f"{list(actual[index : index + 3])!r:.100} instead of {list(expected[index : index + 3])!r:.100}"
        )
    return f"{actual!r:.150} instead of {expected!r:.150}"
