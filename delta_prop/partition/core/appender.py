"""Last stage of the pipeline: appends sequenced batches to the log and moves all state with it.

If the log refuses, nothing has changed. Pure but for the log that it is given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, takewhile
from typing import TYPE_CHECKING

from delta_prop.calls.outcomes import PublishAck, RowAck
from delta_prop.partition.core.splitting import BatchPiece, slice_new_rows, split_batch, with_row
from delta_prop.partition.ingest.duplicate_id_finder import DuplicateIdFinder
from delta_prop.partition.ingest.origins import OWN, Origins, OriginState
from delta_prop.partition.ingest.refused_ids import RefusedIds
from delta_prop.partition.ingest.vector_heads import VectorHeads
from delta_prop.partition.order.clock import OriginClocks
from delta_prop.partition.state.pipeline_state import PipelineState, SavedOrigins, StateManifest
from delta_prop_wire.batch import Batch, LoggedBatch
from delta_prop_wire.bounds import clock_is_valid
from delta_prop_wire.control_rows import read_noop
from delta_prop_wire.delta import AckLevel, Dot, KnownIds, Source
from delta_prop_wire.encode import encode_noop
from delta_prop_wire.errors import InvalidDelta, Refused
from delta_prop_wire.spec import CLOCK_ENTRIES_MAX, ErrorCode
from delta_prop_wire.validate import may_be_in_run

if TYPE_CHECKING:
    from delta_prop.partition.core.coalesced_draft import CoalescedDraft
    from delta_prop.partition.ingest.seen_ids import SeenIds
    from delta_prop.partition.ingest.work import Draft, MatrixDraft, SequencedBatch
    from delta_prop.partition.listener import PartitionListener
    from delta_prop.platform.ports import Clock
    from delta_prop_broker.log.contract import Log
    from delta_prop_broker.retention.snapshot import OriginWatermark


@dataclass(slots=True)
class AppendCounters:
    """Counts of rows, updated by each append and read by `Propagator.statistics`."""

    accepted: int = 0
    duplicates: int = 0
    noops: int = 0


class Appender:
    """Owns the state that moves with the log: Lamport number, first offsets, ids, heads."""

    def __init__(
        self,
        log: Log,
        *,
        watermarks: dict[int, int],
        origins: Origins,
        vectors: VectorHeads,
        ids: SeenIds,
        clock: Clock,
        listener: PartitionListener,
    ) -> None:
        self.log = log
        self.lamport = 0
        self.counters = AppendCounters()
        self._watermarks = watermarks
        self._origins = origins
        self.vectors = vectors
        self.ids = ids
        self.refused_ids = RefusedIds()
        self._duplicate_id_finder = DuplicateIdFinder(log, ids)
        self._wall_us = clock.wall_us
        self._load_head = listener.load_head
        self._clocks = OriginClocks()
        self._hybrid_time = 0

    def append_sequenced(
        self, work: SequencedBatch, now: float
    ) -> tuple[Sequence[LoggedBatch], PublishAck | Refused]:
        """Append a batch, or a no-op instead of it; a batch with both known and new ids becomes pieces.

        Return what was logged, and the outcome to report. Raises Refused if its dots stay open.
        """
        batch, source = work.batch, work.sender.source
        if work.final_refusal is not None and _is_split_by_sender(work):
            raise work.final_refusal
        if work.final_refusal is not None or batch.is_control:
            return self._append_sequenced_noop(work, work.final_refusal, now)
        known = self._known_ids(batch) if work.sender.is_forwarder else KnownIds.NONE
        if not work.sender.is_forwarder:
            try:
                # the batch may have been fenced while it waited
                self._origins.require(batch, work.sender.owner)
                duplicates = self._duplicate_id_finder.find(batch.ids)
                if duplicates:  # before `vectors.check`: the heads have moved since the first copies
                    return self._append_with_duplicates(work, duplicates, now)
                self.vectors.check(batch, self._load_head)
            except Refused as refusal:
                if (
                    not refusal.is_final
                    or refusal.code is ErrorCode.UNAUTHORIZED
                    or _is_split_by_sender(work)
                ):
                    raise
                return self._append_sequenced_noop(work, refusal, now)
        try:
            logged = self._append(batch, work.lamport, source, known)
        except Refused as refusal:
            # Another service accepted a forwarded batch, so it never becomes a no-op here.
            if not refusal.is_final or work.sender.is_forwarder or _is_split_by_sender(work):
                raise
            return self._append_sequenced_noop(work, refusal, now)
        self._count_concurrent(batch)
        self._note_appended(logged, now)
        level = self.log.ack_level if work.sender.is_forwarder else self.granted_level(batch.ack_level)
        return (logged,), PublishAck(logged.offset, batch.dot(0), batch.count, level)

    def append_run(
        self, batches: Sequence[Batch], state: OriginState, source: Source, now: float
    ) -> list[LoggedBatch]:
        """Append consecutive batches of one origin that has said hello, faster than `append_sequenced`.

        Return those that were appended: none if the log lacks the capacity for all; otherwise those before
        the first batch that is refused, or that has more than common columns.
        """
        if not self.log.make_capacity_for(batches):
            return []
        origin, first_lamport = batches[0].origin, self.lamport + 1
        valid_count = self.vectors.append_run(
            [*takewhile(may_be_in_run, batches)],
            source,
            lambda other: self._clocks.seen_counter(origin, (), other),
        )
        if not valid_count:
            return []
        accepted = batches if valid_count == len(batches) else batches[:valid_count]
        logged_batches = self.log.append_run(accepted, lamport=first_lamport, source=source)
        first, last = logged_batches[0], logged_batches[-1]
        self.lamport = last.lamport + last.count - 1
        self._origins.note_appended_run(state, accepted, first.offset, now)
        self._clocks.note_appended(origin, ())
        self.counters.accepted += last.next_offset - first.offset
        return logged_batches

    def append_coalesced(self, draft: CoalescedDraft, origin: int, now: float) -> LoggedBatch:
        """Append a draft that names no ids and no parents, so that it holds no duplicates.

        Raises Refused; then nothing has changed.
        """
        clock = self._find_clock_changes(draft, origin)
        batch = draft.encode(
            origin=origin,
            base=self._watermarks.get(origin, 0) + 1,
            clock=clock,
            hybrid_time=self._next_hybrid_time(),
        )
        appended = self.append_run([batch], self._require_state(batch), Source.LOCAL, now)
        if appended:
            return appended[0]
        self.vectors.check(batch, self._load_head)
        logged = self._append(batch, None, Source.LOCAL)
        self._note_appended(logged, now)
        return logged

    def granted_level(self, level: AckLevel) -> AckLevel:
        """Return the ack level that an acknowledgement may state: the requested one, bounded by the log's."""
        return min(level, self.log.ack_level)

    def append_draft(
        self, draft: Draft | MatrixDraft, origin: int, now: float
    ) -> tuple[LoggedBatch | None, PublishAck]:
        """Assign a draft its dots and append it; the returned batch is None if all rows were accepted before.

        Raises Refused; then the draft has no dots, and nothing has changed.
        """
        duplicates: dict[int, int | None] = {}
        if known_rows := self._duplicate_id_finder.find(draft.ids):
            encoded = draft.encode(None, origin=origin, base=1, clock=(), hybrid_time=0)
            duplicates = self._duplicate_id_finder.check(encoded, known_rows, draft.source)
        rows = None if not duplicates else [row for row in range(draft.count) if row not in duplicates]
        if rows == []:
            self.counters.duplicates += draft.count
            first_offsets = _duplicate_offsets(duplicates, None)
            return None, PublishAck(
                None,
                self._duplicate_id_finder.last_copy,
                draft.count,
                self.granted_level(draft.ack_level),
                first_offsets,
            )
        batch = draft.encode(
            rows,
            origin=origin,
            base=self._watermarks.get(origin, 0) + 1,
            clock=self._find_clock_changes(draft, origin),
            hybrid_time=self._next_hybrid_time(),
        )
        try:
            self.vectors.check(batch, self._load_head)
        except Refused as refusal:
            raise (refusal if rows is None else with_row(refusal, rows)) from None
        logged = self._append(batch, None, draft.source)
        self._note_appended(logged, now)
        self.counters.duplicates += len(duplicates)
        duplicate_offsets = _duplicate_offsets(duplicates, rows, logged.offset)
        return logged, PublishAck(
            logged.offset, batch.dot(0), draft.count, self.granted_level(draft.ack_level), duplicate_offsets
        )

    # --- from the log, and from checkpoints

    def restore(self, logged: LoggedBatch, now: float, *, is_known: bool = False) -> None:
        """Replay into the state a batch that the log already holds.

        `is_known`: the origin's saved state is newer than the checkpoint's offset and includes the batch.
        """
        batch = logged.batch
        self.lamport = max(self.lamport, logged.lamport + batch.count - 1)
        self.vectors.note_appended(batch, logged.source)
        # A replica's no-op records a refusal of another service's log: here it only fills the dots.
        refused = read_noop(batch) if batch.is_control and logged.source is not Source.REPLICA else None
        if batch.ids is not None and refused is not None:
            self.refused_ids.add(batch.ids, refused.code)
        self._note_ids(logged)
        if is_known:
            return
        state = self._origins.restore(batch.origin, batch.epoch, now)
        self._origins.note_appended(
            state, batch, logged.offset, now, None if refused is None else refused.first_offsets
        )
        self._clocks.note_appended(batch.origin, batch.clock)
        if refused is not None:
            if refused.crc is not None:
                state.note_checksum(batch.base, batch.last, refused.crc)
            if refused.first_offsets is None:
                state.note_noop(batch, refused.code)

    def skip(self, logged: LoggedBatch) -> None:
        """Advance only the Lamport number, for a batch of rows that this version does not know."""
        self.lamport = max(self.lamport, logged.lamport + logged.count - 1)

    def note_time(self, wall_us: int) -> None:
        """Note the wall time (µs since 1970) of the last append; hybrid times continue after it."""
        self._hybrid_time = max(self._hybrid_time, wall_us // 1000 << 16)

    def save_manifest(self) -> StateManifest:
        """Return the manifest of a checkpoint; the caller adds the file names."""
        statistics = self.ids.kept_since, self.ids.forgotten
        refused = self.refused_ids.save()
        return StateManifest(self.lamport, self._hybrid_time, *statistics, self.vectors.save(), refused)

    def save_origin(
        self, origin: int, idle: Mapping[int, tuple[str, int]], saved: SavedOrigins, *, full: bool
    ) -> None:
        """Add the current state of one origin; without `full`, only if it changed since it was last saved."""
        state, watermark = self._origins.get(origin), self._watermarks.get(origin, 0)
        if state is None:
            _, epoch = idle.get(origin, ("", 0))
            saved.add_idle(origin, watermark, epoch)
        elif (full or state.is_changed) and (watermark or state.owner != OWN):
            saved.add(origin, watermark, state, self._clocks.clock(origin), full=full)

    def restore_checkpoint(self, state: PipelineState, now: float) -> None:
        """Start from the state of a checkpoint; `restore` then replays the rest of the log."""
        manifest = state.manifest
        self.lamport = max(self.lamport, manifest.lamport)
        self._hybrid_time = max(self._hybrid_time, manifest.hybrid_time)
        self._watermarks.update(state.watermarks)
        self._origins.restore_states(state.restore_states(now), state.idle)
        self._clocks.restore_clocks(state.clocks)
        self.vectors.restore(manifest.vectors, state.heads)
        self.refused_ids.restore(manifest.refused)
        self.ids.restore(state.runs, kept_since=manifest.kept_since, forgotten=manifest.forgotten)
        for ids, offsets in state.ids:
            self.ids.add_at(ids, offsets)

    def restore_snapshot(self, watermarks: Mapping[int, OriginWatermark], lamport: int, now: float) -> None:
        """Start from a snapshot's origin watermarks; the outcome of each earlier dot is unknown."""
        self.lamport = max(self.lamport, lamport)
        for origin, watermark in watermarks.items():
            state = self._origins.restore(origin, watermark.epoch, now)
            state.known_above = max(state.known_above, watermark.counter)
            self._watermarks[origin] = max(self._watermarks.get(origin, 0), watermark.counter)
            self._clocks.note_appended(origin, watermark.clock)

    def append_noop(self, gap: Batch, now: float) -> LoggedBatch:
        """Append a control row that stands for dots that were lost. Raises Refused."""
        logged = self._append(gap, None, Source.LOCAL)
        self._note_appended(logged, now)
        self._require_state(gap).note_noop(gap, ErrorCode.DOT_REUSED)
        self.counters.noops += 1
        return logged

    def first_missing(self, watermarks: Mapping[int, int]) -> int | None:
        """Return the offset of the first delta that a log with these watermarks lacks.

        Returns None if it lacks none, as far as first offsets are remembered.
        """
        first: int | None = None
        for origin, watermark in self._watermarks.items():
            known = watermarks.get(origin, 0)
            state = self._origins.get(origin) if watermark > known else None
            offset = None if state is None else state.first_offset_above(known)
            if offset is not None:
                first = offset if first is None else min(first, offset)
        return first

    def continue_from(self, previous: Appender) -> None:
        """Continue the counters, Lamport numbers and hybrid times of the appender before the log failed."""
        self.counters = previous.counters
        self.vectors.concurrent_updates = previous.vectors.concurrent_updates
        self.refused_ids.merge_older(previous.refused_ids)
        self.lamport = max(self.lamport, previous.lamport)
        self._hybrid_time = max(self._hybrid_time, previous._hybrid_time)

    # --- appending

    def _append(
        self, batch: Batch, lamport: int | None, source: Source, known_ids: KnownIds = KnownIds.NONE
    ) -> LoggedBatch:
        first_lamport = self.lamport + 1 if lamport is None else lamport
        return self.log.append(batch, lamport=first_lamport, source=source, known_ids=known_ids)

    def _note_appended(
        self, logged: LoggedBatch, now: float, first_offsets: Mapping[int, int | None] | None = None
    ) -> None:
        batch = logged.batch
        self.lamport = max(self.lamport, logged.lamport + batch.count - 1)
        state = self._require_state(batch)
        self._origins.note_appended(state, batch, logged.offset, now, first_offsets)
        self._clocks.note_appended(batch.origin, () if batch.homogeneous else batch.clock)
        self.vectors.note_appended(batch, logged.source)
        self._note_ids(logged)
        self.counters.accepted += 0 if batch.is_control else batch.count

    def _note_ids(self, logged: LoggedBatch) -> None:
        batch = logged.batch
        if not batch.homogeneous and not batch.is_control and batch.ids is not None:
            self.ids.add(batch.ids, logged.offset)
            self.ids.forget_below(self.log.start_offset)
            self.refused_ids.discard(batch.ids)

    def _require_state(self, batch: Batch) -> OriginState:
        state = self._origins.get(batch.origin)
        assert state is not None, "a batch is appended only after its origin's hello"
        return state

    def _append_sequenced_noop(
        self,
        work: SequencedBatch,
        refusal: Refused | None,
        now: float,
        first_offsets: Mapping[int, int | None] | None = None,
    ) -> tuple[Sequence[LoggedBatch], PublishAck | Refused]:
        """Append the no-op of a refused batch; with `refusal` None append the batch, which is a no-op itself.

        `first_offsets`: the first copies of the rows, if the batch was refused since all its ids are known.
        """
        batch = work.batch
        noop = batch
        if refusal is not None:
            counters = batch.counters
            noop = encode_noop(
                origin=batch.origin,
                base=batch.base,
                count=batch.count,
                code=refusal.code,
                epoch=batch.epoch,
                clock=noop_clock(batch, refusal),
                previous=batch.previous,
                counters=None if counters is None else counters.tolist(),
                priority=batch.priority,
                hybrid_time=batch.hybrid_time,
                refused_crc=batch.crc,
                first_offsets=None
                if first_offsets is None
                else [first_offsets[row] for row in range(batch.count)],
                ids=batch.ids
                if first_offsets is None and refusal.code is not ErrorCode.UNAUTHORIZED
                else None,
            )
        logged = self._append(noop, work.lamport, work.sender.source)
        self._note_appended(logged, now, first_offsets)
        state = self._require_state(batch)
        # A duplicate carries the refused bytes, so it is compared with their checksum.
        state.note_checksum(batch.base, batch.last, batch.crc)
        if refusal is not None and first_offsets is None:
            state.note_noop(batch, refusal.code)
        self.counters.noops += batch.count
        ack = PublishAck(logged.offset, batch.dot(0), batch.count, self.granted_level(batch.ack_level))
        return (logged,), ack if refusal is None else refusal

    # --- ids

    def _known_ids(self, batch: Batch) -> KnownIds:
        """Classify the ids of a forwarded batch as none, some or all known; a fold looks up known ids."""
        duplicates = self._duplicate_id_finder.find(batch.ids)
        if not duplicates:
            return KnownIds.NONE
        return KnownIds.ALL if len(duplicates) == batch.count else KnownIds.SOME

    def _append_with_duplicates(
        self, work: SequencedBatch, known_rows: dict[int, int], now: float
    ) -> tuple[Sequence[LoggedBatch], PublishAck | Refused]:
        """Append a batch of which some or all ids were accepted before. Raises Refused."""
        batch = work.batch
        duplicate_rows = self._duplicate_id_finder.check(batch, known_rows, work.sender.source)
        if len(duplicate_rows) == batch.count:
            return self._append_only_duplicates(work, duplicate_rows, now)
        new, rows = slice_new_rows(batch, duplicate_rows)
        try:
            self.vectors.check(new, self._load_head)
        except Refused as refusal:
            raise with_row(refusal, rows) from None
        return self._append_pieces(work, split_batch(batch, duplicate_rows, self.log.next_offset), now)

    def _append_only_duplicates(
        self, work: SequencedBatch, first_offsets: dict[int, int | None], now: float
    ) -> tuple[Sequence[LoggedBatch], PublishAck]:
        refusal = InvalidDelta("id", "was accepted before")
        logged, _ = self._append_sequenced_noop(work, refusal, now, first_offsets)
        self.counters.duplicates += work.count
        first_offset = first_offsets.get(0)
        return logged, PublishAck(
            first_offset,
            work.batch.dot(0),
            work.count,
            self.granted_level(work.batch.ack_level),
            first_offsets,
        )

    def _append_pieces(
        self, work: SequencedBatch, pieces: Sequence[BatchPiece], now: float
    ) -> tuple[Sequence[LoggedBatch], PublishAck]:
        """Append all pieces of a batch. Raises Refused if the capacity does not suffice for all of them."""
        batch, level = work.batch, self.granted_level(work.batch.ack_level)
        refusal = self.log.refusal(*[piece.batch for piece in pieces])
        if refusal is not None:
            raise refusal
        logged_batches = self.log.append_run(
            [piece.batch for piece in pieces], lamport=self.lamport + 1, source=work.sender.source
        )
        rows: list[RowAck] = []
        for logged, (piece, first_offsets) in zip(logged_batches, pieces, strict=True):
            if first_offsets is None:
                self._count_concurrent(piece)
                rows += [
                    RowAck(logged.offset + row, piece.dot(row), duplicate=False) for row in range(piece.count)
                ]
            else:
                rows += [RowAck(offset, None, duplicate=True) for offset in first_offsets.values()]
                self.counters.duplicates += piece.count
                self.counters.noops += piece.count
            self._note_appended(logged, now, first_offsets)
        # A duplicate carries the full frame, so it is compared with the checksum of all pieces.
        self._require_state(batch).note_checksum(batch.base, batch.last, batch.crc)
        return logged_batches, PublishAck.of_rows(rows, level)

    # --- clocks

    def _find_clock_changes(self, draft: Draft | MatrixDraft | CoalescedDraft, origin: int) -> list[Dot]:
        """Return the clock entries to write: those of the draft's clock, and the heads of its vectors, that
        its origin has not written yet.
        """
        writers = self.vectors.writer_count
        if not draft.clock and (writers == 0 or (writers == 1 and self._watermarks.get(origin, 0))):
            return []
        heads = (head for _, head in self.vectors.other_heads(origin, iter(draft.vectors())))
        changed: dict[int, int] = {}
        for dot in chain(heads, draft.clock):
            if dot.counter > changed.get(dot.origin, 0) and not self._clocks.has_seen(origin, (), dot):
                changed[dot.origin] = dot.counter
        return [Dot(*entry) for entry in changed.items()]

    def _count_concurrent(self, batch: Batch) -> None:
        """Count the rows whose vector was changed by an update that this batch had not seen."""
        clock = () if batch.homogeneous else batch.clock
        self.vectors.count_concurrent(
            batch, lambda other: self._clocks.seen_counter(batch.origin, clock, other)
        )

    def _next_hybrid_time(self) -> int:
        """Return the next hybrid time: 48 bits of ms, 16 logical; it rises whatever the wall clock does."""
        self._hybrid_time = max(self._hybrid_time + 1, self._wall_us() // 1000 << 16)
        return self._hybrid_time


def noop_clock(batch: Batch, refusal: Refused) -> tuple[Dot, ...]:
    """Return the clock of a refused batch for its no-op: the full clock, or none if the clock is at fault.

    A clock is at fault if it breaks the format's bounds, or the server's own bound that it was refused for.
    """
    if refusal.field == "clock":
        return ()
    is_short = batch.clock_entry_count <= CLOCK_ENTRIES_MAX  # a longer clock is not even decoded
    return batch.clock if is_short and clock_is_valid(batch.clock) else ()


def _is_split_by_sender(work: SequencedBatch) -> bool:
    """True if the sender itself finds out which rows of the batch are at fault."""
    return work.sender.can_split and work.batch.count > 1 and not work.batch.is_control


def _duplicate_offsets(
    duplicates: dict[int, int | None], rows: list[int] | None, base: int = 0
) -> dict[int, int | None]:
    """Return the offset of each duplicate row's first copy.

    `duplicates`: as `DuplicateIdFinder.check` returns them, so a negative number names a row of the batch.
    `rows`: the rows that were appended from offset `base` on.
    """
    offset_of_row = {} if rows is None else {row: base + index for index, row in enumerate(rows)}
    return {
        row: copy if copy is None or copy >= 0 else offset_of_row.get(-1 - copy, duplicates.get(-1 - copy))
        for row, copy in duplicates.items()
    }
