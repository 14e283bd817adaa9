"""The log of one service over all its lives, as it was appended: it also holds rows that retention,
compaction or crashes removed, and marks those that a crash removed.

It wraps a log's append methods and changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from delta_prop_simulations.chaos.violation import require
from delta_prop_wire.delta import AckLevel
from delta_prop_wire.spec import BATCH_ROWS_MAX

if TYPE_CHECKING:
    from collections.abc import Iterator

    from delta_prop_broker.log.durable import DurableLog
    from delta_prop_broker.log.memory import MemoryLog
    from delta_prop_wire.batch import LoggedBatch

NOTHING_SURVIVES = AckLevel.QUORUM
"""A level above every level that is granted."""

SURVIVES = {
    "ended": AckLevel.MEMORY,
    "killed": AckLevel.LOGGED,
    "power cut": AckLevel.DURABLE,
    "crashed": AckLevel.DURABLE,
}
"""The lowest level whose acknowledged rows survive, by the ending of a life."""

READ_BYTES_MAX = 1 << 30


@dataclass(slots=True)
class LostTail:
    """A lost tail, and the lowest level whose acknowledged rows must not be in it."""

    batches: list[LoggedBatch]
    survives: AckLevel


@dataclass(slots=True)
class LogHistory:
    """The rows of a service's log. `level`: the highest it promises, `visible_level`: that of readers."""

    node: str
    log_id: bytes = b""
    level: AckLevel = AckLevel.MEMORY
    visible_level: AckLevel = AckLevel.MEMORY
    batches: list[LoggedBatch] = field(default_factory=list)
    lost_tails: list[LostTail] = field(default_factory=list)
    recoveries: int = 0
    _log: Any = None
    _failed: bool = False

    @property
    def next_offset(self) -> int:
        """The offset after the last row."""
        return self.batches[-1].next_offset if self.batches else 0

    def start(self, log: DurableLog | MemoryLog, before: str | None) -> None:
        """Begin a life on the log that the previous one has left. Raises Violation."""
        survives = AckLevel.MEMORY if before is None else SURVIVES[before]
        if self._failed:
            survives = max(survives, AckLevel.DURABLE)
        if log.log_id != self.log_id:
            require(
                not self.log_id or self.level is AckLevel.MEMORY,
                "lost",
                f"{self.node}: its log on disk was replaced, after a life that {before}",
            )
            self._note_lost_tail(0, NOTHING_SURVIVES)
        self._note_lost_tail(log.next_offset, survives)
        self.log_id, self.level, self._failed = log.log_id, log.ack_level, False
        self.visible_level = getattr(getattr(log, "settings", None), "read_level", log.ack_level)
        self._catch_up(log)
        self._tap(log)

    def note_failure(self) -> None:
        """Note if the log has failed."""
        if getattr(self._log, "failure", None) is not None:
            self._failed = True

    def note_recovery(self) -> None:
        """Note a recovery in place: rows after the end of the log are lost."""
        self._note_lost_tail(self._log.next_offset, AckLevel.DURABLE)

    def rows(self) -> Iterator[tuple[int, LoggedBatch, int]]:
        """Yield every delta: offset, batch, row."""
        for logged in self.batches:
            if not logged.batch.is_control:
                for row in range(logged.count):
                    yield logged.offset + row, logged, row

    def lost_rows(self) -> Iterator[tuple[int, LoggedBatch, int, AckLevel]]:
        """Yield every lost delta, and the lowest level whose acknowledged rows must survive."""
        for cut in self.lost_tails:
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
            if not self.batches or placed[-1] is not self.batches[-1]:  # a log in memory appends one by one
                note(placed)
            return placed

        def note(placed: list[LoggedBatch]) -> None:
            if self._log is log and placed:
                self._note_lost_tail(placed[0].offset, AckLevel.DURABLE)  # lost in a recovery in place
                self.batches += placed

        log.append_run = appending_run  # type: ignore[method-assign]
        log.append = appending  # type: ignore[method-assign]

    def _note_lost_tail(self, end: int, survives: AckLevel) -> None:
        at = len(self.batches)
        while at and self.batches[at - 1].next_offset > end:
            at -= 1
        if at < len(self.batches):
            self.lost_tails.append(LostTail(self.batches[at:], survives))
            del self.batches[at:]

    def _catch_up(self, log: DurableLog | MemoryLog) -> None:
        """Read the rows that were appended while the service opened."""
        while self.next_offset < log.high_watermark:
            found = log.read(self.next_offset, rows_max=BATCH_ROWS_MAX, bytes_max=READ_BYTES_MAX)
            self.batches += [one for one in found if one.offset >= self.next_offset]
