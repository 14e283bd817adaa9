"""The log on disk: one partition's frames, numbered, chained and written together.

Synchronous and deterministic. An append only buffers; `take_commit` hands out what the disk has to do, for
a thread that may wait for it, and `finish_commit` moves the marks. Everything else happens on the one
thread that owns the log. The first failure stops it: it then only reads, until it is recovered in place
(`recover_anew`, `go_on`) or opened anew.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from delta_prop_broker.log import ahead, refusals
from delta_prop_broker.log.checkpoints import Position
from delta_prop_broker.log.commit import Commit, Piece, all_have_files, write_piece
from delta_prop_broker.log.cover import Cover
from delta_prop_broker.log.damage import LogBusy, LogDamaged
from delta_prop_broker.log.free_space import FreeSpace
from delta_prop_broker.log.holders import Holders
from delta_prop_broker.log.identity import LOCK_PATH, STREAMS
from delta_prop_broker.log.recovery import recover
from delta_prop_broker.log.reserve import Reserve, tells_full_disk
from delta_prop_broker.log.retention import LogSettings
from delta_prop_broker.log.rewriting import Rewriter
from delta_prop_broker.log.room import Room
from delta_prop_broker.log.segment import Segment
from delta_prop_broker.log.sparse_index import SparseIndex
from delta_prop_broker.log.statistics import DurableLogStatistics
from delta_prop_broker.log.stretch import Stretches
from delta_prop_broker.log.tail import Tail
from delta_prop_wire.batch import LoggedBatch
from delta_prop_wire.delta import AckLevel, KnownIds, Source
from delta_prop_wire.errors import DeltaPropError, UsageError
from delta_prop_wire.spec import ACK_LEVEL_SHIFT
from delta_prop_wire.stamp import pack_logged_head

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from delta_prop_broker.disk import Disk, Lock
    from delta_prop_broker.log.compaction import Compaction
    from delta_prop_broker.log.frames import Place
    from delta_prop_broker.log.recovery import Recovered, RecoveryReport
    from delta_prop_broker.log.rewriting import Rewriting
    from delta_prop_broker.log.snapshot import Snapshot
    from delta_prop_wire.batch import Batch
    from delta_prop_wire.errors import Refused

DIRECTORY = f"{STREAMS}/default/0"
_DURABLE = int(AckLevel.DURABLE)


class DurableLog:
    """A `Log` in a directory, with group commits."""

    level = AckLevel.DURABLE

    def __init__(
        self,
        disk: Disk,
        recovered: Recovered,
        *,
        settings: LogSettings,
        draw: Callable[[int], bytes],
        wall_us: Callable[[], int],
        lock: Lock | None,
        reserve: Reserve,
    ) -> None:
        """Use `open`."""
        self.settings = settings
        self.reserve = reserve
        self._batch_bytes_max = settings.bytes_max - settings.segment_bytes_max
        self._disk = disk
        self._draw = draw
        self._wall_us = wall_us
        self._lock = lock
        self._holders = Holders()
        self.committed_frames = self.committed_bytes = 0
        """What this object has written so far."""
        self.needed_from: int | None = None
        """From where on a start would read it, if it were now: that stays, whoever needs it no more."""
        self._closed = False
        self._commits = self._syncs_skipped = self._removed_segments = self._refused = self._reopened = 0
        self._free = FreeSpace(disk, wall_us, read_only=recovered.mark is None)
        self._cover = Cover(disk, DIRECTORY, settings=settings, holders=self._holders)
        start, end, read_only = recovered.start, recovered.next_offset, recovered.mark is None
        self._cover.open(recovered.identity.log_id, start=start, end=end, read_only=read_only)
        self._take_over(recovered)
        self.stretches = Stretches(disk, lambda: (self._segments, self._start, self.visible))
        """Readers of whole frames as they lie in the files."""

    def _take_over(self, recovered: Recovered) -> None:
        """Go on from what is on disk; nothing waits to be written."""
        self.next_offset = recovered.next_offset
        self.written = self.synced = recovered.synced
        self.failure: Exception | None = None
        self.checkpoints = recovered.checkpoints
        """Those that fit this log, newest first. Whoever writes one has it to itself meanwhile."""
        self._identity = recovered.identity
        self._segments = recovered.segments
        self._chain = recovered.chain or 0
        self._start = recovered.start
        self._mark = recovered.mark
        self._tail = Tail(recovered.next_offset, bytes_max=self.settings.tail_bytes_max)
        self._room = Room(self.settings, self._segments, self._holders, self._cover)
        self._rewriter = Rewriter(self._disk, DIRECTORY, self._segments, self._room, self.settings)
        self._pending: list[Piece] = []
        self._pending_sync = False
        self._unwritten_bytes = 0
        self._running: Commit | None = None
        self._removed: list[Segment] = []

    @classmethod
    def open(
        cls,
        disk: Disk,
        *,
        settings: LogSettings,
        draw: Callable[[int], bytes],
        wall_us: Callable[[], int],
        read_only: bool = False,
    ) -> tuple[DurableLog, RecoveryReport]:
        """Open the log in a data directory, or make it there; recover it if it was not closed.

        `draw` gives random bytes, `wall_us` microseconds since 1970. Read-only takes no lock, changes nothing
        and shows what is known to be synced. Raises LogBusy, LogDamaged, FormatUnknown, UsageError, OSError
        (DiskFull where there is no room, after the reserve was given up).
        """
        lock: Lock | None = None
        if not read_only:
            try:
                with tells_full_disk(disk):
                    disk.make_directory("")
                    lock = disk.lock(LOCK_PATH)
            except BlockingIOError as error:
                raise LogBusy(error.strerror or str(error)) from None
        reserve = Reserve(disk, settings.reserve_bytes)

        def recovering() -> Recovered:
            return recover(disk, DIRECTORY, draw=draw, made_by=settings.made_by, read_only=read_only)

        try:
            with tells_full_disk(disk):
                recovered = recovering() if read_only else reserve.use(recovering)
            log = cls(
                disk, recovered, settings=settings, draw=draw, wall_us=wall_us, lock=lock, reserve=reserve
            )
        except BaseException:
            if lock is not None:
                lock.release()
            raise
        return log, recovered.report

    # --- who and where

    @property
    def log_id(self) -> bytes:
        """16 bytes drawn when the log was created."""
        return self._identity.log_id

    @property
    def epoch(self) -> int:
        """Grows at each opening after which a tail may be missing: whenever the log had not been closed."""
        return self._identity.epoch

    @property
    def openings(self) -> int:
        """How often it was opened to be written, or recovered, after it was made: it grows each time."""
        return self._identity.openings

    def epoch_end(self, epoch: int) -> int | None:
        """Where a past epoch ended (exclusive); None where it is the present one, or one still to come."""
        return self._identity.epoch_end(epoch)

    @property
    def accepting(self) -> bool:
        """False while half of what may wait for the disk waits. A stopped log is asked, and refuses."""
        return self.failure is not None or self._unwritten_bytes * 2 < self.settings.unwritten_bytes_max

    @property
    def first_offset(self) -> int:
        """The oldest offset still held."""
        return self._start

    @property
    def visible(self) -> int:
        """Up to where readers may read: what is synced, or written, as the settings say."""
        return self.synced if self.settings.level is AckLevel.DURABLE else self.written

    def reached(self, level: AckLevel) -> int:
        """The mark up to which (exclusive) rows are kept as safely as this level says."""
        if level is AckLevel.MEMORY:
            return self.next_offset
        return self.written if level is AckLevel.LOGGED else self.synced

    @property
    def growing_from(self) -> int:
        """The first offset of the segment that grows, as `position` tells it."""
        last = self._segments.last
        return self.next_offset if last is None or last.index is None or not last.size else last.index.base

    def position(self) -> Position:
        """Where the log ends now, as a checkpoint needs it; usable once `synced` has come there."""
        last = self._segments.last
        if last is None or last.index is None or not last.size:
            return Position(self.next_offset, self._chain)
        return Position(self.next_offset, self._chain, last.index, last.size, last.latest_time)

    # --- appending

    @property
    def unwritten_bytes(self) -> int:
        """What was appended and is not on disk yet."""
        return self._unwritten_bytes

    def refusal(self, batch: Batch) -> Refused | None:
        """Why an append would be refused now; makes room first where nobody needs the oldest."""
        return self._refusal(batch.size)

    def full(self, count: int, size: int) -> Refused | None:
        """Why a batch of about so many deltas and bytes would find no room now, None if it would."""
        return None if size > self._batch_bytes_max else self._refusal(size)

    def append(
        self, batch: Batch, *, lamport: int, source: Source, known_ids: KnownIds = KnownIds.NONE
    ) -> LoggedBatch:
        """Give the batch its place, in memory. Raises Refused and changes nothing."""
        if self._mark is None or self._closed:
            raise UsageError("the log is open read-only, or closed: open it for writing")
        size, asked = batch.size, batch.attributes >> ACK_LEVEL_SHIFT & 3
        # A forwarded batch asked the service where it entered for its level, not this one.
        refusal = refusals.level_refusal(batch) if asked > _DURABLE and source is not Source.REPLICA else None
        if refusal is None and not self._has_room(size):
            refusal = self._refusal(size)
        if refusal is not None:
            self._refused += 1
            raise refusal
        self._tail.append(logged := self._place(batch, lamport, source, known_ids, self._wall_us()))
        return logged

    def fits(self, batches: Sequence[Batch]) -> bool:
        """Whether `append_run` would take these; makes room where nobody needs the oldest."""
        size, asked = batches[0].size, batches[0].attributes >> ACK_LEVEL_SHIFT & 3
        if len(batches) > 1:
            size = sum([batch.size for batch in batches])
            asked = max([batch.attributes >> ACK_LEVEL_SHIFT & 3 for batch in batches])
        if self._mark is None or self._closed or asked > _DURABLE or size > self._batch_bytes_max:
            return False
        return self._has_room(size) or self._refusal(size) is None

    def append_run(self, batches: Sequence[Batch], *, lamport: int, source: Source) -> list[LoggedBatch]:
        """`append` for each, one behind the other, in one moment. They fit: that was asked just now."""
        now, placed = self._wall_us(), []
        for batch in batches:
            placed.append(self._place(batch, lamport, source, KnownIds.NONE, now))
            lamport += batch.count
        self._tail.extend(placed)
        return placed

    def _place(
        self, batch: Batch, lamport: int, source: Source, known_ids: KnownIds, now: int
    ) -> LoggedBatch:
        size, offset, previous = batch.size, self.next_offset, self._chain
        head, crc = pack_logged_head(
            batch, offset, lamport=lamport, source=source, known_ids=known_ids,
            time=now, previous_crc=previous, synced=self.synced,
        )  # fmt: skip
        logged = LoggedBatch(batch, offset, lamport, source, head, known_ids=known_ids)
        segment = (piece := self._piece(size, now)).segment
        piece.parts += (head, batch.raw)
        piece.position += size
        assert segment.index is not None
        segment.index.add(batch, offset=offset, size=size, time=now, previous_crc=previous, crc=crc)
        segment.size += size
        segment.end = self.next_offset = offset + batch.count
        segment.last_crc = self._chain = crc
        segment.latest_time = segment.index.latest_time
        self._room.bytes += size
        self._unwritten_bytes += size
        if batch.attributes >> ACK_LEVEL_SHIFT & 3 >= _DURABLE or source is Source.REPLICA:
            self._pending_sync = True  # a forwarder sends it once
        return logged

    def _piece(self, size: int, now: int) -> Piece:
        """Where the next frame goes: rolls to a new segment where the last one is full or old."""
        last = self._segments.last
        if last is not None and not last.size:
            last.first_time = now
        elif last is None or last.size + size > self.settings.segment_bytes_max or self._old(last, now):
            last = self._begin_segment(now)
        return self._piece_of(last)

    def _old(self, segment: Segment, now: int) -> bool:
        return now - segment.first_time >= self.settings.segment_s_max * 1e6

    def _begin_segment(self, now: int) -> Segment:
        """Seal the last segment with the next commit, and begin another one behind it."""
        last = self._segments.last
        if last is not None:
            self._piece_of(last).seals = True
        last = Segment(DIRECTORY, self.next_offset)
        last.index = SparseIndex(self.next_offset)
        last.first_time = now
        self._segments.add(last)
        self._piece_of(last)
        return last

    def _piece_of(self, segment: Segment) -> Piece:
        if not self._pending or self._pending[-1].segment is not segment:
            self._pending.append(Piece(segment, segment.size, position=segment.size))
        return self._pending[-1]

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

    def _refusal(self, size: int) -> Refused | None:
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
        if self._free.ask() >= needed:  # while it is short, so that it goes on by itself
            return None
        return refusals.disk_full(self._free.bytes, kept)

    def _no_room(self, size: int) -> Refused | None:
        found = self._room.find(size, readable=self._readable(), end=self.next_offset)
        self._take_away(self._room.take_removed())
        if found:
            return None
        holder = self._holders.slowest()
        why = "" if holder else self._cover.waited_for(self.visible)
        held, offsets = self._room.bytes, (self.first_offset, self.next_offset)
        return refusals.log_full(held, self.settings.bytes_max, offsets=offsets, holder=holder, waits_for=why)

    # --- committing

    def want_sync(self) -> None:
        """Have the next commit sync, what was written alone too."""
        self._pending_sync = True

    @property
    def cached_bytes(self) -> int | None:
        """What a commit would copy into the page cache now; None if it had more to do, or nothing."""
        pending = self._pending
        if self._running is not None or self._pending_sync or self._removed or not pending:
            return None
        if self.settings.level is AckLevel.DURABLE or pending[-1].segment.file is None:  # quicker told alone
            return None
        return self._unwritten_bytes if len(pending) == 1 or all_have_files(pending) else None

    def take_commit(self, *, sync: bool = False) -> Commit | None:
        """What the disk has to do now; None: nothing, or one is under way. `sync`: all that was written."""
        if self._running is not None or self.failure is not None or self._mark is None or self._closed:
            return None
        sync = sync or self._pending_sync or self.settings.level is AckLevel.DURABLE
        if not (self._pending or self._removed or (sync and self.synced < self.written)):
            return None
        if sync and not self._pending and self.synced < self.written and self._segments.last is not None:
            self._piece_of(self._segments.last)
        sealed = max((piece.segment.end for piece in self._pending if piece.seals), default=0)
        self._running = Commit(
            self._disk, DIRECTORY, pieces=self._pending, removed=self._removed, mark=self._mark,
            start=self._start, end=self.next_offset,
            synced=self.next_offset if sync else max(self.synced, sealed), sync=sync and bool(self._pending),
            asks_free=self._free.is_due() or sync or bool(self._removed),
            ahead_to=ahead.bound(self._free.bytes - self.reserve.missing, self.settings),
        )  # fmt: skip
        self._syncs_skipped += not sync
        self._pending, self._removed, self._pending_sync = [], [], False
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
        if size is None or size > bytes_max or len(self._pending) > 1 or self.failure is not None:
            return False
        if mark is None or self.synced > mark.newest.synced:
            return False
        piece, self._pending = self._pending[0], []
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

    def recover_anew(self) -> Recovered:
        """The disk's part of going on after a failure: recover the directory, whose lock is held throughout.

        For a thread; nothing of this log changes. What was synced before the failure must be there. Raises
        LogDamaged, FormatUnknown, OSError: then it may be tried again.
        """
        assert self.failure is not None, "a log that works is not recovered"

        made_by, draw = self.settings.made_by, self._draw
        recovered = self.reserve.use(
            lambda: recover(self._disk, DIRECTORY, draw=draw, made_by=made_by, synced=self.synced)
        )
        if recovered.identity.log_id != self.log_id:
            recovered.close()
            raise LogDamaged(f"{DIRECTORY}/log", "it names another log than it did")
        return recovered

    def go_on(self, recovered: Recovered) -> None:
        """Take over what `recover_anew` found: marks, segments and epoch are those of a log just opened.

        Who holds the log back stays. Readers may go on where they were, but those beyond `next_offset`.
        """
        self._segments.close()
        if self._mark is not None:
            self._mark.close()
        self._take_over(recovered)
        self._free.forget()
        self._reopened += 1

    def close(self) -> None:
        """Commit what is left, mark the end, let go of the directory; a commit under way must have ended.
        Raises OSError; it is closed then too.
        """
        if self._closed:
            return
        assert self._running is None, "a commit is under way: wait for it"
        try:
            if self._mark is not None and self.failure is None:
                commit = self.take_commit(sync=True)
                if commit is not None:
                    commit.run()
                    self.finish_commit(commit)
                ahead.cut_off(self._segments.last)
                self._mark.settle_clean(self.synced, self._start)
        except OSError as error:
            self.fail(error)
            raise
        finally:
            self._closed = True
            self._segments.close()
            if self._mark is not None:
                self._mark.close()
            if self._lock is not None:
                self._lock.release()

    # --- reading

    def read(self, offset: int, *, rows_max: int, bytes_max: int) -> list[LoggedBatch]:
        """Batches from the one that holds `offset` on, at least one unless `offset` is at `visible`.

        Raises Refused (CURSOR_TOO_OLD) below `first_offset`, LogDamaged, OSError.
        """
        visible = self.visible
        if offset < self._start:
            raise refusals.too_old(offset, self._start)
        if offset >= visible:
            return []
        if offset >= self._tail.first:
            return self._tail.read(offset, visible, rows_max=rows_max, bytes_max=bytes_max)
        end = min(visible, self._tail.first)
        return self._segments.read(offset, end, rows_max=rows_max, bytes_max=bytes_max)

    def frames(self, offset: int = 0) -> Iterator[Place]:
        """Every frame on disk from an offset (or the log's start) up to `visible`, read and checked anew.

        Raises LogDamaged where one cannot be read; `inspect` goes on behind it.
        """
        return self._segments.walk(max(offset, self._start), self.visible)

    def snapshot(self) -> Snapshot | None:
        """The newest snapshot, open; None where there is none. The caller closes it.

        It holds each vector's state at its offset, and the log has all that follows from there on. Reads a
        few blocks, so not on the event loop. Raises LogDamaged, OSError.
        """
        return self._cover.newest(start=self._start, end=self.next_offset)

    def may_have_snapshot(self) -> bool:
        """Whether `snapshot` may find one, by what is known in memory. False: it finds none."""
        return self._cover.may_have(self._start)

    def find(self, origin: int, counter: int) -> int | None:
        """The offset of a dot, of one not yet written too; None where it is not, or no longer, here."""
        return self._segments.find(origin, counter, self._fetch)

    def offset_at(self, time_us: int) -> int:
        """The first visible offset appended at that time (us since 1970) or later, else `visible`."""
        return self._segments.offset_at(time_us, self.visible)

    def _fetch(self, offset: int) -> LoggedBatch | None:
        cached = offset >= self._tail.first
        held, end = (self._tail, self.next_offset) if cached else (self._segments, self.written)
        found = held.read(offset, end, rows_max=1, bytes_max=1)
        return found[0] if found else None

    # --- who holds it, and what goes

    def fill(self, offset: int) -> float:
        """The share of `bytes_max` that the segments from the one of `offset` on take."""
        return 0.0 if offset >= self.next_offset else self._room.held(offset) / self.settings.bytes_max

    def kept_share(self, offset: int, now_us: int) -> float:
        """How near the segment of `offset` is to going, by size and age; nobody's need is looked at."""
        return self._room.kept_share(offset, now_us)

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

    def roll(self, now_us: int) -> bool:
        """Seal the last segment if it is older than `segment_s_max`, with the next commit; whether it is.

        So what nobody appends to any more can be retained and compacted as well. `now_us` as for `retain`.
        """
        last = self._segments.last
        if self.failure is not None or self._mark is None or last is None or not last.size:
            return False
        if old := self._old(last, now_us):
            self._begin_segment(now_us)
        return old

    def retain(self, now_us: int) -> int:
        """Let whole old segments go, by size and age, as far as nobody needs them; how many go.

        They are gone for readers at once, from the disk with the next commit. `now_us` is wall time as at the
        start, plus the time since: a clock that is set must not make everything old.
        """
        if self.failure is None and self._mark is not None:
            self._room.retain(now_us, readable=self._readable(), end=self.next_offset)
        return self._take_away(self._room.take_removed())

    def take_compaction(self, now_us: int) -> Compaction | None:
        """What is to be made into a snapshot now, None where nothing is, or one is being made.

        Its steps are for a background thread, then it is given to `finish_compaction`, whatever became of it.
        `now_us` as for `retain`.
        """
        if self.failure is not None or self._mark is None or self._closed:
            return None
        cover, held = self._cover, self._room.bytes
        return cover.due(self._segments, now_us=now_us, readable=self.synced, held_bytes=held)

    def finish_compaction(self, compaction: Compaction, *, made: bool) -> None:
        """A compaction has ended; `made`: its snapshot is on stable storage, and what it covers may go."""
        self._cover.done(compaction, made=made)

    def _readable(self) -> int:
        """Up to where segments may go, as far as it is for the log to say."""
        return self.visible if self.needed_from is None else min(self.visible, self.needed_from)

    def _take_away(self, removed: list[Segment]) -> int:
        if removed:
            self._removed += self._rewriter.keep(removed)
            self._start = removed[-1].end
        return len(removed)

    # --- compressing

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

    def statistics(self) -> DurableLogStatistics:
        """A snapshot."""
        room, cover, segments = self._room, self._cover, self._segments
        return DurableLogStatistics(
            first_offset=self.first_offset, next_offset=self.next_offset, written=self.written,
            synced=self.synced, visible=self.visible, segments=len(segments.all),
            compressed_segments=sum(one.compressed for one in segments.all), bytes=room.bytes,
            bytes_max=self.settings.bytes_max, unwritten_bytes=self._unwritten_bytes,
            tail_bytes=self._tail.bytes, commits=self._commits, syncs_skipped=self._syncs_skipped,
            removed_segments=self._removed_segments, indexes_rebuilt=segments.indexes_rebuilt,
            refused=self._refused, held_by=self._holders.slowest(), reopened=self._reopened,
            reserve_bytes=self.reserve.bytes, snapshot_offset=cover.offset, snapshot_rows=cover.rows,
            snapshot_bytes=cover.bytes, snapshots_made=cover.made, compacting=cover.under_way,
        )  # fmt: skip
