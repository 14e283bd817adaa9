"""What may be decided of a job, and every refusal that has to do with one, in words.

Pure: nothing is written here, and nothing changes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from delta_prop.server.grants import Unauthorized
from delta_prop.server.job_files import Decided, KeptPart, content_of, said_of
from delta_prop_broker.log.files.reserve import is_no_room
from delta_prop_wire.errors import Refused
from delta_prop_wire.frames import JobState
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from delta_prop.pipeline import Chain
    from delta_prop.server.jobs import Job
    from delta_prop_wire.frames import Decide, StagedPart

JOB_BYTES_MAX = 255
_SOON_MS, _AGAIN_MS, _LATER_MS = 20, 1_000, 60_000


def judged(request: Decide, job: Job | None, owner: str, chain: Chain, now_us: int) -> Decided | None:
    """What a commit is to write down; the decision that was made before, where it is the same; None where
    there is nothing to publish, which stands for no job.

    Raises Refused (UNKNOWN_JOB, JOB_DECIDED, BAD_REQUEST, UNAUTHORIZED).
    """
    parts = request.parts
    if job is not None:
        check_owner(job, owner)
        if job.decided is not None:
            return _decided_again(job, job.decided, parts)
    elif any(part.deltas for part in parts):
        raise none_here(request.job)
    kept = _kept(job, parts, owner, chain)
    if not kept:
        return None
    deltas = sum(part.deltas for part in kept)
    there = [_as_staged(job, part) for part in parts]
    content, said = content_of(parts), said_of(there)
    return Decided(request.job, owner, JobState.COMMITTED, now_us, content, deltas, kept, said=said)


def check_owner(job: Job, owner: str) -> None:
    """Raise Unauthorized where the job is somebody else's."""
    if job.owner != owner:
        raise Unauthorized(f"job {job.name!r:.80} is that of token {job.owner!r}")


def abortable(request: Decide, job: Job | None, owner: str) -> Job | None:
    """The job of which something is dropped; None where a run of it has nothing here, which is no fault.

    Raises Refused (UNKNOWN_JOB, JOB_DECIDED, UNAUTHORIZED).
    """
    if job is None:
        if request.run is None:
            raise none_here(request.job)
        return None
    check_owner(job, owner)
    if job.decided is not None:
        raise decided_before(job.name, job.decided.state)
    return job


def _as_staged(job: Job | None, part: StagedPart) -> StagedPart:
    attempt = None if job is None else job.attempts.get((part.part, part.attempt))
    mark = None if attempt is None else attempt.mark
    return part if mark is None else part._replace(checksum=mark.content)


def _decided_again(job: Job, decided: Decided, parts: tuple[StagedPart, ...]) -> Decided:
    same = content_of(parts) == decided.content
    if same and all(part.checksum for part in parts if part.deltas):  # one digest of all is kept
        same = said_of(parts) == decided.said
    if same:
        return decided
    raise decided_before(job.name, decided.state, "with other parts, or other deltas in them")


def _kept(job: Job | None, parts: tuple[StagedPart, ...], owner: str, chain: Chain) -> tuple[KeptPart, ...]:
    kept, origins = [], dict[int, int]()
    for part in sorted(parts):
        attempt = None if job is None else job.attempts.get((part.part, part.attempt))
        there = 0 if attempt is None else attempt.kept
        if there != part.deltas:
            raise Refused(
                ErrorCode.UNKNOWN_JOB,
                f"part {part.part} of job {_named(parts, part)} has {there} deltas here in attempt "
                f"{part.attempt}, and {part.deltas} are to be committed: nothing is decided; run the job "
                "again, all of it against this service",
            )
        if attempt is None or attempt.mark is None:
            continue
        if part.checksum not in (0, attempt.mark.content):
            raise Refused(
                ErrorCode.UNKNOWN_JOB,
                f"part {part.part} of job {_named(parts, part)} says {attempt.mark.content} here, and "
                f"{part.checksum} is to be committed: nothing is decided; run the job again",
            )
        origin = attempt.head.origin
        chain.origins.check_owner(origin, owner)
        if origin in origins:
            raise Refused(
                ErrorCode.BAD_REQUEST,
                f"parts {origins[origin]} and {part.part} were staged under one origin ({origin:016x}), or "
                "one part is named twice: give each part a producer name of its own, JOB/PART",
            )
        origins[origin] = part.part
        behind, mark = chain.watermark(origin), attempt.mark
        kept.append(KeptPart(part.part, part.attempt, part.deltas, mark.position, mark.checksum, behind))
    return tuple(kept)


