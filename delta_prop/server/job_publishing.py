"""Brings the parts of a committed job through the chain, as a producer does: in order, each delta once.

What has its place is known by dots, so a publication that was broken off, by a crash or a failing log, goes
on from any earlier place and repeats nothing. A batch that is refused for good has its other rows sent under
dots of another origin: halves of it, and halves of those, in an order that depends on nothing but what became
of the ones before, so that this too goes on where it was.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import anyio
import anyio.lowlevel

from delta_prop.ingest.work import Sequenced, Session
from delta_prop.receipt import Receipt, State
from delta_prop.server.job_files import stem_of
from delta_prop.server.part_file import READ_BYTES, Mark, StagedFrame, frames, path_of, read_head
from delta_prop.turns import Bell
from delta_prop_wire.cutting import deltas_of
from delta_prop_wire.delta import AckLevel, Dot, Source, make_origin, origin_lane, producer_id_of
from delta_prop_wire.encode import encode_batch
from delta_prop_wire.errors import Refused
from delta_prop_wire.frames import OriginClaim, RefusedRow
from delta_prop_wire.requests import REFUSED_ROWS_MAX
from delta_prop_wire.resign import resigned
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from delta_prop.inside import Inside
    from delta_prop.published import Published
    from delta_prop.server.job_files import Decided, JobFiles, KeptPart, Progress
    from delta_prop.server.part_file import PartHead
    from delta_prop_broker.disk import File
    from delta_prop_wire.batch import Batch
    from delta_prop_wire.delta import Delta

logger = logging.getLogger("delta_prop.server")

UNTOLD_BYTES_MAX = 4 * 1024 * 1024
"""What may be on its way to stable storage, but for a batch that is larger."""
PROGRESS_S = 1.0
"""How often it is written down how far a publication is, at most."""
_AGAIN_S_MIN, _AGAIN_S_MAX = 0.005, 60.0
_CLAIM_AGAIN = frozenset({ErrorCode.FENCED, ErrorCode.UNKNOWN_ORIGIN})


class _Sent(Receipt):
    """A batch that was offered. `void`: it is refused for good, which is told once that is on disk."""

    __slots__ = ("_ring", "void")

    def __init__(self, ring: Callable[[], None]) -> None:
        super().__init__()
        self.void = False
        self._ring = ring

    def placed(self, place: Published | None = None) -> None:
        """See `Receipt`."""
        self.void = place is None
        super().placed(place)
        self._ring()

    def _finish(self) -> None:
        super()._finish()
        self._ring()


class _Untold(NamedTuple):
    sent: _Sent
    size: int
    after: Progress


class Publisher:
    """Publishes one job at a time. `use_reserve` writes something small, on a full disk too."""

    def __init__(
        self, inside: Inside, files: JobFiles, use_reserve: Callable[[Callable[[], None]], None]
    ) -> None:
        self._inside = inside
        self._files = files
        self._use_reserve = use_reserve
        self._threads = inside.world.new_threads()
        self._bell = Bell()

    async def write(self, write: Callable[[], None]) -> None:
        """Have something small written. Raises OSError."""
        await self._threads.run(partial(self._use_reserve, write))

    async def publish(self, decided: Decided, note: Callable[[Progress], None]) -> None:
        """Publish what is left of a job; `note` is told how far it is. Returns once all is on stable storage.

        Raises OSError where the disk fails: call it again, with what was noted.
        """
        publication, told = _Publication(self, self._inside, decided, note), None
        while True:
            try:
                await self._parts(publication)
                return
            except Refused as refused:  # for now: what is refused for good is dealt with below
                publication.go_back(refused)
                if refused.code is not told:
                    told = refused.code
                    logger.warning("publishing job %r waits: %s", decided.job, refused.message)
                wait_s = (refused.retry_after_ms or 0) / 1000
                await anyio.sleep(min(max(wait_s, _AGAIN_S_MIN), _AGAIN_S_MAX))

    async def _parts(self, publication: _Publication) -> None:
        parts = publication.decided.parts
        while publication.at.index < len(parts):
            part = parts[publication.at.index]
            file = await self._threads.run(partial(_open, self._files, publication.decided.job, part))
            try:
                await publication.part(part, file)
            finally:
                if file is not None:
                    file.close()
        await publication.keep()

    # --- for a publication

    async def read(self, file: File, mark: Mark) -> list[StagedFrame]:
        """Some frames behind a mark; none where there is no sound one."""
        return await self._threads.run(partial(_read_some, file, mark))

    async def read_head(self, file: File) -> tuple[PartHead, Mark] | None:
        """What the file is of."""
        return await self._threads.run(partial(read_head, file))

    async def write_progress(self, job: str, progress: Progress) -> None:
        """Write down how far it is."""
        await self.write(partial(self._files.write_progress, job, progress))

    async def offer(self, batch: Batch, session: Session) -> _Sent:
        """Send a batch down the chain, and wait until it has its place, or will not get one."""
        sent = _Sent(self._bell.ring)
        with self._inside.turn:
            self._inside.chain.offer(Sequenced(batch, session, sent), self._inside.now())
        while not (sent.done or sent.state is State.PLACED):
            await self._bell.wait()
        return sent

    async def outcome(self, sent: _Sent) -> None:
        """Wait until its outcome is known."""
        while not sent.done:
            await self._bell.wait()


class _Publication:
    """How far one job's publication is. `at`: what is done."""

    def __init__(
        self, publisher: Publisher, inside: Inside, decided: Decided, note: Callable[[Progress], None]
    ) -> None:
        self.decided = decided
        self.at = self._written = decided.progress
        self._publisher = publisher
        self._inside = inside
        self._chain = inside.chain
        self._note = note
        self._written_at = inside.now()
        self._untold: deque[_Untold] = deque()
        self._untold_bytes = 0
        self._epochs: dict[int, int] = {}
        self._refusals: dict[Dot, Refused] = {}  # of rows of the frame that is being sent

    async def part(self, part: KeptPart, file: File | None) -> None:
        """Publish what is left of a part. Raises Refused (for now), OSError."""
        found = None if file is None else await self._publisher.read_head(file)
        end, why = Mark(), None
        if file is not None and found is not None:
            head, begin = found
            if not self.at.mark.position:
                self._done(replace(self.at, mark=begin))
            try:
                end = await self._frames(part, file, head)
            except Refused as refused:
                if refused.retryable or refused.code in _CLAIM_AGAIN:
                    raise
                self.go_back(refused)
                logger.error("part %d of job %r: %s", part.part, self.decided.job, refused.message)
                why = refused
        if (end.position, end.checksum) != (part.size, part.checksum):
            await self._missing(part, why)
        else:
            self._done(replace(self.at, index=self.at.index + 1, mark=Mark()))

    async def _frames(self, part: KeptPart, file: File, head: PartHead) -> Mark:
        """Publish the frames that are left; returns where the last sound one ends. Raises Refused."""
        session, mark = Session(self.decided.owner, Source(head.source)), self.at.mark
        while mark.position < part.size:
            staged = await self._publisher.read(file, mark)
            if not staged:
                break
            for frame in staged:
                await self._frame(part, frame, self._epoch(head.origin), session)
                mark = frame.end
                await self._tell(UNTOLD_BYTES_MAX)
        await self._tell(0)
        return mark

    # --- frames

    async def _frame(self, part: KeptPart, frame: StagedFrame, epoch: int, session: Session) -> None:
        """Publish one frame of a part, or find that it is. Raises Refused."""
        batch = frame.batch
        have = self._have(batch.origin)
        if batch.last <= have:
            await self._tell(0)
            await self._placed(part, frame, session, void_from=self._void_from(batch, part.behind))
            return
        rest = batch
        if batch.base <= have:
            left = list(deltas_of(batch))[have + 1 - batch.base :]
            rest = _encoded(left, batch, batch.origin, have + 1, epoch)
        sent = await self._publisher.offer(resigned(rest, epoch=epoch, ack_level=AckLevel.DURABLE), session)
        if not self._is_refused(sent, rest):
            after = self._counted(self._last, part, frame)
            self._untold.append(_Untold(sent, batch.size, after))
            self._untold_bytes += batch.size
            return
        await self._tell(0)
        await self._remember(sent, rest)
        await self._placed(part, frame, session, void_from=rest.base - batch.base)

    async def _placed(self, part: KeptPart, frame: StagedFrame, session: Session, *, void_from: int) -> None:
        """Go on behind a frame that is dealt with, and was refused from this row on."""
        count = frame.batch.count
        if void_from < count:
            await self._again(frame.batch, range(void_from, count), session)
        self._refusals.clear()
        self._done(replace(self._counted(self.at, part, frame, rows=void_from), again=0))
        if void_from < count:
            await self.keep()
        await anyio.lowlevel.checkpoint()

    def _is_refused(self, sent: _Sent, batch: Batch) -> bool:
        """Whether a batch was refused for good, its dots used up. Raises Refused where they are not."""
        refusal = sent.refusal()
        if refusal is not None and (not refusal.voids or self._have(batch.origin) < batch.last):
            raise refusal
        return sent.void or refusal is not None

    def _void_from(self, batch: Batch, behind: int) -> int:
        """The first row that was refused since the job was decided, and all behind it with it."""
        first = max(behind + 1 - batch.base, 0)
        if first >= batch.count or not self._was_void(batch.origin, batch.last):
            return batch.count
        return next(
            row for row in range(first, batch.count) if self._was_void(batch.origin, batch.base + row)
        )

    async def _again(self, batch: Batch, rows: range, session: Session) -> None:
        """Send rows of a batch that was refused under dots of their own, without those that are at fault."""
        origin = self._origin_of_refused(batch.origin)
        if not self.at.again:
            self._epoch(origin)
            self._done(replace(self.at, again=self._have(origin) + 1))
        await self.keep()
        base, at, deltas = self.at.again, self.at, list(deltas_of(batch))
        stack = _halves(rows)
        if not stack:
            at = self._with_refused(at, batch, rows.start, Dot(batch.origin, batch.base + rows.start))
        while stack:
            some = stack.pop()
            sending = deltas[some.start : some.stop]
            if await self._is_void(batch, sending, origin, base, session):
                stack += _halves(some)
                if len(some) == 1:
                    at = self._with_refused(at, batch, some.start, Dot(origin, base))
            else:
                at = replace(at, published=at.published + len(some))
            base += len(some)
        self._done(at)

    async def _is_void(
        self, batch: Batch, deltas: Sequence[Delta], origin: int, base: int, session: Session
    ) -> bool:
        """Send some of its rows, where that has not happened; whether they were refused. Raises Refused."""
        if base + len(deltas) - 1 <= self._have(origin):
            return self._was_void(origin, base)
        one = _encoded(deltas, batch, origin, base, self._epoch(origin))
        sent = await self._publisher.offer(one, session)
        await anyio.lowlevel.checkpoint()
        void = self._is_refused(sent, one)
        if void:
            await self._remember(sent, one)
        return void

    async def _remember(self, sent: _Sent, batch: Batch) -> None:
        """Keep why a row by itself was refused, where that is to be told."""
        if batch.count > 1 or len(self.at.refused_rows) + len(self._refusals) >= REFUSED_ROWS_MAX:
            return
        await self._publisher.outcome(sent)
        refusal = sent.refusal()
        if refusal is not None and refusal.voids:
            self._refusals[batch.dot(0)] = refusal

    def _with_refused(self, at: Progress, batch: Batch, row: int, dot: Dot) -> Progress:
        """One row more of a batch is refused: under this dot it was sent by itself."""
        refusal = self._refusals.get(dot)
        if refusal is None:  # before a start, or one of many
            code, text = self._chain.outcome(*dot), ""
        else:
            code, text = refusal.code, refusal.message.removeprefix("row 0: ")
        known = code if isinstance(code, ErrorCode) else ErrorCode.INVALID_DELTA
        part = self.decided.parts[at.index].part
        return at.with_refused(RefusedRow(part, batch.base - 1 + row, batch.keys[row], known, text))

    async def _missing(self, part: KeptPart, why: Refused | None) -> None:
        """A part that was committed cannot be read to its end: say so, and go on with the next."""
        left = part.deltas - self.at.mark.counter
        logger.error(
            "job %r: %d of %d deltas of part %d cannot be published: its file is damaged or gone, or its "
            "origin is another token's; they count as refused; run the job under another name to send them",
            self.decided.job,
            left,
            part.deltas,
            part.part,
        )
        code = ErrorCode.PROCESSING_FAILED if why is None else why.code
        told = "the file of its part is damaged or gone" if why is None else why.message
        told = f"{told}: no row from this one on is published, {left} in all"
        at = replace(self.at, index=self.at.index + 1, mark=Mark(), again=0)
        if left:
            at = at.with_refused(RefusedRow(part.part, self.at.mark.counter, "", code, told), left)
        self._done(at)
        await self.keep()

    # --- how far it is

    @property
    def _last(self) -> Progress:
        """What is done once all that has its place is told."""
        return self._untold[-1].after if self._untold else self.at

    def _counted(self, at: Progress, part: KeptPart, frame: StagedFrame, rows: int | None = None) -> Progress:
        """Behind a frame of which so many rows, the first ones, have their place under their own dots."""
        batch = frame.batch
        count = batch.count if rows is None else rows
        repeated = min(max(part.behind + 1 - batch.base, 0), count)
        return replace(
            at,
            mark=frame.end,
            published=at.published + count - repeated,
            duplicates=at.duplicates + repeated,
        )

    async def _tell(self, bytes_max: int) -> None:
        """Wait until no more than so much waits for stable storage. Raises Refused."""
        while self._untold and (self._untold_bytes > bytes_max or self._untold[0].sent.done):
            sent, size, after = self._untold[0]
            await self._publisher.outcome(sent)
            refusal = sent.refusal()
            if refusal is not None:
                raise refusal
            self._untold.popleft()
            self._untold_bytes -= size
            self._done(after)
        if self._inside.now() - self._written_at >= PROGRESS_S:
            await self.keep()

    def _done(self, at: Progress) -> None:
        self.at = at
        self._note(at)

    def go_back(self, refused: Refused) -> None:
        """Go back: to what is told; where the log has failed, to what is written down, for it may have lost
        what was found in it.
        """
        self._untold.clear()
        self._untold_bytes = 0
        if refused.code in _CLAIM_AGAIN:
            self._epochs.clear()
        if refused.code in (ErrorCode.LOG_FAILED, ErrorCode.SHUTTING_DOWN):
            self._done(self._written)

    async def keep(self) -> None:
        """Write down how far it is, once that is on stable storage. Raises Refused, OSError."""
        at, failures = self.at, list[Refused]()
        if at == self._written:
            return
        self._chain.check_running()  # what waits for its marks now is not told that they were lost
        told = anyio.Event()

        def tell(failure: Refused | None) -> None:
            if failure is not None:
                failures.append(failure)
            told.set()

        self._chain.when_kept(tell)
        await told.wait()
        if failures:
            raise failures[0]
        await self._publisher.write_progress(self.decided.job, at)
        self._written, self._written_at = at, self._inside.now()

    # --- origins

    def _epoch(self, origin: int) -> int:
        """The epoch to write under. Raises Refused."""
        epoch = self._epochs.get(origin)
        if epoch is None:
            now = self._inside.now()
            (grant,) = self._chain.claim([OriginClaim(origin, 0)], self.decided.owner, now, bounded=False)
            epoch = self._epochs[origin] = grant.epoch
        return epoch

    def _have(self, origin: int) -> int:
        return self._chain.watermark(origin)

    def _was_void(self, origin: int, counter: int) -> bool:
        """Whether a dot that is dealt with was refused, as far as that is remembered."""
        outcome = self._chain.outcome(origin, counter)
        return isinstance(outcome, ErrorCode) and outcome is not ErrorCode.DOT_REUSED

    def _origin_of_refused(self, origin: int) -> int:
        """Where the other rows of refused batches go."""
        part = self.decided.parts[self.at.index].part
        return make_origin(producer_id_of(f"{self.decided.job}/{part}/again"), origin_lane(origin))


def _halves(rows: range) -> list[range]:
    """What to try instead of these rows, the last to be tried first; nothing where it is one."""
    half = len(rows) // 2
    return [rows[half:], rows[:half]] if half else []


def _encoded(deltas: Sequence[Delta], batch: Batch, origin: int, base: int, epoch: int) -> Batch:
    """Rows of a batch by themselves."""
    return encode_batch(
        deltas,
        origin=origin,
        base=base,
        epoch=epoch,
        ack_level=AckLevel.DURABLE,
        priority=batch.priority,
        hybrid_time=batch.hybrid_time,
    )


def _open(files: JobFiles, job: str, part: KeptPart) -> File | None:
    try:
        return files.disk.open(path_of(stem_of(job), part.part, part.attempt), read_only=True)
    except FileNotFoundError:
        return None


def _read_some(file: File, mark: Mark) -> list[StagedFrame]:
    found: list[StagedFrame] = []
    size = 0
    for frame in frames(file, mark):
        found.append(frame)
        size += frame.batch.size
        if size >= READ_BYTES:
            break
    return found
