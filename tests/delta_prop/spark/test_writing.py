"""The driver's part of a job: commit or abort, and its one-line report or the cause of failure."""

from __future__ import annotations

import logging
import pickle
import re
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
from delta_prop.spark.options import write_options
from delta_prop.spark.source import DeltaPropSource
from delta_prop.spark.writes.results import (
    ROWS_REPORTED_MAX,
    PartResult,
    RowsRefused,
    format_direct_refused,
    format_job_refused,
    format_written,
)
from delta_prop.spark.writes.sending import stage_part
from delta_prop.spark.writes.writing import DirectWriter, PartReport, StagedWriter, StreamWriter
from delta_prop_wire.delta import Delta, create
from delta_prop_wire.errors import Refused, UsageError
from delta_prop_wire.frames import JobStatus, RefusedRow
from delta_prop_wire.spec import ErrorCode
from tests.delta_prop.client.threaded import Served, served

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

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
    with served(propagator={"data": str(tmp_path / "data")}) as one:
        yield one


def source(service: Served, **options: str) -> DeltaPropSource:
    return DeltaPropSource({"url": service.address, "producer": "nightly", **options})


def writer(service: Served, schema: StructType = SCHEMA, **options: str) -> StagedWriter:
    made = source(service, **options).writer(schema, overwrite=False)
    assert isinstance(made, StagedWriter)
    return made


def staged(service: Served, made: StagedWriter, part: int, rows: pa.RecordBatch) -> PartReport:
    """Stage a part without Spark."""
    options = write_options({"url": service.address, "namespace": "docs"}, {})
    attempt = attempt_of(made._run, part)
    return PartReport(part, attempt, stage_part(iter([rows]), options, "nightly", part, attempt))


def vectors(*names: str) -> pa.RecordBatch:
    return pa.record_batch(
        {"vector_id": list(names), "vector": pa.array([[1.0]] * len(names), pa.list_(pa.float32()))}
    )


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.name == "delta_prop.spark"]


def test_a_job_in_one_line(service: Served, caplog: pytest.LogCaptureFixture) -> None:
    made = writer(service)
    parts = [staged(service, made, 0, vectors("a", "b")), staged(service, made, 1, vectors("c"))]
    with caplog.at_level(logging.INFO, "delta_prop.spark"):
        pickle.loads(pickle.dumps(made)).commit(pickle.loads(pickle.dumps(parts)))
    (line,) = lines(caplog)
    assert line.startswith("job nightly: 3 deltas of 2 parts in ")
    assert line.endswith(" s for the service")
    assert RangeReader(service.address).bounds().end_offset == 3


def test_a_job_that_is_not_waited_for_is_published_all_the_same(service: Served) -> None:
    made = writer(service, wait="false")
    made.commit([staged(service, made, 0, vectors("a"))])
    state = decide(service.address, "nightly", Decision.QUERY).state
    assert state in (JobState.COMMITTED, JobState.PUBLISHED)


def test_a_job_that_is_not_published_in_time_goes_on(service: Served) -> None:
    made = writer(service, waitTimeoutSeconds="0.000001")
    told = r"job nightly is committed, but after 1e-06 s \(waitTimeoutSeconds\) only 0 of 1 deltas are publ"
    with pytest.raises(UsageError, match=told):
        made.commit([staged(service, made, 0, vectors("a"))])
    made.abort([None])
    assert decide(service.address, "nightly", Decision.QUERY).state is not JobState.ABORTED


