"""The last step of the chain: what is in order gets its place in the log, and all state moves at once.

If the log refuses, nothing has changed. Pure but for the log it is handed.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, groupby, takewhile
from operator import attrgetter
from typing import TYPE_CHECKING

from delta_prop.chain_state import Small
from delta_prop.entries import clock_of_refused
from delta_prop.id_repeats import IdRepeats
from delta_prop.ingest.origins import OWN
from delta_prop.ingest.refused_ids import RefusedIds
from delta_prop.order.clock import OriginClocks
from delta_prop.published import Published, RowPlace
from delta_prop.splitting import new_rows, of_row, split
from delta_prop_wire.control_rows import read_void
from delta_prop_wire.delta import AckLevel, Dot, KnownIds, Source
from delta_prop_wire.encode import encode_void
from delta_prop_wire.errors import InvalidDelta, Refused
from delta_prop_wire.spec import ErrorCode
from delta_prop_wire.validate import plain_is_sound, simple_is_sound

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from delta_prop.chain_state import ChainState, SavedOrigins
    from delta_prop.ingest.origins import Origins, OriginState
    from delta_prop.ingest.seen_ids import SeenIds
    from delta_prop.ingest.vectors import Vectors
    from delta_prop.ingest.work import Draft, MatrixDraft, Sequenced
    from delta_prop.merged import Joined, Merged
    from delta_prop.splitting import Piece
    from delta_prop_broker.log.contract import Log
    from delta_prop_broker.log.files.snapshot import OriginMark
    from delta_prop_wire.batch import Batch, LoggedBatch
    from delta_prop_wire.delta import Head

_NAMESPACE_AND_KIND = attrgetter("namespace", "kind")


@dataclass(slots=True)
class AppendCounters:
    """Plain integers, read when somebody asks."""

    accepted: int = 0
    duplicates: int = 0
    voided: int = 0


class Appender:
    """Owns what moves with the log: Lamport number, first offsets, ids, heads; shares the watermarks."""

    def __init__(
        self,
        log: Log,
        *,
        watermarks: dict[int, int],
        origins: Origins,
        vectors: Vectors,
        ids: SeenIds,
        wall_us: Callable[[], int],
        load_head: Callable[[str, str], Head | None],
    ) -> None:
        self.log = log
        self.lamport = 0
        self.counters = AppendCounters()
        self._watermarks = watermarks
        self._origins = origins
        self.vectors = vectors
        self.ids = ids
        self.refused_ids = RefusedIds()
        self._repeats = IdRepeats(log, ids)
        self._wall_us = wall_us
        self._load_head = load_head
        self._clocks = OriginClocks()
        self._hybrid_time = 0

    def sequenced(self, work: Sequenced, now: float) -> tuple[Sequence[LoggedBatch], Published | Refused]:
        """Append a batch, or the void that takes its place; in pieces where it mixes known and new ids.

        Raises Refused if its dots stay open.
        """
        batch, source = work.batch, work.session.source
        if work.void is not None and _is_split(work):
            raise work.void
        if work.void is not None or batch.is_control:
            return self._sequenced_void(work, work.void, now)
        known = self._known_ids(batch) if work.session.forwards else KnownIds.NONE
        if not work.session.forwards:
            try:
                self._origins.require(batch, work.session.owner)  # it may have been fenced while it waited
                repeats = self._repeats.find(batch.ids)
                if repeats:  # before its vector is looked at: that has moved on
                    return self._with_repeats(work, repeats, now)
                self.vectors.check(batch, self._load_head)
            except Refused as refusal:
                if not refusal.voids or refusal.code is ErrorCode.UNAUTHORIZED or _is_split(work):
                    raise
                return self._sequenced_void(work, refusal, now)
        try:
            logged = self._append(batch, work.lamport, source, known)
        except Refused as refusal:
            if (
                not refusal.voids or work.session.forwards or _is_split(work)
            ):  # another service accepted it: never void here
                raise
            return self._sequenced_void(work, refusal, now)
        self._count_conflicts(batch)
        self._commit(logged, now)
        level = self.log.level if work.session.forwards else self.kept_as(batch.ack_level)
        return (logged,), Published(logged.offset, batch.dot(0), batch.count, level)

    def run(
        self, batches: Sequence[Batch], state: OriginState, source: Source, now: float
    ) -> list[LoggedBatch]:
        """`sequenced` for simple batches of a live origin, whose counters go on: the short way.

        Up to the first whose rows have to be looked at, or that finds no room; the rest has not happened.
        """
        if not self.log.fits(batches):
            return []
        sound, first = 0, self.lamport + 1
        for alike in _alike(batches):
            noted = self._note_alike(alike, source) if alike[0].plain else 0
            if noted < len(alike):
                noted += self._note_singly(alike[noted:], source)
            sound += noted
            if noted < len(alike):
                break
        if not sound:
            return []
        taken = batches if sound == len(batches) else batches[:sound]
        self.lamport += sum([batch.count for batch in taken])
        placed = self.log.append_run(taken, lamport=first, source=source)
        self._origins.appended_run(state, taken, placed[0].offset, now)
        self._clocks.appended(batches[0].origin, ())
        self.counters.accepted += self.lamport + 1 - first
        return placed

    def _note_alike(self, batches: Sequence[Batch], source: Source) -> int:
        """Move heads and count conflicts of plain batches in one go: of all, or of none."""
        seen = self._seen_by(batches[0].origin)
        whole = all(map(plain_is_sound, batches)) and self.vectors.append_alike(batches, source, seen)
        return len(batches) if whole else 0

    def _seen_by(self, origin: int) -> Callable[[int], int]:
        """Up to which counter of another a batch of this origin has seen, where it tells of no more."""
        return lambda other: self._clocks.seen(origin, (), other)

    def _note_singly(self, batches: Sequence[Batch], source: Source) -> int:
        """Move heads and count conflicts for one after the other, up to the first that may not; how many."""
        sound, done = [*takewhile(simple_is_sound, batches)], 0
        while done < len(sound):
            if not sound[done].plain:
                done += self.vectors.append_mixed(sound[done:], self._seen_by(batches[0].origin))
                if done == len(sound):
                    break
            batch = sound[done]
            try:
                self.vectors.check(batch, self._load_head)
            except Refused:
                break
            self._count_conflicts(batch)
            self.vectors.appended(batch, source)
            done += 1
        return done

    def kept_as(self, level: AckLevel) -> AckLevel:
        """What an acknowledgement may say: what was asked, as far as this log can promise it."""
        return min(level, self.log.level)

    def draft(
        self, draft: Draft | MatrixDraft, origin: int, now: float
    ) -> tuple[LoggedBatch | None, Published]:
        """Give a draft its dots and its place; None where all its rows were accepted before.

        Raises Refused; the draft has no dots then, and nothing has changed.
        """
        repeats: dict[int, int | None] = {}
        if found := self._repeats.find(draft.ids):
            same = draft.encode(None, origin=origin, base=1, clock=(), hybrid_time=0)
            repeats = self._repeats.check(same, found, draft.source)
        rows = None if not repeats else [row for row in range(draft.count) if row not in repeats]
        if rows == []:
            self.counters.duplicates += draft.count
            copies = _offsets(repeats, None)
            return None, Published(
                None, self._repeats.last_copy, draft.count, self.kept_as(draft.ack_level), copies
            )
        batch = draft.encode(
            rows,
            origin=origin,
            base=self._watermarks.get(origin, 0) + 1,
            clock=self._changed_clock(draft, origin),
            hybrid_time=self._next_hybrid_time(),
        )
        try:
            self.vectors.check(batch, self._load_head)
        except Refused as refusal:
            raise (refusal if rows is None else of_row(refusal, rows)) from None
        logged = self._append(batch, None, draft.source)
        self._commit(logged, now)
        self.counters.duplicates += len(repeats)
        duplicates = _offsets(repeats, rows, logged.offset)
        return logged, Published(
            logged.offset, batch.dot(0), draft.count, self.kept_as(draft.ack_level), duplicates
        )

    def merged(self, draft: Merged | Joined, origin: int, now: float) -> LoggedBatch | None:
        """`draft` for what names no ids and no parents, so that nothing of it can be a repeat: the short way.

        None where its numbers are not sound. Raises Refused; in either case nothing has changed.
        """
        vectors, clock, before = self.vectors, self._changed_clock(draft, origin), self._hybrid_time
        batch = draft.encode(
            origin=origin,
            base=self._watermarks.get(origin, 0) + 1,
            clock=clock,
            hybrid_time=self._next_hybrid_time(),
        )
        if not draft.is_sound(batch):
            self._hybrid_time = before
            return None
        vectors.check(batch, self._load_head)
        logged = self.log.append(batch, lamport=self.lamport + 1, source=Source.LOCAL)
        self.lamport += batch.count
        self.counters.accepted += batch.count
        self._origins.appended(self._state(batch), batch, logged.offset, now)
        self._clocks.appended(origin, clock)
        vectors.appended(batch, Source.LOCAL)
        return logged

    # --- from the log, and from checkpoints

    def restore(self, logged: LoggedBatch, now: float, *, known: bool = False) -> None:
        """Move what moves with the log, for a batch that was in it already.

        `known`: its origin has come further, since that was saved a little later than the rest.
        """
        batch = logged.batch
        self.lamport = max(self.lamport, logged.lamport + batch.count - 1)
        self.vectors.appended(batch, logged.source)
        # What another service refused it also told, of its own log: here these dots are done with, no more.
        refused = read_void(batch) if batch.is_control and logged.source is not Source.REPLICA else None
        if batch.ids is not None and refused is not None:
            self.refused_ids.add(batch.ids, refused.code)
        self._note_ids(logged)
        if known:
            return
        state = self._origins.restore(batch.origin, batch.epoch, now)
        self._origins.appended(state, batch, logged.offset, now, None if refused is None else refused.firsts)
        self._clocks.appended(batch.origin, batch.clock)
        if refused is not None:
            if refused.crc is not None:
                state.remember(batch.base, batch.last, refused.crc)
            if refused.firsts is None:
                state.note_void(batch, refused.code)

    def pass_over(self, logged: LoggedBatch) -> None:
        """Move only the Lamport number, for a batch of rows that this version does not act on."""
        self.lamport = max(self.lamport, logged.lamport + logged.count - 1)

    def note_time(self, wall_us: int) -> None:
        """What was appended last was appended then (us since 1970): hybrid time goes on above that."""
        self._hybrid_time = max(self._hybrid_time, wall_us // 1000 << 16)

    def save_small(self) -> Small:
        """What is small of the state, without the names of parts."""
        statistics = self.ids.kept_since, self.ids.forgotten
        refused = self.refused_ids.save()
        return Small(self.lamport, self._hybrid_time, *statistics, self.vectors.saved(), refused)

    def save_origin(
        self, origin: int, idle: Mapping[int, tuple[str, int]], into: SavedOrigins, *, whole: bool
    ) -> None:
        """Add one origin as it is now; without `whole` only if it changed since it was saved."""
        state, watermark = self._origins.get(origin), self._watermarks.get(origin, 0)
        if state is None:
            _, epoch = idle.get(origin, ("", 0))
            into.add_idle(origin, watermark, epoch)
        elif (whole or state.changed) and (watermark or state.owner != OWN):
            into.add(origin, watermark, state, self._clocks.clock(origin), whole=whole)

    def take_back(self, state: ChainState, now: float) -> None:
        """Begin with what a checkpoint holds; the rest of the log follows by `restore`."""
        small = state.small
        self.lamport = max(self.lamport, small.lamport)
        self._hybrid_time = max(self._hybrid_time, small.hybrid_time)
        self._watermarks.update(state.watermarks)
        self._origins.take_back(state.states(now), state.idle)
        self._clocks.take_back(state.clocks)
        self.vectors.restore(small.vectors, state.heads)
        self.refused_ids.restore(small.refused)
        self.ids.restore(state.runs, kept_since=small.kept_since, forgotten=small.forgotten)
        for ids, offsets in state.ids:
            self.ids.add_at(ids, offsets)

    def take_past(self, marks: Mapping[int, OriginMark], lamport: int, now: float) -> None:
        """Begin with what a snapshot tells of the origins; what became of each of their dots is not known."""
        self.lamport = max(self.lamport, lamport)
        for origin, mark in marks.items():
            state = self._origins.restore(origin, mark.epoch, now)
            state.known_above = max(state.known_above, mark.counter)
            self._watermarks[origin] = max(self._watermarks.get(origin, 0), mark.counter)
            self._clocks.appended(origin, mark.clock)

    def filled(self, gap: Batch, now: float) -> LoggedBatch:
        """Append a control row that stands for dots which are gone. Raises Refused."""
        logged = self._append(gap, None, Source.LOCAL)
        self._commit(logged, now)
        self._state(gap).note_void(gap, ErrorCode.DOT_REUSED)
        self.counters.voided += 1
        return logged

    def first_missing(self, watermarks: Mapping[int, int]) -> int | None:
        """Where the first delta stands that a log lacks which has each origin's up to this counter.

        None where it lacks none, as far as first offsets are remembered.
        """
        found: int | None = None
        for origin, have in self._watermarks.items():
            known = watermarks.get(origin, 0)
            state = self._origins.get(origin) if have > known else None
            offset = None if state is None else state.first_offset_above(known)
            if offset is not None:
                found = offset if found is None else min(found, offset)
        return found

    def go_on_from(self, before: Appender) -> None:
        """Count on, and number above, what this service gave before its log failed."""
        self.counters = before.counters
        self.vectors.conflicts = before.vectors.conflicts
        self.refused_ids.take_over(before.refused_ids)
        self.lamport = max(self.lamport, before.lamport)
        self._hybrid_time = max(self._hybrid_time, before._hybrid_time)

    # --- appending

    def _append(
        self, batch: Batch, lamport: int | None, source: Source, known_ids: KnownIds = KnownIds.NONE
    ) -> LoggedBatch:
        number = self.lamport + 1 if lamport is None else lamport
        return self.log.append(batch, lamport=number, source=source, known_ids=known_ids)

    def _commit(
        self, logged: LoggedBatch, now: float, firsts: Mapping[int, int | None] | None = None
    ) -> None:
        batch = logged.batch
        self.lamport = max(self.lamport, logged.lamport + batch.count - 1)
        state = self._state(batch)
        self._origins.appended(state, batch, logged.offset, now, firsts)
        self._clocks.appended(batch.origin, () if batch.plain else batch.clock)
        self.vectors.appended(batch, logged.source)
        self._note_ids(logged)
        self.counters.accepted += 0 if batch.is_control else batch.count

    def _note_ids(self, logged: LoggedBatch) -> None:
        batch = logged.batch
        if not batch.plain and not batch.is_control and batch.ids is not None:
            self.ids.add(batch.ids, logged.offset)
            self.ids.forget_below(self.log.first_offset)
            self.refused_ids.discard(batch.ids)

    def _state(self, batch: Batch) -> OriginState:
        state = self._origins.get(batch.origin)
        assert state is not None, "a batch is appended only for an origin that said hello"
        return state

    def _sequenced_void(
        self,
        work: Sequenced,
        refusal: Refused | None,
        now: float,
        firsts: Mapping[int, int | None] | None = None,
    ) -> tuple[Sequence[LoggedBatch], Published | Refused]:
        batch = work.batch
        body = batch
        if refusal is not None:
            counters = batch.counters
            body = encode_void(
                origin=batch.origin,
                base=batch.base,
                count=batch.count,
                code=refusal.code,
                epoch=batch.epoch,
                clock=clock_of_refused(batch, refusal),
                previous=batch.previous,
                counters=None if counters is None else counters.tolist(),
                priority=batch.priority,
                hybrid_time=batch.hybrid_time,
                refused_crc=batch.crc,
                firsts=None if firsts is None else [firsts[row] for row in range(batch.count)],
                ids=batch.ids if firsts is None and refusal.code is not ErrorCode.UNAUTHORIZED else None,
            )
        logged = self._append(body, work.lamport, work.session.source)
        self._commit(logged, now, firsts)
        state = self._state(batch)
        state.remember(
            batch.base, batch.last, batch.crc
        )  # a repeat sends the refused bytes, so it is compared with those
        if refusal is not None and firsts is None:
            state.note_void(batch, refusal.code)
        self.counters.voided += batch.count
        published = Published(logged.offset, batch.dot(0), batch.count, self.kept_as(batch.ack_level))
        return (logged,), published if refusal is None else refusal

    # --- ids

    def _known_ids(self, batch: Batch) -> KnownIds:
        """Whether ids of a forwarded batch were accepted here before: who folds it has to look then."""
        repeats = self._repeats.find(batch.ids)
        if not repeats:
            return KnownIds.NONE
        return KnownIds.ALL if len(repeats) == batch.count else KnownIds.SOME

    def _with_repeats(
        self, work: Sequenced, found: dict[int, int], now: float
    ) -> tuple[Sequence[LoggedBatch], Published | Refused]:
        """Append a batch of which some ids, or all, were accepted before. Raises Refused."""
        batch = work.batch
        repeats = self._repeats.check(batch, found, work.session.source)
        if len(repeats) == batch.count:
            return self._repeat_under_new_dots(work, repeats, now)
        new, rows = new_rows(batch, repeats)
        try:
            self.vectors.check(new, self._load_head)
        except Refused as refusal:
            raise of_row(refusal, rows) from None
        return self._in_pieces(work, split(batch, repeats, self.log.next_offset), now)

    def _repeat_under_new_dots(
        self, work: Sequenced, firsts: dict[int, int | None], now: float
    ) -> tuple[Sequence[LoggedBatch], Published]:
        void = InvalidDelta("id", "was accepted before")
        logged, _ = self._sequenced_void(work, void, now, firsts)
        self.counters.duplicates += work.count
        first = firsts.get(0)
        return logged, Published(
            first, work.batch.dot(0), work.count, self.kept_as(work.batch.ack_level), firsts
        )

    def _in_pieces(
        self, work: Sequenced, pieces: Sequence[Piece], now: float
    ) -> tuple[Sequence[LoggedBatch], Published]:
        """Append all pieces of a batch. Raises Refused where not all of them find room."""
        batch, level = work.batch, self.kept_as(work.batch.ack_level)
        refusal = self.log.refusal(*[piece.batch for piece in pieces])
        if refusal is not None:
            raise refusal
        placed = self.log.append_run(
            [piece.batch for piece in pieces], lamport=self.lamport + 1, source=work.session.source
        )
        rows: list[RowPlace] = []
        for logged, (piece, firsts) in zip(placed, pieces, strict=True):
            if firsts is None:
                self._count_conflicts(piece)
                rows += [
                    RowPlace(logged.offset + row, piece.dot(row), duplicate=False)
                    for row in range(piece.count)
                ]
            else:
                rows += [RowPlace(at, None, duplicate=True) for at in firsts.values()]
                self.counters.duplicates += piece.count
                self.counters.voided += piece.count
            self._commit(logged, now, firsts)
        self._state(batch).remember(batch.base, batch.last, batch.crc)  # a repeat sends the whole frame
        return placed, Published.of_rows(rows, level)

    # --- clocks

    def _changed_clock(self, draft: Draft | MatrixDraft | Merged | Joined, origin: int) -> list[Dot]:
        """The heads that the draft builds on, and what its rows' clocks name, that its origin has not said
        before.
        """
        writers = self.vectors.writers
        if not draft.clock and (writers == 0 or (writers == 1 and self._watermarks.get(origin, 0))):
            return []
        heads = (head for _, head in self.vectors.other_heads(origin, iter(draft.vectors())))
        changed: dict[int, int] = {}
        for seen in chain(heads, draft.clock):
            if seen.counter > changed.get(seen.origin, 0) and not self._clocks.saw(origin, (), seen):
                changed[seen.origin] = seen.counter
        return [Dot(*entry) for entry in changed.items()]

    def _count_conflicts(self, batch: Batch) -> None:
        """Count the rows whose vector was changed by somebody whose change this batch had not seen."""
        if self.vectors.writers < 2 and self._watermarks.get(batch.origin, 0) > 0:
            return
        clock = () if batch.plain else batch.clock
        self.vectors.count_conflicts(batch, lambda other: self._clocks.seen(batch.origin, clock, other))

    def _next_hybrid_time(self) -> int:
        """48 bits of ms, 16 logical; rises whatever the wall clock does."""
        self._hybrid_time = max(self._hybrid_time + 1, self._wall_us() // 1000 << 16)
        return self._hybrid_time


def _is_split(work: Sequenced) -> bool:
    """True if its sender finds out by itself which rows of it are at fault."""
    return work.session.splits and work.batch.count > 1 and not work.batch.is_control


def _alike(batches: Sequence[Batch]) -> Iterable[Sequence[Batch]]:
    """Stretches of one namespace and one kind."""
    if len(batches) == 1:
        return (batches,)
    return [[*some] for _, some in groupby(batches, _NAMESPACE_AND_KIND)]


def _offsets(repeats: dict[int, int | None], rows: list[int] | None, base: int = 0) -> dict[int, int | None]:
    """First offsets of repeated rows; a repeat within the batch points to its first copy's new offset."""
    place = {} if rows is None else {row: base + at for at, row in enumerate(rows)}
    return {
        row: at if at is None or at >= 0 else place.get(-1 - at, repeats.get(-1 - at))
        for row, at in repeats.items()
    }
