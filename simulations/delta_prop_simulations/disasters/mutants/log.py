"""Mutants of the log on disk: what is synced, marked, recovered, let go and compacted.

Each line of text is the code's own; where that changes, the table's test says which mutant to write anew.
"""

from __future__ import annotations

from delta_prop.checkpointing import Checkpointer
from delta_prop.committing import Committer
from delta_prop_broker.log.commit import Commit
from delta_prop_broker.log.cover import Cover
from delta_prop_broker.log.durable import DurableLog
from delta_prop_broker.log.holders import Holders
from delta_prop_broker.log.merging import Merge
from delta_prop_broker.log.recovery import _Recovery
from delta_prop_broker.log.writing import write_all
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
        "short-write-taken-for-whole",
        "what a short write has left out is not written",
        "what is marked as written can be read",
        (
            edit(
                write_all,
                ("return _go_on(file, at, [memoryview(part) for part in parts], taken)", "return at + size"),
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
        "epoch-stays",
        "a log that may have lost its tail goes on in the same epoch",
        "who holds what the log lost is told, and never skipped forward",
        (edit(_Recovery._write, ("identity = identity.next_epoch(end)", "pass")),),
    ),
    Mutant(
        "cache-believed-at-opening",
        "what a failed sync left in the cache is taken for written at the next opening",
        "what a log shows after its recovery survives the next power cut",
        (edit(_Recovery._make_sure, ("assert last.index is not None", "if not torn:\n        return")),),
    ),
    Mutant(
        "checkpoint-before-the-sync",
        "a checkpoint is written before what it speaks of is synced",
        "a log opens after a power cut",
        (
            edit(
                Checkpointer._write,
                (
                    "if not await self._synced(log.next_offset)",
                    "if not whole and not await self._synced(log.next_offset)",
                ),
                ("_Copied(position, log.synced,", "_Copied(position, log.next_offset,"),
            ),
        ),
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
        "retention-passes-its-holders",
        "old segments go, whoever needs them",
        "the log keeps what a required sink has not had",
        (
            edit(
                Holders.floor,
                (
                    "return min((needed() for needed in self._needed.values()), default=default)",
                    "return default",
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
    Mutant(
        "compaction-keeps-the-oldest",
        "of several states of a vector the oldest goes into the snapshot",
        "a snapshot holds the fold of what it covers",
        (
            edit(
                Merge._overlay,
                (
                    "codes.update(zip(keys, range(base + rows.at, base + end), strict=True))",
                    "codes.update((key, base + at) for at, key in enumerate(keys, rows.at)"
                    " if key not in codes)",
                ),
                ("codes[key] = base + row", "codes.setdefault(key, base + row)"),
            ),
        ),
    ),
)
