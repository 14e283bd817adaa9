"""One service's log over all its lives, as it was appended: what retention, compaction and crashes take from
the log itself is still here, and what a crash took is told apart.

It stands between a chain and its log and changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from delta_prop_simulations.disasters.violation import demand
from delta_prop_wire.delta import AckLevel
from delta_prop_wire.spec import BATCH_ROWS_MAX

if TYPE_CHECKING:
    from collections.abc import Iterator

    from delta_prop_broker.log.durable import DurableLog
    from delta_prop_broker.log.memory import MemoryLog
    from delta_prop_wire.batch import LoggedBatch

NOTHING_SURVIVES = AckLevel.QUORUM
"""Above every level that is granted."""

SURVIVES = {
    "ended": AckLevel.MEMORY,
    "killed": AckLevel.LOGGED,
    "power cut": AckLevel.DURABLE,
    "crashed": AckLevel.DURABLE,
}
"""By how a life ended: what was acknowledged at this level or above is there afterwards."""

READ_BYTES_MAX = 1 << 30


@dataclass(slots=True)
class Cut:
    """A tail that was lost, and the lowest level whose acknowledgements it must not hold."""

    batches: list[LoggedBatch]
    survives: AckLevel


@dataclass(slots=True)
class Record:
    """What one service's log held. `level`: the highest it promises, `visible_level`: what readers see."""

    node: str
    log_id: bytes = b""
    level: AckLevel = AckLevel.MEMORY
    visible_level: AckLevel = AckLevel.MEMORY
    batches: list[LoggedBatch] = field(default_factory=list)
    cuts: list[Cut] = field(default_factory=list)
    recoveries: int = 0
    _log: Any = None
    _failed: bool = False

    @property
    def next_offset(self) -> int:
        """Behind the last row."""
        return self.batches[-1].next_offset if self.batches else 0

    def start(self, log: DurableLog | MemoryLog, before: str | None) -> None:
        """A life begins, on what the one before has left. Raises Violation."""
        survives = AckLevel.MEMORY if before is None else SURVIVES[before]
        if self._failed:
            survives = max(survives, AckLevel.DURABLE)
        if log.log_id != self.log_id:
            demand(
                not self.log_id or self.level is AckLevel.MEMORY,
                "lost",
                f"{self.node}: its log on disk is another one than before, after a life that {before}",
            )
            self._cut(0, NOTHING_SURVIVES)
        self._cut(log.next_offset, survives)
        self.log_id, self.level, self._failed = log.log_id, log.level, False
        self.visible_level = getattr(getattr(log, "settings", None), "level", log.level)
        self._catch_up(log)
        self._tap(log)

    def look(self) -> None:
        """Note whether the log has failed."""
        if getattr(self._log, "failure", None) is not None:
            self._failed = True

    def settle(self) -> None:
        """The log as it is now: what lies behind its end was lost by a recovery in place."""
        self._cut(self._log.next_offset, AckLevel.DURABLE)

    def rows(self) -> Iterator[tuple[int, LoggedBatch, int]]:
        """Every delta: offset, batch, row."""
        for logged in self.batches:
            if not logged.batch.is_control:
                for row in range(logged.count):
                    yield logged.offset + row, logged, row

    def lost(self) -> Iterator[tuple[int, LoggedBatch, int, AckLevel]]:
        """Every delta that was lost, and the lowest level whose acknowledgements should have kept it."""
        for cut in self.cuts:
            for logged in cut.batches:
                if not logged.batch.is_control:
                    for row in range(logged.count):
                        yield logged.offset + row, logged, row, cut.survives

    def _tap(self, log: DurableLog | MemoryLog) -> None:
        append, append_run = log.append, log.append_run
        self._log = log

        def appending(*args: Any, **more: Any) -> LoggedBatch:
            logged = append(*args, **more)
            note([logged])
            return logged

        def appending_run(*args: Any, **more: Any) -> list[LoggedBatch]:
            placed = append_run(*args, **more)
            if not self.batches or placed[-1] is not self.batches[-1]:  # one by one, as a log in memory does
                note(placed)
            return placed

        def note(placed: list[LoggedBatch]) -> None:
            if self._log is log and placed:
                self._cut(placed[0].offset, AckLevel.DURABLE)  # recovered in place
                self.batches += placed

        log.append_run = appending_run  # type: ignore[method-assign]
        log.append = appending  # type: ignore[method-assign]

    def _cut(self, end: int, survives: AckLevel) -> None:
        at = len(self.batches)
        while at and self.batches[at - 1].next_offset > end:
            at -= 1
        if at < len(self.batches):
            self.cuts.append(Cut(self.batches[at:], survives))
            del self.batches[at:]

    def _catch_up(self, log: DurableLog | MemoryLog) -> None:
        """What was appended while the service opened."""
        while self.next_offset < log.visible:
            found = log.read(self.next_offset, rows_max=BATCH_ROWS_MAX, bytes_max=READ_BYTES_MAX)
            self.batches += [one for one in found if one.offset >= self.next_offset]
