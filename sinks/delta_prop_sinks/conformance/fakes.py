"""The kit's fakes: a log as a list, a clock that is set by hand, a thread port that fails on demand.

They share no code with sinks except the arithmetic of the wire package, which is the oracle.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, TypeVar

import anyio
import anyio.lowlevel
import numpy as np

from delta_prop_sinks.conformance.loop_watch import LoopWatch
from delta_prop_sinks.sink import Delivery
from delta_prop_wire.algebra import Key, VectorState, apply, fold
from delta_prop_wire.batch import Batch, LoggedBatch
from delta_prop_wire.delta import Delta, Kind, KnownIds, Source
from delta_prop_wire.encode import encode_batch, encode_noop
from delta_prop_wire.spec import ErrorCode
from delta_prop_wire.state_rows import StateRow, encode_states

T = TypeVar("T")
Ref = tuple[str, str]
"""Namespace and vector id."""

_NO_STATE = VectorState()
_LOCAL_ORIGIN = 0x9000_0000_0000_0012
_REMOTE_ORIGIN = 0x1230_0000_0000_0010
THIRD_ORIGIN = 0x5670_0000_0000_0010
"""An origin of a third service, which sorts after that of the second."""
CALL_TURNS = 2
"""The number of turns of the event loop that a call on a thread takes."""


class Applied(NamedTuple):
    """A row that the sink has applied, as far as the kit knows."""

    offset: int
    lamport: int
    delta: Delta

    @property
    def key(self) -> Key:
        """The row's key in canonical order, in which states are folded: (Lamport number, origin, counter)."""
        assert self.delta.dot is not None, "a delta of the log has no dot"
        return (self.lamport, *self.delta.dot)


class FakeClock:
    """A clock that stands still unless a test moves it."""

    def __init__(self) -> None:
        self.time = 1000.0

    def now(self) -> float:
        """Return the seconds that were set."""
        return self.time

    def wall_us(self) -> int:
        """Return the time that was set, in microseconds."""
        return int(self.time * 1_000_000)


class Fault:
    """A planned failure of one call on a thread, before or after the call runs.

    `call_count`: calls since the last `plan`. `turns`: turns of the event loop that each call takes.
    `begun`: set when a call begins.
    """

    def __init__(self, watch: LoopWatch) -> None:
        self._watch = watch
        self.call_count = 0
        self.running_calls = 0
        self.turns = CALL_TURNS
        self.begun = anyio.Event()
        self._fails_at: int | None = None
        self._fails_after = False

    def plan(self, number: int, *, after: bool) -> None:
        """Fail once, in call `number` from now, counted from 1: before it runs, or after."""
        self.call_count, self._fails_at, self._fails_after = 0, number, after

    def clear(self) -> None:
        """Cancel the planned failure."""
        self._fails_at = None

    async def run(self, function: Callable[[], T]) -> T:
        """Make one call. Raises OSError if that is planned."""
        self.call_count += 1
        self.begun.set()
        fails = self.call_count == self._fails_at
        for _ in range(self.turns):
            await anyio.lowlevel.checkpoint()
        if fails and not self._fails_after:
            raise OSError(5, "Input/output error (the conformance kit's)")
        with self._watch.exclude():
            result = function()
        if fails:
            raise OSError(5, "Input/output error, after the call (the conformance kit's)")
        return result


class FakeThreads:
    """Runs calls on the event loop, one at a time, some turns later.

    A caller that is cancelled before its call has begun abandons the call; once it has begun, the caller
    waits for its end.
    """

    def __init__(self, fault: Fault) -> None:
        self._fault = fault
        self._lock = anyio.Lock()

    async def run(self, function: Callable[[], T]) -> T:
        """Run `function` here. Raises OSError if that is planned."""
        await anyio.lowlevel.checkpoint()
        with anyio.CancelScope(shield=True):
            async with self._lock:
                self._fault.running_calls += 1
                try:
                    result = await self._fault.run(function)
                finally:
                    self._fault.running_calls -= 1
        return result


