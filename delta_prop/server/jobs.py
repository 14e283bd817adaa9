"""Jobs: parts that are kept aside, what was decided of them, and their publication, as one server has them.

One task writes: what connections stage gathers while the disk is busy, goes to it together, and is told when
it is synced; decisions follow what was staged before them. Another one publishes what was committed.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import anyio

from delta_prop.server.job_files import Decided, JobFiles, Progress, job_told, stem_of
from delta_prop.server.job_publishing import Publisher
from delta_prop.server.job_rules import (
    JOB_BYTES_MAX,
    abortable,
    aborted,
    check_owner,
    decided_before,
    expired,
    judged,
    kept_nowhere,
    no_room,
    none_here,
    not_read_yet,
    too_fast,
    too_many,
    unwritten,
)
from delta_prop.server.part_file import PartHead, path_of
from delta_prop.server.part_writing import close_all, write_parts
from delta_prop.server.staging import Attempt
from delta_prop.turns import Bell
from delta_prop_broker.log.durable import DurableLog
from delta_prop_wire.bounds import check_name
from delta_prop_wire.delta import Source
from delta_prop_wire.errors import InvalidDelta, Refused
from delta_prop_wire.frames import Decision, JobState, JobStatus, run_of
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from delta_prop.inside import Inside
    from delta_prop.receipt import Receipt
    from delta_prop.server.counters import JobCounts
    from delta_prop.server.job_files import Found, JobDamaged
    from delta_prop.server.settings import ServerSettings
    from delta_prop_broker.log.log_clock import LogClock
    from delta_prop_wire.batch import Batch
    from delta_prop_wire.frames import Decide, JobPart

    Told = Callable[[JobStatus | Refused], None]

logger = logging.getLogger("delta_prop.server")

FEATURE = "jobs"
NAMES_MAX = 10_000
"""Jobs that are over and whose names are remembered; beyond that the oldest is forgotten before its time."""
ATTEMPTS_MAX = 100_000
"""Of parts that nobody has decided of, and parts that are to be published."""
UNWRITTEN_BYTES_MAX = 64 * 1024 * 1024
"""What may wait for the disk, over all connections."""
ROWS_TOLD_BYTES_MAX, ROW_BYTES = 1024 * 1024, 100
"""Of refused rows where all jobs are told of at once, and of a row beside its id and its reason."""
LOOK_S_MAX = 60.0
AGAIN_S = 5.0


@dataclass(slots=True, eq=False)
class Job:
    """One job. `touched_us`: the log's seen time when something of it was staged last, or it was decided."""

    name: str
    owner: str
    touched_us: int
    attempts: dict[tuple[int, int], Attempt] = field(default_factory=dict)
    decided: Decided | None = None
    deciding: bool = False

    @property
    def staged(self) -> int:
        """Deltas on disk that nobody has decided of, of all attempts."""
        return sum(one.kept for one in self.attempts.values())

    @property
    def bytes(self) -> int:
        """What its parts take on disk."""
        if self.decided is not None:
            return self.decided.bytes
        return sum(one.bytes for one in self.attempts.values())

    def status(self) -> JobStatus:
        """How it is, as clients are told."""
        return JobStatus(JobState.STAGING, self.staged) if self.decided is None else self.decided.status()


class _Asked(NamedTuple):
    request: Decide
    owner: str
    tell: Told


