"""Commits to the disk: takes what waits in the commit queue, and moves the marks when it is written.

A commit runs on a thread that may wait for the disk; the thread of the log takes and finishes it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from delta_prop_broker.segments import preallocation
from delta_prop_broker.segments.commit import Commit, all_have_files, copy_to_cache
from delta_prop_broker.segments.paths import DIRECTORY

if TYPE_CHECKING:
    from delta_prop_broker.disk import Disk
    from delta_prop_broker.log.free_space import FreeSpace
    from delta_prop_broker.log.marks import LogMarks
    from delta_prop_broker.log.settings import LogSettings
    from delta_prop_broker.log.tail import Tail
    from delta_prop_broker.recovery.recovery_point import RecoveryPointFile
    from delta_prop_broker.segments.commit_queue import CommitQueue
    from delta_prop_broker.segments.segment import Segments


class GroupCommits:
    """Runs one commit at a time. `recovery_point`: None if the log is read-only, so that nothing commits."""

    def __init__(
        self,
        disk: Disk,
        segments: Segments,
        tail: Tail,
        recovery_point: RecoveryPointFile | None,
        *,
        settings: LogSettings,
        marks: LogMarks,
        queue: CommitQueue,
        free_space: FreeSpace,
    ) -> None:
        self._disk = disk
        self._segments = segments
        self._tail = tail
        self._recovery_point = recovery_point
        self._settings = settings
        self._marks = marks
        self._queue = queue
        self._free_space = free_space
        self._running: Commit | None = None

    @property
    def is_running(self) -> bool:
        """True from `take` to `finish`."""
        return self._running is not None

    @property
    def cacheable_bytes(self) -> int | None:
        """Bytes that a commit would copy into the page cache; None if it would do more, or nothing."""
        queue = self._queue
        writes = queue.writes
        if self._running is not None or queue.wants_sync or queue.removed_segments or not writes:
            return None
        # A single write is checked without `all_have_files`, whose generator takes longer.
        if self._marks.reads_synced or writes[-1].segment.file is None:
            return None
        return queue.unwritten_bytes if len(writes) == 1 or all_have_files(writes) else None

    def take(self, *, sync: bool) -> Commit | None:
        """Return the next commit; None if there is no work, or one is running. `sync`: it syncs all rows."""
        queue, marks = self._queue, self._marks
        if self._running is not None or self._recovery_point is None:
            return None
        sync = sync or queue.wants_sync or marks.reads_synced
        if not (queue.writes or queue.removed_segments or (sync and marks.synced < marks.written)):
            return None
        if sync and not queue.writes and marks.synced < marks.written and self._segments.last is not None:
            queue.write_of(self._segments.last)
        sealed_end = max((write.segment.end for write in queue.writes if write.seals_segment), default=0)
        free_bytes = self._free_space.bytes - self._free_space.reserve.missing
        self._running = Commit(
            self._disk, DIRECTORY, writes=queue.writes, removed=queue.removed_segments,
            recovery_point=self._recovery_point, start=marks.start_offset, end=marks.next_offset,
            synced=marks.next_offset if sync else max(marks.synced, sealed_end),
            sync=sync and bool(queue.writes),
            polls_free_space=self._free_space.claim_poll() or bool(queue.removed_segments),
            preallocate_to=preallocation.file_size_max(free_bytes, self._settings),
        )  # fmt: skip
        queue.syncs_skipped += not sync
        queue.writes, queue.removed_segments, queue.wants_sync = [], [], False
        return self._running

    def finish(self, commit: Commit) -> None:
        """Advance the marks, once `run` of the commit has returned."""
        assert commit is self._running, "another commit is running: finish that one"
        self._running = None
        self._queue.removed_count += len(commit.removed)
        frames, size = commit.finish(self._segments)
        self._note_written(commit.end, commit.synced, frames, size, commit.free_bytes)

    def write_to_cache(self, bytes_max: int) -> bool:
        """Copy the pending bytes, if up to `bytes_max`, into the page cache now, instead of a commit.

        Returns False if they are more, if only a commit can write them, or if nothing is pending. Raises
        OSError.
        """
        size, recovery_point, queue, marks = (
            self.cacheable_bytes, self._recovery_point, self._queue, self._marks,
        )  # fmt: skip
        if size is None or size > bytes_max or len(queue.writes) > 1:
            return False
        if recovery_point is None or marks.synced > recovery_point.newest.synced:
            return False
        (write,), queue.writes = queue.writes, []
        queue.syncs_skipped += 1
        frames, size = copy_to_cache(write)
        free_bytes = self._disk.free_bytes() if self._free_space.claim_poll() else None
        self._note_written(marks.next_offset, marks.synced, frames, size, free_bytes)
        return True

    def _note_written(self, end: int, synced: int, frames: int, size: int, free_bytes: int | None) -> None:
        self._marks.advance(end, synced)
        self._free_space.note_written(size, free_bytes)
        self._queue.note_written(frames, size)
        if self._tail.bytes > self._settings.tail_bytes_max:
            self._tail.trim(end)

    def drop_running(self) -> None:
        """Drop the running commit: it has failed, and the log has stopped."""
        self._running = None
