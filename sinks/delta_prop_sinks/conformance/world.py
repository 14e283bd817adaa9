"""The kit's false world: a log as a list, a clock that is set by hand, a thread port that fails when told to.

Nothing here is shared with a sink's own code but the wire's arithmetic, which is the oracle.
"""

from __future__ import annotations

from bisect import bisect_right
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import anyio
import anyio.lowlevel
import numpy as np

from delta_prop_sinks.sink import Delivery
from delta_prop_wire.algebra import State, apply, fold
from delta_prop_wire.batch import LoggedBatch
from delta_prop_wire.delta import Kind, KnownIds, Source
from delta_prop_wire.encode import encode_batch, encode_void
from delta_prop_wire.spec import ErrorCode
from delta_prop_wire.states import encode_states

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from delta_prop_sinks.conformance.loop_watch import LoopWatch
    from delta_prop_wire.algebra import Key
    from delta_prop_wire.batch import Batch
    from delta_prop_wire.delta import Delta
    from delta_prop_wire.states import StateRow

T = TypeVar("T")
Ref = tuple[str, str]
"""Namespace and vector id."""

_NOTHING = State()
_HERE = 0x9000_0000_0000_0012
_ELSEWHERE = 0x1230_0000_0000_0010
BEYOND = 0x5670_0000_0000_0010
"""An origin of a third service, which sorts behind that of the second."""
TURNS = 2
"""Of the event loop, that a call on a thread takes."""


class Applied(NamedTuple):
    """A row that the sink has applied, as far as the kit can tell."""

    offset: int
    lamport: int
    delta: Delta

    @property
    def key(self) -> Key:
        """Its place in canonical order, in which states are folded: (Lamport number, origin, counter)."""
        assert self.delta.dot is not None, "what is in a log has a dot"
        return (self.lamport, *self.delta.dot)


class FalseClock:
    """Stands still unless it is moved."""

    def __init__(self) -> None:
        self.time = 1000.0

    def now(self) -> float:
        """Seconds, by hand."""
        return self.time

    def wall_us(self) -> int:
        """The same in microseconds, as if the epoch had just begun."""
        return int(self.time * 1_000_000)


class Fault:
    """One failure to come: which call of a thread, and whether the call is made before it is told to fail."""

    def __init__(self, watch: LoopWatch) -> None:
        self._watch = watch
        self.calls = 0
        self.inside = 0
        self.turns = TURNS
        self.begun = anyio.Event()
        self._fails_at: int | None = None
        self._after = False

    def plan(self, at: int, *, after: bool) -> None:
        """Fail once, in the `at`-th call from now, 1 for the next: before it is made, or after."""
        self.calls, self._fails_at, self._after = 0, at, after

    def mend(self) -> None:
        """Fail no more."""
        self._fails_at = None

    async def run(self, function: Callable[[], T]) -> T:
        """Make one call. Raises OSError where that is planned."""
        self.calls += 1
        self.begun.set()
        fails = self.calls == self._fails_at
        for _ in range(self.turns):
            await anyio.lowlevel.checkpoint()
        if fails and not self._after:
            raise OSError(5, "Input/output error (the conformance kit's)")
        with self._watch.aside():
            result = function()
        if fails:
            raise OSError(5, "Input/output error, behind the call (the conformance kit's)")
        return result


class FalseThreads:
    """Runs calls where they are made, one at a time, some turns of the loop later.

    A caller that is cancelled before its call has begun gives it up; later it waits for the call's end.
    """

    def __init__(self, fault: Fault) -> None:
        self._fault = fault
        self._lock = anyio.Lock()

    async def run(self, function: Callable[[], T]) -> T:
        """Run `function` here. Raises OSError where that is planned."""
        await anyio.lowlevel.checkpoint()
        with anyio.CancelScope(shield=True):
            async with self._lock:
                self._fault.inside += 1
                try:
                    result = await self._fault.run(function)
                finally:
                    self._fault.inside -= 1
        return result