class Jobs:
    """All jobs of one server. *Resources*: `run` owns the tasks; it ends by cancellation. *Errors*: a disk
    that fails refuses what it should keep, for as long as it does.
    """

    def __init__(self, inside: Inside, settings: ServerSettings, counted: JobCounts) -> None:
        self.counted = counted
        self._inside = inside
        self._settings = settings
        self._files = None if inside.disk is None else JobFiles(inside.disk)
        self._threads = inside.world.new_threads()
        self._jobs: dict[str, Job] = {}
        self._damaged: dict[str, JobDamaged] = {}
        self._read = False
        self._dirty: dict[Attempt, None] = {}
        self._asked: deque[_Asked] = deque()
        self._attempts = 0
        self._free_bytes = self._taken_bytes = 0  # of the disk, when it was asked; not written yet
        self._ask_disk = False
        self._bell, self._publish_bell = Bell(), Bell()

    def _job(self, name: str, owner: str) -> Job | None:
        """A job that is known. Raises Refused."""
        if self._files is None:
            raise kept_nowhere()
        if not self._read:
            raise not_read_yet()
        if (damaged := self._damaged.get(stem_of(name))) is not None:
            raise Refused(ErrorCode.PROCESSING_FAILED, str(damaged))
        job = self._jobs.get(name)
        if job is not None:
            check_owner(job, owner)
        return job

    def _begin(self, name: str, owner: str) -> Job:
        try:
            check_name("job", name, JOB_BYTES_MAX)
        except InvalidDelta as error:
            raise Refused(ErrorCode.BAD_REQUEST, error.message) from None
        if self.counted.active >= self._settings.jobs_max:
            raise too_many("jobs", self.counted.active, self._settings.jobs_max)
        job = self._jobs[name] = Job(name, owner, self._clock.look())
        self._count_active()
        return job

    @property
    def features(self) -> tuple[str, ...]:
        """What a welcome says of it."""
        return () if self._files is None else (FEATURE,)

    # --- what connections do

    def enter(self, part: JobPart, source: Source, owner: str) -> Attempt:
        """The attempt that a connection stages. Raises Refused."""
        if source is Source.REPLICA:
            raise Refused(ErrorCode.BAD_REQUEST, "another service's deltas are forwarded, not staged")
        job = self._job(part.job, owner)
        if job is not None and job.decided is not None:
            raise decided_before(job.name, job.decided.state)
        attempt = None if job is None else job.attempts.get(part[1:])
        if attempt is None:
            if self._attempts >= ATTEMPTS_MAX:
                raise too_many("attempts of parts", self._attempts, ATTEMPTS_MAX)
            job = job or self._begin(part.job, owner)
            path = path_of(stem_of(job.name), part.part, part.attempt)
            head = PartHead(job.name, part.part, part.attempt, 0, int(source), owner, self._clock.look())
            attempt = job.attempts[part[1:]] = Attempt(part.part, part.attempt, path, head)
            self._attempts += 1
        return attempt

    def take(self, attempt: Attempt, batch: Batch, receipt: Receipt) -> None:
        """Have a batch of an attempt kept. Raises Refused."""
        size, bound = batch.size, self._settings.staged_bytes_max
        if self.counted.staged_bytes + size > bound:
            raise no_room(f"{self.counted.staged_bytes} bytes of {bound} (staged_bytes_max) are kept aside")
        if self._taken_bytes and self._taken_bytes + size > UNWRITTEN_BYTES_MAX:
            raise too_fast(self._taken_bytes, UNWRITTEN_BYTES_MAX)
        if self._taken_bytes + size > self._free_bytes - self._spare_bytes:
            self._ask_disk = True
            self._bell.ring()
            raise no_room(f"{self._free_bytes} bytes are free, {self._spare_bytes} of them stay so")
        job = self._jobs[attempt.head.job]
        job.touched_us = self._clock.look()
        attempt.take(batch, receipt)
        self._taken_bytes += size
        self._recount(attempt)
        self._dirty[attempt] = None
        self._bell.ring()

    def leave(self, attempt: Attempt) -> None:
        """The connection that staged it is gone."""
        job = self._jobs.get(attempt.head.job)
        if job is not None and attempt.holder is None and not attempt.have and attempt.gone is None:
            if job.attempts.pop((attempt.part, attempt.attempt), None) is not None:
                self._attempts -= 1
            if not job.attempts and job.decided is None:
                del self._jobs[job.name]
                self._count_active()
        self._dirty[attempt] = None  # its file is closed
        self._bell.ring()

    def decide(self, request: Decide, owner: str, tell: Told) -> None:
        """Decide, or tell how it is; `tell` is called once, now or later. Raises Refused."""
        job = self._job(request.job, owner)
        if request.decision is Decision.QUERY:
            if job is None:
                raise none_here(request.job)
            tell(job.status())
            return
        self._asked.append(_Asked(request, owner, tell))
        self._bell.ring()

    def told(self) -> list[dict[str, Any]]:
        """Each job, for JSON. Refused rows of those that came last, as far as there is room for them."""
        told, bytes_left = [], ROWS_TOLD_BYTES_MAX
        for one in reversed(self._jobs.values()):
            status = one.status()
            bytes_left -= sum(ROW_BYTES + len(row.vector_id) + len(row.why) for row in status.refused_rows)
            if bytes_left < 0:
                status = replace(status, refused_rows=())
            told.append(job_told(one.name, one.owner, status, one.bytes))
        return told[::-1]

    # --- life

    async def run(self) -> None:
        """Keep, publish and forget until cancelled."""
        files = self._files
        if files is None:
            return
        try:
            await self._open(files)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._keep, files)
                tasks.start_soon(self._publish, files)
                tasks.start_soon(self._look, files)
        finally:
            with anyio.CancelScope(shield=True):
                await self._threads.run(partial(close_all, self._all_attempts()))

    async def _open(self, files: JobFiles) -> None:
        while True:
            try:
                decided, self._damaged = await self._threads.run(files.read_decided)
                found = await self._threads.run(partial(files.read_staged, decided, self._damaged))
                self._free_bytes = await self._threads.run(files.disk.free_bytes)
                break
            except OSError as error:
                logger.warning("what is staged for jobs cannot be read, which is tried again: %s", error)
                await anyio.sleep(AGAIN_S)
        for damaged in self._damaged.values():
            logger.error("%s", damaged)
        for one in decided:
            self._jobs[one.job] = Job(one.job, one.owner, self._clock.seen_us, decided=one)
            self.counted.staged_bytes += one.bytes
            self._attempts += len(one.parts)
        for part in found:
            self._found(part)
        self._count_active()
        self._read = True
        self._publish_bell.ring()

    def _found(self, found: Found) -> None:
        head, key = found.head, (found.head.part, found.head.attempt)
        begun_us = min(head.begun_us, self._clock.seen_us)  # what a crash forgot of seen time comes again
        job = self._jobs.setdefault(head.job, Job(head.job, head.owner, begun_us))
        job.touched_us = max(job.touched_us, begun_us)
        path = path_of(stem_of(head.job), head.part, head.attempt)
        attempt = job.attempts[key] = Attempt(head.part, head.attempt, path, head, found.end)
        self._attempts += 1
        self._recount(attempt)

    # --- writing

    async def _keep(self, files: JobFiles) -> None:
        while True:
            await self._bell.wait()
            while self._dirty or self._asked or self._ask_disk:
                await self._write(files)
                if self._asked:
                    await self._decide(files, self._asked.popleft())

    async def _write(self, files: JobFiles) -> None:
        dirty, self._dirty, self._ask_disk = list(self._dirty), {}, False
        work = [(attempt, attempt.taken()) for attempt in dirty]
        taken = self._taken_bytes
        written = await self._threads.run(partial(write_parts, files, work))
        self._taken_bytes -= taken
        self._free_bytes = self._free_bytes - taken if written.free_bytes is None else written.free_bytes
        with self._inside.turn:
            for (attempt, frames), outcome in zip(work, written.outcomes, strict=True):
                if isinstance(outcome, OSError):
                    attempt.failed(frames, unwritten(outcome))
                elif frames:
                    attempt.written(frames, outcome)
                    self.counted.staged += sum(batch.count for batch, _ in frames)
                self._recount(attempt)

    async def _decide(self, files: JobFiles, asked: _Asked) -> None:
        try:
            if asked.request.decision is Decision.ABORT:
                asked.tell(await self._abort(files, asked))
            else:
                asked.tell(await self._commit(files, asked))
        except OSError as error:
            asked.tell(unwritten(error))
        except Refused as refused:
            asked.tell(refused)

    async def _commit(self, files: JobFiles, asked: _Asked) -> JobStatus:
        request, job = asked.request, self._jobs.get(asked.request.job)
        decided = judged(request, job, asked.owner, self._inside.chain, self._clock.read())
        if job is None or decided is None:  # without deltas: its name stays free for some that has any
            return JobStatus(JobState.PUBLISHED)
        if job.decided is decided:
            return job.status()
        job.deciding = True  # from here on it does not expire
        try:
            await self._threads.run(partial(self._use_reserve, partial(files.write_decided, decided)))
            job.decided, job.touched_us = decided, self._clock.seen_us
        finally:
            job.deciding = False
        self._count_active()
        kept = {(one.part, one.attempt) for one in decided.parts}
        try:
            await self._drop(files, job, decided_before(job.name, decided.state), kept)
        except OSError as error:
            logger.warning("other attempts of job %r are removed at the next start: %s", job.name, error)
        self._publish_bell.ring()
        return job.status()

    async def _abort(self, files: JobFiles, asked: _Asked) -> JobStatus:
        request = asked.request
        job = abortable(request, self._jobs.get(request.job), asked.owner)
        if job is not None:
            dropped = {key for key in job.attempts if request.run in (None, run_of(key[1]))}
            if len(dropped) == len(job.attempts):
                del self._jobs[job.name]  # it may be staged anew at once
            await self._drop(files, job, aborted(job.name), others=job.attempts.keys() - dropped)
        return JobStatus(JobState.ABORTED)

    async def _drop(
        self,
        files: JobFiles,
        job: Job,
        why: Refused,
        kept: Iterable[tuple[int, int]] = (),
        others: Iterable[tuple[int, int]] = (),
    ) -> None:
        """Take no more for this job, and remove what is there but for the parts `kept`, which count until
        they are published; `others` go on as they are. Raises OSError: then it is there still.
        """
        left_alone = {key: job.attempts[key] for key in others}
        attempts = {key: one for key, one in job.attempts.items() if key not in left_alone}
        job.attempts = left_alone
        for attempt in attempts.values():
            attempt.end(why)
        gone = [one for key, one in attempts.items() if key not in kept]
        paths = [one.path for one in gone]
        drop = partial(files.remove, paths) if kept else partial(files.drop, job.name, paths)

        def remove() -> None:
            close_all(attempts.values())
            drop()

        try:
            await self._threads.run(remove)
        except OSError:
            left = self._jobs.setdefault(job.name, job).attempts
            left |= {(one.part, one.attempt): one for one in gone} | left
            raise
        finally:
            self._count_active()
        self._attempts -= len(gone)
        self.counted.staged_bytes -= sum(one.charged for one in gone)

    # --- publishing

    async def _publish(self, files: JobFiles) -> None:
        publisher = Publisher(self._inside, files, self._use_reserve)
        postponed: set[str] = set()
        while True:
            committed = [one for one in self._jobs.values() if _is_committed(one)]
            waiting = [one for one in committed if one.name not in postponed]
            if not committed:
                await self._publish_bell.wait()
            elif not waiting:  # for each of them the disk failed
                await anyio.sleep(AGAIN_S)
                postponed.clear()
            else:
                job = min(waiting, key=_decided_us)
                try:
                    await self._publish_one(publisher, files, job)
                except OSError as error:
                    logger.warning("publishing job %r is tried again, as the disk fails: %s", job.name, error)
                    postponed.add(job.name)
                except Exception:  # a defect here must not end the server
                    logger.exception("publishing job %r failed, and is tried again", job.name)
                    postponed.add(job.name)

    async def _publish_one(self, publisher: Publisher, files: JobFiles, job: Job) -> None:
        decided = job.decided
        assert decided is not None
        done = told = decided.progress

        def note(progress: Progress) -> None:
            nonlocal done, told
            done = progress
            job.decided = replace(decided, progress=progress)
            told = self.counted.note(told, progress)

        await publisher.publish(decided, note)
        over = replace(decided, state=JobState.PUBLISHED, parts=(), progress=done)
        await publisher.write(partial(files.write_decided, over))
        job.decided = over
        self._attempts -= len(decided.parts)
        self._count_active()
        self.counted.staged_bytes -= decided.bytes
        await publisher.write(partial(files.remove_parts, decided))

    # --- forgetting

    async def _look(self, files: JobFiles) -> None:
        """Drop what nobody decided of, forget names, each in its time."""
        settings = self._settings
        every_s = min(settings.jobs_kept_s_max / 4, settings.job_names_kept_s_max / 4, LOOK_S_MAX)
        while True:
            seen_us, over = self._clock.look(), [one for one in self._jobs.values() if _is_over(one)]
            names_us = int(settings.job_names_kept_s_max * 1e6)
            spare = len(over) - NAMES_MAX
            for place, job in enumerate(sorted(over, key=_decided_us)):
                if place < spare or seen_us - job.touched_us > names_us:
                    await self._forget(files, job)
            for job in [one for one in self._jobs.values() if one.decided is None]:
                late = seen_us - job.touched_us > settings.jobs_kept_s_max * 1e6
                if late and not job.deciding and self._jobs.get(job.name) is job:
                    await self._expire(files, job)
            await anyio.sleep(every_s)

    async def _expire(self, files: JobFiles, job: Job) -> None:
        del self._jobs[job.name]
        try:
            await self._drop(files, job, expired(job.name))
        except OSError as error:
            logger.warning("job %r is dropped later: %s", job.name, error)
        else:
            self.counted.expired += 1
            logger.warning("job %r was dropped: nobody decided of it in time", job.name)

    async def _forget(self, files: JobFiles, job: Job) -> None:
        try:
            await self._threads.run(partial(files.forget, job.name))
        except OSError as error:
            logger.warning("job %r is forgotten later: %s", job.name, error)
        else:
            del self._jobs[job.name]

    # --- helpers

    @property
    def _clock(self) -> LogClock:
        """The clock of the log: jobs age as its deltas do."""
        log = self._inside.log
        assert isinstance(log, DurableLog), "jobs are kept in a directory, as its log is"
        return log.clock

    @property
    def _spare_bytes(self) -> int:
        """What stays free on the disk."""
        log = self._inside.log
        return log.settings.free_bytes_min + log.reserve.missing if isinstance(log, DurableLog) else 0

    def _use_reserve(self, write: Callable[[], None]) -> None:
        """Write something small, on a full disk too. For a thread; raises OSError."""
        log = self._inside.log
        if isinstance(log, DurableLog):
            log.reserve.use(write)
        else:
            write()

    def _count_active(self) -> None:
        self.counted.active = sum(not _is_over(one) for one in self._jobs.values())

    def _recount(self, attempt: Attempt) -> None:
        job = self._jobs.get(attempt.head.job)
        if job is not None and job.attempts.get((attempt.part, attempt.attempt)) is attempt:
            self.counted.staged_bytes += attempt.bytes - attempt.charged
            attempt.charged = attempt.bytes

    def _all_attempts(self) -> list[Attempt]:
        return [attempt for job in self._jobs.values() for attempt in job.attempts.values()]


def _is_committed(job: Job) -> bool:
    return job.decided is not None and job.decided.state is JobState.COMMITTED


def _is_over(job: Job) -> bool:
    return job.decided is not None and not _is_committed(job)


def _decided_us(job: Job) -> int:
    return 0 if job.decided is None else job.decided.decided_us
