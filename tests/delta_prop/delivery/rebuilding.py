"""Helpers for rebuild tests: a snapshot built from a log's batches, and a sink on fake storage.

The states come from the fold of the algebra, not from code of the sinks or the log.
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
    """All batches of a service's log; the test reads them before the log drops them."""

    def __init__(self, p: Propagator) -> None:
        self.log: Any = p.internals().partition.log
        self.batches: list[LoggedBatch] = []

    def read(self) -> None:
        """Read the batches that the log has got since the last call."""
        offset = self.batches[-1].next_offset if self.batches else self.log.start_offset
        while offset < self.log.high_watermark:
            self.batches += self.log.read(offset, rows_max=1000, bytes_max=1 << 24)
            offset = self.batches[-1].next_offset

    def states(self, end: int | None = None) -> dict[Ref, VectorState]:
        """Return the fold of all rows below an offset."""
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
        """Take a snapshot of the present states, and give it to the log."""
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
        self.opened = self.closed = 0  # numbers of calls
        self.read_failures = 0  # how many reads still fail
        self._rows = rows

    def frames(self) -> Iterator[LoggedBatch]:
        self.opened += 1
        for start in range(0, len(self._rows), FRAME_ROWS):
            if self.read_failures and start:
                self.read_failures -= 1
                raise OSError(5, "Input/output error")
            batch = encode_states(self._rows[start : start + FRAME_ROWS])
            yield LoggedBatch(batch, start, 0, Source.LOCAL)

    def close(self) -> None:
        self.closed += 1


class FakeStorage:
    """The storage of a sink, which outlives the sink."""

    def __init__(self) -> None:
        self.states: dict[Ref, VectorState] = {}
        self.offsets: dict[Ref, int] = {}
        self.cursor: Cursor | None = None
        self.lamport = 0
        self.rebuilding = False
        self.calls: list[str] = []
        self.failures: dict[int, BaseException] = {}  # by number of the call
        self.hanging_calls: set[int] = set()  # by number of the call, until `release`
        self.release = anyio.Event()


class FakeStorageSink:
    """A sink that stores its states and its cursor together in a `FakeStorage`."""

    def __init__(self, storage: FakeStorage, name: str = "fake", *, has_cursor: bool = True) -> None:
        self.name = name
        self.storage = storage
        self._has_cursor = has_cursor

    async def open(self, context: SinkContext) -> ResumePoint | None:
        self.context = context
        if not self._has_cursor:
            return None
        storage = self.storage
        cursor = storage.cursor or Cursor(context.log_id, context.epoch, 0)
        return ResumePoint(cursor, storage.lamport, storage.rebuilding)

    async def apply(self, deliveries: Sequence[Delivery]) -> None:
        await self._call("apply")
        for delivery in deliveries:
            rows = range(delivery.logged.count) if delivery.rows is None else delivery.rows.tolist()
            for row in rows:
                self._apply_row(delivery.logged, row)
            self._set_cursor(delivery.next_offset)

    def _apply_row(self, logged: LoggedBatch, row: int) -> None:
        batch, storage = logged.batch, self.storage
        ref, offset = (batch.namespaces[row], batch.keys[row]), logged.offset + row
        if offset <= storage.offsets.get(ref, -1):
            return
        before = storage.states.get(ref, VectorState())
        storage.states[ref] = apply(before, batch.operation(row), batch.metadata(row), logged.key(row))
        storage.offsets[ref] = offset
        storage.lamport = max(storage.lamport, logged.lamport + row)

    def _set_cursor(self, offset: int) -> None:
        self.storage.cursor = Cursor(self.context.log_id, self.context.epoch, offset)
        if self._has_cursor:
            self.context.committed(offset)

    async def begin_rebuild(self, offset: int) -> None:
        await self._call("begin")
        self.storage.rebuilding = True
        self.storage.states.clear()
        self.storage.offsets.clear()

    async def load_states(self, rows: Sequence[StateRow]) -> None:
        await self._call("load")
        assert self.storage.rebuilding
        for row in rows:
            self.storage.states[row[:2]] = row.state
            self.storage.offsets[row[:2]] = row.offset

    async def end_rebuild(self, offset: int, lamport: int) -> None:
        await self._call("end")
        self.storage.rebuilding = False
        self.storage.lamport = lamport
        self._set_cursor(offset)

    async def _call(self, method: str) -> None:
        storage = self.storage
        storage.calls.append(method)
        number = len(storage.calls)
        if number in storage.hanging_calls:
            await storage.release.wait()
        failure = storage.failures.pop(number, None)
        if failure is not None:
            raise failure

    async def aclose(self) -> None:
        pass

    def statistics(self) -> int:
        return len(self.storage.states)


def assert_same_states(found: dict[Ref, VectorState], expected: dict[Ref, VectorState]) -> None:
    """Check that states are equal to the bit, with their last keys and counts."""
    assert found.keys() == expected.keys()
    for ref, state in expected.items():
        assert found[ref].content == state.content, ref
        assert (found[ref].key, found[ref].ignored) == (state.key, state.ignored), ref


FAILURES: tuple[BaseException, ...] = (TryAgain("not now"), StopSink("no more"), RuntimeError("a defect"))
