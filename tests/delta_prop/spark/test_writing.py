"""The driver's part of a job: it commits or aborts, and reports in one line or raises the cause."""

from __future__ import annotations

import logging
import pickle
import re
import threading
from functools import partial
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("pyspark")

import pyarrow as pa
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    FloatType,
    IntegerType,
    StringType,
    StructField,
    StructType,
)

from delta_prop.client import SyncProducer
from delta_prop.client.jobs import Decision, JobState, attempt_of, decide
from delta_prop.client.ranges import RangeReader
from delta_prop.server.part_file import PART_SUFFIX
from delta_prop.spark.data_source.results import (
    ROWS_REPORTED_MAX,
    PartResult,
    RowsRefused,
    StagedRows,
    format_direct_refused,
    format_job_refused,
    format_written,
)
from delta_prop.spark.data_source.sending import stage_part
from delta_prop.spark.data_source.source import DeltaPropSource
from delta_prop.spark.data_source.writing import DirectWriter, PartReport, StagedWriter, StreamWriter
from delta_prop.spark.options import write_options
from delta_prop_broker.local_disk import LocalDisk
from delta_prop_wire.delta import Delta, create
from delta_prop_wire.errors import Refused, UsageError
from delta_prop_wire.frames import JobStatus, RefusedRow
from delta_prop_wire.spec import ErrorCode
from tests.delta_prop.client.threaded_service import Served, served

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from delta_prop_broker.local_disk import LocalFile

SCHEMA = StructType().add("vector_id", StringType()).add("vector", ArrayType(FloatType()))
SPARSE = (
    StructType()
    .add("vector_id", StringType())
    .add("op", StringType())
    .add("indices", ArrayType(IntegerType()))
    .add("values", ArrayType(FloatType()))
)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Served]:
    with served(propagator={"data": str(tmp_path / "data")}) as running:
        yield running


def source(service: Served, **options: str) -> DeltaPropSource:
    return DeltaPropSource({"url": service.address, "producer": "nightly", **options})


def writer(service: Served, schema: StructType = SCHEMA, **options: str) -> StagedWriter:
    driver_writer = source(service, **options).writer(schema, overwrite=False)
    assert isinstance(driver_writer, StagedWriter)
    return driver_writer


def stage(service: Served, driver_writer: StagedWriter, part: int, rows: pa.RecordBatch) -> PartReport:
    """Stage a part without Spark."""
    options = write_options({"url": service.address, "namespace": "docs"}, {})
    attempt = attempt_of(driver_writer._run, part)
    return PartReport(part, attempt, stage_part(iter([rows]), options, "nightly", part, attempt))


def vectors(*names: str) -> pa.RecordBatch:
    return pa.record_batch(
        {"vector_id": list(names), "vector": pa.array([[1.0]] * len(names), pa.list_(pa.float32()))}
    )


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.name == "delta_prop.spark"]


def test_committed_job_is_logged_in_one_line(service: Served, caplog: pytest.LogCaptureFixture) -> None:
    driver_writer = writer(service)
    parts = [
        stage(service, driver_writer, 0, vectors("a", "b")),
        stage(service, driver_writer, 1, vectors("c")),
    ]
    with caplog.at_level(logging.INFO, "delta_prop.spark"):
        pickle.loads(pickle.dumps(driver_writer)).commit(pickle.loads(pickle.dumps(parts)))
    (line,) = lines(caplog)
    assert line.startswith("job nightly: 3 deltas of 2 parts in ")
    assert line.endswith(" s for the service")
    assert RangeReader(service.address).bounds().end_offset == 3


def test_job_that_is_not_waited_for_is_committed(service: Served) -> None:
    driver_writer = writer(service, wait="false")
    driver_writer.commit([stage(service, driver_writer, 0, vectors("a"))])
    state = decide(service.address, "nightly", Decision.QUERY).state
    assert state in (JobState.COMMITTED, JobState.PUBLISHED)


class HeldParts(LocalDisk):
    """A disk that holds back reads of staged parts, and so their publication, until `is_released` is set."""

    def __init__(self, is_released: threading.Event, directory: str) -> None:
        super().__init__(directory)
        self._is_released = is_released

    def open(self, path: str, *, create: bool = False, read_only: bool = False) -> LocalFile:
        if read_only and path.endswith(PART_SUFFIX):
            assert self._is_released.wait(30)
        return super().open(path, create=create, read_only=read_only)