def _named(parts: tuple[StagedPart, ...], part: StagedPart) -> str:
    return f"with {len(parts)} parts" if len(parts) != 1 else f"whose only part is {part.part}"


# --- refusals


def kept_nowhere() -> Refused:
    """Jobs beside a log in memory."""
    return Refused(
        ErrorCode.BAD_REQUEST,
        "the log of this service is in memory, so it keeps no jobs: serve a directory (--data), or send "
        "without a job",
    )


def not_read_yet() -> Refused:
    """The server has just started."""
    told = "the service has just started, and reads what is staged for jobs: try again"
    return Refused(ErrorCode.RATE_LIMITED, told, retry_after_ms=_AGAIN_MS // 4)


def none_here(job: str) -> Refused:
    """Nothing is known of this job."""
    return Refused(
        ErrorCode.UNKNOWN_JOB,
        f"no job {job!r:.80} is staged here: it was never begun, was sent to another service, or was dropped "
        "because nobody decided of it in time: see `delta-prop jobs list`, or run it again",
    )


def aborted(job: str) -> Refused:
    """What is staged was dropped by its driver."""
    told = f"job {job!r:.80} was aborted, and what was staged of it is gone: run it again"
    return Refused(ErrorCode.UNKNOWN_JOB, told)


def expired(job: str) -> Refused:
    """What is staged was dropped."""
    return Refused(
        ErrorCode.UNKNOWN_JOB,
        f"job {job!r:.80} was dropped, as nobody decided of it in time (jobs_kept_s_max): run it again",
    )


def decided_before(job: str, state: JobState, otherwise: str = "") -> Refused:
    """The job is decided."""
    how = f"job {job!r:.80} is {state.value} already{', ' * bool(otherwise)}{otherwise}"
    told = f"{how}: if it is the same job, nothing is left to do; give another one another name"
    return Refused(ErrorCode.JOB_DECIDED, told, details={"state": state.value})


def too_many(what: str, there: int, allowed: int) -> Refused:
    """A bound of counts."""
    told = f"{there} {what} are kept, allowed are {allowed}: have some decided, then try again"
    return Refused(ErrorCode.RATE_LIMITED, told, retry_after_ms=_LATER_MS)


def too_fast(there: int, allowed: int) -> Refused:
    """What is staged comes faster than the disk takes it."""
    told = f"{there} bytes wait to be kept aside, allowed are {allowed}: send again in a moment"
    return Refused(ErrorCode.QUEUE_FULL, told, retry_after_ms=_SOON_MS, details={"depth": there})


def no_room(told: str) -> Refused:
    """A bound of bytes."""
    return Refused(
        ErrorCode.LOG_FULL,
        f"no room to keep parts of jobs aside: {told}; have jobs decided, or make room on the disk",
        retry_after_ms=_AGAIN_MS,
    )


def unwritten(error: OSError) -> Refused:
    """The disk failed for this."""
    if is_no_room(error):
        return no_room(f"the disk is full ({error})")
    return Refused(
        ErrorCode.LOG_FAILED,
        f"what is to be kept for a job could not be written, as the disk fails with {error}: see to that, "
        "and send again",
        retry_after_ms=_AGAIN_MS,
    )
