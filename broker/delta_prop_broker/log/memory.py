"""The log in memory: lost with the process, so its acknowledgements promise only level `memory`.

It stores as many rows as its bounds allow. At a bound, it drops the oldest batches that no holder needs, and
refuses new ones while a holder still needs the oldest.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from delta_prop_broker.log import refusals
from delta_prop_broker.log.stored_batches import (
    BATCH_OVERHEAD_BYTES,
    ROW_OVERHEAD_BYTES,
    StoredBatches,
    weight,
)
from delta_prop_broker.retention.holders import Holders
from delta_prop_wire.batch import Batch, LoggedBatch
from delta_prop_wire.delta import AckLevel, KnownIds, Source
from delta_prop_wire.errors import Refused
from delta_prop_wire.spec import ACK_LEVEL_SHIFT, ErrorCode
from delta_prop_wire.stamp import DEFAULT_LOG

if TYPE_CHECKING:
    from delta_prop_broker.log_clock import MonotonicClock

TIME_MARKS_MAX = 4_096
"""Maximum number of stored time marks; older ones lie further apart."""


class TimeMarks:
    """The time at which the log ended at an offset, noted now and then, so that an append need not do it."""

    def __init__(self, clock: MonotonicClock | None) -> None:
        """`clock`: None in a log whose rows need no ages; then all are 0."""
        self._clock = clock
        self._ends: list[int] = []  # the next offset at each time of `_times`
        self._times: list[float] = []

    def __len__(self) -> int:
        return len(self._ends)

    def note(self, start: int, end: int) -> None:
        """Note that the log holds the rows from `start` to `end` now."""
        if self._clock is None or (self._ends and self._ends[-1] == end):
            return
        self._ends.append(end)
        self._times.append(self._clock.now())
        if len(self._ends) > TIME_MARKS_MAX:
            removed_count = bisect_right(self._ends, start)
            if removed_count * 2 > TIME_MARKS_MAX:
                del self._ends[:removed_count], self._times[:removed_count]
            else:  # thin out the older half
                del self._ends[: TIME_MARKS_MAX // 2 : 2], self._times[: TIME_MARKS_MAX // 2 : 2]

    def age_s(self, offset: int) -> float:
        """Return the seconds since the first mark after the row at `offset`; 0 if there is none yet."""
        index = bisect_right(self._ends, offset)
        if self._clock is None or index == len(self._ends):
            return 0.0
        return max(self._clock.now() - self._times[index], 0.0)


DELTAS_MAX = 1_000_000
BYTES_MAX = 256 * 1024 * 1024
RETRY_AFTER_MS = 50


@dataclass(frozen=True, slots=True)
class MemoryLogStatistics:
    """Contents and bounds of the log.

    `dropped`: number of deltas that were dropped; `refused`: number of refused appends; `held_by`: the
    slowest holder.
    """

    start_offset: int
    next_offset: int
    deltas: int
    bytes: int
    deltas_max: int
    bytes_max: int
    dropped: int
    refused: int
    held_by: str | None


class MemoryLog:
    """A `Log` bounded in deltas and bytes; `Log` describes the methods without a docstring."""

    epoch = 1
    ack_level = AckLevel.MEMORY
    default_level = AckLevel.MEMORY
    is_accepting = True
    name = DEFAULT_LOG

    def __init__(
        self,
        log_id: bytes,
        *,
        deltas_max: int = DELTAS_MAX,
        bytes_max: int = BYTES_MAX,
        clock: MonotonicClock | None = None,
    ) -> None:
        """`clock`: for the ages of rows; None: all are 0."""
        assert deltas_max > 0
        assert bytes_max > 0
        self.log_id = log_id
        self.next_offset = 0
        self._deltas_max = deltas_max
        self._bytes_max = bytes_max
        self._stored = StoredBatches()
        self._holders = Holders()
        self._time_marks = TimeMarks(clock)
        self._dropped_count = 0
        self._refused_count = 0
        self._refused_size: tuple[int, int] | None = None  # deltas and bytes of the batch last refused

    @property
    def high_watermark(self) -> int:
        return self.next_offset

    def epoch_end(self, epoch: int) -> int | None:
        """Return None: a log in memory has one epoch."""
        return None

    def offset_at_level(self, level: AckLevel) -> int:
        """Return the next offset, whatever the level: a batch that asks for more than memory is refused."""
        return self.next_offset

    def request_sync(self) -> None:
        """Do nothing: no batch asks for a sync here."""

    @property
    def start_offset(self) -> int:
        return self._stored.start_offset

    def refusal(self, *batches: Batch) -> Refused | None:
        for batch in batches:
            if batch.ack_level > self.ack_level:
                return _level_refusal(batch)
        return self._refusal(sum(batch.count for batch in batches), sum(map(weight, batches)))

    def capacity_refusal(self, count: int, size: int) -> Refused | None:
        size += BATCH_OVERHEAD_BYTES + ROW_OVERHEAD_BYTES * count
        is_too_large = count > self._deltas_max or size > self._bytes_max
        return None if is_too_large or self._ensure_capacity(count, size) else self._full_refusal(count, size)

    def shortage(self) -> Refused | None:
        if self._refused_size is None or self._ensure_capacity(*self._refused_size):
            self._refused_size = None
            return None
        return self._full_refusal(*self._refused_size)

    def poll_capacity(self) -> None:
        """Do nothing: no other program uses this log's capacity."""

    def append(
        self, batch: Batch, *, lamport: int, source: Source, known_ids: KnownIds = KnownIds.NONE
    ) -> LoggedBatch:
        count, size, refusal = batch.count, weight(batch), None
        # The level of a forwarded batch counts only at the service where it entered.
        if batch.attributes >> ACK_LEVEL_SHIFT & 3 > self.ack_level and source is not Source.REPLICA:
            refusal = _level_refusal(batch)
        elif not self._has_capacity(count, size):
            refusal = self._refusal(count, size)
        if refusal is not None:
            self._refused_count += 1
            raise refusal
        logged = LoggedBatch(batch, self.next_offset, lamport, source, known_ids=known_ids)
        self._stored.append(logged, size)
        self.next_offset += count
        return logged

    def make_capacity_for(self, batches: Sequence[Batch]) -> bool:
        for batch in batches:
            if batch.attributes >> ACK_LEVEL_SHIFT & 3 > self.ack_level:
                return False
        count, size = sum([batch.count for batch in batches]), sum(map(weight, batches))
        fits_ever = count <= self._deltas_max and size <= self._bytes_max
        return fits_ever and self._ensure_capacity(count, size)

    def append_run(self, batches: Sequence[Batch], *, lamport: int, source: Source) -> list[LoggedBatch]:
        appended = []
        for batch in batches:
            appended.append(self.append(batch, lamport=lamport, source=source))
            lamport += batch.count
        return appended

    def read(self, offset: int, *, rows_max: int, bytes_max: int) -> list[LoggedBatch]:
        """Return batches from the one that holds `offset` on, within the bounds, or a single larger one.

        Returns none from `high_watermark` on. Raises Refused (CURSOR_TOO_OLD) below `start_offset`.
        """
        if offset >= self.next_offset:
            return []
        stored = self._stored
        if offset < stored.start_offset:
            raise refusals.offset_too_old(offset, stored.start_offset)
        return stored.read(offset, rows_max, bytes_max)

    def read_appended(self, offset: int, *, rows_max: int, bytes_max: int) -> list[LoggedBatch]:
        return self.read(offset, rows_max=rows_max, bytes_max=bytes_max)

    def find(self, origin: int, counter: int) -> int | None:
        """Return the offset of a dot; None if the log does not hold it. Scans all stored batches."""
        for logged in self._stored:
            batch = logged.batch
            if batch.origin == origin and batch.base <= counter <= batch.last:
                rows = (row for row in range(batch.count) if batch.counter(row) == counter)
                row = next(rows, None)
                return None if row is None else logged.offset + row
        return None

    def offset_at(self, time_us: int) -> int:
        """Raise Refused: this log stores no times."""
        raise refusals.no_times()

    def snapshot(self) -> None:
        """Return None: this log removes its oldest rows without a snapshot."""

    def may_have_snapshot(self) -> bool:
        """Return False: this log has no snapshot."""
        return False

    def sendfile_reader(self) -> None:
        """Return None: this log has no files."""

    def write_small(self, write: Callable[[], None]) -> None:
        write()

    def used_share(self, offset: int) -> float:
        if offset >= self.next_offset:
            return 0.0
        offset = max(offset, self.start_offset)
        held = self._stored.held_from(offset)
        assert held is not None
        return max((self.next_offset - offset) / self._deltas_max, held[1] / self._bytes_max)

    def retention_share(self, offset: int) -> float:
        return self.used_share(offset)

    def age_s(self, offset: int) -> float | None:
        """Return the seconds since the row at an offset was appended, by the marks of `mark_time`.

        For removed rows, returns the age of the oldest stored one.
        """
        if offset >= self.next_offset:
            return 0.0
        return self._time_marks.age_s(max(offset, self.start_offset))

    def mark_time(self) -> None:
        """Note the time and the next offset, so that `append` need not note them for each batch."""
        self._time_marks.note(self.start_offset, self.next_offset)

    def hold(self, holder: str, needed: Callable[[], int], evict: Callable[[], None] | None = None) -> None:
        self._holders.hold(holder, needed, evict)

    def release(self, holder: str) -> None:
        self._holders.release(holder)

    def statistics(self) -> MemoryLogStatistics:
        """Return a snapshot of the statistics; `held_by` is the slowest holder."""
        return MemoryLogStatistics(
            start_offset=self.start_offset,
            next_offset=self.next_offset,
            deltas=self.next_offset - self.start_offset,
            bytes=self._stored.bytes,
            deltas_max=self._deltas_max,
            bytes_max=self._bytes_max,
            dropped=self._dropped_count,
            refused=self._refused_count,
            held_by=self._holders.slowest(),
        )

    def _refusal(self, count: int, size: int) -> Refused | None:
        if count > self._deltas_max or size > self._bytes_max:
            return Refused(
                ErrorCode.TOO_LARGE,
                f"a batch of {count} deltas and {size} bytes is larger than the whole log "
                f"({self._deltas_max} deltas, {self._bytes_max} bytes): send smaller batches",
            )
        return None if self._ensure_capacity(count, size) else self._full_refusal(count, size)

    def _has_capacity(self, count: int, size: int) -> bool:
        stored = self._stored
        held_deltas = self.next_offset - stored.start_offset
        return held_deltas + count <= self._deltas_max and stored.bytes + size <= self._bytes_max

    def _ensure_capacity(self, count: int, size: int) -> bool:
        self._drop_oldest(count, size)
        if not self._has_capacity(count, size) and self._can_fit(count, size):
            while not self._has_capacity(count, size) and self._holders.evict_slowest():
                self._drop_oldest(count, size)
        return self._has_capacity(count, size)

    def _can_fit(self, count: int, size: int) -> bool:
        """Return True if a batch of this size fits once all evictable holders are evicted."""
        floor = self._holders.unevictable_floor(self.next_offset)
        if floor >= self.next_offset:
            return True
        held = self._stored.held_from(floor)  # from the oldest batch that stays
        if held is None:
            return False
        offset, held_bytes = held
        return self.next_offset - offset + count <= self._deltas_max and held_bytes + size <= self._bytes_max

    def _drop_oldest(self, count: int, size: int) -> None:
        if self._has_capacity(count, size):
            return
        floor = self._holders.floor(self.next_offset)
        stored = self._stored
        while (oldest := stored.oldest()) is not None and oldest.next_offset <= floor:
            stored.drop(oldest)
            self._dropped_count += oldest.count
            if self._has_capacity(count, size):
                break
        stored.trim()

    def _full_refusal(self, count: int, size: int) -> Refused:
        self._refused_size = count, size
        holder = self._holders.slowest()
        held_deltas, held_bytes = self.next_offset - self.start_offset, self._stored.bytes
        return Refused(
            ErrorCode.LOG_FULL,
            f"the log holds {held_deltas} of {self._deltas_max} deltas, {held_bytes} of {self._bytes_max} "
            f"bytes, and sink {holder!r} still needs the oldest (offset {self.start_offset}): "
            "try again when it has caught up, detach it, or raise the log's bounds",
            retry_after_ms=RETRY_AFTER_MS,
            details={
                "depth": held_deltas,
                "capacity": self._deltas_max,
                "depth_bytes": held_bytes,
                "capacity_bytes": self._bytes_max,
                "blocked_by": holder,
                refusals.FULL: "log",
            },
        )


def _level_refusal(batch: Batch) -> Refused:
    return Refused(
        ErrorCode.LEVEL_UNAVAILABLE,
        f"ack level {batch.ack_level.name.lower()} requested, but a log in memory grants only memory: "
        "request memory, or give the service a data directory",
    )
