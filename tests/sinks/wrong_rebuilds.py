"""Sinks that break the contract of a rebuild, and the expected complaints of the kit."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from delta_prop_sinks import ResumePoint
from tests.sinks.correct_sinks import Plain, Store

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from delta_prop_sinks import SinkContext
    from delta_prop_wire.state_rows import StateRow


class KeepsWhatItHad(Store):
    """Adds the states to the rows that it holds instead of replacing these."""

    async def end_rebuild(self, offset: int, lamport: int) -> None:
        self.target.next_states = self.target.states | self.target.next_states
        await super().end_rebuild(offset, lamport)


class TakesOnlyNewerStates(Store):
    """Keeps the rows that it has, as if the states were redelivered deltas. Wrong: these rows may be of
    another log, or beyond this log's end.
    """

    async def load_states(self, rows: Sequence[StateRow]) -> None:
        await super().load_states([row for row in rows if row[:2] not in self.states])
        self.target.next_states.update(
            {row[:2]: self.states[row[:2]] for row in rows if row[:2] in self.states}
        )


class HidesAnUnfinishedRebuild(Store):
    async def open(self, context: SinkContext) -> ResumePoint | None:
        point = await super().open(context)
        return point and ResumePoint(point.cursor, point.lamport)


class AppliesAStateTwice(Store):
    """Changes a state that it gets a second time, as an addition would."""

    async def load_states(self, rows: Sequence[StateRow]) -> None:
        second_rows = [
            row._replace(state=replace(row.state, metadata={"again": True}))
            for row in rows
            if row[:2] in self.target.next_states
        ]
        await super().load_states(
            [row for row in rows if row[:2] not in self.target.next_states] + second_rows
        )


class KeepsItsOldCursor(Store):
    async def end_rebuild(self, offset: int, lamport: int) -> None:
        before = self.target.next_offset
        await super().end_rebuild(offset, lamport)
        self.target.next_offset = self.next_offset = before


class ReportsARebuildForEver(Store):
    async def end_rebuild(self, offset: int, lamport: int) -> None:
        await super().end_rebuild(offset, lamport)
        self.target.rebuilding = True


class EndsARebuildWithAForeignError(Store):
    async def call_target(self, function: Callable[[], None]) -> None:
        await self.context.threads.run(function)


WRONG: tuple[tuple[type[Plain], str, str], ...] = (
    (KeepsWhatItHad, "rebuild", "'not-of-this-log', which no state contained, still existed"),
    (TakesOnlyNewerStates, "rebuild", "after an undisturbed rebuild, get('default', '"),
    (HidesAnUnfinishedRebuild, "rebuild", "and reported no rebuild"),
    (AppliesAStateTwice, "rebuild", "after an undisturbed rebuild, get('default', '"),
    # Rows below the old cursor have higher Lamport numbers than the rebuild had; this is checked first.
    (KeepsItsOldCursor, "resume", "open() after a rebuild and a crash returned the Lamport number "),
    (ReportsARebuildForEver, "rebuild", "reported a rebuild, and none was in progress"),
    (EndsARebuildWithAForeignError, "rebuild", "raised OSError(5, "),
)
"""Each wrong sink, the rule that it breaks, and a part of the expected complaint."""
