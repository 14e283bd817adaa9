"""A replay on Spark equals the fold of the log for every vector, at the end and at any position."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyspark")

from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from delta_prop.spark.arguments import position_of
from delta_prop.spark.data_source import segments
from delta_prop.spark.data_source.segments import deltas_of
from delta_prop.spark.jobs.replaying import replay
from delta_prop.spark.states import buckets
from delta_prop.spark.states.changes import STATES, STATES_DDL
from delta_prop_wire import delta as d
from delta_prop_wire.delta import Delta
from delta_prop_wire.errors import UsageError
from tests.broker.histories import Rows, Step, Writer
from tests.delta_prop.spark.logs import COMPACTING, write

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import Row, SparkSession

    from delta_prop_wire.algebra import VectorState

OPERATIONS = [
    d.create([1, 2, 3]),
    d.sparse([1], [5]),
    d.opaque(b"bytes"),
    d.dense([7, 8, 9]),
    d.scale(0.5),
    d.delete(),
    d.sparse_add([0, 2], [1, 1]),
]
HISTORY = [
    Step(
        [
            Delta(
                f"v{(number + row) % 13}", OPERATIONS[number * row % 7], "n" if row else "né", metadata=patch
            )
            for row, patch in enumerate([None, {"at": number, "ü": [None]}, None, {"at": None}])
        ],
        origin=1 + number % 2,
        lamport_lag=3 * (number % 5 == 4),
    )
    for number in range(60)
]


def state_values(state: VectorState) -> tuple[Any, ...]:
    assert state.key is not None
    vector = None if state.vector is None else state.vector.tolist()
    lamport, origin, counter = state.key
    metadata = dict(state.metadata)
    return (state.alive, vector, state.data, metadata, lamport, f"{origin:016x}", counter, state.ignored)


def row_values(row: Row) -> tuple[Any, ...]:
    data = None if row.data is None else bytes(row.data)
    metadata = {} if row.metadata is None else json.loads(row.metadata)
    return (row.alive, row.vector, data, metadata, row.lamport, row.origin, row.counter, row.ignored)


def check_replay(replayed: list[Row], writer: Writer, end: int = 1 << 60) -> None:
    rows = Rows.below(writer.batches, end)
    assert {(row.namespace, row.vector_id): row_values(row) for row in replayed} == {
        name: state_values(state) for name, state in rows.fold().items()
    }
    assert len(replayed) == len(rows.changes)
    for row in replayed:
        assert row.offset in [offset for _, offset, _, _ in rows.changes[row.namespace, row.vector_id]]


@pytest.mark.spark
def test_replay_of_every_vector_equals_the_fold_of_the_log(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "PART_BYTES", 2_000)
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 4_000)
    writer = write(tmp_path / "whole", HISTORY)
    replayed = replay(spark, str(tmp_path / "whole"))
    assert replayed.rdd.getNumPartitions() > 2
    check_replay(replayed.collect(), writer)
    check_replay(replay(spark, str(tmp_path / "whole"), at=101).collect(), writer, 102)
    writer = write(tmp_path / "compacted", HISTORY, COMPACTING)
    check_replay(replay(spark, str(tmp_path / "compacted")).collect(), writer)


@pytest.mark.spark
def test_deltas_of_a_directory_are_read_as_a_table(spark: SparkSession, tmp_path: Path) -> None:
    writer = write(tmp_path, HISTORY)
    rows = deltas_of(spark, str(tmp_path)).orderBy("offset").collect()
    assert [row.offset for row in rows] == list(range(writer.batches[-1].next_offset))
    logged = writer.batches[7]
    row = rows[logged.offset + 1]
    batch = logged.batch
    assert (row.vector_id, row.namespace, row.lamport) == (
        batch.keys[1],
        batch.namespaces[1],
        logged.lamport + 1,
    )
    assert json.loads(row.metadata) == batch.metadata(1)
    assert deltas_of(spark, str(tmp_path), start=position_of(50), end=position_of(53)).count() == 3
    assert from_arrow_schema(STATES) == StructType.fromDDL(STATES_DDL)


def test_position_is_an_offset_or_a_time() -> None:
    assert position_of(None) == (None, None, False)
    assert position_of(7).offset == 7
    assert position_of(datetime(1970, 1, 2)).time_us == 86_400_000_000
    assert position_of(datetime(1970, 1, 2, tzinfo=UTC)).time_us == 86_400_000_000
    assert position_of("7").offset == 7
    for wrong in (-1, True, 1.5):
        with pytest.raises(UsageError, match=r"give an offset from 0, a datetime"):
            position_of(wrong)  # type: ignore[arg-type]