class FalseLog:
    """A log and, to the sink, its context. Knows which rows are for others, and which are set aside."""

    log_id = b"conformance kit!"
    epoch = 1
    log_start = 0
    topics = frozenset("*")

    def __init__(self, watch: LoopWatch) -> None:
        self.clock = FalseClock()
        self._watch = watch
        self.fault = Fault(watch)
        self.threads = FalseThreads(self.fault)
        self.batches: list[LoggedBatch] = []
        self.next_offset = 0
        self.delivered = 0
        """Behind the last row that was ever handed over in order; late ones do not count."""
        self.reported = 0
        self.committed_beyond: int | None = None
        self.aside: set[int] = set()
        self._others: set[int] = set()
        self._refs: dict[int, dict[Ref, None]] = {}
        self._dimensions: dict[str, int] = {}
        self._looked_at = 0
        self._lamport = 0
        self._counters = {_HERE: 0, _ELSEWHERE: 0, BEYOND: 0}
        self._ids: set[bytes] = set()
        self._snapshot: tuple[list[StateRow], int] | None = None

    # --- what the sink may ask

    def committed(self, next_offset: int) -> None:
        """Note how far the sink says it is durable."""
        if next_offset > self.delivered:
            self.committed_beyond = next_offset
        self.reported = max(self.reported, next_offset)

    @asynccontextmanager
    async def own_thread(self) -> AsyncIterator[FalseThreads]:
        """A thread for functions of the sink's owner: what they do does not fail unless they do."""
        yield FalseThreads(Fault(self._watch))

    @asynccontextmanager
    async def background_thread(self) -> AsyncIterator[FalseThreads]:
        """A second thread, which fails and waits as the first does."""
        yield FalseThreads(self.fault)

    def first_missing(self, watermarks: Mapping[int, int]) -> int | None:
        """Nobody lacks anything."""
        return None

    def go_back(self, offset: int) -> None:
        """Nothing is asked of it by what nobody lacks."""

    def dimension(self, namespace: str) -> int | None:
        """That of the first vector."""
        for row in self.rows(self._looked_at):
            operation = row.delta.operation
            if operation.kind in (Kind.CREATE, Kind.DENSE):
                self._dimensions.setdefault(row.delta.namespace, len(operation.values))  # type: ignore[arg-type]
        self._looked_at = len(self.batches)
        return self._dimensions.get(namespace)

    async def history(self, vectors: Collection[Ref]) -> AsyncIterator[tuple[LoggedBatch, int]]:
        """Some vectors' deltas, in log order, behind their states where these are all that is left of what
        came before. That takes a turn of the event loop.
        """
        await anyio.lowlevel.checkpoint()
        rows, begin = self._snapshot or ([], 0)
        if states := [row for row in rows if row[:2] in vectors]:
            logged = LoggedBatch(encode_states(states), 0, 0, Source.LOCAL)
            for row in range(len(states)):
                yield logged, row
        for place in self._rows_of(vectors, begin):
            yield place

    def _rows_of(self, vectors: Collection[Ref], begin: int = 0) -> Iterator[tuple[LoggedBatch, int]]:
        for logged in self.batches[self._place(begin) :]:
            if not logged.batch.is_control and not self.refs(logged).keys().isdisjoint(vectors):
                for row, ref in enumerate(zip(logged.batch.namespaces, logged.batch.keys, strict=True)):
                    if ref in vectors:
                        yield logged, row

    # --- writing

    def append(self, *deltas: Delta, others: Iterable[int] = ()) -> LoggedBatch:
        """Append a batch of this service's own; rows `others` do not match the sink's topics."""
        logged = self._log(encode_batch(deltas, origin=_HERE, base=self._counters[_HERE] + 1), Source.LOCAL)
        self._others.update(logged.offset + row for row in others)
        return logged

    def forward(self, *deltas: Delta, lamport: int, origin: int = _ELSEWHERE) -> LoggedBatch:
        """Append a batch that another service forwarded, numbered there."""
        batch = encode_batch(deltas, origin=origin, base=self._counters[origin] + 1)
        return self._log(batch, Source.REPLICA, lamport)

    def compact(self, states: list[StateRow], offset: int) -> None:
        """From now on the log tells of what lies below an offset, the end of a batch, by states alone."""
        self._snapshot = states, offset

    def tell_all_again(self) -> None:
        """The inverse of `compact`."""
        self._snapshot = None

    def void(self, count: int) -> None:
        """Append control rows, which are delivered to nobody."""
        base = self._counters[_HERE] + 1
        self._log(
            encode_void(origin=_HERE, base=base, count=count, code=ErrorCode.INVALID_DELTA), Source.LOCAL
        )

    def _log(self, batch: Batch, source: Source, lamport: int | None = None) -> LoggedBatch:
        known = sum(one in self._ids for one in batch.ids or ())
        mark = KnownIds.NONE if not known else KnownIds.ALL if known == batch.count else KnownIds.SOME
        self._ids.update(batch.ids or ())
        number = self._lamport + 1 if lamport is None else lamport
        logged = LoggedBatch(batch, self.next_offset, number, source, known_ids=mark)
        self._counters[batch.origin] += batch.count
        self._lamport = max(self._lamport, logged.lamport + batch.count - 1)
        self.next_offset = logged.next_offset
        self.batches.append(logged)
        return logged

    def hide(self, offset: int) -> None:
        """From now on a row does not match the sink's topics."""
        self._others.add(offset)

    # --- reading

    @property
    def lamport(self) -> int:
        """The highest Lamport number so far."""
        return self._lamport

    def deliveries(self, start: int, end: int | None = None) -> list[Delivery]:
        """What a sink whose cursor is `start` is handed, up to `end`, where a batch is cut."""
        found = []
        for logged in self.batches[self._place(start) :]:
            if end is not None and logged.offset >= end:
                break
            cut = None if end is None or end >= logged.next_offset else end
            count = logged.count if cut is None else cut - logged.offset
            found.append(self.delivery(logged, range(max(0, start - logged.offset), count), end=cut))
        return [delivery for delivery in found if delivery is not None]

    def late(self, offsets: Iterable[int]) -> list[Delivery]:
        """Rows out of the quarantine, in log order, those of one batch together."""
        rows: dict[int, list[int]] = {}
        for at in sorted(offsets):
            place = self._place(at)
            rows.setdefault(place, []).append(at - self.batches[place].offset)
        found = (self.delivery(self.batches[place], some, late=True) for place, some in rows.items())
        return [delivery for delivery in found if delivery is not None]

    def _place(self, at: int) -> int:
        """Of the batch that an offset lies in, among all."""
        return bisect_right(self.batches, at, key=lambda logged: logged.next_offset)

    def delivery(
        self, logged: LoggedBatch, rows: Iterable[int], *, late: bool = False, end: int | None = None
    ) -> Delivery | None:
        """Those of some rows of a batch that are meant and not set aside, if any."""
        if logged.batch.is_control:
            return None
        others, aside, first = self._others, frozenset() if late else self.aside, logged.offset
        meant = [row for row in rows if first + row not in others and first + row not in aside]
        if not meant:
            return None
        whole = len(meant) == logged.count and not late
        return Delivery(logged, None if whole else np.array(meant, np.intp), late, end)

    def refs(self, logged: LoggedBatch) -> dict[Ref, None]:
        """The vectors of all rows of a batch, in order."""
        refs = self._refs.get(logged.offset)
        if refs is None:
            batch = logged.batch
            refs = self._refs[logged.offset] = dict.fromkeys(zip(batch.namespaces, batch.keys, strict=True))
        return refs

    def rows(self, first: int = 0) -> Iterator[Applied]:
        """Every row of the log but the control rows, from this batch on."""
        for logged in self.batches[first:]:
            for row in range(0 if logged.batch.is_control else logged.count):
                yield Applied(
                    logged.offset + row, logged.lamport + row, logged.batch.delta(row, logged.source)
                )

    def later_rows_of(self, ref: Ref, start: int) -> list[int]:
        """The offsets of a vector's rows from `start` on."""
        return [logged.offset + row for logged, row in self._rows_of([ref]) if logged.offset + row >= start]


