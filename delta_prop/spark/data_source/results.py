"""Results of writes as values, and their messages.

Pure, and quick to load: they travel from the tasks to the driver.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from delta_prop_wire.frames import JobStatus, RefusedRow


ROWS_REPORTED_MAX = 10
"""Maximum number of a job's refused rows that are reported one by one."""
_JOB_FIX = "write these corrected under another producer (option onRefused=skip keeps the job from failing)"
_STREAM_FIX = (
    "write these corrected under another producer (only with option onRefused=skip the stream goes on "
    "without them)"
)


class RowsRefused(Exception):
    """The service refused rows, and the options say that this fails the job."""


class StagedRows(NamedTuple):
    """The staged rows of a part in one partition: their number, and the checksum of their content.

    `was_decided`: the job had been committed there before, so nothing was sent.
    """

    deltas: int
    checksum: int
    was_decided: bool = False


@dataclass
class PartResult:
    """Result of a part.

    `refused`: how many of its rows were refused; `refused_rows`: the first of them. `processed_before`: rows
    whose counters had been processed before, so that they have no further effect. `waited_s`: how long it
    waited for the service.
    `staged`: the staged rows, by partition.
    """

    deltas: int = 0
    refused: int = 0
    refused_rows: list[RefusedRow] = field(default_factory=list)
    waited_s: float = 0.0
    staged: dict[int, StagedRows] = field(default_factory=dict)
    processed_before: int = 0

    @property
    def was_decided(self) -> bool:
        """True if its job had been committed before in one of its partitions."""
        return any(one.was_decided for one in self.staged.values())


def format_written(subject: str, parts: Iterable[PartResult], took_s: float) -> str:
    """Return one line about all parts of a job, or of a micro-batch."""
    results = list(parts)
    deltas, refused = sum(one.deltas for one in results), sum(one.refused for one in results)
    waited_s = sum(one.waited_s for one in results)
    line = f"{subject}: {deltas:,} deltas of {len(results)} parts in {took_s:.1f} s"
    if refused:
        line += f", {refused:,} of them refused"
    if before := sum(one.processed_before for one in results):
        line += f", {before:,} of them written before under this name"
    return f"{line}; tasks waited {waited_s:.1f} s for the service{_format_decided(results)}"


def format_job_refused(job: str, status: JobStatus) -> str:
    """Return the message for refused deltas of a published job."""
    subject = f"job {job}: {status.refused:,} of {status.deltas:,} deltas were refused when it was published"
    return _format_refused(subject, status.refused, status.refused_rows, _JOB_FIX)


def format_direct_refused(job: str, parts: Sequence[PartResult]) -> str:
    """Return the message for refused rows of a job that is written directly."""
    return _format_parts_refused(f"job {job}, written directly", parts, _JOB_FIX)


def format_stream_refused(batch: int, parts: Sequence[PartResult]) -> str:
    """Return the message for refused rows of a micro-batch, which a restarted stream retries."""
    return _format_parts_refused(f"micro-batch {batch}", parts, _STREAM_FIX)


def _format_parts_refused(subject: str, parts: Sequence[PartResult], fix: str) -> str:
    refused, deltas = sum(one.refused for one in parts), sum(one.deltas for one in parts)
    rows = [row for one in parts for row in one.refused_rows][:ROWS_REPORTED_MAX]
    return _format_refused(f"{subject}: {refused:,} of {deltas:,} deltas were refused", refused, rows, fix)


def _format_refused(subject: str, refused: int, rows: Sequence[RefusedRow], fix: str) -> str:
    more = refused - len(rows)
    listed = "; ".join(map(str, rows)) + (f"; and {more:,} more" if more > 0 else "")
    return f"{subject} and have no effect, unlike the others: {fix}: {listed}"


def format_partly_committed(job: str, committed: Sequence[int], count: int) -> str:
    """Return the message for a job that is committed in some partitions when its next decision failed."""
    numbers = ", ".join(map(str, committed))
    return (
        f"job {job} is committed in {len(committed)} of {count} partitions, {numbers:.100}: run it again "
        "under its name with the same rows, so that it is committed in all"
    )


def format_job_waits(job: str, status: JobStatus, waited_s: float) -> str:
    """Return the message for a job that is not published in time."""
    done = status.published + status.duplicates + status.refused
    return (
        f"job {job} is committed, but after {waited_s:g} s (waitTimeoutSeconds) only {done:,} of "
        f"{status.deltas:,} deltas are published: the service publishes the rest by itself; see "
        f"`delta-prop jobs show {job}`"
    )


def _format_decided(parts: list[PartResult]) -> str:
    before = sum(one.was_decided for one in parts)
    return f"; {before} parts had been committed before, and were not sent" if before else ""
