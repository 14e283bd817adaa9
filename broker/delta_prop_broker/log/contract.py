"""The contract between a log and the pipeline.

A log assigns offsets to batches, stores them and returns them; it never orders, deduplicates or routes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

from delta_prop_wire.delta import AckLevel, KnownIds, Source

if TYPE_CHECKING:
    from delta_prop_broker.segments.sendfile import SendfileReader
    from delta_prop_wire.batch import Batch, LoggedBatch
    from delta_prop_wire.errors import Refused


class LogSnapshot(Protocol):
    """A snapshot: the state of every vector as of `offset`, in frames of state rows."""

    @property
    def offset(self) -> int:
        """The first offset after the snapshot."""

    @property
    def begin(self) -> int:
        """The first offset that it covers; 0 if the log had lost no row before the first snapshot."""

    @property
    def rows(self) -> int:
        """Number of states."""

    @property
    def lamport(self) -> int:
        """The highest Lamport number below the offset."""

    def frames(self) -> Iterator[LoggedBatch]:
        """Yield all states. Blocks on the disk. Raises DeltaPropError if they are corrupted, OSError."""

    def find(self, namespace: str, vector_id: str) -> tuple[LoggedBatch, int] | None:
        """Return one vector's state, as a row. Blocks on the disk. Raises DeltaPropError, OSError."""

    def close(self) -> None:
        """Close the file."""


class Log(Protocol):
    """One partition's deltas, in the one order that all sinks of a service see.

    Once `append` returns, its offsets belong to its rows: only a failure that makes the log's epoch grow can
    assign them again. Readers may read up to `high_watermark`.
    """

    @property
    def log_id(self) -> bytes:
        """16 random bytes, drawn when the log was created."""

    @property
    def epoch(self) -> int:
        """The log epoch; it grows with each recovery that may have lost a tail."""

    def epoch_end(self, epoch: int) -> int | None:
        """Return the end offset (exclusive) of a past epoch; None for the present or an unknown epoch."""

    @property
    def ack_level(self) -> AckLevel:
        """The highest level that an acknowledgement from this log can promise."""

    @property
    def default_level(self) -> AckLevel:
        """The level of a publish that requests none."""

    @property
    def is_accepting(self) -> bool:
        """False while the log is overloaded; then deltas wait in the queue before the pipeline."""

    @property
    def start_offset(self) -> int:
        """The oldest stored offset."""

    @property
    def next_offset(self) -> int:
        """The offset that the next appended row gets."""

    @property
    def high_watermark(self) -> int:
        """The offset (exclusive) up to which sinks and subscribers may read."""

    def offset_at_level(self, level: AckLevel) -> int:
        """Return the offset (exclusive) up to which rows are stored at this ack level."""

    def request_sync(self) -> None:
        """Request a sync for a client that waits for level `durable`, even of rows with a lower level."""

    def refusal(self, *batches: Batch) -> Exception | None:
        """Return the error with which an append of these batches would be refused now; None if all fit."""

    def capacity_refusal(self, count: int, size: int) -> Exception | None:
        """Return the error with which a batch of this size would be refused now; None if it fits.

        `count` and `size` may be estimates. Also returns None for a batch that exceeds the log's bounds,
        which `append` refuses with another code.
        """

    def shortage(self) -> Refused | None:
        """Return the error while the log lacks capacity; None otherwise, as far as known.

        Checks capacity for a batch of the size that was refused last.
        """

    def poll_capacity(self) -> None:
        """Update the known free capacity, since other programs may have used some of it."""

    def append(
        self, batch: Batch, *, lamport: int, source: Source, known_ids: KnownIds = KnownIds.NONE
    ) -> LoggedBatch:
        """Append a batch: assign its offsets. If it raises Refused, nothing has changed.

        `known_ids`: tells readers which ids of the batch the log already had.
        """

    def make_capacity_for(self, batches: Sequence[Batch]) -> bool:
        """Free capacity where possible; return True if `append_run` would take all of these now."""

    def append_run(self, batches: Sequence[Batch], *, lamport: int, source: Source) -> list[LoggedBatch]:
        """Append batches of one origin, with contiguous counters, one after the other.

        The caller called `make_capacity_for` in the same tick.
        `lamport`: the Lamport number of the first row of the first batch; each next row has the next number.
        """

    def read(self, offset: int, *, rows_max: int, bytes_max: int) -> list[LoggedBatch]:
        """Return batches from the one that holds `offset` on, below `high_watermark` and within the bounds.

        Returns at least one batch below `high_watermark`, even if it exceeds the bounds. Raises Refused
        (CURSOR_TOO_OLD) below `start_offset`.
        """

    def read_appended(self, offset: int, *, rows_max: int, bytes_max: int) -> list[LoggedBatch]:
        """Return batches like `read`, but up to `next_offset`, to compare a duplicate with its first copy.

        Raises Refused (CURSOR_TOO_OLD) below `start_offset`.
        """

    def find(self, origin: int, counter: int) -> int | None:
        """Return the offset of a dot, even above the high watermark; None if the log does not hold it."""

    def offset_at(self, time_us: int) -> int:
        """Return the first offset appended at that time (µs since 1970) or later, else `high_watermark`.

        Raises Refused (BAD_REQUEST) if the log stores no times.
        """

    def snapshot(self) -> LogSnapshot | None:
        """Open the newest snapshot that the log continues from; None if there is none. The caller closes it.

        Waits for the disk. Raises LogCorrupted, OSError.
        """

    def may_have_snapshot(self) -> bool:
        """Return False if memory already shows that `snapshot` would find none; True otherwise."""

    def sendfile_reader(self) -> SendfileReader | None:
        """Return a reader of full frames as its files hold them; None if the log has no files."""

    def write_small(self, write: Callable[[], None]) -> None:
        """Write a small file beside the log, also on a full disk. For a thread. Raises what `write` does."""

    def used_share(self, offset: int) -> float:
        """Return the share of the log's bounds used from `offset` on: 1 is the full capacity."""

    def retention_share(self, offset: int) -> float:
        """Return how close the row at `offset` is to its removal; at 1, only a holder can keep it."""

    def age_s(self, offset: int) -> float | None:
        """Return the seconds since the row at an offset was appended.

        For a removed row, returns the age of the oldest stored one; 0 from `high_watermark` on;
        None where the age is not known at present.
        """

    def mark_time(self) -> None:
        """Note the time; called ten times per second. A log without stamps derives ages from these notes."""

    def hold(self, holder: str, needed: Callable[[], int], evict: Callable[[], None] | None = None) -> None:
        """Keep all rows from the offset on that `needed` returns.

        The log calls `needed` when capacity is short. If `evict` is given, the log calls `evict` and releases
        the holder rather than refuse an append.
        """

    def release(self, holder: str) -> None:
        """Remove a holder."""


if TYPE_CHECKING:
    from delta_prop_broker.log.durable import DurableLog
    from delta_prop_broker.log.memory import MemoryLog

    def _conform(memory: MemoryLog, durable: DurableLog) -> tuple[Log, Log]:
        return memory, durable