class Shadow:
    """What has been applied, in order, and the states that it gives."""

    def __init__(self) -> None:
        self.states: dict[Ref, State] = {}
        self.offsets: dict[int, None] = {}
        """Which rows have been applied, in order."""
        self._of: dict[Ref, dict[Key, tuple[LoggedBatch, int]]] = {}
        # A vector's rows mostly come in the same order, so what a row gives is worked out once.
        self._known: dict[int, tuple[State, State]] = {}
        self._places: dict[int, tuple[LoggedBatch, int]] = {}
        self._rows: dict[int, Applied] = {}

    def clear(self) -> None:
        """The sink has begun anew."""
        self.states.clear()
        self.offsets.clear()
        self._of.clear()

    def apply(self, deliveries: Sequence[Delivery], below: int | None = None) -> None:
        """Note rows as applied, those below an offset where one is given; repeats have no effect."""
        for delivery in deliveries:
            logged = delivery.logged
            for row in rows_of(delivery):
                at = logged.offset + row
                if at not in self.offsets and (below is None or at < below):
                    self.offsets[at] = None
                    self._apply_row(logged, row)

    def rows(self) -> list[Applied]:
        """All of them, in the order they were applied in."""
        for at in self.offsets:
            if at not in self._rows:
                logged, row = self._places[at]
                delta = logged.batch.delta(row, logged.source)
                self._rows[at] = Applied(at, logged.lamport + row, delta)
        return [self._rows[at] for at in self.offsets]

    def _apply_row(self, logged: LoggedBatch, row: int) -> None:
        batch, at = logged.batch, logged.offset + row
        ref = (batch.namespaces[row], batch.keys[row])
        before, key = self.states.get(ref, _NOTHING), logged.key(row)
        rows = self._of.setdefault(ref, {})
        rows[key] = self._places[at] = (logged, row)
        if (before.key is not None and key < before.key) or logged.known_ids is not KnownIds.NONE:
            self.states[ref] = _fold_all(rows)
            return
        known = self._known.get(at)
        if known is None or known[0] is not before:
            after = apply(before, batch.operation(row), batch.metadata(row), key)
            known = self._known[at] = (before, after)
        self.states[ref] = known[1]


