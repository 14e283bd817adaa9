"""The conformance kit: does a sink keep the contract of `sink.py`? For our sinks and for users' own.

It plays the delivery loop: in order, in pieces, again, cancelled, across closing and opening. It looks at
what readers see, through `get` where the sink has one, or through a `probe` of the caller's.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import FrozenInstanceError, fields, is_dataclass
from inspect import isawaitable
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np

from delta_prop_sinks.sink import Delivery, ResumePoint
from delta_prop_wire.algebra import State, fold
from delta_prop_wire.batch import LoggedBatch
from delta_prop_wire.delta import (
    Delta,
    Source,
    create,
    delete,
    dense,
    metadata_only,
    offset,
    opaque,
    scale,
    sparse,
    sparse_add,
)
from delta_prop_wire.encode import encode_batch, encode_void
from delta_prop_wire.errors import DeltaPropError
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence
    from contextlib import AbstractAsyncContextManager

    from delta_prop_sinks.sink import Sink

    Probe = Callable[[Sink], Awaitable[object]]
    Ref = tuple[str, str]

_LOG_ID = b"conformance kit!"
_ORIGIN = 0x9000_0000_0000_0012


class NotConforming(DeltaPropError):
    """The sink breaks the contract; the message says which part and how."""


async def check_sink(make: Callable[[], Sink], probe: Probe | None = None) -> None:
    """Raise NotConforming unless the sink keeps the contract.

    `make` gives the sink anew, over the same file or service where it has one, empty the first time.
    `probe` gives what readers see, comparable; it must not depend on how often a delta was delivered.
    """
    log = _Log()
    sink = make()
    _check_outside(sink)
    done = await _open(sink, log, 0)
    await _apply(sink, log, log.deliveries(done)[:3])
    await _cancelled(sink, log)
    await _apply(sink, log, log.deliveries(done))
    seen = await _see(sink, log, probe)
    await _apply(sink, log, log.deliveries(done))
    await _apply(sink, log, list(_cut(log.deliveries(done))))
    _same(seen, await _see(sink, log, probe), "after every delivery came again, whole and in pieces")
    _check_outside(sink)
    await sink.aclose()
    await sink.aclose()

    again = make()
    done = await _open(again, log, log.next_offset)
    log.grow()
    await _apply(again, log, log.deliveries(done))
    seen = await _see(again, log, probe)
    await _apply(again, log, log.deliveries(done))
    _same(seen, await _see(again, log, probe), "after a restart and a replay")
    await again.aclose()


# --- what is checked


def _check_outside(sink: Sink) -> None:
    if not isinstance(sink.name, str) or not sink.name:
        raise NotConforming(f"name: {sink.name!r} is not a text that operators can use")
    statistics = sink.statistics()
    if not is_dataclass(statistics) or isinstance(statistics, type):
        raise NotConforming(f"statistics(): {statistics!r:.80} is not a frozen dataclass")
    for one in fields(statistics)[:1]:
        try:
            setattr(statistics, one.name, getattr(statistics, one.name))
        except FrozenInstanceError:
            continue
        raise NotConforming("statistics(): can be changed; make the dataclass frozen")


async def _open(sink: Sink, log: _Log, bound: int) -> int:
    log.reported = 0
    point = await sink.open(log)
    if point is None:
        return 0
    if not isinstance(point, ResumePoint):
        raise NotConforming(f"open(): {point!r:.80} is not a ResumePoint or None")
    cursor = point.cursor
    if cursor.log_id != log.log_id or not 0 <= cursor.next_offset <= bound:
        raise NotConforming(f"open(): the cursor {cursor} is not within the log, which ends at {bound}")
    if cursor.next_offset and point.lamport < log.lamport_below(cursor.next_offset):
        raise NotConforming(f"open(): Lamport number {point.lamport} is below what the cursor covers")
    return cursor.next_offset


async def _apply(sink: Sink, log: _Log, deliveries: Sequence[Delivery]) -> None:
    if deliveries:
        log.delivered = max(log.delivered, deliveries[-1].next_offset)
        await sink.apply(deliveries)
    if log.reported > log.delivered:
        raise NotConforming(f"committed({log.reported}), but only {log.delivered} was delivered")


async def _cancelled(sink: Sink, log: _Log) -> None:
    """A cancelled apply has happened, or not, or in part; it may come again."""
    with anyio.CancelScope() as scope:
        scope.cancel()
        await _apply(sink, log, log.deliveries(0))


async def _see(sink: Sink, log: _Log, probe: Probe | None) -> object:
    get = getattr(sink, "get", None)
    if get is not None:
        await _check_states(get, log)
    return None if probe is None else await probe(sink)


async def _check_states(get: Callable[[str, str], Any], log: _Log) -> None:
    """What `get` gives is the fold of what was delivered, or nothing where the sink may forget."""
    for (namespace, vector_id), expected in log.states().items():
        found = get(namespace, vector_id)
        if isawaitable(found):
            found = await found
        if found is not None and (not isinstance(found, State) or found.content != expected.content):
            raise NotConforming(
                f"get({namespace!r}, {vector_id!r}): {found!r:.200} is not the fold of its deltas, "
                f"{expected!r:.200}"
            )


def _same(before: object, after: object, when: str) -> None:
    if before != after:
        raise NotConforming(f"{when}, readers see {after!r:.200} instead of {before!r:.200}")


def _cut(deliveries: Sequence[Delivery]) -> Iterator[Delivery]:
    """The same rows, a delivery a row, all but the first row of each batch twice."""
    for delivery in deliveries:
        for row in range(delivery.logged.count):
            yield Delivery(delivery.logged, np.arange(row, min(row + 2, delivery.logged.count)))


# --- the false world


class _Clock:
    def now(self) -> float:
        return 0.0

    def wall_us(self) -> int:
        return 0


class _Threads:
    async def run(self, function: Callable[[], Any]) -> Any:
        return function()


class _Log:
    """A log with something of every kind, as the sink's context."""

    log_id = _LOG_ID
    epoch = 1
    log_start = 0
    topics = frozenset("*")

    def __init__(self) -> None:
        self.clock = _Clock()
        self.threads = _Threads()
        self.batches: list[LoggedBatch] = []
        self.next_offset = self.delivered = self.reported = 0
        rows = [Delta(f"row-{i}", create([i, 1, 2, 3]), metadata={"n": i}) for i in range(12)]
        self._append(*rows)
        self._append(Delta("row-0", sparse([1], [7])), Delta("row-0", sparse_add([1, 1], [1, 1])))
        self._append(Delta("row-1", dense([9, 9, 9, 9])), Delta("row-1", scale(2)), Delta("row-1", offset(1)))
        self._void()
        self._append(Delta("row-2", delete()), Delta("row-2", sparse([0], [1])), Delta("nobody", scale(2)))
        self._append(Delta("fact", opaque(b"bytes"), namespace="facts"))
        self._append(Delta("row-3", metadata_only(), metadata={"n": None, "é": [1, {"deep": True}]}))

    def grow(self) -> None:
        self._append(*(Delta(f"row-{i}", sparse_add([0], [0.5])) for i in range(12)))
        self._append(Delta("row-2", create([1, 1, 1, 1])), Delta("fact", delete(), namespace="facts"))

    def background_thread(self) -> AbstractAsyncContextManager[_Threads]:
        return nullcontext(self.threads)

    def committed(self, next_offset: int) -> None:
        self.reported = max(self.reported, next_offset)

    def history(self, namespace: str, vector_id: str) -> Iterator[tuple[LoggedBatch, int]]:
        for logged in self.batches:
            for row, key in enumerate(logged.batch.keys):
                if key == vector_id and logged.batch.namespaces[row] == namespace:
                    yield logged, row

    def deliveries(self, start: int) -> list[Delivery]:
        return [
            Delivery(logged)
            for logged in self.batches
            if logged.next_offset > start and not logged.batch.is_control
        ]

    def lamport_below(self, next_offset: int) -> int:
        return max(
            logged.lamport + min(logged.count, next_offset - logged.offset) - 1
            for logged in self.batches
            if logged.offset < next_offset and not logged.batch.is_control
        )

    def states(self) -> dict[Ref, State]:
        """The fold of all that was delivered."""
        rows: dict[Ref, list[Any]] = {}
        for delivery in self.deliveries(0):
            logged, batch = delivery.logged, delivery.batch
            if logged.offset < self.delivered:
                for row, ref in enumerate(zip(batch.namespaces, batch.keys, strict=True)):
                    change = (logged.key(row), batch.operation(row), batch.metadata(row))
                    rows.setdefault(ref, []).append(change)
        return {ref: fold(changes) for ref, changes in rows.items()}

    def _append(self, *deltas: Delta) -> None:
        self._log(encode_batch(deltas, origin=_ORIGIN, base=self.next_offset + 1))

    def _void(self) -> None:
        self._log(
            encode_void(origin=_ORIGIN, base=self.next_offset + 1, count=2, code=ErrorCode.INVALID_DELTA)
        )

    def _log(self, batch: Any) -> None:
        self.batches.append(LoggedBatch(batch, self.next_offset, self.next_offset + 1, Source.LOCAL))
        self.next_offset = self.batches[-1].next_offset
