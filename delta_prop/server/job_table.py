"""The jobs that a server knows, their attempts and counts, and the capacity for them: nothing is written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from delta_prop.server.job_files import FoundPart, JobCorrupted, JobDecision, stem_of
from delta_prop.server.job_rules import (
    check_owner,
    jobs_not_loaded,
    jobs_staged,
    limit_reached,
    no_capacity,
    staging_backlogged,
)
from delta_prop.server.part_file import PartHead, path_of
from delta_prop.server.server_context import JobCounts
from delta_prop.server.staging import Attempt
from delta_prop_wire.errors import Refused
from delta_prop_wire.frames import JobState, JobStatus
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from delta_prop.partition.storage.storage import Storage

ATTEMPTS_MAX = 100_000
"""Maximum attempts of parts without a decision, and of committed parts that are not published yet."""


@dataclass(slots=True, eq=False)
class Job:
    """One job. `attempts`: by the numbers of part and attempt.

    `touched_us`: when its last batch was staged or it was decided, in the log's seen time.
    """

    name: str
    owner: str
    touched_us: int
    attempts: dict[tuple[int, int], Attempt] = field(default_factory=dict)
    decision: JobDecision | None = None
    is_deciding: bool = False

    @property
    def staged_deltas(self) -> int:
        """Number of deltas on disk without a decision, of all attempts."""
        return sum(attempt.stored_deltas for attempt in self.attempts.values())

    @property
    def bytes(self) -> int:
        """Bytes of its parts on disk."""
        if self.decision is not None:
            return self.decision.bytes
        return sum(attempt.bytes for attempt in self.attempts.values())

    @property
    def is_committed(self) -> bool:
        """True while it is to be published."""
        return self.decision is not None and self.decision.state is JobState.COMMITTED

    @property
    def is_finished(self) -> bool:
        """True once it is published or aborted."""
        return self.decision is not None and not self.is_committed

    @property
    def decided_us(self) -> int:
        """When it was decided, in the log's seen time; 0 before."""
        return 0 if self.decision is None else self.decision.decided_us

    def status(self) -> JobStatus:
        """Return its status for clients."""
        if self.decision is None:
            return JobStatus(JobState.STAGING, self.staged_deltas)
        return self.decision.status()


