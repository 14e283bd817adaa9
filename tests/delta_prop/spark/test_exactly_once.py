"""Either each delta of a job has one effect, or none has any, whichever process is killed meanwhile."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from delta_prop.client.ranges import RangeReader
from delta_prop.spark import register
from delta_prop_wire.topics import Topic
from tests.delta_prop.server.process import served

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark
ROWS = 18_000
PARTS = 2
DRIVER = """
import sys
from delta_prop.spark import session
from tests.delta_prop.spark.killed_sources import KilledDriverSource
from tests.delta_prop.spark.test_exactly_once import deltas, save
spark = session("dies", master="local[2]")
spark.dataSource.register(KilledDriverSource)
save(deltas(spark), sys.argv[1], "crashed", source="driver_dies")
"""


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


def deltas(spark: SparkSession) -> DataFrame:
    """Return a DataFrame of which each part is sent as several blocks."""
    frame = spark.range(ROWS, numPartitions=PARTS)
    return frame.selectExpr("concat('doc-', id) AS vector_id", "array(float(id), 0.5F) AS vector")


def save(frame: DataFrame, address: str, job: str, *, source: str = "delta_prop", **options: Any) -> None:
    write = frame.write.format(source).options(url=address, producer=job, namespace=job, **options)
    write.mode("append").save()


def effects(address: str, job: str) -> Counter[str]:
    """Count each vector of a job in the log."""
    reader = RangeReader(address)
    bounds = reader.bounds()
    counts: Counter[str] = Counter()
    for logged in reader.read(bounds.start_offset, bounds.end_offset, [Topic.parse(f"ns:{job}")]):
        counts.update(logged.batch.keys)
    return counts


def expected_effects() -> Counter[str]:
    return Counter(f"doc-{number}" for number in range(ROWS))


def test_job_run_twice_has_one_effect(spark: SparkSession, address: str) -> None:
    for _ in range(2):
        save(deltas(spark), address, "twice")
        assert effects(address, "twice") == expected_effects()
    for _ in range(2):
        save(deltas(spark), address, "direct", staged="false")
        assert effects(address, "direct") == expected_effects()


@pytest.mark.parametrize("staged", ["true", "false"])
def test_two_concurrent_attempts_of_a_part_have_one_effect(
    spark: SparkSession, address: str, staged: str
) -> None:
    """Speculative execution does this, but needs a second machine: two jobs of one name stand in for it."""

    def slowly(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            time.sleep(0.4)
            yield batch

    def run() -> None:
        java = spark._jvm.org.apache.spark.sql.classic.SparkSession
        # Spark finds data sources only in a thread with an active session.
        java.setActiveSession(spark._jsparkSession)
        save(slow, address, job, staged=staged)

    job, frame = f"at-once-{staged}", deltas(spark).coalesce(1)
    slow = frame.mapInArrow(slowly, frame.schema)
    with ThreadPoolExecutor(2) as threads:
        futures = [threads.submit(run) for _ in range(2)]
        for future in futures:
            future.result(60)
    assert effects(address, job) == expected_effects()


@pytest.mark.parametrize("staged", ["true", "false"])
def test_tasks_killed_after_sending_have_one_effect(spark: SparkSession, address: str, staged: str) -> None:
    job = f"killed-{staged}"
    save(deltas(spark), address, job, source="tasks_die", staged=staged)
    assert effects(address, job) == expected_effects()


def test_failed_job_has_no_effect_and_can_be_rerun(spark: SparkSession, address: str) -> None:
    def fails_late(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield batch
            if f"doc-{ROWS - 1}" in batch.column("vector_id").to_pylist():
                raise RuntimeError("no more")

    frame = deltas(spark)
    with pytest.raises(Exception, match="no more"):
        save(frame.mapInArrow(fails_late, frame.schema), address, "failed")
    assert effects(address, "failed") == Counter()
    save(frame, address, "failed")
    assert effects(address, "failed") == expected_effects()


def test_job_of_a_killed_driver_has_no_effect_and_can_be_rerun(spark: SparkSession, address: str) -> None:
    child = subprocess.run(
        [sys.executable, "-c", DRIVER, address],
        start_new_session=True,
        stderr=subprocess.PIPE,
        text=True,
        timeout=300,
        check=False,
    )
    assert child.returncode == -signal.SIGKILL, child.stderr[-2_000:]
    assert effects(address, "crashed") == Counter()
    save(deltas(spark), address, "crashed")
    assert effects(address, "crashed") == expected_effects()


def test_wrong_columns_and_options_are_refused_on_the_driver(spark: SparkSession, address: str) -> None:
    frame = deltas(spark)
    for bad, expected in (
        (frame.withColumnRenamed("vector", "vec"), 'withColumnRenamed("vec", "vector")'),
        (frame.selectExpr("1 AS vector_id", "vector"), "vector_id is int, but must be string"),
    ):
        with pytest.raises(Exception, match="UsageError") as refused:
            save(bad, address, "bad")
        assert expected in str(refused.value)
    with pytest.raises(Exception, match="option producer is missing: name the job"):
        frame.write.format("delta_prop").option("url", address).mode("append").save()
    with pytest.raises(Exception, match="a log cannot be overwritten"):
        frame.write.format("delta_prop").options(url=address, producer="x").mode("overwrite").save()
    assert effects(address, "bad") == Counter()


def test_bad_value_fails_the_job_and_names_the_row(spark: SparkSession, address: str) -> None:
    frame = deltas(spark).selectExpr(
        "vector_id", "if(vector_id = 'doc-77', array(float('nan'), 0.5F), vector) AS vector"
    )
    with pytest.raises(Exception, match="vector: of vector_id 'doc-77': number 0 is nan"):
        save(frame, address, "nan")
    assert effects(address, "nan") == Counter()


def test_rows_refused_by_the_service_are_named_by_the_driver(spark: SparkSession, address: str) -> None:
    frame = deltas(spark).selectExpr(
        "vector_id", "if(vector_id = 'doc-77', array(1F, 2F, 3F), vector) AS vector"
    )
    expected = (
        f"job refused, written directly: 1 of {ROWS:,} deltas were refused and have no effect, .*: "
        "vector_id 'doc-77', row 77 of part 0: INVALID_DELTA: vector: 3 numbers, but "
    )
    with pytest.raises(Exception, match=expected):
        save(frame, address, "refused", staged="false")
    assert effects(address, "refused") == expected_effects() - Counter(["doc-77"])
