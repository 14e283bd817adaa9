"""Rows go to the partitions of their vectors, each with one effect, however often a part is sent."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

pa = pytest.importorskip("pyarrow")
pytest.importorskip("pyspark")

from pyspark.sql.types import ArrayType, FloatType, StringType, StructType  # noqa: E402

from delta_prop.client import SyncProducer  # noqa: E402
from delta_prop.client.jobs import Decision, JobState, attempt_of, decide  # noqa: E402
from delta_prop.spark.columns import READ_SCHEMA  # noqa: E402
from delta_prop.spark.data_source import slices, writing  # noqa: E402
from delta_prop.spark.data_source.direct import COUNTERS_PER_BATCH, NumberedPart  # noqa: E402
from delta_prop.spark.data_source.routing import divide  # noqa: E402
from delta_prop.spark.data_source.sending import stage_part  # noqa: E402
from delta_prop.spark.data_source.source import DeltaPropSource  # noqa: E402
from delta_prop.spark.data_source.writing import PartReport, StagedWriter  # noqa: E402
from delta_prop.spark.options import WriteOptions, write_options  # noqa: E402
from delta_prop.spark.served_streams import ServedStream, find_served_stream  # noqa: E402
from delta_prop_wire.delta import Delta, create  # noqa: E402
from delta_prop_wire.errors import InvalidDelta, Refused, UsageError  # noqa: E402
from delta_prop_wire.murmur import partition_of  # noqa: E402
from delta_prop_wire.spec import ErrorCode  # noqa: E402
from tests.delta_prop.spark.stream_services import STREAM, keys_of_partitions, serving  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from delta_prop.client.jobs import JobStatus

COUNT = 3
KEYS = [f"k{number}" for number in range(95)]
SCHEMA = pa.schema(
    [
        ("vector_id", pa.string()),
        ("namespace", pa.string()),
        ("op", pa.string()),
        ("vector", pa.list_(pa.float32())),
        ("indices", pa.list_(pa.int32())),
        ("values", pa.list_(pa.float32())),
    ]
)


class TaskDied(Exception):
    """Raised to simulate a task's failure."""


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "BLOCK_ROWS", 10)


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(tmp_path_factory.mktemp("log") / "data", COUNT) as running:
        yield running


@pytest.fixture
def namespace(request: pytest.FixtureRequest) -> str:
    """A namespace, and a name of jobs, of the test's own."""
    return str(request.node.name)


def options(address: str, namespace: str, **more: str) -> WriteOptions:
    return write_options({"url": address, "namespace": namespace, "stream": STREAM, **more}, {})


def rows(keys: Sequence[str | None], *, dies_after: int | None = None) -> Iterator[pa.RecordBatch]:
    """Yield batches of 7 rows; raise TaskDied once `dies_after` rows are yielded."""
    for start in range(0, len(keys), 7):
        if dies_after is not None and start >= dies_after:
            raise TaskDied
        yield pa.RecordBatch.from_pylist([row(key) for key in keys[start : start + 7]], schema=SCHEMA)


def row(key: str | None) -> dict[str, Any]:
    """Return a row that creates a vector; for a key with -, one that changes a vector not in the log."""
    if key is not None and key.startswith("-"):
        return {"vector_id": key, "op": "sparse", "indices": [0], "values": [1.0]}
    return {"vector_id": key, "op": "create", "vector": [1.0, 2.0]}


def divided(keys: Sequence[str], namespace: str) -> list[list[str]]:
    """Return the keys of each partition, in their order."""
    parts: list[list[str]] = [[] for _ in range(COUNT)]
    for key in keys:
        parts[partition_of(namespace, key, COUNT)].append(key)
    return parts


# --- division