class JobTable:
    """All jobs, by name. `is_loaded`: True once the jobs on disk are known."""

    def __init__(self) -> None:
        self.jobs: dict[str, Job] = {}
        self.counts = JobCounts()
        self.attempt_count = 0
        self.is_loaded = False
        self._corrupted: Mapping[str, JobCorrupted] = {}  # decisions, by the stem of their files

    def load(
        self,
        decisions: Iterable[JobDecision],
        parts: Iterable[FoundPart],
        corrupted: Mapping[str, JobCorrupted],
        seen_us: int,
    ) -> None:
        """Add the jobs found on disk. `seen_us`: the log's seen time."""
        self._corrupted = corrupted
        for decision in decisions:
            self.jobs[decision.job] = Job(decision.job, decision.owner, seen_us, decision=decision)
            self.counts.staged_bytes += decision.bytes
            self.attempt_count += len(decision.parts)
        for part in parts:
            head = part.head
            begun_us = min(head.begun_us, seen_us)  # a crash may have set seen time back
            job = self.jobs.setdefault(head.job, Job(head.job, head.owner, begun_us))
            job.touched_us = max(job.touched_us, begun_us)
            path = path_of(stem_of(head.job), head.part, head.attempt)
            attempt = job.attempts[head.part, head.attempt] = Attempt(path, head, part.end)
            self.attempt_count += 1
            self.count_staged_bytes(attempt)
        self.count_active()
        self.is_loaded = True

    def find(self, name: str, owner: str) -> Job | None:
        """Return a job; None if it is unknown. Raises Refused."""
        if not self.is_loaded:
            raise jobs_not_loaded()
        if (corrupted := self._corrupted.get(stem_of(name))) is not None:
            raise Refused(ErrorCode.PROCESSING_FAILED, str(corrupted))
        job = self.jobs.get(name)
        if job is not None:
            check_owner(job, owner)
        return job

    def check_all_published(self) -> None:
        """Check that no file has a vector of a job. Raises Refused."""
        if not self.is_loaded:
            raise jobs_not_loaded()
        for corrupted in self._corrupted.values():
            raise Refused(ErrorCode.PROCESSING_FAILED, str(corrupted))
        if self.counts.active:
            raise jobs_staged(self.counts.active)

    def add(self, job: Job) -> None:
        """Add a new job."""
        self.jobs[job.name] = job
        self.count_active()

    def check_attempts(self) -> None:
        """Check that one more attempt is within the limit. Raises Refused."""
        if self.attempt_count >= ATTEMPTS_MAX:
            raise limit_reached("attempts of parts", self.attempt_count, ATTEMPTS_MAX)

    def add_attempt(self, job: Job, head: PartHead) -> Attempt:
        """Add a new attempt, without deltas, to a job."""
        path = path_of(stem_of(job.name), head.part, head.attempt)
        attempt = job.attempts[head.part, head.attempt] = Attempt(path, head)
        self.attempt_count += 1
        return attempt

    def forget_attempt(self, attempt: Attempt) -> None:
        """Forget an attempt, and its job if nothing is left of it."""
        job = self.jobs[attempt.head.job]
        if job.attempts.pop(attempt.key, None) is not None:
            self.attempt_count -= 1
        if not job.attempts and job.decision is None:
            del self.jobs[job.name]
            self.count_active()

    def count_active(self) -> None:
        """Count the jobs that are staged or being published."""
        self.counts.active = sum(not job.is_finished for job in self.jobs.values())

    def count_staged_bytes(self, attempt: Attempt) -> None:
        """Count what was staged for an attempt since it was counted last, unless it was dropped."""
        job = self.jobs.get(attempt.head.job)
        if job is not None and job.attempts.get(attempt.key) is attempt:
            self.counts.staged_bytes += attempt.bytes - attempt.counted_bytes
            attempt.counted_bytes = attempt.bytes

    def all_attempts(self) -> list[Attempt]:
        """Return the attempts of all jobs."""
        return [attempt for job in self.jobs.values() for attempt in job.attempts.values()]


UNWRITTEN_BYTES_MAX = 64 * 1024 * 1024
"""Maximum bytes that may wait for the disk, over all connections."""


class StagingCapacity:
    """The capacity of one server. `must_check_disk`: True if the free bytes are to be asked for again."""

    def __init__(self, storage: Storage | None, *, staged_bytes_max: int) -> None:
        self.must_check_disk = False
        self.unwritten_bytes = 0
        """Bytes that wait for the disk."""
        self._storage = storage
        self._staged_bytes_max = staged_bytes_max
        self._free_bytes = 0  # on the disk, when last checked

    def check(self, size: int, staged_bytes: int) -> None:
        """Check that `size` more bytes may be staged, besides `staged_bytes`. Raises Refused.

        If the disk seems too full, `must_check_disk` is set.
        """
        bound, unwritten = self._staged_bytes_max, self.unwritten_bytes
        if staged_bytes + size > bound:
            raise no_capacity(f"{staged_bytes} bytes of {bound} (staged_bytes_max) are staged")
        if unwritten and unwritten + size > UNWRITTEN_BYTES_MAX:
            raise staging_backlogged(unwritten, UNWRITTEN_BYTES_MAX)
        if unwritten + size > self._free_bytes - self._spare_bytes:
            self.must_check_disk = True
            raise no_capacity(f"{self._free_bytes} bytes are free, {self._spare_bytes} of them reserved")

    def note_free(self, free_bytes: int) -> None:
        """Note the free bytes of the disk."""
        self._free_bytes = free_bytes

    def note_written(self, written_bytes: int, free_bytes: int | None) -> None:
        """Note that `written_bytes` wait no more. `free_bytes`: of the disk; None if they are unknown."""
        self.unwritten_bytes -= written_bytes
        self._free_bytes = self._free_bytes - written_bytes if free_bytes is None else free_bytes

    @property
    def _spare_bytes(self) -> int:
        """Bytes that must stay free on the disk."""
        storage = self._storage
        return 0 if storage is None else storage.log.settings.free_bytes_min + storage.log.reserve.missing
