"""Commits to the disk: starts them, and advances `written` and `synced` when they have run.

A commit runs on a thread that may wait for the disk; the thread of the log takes and finishes it.
"""

from __future__ import annotations

from delta_prop_broker.log.state import LogState
from delta_prop_broker.segments import preallocation
from delta_prop_broker.segments.commit import Commit, all_have_files, copy_to_cache
from delta_prop_broker.segments.paths import DIRECTORY
from delta_prop_wire.delta import AckLevel
from delta_prop_wire.errors import DeltaPropError


class Committing(LogState):
    """Runs one commit at a time."""

    def request_sync(self) -> None:
        """Make the next commit sync all rows, even those that were written without a sync."""
        self._pending_sync = True

    @property
    def cacheable_bytes(self) -> int | None:
        """Bytes that a commit would copy into the page cache; None if it would do more, or nothing."""
        pending = self._active_segment.pending_writes
        if self._running_commit is not None or self._pending_sync or self._segments_to_remove or not pending:
            return None
        # A single write is checked without `all_have_files`, whose generator takes longer.
        if self.settings.read_level is AckLevel.DURABLE or pending[-1].segment.file is None:
            return None
        return self._unwritten_bytes if len(pending) == 1 or all_have_files(pending) else None

    def take_commit(self, *, sync: bool = False) -> Commit | None:
        """Return the next commit. `sync`: it syncs all rows.

        Returns None if there is no work, if a commit is running, or if the log cannot be written to.
        """
        if (
            self._running_commit is not None
            or self.failure is not None
            or self._recovery_point is None
            or self._closed
        ):
            return None
        active = self._active_segment
        sync = sync or self._pending_sync or self.settings.read_level is AckLevel.DURABLE
        if not (active.pending_writes or self._segments_to_remove or (sync and self.synced < self.written)):
            return None
        if (
            sync
            and not active.pending_writes
            and self.synced < self.written
            and self._segments.last is not None
        ):
            active.write_of(self._segments.last)
        sealed_end = max(
            (write.segment.end for write in active.pending_writes if write.seals_segment), default=0
        )
        free_bytes = self._free.bytes - self.reserve.missing
        self._running_commit = Commit(
            self._disk, DIRECTORY, writes=active.pending_writes, removed=self._segments_to_remove,
            recovery_point=self._recovery_point, start=self._start, end=self.next_offset,
            synced=self.next_offset if sync else max(self.synced, sealed_end),
            sync=sync and bool(active.pending_writes),
            polls_free_space=self._free.claim_poll() or bool(self._segments_to_remove),
            preallocate_to=preallocation.file_size_max(free_bytes, self.settings),
        )  # fmt: skip
        self._syncs_skipped += not sync
        active.pending_writes, self._segments_to_remove, self._pending_sync = [], [], False
        return self._running_commit

    def finish_commit(self, commit: Commit) -> None:
        """Advance `written` and `synced`, once `run` of the commit has returned."""
        assert commit is self._running_commit, "another commit is running: finish that one"
        self._running_commit = None
        if self.failure is not None:
            return
        self._removed_count += len(commit.removed)
        frames, size = commit.finish(self._segments)
        assert self.synced <= commit.synced <= commit.end <= self.next_offset
        self.synced = commit.synced
        self._note_written(commit.end, frames, size, commit.free_bytes)

    def write_to_cache(self, bytes_max: int) -> bool:
        """Copy the pending bytes, if up to `bytes_max`, into the page cache now, instead of a commit.

        Returns False if they are more, if only a commit can write them, or if nothing is pending. Raises
        OSError: then call `fail`.
        """
        size, recovery_point = self.cacheable_bytes, self._recovery_point
        if (
            size is None
            or size > bytes_max
            or len(self._active_segment.pending_writes) > 1
            or self.failure is not None
        ):
            return False
        if recovery_point is None or self.synced > recovery_point.newest.synced:
            return False
        (write,), self._active_segment.pending_writes = self._active_segment.pending_writes, []
        self._syncs_skipped += 1
        frames, size = copy_to_cache(write)
        free_bytes = self._disk.free_bytes() if self._free.claim_poll() else None
        self._note_written(self.next_offset, frames, size, free_bytes)
        return True

    def _note_written(self, end: int, frames: int, size: int, free_bytes: int | None) -> None:
        assert self.written <= end
        self._commits += 1
        self._free.note_written(size, free_bytes)
        self._unwritten_bytes -= size
        self.committed_bytes += size
        self.committed_frames += frames
        self.written = end
        if self._tail.bytes > self.settings.tail_bytes_max:
            self._tail.trim(end)

    def fail(self, error: Exception) -> None:
        """Stop the log after `run` of a commit raised; from then on it only reads, until it is recovered.

        If the recovery finds corruption, the log stops for good. A failed sync may have dropped rows from the
        page cache that were written and not synced, so they are hidden until they have been read back.
        """
        self.written = self.synced
        self.failure = error if isinstance(error, DeltaPropError) else self.failure or error
        self._running_commit = None
