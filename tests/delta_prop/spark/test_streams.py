"""A stream that copies log to log, stopped at random and restarted, loses and duplicates no row."""

from __future__ import annotations

import random
import time
from collections import Counter
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("pyspark")

from pyspark.errors import StreamingQueryException

from delta_prop.client import SyncProducer
from delta_prop.client.ranges import RangeReader
from delta_prop.spark import register
from delta_prop_wire.delta import Delta, create
from delta_prop_wire.topics import Topic
from tests.delta_prop.server.process import served

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pyspark.sql import SparkSession
    from pyspark.sql.streaming import StreamingQuery

pytestmark = pytest.mark.spark
RESTARTS, RESTARTS_FULL = 2, 20
ROWS_PER_RESTART = 2_000
QUERY_TIMEOUT_S = 120
FINISH_ATTEMPTS = 5
WORKER_START_TIMEOUT = "Python worker failed to connect back"
"""Spark's error if its Python takes over ten seconds to start, as on a very busy machine."""


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("log")
    with served(folder / "data", errors=folder / "errors") as service:
        yield f"127.0.0.1:{service.port}"


@pytest.fixture(scope="module", autouse=True)
def _sources(spark: SparkSession) -> None:
    from tests.delta_prop.spark.killed_sources import KilledTaskSource

    register(spark)
    spark.dataSource.register(KilledTaskSource)


class Stream:
    """A query that copies namespace `in` to `out`."""

    def __init__(self, spark: SparkSession, address: str, checkpoint: Path, producer: str) -> None:
        self._spark = spark
        self._address = address
        self._checkpoint = str(checkpoint)
        self._producer = producer

    def start(self, *, sink: str = "delta_prop", finishes: bool = False) -> StreamingQuery:
        read = self._spark.readStream.format("delta_prop")
        source_rows = read.options(
            url=self._address, namespace="in", maxOffsetsPerTrigger=1_000, partitions=2
        ).load()
        result_rows = source_rows.selectExpr("vector_id", "vector", "'out' AS namespace")
        write = result_rows.writeStream.format(sink).options(url=self._address, producer=self._producer)
        write = write.option("checkpointLocation", self._checkpoint)
        return (write.trigger(availableNow=True) if finishes else write).start()

    def finish(self) -> None:
        for attempt in range(1, FINISH_ATTEMPTS + 1):
            query = self.start(finishes=True)
            try:
                assert query.awaitTermination(QUERY_TIMEOUT_S)
            except StreamingQueryException as error:
                if WORKER_START_TIMEOUT not in str(error) or attempt == FINISH_ATTEMPTS:
                    raise
            else:
                return


def publish_rows(address: str, restarts: int) -> Counter[str]:
    """Publish the rows for so many restarts; return how often each vector id occurs."""
    keys = [f"doc-{number}" for number in range(restarts * ROWS_PER_RESTART)]
    with SyncProducer(address, name="feed") as p:
        for number in range(0, len(keys), 500):
            p.offer(*(Delta(key, create([1.0, 2.0]), "in") for key in keys[number : number + 500]))
        p.flush()
    return Counter(keys)


def copied_keys(address: str) -> Counter[str]:
    reader = RangeReader(address)
    bounds = reader.bounds()
    counts: Counter[str] = Counter()
    for logged in reader.read(bounds.start_offset, bounds.end_offset, [Topic.parse("ns:out")]):
        counts.update(logged.batch.keys)
    return counts


def test_stream_stopped_at_random_copies_each_row_once(
    spark: SparkSession, address: str, tmp_path: Path, full: bool
) -> None:
    restarts = RESTARTS_FULL if full else RESTARTS
    rng = random.Random() if full else random.Random(4)
    expected = publish_rows(address, restarts)
    stream = Stream(spark, address, tmp_path / "checkpoint", "copies")
    copied_counts = []
    for restart in range(restarts):
        query = stream.start(sink="tasks_die" if restart % 3 == 1 else "delta_prop")
        batches, deadline = rng.randrange(3), time.monotonic() + QUERY_TIMEOUT_S
        while sum(p["numInputRows"] > 0 for p in query.recentProgress) < batches:
            if not query.isActive and WORKER_START_TIMEOUT in str(query.exception()):
                break  # this failure counts as a random stop
            assert query.isActive, query.exception()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        time.sleep(rng.random())
        query.stop()
        copied_counts.append(sum(copied_keys(address).values()))
    stream.finish()
    assert copied_keys(address) == expected
    print(f"{restarts} restarts, {len(expected):,} rows; rows copied at each stop: {copied_counts}")


def test_stream_without_its_checkpoint_is_refused(
    spark: SparkSession, address: str, tmp_path: Path, full: bool
) -> None:
    if not full:
        pytest.skip("takes two more streams; the writer's error is tested without Spark")
    stream = Stream(spark, address, tmp_path / "checkpoint", "lost")
    publish_rows(address, 1)
    stream.finish()
    before = copied_keys(address)
    expected = r"lost/[01] has written micro-batch \d+, but this is micro-batch 0, so the checkpoint was lost"
    with pytest.raises(Exception, match=expected):
        Stream(spark, address, tmp_path / "another checkpoint", "lost").finish()
    assert copied_keys(address) == before