def test_job_not_published_in_time_is_not_aborted(tmp_path: Path) -> None:
    is_released = threading.Event()
    propagator = {"data": str(tmp_path / "data")}
    with served(propagator=propagator, open_disk=partial(HeldParts, is_released)) as service:
        driver_writer = writer(service, waitTimeoutSeconds="0.000001")
        expected = (
            r"job nightly is committed, but after 1e-06 s \(waitTimeoutSeconds\) only 0 of 1 deltas are publ"
        )
        try:
            with pytest.raises(UsageError, match=expected):
                driver_writer.commit([stage(service, driver_writer, 0, vectors("a"))])
            driver_writer.abort([None])
            assert decide(service.address, "nightly", Decision.QUERY).state is JobState.COMMITTED
        finally:
            is_released.set()


def test_deltas_refused_when_a_job_is_published_are_reported(
    service: Served, caplog: pytest.LogCaptureFixture
) -> None:
    with SyncProducer(service.address, name="first") as p:
        p.publish(Delta("first", create([1.0]), "docs"))
    with_unknown = pa.record_batch(
        {
            "vector_id": ["first", "gone"],
            "op": ["sparse", "sparse"],
            "indices": pa.array([[0], [0]], pa.list_(pa.int32())),
            "values": pa.array([[2.0], [2.0]], pa.list_(pa.float32())),
        }
    )
    parts = [stage(service, writer(service, SPARSE), 0, with_unknown)]
    expected = (
        r"job nightly: 1 of 2 deltas were refused when it was published and .*: vector_id 'gone', row 1 of "
        "part 0: INVALID_DELTA: vector_id: 'gone' in namespace 'docs' is unknown or deleted, "
    )
    with pytest.raises(RowsRefused, match=expected):
        writer(service, SPARSE).commit(parts)
    with caplog.at_level(logging.INFO, "delta_prop.spark"):
        writer(service, SPARSE, onRefused="skip").commit(parts)
    assert re.match(expected, lines(caplog)[-1])


def test_commit_of_unknown_parts_is_refused(service: Served) -> None:
    with pytest.raises(Refused, match="UNKNOWN_JOB"):
        writer(service).commit([PartReport(0, 5, PartResult(10, staged={0: StagedRows(10, 0)}))])
    writer(service).abort([])


def test_writer_follows_the_options_and_checks_columns(service: Served) -> None:
    data_source = source(service)
    assert isinstance(data_source.writer(SCHEMA, overwrite=False), StagedWriter)
    assert isinstance(source(service, staged="false").writer(SCHEMA, overwrite=False), DirectWriter)
    assert isinstance(data_source.streamWriter(SCHEMA, overwrite=False), StreamWriter)
    for call in (data_source.writer, data_source.streamWriter):
        with pytest.raises(UsageError, match=r'a log cannot be overwritten: write with mode\("append"\)'):
            call(SCHEMA, overwrite=True)
        with pytest.raises(UsageError, match="column vec is not a column of a delta"):
            call(StructType().add("vector_id", StringType()).add("vec", StringType()), overwrite=False)
    with pytest.raises(UsageError, match="column id: staged rows are identified by their job"):
        data_source.writer(StructType([*SCHEMA.fields, StructField("id", BinaryType())]), overwrite=False)
    for staged in ("true", "false"):
        nameless = DeltaPropSource({"url": service.address, "staged": staged})
        with pytest.raises(UsageError, match="option producer is missing: name the job"):
            nameless.writer(SCHEMA, overwrite=False)


def test_runs_have_distinct_attempt_numbers(service: Served) -> None:
    runs = {writer(service)._run for _ in range(8)}
    assert len(runs) == 8
    assert max(runs) < 1 << 32


def test_failed_driver_drops_only_its_own_parts(service: Served, caplog: pytest.LogCaptureFixture) -> None:
    first, second, third = writer(service), writer(service), writer(service)
    stage(service, first, 0, vectors("a", "b"))
    parts = [stage(service, second, 0, vectors("a", "b"))]
    first.abort([])
    third.abort([])  # the third driver has staged nothing
    assert "UNKNOWN_JOB" not in {vars(one).get("code") for one in caplog.records}
    second.commit(parts)
    first.abort([])  # the second driver has committed the job
    assert RangeReader(service.address).bounds().end_offset == 2


def test_job_without_rows_leaves_its_name_unused(service: Served) -> None:
    writer(service).commit([PartReport(0, 7)])
    driver_writer = writer(service)
    driver_writer.commit([stage(service, driver_writer, 0, vectors("a"))])
    assert RangeReader(service.address).bounds().end_offset == 1


