"""What a log promises to the pipeline.

A log numbers what it is given and gives it back; it never orders, deduplicates or routes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from delta_prop_wire.delta import KnownIds

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from delta_prop_wire.batch import Batch, LoggedBatch
    from delta_prop_wire.delta import AckLevel, Source
    from delta_prop_wire.errors import Refused


class Log(Protocol):
    """One partition's deltas, in the one order that all sinks of a service see.

    A returned `append` promises a place: offsets are never given twice, and no later failure takes
    the place away without the log's epoch growing. Readers may read up to `visible`.
    """

    @property
    def log_id(self) -> bytes:
        """16 bytes drawn when the log was created."""

    @property
    def epoch(self) -> int:
        """Grows at each recovery that may have lost a tail."""

    def epoch_end(self, epoch: int) -> int | None:
        """Where a past epoch ended (exclusive); None where it is the present one, or not known."""

    @property
    def level(self) -> AckLevel:
        """The highest level that an acknowledgement from this log can promise."""

    @property
    def accepting(self) -> bool:
        """False while the log wants no more for now: deltas wait in the queue before the chain."""

    @property
    def first_offset(self) -> int:
        """The oldest offset still held."""

    @property
    def next_offset(self) -> int:
        """The offset that the next appended row gets."""

    @property
    def visible(self) -> int:
        """The mark up to which (exclusive) sinks and subscribers may read."""

    def reached(self, level: AckLevel) -> int:
        """The mark up to which (exclusive) rows are kept as safely as this level says."""

    def want_sync(self) -> None:
        """Somebody waits for level `durable`, maybe of rows that nobody had asked that for."""

    def refusal(self, *batches: Batch) -> Exception | None:
        """Why an append of these batches, one behind the other, would be refused now; None if all fit."""

    def full(self, count: int, size: int) -> Exception | None:
        """Why a batch of about so many deltas and bytes would find no room now, None if it would.

        Says nothing of one that is larger than the whole log: that never gets room.
        """

    def shortage(self) -> Refused | None:
        """The reason why nothing can be appended for want of room; None while there is room, as far as is
        known. What was refused last for that is asked for again: nobody else gives way for a question.
        """

    def look_at_room(self) -> None:
        """Find out what room there is, where others may have taken it since it was looked at last."""

    def append(
        self, batch: Batch, *, lamport: int, source: Source, known_ids: KnownIds = KnownIds.NONE
    ) -> LoggedBatch:
        """Give the batch its place. Raises Refused (LOG_FULL, LEVEL_UNAVAILABLE) and changes nothing.

        `known_ids`: whether ids of it stand in the log already, for those who read it.
        """

    def fits(self, batches: Sequence[Batch]) -> bool:
        """Whether `append_run` would take these now, all of them; makes room where that is possible."""

    def append_run(self, batches: Sequence[Batch], *, lamport: int, source: Source) -> list[LoggedBatch]:
        """`append` for each of them, one behind the other. They fit: that was asked in the same turn.

        `lamport`: of the first row of the first one; the others count on from there.
        """

    def read(self, offset: int, *, rows_max: int, bytes_max: int) -> list[LoggedBatch]:
        """Batches from the one that holds `offset` on, at least one unless `offset` is at `visible`.

        Raises Refused (CURSOR_TOO_OLD) below `first_offset`.
        """

    def read_appended(self, offset: int, *, rows_max: int, bytes_max: int) -> list[LoggedBatch]:
        """`read` up to `next_offset`: also what is not visible yet, to compare a repeat with its first copy.

        Raises Refused (CURSOR_TOO_OLD) below `first_offset`.
        """

    def find(self, origin: int, counter: int) -> int | None:
        """The offset of a dot, of one not yet visible too; None where it is not, or no longer, here."""

    def fill(self, offset: int) -> float:
        """The share of the log's bounds that everything from `offset` on takes: 1 is all there is."""

    def kept_share(self, offset: int) -> float:
        """How near what lies at `offset` is to going: at 1 it may, unless somebody needs it."""

    def age_s(self, offset: int) -> float | None:
        """Return how long ago the row at an offset was appended, in seconds, or the oldest still held where
        it is gone; 0 from `visible` on; None where that cannot be told at present.
        """

    def mark_time(self) -> None:
        """Note what time it is, ten times a second: a log that stamps nothing tells ages by that."""

    def hold(
        self, holder: str, needed: Callable[[], int], give_way: Callable[[], None] | None = None
    ) -> None:
        """Keep everything from the offset that `needed` gives on, asked when room is short.

        A holder with `give_way` is let go, and told so, rather than an append refused.
        """

    def release(self, holder: str) -> None:
        """Forget what a holder needed."""


if TYPE_CHECKING:
    from delta_prop_broker.log.durable import DurableLog
    from delta_prop_broker.log.memory import MemoryLog

    def _conform(memory: MemoryLog, durable: DurableLog) -> tuple[Log, Log]:
        return memory, durable
