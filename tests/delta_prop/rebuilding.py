"""Shared parts of rebuild tests: a snapshot made from a log's batches, and a sink that outlives itself.

The states come from the arithmetic's own fold; no sink's code, and none of the log's, is used for them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio

from delta_prop_sinks import ResumePoint, StopSink, TryAgain
from delta_prop_wire.algebra import VectorState, apply, fold
from delta_prop_wire.batch import LoggedBatch
from delta_prop_wire.cursor import Cursor
from delta_prop_wire.delta import Source
from delta_prop_wire.state_rows import StateRow, encode_states

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from delta_prop import Propagator
    from delta_prop_sinks import Delivery, SinkContext

Ref = tuple[str, str]
FRAME_ROWS = 5


class History:
    """Everything that a service's log was given, read while it is there."""

    def __init__(self, p: Propagator) -> None:
        self.log: Any = p._log
        self.batches: list[LoggedBatch] = []

    def read(self) -> None:
        """Read new batches; to be called before the log drops them."""
        at = self.batches[-1].next_offset if self.batches else self.log.start_offset
        while at < self.log.high_watermark:
            self.batches += self.log.read(at, rows_max=1000, bytes_max=1 << 24)
            at = self.batches[-1].next_offset

    def states(self, end: int | None = None) -> dict[Ref, VectorState]:
        """The fold of everything below an offset."""
        return {row[:2]: row.state for row in self.rows(end)}

    def rows(self, end: int | None = None) -> list[StateRow]:
        rows: dict[Ref, list[Any]] = {}
        last: dict[Ref, int] = {}
        for logged in self.batches:
            for row in range(0 if logged.batch.is_control else logged.count):
                if end is None or logged.offset + row < end:
                    batch, ref = logged.batch, (logged.batch.namespaces[row], logged.batch.keys[row])
                    rows.setdefault(ref, []).append(
                        (logged.key(row), batch.operation(row), batch.metadata(row))
                    )
                    last[ref] = logged.offset + row
        return [StateRow(*ref, fold(changes), last[ref]) for ref, changes in sorted(rows.items())]

    def take_snapshot(self) -> FakeSnapshot:
        """As of now; from here on the log has it."""
        self.read()
        snapshot = FakeSnapshot(self.batches[-1].next_offset, self.rows())
        self.log.snapshot = lambda: snapshot
        self.log.may_have_snapshot = lambda: True
        return snapshot


class FakeSnapshot:
    """A snapshot in memory; it can be made to fail while it is read."""

    def __init__(self, offset: int, rows: list[StateRow]) -> None:
        self.offset = offset
        self.rows = len(rows)
        self.begin = 0
        self.lamport = max(row.state.key[0] for row in rows if row.state.key)
        self.opened = self.closed = 0
        self.fails = 0
        self._rows = rows

    def frames(self) -> Iterator[LoggedBatch]:
        self.opened += 1
        for at in range(0, len(self._rows), FRAME_ROWS):
            if self.fails and at:
                self.fails -= 1
                raise OSError(5, "Input/output error")
            batch = encode_states(self._rows[at : at + FRAME_ROWS])
            yield LoggedBatch(batch, at, 0, Source.LOCAL)

    def close(self) -> None:
        self.closed += 1


class Place:
    """The storage of a sink; it outlives the sink."""

    def __init__(self) -> None:
        self.states: dict[Ref, VectorState] = {}
        self.offsets: dict[Ref, int] = {}
        self.cursor: Cursor | None = None
        self.lamport = 0
        self.void = False
        self.calls: list[str] = []
        self.fail: dict[int, BaseException] = {}  # by the number of the call
        self.hang: set[int] = set()
        self.release = anyio.Event()


class PlacedSink:
    """Keeps states and its cursor in a place, at once; additive deltas show whether one came twice."""

    def __init__(self, place: Place, name: str = "placed", *, cursor: bool = True) -> None:
        self.name = name
        self.place = place
        self._cursor = cursor

    async def open(self, context: SinkContext) -> ResumePoint | None:
        self.context = context
        if not self._cursor:
            return None
        place = self.place
        cursor = place.cursor or Cursor(context.log_id, context.epoch, 0)
        return ResumePoint(cursor, place.lamport, place.void)

    async def apply(self, deliveries: Sequence[Delivery]) -> None:
        await self._call("apply")
        for delivery in deliveries:
            rows = range(delivery.logged.count) if delivery.rows is None else delivery.rows.tolist()
            for row in rows:
                self._take_row(delivery.logged, row)
            self._move(delivery.next_offset)

    def _take_row(self, logged: LoggedBatch, row: int) -> None:
        batch, place = logged.batch, self.place
        ref, at = (batch.namespaces[row], batch.keys[row]), logged.offset + row
        if at <= place.offsets.get(ref, -1):
            return
        before = place.states.get(ref, VectorState())
        place.states[ref] = apply(before, batch.operation(row), batch.metadata(row), logged.key(row))
        place.offsets[ref] = at
        place.lamport = max(place.lamport, logged.lamport + row)

    def _move(self, offset: int) -> None:
        self.place.cursor = Cursor(self.context.log_id, self.context.epoch, offset)
        if self._cursor:
            self.context.committed(offset)

    async def begin_rebuild(self, offset: int) -> None:
        await self._call("begin")
        self.place.void = True
        self.place.states.clear()
        self.place.offsets.clear()

    async def load_states(self, rows: Sequence[StateRow]) -> None:
        await self._call("take")
        assert self.place.void
        for row in rows:
            self.place.states[row[:2]] = row.state
            self.place.offsets[row[:2]] = row.offset

    async def end_rebuild(self, offset: int, lamport: int) -> None:
        await self._call("end")
        self.place.void = False
        self.place.lamport = lamport
        self._move(offset)

    async def _call(self, what: str) -> None:
        place = self.place
        place.calls.append(what)
        number = len(place.calls)
        if number in place.hang:
            await place.release.wait()
        failure = place.fail.pop(number, None)
        if failure is not None:
            raise failure

    async def aclose(self) -> None:
        pass

    def statistics(self) -> int:
        return len(self.place.states)


def same(found: dict[Ref, VectorState], expected: dict[Ref, VectorState]) -> None:
    """To the bit, with last keys and counts."""
    assert found.keys() == expected.keys()
    for ref, state in expected.items():
        assert found[ref].content == state.content, ref
        assert (found[ref].key, found[ref].ignored) == (state.key, state.ignored), ref


FAILURES: tuple[BaseException, ...] = (TryAgain("not now"), StopSink("no more"), RuntimeError("a defect"))