class FakeLog:
    """A log, and the sink's context. It knows which rows are for other sinks, and which are quarantined."""

    log_id = b"conformance kit!"
    epoch = 1
    log_start = 0
    topics = frozenset("*")

    def __init__(self, watch: LoopWatch) -> None:
        self.clock = FakeClock()
        self._watch = watch
        self.fault = Fault(watch)
        self.threads = FakeThreads(self.fault)
        self.batches: list[LoggedBatch] = []
        self.next_offset = 0
        self.delivered_offset = 0
        """The offset after the last row ever delivered in order; rows from quarantine do not count."""
        self.committed_offset = 0
        """The highest offset that the sink has reported as committed since it was opened."""
        self.committed_beyond: int | None = None
        """An offset that the sink reported although rows below it were not delivered; else None."""
        self.quarantined: set[int] = set()
        """Offsets of the quarantined rows."""
        self._other_offsets: set[int] = set()  # of rows for other sinks
        self._refs: dict[int, dict[Ref, None]] = {}
        self._dimensions: dict[str, int] = {}
        self._batches_seen = 0
        self._lamport = 0
        self._counters = {_LOCAL_ORIGIN: 0, _REMOTE_ORIGIN: 0, THIRD_ORIGIN: 0}
        self._ids: set[bytes] = set()
        self._snapshot: tuple[list[StateRow], int] | None = None

    # --- the sink's context

    def committed(self, next_offset: int) -> None:
        """Note the offset below which all rows are durable, as the sink reports."""
        if next_offset > self.delivered_offset:
            self.committed_beyond = next_offset
        self.committed_offset = max(self.committed_offset, next_offset)

    @asynccontextmanager
    async def own_thread(self) -> AsyncIterator[FakeThreads]:
        """Open a thread for functions of the sink's owner, without planned failures."""
        yield FakeThreads(Fault(self._watch))

    @asynccontextmanager
    async def background_thread(self) -> AsyncIterator[FakeThreads]:
        """Open a second thread, which fails and waits as the first one does."""
        yield FakeThreads(self.fault)

    def first_missing(self, watermarks: Mapping[int, int]) -> int | None:
        """Return None: no other log lacks anything."""
        return None

    def rewind(self, offset: int) -> None:
        """Do nothing: no other log lacks anything."""

    def dimension(self, namespace: str) -> int | None:
        """Return the dimension of the namespace's first vector."""
        for row in self.rows(self._batches_seen):
            operation = row.delta.operation
            if operation.kind in (Kind.CREATE, Kind.DENSE):
                self._dimensions.setdefault(row.delta.namespace, len(operation.values))  # type: ignore[arg-type]
        self._batches_seen = len(self.batches)
        return self._dimensions.get(namespace)

    async def history(self, vectors: Collection[Ref]) -> AsyncIterator[tuple[LoggedBatch, int]]:
        """Yield the deltas of vectors in log order, after their states if the log was compacted."""
        await anyio.lowlevel.checkpoint()
        rows, start = self._snapshot or ([], 0)
        if states := [row for row in rows if row[:2] in vectors]:
            logged = LoggedBatch(encode_states(states), 0, 0, Source.LOCAL)
            for row in range(len(states)):
                yield logged, row
        for logged_row in self._rows_of(vectors, start):
            yield logged_row

    def _rows_of(self, vectors: Collection[Ref], start: int = 0) -> Iterator[tuple[LoggedBatch, int]]:
        for logged in self.batches[self._batch_index(start) :]:
            if not logged.batch.is_control and not self.refs(logged).keys().isdisjoint(vectors):
                for row, ref in enumerate(zip(logged.batch.namespaces, logged.batch.keys, strict=True)):
                    if ref in vectors:
                        yield logged, row

    def append(self, *deltas: Delta, others: Iterable[int] = ()) -> LoggedBatch:
        """Append a batch of this service's own. `others`: its rows that do not match the sink's topics."""
        logged = self._append_batch(
            encode_batch(deltas, origin=_LOCAL_ORIGIN, base=self._counters[_LOCAL_ORIGIN] + 1), Source.LOCAL
        )
        self._other_offsets.update(logged.offset + row for row in others)
        return logged

    def forward(self, *deltas: Delta, lamport: int, origin: int = _REMOTE_ORIGIN) -> LoggedBatch:
        """Append a batch that another service forwarded, with that service's Lamport numbers."""
        batch = encode_batch(deltas, origin=origin, base=self._counters[origin] + 1)
        return self._append_batch(batch, Source.REPLICA, lamport)

    def compact(self, states: list[StateRow], offset: int) -> None:
        """Replace all rows below an offset, the end of a batch, by states."""
        self._snapshot = states, offset

    def undo_compact(self) -> None:
        """Undo `compact`."""
        self._snapshot = None

    def append_noops(self, count: int) -> None:
        """Append control rows, which are never delivered."""
        base = self._counters[_LOCAL_ORIGIN] + 1
        self._append_batch(
            encode_noop(origin=_LOCAL_ORIGIN, base=base, count=count, code=ErrorCode.INVALID_DELTA),
            Source.LOCAL,
        )

    def _append_batch(self, batch: Batch, source: Source, lamport: int | None = None) -> LoggedBatch:
        known_count = sum(id_ in self._ids for id_ in batch.ids or ())
        known_ids = (
            KnownIds.NONE
            if not known_count
            else KnownIds.ALL
            if known_count == batch.count
            else KnownIds.SOME
        )
        self._ids.update(batch.ids or ())
        first_lamport = self._lamport + 1 if lamport is None else lamport
        logged = LoggedBatch(batch, self.next_offset, first_lamport, source, known_ids=known_ids)
        self._counters[batch.origin] += batch.count
        self._lamport = max(self._lamport, logged.lamport + batch.count - 1)
        self.next_offset = logged.next_offset
        self.batches.append(logged)
        return logged

    def hide(self, offset: int) -> None:
        """Exclude a row from the sink's topics from now on."""
        self._other_offsets.add(offset)

    @property
    def lamport(self) -> int:
        """The highest Lamport number so far."""
        return self._lamport

    def deliveries(self, start: int, end: int | None = None) -> list[Delivery]:
        """Return the deliveries from offset `start` on, up to `end`, which may slice a batch."""
        deliveries = []
        for logged in self.batches[self._batch_index(start) :]:
            if end is not None and logged.offset >= end:
                break
            slice_end = None if end is None or end >= logged.next_offset else end
            count = logged.count if slice_end is None else slice_end - logged.offset
            rows = range(max(0, start - logged.offset), count)
            deliveries.append(self.delivery(logged, rows, end=slice_end))
        return [delivery for delivery in deliveries if delivery is not None]

    def redeliveries(self, offsets: Iterable[int]) -> list[Delivery]:
        """Return quarantined rows as deliveries, in log order, rows of one batch together."""
        rows_by_batch: dict[int, list[int]] = {}
        for offset in sorted(offsets):
            index = self._batch_index(offset)
            rows_by_batch.setdefault(index, []).append(offset - self.batches[index].offset)
        deliveries = (
            self.delivery(self.batches[index], rows, redelivered=True)
            for index, rows in rows_by_batch.items()
        )
        return [delivery for delivery in deliveries if delivery is not None]

    def _batch_index(self, offset: int) -> int:
        return bisect_right(self.batches, offset, key=lambda logged: logged.next_offset)

    def delivery(
        self, logged: LoggedBatch, rows: Iterable[int], *, redelivered: bool = False, end: int | None = None
    ) -> Delivery | None:
        """Return a delivery of those rows that match the topics and are not quarantined, if there are any."""
        if logged.batch.is_control:
            return None
        excluded = self._other_offsets if redelivered else self._other_offsets | self.quarantined
        selected = [row for row in rows if logged.offset + row not in excluded]
        if not selected:
            return None
        is_full = len(selected) == logged.count and not redelivered
        return Delivery(logged, None if is_full else np.array(selected, np.intp), redelivered, end)

    def refs(self, logged: LoggedBatch) -> dict[Ref, None]:
        """Return the vectors of all rows of a batch, in order."""
        refs = self._refs.get(logged.offset)
        if refs is None:
            batch = logged.batch
            refs = self._refs[logged.offset] = dict.fromkeys(zip(batch.namespaces, batch.keys, strict=True))
        return refs

    def rows(self, first_batch: int = 0) -> Iterator[Applied]:
        """Yield every row of the log except control rows, from the batch with this index on."""
        for logged in self.batches[first_batch:]:
            for row in range(0 if logged.batch.is_control else logged.count):
                yield Applied(
                    logged.offset + row, logged.lamport + row, logged.batch.delta(row, logged.source)
                )

    def later_offsets_of(self, ref: Ref, start: int) -> list[int]:
        """Return the offsets of a vector's rows from `start` on."""
        return [logged.offset + row for logged, row in self._rows_of([ref]) if logged.offset + row >= start]


