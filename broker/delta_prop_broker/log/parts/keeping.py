"""What a log on disk keeps, for whom, and what it lets go; whether there is room for more.

Segments go as a whole, the oldest first. They are gone for readers at once, from the disk with the next
commit.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from delta_prop_broker.log import refusals
from delta_prop_broker.log.files.names import DIRECTORY
from delta_prop_broker.log.files.times import Times, write_times
from delta_prop_broker.log.parts.state import LogState
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from collections.abc import Callable

    from delta_prop_broker.log.files.segment import Segment
    from delta_prop_broker.log.retention.compaction import Compaction
    from delta_prop_broker.log.retention.rewriting import Rewriting
    from delta_prop_wire.batch import Batch
    from delta_prop_wire.errors import Refused


class Keeping(LogState):
    """Room, holders, retention, compaction and compression."""

    # --- who holds it, and what goes

    def fill(self, offset: int) -> float:
        """The share of `bytes_max` that the segments from the one of `offset` on take."""
        return 0.0 if offset >= self.next_offset else self._room.held(offset) / self.settings.bytes_max

    def kept_share(self, offset: int) -> float:
        """How near the segment of `offset` is to going, by size and age; nobody's need is looked at."""
        return self._room.kept_share(offset, self.clock.seen_us)

    def hold(
        self, holder: str, needed: Callable[[], int], give_way: Callable[[], None] | None = None
    ) -> None:
        """Keep everything from the offset that `needed` gives on, asked when room is short.

        A holder with `give_way` is let go, and told so, rather than an append refused.
        """
        self._holders.hold(holder, needed, give_way)

    def release(self, holder: str) -> None:
        """Forget what a holder needed."""
        self._holders.release(holder)

    def roll(self) -> bool:
        """Seal the last segment if it is older than `segment_s_max`, with the next commit; whether it is.

        So what nobody appends to any more can be retained and compacted as well.
        """
        last = self._segments.last
        if self.failure is not None or self._mark is None or last is None or not last.size:
            return False
        seen_us = self.clock.look()
        if old := self._growing.is_old(last, seen_us):
            self._growing.begin(offset=self.next_offset, seen_us=seen_us)
        return old

    def retain(self) -> int:
        """Let whole old segments go, by size and age, as far as nobody needs them; how many go.

        They are gone for readers at once, from the disk with the next commit.
        """
        if self.failure is None and self._mark is not None:
            self._room.retain(self.clock.look(), readable=self._readable(), end=self.next_offset)
        return self._take_away(self._room.take_removed())

    def take_compaction(self) -> Compaction | None:
        """What is to be made into a snapshot now, None where nothing is, or one is being made.

        Its steps are for a background thread, then it is given to `finish_compaction`, whatever became of it.
        """
        if self.failure is not None or self._mark is None or self._closed:
            return None
        cover, held = self._cover, self._room.bytes
        seen_us = self.clock.look()
        return cover.due(self._segments, seen_us=seen_us, readable=self.synced, held_bytes=held)

    def finish_compaction(self, compaction: Compaction, *, made: bool) -> None:
        """A compaction has ended; `made`: its snapshot is on stable storage, and what it covers may go."""
        self._cover.done(compaction, made=made)

    def take_rewriting(self) -> Rewriting | None:
        """The next sealed segment to be compressed, as the settings say; None where there is none.

        Its steps are for a thread, then it is given to `finish_rewriting`, whatever became of it. Raises
        OSError.
        """
        if self.failure is not None or self._mark is None or self._closed:
            return None
        return self._rewriter.take(self.synced)

    def finish_rewriting(self, rewriting: Rewriting, *, again: bool = False) -> None:
        """The steps and the `end` of a rewriting have run. `again`: what failed may go well another time."""
        let_go = self._rewriter.finish(rewriting, again=again)
        if let_go is not None:
            self._removed.append(let_go)

    @property
    def rearranging(self) -> bool:
        """Whether a rewriting or a compaction is under way: until it has ended nothing may be recovered."""
        return self._rewriter.under_way or self._cover.under_way

    # --- age

    def times(self) -> Times:
        """Return what `write_times` is to keep, as of the last look at the clock."""
        clock, last = self.clock, self._segments.last
        return Times(
            clock.seen_us,
            clock.time_us,
            clock.jump,
            {segment.base: segment.seen_last_us for segment in self._segments.all[:-1]},
            None if last is None else (last.base, last.seen_first_us),
        )

    def write_times(self, times: Times) -> None:
        """Write them down. For a thread, while the log works. Raises OSError."""
        write_times(self._disk, DIRECTORY, times)

    # --- room

    def refusal(self, *batches: Batch) -> Refused | None:
        """Why an append of these would be refused now; makes room first where nobody needs the oldest."""
        above = next((batch for batch in batches if batch.ack_level > self.level), None)
        if above is not None:
            return refusals.level_refusal(above)
        return self._refusal(sum(batch.size for batch in batches))

    def full(self, count: int, size: int) -> Refused | None:
        """Why a batch of about so many deltas and bytes would find no room now, None if it would."""
        return None if size > self._batch_bytes_max else self._refusal(size)

    def _has_room(self, size: int) -> bool:
        """Whether nothing that `_refusal` looks at is in the way; told quicker, without any cure."""
        settings, unwritten = self.settings, self._unwritten_bytes + size
        return (
            self.failure is None
            and size <= self._batch_bytes_max
            and unwritten <= settings.unwritten_bytes_max
            and settings.free_bytes_min + unwritten <= self._free.bytes
            and not self.reserve.missing
            and self._room.bytes + size <= settings.bytes_max
        )

    def shortage(self) -> Refused | None:
        """The reason why nothing can be appended for want of room: the disk is full, or what was refused last
        for that would be refused again. None while there is room, as far as is known.
        """
        refusal = self._disk_full(0) if self.failure is None else refusals.stopped(self.failure)
        if refusal is None and self._short_of is not None:
            refusal = self._refusal(self._short_of)
        if refusal is not None and refusals.FULL in refusal.details:
            return refusal
        self._short_of = None
        return None

    def look_at_room(self) -> None:
        """Ask the disk what it has left, unless that was done just now: others write to it, too."""
        if self.failure is None and not self._closed and self._free.is_due():
            with suppress(OSError):
                self._free.ask()

    def _refusal(self, size: int) -> Refused | None:
        refusal = self._why_not(size)
        if refusal is not None and refusal.code is ErrorCode.LOG_FULL:
            self._short_of = size
        return refusal

    def _why_not(self, size: int) -> Refused | None:
        if self.failure is not None:
            return refusals.stopped(self.failure)
        if size > self._batch_bytes_max:
            return refusals.too_large(size, self._batch_bytes_max)
        if self._unwritten_bytes and self._unwritten_bytes + size > self.settings.unwritten_bytes_max:
            return refusals.too_slow(self._unwritten_bytes, self.settings.unwritten_bytes_max)
        return self._disk_full(size) or self._no_room(size)

    def _disk_full(self, size: int) -> Refused | None:
        kept = self.settings.free_bytes_min + self.reserve.missing
        needed = kept + self._unwritten_bytes + size
        if self._free.bytes >= needed and not self.reserve.missing:
            return None
        try:
            if self._free.ask() >= needed:  # while it is short, so that it goes on by itself
                return None
        except OSError as error:
            return refusals.disk_unasked(error)
        return refusals.disk_full(self._free.bytes, kept, needed)

    def _no_room(self, size: int) -> Refused | None:
        found = self._room.find(size, readable=self._readable(), end=self.next_offset)
        self._take_away(self._room.take_removed())
        if found:
            return None
        holder = self._holders.slowest()
        why = "" if holder else self._cover.waited_for(self.visible)
        held, offsets = self._room.bytes, (self.first_offset, self.next_offset)
        return refusals.log_full(held, self.settings.bytes_max, offsets=offsets, holder=holder, waits_for=why)

    def _readable(self) -> int:
        """Up to where segments may go, as far as it is for the log to say."""
        return self.visible if self.needed_from is None else min(self.visible, self.needed_from)

    def _take_away(self, removed: list[Segment]) -> int:
        if removed:
            self._removed += self._rewriter.keep(removed)
            self._start = removed[-1].end
        return len(removed)
