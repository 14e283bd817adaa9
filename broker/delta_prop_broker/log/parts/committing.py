"""Committing to the disk: what a commit has to do, and the marks that move once it has done it.

A commit runs on a thread that may wait for the disk; it is taken and finished on the thread of the log.
"""

from __future__ import annotations

from delta_prop_broker.log.files import ahead
from delta_prop_broker.log.files.names import DIRECTORY
from delta_prop_broker.log.parts.commit import Commit, all_have_files, write_piece
from delta_prop_broker.log.parts.state import LogState
from delta_prop_wire.delta import AckLevel
from delta_prop_wire.errors import DeltaPropError


class Committing(LogState):
    """One commit at a time."""

    def want_sync(self) -> None:
        """Have the next commit sync, what was written alone too."""
        self._pending_sync = True

    @property
    def cached_bytes(self) -> int | None:
        """What a commit would copy into the page cache now; None if it had more to do, or nothing."""
        pending = self._growing.pieces
        if self._running is not None or self._pending_sync or self._removed or not pending:
            return None
        if self.settings.level is AckLevel.DURABLE or pending[-1].segment.file is None:  # quicker told alone
            return None
        return self._unwritten_bytes if len(pending) == 1 or all_have_files(pending) else None

    def take_commit(self, *, sync: bool = False) -> Commit | None:
        """What the disk has to do now; None: nothing, or one is under way. `sync`: all that was written."""
        if self._running is not None or self.failure is not None or self._mark is None or self._closed:
            return None
        growing = self._growing
        sync = sync or self._pending_sync or self.settings.level is AckLevel.DURABLE
        if not (growing.pieces or self._removed or (sync and self.synced < self.written)):
            return None
        if sync and not growing.pieces and self.synced < self.written and self._segments.last is not None:
            growing.piece_of(self._segments.last)
        sealed = max((piece.segment.end for piece in growing.pieces if piece.seals), default=0)
        self._running = Commit(
            self._disk, DIRECTORY, pieces=growing.pieces, removed=self._removed, mark=self._mark,
            start=self._start, end=self.next_offset,
            synced=self.next_offset if sync else max(self.synced, sealed), sync=sync and bool(growing.pieces),
            asks_free=self._free.is_due() or bool(self._removed),
            ahead_to=ahead.bound(self._free.bytes - self.reserve.missing, self.settings),
        )  # fmt: skip
        self._syncs_skipped += not sync
        growing.pieces, self._removed, self._pending_sync = [], [], False
        return self._running

    def finish_commit(self, commit: Commit) -> None:
        """A commit's `run` has returned: the marks move."""
        assert commit is self._running, "the commit under way is finished, no other"
        self._running = None
        if self.failure is not None:
            return
        self._removed_segments += len(commit.removed)
        frames, size = commit.finish(self._segments)
        assert self.synced <= commit.synced <= commit.end <= self.next_offset
        self.synced = commit.synced
        self._note_written(commit.end, frames, size, commit.free_bytes)

    def write_cached(self, bytes_max: int) -> bool:
        """The short way, at once, of a commit that only copies up to so many bytes into the page cache: False
        where there is more to do, or nothing. Raises OSError: then `fail`.
        """
        size, mark = self.cached_bytes, self._mark
        if size is None or size > bytes_max or len(self._growing.pieces) > 1 or self.failure is not None:
            return False
        if mark is None or self.synced > mark.newest.synced:
            return False
        (piece,), self._growing.pieces = self._growing.pieces, []
        self._syncs_skipped += 1
        frames, size = write_piece(piece)
        left = self._disk.free_bytes() if self._free.is_due() else None
        self._note_written(self.next_offset, frames, size, left)
        return True

    def _note_written(self, end: int, frames: int, size: int, free_bytes: int | None) -> None:
        assert self.written <= end
        self._commits += 1
        self._free.written(size, free_bytes)
        self._unwritten_bytes -= size
        self.committed_bytes += size
        self.committed_frames += frames
        self.written = end
        if self._tail.bytes > self.settings.tail_bytes_max:
            self._tail.trim(end)

    def fail(self, error: Exception) -> None:
        """A commit's `run` raised: nothing further is taken or marked. Reading goes on; then recover anew.

        Damage, found when it was recovered, stops it for good. What was written alone may have gone from the
        page cache with a failed sync: it is not shown before it has been read back.
        """
        self.written = self.synced
        self.failure = error if isinstance(error, DeltaPropError) else self.failure or error
        self._running = None
