"""The rules for decisions about jobs, and all refusals that concern jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from delta_prop.server.job_files import CommittedPart, JobDecision, digest_content, digest_parts
from delta_prop.server.permissions import Unauthorized
from delta_prop_broker.segments.reserve import is_disk_full
from delta_prop_wire.errors import Refused
from delta_prop_wire.frames import Decide, JobState, StagedPart
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from delta_prop.partition.pipeline import Pipeline
    from delta_prop.server.job_table import Job
    from delta_prop.server.staging import Attempt

JOB_BYTES_MAX = 255
_RETRY_SOON_MS, _RETRY_MS, _RETRY_LATE_MS = 20, 1_000, 60_000


def make_decision(
    request: Decide, job: Job | None, owner: str, pipeline: Pipeline, now_us: int
) -> JobDecision | None:
    """Return the decision to store for a commit.

    Returns the earlier decision, if that had the same parts; None if there are no deltas to publish, which
    needs no job. Raises Refused (UNKNOWN_JOB, JOB_DECIDED, BAD_REQUEST, UNAUTHORIZED).
    """
    parts = request.parts
    if job is not None:
        check_owner(job, owner)
        if job.decision is not None:
            return _check_same_decision(job, job.decision, parts)
    elif any(part.deltas for part in parts):
        raise unknown_job(request.job)
    committed = _commit_parts(job, parts, owner, pipeline)
    if not committed:
        return None
    deltas = sum(part.deltas for part in committed)
    staged = [_with_staged_checksum(job, part) for part in parts]
    parts_digest, content_digest = digest_parts(parts), digest_content(staged)
    state = JobState.COMMITTED
    return JobDecision(
        request.job, owner, state, now_us, parts_digest, deltas, committed, content_digest=content_digest
    )


def check_owner(job: Job, owner: str) -> None:
    """Raise Unauthorized if the job belongs to another token."""
    if job.owner != owner:
        raise Unauthorized(f"job {job.name!r:.80} belongs to token {job.owner!r}")


def find_abortable(request: Decide, job: Job | None, owner: str) -> Job | None:
    """Return the job to abort; None if the named run has staged nothing here, which is no error.

    Raises Refused (UNKNOWN_JOB, JOB_DECIDED, UNAUTHORIZED).
    """
    if job is None:
        if request.run is None:
            raise unknown_job(request.job)
        return None
    check_owner(job, owner)
    if job.decision is not None:
        raise already_decided(job.name, job.decision.state)
    return job


def _with_staged_checksum(job: Job | None, part: StagedPart) -> StagedPart:
    attempt = None if job is None else job.attempts.get((part.part, part.attempt))
    position = None if attempt is None else attempt.synced_position
    return part if position is None else part._replace(checksum=position.content_checksum)


def _check_same_decision(job: Job, decision: JobDecision, parts: tuple[StagedPart, ...]) -> JobDecision:
    is_same = digest_parts(parts) == decision.parts_digest
    if is_same and all(part.checksum for part in parts if part.deltas):  # only their joint digest is stored
        is_same = digest_content(parts) == decision.content_digest
    if is_same:
        return decision
    raise already_decided(job.name, decision.state, "with other parts, or other deltas in them")


def _commit_parts(
    job: Job | None, parts: tuple[StagedPart, ...], owner: str, pipeline: Pipeline
) -> tuple[CommittedPart, ...]:
    committed, origins = [], dict[int, int]()
    for part, attempt in [(part, _find_attempt(job, part, parts)) for part in sorted(parts)]:
        if attempt is None or attempt.synced_position is None:
            continue
        origin = attempt.head.origin
        pipeline.origins.check_owner(origin, owner)
        if origin in origins:
            raise Refused(
                ErrorCode.BAD_REQUEST,
                f"parts {origins[origin]} and {part.part}: staged under one origin ({origin:016x}), or the "
                "same part: give each part a producer name of its own, JOB/PART",
            )
        origins[origin] = part.part
        watermark, position = pipeline.watermark(origin), attempt.synced_position
        committed.append(
            CommittedPart(
                part.part, part.attempt, part.deltas, position.byte_offset, position.checksum, watermark
            )
        )
    return tuple(committed)


def _find_attempt(job: Job | None, part: StagedPart, parts: tuple[StagedPart, ...]) -> Attempt | None:
    """Return the attempt that a part names; None if the part has no deltas.

    Raises Refused if the attempt here has other deltas than the decision says.
    """
    attempt = None if job is None else job.attempts.get((part.part, part.attempt))
    staged_deltas = 0 if attempt is None else attempt.stored_deltas
    if staged_deltas != part.deltas:
        raise Refused(
            ErrorCode.UNKNOWN_JOB,
            f"part {part.part} of job {_describe_parts(parts, part)}: attempt {part.attempt} has "
            f"{staged_deltas} deltas here, and the decision says {part.deltas}: nothing is decided: rerun "
            "the job, all of it against this service",
        )
    if attempt is None or attempt.synced_position is None:
        return attempt
    if part.checksum not in (0, attempt.synced_position.content_checksum):
        raise Refused(
            ErrorCode.UNKNOWN_JOB,
            f"part {part.part} of job {_describe_parts(parts, part)}: its checksum is "
            f"{attempt.synced_position.content_checksum} here, and the decision says {part.checksum}: "
            "nothing is decided: rerun the job",
        )
    return attempt


def _describe_parts(parts: tuple[StagedPart, ...], part: StagedPart) -> str:
    return f"with {len(parts)} parts" if len(parts) != 1 else f"whose only part is {part.part}"


# --- refusals


def jobs_unsupported() -> Refused:
    """Return the refusal of jobs by a service whose log is in memory."""
    return Refused(
        ErrorCode.BAD_REQUEST,
        "jobs are not supported by a log in memory: serve a directory (--data), or send without a job",
    )


def jobs_not_loaded() -> Refused:
    """Return the refusal while the server starts."""
    text = "the service has just started, and is still loading staged jobs: try again"
    return Refused(ErrorCode.RATE_LIMITED, text, retry_after_ms=_RETRY_MS // 4)


def jobs_staged(count: int) -> Refused:
    """Return the refusal to erase a vector while staged parts may have it."""
    text = f"{count} jobs are staged, and may have the vector: commit or abort them, then erase it"
    return Refused(ErrorCode.PROCESSING_FAILED, text, retry_after_ms=_RETRY_MS)


def unknown_job(job: str) -> Refused:
    """Return the refusal of a job that is not known."""
    return Refused(
        ErrorCode.UNKNOWN_JOB,
        f"job {job!r:.80}: not staged here: it was never begun, went to another service, or was dropped as "
        "it was not decided in time: see `delta-prop jobs list`, or rerun it",
    )


def job_aborted(job: str) -> Refused:
    """Return the refusal of a job that its driver has aborted."""
    text = f"job {job!r:.80}: aborted, and its staged deltas were dropped: rerun it"
    return Refused(ErrorCode.UNKNOWN_JOB, text)


def job_expired(job: str) -> Refused:
    """Return the refusal of a job that was not decided in time."""
    return Refused(
        ErrorCode.UNKNOWN_JOB,
        f"job {job!r:.80}: dropped, as it was not decided in time (job_decision_timeout_s): rerun it",
    )


def already_decided(job: str, state: JobState, difference: str = "") -> Refused:
    """Return the refusal of deltas or decisions for a decided job; `difference`: from its decision."""
    state_text = f"job {job!r:.80}: {state.value} already{', ' * bool(difference)}{difference}"
    text = f"{state_text}: do nothing if it is the same job, or give this one another name"
    return Refused(ErrorCode.JOB_DECIDED, text, details={"state": state.value})


def limit_reached(resource: str, current: int, allowed: int) -> Refused:
    """Return the refusal when as many jobs or attempts exist as are allowed."""
    text = f"{resource}: {current} of {allowed} are in use: have some decided, then try again"
    return Refused(ErrorCode.RATE_LIMITED, text, retry_after_ms=_RETRY_LATE_MS)


def staging_backlogged(current: int, allowed: int) -> Refused:
    """Return the refusal while deltas arrive faster than the disk writes them."""
    text = f"{current} of {allowed} bytes wait to be staged: send the batch again in a moment"
    return Refused(ErrorCode.QUEUE_FULL, text, retry_after_ms=_RETRY_SOON_MS, details={"depth": current})


def no_capacity(reason: str) -> Refused:
    """Return the refusal when the disk has no space for staged deltas, or their limit is reached."""
    return Refused(
        ErrorCode.LOG_FULL,
        f"no capacity to stage parts of jobs: {reason}: have jobs decided, or free disk space",
        retry_after_ms=_RETRY_MS,
    )


def write_failed(error: OSError) -> Refused:
    """Return the refusal after a disk failure."""
    if is_disk_full(error):
        return no_capacity(f"the disk is full ({error})")
    return Refused(
        ErrorCode.LOG_FAILED,
        f"the staged deltas could not be written: the disk fails with {error}: fix the disk, and resend",
        retry_after_ms=_RETRY_MS,
    )
