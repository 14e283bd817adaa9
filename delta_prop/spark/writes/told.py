"""What becomes of what is written, as values, and what is said of it.

Pure, and quick to load: it travels from the tasks to the driver.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from delta_prop_wire.frames import JobStatus


class RowsRefused(Exception):
    """The service does not take some rows, and the options say that this fails the job."""


@dataclass
class Sent:
    """What became of a part: `refused` of its rows have no effect, `reasons` are those of the first of them.

    `decided`: its job had been committed before, so nothing was sent. `before`: rows whose numbers had been
    dealt with before, so that they have no effect again. `waited_s`: for the service.
    `checksum`: of what the rows say, where they are kept aside.
    """

    deltas: int = 0
    refused: int = 0
    reasons: list[str] = field(default_factory=list)
    decided: bool = False
    waited_s: float = 0.0
    checksum: int = 0
    before: int = 0


def refused_text(sent: Sent) -> str:
    """What is said of the refused rows of a part."""
    more = sent.refused - len(sent.reasons)
    told = "; ".join(sent.reasons) + (f"; and {more} more" if more > 0 else "")
    return f"{sent.refused} of {sent.deltas} rows are refused (option refused=allow goes on): {told}"


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
    more = status.refused - len(status.refused_rows)
    told = "; ".join(map(str, status.refused_rows)) + (f"; and {more:,} more" if more > 0 else "")
    return (
        f"job {job}: {status.refused:,} of {status.deltas:,} deltas were refused when it was published, and "
        "have no effect; the others have theirs: mend these under another producer (with option "
        f"refused=allow the job does not fail for it): {told}"
    )


def job_waits_text(job: str, status: JobStatus, waited_s: float) -> str:
    """What is said where a job is not published in time."""
    done = status.published + status.repeated + status.refused
    return (
        f"job {job} is committed, and after {waited_s:g} s (waitSecondsMax) {done:,} of {status.deltas:,} "
        "deltas are published: it goes on by itself, and nothing is lost; look with "
        f"`delta-prop jobs show {job}`"
    )


def _where_decided(parts: list[Sent]) -> str:
    before = sum(one.decided for one in parts)
    return f"; {before} parts had been committed before, and were not sent again" if before else ""
