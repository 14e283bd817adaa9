"""Decides jobs by blocking calls: commits all that a job's tasks have staged, or drops all of it.

A decision may be sent repeatedly, so each call retries after a lost connection until its timeout. Tasks stage
with `SyncProducer(…, job=JobPart(…))`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from delta_prop.client.facts import find_stream
from delta_prop.client.partition_choice import DEFAULT_STREAM, PartitionChoice
from delta_prop.client.producer_protocol import check_staging
from delta_prop.client.request_client import RequestClient
from delta_prop.platform.ports import Tls
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

__all__ = ["Decision", "JobPart", "JobState", "JobStatus", "StagedPart", "attempt_of", "decide"]

_FIX = "query the job's state, or send the decision again: it is applied only once"


def decide(
    addresses: str | Iterable[str],
    job: str,
    decision: Decision,
    parts: Iterable[StagedPart] = (),
    *,
    run: int | None = None,
    stream: str | int = DEFAULT_STREAM,
    partition: int | None = None,
    token: str | None = None,
    tls: Tls | None = None,
    timeout_s: float = 30.0,
    failed: Callable[[Exception], None] | None = None,
) -> JobStatus:
    """Decide a job: publish it (COMMIT, with all `parts` that count), drop it (ABORT), or QUERY its state.

    `run`: with ABORT, drop only the parts that this run of the job has staged (`attempt_of`), if any; parts
    that another driver has staged under the same name stay. `stream` (its name or id), `partition`: where the
    job was staged, as for `SyncProducer`: each partition has jobs of its own. `failed`: called with the error
    of each failed attempt. When this returns, the decision is on disk. Raises Refused (UNKNOWN_JOB,
    JOB_DECIDED, …: nothing is decided), Unreachable (the outcome is unknown), UsageError.
    """
    part_list = tuple(parts)
    if len(part_list) > PARTS_MAX:
        raise UsageError(
            f"job {job!r}: {len(part_list)} parts: stage up to {PARTS_MAX}, each with more deltas"
        )

    targets = addresses if isinstance(addresses, str) else tuple(addresses)
    choice = PartitionChoice(stream, partition)
    log = choice.known
    if log is None:
        log = choice.resolve(find_stream(targets, str(stream), token=token, tls=tls, timeout_s=timeout_s))

    def resolve_retried_abort(refused: Refused) -> JobStatus | None:
        if decision is Decision.ABORT and refused.code is ErrorCode.UNKNOWN_JOB:
            return JobStatus(JobState.ABORTED)  # an earlier attempt aborted it, and its answer was lost
        return None

    client = RequestClient(
        "decides a job",
        token,
        tls,
        timeout_s,
        _FIX,
        check_welcome=check_staging,
        resolve_maybe_applied=resolve_retried_abort,
        on_failure=failed,
        log=log,
    )
    status = client.ask(targets, Decide(job, decision, part_list, run))
    assert isinstance(status, JobStatus)
    return status
