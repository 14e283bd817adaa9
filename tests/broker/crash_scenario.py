"""A fixed sequence of operations on a small log, with new segments, removals, a close and a reopening.

The ledger records what was acknowledged at each moment, to check the log that is found after a fault.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from delta_prop_wire.delta import AckLevel
from tests.broker.durable import SMALL, Clock, Writer, commit, contents, open_log

if TYPE_CHECKING:
    from delta_prop_broker.disk import Disk
    from delta_prop_broker.log.durable import DurableLog
    from delta_prop_broker.recovery.recovery import RecoveryReport

SCENARIO_DURABLE = replace(SMALL, segment_bytes_max=900, retention_bytes=2_500)
SCENARIO_LOGGED = replace(SCENARIO_DURABLE, read_level=AckLevel.LOGGED)


@dataclass
class Ledger:
    """The batches that were appended, and the offsets up to which they must survive a fault."""

    appended: dict[int, bytes] = field(default_factory=dict)
    acknowledged: int = 0  # synced: survives a power cut
    written: int = 0  # survives a kill of the process
    start: int = 0  # rows below this offset were removed by retention
    epoch: int = 0

    def copy(self) -> Ledger:
        return replace(self, appended=dict(self.appended))

    def check_recovery(self, log: DurableLog, report: RecoveryReport) -> None:
        """Check the recovered log against what was acknowledged, and continue from its contents."""
        found = contents(log)
        assert found == {offset: self.appended[offset] for offset in found}, (
            "the bytes must be those that were appended"
        )
        assert log.next_offset in self._ends(), "a batch must be stored completely or not at all"
        assert log.next_offset >= self.acknowledged, "an acknowledged delta must not be lost"
        assert log.start_offset <= self.start, "only rows that retention removed may be missing"
        assert log.epoch >= self.epoch
        assert report.clean or report.created or log.epoch > self.epoch
        assert (report.start_offset, report.next_offset) == (log.start_offset, log.next_offset)
        self.appended = {offset: raw for offset, raw in self.appended.items() if offset < log.next_offset}
        self.acknowledged = self.written = log.next_offset  # found and made visible: must never be lost
        self.epoch = log.epoch

    def _ends(self) -> set[int]:
        return {
            *self.appended,
            max((offset + _row_count(raw) for offset, raw in self.appended.items()), default=0),
        }


def run_scenario(disk: Disk, ledger: Ledger, *, logged: bool = False) -> None:
    """Append, commit and retain in two sessions; an error of the disk is raised."""
    clock = Clock()
    for session in range(2):
        log = open_session(disk, ledger, clock, logged=logged)
        writer = Writer(log, appended=ledger.appended, counter=log.next_offset)
        for step in range(8):
            for number in range(1 + step % 3):
                level = AckLevel.LOGGED if logged and step % 4 != 3 else AckLevel.DURABLE
                writer.append(1 + (step + number) % 4, level=level, dimension=1 + 20 * (step % 2))
            record_acknowledged(log, ledger)
            commit_and_record(log, ledger)
            if step % 4 == 3:
                log.retain()
                record_acknowledged(log, ledger)
        if session == 0:
            close(log, ledger)


def open_session(
    disk: Disk, ledger: Ledger, clock: Clock | None = None, *, logged: bool = False
) -> DurableLog:
    """Open the log and check it against the ledger."""
    log, report = open_log(disk, SCENARIO_LOGGED if logged else SCENARIO_DURABLE, clock=clock)
    ledger.check_recovery(log, report)
    return log


def commit_and_record(log: DurableLog, ledger: Ledger) -> bool:
    """Commit, and record in the ledger what the log now acknowledges."""
    committed = commit(log)
    record_acknowledged(log, ledger)
    return committed


def close(log: DurableLog, ledger: Ledger) -> None:
    log.close()
    record_acknowledged(log, ledger)


def record_acknowledged(log: DurableLog, ledger: Ledger) -> None:
    ledger.acknowledged, ledger.written = log.synced, log.written
    ledger.start = max(ledger.start, log.start_offset)


def continue_after_fault(disk: Disk, ledger: Ledger, *, logged: bool = False) -> None:
    """Open the log after a fault, append, close and reopen it."""
    log = open_session(disk, ledger, logged=logged)
    writer = Writer(log, appended=ledger.appended, counter=log.next_offset)
    for rows in (1, 3):
        writer.append(rows)
    commit_and_record(log, ledger)
    close(log, ledger)
    open_session(disk, ledger, logged=logged).close()


def _row_count(raw: bytes) -> int:
    """Return the number of rows of a frame, which the header of its body holds."""
    return int.from_bytes(raw[68:72], "little")
