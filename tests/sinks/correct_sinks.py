"""Minimal sinks that keep the contract: base classes of the sinks that break it.

`Plain` keeps states in memory and no cursor. `Prompt` keeps both in a `Target` that outlives it, and writes
them at once. `Store` writes later, and has every optional part of a sink.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel

from delta_prop_sinks import (
    Backlog,
    RejectDelta,
    ResumePoint,
    StopSink,
    TryAgain,
    fold_again,
    must_fold_again,
)
from delta_prop_wire.algebra import VectorState, apply
from delta_prop_wire.cursor import Cursor
from delta_prop_wire.delta import Dot, Head, Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from delta_prop_sinks import Delivery, SinkContext
    from delta_prop_wire.state_rows import StateRow

    Ref = tuple[str, str]

KNOWN_KINDS = frozenset(map(int, Kind))
FLUSH_ROWS = 6
"""From this many changed vectors on, `Store` writes them within `apply`."""


@dataclass(frozen=True)
class CallStatistics:
    calls: int = 0


class Plain:
    """Applies in memory, at once. A row is a duplicate unless its key is above its vector's last key."""

    name = "plain"

    def __init__(self) -> None:
        self.states: dict[Ref, VectorState] = {}
        self.to_refold: dict[Ref, int] = {}
        self.calls = 0

    async def open(self, context: SinkContext) -> ResumePoint | None:
        self.context = context
        return None

    async def apply(self, deliveries: Sequence[Delivery]) -> None:
        self.calls += 1
        self.to_refold.clear()
        for delivery in deliveries:
            self.take(delivery)
        await self.refold()

    async def refold(self) -> None:
        """Refold the vectors with forwarded rows that sort before their last key, in one call."""
        self.states |= await fold_again(self.context, self.to_refold)
        self.to_refold.clear()

    def take(self, delivery: Delivery) -> None:
        for row in self.rows(delivery):
            self.take_row(delivery, row)

    def rows(self, delivery: Delivery) -> list[int]:
        return list(range(delivery.batch.count)) if delivery.rows is None else delivery.rows.tolist()

    def take_row(self, delivery: Delivery, row: int) -> None:
        batch, key = delivery.batch, delivery.logged.key(row)
        ref = (batch.namespaces[row], batch.keys[row])
        state = self.states.get(ref, VectorState())
        if ref in self.to_refold or must_fold_again(delivery.logged, row, state.key):
            self.to_refold[ref] = delivery.first_offset + row
        elif not self.is_duplicate(state, key):
            self.states[ref] = apply(state, batch.operation(row), batch.metadata(row), key)

    def is_duplicate(self, state: VectorState, key: tuple[int, int, int]) -> bool:
        return state.key is not None and state.key >= key

    def get(self, namespace: str, vector_id: str) -> VectorState | None:
        return self.states.get((namespace, vector_id))

    async def aclose(self) -> None:
        pass

    def statistics(self) -> Any:
        return CallStatistics(self.calls)


class Target:
    """Storage that outlives its sinks, as a file does. After `fail(n)`, operations fail from the n-th on."""

    def __init__(self) -> None:
        self.states: dict[Ref, VectorState] = {}
        self.last_offsets: dict[Ref, int] = {}
        self.next_offset = self.lamport = 0
        self.users = 0
        self.rebuilding = False
        self.next_states: dict[Ref, VectorState] = {}
        self._operations_left: int | None = None

    def fail(self, operations: int | None) -> None:
        self._operations_left = operations

    def operate(self) -> None:
        if self._operations_left is not None:
            self._operations_left -= 1
            if self._operations_left <= 0:
                raise OSError(28, "No space left on device")

    def take(self, ref: Ref, offset: int) -> None:
        self.operate()
        self.last_offsets[ref] = max(offset, self.last_offsets.get(ref, 0))

    def write(self, states: dict[Ref, VectorState], next_offset: int, lamport: int) -> None:
        self.operate()
        self.states.update(states)
        self.next_offset, self.lamport = next_offset, lamport

    def remove(self, refs: Sequence[Ref]) -> None:
        self.operate()
        for ref in refs:
            self.states.pop(ref, None)

    def begin_rebuild(self) -> None:
        self.operate()
        self.rebuilding, self.next_states = True, {}

    def load_states(self, rows: Sequence[StateRow]) -> None:
        self.operate()
        self.next_states.update({row[:2]: row.state for row in rows})

    def end_rebuild(self, offset: int, lamport: int) -> None:
        self.operate()
        if self.rebuilding:
            self.rebuilding, self.states = False, self.next_states
            self.next_offset, self.lamport = offset, lamport


