"""Retention of a log on disk: holders, removal of old segments, and capacity for appends.

Sealed segments are removed, the oldest first. Readers lose them at once; the next commit removes the files.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from delta_prop_broker.log import refusals
from delta_prop_broker.log.state import LogState
from delta_prop_broker.recovery.times import Times, write_times
from delta_prop_broker.segments.paths import DIRECTORY
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from collections.abc import Callable

    from delta_prop_broker.retention.compaction import Compaction
    from delta_prop_broker.retention.segment_compression import SegmentCompression
    from delta_prop_broker.segments.segment import Segment
    from delta_prop_wire.batch import Batch
    from delta_prop_wire.errors import Refused


class Retaining(LogState):
    """Keeps the log within its capacity: holders, retention, compaction and compression."""

    # --- holders and removal

    def used_share(self, offset: int) -> float:
        """Return the share of `bytes_max` that the segments from that of `offset` on use."""
        return 0.0 if offset >= self.next_offset else self._quota.held_bytes(offset) / self.settings.bytes_max

    def retention_share(self, offset: int) -> float:
        """Return how close the segment of `offset` is to its removal, by size and age, ignoring holders."""
        return self._quota.retention_share(offset, self.clock.seen_us)

    def hold(self, holder: str, needed: Callable[[], int], evict: Callable[[], None] | None = None) -> None:
        """Keep all rows from the offset on that `needed` returns.

        The log calls `needed` when capacity is short. If `evict` is given, the log calls `evict` and releases
        the holder rather than refuse an append.
        """
        self._holders.hold(holder, needed, evict)

    def release(self, holder: str) -> None:
        """Remove a holder."""
        self._holders.release(holder)

    def roll(self) -> bool:
        """Seal the last segment with the next commit if it is older than `segment_s_max`; return True if so.

        So rows can be compacted and removed even if no more are appended.
        """
        last = self._segments.last
        if self.failure is not None or self._recovery_point is None or last is None or not last.size:
            return False
        seen_us = self.clock.poll()
        if is_old := self._active_segment.is_old(last, seen_us):
            self._active_segment.begin(offset=self.next_offset, seen_us=seen_us)
        return is_old

    def retain(self) -> int:
        """Remove old segments, by size and age, unless a holder needs them; return their number.

        Readers lose them at once; the next commit removes the files.
        """
        if self.failure is None and self._recovery_point is not None:
            self._quota.retain(self.clock.poll(), readable=self._readable_end(), end=self.next_offset)
        return self._note_removed(self._quota.take_removed())

    def take_compaction(self) -> Compaction | None:
        """Return the next compaction into a snapshot; None if there is none, or one is running.

        A background thread runs its steps, then `finish_compaction` takes it, even if it failed.
        """
        if self.failure is not None or self._recovery_point is None or self._closed:
            return None
        planner, held_bytes = self._planner, self._quota.bytes
        seen_us = self.clock.poll()
        return planner.take_compaction(
            self._segments, seen_us=seen_us, readable=self.synced, held_bytes=held_bytes
        )

    def finish_compaction(self, compaction: Compaction, *, made: bool) -> None:
        """Finish a compaction; `made`: its snapshot is on stable storage, so its rows may be removed."""
        self._planner.finish(compaction, made=made)

    def take_compression(self) -> SegmentCompression | None:
        """Return the compression of the next sealed segment, by the settings; None if there is none.

        A thread runs its steps, then `finish_compression` takes it, even if it failed. Raises OSError.
        """
        if self.failure is not None or self._recovery_point is None or self._closed:
            return None
        return self._compressor.take(self.synced)

    def finish_compression(self, compression: SegmentCompression, *, retry: bool = False) -> None:
        """Finish a compression whose steps and `close` have run. `retry`: it failed, and may be retried."""
        removed = self._compressor.finish(compression, retry=retry)
        if removed is not None:
            self._segments_to_remove.append(removed)

    @property
    def is_rearranging(self) -> bool:
        """True while a compression or a compaction runs: no recovery may start before it has ended."""
        return self._compressor.is_running or self._planner.is_running

    # --- age

    def times(self) -> Times:
        """Return the times for `write_times`, as of the last read of the clock."""
        clock, last = self.clock, self._segments.last
        return Times(
            clock.seen_us,
            clock.time_us,
            clock.jump,
            {segment.base: segment.seen_last_us for segment in self._segments.all[:-1]},
            None if last is None else (last.base, last.seen_first_us),
        )

    def write_times(self, times: Times) -> None:
        """Write the file of times. For a thread, while the log has not failed. Raises OSError."""
        write_times(self._disk, DIRECTORY, times)

    # --- capacity

    def refusal(self, *batches: Batch) -> Refused | None:
        """Return the error with which an append of these would be refused now; removes old segments first."""
        too_high = next((batch for batch in batches if batch.ack_level > self.ack_level), None)
        if too_high is not None:
            return refusals.level_refusal(too_high)
        return self._refusal(sum(batch.size for batch in batches))

    def capacity_refusal(self, count: int, size: int) -> Refused | None:
        """Return the error with which a batch of about this size would be refused now; None if it fits.

        Also returns None for a batch that exceeds the log's bounds, which `append` refuses as too large.
        """
        return None if size > self._batch_bytes_max else self._refusal(size)

    def _has_capacity(self, size: int) -> bool:
        """Return True if `_refusal` is sure to return None; quicker, and frees no capacity."""
        settings, unwritten = self.settings, self._unwritten_bytes + size
        return (
            self.failure is None
            and size <= self._batch_bytes_max
            and unwritten <= settings.unwritten_bytes_max
            and settings.free_bytes_min + unwritten <= self._free.bytes
            and not self.reserve.missing
            and self._quota.bytes + size <= settings.bytes_max
        )

    def shortage(self) -> Refused | None:
        """Return the error while the log lacks capacity; None otherwise, as far as known.

        It lacks capacity if the disk is full, or if it would refuse the size that it last refused.
        """
        refusal = self._disk_refusal(0) if self.failure is None else refusals.log_stopped(self.failure)
        if refusal is None and self._refused_size is not None:
            refusal = self._refusal(self._refused_size)
        if refusal is not None and refusals.FULL in refusal.details:
            return refusal
        self._refused_size = None
        return None

    def poll_capacity(self) -> None:
        """Poll the free space of the disk if a poll is due, since other programs write to it too."""
        if self.failure is None and not self._closed and self._free.claim_poll():
            with suppress(OSError):
                self._free.poll()

    def _refusal(self, size: int) -> Refused | None:
        refusal = self._find_refusal(size)
        if refusal is not None and refusal.code is ErrorCode.LOG_FULL:
            self._refused_size = size
        return refusal

    def _find_refusal(self, size: int) -> Refused | None:
        if self.failure is not None:
            return refusals.log_stopped(self.failure)
        if size > self._batch_bytes_max:
            return refusals.batch_too_large(size, self._batch_bytes_max)
        if self._unwritten_bytes and self._unwritten_bytes + size > self.settings.unwritten_bytes_max:
            return refusals.disk_too_slow(self._unwritten_bytes, self.settings.unwritten_bytes_max)
        return self._disk_refusal(size) or self._quota_refusal(size)

    def _disk_refusal(self, size: int) -> Refused | None:
        reserved = self.settings.free_bytes_min + self.reserve.missing
        needed = reserved + self._unwritten_bytes + size
        if self._free.bytes >= needed and not self.reserve.missing:
            return None
        try:
            if self._free.poll() >= needed:  # polled, so that appends resume by themselves
                return None
        except OSError as error:
            return refusals.free_space_unknown(error)
        return refusals.disk_full(self._free.bytes, reserved, needed)

    def _quota_refusal(self, size: int) -> Refused | None:
        fits = self._quota.ensure_capacity(size, readable=self._readable_end(), end=self.next_offset)
        self._note_removed(self._quota.take_removed())
        if fits:
            return None
        holder = self._holders.slowest()
        why = "" if holder else self._planner.wait_reason(self.high_watermark)
        held_bytes, bytes_max = self._quota.bytes, self.settings.bytes_max
        offsets = self.start_offset, self.next_offset
        return refusals.log_full(held_bytes, bytes_max, offsets=offsets, holder=holder, reason=why)

    def _readable_end(self) -> int:
        """Return the offset below which the log itself no longer needs its segments."""
        return self.high_watermark if self.needed_from is None else min(self.high_watermark, self.needed_from)

    def _note_removed(self, removed: list[Segment]) -> int:
        if removed:
            self._segments_to_remove += self._compressor.defer_removal(removed)
            self._start = removed[-1].end
        return len(removed)
