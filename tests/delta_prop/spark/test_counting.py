"""Counts of a log on Spark equal counts taken row by row."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pa = pytest.importorskip("pyarrow")
pytest.importorskip("pyspark")

from delta_prop.spark.arguments import position_of  # noqa: E402
from delta_prop.spark.jobs.counting import COUNTS, COUNTS_DDL, count_rows, stats  # noqa: E402
from delta_prop_wire.topics import kind_name  # noqa: E402
from tests.broker.histories import Step, changes, steps  # noqa: E402
from tests.delta_prop.spark.logs import write  # noqa: E402
from tests.delta_prop.spark.test_folding import log_batches  # noqa: E402
from tests.delta_prop.spark.test_replaying import HISTORY  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession


def count_row_by_row(batches: list[Any], start: int, end: int) -> tuple[Counter[Any], Counter[Any]]:
    vectors: Counter[Any] = Counter()
    kinds: Counter[Any] = Counter()
    for name, (_, offset, operation, _) in changes(batches):
        if start <= offset < end:
            vectors[name] += 1
            kinds[name[0], kind_name(operation.kind)] += 1
    return vectors, kinds


@given(st.lists(steps, min_size=1, max_size=10), st.integers(0, 20), st.integers(0, 40))
def test_counts_equal_those_taken_row_by_row(history: list[Step], start: int, end: int) -> None:
    batches = log_batches(history)
    rows = [row for batch in count_rows(batches, start, end) for row in batch.cast(COUNTS).to_pylist()]
    vectors = Counter(
        {(row["namespace"], row["vector_id"]): row["deltas"] for row in rows if row["vector_id"]}
    )
    kinds = Counter({(row["namespace"], row["op"]): row["deltas"] for row in rows if row["op"]})
    assert (vectors, kinds) == count_row_by_row(batches, start, end)
    sizes = [sum(row["bytes"] for row in rows if row[column]) for column in ("op", "vector_id")]
    assert sizes[0] == sizes[1]


@pytest.mark.spark
def test_stats_of_a_log_equal_counts_of_its_rows(spark: SparkSession, tmp_path: Path) -> None:
    from pyspark.sql.pandas.types import from_arrow_schema
    from pyspark.sql.types import StructType

    batches = write(tmp_path, HISTORY).batches
    log_stats = stats(spark, str(tmp_path), start=position_of(20))
    vectors, kinds = count_row_by_row(batches, 20, 1 << 60)
    assert (log_stats.ranges, log_stats.sinks) == ([(0, 20, 240)], [])
    assert {(row.namespace, row.op): row.deltas for row in log_stats.traffic.collect()} == kinds
    hot = [((row.namespace, row.vector_id), row.deltas) for row in log_stats.vectors.limit(3).collect()]
    assert [deltas for _, deltas in hot] == [deltas for _, deltas in vectors.most_common(3)]
    sparse = next(row for row in log_stats.traffic.collect() if row.op == "sparse")
    assert (sparse.numbers, sparse.share) == (1.0, pytest.approx(1 / 3))
    assert from_arrow_schema(COUNTS) == StructType.fromDDL(COUNTS_DDL)
