"""Records all rows that were appended to a service's log, across all its processes. The record keeps rows
that retention or compaction removed, and stores rows that a crash removed separately.

It wraps the log's append methods, and does not change their effect.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from delta_prop_simulations.chaos.violation import require
from delta_prop_wire.delta import AckLevel
from delta_prop_wire.spec import BATCH_ROWS_MAX

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from delta_prop_broker.log.durable import DurableLog
    from delta_prop_broker.log.memory import MemoryLog
    from delta_prop_wire.batch import LoggedBatch

NOTHING_SURVIVES = AckLevel.QUORUM
"""A level above all levels that a service grants."""

SURVIVES = {
    "ended": AckLevel.MEMORY,
    "killed": AckLevel.LOGGED,
    "power cut": AckLevel.DURABLE,
    "crashed": AckLevel.DURABLE,
}
"""The lowest level whose acknowledged rows survive, by the way in which a process ended."""

READ_BYTES_MAX = 1 << 30


@dataclass(slots=True)
class LostTail:
    """A tail that a log has lost. `survives`: the lowest level whose acknowledged rows must not be in it."""

    batches: list[LoggedBatch]
    survives: AckLevel


@dataclass(slots=True)
class LogHistory:
    """The rows of a service's log. `level`: the highest ack level that the log grants; `visible_level`: its
    read level.
    """

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
        return self.batches[-1].next_offset if self.batches else 0

    def start(self, log: DurableLog | MemoryLog, ending: str | None) -> None:
        """Record a new process, which found this log after the `ending` of the last. Raises Violation."""
        survives = AckLevel.MEMORY if ending is None else SURVIVES[ending]
        if self._failed:
            survives = max(survives, AckLevel.DURABLE)
        if log.log_id != self.log_id:
            require(
                not self.log_id or self.level is AckLevel.MEMORY,
                "lost",
                f"{self.node}: its log on disk was replaced; the previous process had ended by: {ending}",
            )
            self._note_lost_tail(0, NOTHING_SURVIVES)
        self._note_lost_tail(log.next_offset, survives)
        self.log_id, self.level, self._failed = log.log_id, log.ack_level, False
        self.visible_level = getattr(getattr(log, "settings", None), "read_level", log.ack_level)
        self._catch_up(log)
        self._wrap_appends(log)

    def note_failure(self) -> None:
        """Remember that the log has failed, if it has."""
        if getattr(self._log, "failure", None) is not None:
            self._failed = True

    def note_recovery(self) -> None:
        """Note a recovery in place: rows after the end of the log are lost."""
        self._note_lost_tail(self._log.next_offset, AckLevel.DURABLE)

    def rows(self) -> Iterator[tuple[int, LoggedBatch, int]]:
        """Yield every delta: offset, batch, row."""
        yield from _rows_of(self.batches)

    def lost_rows(self) -> Iterator[tuple[int, LoggedBatch, int, AckLevel]]:
        """Yield every lost delta: offset, batch, row, and the lowest level that should have survived."""
        for tail in self.lost_tails:
            for offset, logged, row in _rows_of(tail.batches):
                yield offset, logged, row, tail.survives

    def _wrap_appends(self, log: DurableLog | MemoryLog) -> None:
        append, append_run = log.append, log.append_run
        self._log = log

        def recording_append(*args: Any, **kwargs: Any) -> LoggedBatch:
            logged = append(*args, **kwargs)
            note([logged])
            return logged

        def recording_append_run(*args: Any, **kwargs: Any) -> list[LoggedBatch]:
            appended = append_run(*args, **kwargs)
            if not self.batches or appended[-1] is not self.batches[-1]:  # a log in memory appends one by one
                note(appended)
            return appended

        def note(appended: list[LoggedBatch]) -> None:
            if self._log is log and appended:
                self._note_lost_tail(appended[0].offset, AckLevel.DURABLE)  # lost in a recovery in place
                self.batches += appended

        log.append_run = recording_append_run  # type: ignore[method-assign]
        log.append = recording_append  # type: ignore[method-assign]

    def _note_lost_tail(self, end: int, survives: AckLevel) -> None:
        index = len(self.batches)
        while index and self.batches[index - 1].next_offset > end:
            index -= 1
        if index < len(self.batches):
            self.lost_tails.append(LostTail(self.batches[index:], survives))
            del self.batches[index:]

    def _catch_up(self, log: DurableLog | MemoryLog) -> None:
        """Read the rows that were appended while the service started."""
        while self.next_offset < log.high_watermark:
            read = log.read(self.next_offset, rows_max=BATCH_ROWS_MAX, bytes_max=READ_BYTES_MAX)
            self.batches += [logged for logged in read if logged.offset >= self.next_offset]


def _rows_of(batches: Iterable[LoggedBatch]) -> Iterator[tuple[int, LoggedBatch, int]]:
    for logged in batches:
        if not logged.batch.is_control:
            for row in range(logged.count):
                yield logged.offset + row, logged, row
