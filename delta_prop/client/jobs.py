"""Jobs over the network: what tasks have staged is committed or dropped as a whole, by plain blocking calls.

A decision may be sent again, so each call goes on through lost connections until its time is over. Tasks
stage with `SyncProducer(…, job=JobPart(…))`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from delta_prop.client.asking import Asking
from delta_prop.client.producing import check_stages
from delta_prop_wire.errors import Refused, UsageError
from delta_prop_wire.frames import (
    Decide,
    Decision,
    JobPart,
    JobState,
    JobStatus,
    StagedPart,
    attempt_of,
)
from delta_prop_wire.requests import PARTS_MAX
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from delta_prop.ports import Tls

__all__ = ["Decision", "JobPart", "JobState", "JobStatus", "StagedPart", "attempt_of", "decide"]

_CURE = "look how the job is, or send the decision again, which decides nothing twice"


def decide(
    addresses: str | Iterable[str],
    job: str,
    decision: Decision,
    parts: Iterable[StagedPart] = (),
    *,
    run: int | None = None,
    token: str | None = None,
    tls: Tls | None = None,
    timeout_s: float = 30.0,
    failed: Callable[[Exception], None] | None = None,
) -> JobStatus:
    """Have a job published (COMMIT, with all `parts` that count), or dropped and forgotten (ABORT), or ask
    how it is (QUERY). `run`: with ABORT, drop only what this run of the job has staged (`attempt_of`), if
    anything; what another driver stages under the same name stays. `failed`: told of each failed attempt.

    Once this returns the decision is on disk. Raises Refused (UNKNOWN_JOB, JOB_DECIDED, …; nothing is decided
    then), Unreachable (nobody knows), UsageError.
    """
    named = tuple(parts)
    if len(named) > PARTS_MAX:
        raise UsageError(f"job {job!r} has {len(named)} parts, allowed are {PARTS_MAX}: stage fewer, larger")

    def unheard(refused: Refused) -> JobStatus | None:
        if decision is Decision.ABORT and refused.code is ErrorCode.UNKNOWN_JOB:
            return JobStatus(JobState.ABORTED)  # as was asked before, and not heard
        return None

    asking = Asking(
        "decides a job", token, tls, timeout_s, _CURE, check=check_stages, unheard=unheard, failed=failed
    )
    status = asking.ask(addresses, Decide(job, decision, named, run))
    assert isinstance(status, JobStatus)
    return status
