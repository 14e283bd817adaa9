"""The partitions of a stream behind one client: finds a vector's partition, joins the outcomes of a call.

Pure. The partition of a vector follows from a hash of its namespace and id, and from the number of the
stream's partitions, which never changes. So every client finds it, in any language.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from delta_prop.calls.outcomes import PublishAck
from delta_prop.client.errors import Unreachable
from delta_prop_wire.delta import Delta, Dot, origin_partition
from delta_prop_wire.errors import Refused, UsageError
from delta_prop_wire.murmur import partition_of, partitions_of

OTHERS_TIMEOUT_S = 2.0
"""Seconds for which opening waits for other partitions after the first answer: they may answer later."""
CACHED_VECTORS_MAX = 50_000
"""Maximum number of vectors in the newer cache of a `PartitionMap`. A full one becomes the older cache."""


class Part(NamedTuple):
    """One partition's part of a call. `rows`: indices of the caller's rows, in order; `ack`: theirs."""

    partition: int
    rows: Sequence[int]
    ack: PublishAck


@dataclass(frozen=True, slots=True)
class StreamPublished:
    """An acknowledged call: `count` rows, each in one of the parts. Offsets are a partition's own."""

    count: int
    parts: tuple[Part, ...]

    def ack_of(self, partition: int) -> PublishAck | None:
        """Return the acknowledgement of one partition; None if the call has no part there."""
        return next((part.ack for part in self.parts if part.partition == partition), None)


class StreamRefused(Refused):
    """A call of which some partitions refused their part. `acknowledged`: the other parts."""

    def __init__(
        self, refusal: Refused, partition: int, rows: Sequence[int], acknowledged: Sequence[Part]
    ) -> None:
        acked_rows = sum(len(part.rows) for part in acknowledged)
        super().__init__(
            refusal.code,
            f"partition {partition}: {refusal.message}; {acked_rows} rows were acknowledged by other "
            "partitions",
            retry_after_ms=refusal.retry_after_ms,
            row=None if refusal.row is None else rows[refusal.row],
            field=refusal.field,
            details={**refusal.details, "partition": partition},
        )
        self.acknowledged = tuple(acknowledged)


class PartitionMap:
    """Maps each vector to one of `count` partitions; caches recent results."""

    __slots__ = ("_cache", "_older_cache", "count")

    def __init__(self, count: int) -> None:
        self.count = count
        self._cache: dict[tuple[str, str], int] = {}
        self._older_cache: dict[tuple[str, str], int] = {}

    def find(self, namespace: str, vector_id: str) -> int:
        """Return the partition of a vector."""
        key = (namespace, vector_id)
        partition = self._cache.get(key)
        if partition is None:
            partition = self._older_cache.get(key)
            if partition is None:
                partition = partition_of(namespace, vector_id, self.count)
            if len(self._cache) >= CACHED_VECTORS_MAX:
                self._older_cache, self._cache = self._cache, {}
            self._cache[key] = partition
        return partition

    def group_rows(self, deltas: Sequence[Delta]) -> list[tuple[int, list[int]]]:
        """Return (partition, rows) for each partition that has vectors of these rows, in order."""
        rows_by_partition: dict[int, list[int]] = {}
        for row, delta in enumerate(deltas):
            rows_by_partition.setdefault(self.find(delta.namespace, delta.vector_id), []).append(row)
        return sorted(rows_by_partition.items())

    def group_columns(self, namespace: str, ids: Sequence[str]) -> list[tuple[int, list[int]]]:
        """Do the same as `group_rows` for columns: vectors of one namespace."""
        row_partitions = partitions_of(namespace, ids, self.count)
        return [
            (int(partition), np.flatnonzero(row_partitions == partition).tolist())
            for partition in np.unique(row_partitions)
        ]


def join_outcomes(outcomes: Sequence[tuple[int, Sequence[int], PublishAck | Refused]]) -> StreamPublished:
    """Join the outcomes of the parts of a call, each as (partition, rows, outcome).

    Raises Refused if the only part was refused, StreamRefused if one of several was.
    """
    parts = tuple(
        Part(partition, rows, outcome)
        for partition, rows, outcome in outcomes
        if isinstance(outcome, PublishAck)
    )
    for partition, rows, outcome in outcomes:
        if isinstance(outcome, Refused):
            if len(outcomes) == 1:
                raise outcome
            raise StreamRefused(outcome, partition, rows, parts)
    return StreamPublished(sum(len(part.rows) for part in parts), parts)


def local_parents(parents: Sequence[Dot | bytes], partition: int) -> list[Dot | bytes]:
    """Return the `parents` that belong to one partition. Raises UsageError.

    The others are already in the logs of other partitions, since a caller knows only acknowledged dots.
    """
    for parent in parents:
        if not isinstance(parent, Dot):
            raise UsageError(
                f"parent {parent!r:.60}: an id does not show which partition has it: name the parent by its "
                "dot"
            )
    return [
        parent
        for parent in parents
        if isinstance(parent, Dot) and origin_partition(parent.origin) == partition
    ]


def none_answered(stream: str | int, partition_count: int, waited_s: float) -> Unreachable:
    """Return the error for a stream of which no partition has answered in time."""
    return Unreachable(
        f"none of the {partition_count} partitions of stream {stream!r} has answered for {waited_s:g} s: try "
        "again, or ask the service's operator"
    )
