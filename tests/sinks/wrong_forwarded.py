"""Sinks that handle forwarded rows wrongly, and what the conformance tests should report of them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from delta_prop_wire.algebra import VectorState, apply, fold
from delta_prop_wire.batch import LoggedBatch
from delta_prop_wire.delta import Source
from tests.sinks.correct_sinks import Plain, Store

if TYPE_CHECKING:
    from delta_prop_sinks import Delivery, SinkContext
    from tests.sinks.correct_sinks import Target


class FoldsForwardedRowsOnTop(Plain):
    """Applies every row once, in order of arrival."""

    def __init__(self) -> None:
        super().__init__()
        self.offsets: dict[tuple[str, str], int] = {}

    def take_row(self, delivery: Delivery, row: int) -> None:
        batch, offset = delivery.batch, delivery.first_offset + row
        ref = (batch.namespaces[row], batch.keys[row])
        if offset > self.offsets.get(ref, -1):
            self.offsets[ref] = offset
            state, key = self.states.get(ref, VectorState()), delivery.logged.key(row)
            self.states[ref] = apply(state, batch.operation(row), batch.metadata(row), key)


class TakesForwardedRowsForDuplicates(Plain):
    """Drops forwarded rows that sort before earlier ones, as if they were duplicates."""

    def take(self, delivery: Delivery) -> None:
        logged = delivery.logged
        local = LoggedBatch(logged.batch, logged.offset, logged.lamport, Source.LOCAL)
        super().take(replace(delivery, logged=local))


class BreaksTiesByArrival(Plain):
    """Orders rows with the same Lamport number by their arrival."""

    def take_row(self, delivery: Delivery, row: int) -> None:
        batch, key = delivery.batch, delivery.logged.key(row)
        ref = (batch.namespaces[row], batch.keys[row])
        state = self.states.get(ref, VectorState())
        if state.key is not None and state.key[0] == key[0] and key < state.key:
            self.states[ref] = apply(state, batch.operation(row), batch.metadata(row), key)
        else:
            super().take_row(delivery, row)


class FoldsDuplicateIdsTwice(Plain):
    """Treats rows of known ids as rows of new ids."""

    def take(self, delivery: Delivery) -> None:
        logged = delivery.logged
        unmarked = LoggedBatch(logged.batch, logged.offset, logged.lamport, logged.source)
        super().take(replace(delivery, logged=unmarked))


class RefoldsOnlyRowsSinceARebuild(Store):
    """Refolds from rows that it stores itself, which lack those below the states of a rebuild."""

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self.stored_rows: dict[tuple[str, str], dict[Any, Any]] = {}

    def take_row(self, delivery: Delivery, row: int) -> None:
        super().take_row(delivery, row)
        batch = delivery.batch
        rows = self.stored_rows.setdefault((batch.namespaces[row], batch.keys[row]), {})
        rows[delivery.logged.key(row)] = (
            batch.operation(row),
            batch.metadata(row),
            batch.ids and batch.ids[row],
        )

    async def refold(self) -> None:
        for ref in self.to_refold:
            rows, ids = self.stored_rows[ref], dict[bytes, Any]()
            duplicates = {
                key for key in sorted(rows) if rows[key][2] and ids.setdefault(rows[key][2], key) != key
            }
            changes = [(key, operation, patch) for key, (operation, patch, _) in rows.items()]
            self.unwritten[ref] = self.states[ref] = fold(changes, without_effect=duplicates)
        self.to_refold.clear()

    async def end_rebuild(self, offset: int, lamport: int) -> None:
        await super().end_rebuild(offset, lamport)
        self.stored_rows.clear()


class _WithoutStates:
    """A context whose history leaves out the states with which the log starts."""

    def __init__(self, context: SinkContext) -> None:
        self._context = context

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def history(self, vectors: Any) -> Any:
        async for logged, row in self._context.history(vectors):
            if not logged.batch.is_state:
                yield logged, row


class RefoldsWithoutInitialStates(Store):
    """Refolds from the deltas of the log, without the state with which the log starts."""

    async def refold(self) -> None:
        context = self.context
        self.context = _WithoutStates(context)  # type: ignore[assignment]
        try:
            await super().refold()
        finally:
            self.context = context


WRONG: tuple[tuple[type[Plain], str, str], ...] = (
    (
        FoldsForwardedRowsOnTop,
        "forwarded",
        "after a forwarded row that sorts before an earlier one of its vector, get('default', 'shar",
    ),
    (
        TakesForwardedRowsForDuplicates,
        "forwarded",
        "after a forwarded row that sorts before an earlier one of its vector, get('default', 'shar",
    ),
    (
        BreaksTiesByArrival,
        "forwarded",
        "after forwarded rows of two origins with equal Lamport numbers, get('default', 'shared-7')",
    ),
    (
        FoldsDuplicateIdsTwice,
        "forwarded",
        "after forwarded rows with the ids of rows that came earlier, get('default', 'shared-4')",
    ),
    (
        RefoldsOnlyRowsSinceARebuild,
        "forwarded",
        "after a rebuild from a snapshot that lies below forwarded rows, after these were redelivered, get('",
    ),
    (
        RefoldsWithoutInitialStates,
        "forwarded",
        "after a rebuild from a snapshot that lies below forwarded rows, after these were redelivered, get('",
    ),
)
"""Each wrong sink, the rule that it breaks, and a part of the expected complaint."""