class Prompt(Plain):
    """Writes the rows of a call and the cursor before the call returns; waits once per call."""

    name = "prompt"

    def __init__(self, target: Target) -> None:
        super().__init__()
        self.target = target

    async def open(self, context: SinkContext) -> ResumePoint | None:
        self.context = context
        self.states = dict(self.target.states)
        self.next_offset, self.lamport = self.target.next_offset, self.target.lamport
        return ResumePoint(Cursor(context.log_id, context.epoch, self.next_offset), self.lamport)

    async def apply(self, deliveries: Sequence[Delivery]) -> None:
        await anyio.lowlevel.checkpoint()
        await super().apply(deliveries)
        for delivery in deliveries:
            self.next_offset = self.cursor_after(delivery)
            self.lamport = max(self.lamport, delivery.logged.lamport + max(self.rows(delivery)))
        self.write(deliveries)

    def cursor_after(self, delivery: Delivery) -> int:
        return self.next_offset if delivery.redelivered else max(self.next_offset, delivery.next_offset)

    def write(self, deliveries: Sequence[Delivery]) -> None:
        try:
            self.target.write(self.states, self.next_offset, self.lamport)
        except OSError as error:
            raise TryAgain(f"the target cannot be written: {error}") from error
        self.report()

    def report(self) -> None:
        self.context.committed(self.next_offset)