@pytest.mark.parametrize("given", [None, "docs"])
def test_rows_are_divided_by_their_vectors_in_order(given: str | None) -> None:
    names = [None, "a", "b"]
    table = [
        {"vector_id": f"{'x:' * (number % 5 == 0)}{number}", "namespace": names[number % 3], "op": "delete"}
        for number in range(300)
    ]
    table_rows = pa.RecordBatch.from_pylist(table, schema=SCHEMA)
    pieces = list(divide([table_rows], COUNT, given))
    for partition in range(COUNT):
        own = [one for one in pieces if one.partition == partition]
        numbers = [number for one in own for number in one.numbers.tolist()]
        assert [key for one in own for key in one.rows.column("vector_id").to_pylist()] == [
            table[number]["vector_id"] for number in numbers
        ]
        assert numbers == [
            number
            for number, one in enumerate(table)
            if partition_of(namespace_of_row(one, given), str(one["vector_id"]), COUNT) == partition
        ]
    assert len(pieces) < 300 / slices.BLOCK_ROWS * 2
    others = list(divide(rows_in_batches(table_rows, 13), COUNT, given))
    assert [(one.partition, one.numbers.tolist()) for one in others] == [
        (one.partition, one.numbers.tolist()) for one in pieces
    ]


def namespace_of_row(one: dict[str, Any], given: str | None) -> str:
    prefix = one["vector_id"].rpartition(":")[0] or "default"
    return str(one["namespace"] or given or prefix)


def rows_in_batches(table_rows: pa.RecordBatch, size: int) -> Iterator[pa.RecordBatch]:
    for start in range(0, table_rows.num_rows, size):
        yield table_rows.slice(start, size)


def test_row_without_a_valid_vector_is_named_by_its_row() -> None:
    for keys, expected in (
        ([*KEYS[:34], None, *KEYS[35:]], "vector_id: missing in row 34 of its partition, counted from 0"),
        ([*KEYS[:34], "x" * 10_000], "vector_id: of vector_id 'xxx.*10000 bytes"),
    ):
        with pytest.raises(InvalidDelta, match=expected):
            list(divide(rows(keys), COUNT, "docs"))
    bad = pa.RecordBatch.from_pylist([row("a") | {"namespace": "n" * 5_000}], schema=SCHEMA)
    with pytest.raises(InvalidDelta, match="namespace"):
        list(divide([bad], COUNT, None))


# --- direct writes


def direct_part(
    address: str, namespace: str, part: int = 0, *, batch: int | None = None, **more: str
) -> NumberedPart:
    given = options(address, namespace, **more)
    base = 0 if batch is None else (batch + 1) * COUNTERS_PER_BATCH
    return NumberedPart(given, f"{namespace}/{part}", base, find_served_stream(given.remote, STREAM))


def test_part_is_stored_once_in_the_partitions_of_its_vectors(address: str, namespace: str) -> None:
    for processed in (0, 95):
        result = direct_part(address, namespace).send(rows(KEYS))
        assert (result.deltas, result.refused, result.processed_before) == (95, 0, processed)
        assert keys_of_partitions(address, namespace=namespace) == divided(KEYS, namespace)
    assert all(divided(KEYS, namespace))
    assert keys_of_partitions(address, "default", namespace) == [[]]


@pytest.mark.parametrize("dies_after", [7, 42, 91])
def test_next_attempt_continues_where_a_dead_task_stopped(
    address: str, namespace: str, dies_after: int
) -> None:
    with pytest.raises(TaskDied):
        direct_part(address, namespace).send(rows(KEYS, dies_after=dies_after))
    stored = sum(map(len, keys_of_partitions(address, namespace=namespace)))
    assert 0 < stored < 95 or dies_after == 7
    assert direct_part(address, namespace).send(rows(KEYS)).processed_before == stored
    assert keys_of_partitions(address, namespace=namespace) == divided(KEYS, namespace)


def test_two_concurrent_tasks_store_each_row_once(address: str, namespace: str) -> None:
    def rows_overtaken() -> Iterator[pa.RecordBatch]:
        for number, batch in enumerate(rows(KEYS)):
            if number == 6:
                assert direct_part(address, namespace).send(rows(KEYS)).deltas == 95
            yield batch

    assert direct_part(address, namespace).send(rows_overtaken()).deltas == 95
    assert keys_of_partitions(address, namespace=namespace) == divided(KEYS, namespace)


