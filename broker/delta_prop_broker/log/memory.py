"""The log in memory: gone with the process, so its acknowledgements promise level `memory` only.

Keeps as much of the past as its bounds allow; drops the oldest batch that no holder needs, and
refuses new ones while a holder still needs the oldest.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING

from delta_prop_broker.log import refusals
from delta_prop_broker.log.retention.holders import Holders
from delta_prop_wire.batch import LoggedBatch
from delta_prop_wire.delta import AckLevel, KnownIds, Source
from delta_prop_wire.errors import Refused
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from delta_prop_wire.batch import Batch

DELTAS_MAX = 1_000_000
BYTES_MAX = 256 * 1024 * 1024
RETRY_AFTER_MS = 50
MARKS_MAX = 4_096
"""How many times are remembered, to tell how old a row is; older ones lie further apart."""

BATCH_OVERHEAD_BYTES = 3_072
ROW_OVERHEAD_BYTES = 96
"""What a batch costs beside its bytes once sinks have read it: views, decoded names. Measured, rounded."""


@dataclass(frozen=True, slots=True)
class MemoryLogStatistics:
    """What the log holds and what bounds it."""

    first_offset: int
    next_offset: int
    deltas: int
    bytes: int
    deltas_max: int
    bytes_max: int
    dropped: int
    refused: int
    held_by: str | None


class MemoryLog:
    """A `Log` bounded in deltas and bytes."""

    epoch = 1
    level = AckLevel.MEMORY
    accepting = True

    def __init__(
        self,
        log_id: bytes,
        *,
        deltas_max: int = DELTAS_MAX,
        bytes_max: int = BYTES_MAX,
        now: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`now`: monotonic seconds."""
        assert deltas_max > 0
        assert bytes_max > 0
        self.log_id = log_id
        self.next_offset = 0
        self._deltas_max = deltas_max
        self._bytes_max = bytes_max
        self._batches: list[LoggedBatch] = []
        self._starts: list[int] = []
        self._weights: list[int] = []  # of everything appended up to each batch, itself included
        self._head = 0  # batches before it are dropped; their places are cut off now and then
        self._bytes = 0
        self._appended_bytes = 0
        self._dropped = 0
        self._refused = 0
        self._short_of: tuple[int, int] | None = None  # deltas and bytes of what found no room last
        self._holders = Holders()
        self._now = now
        self._mark_ends: list[int] = []  # up to where the log came by the time below
        self._mark_times: list[float] = []

    @property
    def visible(self) -> int:
        """Everything that has a place: memory has no later mark."""
        return self.next_offset

    def epoch_end(self, epoch: int) -> int | None:
        """A log in memory has one epoch."""
        return None

    def reached(self, level: AckLevel) -> int:
        """Everything that has a place, as nothing above level memory is ever taken."""
        return self.next_offset

    def want_sync(self) -> None:
        """Nobody can wait for that here."""

    @property
    def first_offset(self) -> int:
        """The oldest offset still held."""
        return self._starts[self._head] if self._head < len(self._starts) else self.next_offset

    def refusal(self, *batches: Batch) -> Refused | None:
        """Why an append of these would be refused now; makes room first where nobody needs the oldest."""
        above = filter(None, map(self._level_refusal, batches))
        return next(above, None) or self._refusal(*batches)

    def full(self, count: int, size: int) -> Refused | None:
        """Why a batch of about so many deltas and bytes would find no room now, None if it would."""
        size += BATCH_OVERHEAD_BYTES + ROW_OVERHEAD_BYTES * count
        too_large = count > self._deltas_max or size > self._bytes_max
        return None if too_large or self._find_room(count, size) else self._full(count, size)

    def shortage(self) -> Refused | None:
        """The reason why what found no room last would find none now; None while there is room."""
        if self._short_of is None or self._find_room(*self._short_of):
            self._short_of = None
            return None
        return self._full(*self._short_of)

    def look_at_room(self) -> None:
        """Nobody else takes of it."""

    def append(
        self, batch: Batch, *, lamport: int, source: Source, known_ids: KnownIds = KnownIds.NONE
    ) -> LoggedBatch:
        """Give the batch its place. Raises Refused and changes nothing."""
        # A forwarded batch asked the service where it entered for its level, not this one.
        refusal = self._refusal(batch) if source is Source.REPLICA else self.refusal(batch)
        if refusal is not None:
            self._refused += 1
            raise refusal
        logged = LoggedBatch(batch, self.next_offset, lamport, source, known_ids=known_ids)
        self._batches.append(logged)
        self._starts.append(logged.offset)
        self._bytes += weight(batch)
        self._appended_bytes += weight(batch)
        self._weights.append(self._appended_bytes)
        self.next_offset = logged.next_offset
        return logged

    def fits(self, batches: Sequence[Batch]) -> bool:
        """Whether `append_run` would take these; makes room where nobody needs the oldest."""
        if any(self._level_refusal(batch) is not None for batch in batches):
            return False
        count, size = sum([batch.count for batch in batches]), sum(map(weight, batches))
        fits_ever = count <= self._deltas_max and size <= self._bytes_max
        return fits_ever and self._find_room(count, size)

    def append_run(self, batches: Sequence[Batch], *, lamport: int, source: Source) -> list[LoggedBatch]:
        """`append` for each, one behind the other. They fit: that was asked just now."""
        placed = []
        for batch in batches:
            placed.append(self.append(batch, lamport=lamport, source=source))
            lamport += batch.count
        return placed

    def read(self, offset: int, *, rows_max: int, bytes_max: int) -> list[LoggedBatch]:
        """Batches from the one that holds `offset` on, until either bound is reached."""
        if offset >= self.next_offset:
            return []
        if offset < self.first_offset:
            raise refusals.too_old(offset, self.first_offset)
        place = bisect_right(self._starts, offset, self._head) - 1
        found: list[LoggedBatch] = []
        rows = size = 0
        for logged in self._batches[place : place + rows_max]:
            if found and (rows + logged.count > rows_max or size + logged.batch.size > bytes_max):
                break
            found.append(logged)
            rows += logged.count
            size += logged.batch.size
        return found

    def read_appended(self, offset: int, *, rows_max: int, bytes_max: int) -> list[LoggedBatch]:
        """`read`, as everything that has a place is visible."""
        return self.read(offset, rows_max=rows_max, bytes_max=bytes_max)

    def find(self, origin: int, counter: int) -> int | None:
        """The offset of a dot; None where it is not, or no longer, here. Looks at all that is held."""
        for logged in self._batches[self._head :]:
            batch = logged.batch
            if batch.origin == origin and batch.base <= counter <= batch.last:
                rows = (row for row in range(batch.count) if batch.counter(row) == counter)
                row = next(rows, None)
                return None if row is None else logged.offset + row
        return None

    def fill(self, offset: int) -> float:
        """The share of the bounds that everything from `offset` on takes, as far as it is still held."""
        if offset >= self.next_offset:
            return 0.0
        offset = max(offset, self.first_offset)
        place = bisect_right(self._starts, offset, self._head) - 1
        held = self._appended_bytes - self._weights[place] + weight(self._batches[place].batch)
        return max((self.next_offset - offset) / self._deltas_max, held / self._bytes_max)

    def kept_share(self, offset: int) -> float:
        """How near what lies at `offset` is to going; nothing goes for its age."""
        return self.fill(offset)

    def age_s(self, offset: int) -> float | None:
        """Return how long ago the row at an offset came, in seconds, by the marks of `mark_time`; of rows
        that are gone, the oldest there is.
        """
        if offset >= self.next_offset:
            return 0.0
        place = bisect_right(self._mark_ends, max(offset, self.first_offset))
        return 0.0 if place == len(self._mark_ends) else max(self._now() - self._mark_times[place], 0.0)

    def mark_time(self) -> None:
        """Note up to where the log has come, so that nothing has to be noted with each batch."""
        if self._mark_ends and self._mark_ends[-1] == self.next_offset:
            return
        self._mark_ends.append(self.next_offset)
        self._mark_times.append(self._now())
        if len(self._mark_ends) > MARKS_MAX:
            gone = bisect_right(self._mark_ends, self.first_offset)
            if gone * 2 > MARKS_MAX:
                del self._mark_ends[:gone], self._mark_times[:gone]
            else:  # of what is older, every other one does
                del self._mark_ends[: MARKS_MAX // 2 : 2], self._mark_times[: MARKS_MAX // 2 : 2]

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

    def statistics(self) -> MemoryLogStatistics:
        """A snapshot; `held_by` is the holder furthest behind."""
        return MemoryLogStatistics(
            first_offset=self.first_offset,
            next_offset=self.next_offset,
            deltas=self.next_offset - self.first_offset,
            bytes=self._bytes,
            deltas_max=self._deltas_max,
            bytes_max=self._bytes_max,
            dropped=self._dropped,
            refused=self._refused,
            held_by=self._holders.slowest(),
        )

    def _level_refusal(self, batch: Batch) -> Refused | None:
        if batch.ack_level <= self.level:
            return None
        return Refused(
            ErrorCode.LEVEL_UNAVAILABLE,
            f"ack level {batch.ack_level.name.lower()} asked for, but a log in memory grants memory: "
            "ask for memory, or give the service a data directory",
        )

    def _refusal(self, *batches: Batch) -> Refused | None:
        count, size = sum(batch.count for batch in batches), sum(map(weight, batches))
        if count > self._deltas_max or size > self._bytes_max:
            return Refused(
                ErrorCode.TOO_LARGE,
                f"a batch of {count} deltas and {size} bytes is larger than the whole log "
                f"({self._deltas_max} deltas, {self._bytes_max} bytes): send smaller batches",
            )
        return None if self._find_room(count, size) else self._full(count, size)

    def _fits(self, count: int, size: int) -> bool:
        held = self.next_offset - self.first_offset
        return held + count <= self._deltas_max and self._bytes + size <= self._bytes_max

    def _find_room(self, count: int, size: int) -> bool:
        self._make_room(count, size)
        if not self._fits(count, size) and self._would_fit(count, size):
            while not self._fits(count, size) and self._holders.let_go():
                self._make_room(count, size)
        return self._fits(count, size)

    def _would_fit(self, count: int, size: int) -> bool:
        """Whether there would be room without those who give way: nobody is let go for nothing."""
        floor = self._holders.staying_floor(self.next_offset)
        if floor >= self.next_offset:
            return True
        place = bisect_right(self._starts, floor, self._head) - 1  # the oldest batch that is kept
        if place < self._head:
            return False
        held = self._appended_bytes - self._weights[place] + weight(self._batches[place].batch)
        return (
            self.next_offset - self._starts[place] + count <= self._deltas_max
            and held + size <= self._bytes_max
        )

    def _make_room(self, count: int, size: int) -> None:
        if self._fits(count, size):
            return
        floor = self._holders.floor(self.next_offset)
        while self._head < len(self._batches) and not self._fits(count, size):
            oldest = self._batches[self._head]
            if oldest.next_offset > floor:
                break
            self._bytes -= weight(oldest.batch)
            self._dropped += oldest.count
            self._batches[self._head] = _GONE
            self._head += 1
        if self._head * 2 > len(self._batches):  # cut at half, so that each place moves once on average
            del self._batches[: self._head]
            del self._starts[: self._head]
            del self._weights[: self._head]
            self._head = 0

    def _full(self, count: int, size: int) -> Refused:
        self._short_of = count, size
        holder = self._holders.slowest()
        held = self.next_offset - self.first_offset
        return Refused(
            ErrorCode.LOG_FULL,
            f"the log holds {held} of {self._deltas_max} deltas, {self._bytes} of {self._bytes_max} bytes, "
            f"and sink {holder!r} still needs the oldest (offset {self.first_offset}): "
            "try again when it has caught up, detach it, or raise the log's bounds",
            retry_after_ms=RETRY_AFTER_MS,
            details={
                "depth": held,
                "capacity": self._deltas_max,
                "depth_bytes": self._bytes,
                "capacity_bytes": self._bytes_max,
                "blocked_by": holder,
                refusals.FULL: "log",
            },
        )


def weight(batch: Batch) -> int:
    """The bytes that a batch is counted with."""
    return batch.size + BATCH_OVERHEAD_BYTES + ROW_OVERHEAD_BYTES * batch.count


_GONE: LoggedBatch = None  # type: ignore[assignment]
