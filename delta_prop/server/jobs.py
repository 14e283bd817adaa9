"""The jobs of one server: their staged parts, the decisions about them, and their publication.

One task writes: batches staged while the disk is busy are written together, and acknowledged when synced;
a decision is written after everything that was staged before it. Another task publishes committed jobs.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import anyio

from delta_prop.calls.receipt import Receipt
from delta_prop.platform.tick_callbacks import Wakeup
from delta_prop.server.job_files import JobFiles, job_to_json
from delta_prop.server.job_publishing import JobPublication, RunningJob
from delta_prop.server.job_rules import (
    JOB_BYTES_MAX,
    already_decided,
    find_abortable,
    job_aborted,
    job_expired,
    jobs_unsupported,
    limit_reached,
    make_decision,
    unknown_job,
    write_failed,
)
from delta_prop.server.job_table import Job, JobTable, StagingCapacity
from delta_prop.server.part_file import PartHead, close_files, write_parts
from delta_prop.server.server_context import JobCounts
from delta_prop.server.staging import Attempt
from delta_prop_wire.batch import Batch
from delta_prop_wire.bounds import check_name
from delta_prop_wire.delta import Source
from delta_prop_wire.errors import InvalidDelta, Refused
from delta_prop_wire.frames import Decide, Decision, JobPart, JobState, JobStatus, job_run_of
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from delta_prop.partition.partition import Partition
    from delta_prop.platform.ports import Threads
    from delta_prop.server.settings import ServerSettings
    from delta_prop_broker.log_clock import LogClock

    OutcomeCallback = Callable[[JobStatus | Refused], None]

logger = logging.getLogger("delta_prop.server")

FEATURE = "jobs"
NAMES_MAX = 10_000
"""Maximum finished jobs whose names are remembered; beyond it, the oldest is forgotten early."""
LISTED_ROWS_BYTES_MAX, ROW_OVERHEAD_BYTES = 1024 * 1024, 100
"""Maximum bytes of refused rows in a list of all jobs; bytes that a row counts besides its id and reason."""
POLL_MAX_S = 60.0
"""Maximum interval between two searches for expired jobs."""
RETRY_S = 5.0
"""Wait after a disk failure."""


class _DecideRequest(NamedTuple):
    request: Decide
    owner: str
    on_outcome: OutcomeCallback


class Jobs:
    """All jobs of one server.

    *Resources*: `run` owns the tasks; it ends by cancellation. *Errors*: while the disk fails, staging and
    decisions are refused.
    """

    def __init__(self, partition: Partition, settings: ServerSettings) -> None:
        self._partition = partition
        self._settings = settings
        self._files = None if partition.disk is None else JobFiles(partition.disk)
        self._threads = partition.world.new_threads()
        self._table = JobTable()
        self._capacity = StagingCapacity(partition.storage, staged_bytes_max=settings.staged_bytes_max)
        self._dirty: dict[Attempt, None] = {}  # with batches to write, or a file to close
        self._decide_requests: deque[_DecideRequest] = deque()
        self._wakeup, self._publish_wakeup = Wakeup(), Wakeup()

    @property
    def counts(self) -> JobCounts:
        """The counts of jobs."""
        return self._table.counts

    def _find_job(self, name: str, owner: str) -> Job | None:
        """Return a job; None if it is unknown. Raises Refused."""
        if self._files is None:
            raise jobs_unsupported()
        return self._table.find(name, owner)

    def _start_job(self, name: str, owner: str) -> Job:
        try:
            check_name("job", name, JOB_BYTES_MAX)
        except InvalidDelta as error:
            raise Refused(ErrorCode.BAD_REQUEST, error.message) from None
        if self.counts.active >= self._settings.jobs_max:
            raise limit_reached("jobs", self.counts.active, self._settings.jobs_max)
        job = Job(name, owner, self._clock.poll())
        self._table.add(job)
        return job

    @property
    def features(self) -> tuple[str, ...]:
        """The features that a welcome names."""
        return () if self._files is None else (FEATURE,)

    # --- for connections

    def open_attempt(self, part: JobPart, source: Source, owner: str) -> Attempt:
        """Return the attempt that a connection stages. Raises Refused."""
        if source is Source.REPLICA:
            raise Refused(
                ErrorCode.BAD_REQUEST, "source replica: it cannot be staged: forward it without a job"
            )
        job = self._find_job(part.job, owner)
        if job is not None and job.decision is not None:
            raise already_decided(job.name, job.decision.state)
        attempt = None if job is None else job.attempts.get((part.part, part.attempt))
        if attempt is None:
            self._table.check_attempts()
            job = job or self._start_job(part.job, owner)
            head = PartHead(job.name, part.part, part.attempt, 0, int(source), owner, self._clock.poll())
            attempt = self._table.add_attempt(job, head)
        return attempt

    def stage_batch(self, attempt: Attempt, batch: Batch, receipt: Receipt) -> None:
        """Queue a batch of an attempt for the disk. Raises Refused."""
        try:
            self._capacity.check(batch.size, self.counts.staged_bytes)
        except Refused:
            if self._capacity.must_check_disk:
                self._wakeup.notify()
            raise
        job = self._table.jobs[attempt.head.job]
        job.touched_us = self._clock.poll()
        attempt.add(batch, receipt)
        self._capacity.unwritten_bytes += batch.size
        self._table.count_staged_bytes(attempt)
        self._dirty[attempt] = None
        self._wakeup.notify()

    def close_attempt(self, attempt: Attempt) -> None:
        """Note that the connection that staged an attempt is closed."""
        job = self._table.jobs.get(attempt.head.job)
        if (
            job is not None
            and attempt.holder is None
            and not attempt.taken_counter
            and attempt.refusal is None
        ):  # an attempt without deltas is forgotten
            self._table.forget_attempt(attempt)
        self._dirty[attempt] = None  # so that the writer closes its file
        self._wakeup.notify()

    def decide(self, request: Decide, owner: str, on_outcome: OutcomeCallback) -> None:
        """Decide a job, or query it; `on_outcome` is called once, now or later. Raises Refused."""
        job = self._find_job(request.job, owner)
        if request.decision is Decision.QUERY:
            if job is None:
                raise unknown_job(request.job)
            on_outcome(job.status())
            return
        self._decide_requests.append(_DecideRequest(request, owner, on_outcome))
        self._wakeup.notify()

    def to_json(self) -> list[dict[str, Any]]:
        """Return each job as JSON; only the latest jobs have their refused rows, up to a limit of bytes."""
        rows, bytes_left = [], LISTED_ROWS_BYTES_MAX
        for job in reversed(self._table.jobs.values()):
            status = job.status()
            bytes_left -= sum(
                ROW_OVERHEAD_BYTES + len(row.vector_id) + len(row.reason) for row in status.refused_rows
            )
            if bytes_left < 0:
                status = replace(status, refused_rows=())
            rows.append(job_to_json(job.name, job.owner, status, job.bytes))
        return rows[::-1]

    # --- erasing a vector

    def check_erasable(self) -> None:
        """Check that no staged part may have a vector that is to be erased. Raises Refused."""
        if self._files is not None:
            self._table.check_all_published()

    async def forget_vector(self, vector_id: str) -> None:
        """Remove a vector's id from the refused rows of finished jobs, durably. Raises Refused, OSError."""
        self.check_erasable()
        files = self._files
        if files is None:
            return
        for job in list(self._table.jobs.values()):
            decision = job.decision
            if decision is None or self._table.jobs.get(job.name) is not job:
                continue
            progress = decision.progress.without_vector(vector_id)
            if progress is not decision.progress:
                erased = replace(decision, progress=progress)
                await self._threads.run(
                    partial(self._partition.log.write_small, partial(files.write_decision, erased))
                )
                job.decision = erased
        decisions = [job.decision for job in self._table.jobs.values() if job.decision is not None]
        await self._threads.run(partial(files.remove_unneeded, decisions))

    # --- running

    async def run(self) -> None:
        """Stage, publish and expire jobs until cancelled."""
        files = self._files
        if files is None:
            return
        try:
            await self._load(files)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._run_writer, files)
                tasks.start_soon(self._run_publisher, files)
                tasks.start_soon(self._run_expiry, files)
        finally:
            with anyio.CancelScope(shield=True):
                await self._threads.run(partial(close_files, self._table.all_attempts()))

    async def _load(self, files: JobFiles) -> None:
        while True:
            try:
                decisions, corrupted = await self._threads.run(files.read_decisions)
                parts = await self._threads.run(partial(files.read_staged, decisions, corrupted))
                self._capacity.note_free(await self._threads.run(files.disk.free_bytes))
                break
            except OSError as error:
                logger.warning("staged parts of jobs cannot be read: %s: retrying", error)
                await anyio.sleep(RETRY_S)
        for job_error in corrupted.values():
            logger.error("%s", job_error)
        self._table.load(decisions, parts, corrupted, self._clock.seen_us)
        self._publish_wakeup.notify()

    # --- writing

    async def _run_writer(self, files: JobFiles) -> None:
        while True:
            await self._wakeup.wait()
            while self._dirty or self._decide_requests or self._capacity.must_check_disk:
                await self._write(files)
                if self._decide_requests:
                    await self._decide(files, self._decide_requests.popleft())

    async def _write(self, files: JobFiles) -> None:
        dirty, self._dirty, self._capacity.must_check_disk = list(self._dirty), {}, False
        work = [(attempt, attempt.take_pending()) for attempt in dirty]
        taken_bytes = self._capacity.unwritten_bytes
        written = await self._threads.run(partial(write_parts, files, work))
        self._capacity.note_written(taken_bytes, written.free_bytes)
        with self._partition.tick_callbacks:
            for (attempt, batches), outcome in zip(work, written.outcomes, strict=True):
                if isinstance(outcome, OSError):
                    attempt.on_failed(batches, write_failed(outcome))
                elif batches:
                    attempt.on_written(batches, outcome)
                    self.counts.staged += sum(batch.count for batch, _ in batches)
                self._table.count_staged_bytes(attempt)

    async def _decide(self, files: JobFiles, pending: _DecideRequest) -> None:
        try:
            if pending.request.decision is Decision.ABORT:
                pending.on_outcome(await self._abort(files, pending))
            else:
                pending.on_outcome(await self._commit(files, pending))
        except OSError as error:
            pending.on_outcome(write_failed(error))
        except Refused as refused:
            pending.on_outcome(refused)

    async def _commit(self, files: JobFiles, pending: _DecideRequest) -> JobStatus:
        request, job = pending.request, self._table.jobs.get(pending.request.job)
        decision = make_decision(request, job, pending.owner, self._partition.pipeline, self._clock.read())
        if job is None or decision is None:  # no deltas: the name stays free for a job that has some
            return JobStatus(JobState.PUBLISHED)
        if job.decision is decision:
            return job.status()
        job.is_deciding = True  # so that it does not expire meanwhile
        try:
            await self._threads.run(
                partial(self._partition.log.write_small, partial(files.write_decision, decision))
            )
            job.decision, job.touched_us = decision, self._clock.seen_us
        finally:
            job.is_deciding = False
        self._table.count_active()
        committed = {(part.part, part.attempt) for part in decision.parts}
        try:
            await self._drop(files, job, already_decided(job.name, decision.state), committed)
        except OSError as error:
            logger.warning("other attempts of job %r will be removed at the next start: %s", job.name, error)
        self._publish_wakeup.notify()
        return job.status()

    async def _abort(self, files: JobFiles, pending: _DecideRequest) -> JobStatus:
        request = pending.request
        job = find_abortable(request, self._table.jobs.get(request.job), pending.owner)
        if job is not None:
            dropped = {key for key in job.attempts if request.run in (None, job_run_of(key[1]))}
            if len(dropped) == len(job.attempts):
                del self._table.jobs[job.name]  # its name may be staged again at once
            await self._drop(files, job, job_aborted(job.name), others=job.attempts.keys() - dropped)
        return JobStatus(JobState.ABORTED)

    async def _drop(
        self,
        files: JobFiles,
        job: Job,
        refusal: Refused,
        committed: Iterable[tuple[int, int]] = (),
        others: Iterable[tuple[int, int]] = (),
    ) -> None:
        """Close the attempts of a job, except for `others`, and remove their files.

        The files of `committed` attempts stay until they are published. Raises OSError if files could not be
        removed.
        """
        retained = {key: job.attempts[key] for key in others}
        attempts = {key: attempt for key, attempt in job.attempts.items() if key not in retained}
        job.attempts = retained
        for attempt in attempts.values():
            attempt.close(refusal)
        removed = [attempt for key, attempt in attempts.items() if key not in committed]
        paths = [attempt.path for attempt in removed]
        drop = partial(files.remove, paths) if committed else partial(files.drop, job.name, paths)

        def remove() -> None:
            close_files(attempts.values())
            drop()

        try:
            await self._threads.run(remove)
        except OSError:
            attempts_left = self._table.jobs.setdefault(job.name, job).attempts
            removed_by_key = {attempt.key: attempt for attempt in removed}
            attempts_left |= removed_by_key | attempts_left  # their files may still exist
            raise
        finally:
            self._table.count_active()
        self._table.attempt_count -= len(removed)
        self.counts.staged_bytes -= sum(attempt.counted_bytes for attempt in removed)

    # --- publishing

    async def _run_publisher(self, files: JobFiles) -> None:
        threads = self._partition.world.new_threads()
        postponed: set[str] = set()
        while True:
            committed = [job for job in self._table.jobs.values() if job.is_committed]
            ready = [job for job in committed if job.name not in postponed]
            if not committed:
                await self._publish_wakeup.wait()
            elif not ready:  # the disk failed for each of them
                await anyio.sleep(RETRY_S)
                postponed.clear()
            else:
                job = min(ready, key=attrgetter("decided_us"))
                try:
                    await self._publish_one(threads, files, job)
                except OSError as error:
                    logger.warning(
                        "job %r cannot be published: the disk fails: %s: retrying", job.name, error
                    )
                    postponed.add(job.name)
                except Exception:  # a defect here must not end the server
                    logger.exception("publishing job %r failed: retrying", job.name)
                    postponed.add(job.name)

    async def _publish_one(self, threads: Threads, files: JobFiles, job: Job) -> None:
        decision = job.decision
        assert decision is not None
        running = RunningJob(job, decision, self.counts)
        publication = JobPublication(self._partition, files, threads, running)
        await publication.publish()
        published = replace(decision, state=JobState.PUBLISHED, parts=(), progress=running.progress)
        await publication.write(partial(files.write_decision, published))
        job.decision = published
        self._table.attempt_count -= len(decision.parts)
        self._table.count_active()
        self.counts.staged_bytes -= decision.bytes
        await publication.write(partial(files.remove_parts, decision))

    # --- expiry

    async def _run_expiry(self, files: JobFiles) -> None:
        """Drop the jobs that were not decided in time, and forget the names of old jobs."""
        settings = self._settings
        interval_s = min(settings.job_decision_timeout_s / 4, settings.job_name_retention_s / 4, POLL_MAX_S)
        while True:
            seen_us, finished = (
                self._clock.poll(),
                [job for job in self._table.jobs.values() if job.is_finished],
            )
            retention_us = int(settings.job_name_retention_s * 1e6)
            excess = len(finished) - NAMES_MAX
            for index, job in enumerate(sorted(finished, key=attrgetter("decided_us"))):
                if index < excess or seen_us - job.touched_us > retention_us:
                    await self._forget(files, job)
            for job in [job for job in self._table.jobs.values() if job.decision is None]:
                expired = seen_us - job.touched_us > settings.job_decision_timeout_s * 1e6
                if expired and not job.is_deciding and self._table.jobs.get(job.name) is job:
                    await self._expire(files, job)
            await anyio.sleep(interval_s)

    async def _expire(self, files: JobFiles, job: Job) -> None:
        del self._table.jobs[job.name]
        try:
            await self._drop(files, job, job_expired(job.name))
        except OSError as error:
            logger.warning("job %r will be dropped later: %s", job.name, error)
        else:
            self.counts.expired += 1
            logger.warning("job %r was dropped: it was not decided in time", job.name)

    async def _forget(self, files: JobFiles, job: Job) -> None:
        try:
            await self._threads.run(partial(files.forget, job.name))
        except OSError as error:
            logger.warning("the name of job %r will be forgotten later: %s", job.name, error)
        else:
            del self._table.jobs[job.name]

    # --- helpers

    @property
    def _clock(self) -> LogClock:
        """The clock of the log: jobs age by it, as the log's deltas do."""
        storage = self._partition.storage
        assert storage is not None, "jobs need a directory, so the log is durable"
        return storage.log.clock