def test_task_overtaken_in_one_partition_writes_the_others(address: str, namespace: str) -> None:
    own, *others = divided([f"k{number}" for number in range(200)], namespace)
    keys = [*own[:40], *others[0], *others[1], *own[40:]]

    def rows_overtaken() -> Iterator[pa.RecordBatch]:
        for number, batch in enumerate(rows(keys)):
            if number == 15:  # the other task has only seen rows of partition 0
                with pytest.raises(TaskDied):
                    direct_part(address, namespace).send(rows(keys, dies_after=35))
            yield batch

    task = direct_part(address, namespace, deliveryTimeoutSeconds="0.5")
    with pytest.raises(UsageError, match="/0 in partition 0 and stopped at row"):
        task.send(rows_overtaken())
    stored = keys_of_partitions(address, namespace=namespace)
    assert stored[1:] == others
    assert len(stored[0]) < len(own)
    assert direct_part(address, namespace).send(rows(keys)).deltas == 200
    assert keys_of_partitions(address, namespace=namespace) == [own, *others]


def test_only_refused_rows_have_no_effect_and_are_named_by_their_row(address: str, namespace: str) -> None:
    keys = [*KEYS[:13], "-x", *KEYS[13:40], "-y", "-z", *KEYS[40:]]
    direct_part(address, namespace, 7).send(rows(KEYS))  # the namespace exists in each partition
    for _ in range(2):
        result = direct_part(address, namespace, 4).send(rows(keys))
        assert (result.deltas, result.refused) == (98, 3)
        assert [(one.part, one.row, one.vector_id) for one in result.refused_rows] == [
            (4, 13, "-x"),
            (4, 41, "-y"),
            (4, 42, "-z"),
        ]
    stored = Counter(key for part in keys_of_partitions(address, namespace=namespace) for key in part)
    assert stored == Counter(KEYS * 2)


def test_other_rows_under_a_name_are_reported_with_their_partition(address: str, namespace: str) -> None:
    direct_part(address, namespace).send(rows(KEYS))
    with pytest.raises(UsageError, match=r"/0 in partition \d has \d+ rows, but \d+ were written under its"):
        direct_part(address, namespace).send(rows(KEYS[:60]))
    with pytest.raises(UsageError, match=r"/0 in partition \d: rows \d+ to \d+ differ from those written"):
        direct_part(address, namespace).send(rows([*KEYS[1:], KEYS[0]]))


def test_lost_checkpoint_is_reported(address: str, namespace: str) -> None:
    for batch, part in ((0, 0), (5, 0), (5, 3)):
        direct_part(address, namespace, part, batch=batch).send(rows(KEYS[:20]))
    for part in (0, 3, 9):
        with pytest.raises(UsageError, match="has written micro-batch 5, but this is micro-batch 1"):
            direct_part(address, namespace, part, batch=1).send(rows(KEYS[:20]))
    direct_part(address, namespace, 9, batch=6).send(rows(KEYS[:20]))


def test_part_without_rows_opens_nothing(address: str, namespace: str) -> None:
    stream = ServedStream("gone", 1 << 20, 4)
    assert NumberedPart(options(address, namespace), "x/0", 0, stream).send(rows([])).deltas == 0


# --- staged writes

WRITE_SCHEMA = StructType().add("vector_id", StringType()).add("vector", ArrayType(FloatType()))


def staged_writer(address: str, job: str, **more: str) -> StagedWriter:
    given = {"url": address, "producer": job, "namespace": job, "stream": STREAM, **more}
    writer = DeltaPropSource(given).writer(WRITE_SCHEMA, overwrite=False)
    assert isinstance(writer, StagedWriter)
    return writer


def stage(writer: StagedWriter, part: int, batches: Iterator[pa.RecordBatch], attempt: int = 0) -> PartReport:
    number = attempt_of(writer._run, attempt)
    return PartReport(
        part,
        number,
        stage_part(batches, writer._options, writer._job, part, number, stream=writer.stream),
    )


def stage_all(writer: StagedWriter, keys: Sequence[str] = KEYS) -> list[PartReport | None]:
    return [stage(writer, 0, rows(keys[:60])), stage(writer, 1, rows(keys[60:]), 1)]


def test_job_is_visible_only_after_its_commit(address: str, namespace: str) -> None:
    writer = staged_writer(address, namespace)
    with pytest.raises(TaskDied):
        stage(writer, 0, rows(KEYS[:60], dies_after=40), 8)
    parts = stage_all(writer)
    assert keys_of_partitions(address, namespace=namespace) == [[]] * COUNT
    writer.commit(parts)
    assert keys_of_partitions(address, namespace=namespace) == divided(KEYS, namespace)
    second = staged_writer(address, namespace)
    parts = stage_all(second)
    assert all(one is not None and one.result.was_decided for one in parts)
    second.commit(parts)
    assert keys_of_partitions(address, namespace=namespace) == divided(KEYS, namespace)
    other = staged_writer(address, namespace)
    parts = stage_all(other, [*KEYS[1:], "another"])
    with pytest.raises(Refused, match="JOB_DECIDED"):
        other.commit(parts)


