"""The data source reads a log as rows, by SQL, in partitions, with filters, and as a stream that resumes."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

from delta_prop.client import SyncProducer
from delta_prop_wire.delta import Delta, Priority, create, opaque, sparse
from tests.delta_prop.server.process import served

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark
ROWS = 600


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the URL of a server whose log has `ROWS` deltas, of three kinds in turn."""
    with served(tmp_path_factory.mktemp("log")) as service:
        address = f"127.0.0.1:{service.port}"
        with SyncProducer(address, name="test") as p:
            for number in range(0, ROWS, 3):
                p.offer(
                    Delta(
                        f"doc-{number}",
                        create([number, 0.5]),
                        "docs",
                        metadata={"n": number},
                        topics=("news",),
                    ),
                    Delta(f"row-{number}", opaque(bytes([number % 256])), "rows"),
                    Delta(f"doc-{number}", sparse([1], [0.25]), "docs"),
                )
            p.publish(Delta("last", opaque(b""), "rows", priority=Priority.LOW))
        yield f"delta://{address}"


def read(spark: SparkSession, url: str, **options: Any) -> DataFrame:
    return spark.read.format("delta_prop").options(url=url, **options).load()


def test_read_returns_all_columns_of_all_rows(spark: SparkSession, url: str) -> None:
    frame = read(spark, url, partitions=3)
    assert frame.rdd.getNumPartitions() == 3
    rows = frame.orderBy("offset").collect()
    assert [row.offset for row in rows] == list(range(ROWS + 1))
    first, second, third = (row.asDict() for row in rows[:3])
    assert (first["vector_id"], first["op"], first["vector"]) == ("doc-0", "create", [0.0, 0.5])
    assert (first["metadata"], first["topics"], first["namespace"]) == ('{"n": 0}', ["news"], "docs")
    assert (second["op"], second["data"], second["vector"]) == ("opaque", bytearray([0]), None)
    assert (third["indices"], third["values"], third["vector"]) == ([1], [0.25], None)
    assert (rows[-1].priority, rows[-2].priority, first["counter"], first["lamport"]) == (
        "low",
        "normal",
        1,
        1,
    )


def test_sql_and_options_select_rows(spark: SparkSession, url: str) -> None:
    spark.sql(
        f"CREATE OR REPLACE TEMPORARY VIEW deltas USING delta_prop OPTIONS (url '{url}', namespace 'docs')"
    )
    (row,) = spark.sql("SELECT count(*) AS n, max(vector[0]) AS most FROM deltas").collect()
    assert (row.n, row.most) == (2 * ROWS // 3, ROWS - 3)
    rows = read(spark, url, topics="v:doc-3,v:row-6", start=4, end=8).collect()
    assert [row.offset for row in rows] == [5, 7]


def test_schema_selects_columns(spark: SparkSession, url: str) -> None:
    schema = "vector_id string, offset long"
    frame = spark.read.format("delta_prop").schema(schema).option("url", url).load().filter("offset = 7")
    assert [tuple(row) for row in frame.collect()] == [("row-6", 7)]


def test_pushed_down_filters_return_the_same_rows(spark: SparkSession, url: str) -> None:
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    try:
        frame = read(spark, url, pushdown="true").filter("vector_id = 'doc-3' AND offset > 3")
        assert [row.offset for row in frame.collect()] == [5]
    finally:
        spark.conf.set("spark.sql.python.filterPushdown.enabled", "false")


def test_wrong_options_are_refused_before_a_job_runs(spark: SparkSession, url: str) -> None:
    for options, expected in (
        ({"strat": "1"}, "option strat is not an option of a batch read: did you mean start?"),
        ({"start": ROWS + 5}, f"option start {ROWS + 5} is after the end of the log (its last delta has "),
    ):
        with pytest.raises(Exception, match="UsageError") as refused:
            read(spark, url, **options).collect()
        assert expected in str(refused.value)


def test_stream_in_bounded_batches_resumes_at_its_checkpoint(
    spark: SparkSession, url: str, tmp_path: Path
) -> None:
    def run(**options: Any) -> list[int]:
        """Read what the log has now; return the row count of each batch."""
        stream = spark.readStream.format("delta_prop").options(url=url, **options).load()
        query = (
            stream.select("offset", "namespace")
            .writeStream.format("parquet")
            .option("path", str(tmp_path / "out"))
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        assert query.awaitTermination(180)
        return [progress["numInputRows"] for progress in query.recentProgress]

    assert run(maxOffsetsPerTrigger=400, start=1) == [400, 200]
    with SyncProducer(url.removeprefix("delta://"), name="more") as p:
        p.publish(*(Delta(f"more-{number}", opaque(b""), "rows") for number in range(10)))
    assert run() == [10]
    offsets = [row.offset for row in spark.read.parquet(str(tmp_path / "out")).collect()]
    assert sorted(offsets) == list(range(1, ROWS + 11))


def test_missing_url_names_the_option_and_the_variable(spark: SparkSession) -> None:
    assert "DELTA_PROP_URL" not in os.environ
    with pytest.raises(Exception, match="option url and variable DELTA_PROP_URL are missing"):
        spark.read.format("delta_prop").load().collect()
