"""The status of a job that is decided in each partition of a stream.

Pure, and quick to load.
"""

from __future__ import annotations

from collections.abc import Mapping

from delta_prop_wire.frames import JobState, JobStatus

_ORDER = (JobState.ABORTED, JobState.STAGING, JobState.COMMITTED, JobState.PUBLISHED)
"""The states, the least complete one first."""


def join_statuses(by_partition: Mapping[int, JobStatus]) -> JobStatus:
    """Return the status of a job from those of its partitions; each refused row names its partition."""
    statuses = list(by_partition.values())
    if len(statuses) == 1:
        return statuses[0]
    rows = [
        row._replace(text=f"{row.reason} (counted in partition {partition})")
        for partition, one in sorted(by_partition.items())
        for row in one.refused_rows
    ]
    return JobStatus(
        min((one.state for one in statuses), key=_ORDER.index),
        sum(one.deltas for one in statuses),
        sum(one.published for one in statuses),
        sum(one.duplicates for one in statuses),
        sum(one.refused for one in statuses),
        tuple(rows),
    )
