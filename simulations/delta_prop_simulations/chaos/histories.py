"""The histories of a run: the deltas that clients sent with their outcomes, and the rows of each log. Pure.

A delta is identified by a token in its metadata, or by its vector id, so the checks need not trust dots or
offsets. A log's history keeps rows that retention or compaction removed, and stores rows that a crash removed
separately. It wraps the log's append methods, and does not change their effect.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from delta_prop_simulations.chaos.violation import require
from delta_prop_wire.delta import AckLevel, Dot
from delta_prop_wire.spec import BATCH_ROWS_MAX, ErrorCode

if TYPE_CHECKING:
    from delta_prop_broker.log.durable import DurableLog
    from delta_prop_broker.log.memory import MemoryLog
    from delta_prop_simulations.chaos.sinks import Ref
    from delta_prop_wire.batch import Batch, LoggedBatch

TOKEN = "t"
"""The metadata name of a delta's token."""

ONCE = "once/"
"""The prefix of a vector id that only one delta has: the id is that delta's token."""

SUM = "sum/"
"""The prefix of a vector id to which only one writer adds ones."""

_DOTS_MAX = 20


class Ack(NamedTuple):
    """One acknowledgement as received. `offset`: None if it named none, which is a violation."""

    level: AckLevel
    offset: int | None
    duplicate: bool


@dataclass(slots=True)
class DeltaOutcome:
    """One delta and its outcomes. `is_unknown`: its outcome could not be determined at least once."""

    node: str
    writer: str
    ref: Ref
    asked_level: AckLevel | None
    acks: list[Ack] = field(default_factory=list)
    refused: ErrorCode | None = None
    is_unknown: bool = False


class ClientHistory:
    """All outcomes that all clients received."""

    def __init__(self) -> None:
        self.outcomes: dict[str, DeltaOutcome] = {}
        self.counts: Counter[str] = Counter()
        self._dots: dict[str, deque[Dot]] = {}

    def note_sent(self, token: str, node: str, writer: str, ref: Ref, asked: AckLevel | None) -> None:
        """Note that the delta was sent, for the first time or as a retry."""
        self.counts["sent again" if token in self.outcomes else "sent"] += 1
        self.outcomes.setdefault(token, DeltaOutcome(node, writer, ref, asked))

    def note_acknowledged(self, token: str, ack: Ack, dot: Dot | None = None) -> None:
        """Note an acknowledgement. `dot`: the delta's, if another delta can safely depend on it."""
        outcome = self.outcomes[token]
        outcome.acks.append(ack)
        self.counts["acknowledged as duplicate" if ack.duplicate else "acknowledged"] += 1
        if dot is not None:
            self._dots.setdefault(outcome.node, deque(maxlen=_DOTS_MAX)).append(dot)

    def note_refused(self, token: str, code: ErrorCode) -> None:
        """Note that the delta was refused and will not be sent again: it must never take effect."""
        self.outcomes[token].refused = code
        self.counts[f"refused with {code.name}"] += 1

    def note_unknown(self, token: str) -> None:
        """Note that the delta's outcome could not be determined."""
        self.outcomes[token].is_unknown = True
        self.counts["outcome unknown"] += 1

    def durable_dots(self) -> list[Dot]:
        """Return the newest dots acknowledged as durable, whose deltas reach every service."""
        return [dot for node in sorted(self._dots) for dot in self._dots[node]]


def token_of(batch: Batch, row: int) -> str | None:
    """Return the token of a row; None if it has none."""
    key = batch.keys[row]
    if key.startswith(ONCE):
        return key
    token = (batch.metadata(row) or {}).get(TOKEN) if batch.has_metadata else None
    return token if isinstance(token, str) else None


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
    """The rows of a service's log. `level`: the highest that it grants; `visible_level`: its read level."""

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
        while self.next_offset < log.high_watermark:
            read = log.read(self.next_offset, rows_max=BATCH_ROWS_MAX, bytes_max=READ_BYTES_MAX)
            self.batches += [logged for logged in read if logged.offset >= self.next_offset]


def _rows_of(batches: Iterable[LoggedBatch]) -> Iterator[tuple[int, LoggedBatch, int]]:
    for logged in batches:
        if not logged.batch.is_control:
            for row in range(logged.count):
                yield logged.offset + row, logged, row
