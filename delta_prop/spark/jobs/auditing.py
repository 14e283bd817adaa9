"""Audit: what a sink holds against what the log makes of it; each difference with its reason, and its repair.

A repair changes no sink by itself. It sends deltas that say again what the log says, through the service, so
that every sink takes them in order with all others, and the log still tells why each holds what it holds.
"""

from __future__ import annotations

import json
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pyspark.sql import DataFrame

from delta_prop.commands.opened import open_log
from delta_prop.commands.quarantine import quarantined
from delta_prop.spark.arguments import check_session, check_table, path_of
from delta_prop.spark.jobs.replaying import placed, read_parts
from delta_prop.spark.reads.segments import states_of
from delta_prop.spark.states.buckets import BLOBS_DDL, buckets_for, spread_held
from delta_prop.spark.states.differences import DIFFERENCES_DDL, differences
from delta_prop.spark.states.held import held_of, told_columns
from delta_prop.spark.states.stored import StoredFile
from delta_prop_wire.delta import Delta, Dot, Operation, create, delete, opaque
from delta_prop_wire.errors import Refused, UsageError
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import pyarrow as pa
    from pyspark.sql import Row, SparkSession

    from delta_prop.client import SyncProducer, SyncReceipt
    from delta_prop.spark.reads.segments import Log

OPEN_MAX = 1_000
"""So many deltas of a repair are sent before the first is answered."""
TOLD_MAX = 100


def audit(
    spark: SparkSession,
    path: str,
    sink: str | DataFrame,
    *,
    come: int | None = None,
    name: str | None = None,
) -> DataFrame:
    """Every difference between a sink and the log in a data directory, with its reason and what mends it.

    `sink`: a storage sink's file, which may be in use; or a table of what another one holds (`contents_of`).
    A sink is held to what it has come to: the file's cursor, or `come`, the offset behind the last delta that
    it has applied (None: all). The columns are those of `differences.py`; see `repair`. `name`: what the sink
    is attached as: vectors of which its quarantine holds deltas are told as set aside, and not repaired.

    Raises UsageError where the file, or the log, cannot tell; Refused, LogDamaged, OSError.
    """
    check_session(spark)
    path = path_of("path", path)
    if not isinstance(sink, DataFrame):
        sink = path_of("sink", sink)
    log = log_to_audit(path)
    buckets = buckets_for(log.bytes)
    if isinstance(sink, DataFrame):
        spread = _spread_table(buckets, metadata="metadata" in sink.columns)
        held = told_columns(sink).mapInArrow(spread, BLOBS_DDL)
        reached = log.end if come is None else come
    else:
        reached = reached_by(sink, path, log)
        # All rows are read now, in one transaction; then the log has what made them.
        held = spark.range(0, 1, 1, 1).mapInArrow(_spread_file(sink, buckets), BLOBS_DDL).localCheckpoint()
        log = states_of(path)
    if reached < log.begin:
        raise UsageError(
            f"the sink has come to offset {reached}, the log tells of single deltas from {log.begin} on: it "
            "is rebuilt when it is attached; audit it then"
        )
    if reached > log.end:
        raise UsageError(
            f"the sink has come to offset {reached}, the log ends at {log.end}: it is ahead, by what the log "
            "has lost, or is of another copy of it"
        )
    aside = frozenset() if name is None else _set_aside(path, name)
    both = held.unionByName(read_parts(spark, log, buckets))
    return placed(both, buckets).mapInArrow(lambda blobs: differences(blobs, reached, aside), DIFFERENCES_DDL)


def log_to_audit(path: str) -> Log:
    """What a sink is held to. Raises as `audit` does."""
    log = states_of(path)
    if not log.whole:
        raise UsageError(f"the log in {path!r} lost its beginning without a snapshot: it cannot tell of all")
    return log