class Store(Plain):
    """Keeps states and its cursor in a target, and writes them later; rejects unknown kinds."""

    name = "store"

    def __init__(self, target: Target) -> None:
        super().__init__()
        self.target = target
        self.unwritten: dict[Ref, VectorState] = {}
        self.next_offset = self.lamport = 0
        self.failure: OSError | None = None
        self.is_open = False
        self.flushing = anyio.Lock()

    async def open(self, context: SinkContext) -> ResumePoint | None:
        self.context = context
        try:
            self.states = await context.threads.run(lambda: dict(self.target.states))
        except OSError as error:
            raise StopSink(f"the target cannot be read: {error}") from error
        self.next_offset, self.lamport = self.target.next_offset, self.target.lamport
        self.is_open = True
        return ResumePoint(
            Cursor(context.log_id, context.epoch, self.next_offset), self.lamport, self.target.rebuilding
        )

    async def begin_rebuild(self, offset: int) -> None:
        async with self.flushing:
            await self.call_target(self.target.begin_rebuild)
            self.unwritten.clear()

    async def load_states(self, rows: Sequence[StateRow]) -> None:
        await self.call_target(lambda: self.target.load_states(rows))

    async def end_rebuild(self, offset: int, lamport: int) -> None:
        await self.call_target(lambda: self.target.end_rebuild(offset, lamport))
        self.states = dict(self.target.states)
        self.next_offset, self.lamport = offset, lamport
        self.context.committed(offset)

    async def call_target(self, function: Callable[[], None]) -> None:
        try:
            await self.context.threads.run(function)
        except OSError as error:
            raise TryAgain(f"the target cannot be written: {error}") from error

    async def apply(self, deliveries: Sequence[Delivery]) -> None:
        self.calls += 1
        if self.failure is not None:
            await self.flush_or_raise()
        has_redelivered = any(delivery.redelivered for delivery in deliveries)
        try:
            for delivery in deliveries:
                await anyio.lowlevel.checkpoint()
                await self.take_full_delivery(delivery)
                self.advance_past(delivery)
                if len(self.unwritten) >= FLUSH_ROWS:
                    await self.flush_or_raise()
        except RejectDelta:
            if has_redelivered:
                await self.flush_or_raise()
            raise
        if has_redelivered:  # after a crash these rows would not be delivered again
            await self.flush_or_raise()

    async def take_full_delivery(self, delivery: Delivery) -> None:
        """Take a full delivery, whose end may become the cursor, or the rows before a rejected row."""
        self.to_refold.clear()
        try:
            self.take(delivery)
        except RejectDelta:
            await self.refold()
            raise
        await self.refold()

    async def refold(self) -> None:
        refs = list(self.to_refold)
        await super().refold()
        self.unwritten |= {ref: self.states[ref] for ref in refs}

    def advance_past(self, delivery: Delivery) -> None:
        if not delivery.redelivered:
            self.advance_to(delivery.next_offset)

    def advance_to(self, next_offset: int) -> None:
        self.next_offset = max(self.next_offset, next_offset)

    def take_row(self, delivery: Delivery, row: int) -> None:
        batch, offset = delivery.batch, delivery.first_offset + row
        if batch.kinds[row] not in KNOWN_KINDS:
            self.reject(offset)
        super().take_row(delivery, row)
        ref = (batch.namespaces[row], batch.keys[row])
        self.unwritten[ref] = self.states[ref]
        self.note_lamport(delivery.logged.lamport + row)

    def note_lamport(self, lamport: int) -> None:
        self.lamport = max(self.lamport, lamport)

    def reject(self, offset: int) -> None:
        self.advance_to(offset)
        raise RejectDelta(offset, "of a later version")

    async def flush_or_raise(self) -> None:
        try:
            await self.flush()
        except OSError as error:
            raise TryAgain(f"the target cannot be written: {error}") from error

    async def flush(self) -> None:
        async with self.flushing:
            await self.write()

    async def write(self) -> None:
        unwritten, self.unwritten = self.unwritten, {}
        next_offset, lamport = self.next_offset, self.lamport
        try:
            await self.context.threads.run(lambda: self.target.write(unwritten, next_offset, lamport))
        except BaseException:
            self.unwritten = unwritten | self.unwritten
            raise
        self.failure = None
        self.context.committed(next_offset)

    async def background(self) -> None:
        while True:
            await anyio.sleep(0.5)
            if self.unwritten:
                try:
                    await self.flush()
                except OSError as error:
                    self.failure = error

    def backlog(self) -> Backlog:
        return Backlog(min(len(self.unwritten), 1000), 1000)

    def head(self, namespace: str, vector_id: str) -> Head | None:
        state = self.get(namespace, vector_id)
        return None if state is None or state.key is None else Head(Dot(*state.key[1:]), state.alive)

    def dimensions(self) -> dict[str, int]:
        return {}  # it accepts vectors of any dimension

    async def aclose(self) -> None:
        was_open, self.is_open = self.is_open, False
        if was_open:
            with anyio.CancelScope(shield=True), anyio.move_on_after(2.0):
                await self.flush_or_raise()


class Forgetting(Store):
    """Removes tombstones from its target at once; it first writes all rows, and so its cursor."""

    name = "forgetting"

    def take_row(self, delivery: Delivery, row: int) -> None:
        super().take_row(delivery, row)
        ref = (delivery.batch.namespaces[row], delivery.batch.keys[row])
        self.target.last_offsets[ref] = delivery.first_offset + row

    async def forget(self, erased: Sequence[Ref], before: int) -> None:
        await self.flush_or_raise()
        refs = [ref for ref, state in self.states.items() if self.must_go(ref, state, erased, before)]
        await self.call_target(lambda: self.target.remove(refs))
        for ref in refs:
            del self.states[ref]

    def must_go(self, ref: Ref, state: VectorState, erased: Sequence[Ref], before: int) -> bool:
        return not state.alive and (ref in erased or self.target.last_offsets.get(ref, -1) < before)


class Through(Store):
    """Lets the service store its cursor, so the target must hold the rows when `apply` returns."""

    name = "through"

    async def open(self, context: SinkContext) -> ResumePoint | None:
        await super().open(context)
        return None

    async def apply(self, deliveries: Sequence[Delivery]) -> None:
        try:
            await super().apply(deliveries)
        except RejectDelta:
            await self.flush_or_raise()
            raise
        await self.flush_or_raise()