@pytest.mark.parametrize(("decided", "aborts"), [(1, True), (1, False), (2, False)])
def test_job_whose_driver_stopped_between_decisions_is_finished_by_its_next_run(
    address: str,
    namespace: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    *,
    decided: int,
    aborts: bool,
) -> None:
    decide_one, left = StagedWriter._decide, [decided]

    def decide_some(
        self: StagedWriter, decision: Decision, partition: int, *args: Any, **more: Any
    ) -> JobStatus:
        if decision is Decision.COMMIT:
            if not left[0]:
                raise TaskDied
            left[0] -= 1
        return decide_one(self, decision, partition, *args, **more)

    first = staged_writer(address, namespace)
    parts = stage_all(first)
    with monkeypatch.context() as patch, caplog.at_level("INFO", "delta_prop.spark"):
        patch.setattr(writing.StagedWriter, "_decide", decide_some)
        with pytest.raises(TaskDied):
            first.commit(parts)
    numbers = ", ".join(map(str, range(decided)))
    assert f"is committed in {decided} of {COUNT} partitions, {numbers}:" in caplog.text
    if aborts:  # as Spark does, if the driver lives
        first.abort(parts)
    second = staged_writer(address, namespace)
    parts = stage_all(second)
    second.commit(parts)
    second.commit(parts)
    assert keys_of_partitions(address, namespace=namespace) == divided(KEYS, namespace)


def test_other_rows_are_refused_where_only_another_partition_has_the_job(
    address: str, namespace: str
) -> None:
    by_partition = divided(KEYS, namespace)
    first = staged_writer(address, namespace)
    first.commit([stage(first, 0, rows(by_partition[2]))])
    other = staged_writer(address, namespace)
    parts = [stage(other, 0, rows(by_partition[1]))]
    with pytest.raises(Refused, match="JOB_DECIDED"):
        other.commit(parts)
    assert keys_of_partitions(address, namespace=namespace) == [[], [], by_partition[2]]


def test_failed_driver_drops_its_parts_in_all_partitions(address: str, namespace: str) -> None:
    first, second = staged_writer(address, namespace), staged_writer(address, namespace)
    stage_all(first)
    parts = stage_all(second)
    first.abort([])
    second.commit(parts)
    assert keys_of_partitions(address, namespace=namespace) == divided(KEYS, namespace)
    stream = second.stream.stream_id
    states = [
        decide(address, namespace, Decision.QUERY, stream=stream, partition=partition).state
        for partition in range(COUNT)
    ]
    assert states == [JobState.PUBLISHED] * COUNT


def test_deltas_refused_in_several_partitions_are_reported_together(address: str, namespace: str) -> None:
    unknown = [f"-{number}" for number in range(9)]
    writer = staged_writer(address, namespace)
    for partition in range(COUNT):  # the namespace is known in all
        with SyncProducer(address, name=namespace, stream=STREAM, partition=partition) as p:
            p.publish(Delta("a", create([1.0, 2.0]), namespace))
    with pytest.raises(
        Exception, match=f"9 of {95 + 9} deltas were refused.*counted in partition 2"
    ) as found:
        writer.commit([stage(writer, 0, rows([*KEYS, *unknown]))])
    assert str(found.value).count(ErrorCode.INVALID_DELTA.name) == 9


# --- arguments


def test_unknown_stream_is_refused_on_the_driver(address: str) -> None:
    given = {"url": address, "stream": "ordres"}
    for call in (
        lambda: DeltaPropSource(given).reader(READ_SCHEMA).partitions(),
        lambda: DeltaPropSource(given).streamReader(READ_SCHEMA).initialOffset(),
        lambda: DeltaPropSource(given | {"producer": "x"}).writer(WRITE_SCHEMA, overwrite=False),
        lambda: DeltaPropSource(given | {"producer": "x"}).streamWriter(WRITE_SCHEMA, overwrite=False),
    ):
        with pytest.raises(UsageError, match="stream 'ordres': unknown: give one of default, orders"):
            call()