def reached_by(sink: str, path: str, log: Log) -> int:
    """The offset behind what a storage sink has taken. Raises UsageError where its file is of another log."""
    with StoredFile(sink) as file:
        if file.come is not None and file.come.log_id != log.log_id:
            raise UsageError(
                f"{sink} is of log {file.come.log_id.hex()}, the log in {path!r} is {log.log_id.hex()}: name "
                "the directory of the log that it was attached to, or rebuild it"
            )
        return 0 if file.come is None else file.come.next_offset


@dataclass(slots=True)
class Repaired:
    """What became of a repair. `moved_on`: vectors that changed since the audit, left as they are; `refused`:
    why, by vector. Of both the first hundred are named.
    """

    mended: int = 0
    moved_on: int = 0
    refused: int = 0
    told: list[str] = field(default_factory=list)


def repairs(found: DataFrame) -> Iterator[Delta]:
    """The deltas that mend the differences an audit found, one each.

    A vector that the log has is set again to what the log makes of it, one that it has not, or has deleted,
    is deleted again: also where only one sink held too much, every sink takes the delta and ends up right.
    Each expects the last delta that the log has of its vector, and is refused where that has moved on.
    """
    check_table("found", found)
    for row in found.where("op is not null").toLocalIterator():
        yield _delta(row)


def repair(found: DataFrame, producer: SyncProducer) -> Repaired:
    """Send these deltas through the service, and wait for the outcome of all. Raises Refused, Unreachable."""
    repaired = Repaired()
    waiting: deque[tuple[Delta, SyncReceipt]] = deque()
    for delta in repairs(found):
        waiting.append((delta, producer.offer(delta)))
        if len(waiting) > OPEN_MAX:
            _settle(*waiting.popleft(), repaired)
    while waiting:
        _settle(*waiting.popleft(), repaired)
    return repaired


async def repair_directory(found: DataFrame, data: str) -> Repaired:
    """Write these deltas into a data directory that nobody serves. Raises LogBusy, Refused, OSError."""
    from delta_prop.embedded import Propagator

    repaired = Repaired()
    async with Propagator(data=data) as propagator:
        for delta in repairs(found):
            try:
                await propagator.publish(delta)
            except Refused as refusal:
                _note(delta, refusal, repaired)
            else:
                repaired.mended += 1
    return repaired


def _settle(delta: Delta, receipt: SyncReceipt, repaired: Repaired) -> None:
    try:
        receipt.result()
    except Refused as refusal:
        _note(delta, refusal, repaired)
    else:
        repaired.mended += 1


def _note(delta: Delta, refusal: Refused, repaired: Repaired) -> None:
    if refusal.code is ErrorCode.CONFLICT:
        repaired.moved_on += 1
    else:
        repaired.refused += 1
    if len(repaired.told) < TOLD_MAX:
        repaired.told.append(f"{delta.namespace} {delta.vector_id}: {refusal.message}")


def _delta(row: Row) -> Delta:
    metadata = None if row.metadata is None else json.loads(row.metadata)
    expect = None if row.origin is None else Dot(int(row.origin, 16), row.counter)
    return Delta(row.vector_id, _operation(row), row.namespace, metadata=metadata, expect=expect)


def _operation(row: Row) -> Operation:
    if row.op == "create":
        return create(row.vector)
    return delete() if row.op == "delete" else opaque(bytes(row.data))


def _spread_file(path: str, buckets: int) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def spread(numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        deque(numbers, 0)
        with StoredFile(path) as file:
            for states in file.states():
                yield spread_held(states, buckets)

    return spread


def _spread_table(
    buckets: int, *, metadata: bool
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    return lambda rows: (spread_held(held_of(some, metadata=metadata), buckets) for some in rows)


def _set_aside(path: str, name: str) -> frozenset[str]:
    """The keys of the vectors of which a sink's quarantine holds deltas."""
    disk, log, _ = open_log(path)
    kept = quarantined(disk, log.log_id, log.epoch_end).get(name)
    return frozenset() if kept is None else frozenset("\0".join(one.vector) for one in kept.records())
