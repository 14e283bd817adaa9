"""Mutants of the log on disk: syncs, recovery point, recovery, retention and compaction.

The quoted lines are production code; if that code changes, a test names the mutants to update.
"""

from __future__ import annotations

from delta_prop.partition.storage.committer import Committer
from delta_prop_broker.log.durable import DurableLog
from delta_prop_broker.log.writing import Commit
from delta_prop_broker.recovery.recovery import _Recovery
from delta_prop_broker.retention.snapshot_planner import SnapshotPlanner
from delta_prop_simulations.chaos.mutants.mutant import Mutant, edit, getter

_WRITE_ALL = "for write in self.writes:\n        self._write(write)\n"

LOG = (
    Mutant(
        "acknowledged-before-the-sync",
        "a delta is acknowledged as soon as it has its offset in memory",
        "an acknowledged delta survives all failures that its level covers",
        (
            edit(
                DurableLog.offset_at_level,
                ("marks.written if level is AckLevel.LOGGED else marks.synced", "marks.next_offset"),
            ),
        ),
    ),
    Mutant(
        "sync-dropped",
        "written data counts as synced",
        "an acknowledged delta survives a power cut",
        (edit(Commit._write, ("file.sync()", "file.size()")),),
    ),
    Mutant(
        "directory-not-synced",
        "the name of a new segment is not synced",
        "an acknowledged delta survives a power cut",
        (edit(Commit._create, ("self._disk.sync_directory(self._directory)", "pass")),),
    ),
    Mutant(
        "sealed-segment-not-synced",
        "a segment is not synced when it is sealed, whatever its commit asks for",
        "data below the recovery point survives a power cut",
        (
            edit(
                Commit._write,
                ("if write.seals_segment or self._sync", "if self._sync and not write.seals_segment"),
            ),
        ),
    ),
    Mutant(
        "failed-sync-retried",
        "a sync that failed is retried, and trusted the second time",
        "after a failed sync no delta is acknowledged before it is read back",
        (
            edit(
                Commit._write,
                (
                    "        file.sync()",
                    "        try:\n            file.sync()\n        except OSError:\n            file.sync()",
                ),
            ),
        ),
    ),
    Mutant(
        "failed-commit-counts",
        "a commit that the disk refused counts as done",
        "no delta is acknowledged that the disk refused",
        (edit(Committer._commit_all, ("self._fail(error)\n            return", "pass")),),
    ),
    Mutant(
        "recovery-point-before-the-sync",
        "the recovery point moves before anything is written",
        "data below the recovery point is on stable storage",
        (
            edit(
                Commit.run,
                (_WRITE_ALL, "pass\n"),
                ("for segment in self.removed:", f"{_WRITE_ALL}    for segment in self.removed:"),
            ),
        ),
    ),
    Mutant(
        "removed-before-the-recovery-point",
        "old segments are removed before the recovery point says that the log starts after them",
        "a log opens after a crash at any moment",
        (
            edit(
                Commit.run,
                (
                    "self.synced > self._recovery_point.newest.synced or self.removed",
                    "self.synced > self._recovery_point.newest.synced and not self.removed",
                ),
            ),
        ),
    ),
    Mutant(
        "cache-believed-at-opening",
        "data that a failed sync left in the cache counts as written at the next start",
        "rows that a log shows after its recovery survive the next power cut",
        (
            edit(
                _Recovery._make_durable,
                ("assert last.index is not None", "if not has_torn_tail:\n        return"),
            ),
        ),
    ),
    Mutant(
        "read-before-the-commit",
        "readers see rows that are only appended",
        "no row is visible that the log may still lose",
        (
            edit(
                getter(DurableLog, "high_watermark"),
                ("return self._marks.high_watermark", "return self._marks.next_offset"),
            ),
        ),
    ),
    Mutant(
        "removed-before-the-snapshot",
        "segments are removed before a snapshot holds their states",
        "a sink can be rebuilt from the log",
        (
            edit(
                SnapshotPlanner.floor,
                (
                    "return min(readable, self.present.offset or 0) if self._settings.compact else readable",
                    "return readable",
                ),
            ),
        ),
    ),
)