def test_only_a_micro_batch_that_waited_is_logged(service: Served, caplog: pytest.LogCaptureFixture) -> None:
    driver_writer = source(service).streamWriter(SCHEMA, overwrite=False)
    with caplog.at_level(logging.INFO, "delta_prop.spark"):
        driver_writer.commit([PartReport(0, 1, PartResult(5, waited_s=0.1))], 3)
        assert not lines(caplog)
        driver_writer.commit([PartReport(0, 1, PartResult(5, waited_s=2.0)), None], 4)
    (waited,) = lines(caplog)
    assert waited.startswith("micro-batch 4: 5 deltas of 1 parts in ")
    assert waited.endswith("tasks waited 2.0 s for the service")


def refused_part(part: int, rows: int) -> PartReport:
    reported = [
        RefusedRow(part, row, f"v{row}", ErrorCode.INVALID_DELTA, "why") for row in range(min(rows, 5))
    ]
    return PartReport(part, 1, PartResult(100, refused=rows, refused_rows=reported))


def test_refused_rows_fail_a_direct_job_after_all_parts(
    service: Served, caplog: pytest.LogCaptureFixture
) -> None:
    driver_writer = source(service, staged="false").writer(SCHEMA, overwrite=False)
    expected = (
        r"job nightly, written directly: 1 of 105 deltas were refused and have no effect, unlike the "
        r"others: write these corrected under another producer \(.*\): vector_id 'v0', row 0 of part 1: "
        r"INVALID_DELTA: why$"
    )
    parts = pickle.loads(pickle.dumps([PartReport(0, 1, PartResult(5)), refused_part(1, 1)]))
    with pytest.raises(RowsRefused, match=expected):
        driver_writer.commit(parts)
    skipping = source(service, staged="false", onRefused="skip").writer(SCHEMA, overwrite=False)
    with caplog.at_level(logging.INFO, "delta_prop.spark"):
        skipping.commit(parts)
    written_line, refused_line = lines(caplog)
    assert ", 1 of them refused; " in written_line
    assert re.match(expected, refused_line)


def test_refused_rows_stop_a_stream(service: Served, caplog: pytest.LogCaptureFixture) -> None:
    driver_writer = source(service).streamWriter(SCHEMA, overwrite=False)
    expected = (
        "micro-batch 5: 1 of 100 deltas were refused and have no effect, unlike the others: write these "
        "corrected under another producer .only with .*without them.: vector_id 'v0', row 0 of part 1: "
        "INVALID_DELTA: why$"
    )
    with pytest.raises(RowsRefused, match=expected):
        driver_writer.commit([refused_part(1, 1), None], 5)
    skipping = source(service, onRefused="skip").streamWriter(SCHEMA, overwrite=False)
    with caplog.at_level(logging.INFO, "delta_prop.spark"):
        skipping.commit([refused_part(1, 1)], 5)
    assert re.match(expected, lines(caplog)[-1])


def test_failed_direct_job_logs_which_deltas_stay(service: Served, caplog: pytest.LogCaptureFixture) -> None:
    driver_writer = source(service, staged="false").writer(SCHEMA, overwrite=False)
    with caplog.at_level(logging.INFO, "delta_prop.spark"):
        driver_writer.commit([PartReport(0, 1, PartResult(5)), PartReport(1, 1, PartResult(2))])
        driver_writer.abort([PartReport(0, 1, PartResult(5)), None])
    done, failed = lines(caplog)
    assert done.startswith("job nightly, written directly: 7 deltas of 2 parts in ")
    assert failed.startswith("job nightly, written directly, has failed: 5 deltas of complete parts stay")


def test_report_texts_count_rows_and_parts() -> None:
    text = format_direct_refused("x", [refused_part(part, 40).result for part in range(4)])
    assert "job x, written directly: 160 of 400 deltas were refused " in text
    assert (text.count("INVALID_DELTA"), text[-14:]) == (ROWS_REPORTED_MAX, "; and 150 more")
    rows = tuple(RefusedRow(1, row, f"v{row}", ErrorCode.CONFLICT, "") for row in (4, 7))
    text = format_job_refused("x", JobStatus(JobState.PUBLISHED, 9_000, 5_000, 0, 4_000, rows))
    assert "; vector_id 'v7', row 7 of part 1: CONFLICT: refused before the service restarted, " in text
    assert text.endswith("; and 3,998 more")
    line = format_written(
        "job x", [PartResult(5, processed_before=3), PartResult(5, processed_before=1)], 1.0
    )
    assert "10 deltas of 2 parts in 1.0 s, 4 of them written before under this name;" in line
    line = format_written(
        "job x", [PartResult(one, staged={0: StagedRows(one, 0, was_decided=True)}) for one in (1, 2)], 1.0
    )
    assert line.endswith("; 2 parts had been committed before, and were not sent")