def _fold_all(rows: Mapping[Key, tuple[LoggedBatch, int]]) -> State:
    """A vector's state; of deltas with one id the first in canonical order has an effect."""
    seen: set[bytes] = set()
    twins = set()
    for key in sorted(rows):
        logged, row = rows[key]
        if logged.batch.ids is not None:
            twins |= {key} if logged.batch.ids[row] in seen else set()
            seen.add(logged.batch.ids[row])
    changes = (
        (key, logged.batch.operation(row), logged.batch.metadata(row)) for key, (logged, row) in rows.items()
    )
    return fold(changes, without_effect=twins)


def rows_of(delivery: Delivery) -> list[int]:
    """The rows that are meant."""
    rows: Any = range(delivery.logged.count) if delivery.rows is None else delivery.rows.tolist()
    return list(rows)


def offsets_of(delivery: Delivery) -> list[int]:
    """Their offsets."""
    return [delivery.first_offset + row for row in rows_of(delivery)]


def lamport_below(deliveries: Iterable[Delivery], next_offset: int) -> int:
    """The highest Lamport number of a row that lies below an offset."""
    below = (
        delivery.logged.lamport + row
        for delivery in deliveries
        for row in rows_of(delivery)
        if delivery.first_offset + row < next_offset
    )
    return max(below, default=0)
