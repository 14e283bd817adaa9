"""What becomes of what is written, as values, and what is said of it.

Pure, and quick to load: it travels from the tasks to the driver.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from delta_prop_wire.frames import JobStatus, RefusedRow


ROWS_TOLD_MAX = 10
"""Refused rows of a job that are told one by one."""
_ANOTHER = "mend these under another producer (with option refused=allow the job does not fail for it)"
_ALLOW = (
    "mend these under another producer (with option refused=allow the stream goes on without them, and stops "
    "here else)"
)


class RowsRefused(Exception):
    """The service does not take some rows, and the options say that this fails the job."""


@dataclass
class Sent:
    """What became of a part: `refused` of its rows have no effect, `refused_rows` are the first of them.

    `decided`: its job had been committed before, so nothing was sent. `before`: rows whose numbers had been
    dealt with before, so that they have no effect again. `waited_s`: for the service.
    `checksum`: of what the rows say, where they are kept aside.
    """

    deltas: int = 0
    refused: int = 0
    refused_rows: list[RefusedRow] = field(default_factory=list)
    decided: bool = False
    waited_s: float = 0.0
    checksum: int = 0
    before: int = 0


def written_text(what: str, parts: Iterable[Sent], took_s: float) -> str:
    """One line about all parts of a job, or of a micro-batch."""
    known = list(parts)
    deltas, refused = sum(one.deltas for one in known), sum(one.refused for one in known)
    waited_s = sum(one.waited_s for one in known)
    line = f"{what}: {deltas:,} deltas of {len(known)} parts in {took_s:.1f} s"
    if refused:
        line += f", {refused:,} of them refused"
    if before := sum(one.before for one in known):
        line += f", {before:,} of them written before under this name and not again"
    return f"{line}; tasks waited {waited_s:.1f} s for the service{_where_decided(known)}"


def job_refused_text(job: str, status: JobStatus) -> str:
    """What is said where some deltas of a job had no effect when it was published."""
    what = f"job {job}: {status.refused:,} of {status.deltas:,} deltas were refused when it was published"
    return _refused_text(what, status.refused, status.refused_rows, _ANOTHER)


def direct_refused_text(job: str, parts: Sequence[Sent]) -> str:
    """What is said where the service has refused rows of a job that is written directly."""
    return _parts_refused_text(f"job {job}, written directly", parts, _ANOTHER)


def stream_refused_text(batch: int, parts: Sequence[Sent]) -> str:
    """The same of a micro-batch, which comes again when its stream is started again."""
    return _parts_refused_text(f"micro-batch {batch}", parts, _ALLOW)


def _parts_refused_text(what: str, parts: Sequence[Sent], cure: str) -> str:
    refused, deltas = sum(one.refused for one in parts), sum(one.deltas for one in parts)
    rows = [row for one in parts for row in one.refused_rows][:ROWS_TOLD_MAX]
    return _refused_text(f"{what}: {refused:,} of {deltas:,} deltas were refused", refused, rows, cure)


def _refused_text(what: str, refused: int, rows: Sequence[RefusedRow], cure: str) -> str:
    more = refused - len(rows)
    told = "; ".join(map(str, rows)) + (f"; and {more:,} more" if more > 0 else "")
    return f"{what}, and have no effect; the others have theirs: {cure}: {told}"


def job_waits_text(job: str, status: JobStatus, waited_s: float) -> str:
    """What is said where a job is not published in time."""
    done = status.published + status.duplicates + status.refused
    return (
        f"job {job} is committed, and after {waited_s:g} s (waitSecondsMax) {done:,} of {status.deltas:,} "
        "deltas are published: it goes on by itself, and nothing is lost; look with "
        f"`delta-prop jobs show {job}`"
    )


def _where_decided(parts: list[Sent]) -> str:
    before = sum(one.decided for one in parts)
    return f"; {before} parts had been committed before, and were not sent again" if before else ""
