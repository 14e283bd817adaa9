"""Mutants of the log on disk: what is synced, marked, recovered, let go and compacted.

Each line of text is the code's own; where that changes, the table's test says which mutant to write anew.
"""

from __future__ import annotations

from delta_prop.committing import Committer
from delta_prop_broker.log.durable import DurableLog
from delta_prop_broker.log.parts.commit import Commit
from delta_prop_broker.log.parts.recovery import _Recovery
from delta_prop_broker.log.retention.cover import Cover
from delta_prop_simulations.disasters.mutants.mutant import Mutant, edit, getter

_WRITE_ALL = "for piece in self.pieces:\n        self._write(piece)\n"

LOG = (
    Mutant(
        "acknowledged-before-the-sync",
        "a delta is acknowledged when it has its place in memory",
        "an acknowledged delta survives what its level says",
        (
            edit(
                DurableLog.reached,
                ("self.written if level is AckLevel.LOGGED else self.synced", "self.next_offset"),
            ),
        ),
    ),
    Mutant(
        "sync-dropped",
        "what was written is taken for synced",
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
        "a segment that ends is not synced, whatever its commit says",
        "what is marked as synced survives a power cut",
        (edit(Commit._write, ("if piece.seals or self._sync", "if self._sync and not piece.seals")),),
    ),
    Mutant(
        "failed-sync-tried-again",
        "a sync that failed is tried again, and believed the second time",
        "after a failed sync nothing is acknowledged before it was read back",
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
        "nothing is acknowledged that the disk refused",
        (edit(Committer._commit_all, ("self._fail(error)\n            return", "pass")),),
    ),
    Mutant(
        "mark-before-the-sync",
        "the mark says synced before anything is written",
        "what the mark says is on stable storage",
        (
            edit(
                Commit.run,
                (_WRITE_ALL, "pass\n"),
                ("for segment in self.removed:", f"{_WRITE_ALL}    for segment in self.removed:"),
            ),
        ),
    ),
    Mutant(
        "removed-before-the-mark",
        "old segments are removed before the mark says that the log starts behind them",
        "a log opens after a crash at any moment",
        (
            edit(
                Commit.run,
                (
                    "self.synced > self._mark.newest.synced or self.removed",
                    "self.synced > self._mark.newest.synced and not self.removed",
                ),
            ),
        ),
    ),
    Mutant(
        "cache-believed-at-opening",
        "what a failed sync left in the cache is taken for written at the next opening",
        "what a log shows after its recovery survives the next power cut",
        (edit(_Recovery._make_sure, ("assert last.index is not None", "if not torn:\n        return")),),
    ),
    Mutant(
        "read-before-the-commit",
        "readers see what is only appended",
        "nothing is shown that the log may still lose",
        (
            edit(
                getter(DurableLog, "visible"),
                (
                    "return self.synced if self.settings.level is AckLevel.DURABLE else self.written",
                    "return self.next_offset",
                ),
            ),
        ),
    ),
    Mutant(
        "removed-before-the-snapshot",
        "segments go before a snapshot holds what they said",
        "a sink can be rebuilt from what the log has",
        (
            edit(
                Cover.floor,
                (
                    "return min(readable, self.offset or 0) if self._settings.compact else readable",
                    "return readable",
                ),
            ),
        ),
    ),
)