class ReferenceModel:
    """The rows applied so far, in order, and the states that they fold to."""

    def __init__(self) -> None:
        self.states: dict[Ref, VectorState] = {}
        self.offsets: dict[int, None] = {}
        """Offsets of the applied rows, in order."""
        self._forgotten_offsets: set[int] = set()
        self._rows_by_ref: dict[Ref, dict[Key, tuple[LoggedBatch, int]]] = {}
        # A vector's rows mostly come in the same order, so each row's result is computed once.
        self._transitions: dict[int, tuple[VectorState, VectorState]] = {}
        self._log_rows: dict[int, tuple[LoggedBatch, int]] = {}
        self._rows: dict[int, Applied] = {}

    def clear(self) -> None:
        """Forget all rows: the sink starts over."""
        self.states.clear()
        self.offsets.clear()
        self._forgotten_offsets.clear()
        self._rows_by_ref.clear()

    def apply(self, deliveries: Sequence[Delivery], below: int | None = None) -> None:
        """Note rows as applied; with `below`, only those below that offset. Duplicates have no effect."""
        for delivery in deliveries:
            logged = delivery.logged
            for row in rows_of(delivery):
                offset = logged.offset + row
                is_new = offset not in self.offsets and offset not in self._forgotten_offsets
                if is_new and (below is None or offset < below):
                    self.offsets[offset] = None
                    self._apply_row(logged, row)

    def forget(self, erased: Collection[Ref], before: int) -> None:
        """Forget these vectors, and those with no row from offset `before` on, unless they are alive."""
        for ref, state in list(self.states.items()):
            offsets = [logged.offset + row for logged, row in self._rows_by_ref[ref].values()]
            if not state.alive and (ref in erased or max(offsets) < before):
                del self.states[ref], self._rows_by_ref[ref]
                self._forgotten_offsets.update(offsets)
                for offset in offsets:
                    self.offsets.pop(offset, None)

    def rows(self) -> list[Applied]:
        """Return all applied rows, in the order in which they were applied."""
        for offset in self.offsets:
            if offset not in self._rows:
                logged, row = self._log_rows[offset]
                delta = logged.batch.delta(row, logged.source)
                self._rows[offset] = Applied(offset, logged.lamport + row, delta)
        return [self._rows[offset] for offset in self.offsets]

    def _apply_row(self, logged: LoggedBatch, row: int) -> None:
        batch, offset = logged.batch, logged.offset + row
        ref = (batch.namespaces[row], batch.keys[row])
        before, key = self.states.get(ref, _NO_STATE), logged.key(row)
        rows = self._rows_by_ref.setdefault(ref, {})
        rows[key] = self._log_rows[offset] = (logged, row)
        if (before.key is not None and key < before.key) or logged.known_ids is not KnownIds.NONE:
            self.states[ref] = _fold_all(rows)
            return
        transition = self._transitions.get(offset)
        if transition is None or transition[0] is not before:
            after = apply(before, batch.operation(row), batch.metadata(row), key)
            transition = self._transitions[offset] = (before, after)
        self.states[ref] = transition[1]