def test_deltas_that_are_refused_when_a_job_is_published(
    service: Served, caplog: pytest.LogCaptureFixture
) -> None:
    with SyncProducer(service.address, name="first") as p:
        p.publish(Delta("first", create([1.0]), "docs"))
    gone = pa.record_batch(
        {
            "vector_id": ["first", "gone"],
            "op": ["sparse", "sparse"],
            "indices": pa.array([[0], [0]], pa.list_(pa.int32())),
            "values": pa.array([[2.0], [2.0]], pa.list_(pa.float32())),
        }
    )
    parts = [staged(service, writer(service, SPARSE), 0, gone)]
    told = (
        r"job nightly: 1 of 2 deltas were refused when it was published and .*: vector_id 'gone', row 1 of "
        "part 0: INVALID_DELTA: vector_id: 'gone' in namespace 'docs' is unknown or deleted, "
    )
    with pytest.raises(RowsRefused, match=told):
        writer(service, SPARSE).commit(parts)
    with caplog.at_level(logging.INFO, "delta_prop.spark"):
        writer(service, SPARSE, onRefused="skip").commit(parts)
    assert re.match(told, lines(caplog)[-1])


def test_parts_that_are_not_there(service: Served) -> None:
    with pytest.raises(Refused, match="UNKNOWN_JOB"):
        writer(service).commit([PartReport(0, 5, PartResult(10))])
    writer(service).abort([])


def test_what_a_writer_takes(service: Served) -> None:
    one = source(service)
    assert isinstance(one.writer(SCHEMA, overwrite=False), StagedWriter)
    assert isinstance(source(service, staged="false").writer(SCHEMA, overwrite=False), DirectWriter)
    assert isinstance(one.streamWriter(SCHEMA, overwrite=False), StreamWriter)
    for call in (one.writer, one.streamWriter):
        with pytest.raises(UsageError, match=r'a log cannot be overwritten: write with mode\("append"\)'):
            call(SCHEMA, overwrite=True)
        with pytest.raises(UsageError, match="column vec is not a column of a delta"):
            call(StructType().add("vector_id", StringType()).add("vec", StringType()), overwrite=False)
    with pytest.raises(UsageError, match="column id: staged rows are identified by their job"):
        one.writer(StructType([*SCHEMA.fields, StructField("id", BinaryType())]), overwrite=False)
    for staged_ in ("true", "false"):
        nameless = DeltaPropSource({"url": service.address, "staged": staged_})
        with pytest.raises(UsageError, match="option producer is missing: name the job"):
            nameless.writer(SCHEMA, overwrite=False)


def test_two_runs_have_attempts_of_their_own(service: Served) -> None:
    runs = {writer(service)._run for _ in range(8)}
    assert len(runs) == 8
    assert max(runs) < 1 << 32


def test_of_two_drivers_under_one_name_the_one_that_fails_drops_its_own_parts(
    service: Served, caplog: pytest.LogCaptureFixture
) -> None:
    first, second, third = writer(service), writer(service), writer(service)
    staged(service, first, 0, vectors("a", "b"))
    parts = [staged(service, second, 0, vectors("a", "b"))]
    first.abort([])
    third.abort([])  # it had come to nothing
    assert "UNKNOWN_JOB" not in {vars(one).get("code") for one in caplog.records}
    second.commit(parts)
    first.abort([])  # the other one has committed it
    assert RangeReader(service.address).bounds().end_offset == 2


def test_a_job_without_rows_leaves_its_name_to_one_that_has_some(service: Served) -> None:
    writer(service).commit([PartReport(0, 7)])
    made = writer(service)
    made.commit([staged(service, made, 0, vectors("a"))])
    assert RangeReader(service.address).bounds().end_offset == 1


def test_a_micro_batch_is_told_of_where_it_matters(service: Served, caplog: pytest.LogCaptureFixture) -> None:
    made = source(service).streamWriter(SCHEMA, overwrite=False)
    with caplog.at_level(logging.INFO, "delta_prop.spark"):
        made.commit([PartReport(0, 1, PartResult(5, waited_s=0.1))], 3)
        assert not lines(caplog)
        made.commit([PartReport(0, 1, PartResult(5, waited_s=2.0)), None], 4)
    (waited,) = lines(caplog)
    assert waited.startswith("micro-batch 4: 5 deltas of 1 parts in ")
    assert waited.endswith("tasks waited 2.0 s for the service")


