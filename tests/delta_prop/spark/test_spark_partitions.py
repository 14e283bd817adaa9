"""Spark writes and reads streams of one and of eight partitions: each row once, in its partition's order."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyspark")

from delta_prop.client import SyncProducer
from delta_prop.spark import register
from delta_prop_wire.delta import Delta, create
from delta_prop_wire.murmur import partition_of
from tests.delta_prop.server.process import served
from tests.delta_prop.spark.stream_services import create as create_stream
from tests.delta_prop.spark.stream_services import keys_of_partitions

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark
ROWS = 12_000
COUNT = 8
STREAMS = {"single": 1, "orders": COUNT}


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("log")
    with served(folder / "data", errors=folder / "errors") as service:
        address = f"127.0.0.1:{service.port}"
        for stream, count in STREAMS.items():
            create_stream(address, stream, count)
        yield address


@pytest.fixture(scope="module", autouse=True)
def _sources(spark: SparkSession) -> None:
    from tests.delta_prop.spark.killed_sources import KilledTaskSource

    register(spark)
    spark.dataSource.register(KilledTaskSource)


def read(spark: SparkSession, address: str, stream: str, **options: Any) -> DataFrame:
    return spark.read.format("delta_prop").options(url=address, stream=stream, **options).load()


@pytest.mark.parametrize(("stream", "staged"), [("single", "false"), ("orders", "true")])
def test_rows_of_killed_tasks_are_stored_and_read_once(
    spark: SparkSession, address: str, stream: str, staged: str
) -> None:
    """The first attempt of each task is killed after it has sent all its rows."""
    job = f"{stream}-{staged}"
    rows = spark.range(ROWS, numPartitions=2).selectExpr(
        "concat('doc-', id) AS vector_id", "array(float(id), 0.5F) AS vector"
    )
    write = rows.write.format("tasks_die").options(url=address, stream=stream, staged=staged)
    write.options(producer=job, namespace=job).mode("append").save()
    found = read(spark, address, stream, namespace=job, partitions=5).collect()
    assert len(found) == ROWS
    keys: list[list[str]] = [[] for _ in range(STREAMS[stream])]
    for row in sorted(found, key=lambda row: (row.partition, row.offset)):
        keys[row.partition].append(row.vector_id)
    assert keys == keys_of_partitions(address, stream, job)
    for partition, own in enumerate(keys):
        assert {partition_of(job, key, STREAMS[stream]) for key in own} == {partition}
        for part in range(2):  # rows of a task keep their order
            numbers = [int(key.removeprefix("doc-")) for key in own]
            of_part = [number for number in numbers if number // (ROWS // 2) == part]
            assert of_part == sorted(of_part)


def test_streaming_copy_resumes_at_its_checkpoint(spark: SparkSession, address: str, tmp_path: Path) -> None:
    def run(sink: str) -> list[int]:
        """Copy what stream `feed` has now; return the row count of each batch."""
        source = spark.readStream.format("delta_prop").options(url=address, stream="feed")
        rows = source.load().selectExpr("vector_id", "vector", "'out' AS namespace")
        write = rows.writeStream.format(sink).options(url=address, stream="copies", producer="copies")
        query = write.option("checkpointLocation", str(tmp_path)).trigger(availableNow=True).start()
        assert query.awaitTermination(180)
        return [progress["numInputRows"] for progress in query.recentProgress if progress["numInputRows"]]

    def publish(first: int, count: int) -> None:
        for partition in range(COUNT):
            with SyncProducer(address, name="feed", stream="feed", partition=partition) as p:
                for number in range(first, first + count):
                    p.offer(Delta(f"{partition}-{number}", create([1.0, 2.0]), "in"))

    for stream in ("feed", "copies"):
        create_stream(address, stream, COUNT)
    publish(0, 200)
    assert run("tasks_die") == [200 * COUNT]
    publish(200, 10)
    assert run("delta_prop") == [10 * COUNT]
    copied = keys_of_partitions(address, "copies", "out")
    expected = [f"{partition}-{number}" for partition in range(COUNT) for number in range(210)]
    assert sorted(key for own in copied for key in own) == sorted(expected)
    assert all(partition_of("out", key, COUNT) == number for number, own in enumerate(copied) for key in own)


def test_unknown_stream_or_partition_is_one_error(spark: SparkSession, address: str) -> None:
    frame = spark.createDataFrame([("a", [1.0])], "vector_id string, vector array<float>")
    with pytest.raises(Exception, match=r"UsageError: stream 'ordres': unknown: give one of copies, default"):
        read(spark, address, "ordres").collect()
    with pytest.raises(Exception, match=r"UsageError: stream 'ordres': unknown: give one of copies, default"):
        frame.write.format("delta_prop").options(url=address, stream="ordres", producer="x").mode(
            "append"
        ).save()
    with pytest.raises(Exception, match=r"UsageError: partition 8: stream 'orders' has 8: give 0 to 7"):
        read(spark, address, "orders", partition=COUNT).collect()


@pytest.mark.parametrize("staged", ["false", "true"])
def test_service_killed_during_a_job_has_each_row_once(
    spark: SparkSession, tmp_path: Path, staged: str
) -> None:
    rows = spark.range(10 * ROWS, numPartitions=2).selectExpr(
        "concat('doc-', id) AS vector_id", "array(float(id), 0.5F) AS vector"
    )
    data = tmp_path / "data"
    with ExitStack() as services:
        first = services.enter_context(served(data))
        address = f"127.0.0.1:{first.port}"
        create_stream(address, "orders", COUNT)

        def kill_and_restart() -> None:
            while not any(data.rglob("jobs/*.part" if staged == "true" else "orders-*/*/*.log")):
                time.sleep(0.001)
            time.sleep(0.1)
            first.kill()
            services.enter_context(served(data, port=first.port))

        with ThreadPoolExecutor(1) as pool:
            restarted = pool.submit(kill_and_restart)
            write = rows.write.format("delta_prop").options(url=address, stream="orders", staged=staged)
            write.options(producer="job", namespace="job").mode("append").save()
            assert first.process.poll() is not None, "the service was killed during the job"
            restarted.result()
        keys = keys_of_partitions(address, "orders", "job")
    assert sorted(key for own in keys for key in own) == sorted(f"doc-{row}" for row in range(10 * ROWS))
    assert all(partition_of("job", key, COUNT) == number for number, own in enumerate(keys) for key in own)