def _fold_all(rows: Mapping[Key, tuple[LoggedBatch, int]]) -> VectorState:
    """Return a vector's state; of several deltas with one id, the first in canonical order takes effect."""
    seen_ids: set[bytes] = set()
    duplicates = set()
    for key in sorted(rows):
        logged, row = rows[key]
        if logged.batch.ids is not None:
            duplicates |= {key} if logged.batch.ids[row] in seen_ids else set()
            seen_ids.add(logged.batch.ids[row])
    changes = (
        (key, logged.batch.operation(row), logged.batch.metadata(row)) for key, (logged, row) in rows.items()
    )
    return fold(changes, without_effect=duplicates)


def rows_of(delivery: Delivery) -> list[int]:
    """Return the rows that the delivery selects."""
    rows: Any = range(delivery.logged.count) if delivery.rows is None else delivery.rows.tolist()
    return list(rows)


def offsets_of(delivery: Delivery) -> list[int]:
    """Return the offsets of the rows that the delivery selects."""
    return [delivery.first_offset + row for row in rows_of(delivery)]


def lamport_below(deliveries: Iterable[Delivery], next_offset: int) -> int:
    """Return the highest Lamport number of the rows below an offset."""
    numbers = (
        delivery.logged.lamport + row
        for delivery in deliveries
        for row in rows_of(delivery)
        if delivery.first_offset + row < next_offset
    )
    return max(numbers, default=0)