def refused_part(part: int, rows: int) -> PartReport:
    told = [RefusedRow(part, row, f"v{row}", ErrorCode.INVALID_DELTA, "why") for row in range(min(rows, 5))]
    return PartReport(part, 1, PartResult(100, refused=rows, refused_rows=told))


def test_rows_that_are_refused_fail_a_direct_job_once_all_parts_are_done(
    service: Served, caplog: pytest.LogCaptureFixture
) -> None:
    made = source(service, staged="false").writer(SCHEMA, overwrite=False)
    told = (
        r"job nightly, written directly: 1 of 105 deltas were refused and have no effect, unlike the "
        r"others: write these corrected under another producer \(.*\): vector_id 'v0', row 0 of part 1: "
        r"INVALID_DELTA: why$"
    )
    parts = pickle.loads(pickle.dumps([PartReport(0, 1, PartResult(5)), refused_part(1, 1)]))
    with pytest.raises(RowsRefused, match=told):
        made.commit(parts)
    allowed = source(service, staged="false", onRefused="skip").writer(SCHEMA, overwrite=False)
    with caplog.at_level(logging.INFO, "delta_prop.spark"):
        allowed.commit(parts)
    written, refused = lines(caplog)
    assert ", 1 of them refused; " in written
    assert re.match(told, refused)


def test_rows_that_are_refused_stop_a_stream(service: Served, caplog: pytest.LogCaptureFixture) -> None:
    made = source(service).streamWriter(SCHEMA, overwrite=False)
    told = (
        "micro-batch 5: 1 of 100 deltas were refused and have no effect, unlike the others: write these "
        "corrected under another producer .only with .*without them.: vector_id 'v0', row 0 of part 1: "
        "INVALID_DELTA: why$"
    )
    with pytest.raises(RowsRefused, match=told):
        made.commit([refused_part(1, 1), None], 5)
    allowed = source(service, onRefused="skip").streamWriter(SCHEMA, overwrite=False)
    with caplog.at_level(logging.INFO, "delta_prop.spark"):
        allowed.commit([refused_part(1, 1)], 5)
    assert re.match(told, lines(caplog)[-1])


def test_a_direct_job_says_what_stays(service: Served, caplog: pytest.LogCaptureFixture) -> None:
    made = source(service, staged="false").writer(SCHEMA, overwrite=False)
    with caplog.at_level(logging.INFO, "delta_prop.spark"):
        made.commit([PartReport(0, 1, PartResult(5)), PartReport(1, 1, PartResult(2))])
        made.abort([PartReport(0, 1, PartResult(5)), None])
    done, failed = lines(caplog)
    assert done.startswith("job nightly, written directly: 7 deltas of 2 parts in ")
    assert failed.startswith("job nightly, written directly, has failed: 5 deltas of complete parts stay")


def test_texts() -> None:
    told = format_direct_refused("x", [refused_part(part, 40).result for part in range(4)])
    assert "job x, written directly: 160 of 400 deltas were refused " in told
    assert (told.count("INVALID_DELTA"), told[-14:]) == (ROWS_REPORTED_MAX, "; and 150 more")
    rows = tuple(RefusedRow(1, row, f"v{row}", ErrorCode.CONFLICT, "") for row in (4, 7))
    told = format_job_refused("x", JobStatus(JobState.PUBLISHED, 9_000, 5_000, 0, 4_000, rows))
    assert "; vector_id 'v7', row 7 of part 1: CONFLICT: refused before the service restarted, " in told
    assert told.endswith("; and 3,998 more")
    line = format_written(
        "job x", [PartResult(5, processed_before=3), PartResult(5, processed_before=1)], 1.0
    )
    assert "10 deltas of 2 parts in 1.0 s, 4 of them written before under this name;" in line
    line = format_written("job x", [PartResult(1, was_decided=True), PartResult(2, was_decided=True)], 1.0)
    assert line.endswith("; 2 parts had been committed before, and were not sent")
