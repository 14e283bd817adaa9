"""Each row of a part has one effect, even if its tasks die, are retried, or run twice at the same time."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

pa = pytest.importorskip("pyarrow")

from delta_prop.client import SyncProducer  # noqa: E402
from delta_prop.client.jobs import Decision, JobState, StagedPart, decide  # noqa: E402
from delta_prop.client.ranges import RangeReader  # noqa: E402
from delta_prop.spark.data_source import direct, slices  # noqa: E402
from delta_prop.spark.data_source.direct import COUNTERS_PER_BATCH, NumberedPart  # noqa: E402
from delta_prop.spark.data_source.results import PartResult, StagedRows  # noqa: E402
from delta_prop.spark.data_source.sending import stage_part  # noqa: E402
from delta_prop.spark.options import WriteOptions, write_options  # noqa: E402
from delta_prop_wire.delta import Delta, Priority, create  # noqa: E402
from delta_prop_wire.errors import Refused, UsageError  # noqa: E402
from delta_prop_wire.slicing import deltas_of  # noqa: E402
from delta_prop_wire.spec import ErrorCode  # noqa: E402
from tests.delta_prop.client.threaded_service import Served, served  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

SCHEMA = pa.schema(
    [
        ("vector_id", pa.string()),
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


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Served]:
    with served(propagator={"data": str(tmp_path / "data")}) as running:
        yield running


def options(service: Served, **more: str) -> WriteOptions:
    return write_options({"url": service.address, "namespace": "docs", **more}, {})


def rows(keys: Sequence[str | None], *, dies_after: int | None = None) -> Iterator[pa.RecordBatch]:
    """Yield batches of 7 rows; raise TaskDied once `dies_after` rows are yielded. See `row` for the keys."""
    for start in range(0, len(keys), 7):
        if dies_after is not None and start >= dies_after:
            raise TaskDied
        yield pa.RecordBatch.from_pylist([row(key) for key in keys[start : start + 7]], schema=SCHEMA)


def row(key: str | None) -> dict[str, Any]:
    """Return a row that creates a vector; for a key with -, one that changes a vector not in the log."""
    if key is not None and key.startswith("-"):
        return {"vector_id": key, "op": "sparse", "indices": [0], "values": [1.0]}
    return {"vector_id": key, "op": "create", "vector": [1.0, 2.0]}


def keys_in_log(service: Served) -> list[str]:
    reader = RangeReader(service.address)
    bounds = reader.bounds()
    batches = reader.read(bounds.start_offset, bounds.end_offset)
    return [delta.vector_id for logged in batches for delta in deltas_of(logged.batch)]


KEYS = [f"k{number}" for number in range(95)]

# --- direct writes


def test_part_is_stored_once_in_order(service: Served) -> None:
    assert NumberedPart(options(service), "job/0").send(rows(KEYS)).deltas == 95
    assert keys_in_log(service) == KEYS
    second = NumberedPart(options(service), "job/0").send(rows(KEYS))
    assert (second.deltas, second.refused) == (95, 0)
    assert keys_in_log(service) == KEYS
    assert NumberedPart(options(service), "job/1").send(rows([])) == PartResult()


@pytest.mark.parametrize("dies_after", [7, 21, 60, 91])
def test_next_attempt_continues_where_a_dead_task_stopped(service: Served, dies_after: int) -> None:
    with pytest.raises(TaskDied):
        NumberedPart(options(service), "job/0").send(rows(KEYS, dies_after=dies_after))
    stored_count = len(keys_in_log(service))
    assert 0 < stored_count < 95 or dies_after == 7
    assert NumberedPart(options(service), "job/0").send(rows(KEYS)).processed_before == stored_count
    assert keys_in_log(service) == KEYS
    assert NumberedPart(options(service), "job/0").send(rows(KEYS)).processed_before == 95


def test_single_row_of_another_priority_is_stored_once(service: Served) -> None:
    for _ in range(2):
        assert NumberedPart(options(service, priority="low"), "job/0").send(rows(["a"])).deltas == 1
    (logged,) = list(RangeReader(service.address).read(0, 1))
    assert (logged.batch.priority, logged.batch.namespace) == (Priority.LOW, "docs")
    assert keys_in_log(service) == ["a"]


KEYS_WITH_UNKNOWN = [*KEYS[:13], "-x", *KEYS[13:40], "-y", "-z", *KEYS[40:]]


REFUSED_ROWS = [(13, "-x"), (41, "-y"), (42, "-z")]


@pytest.mark.parametrize("on_refused", ["fail", "skip"])
def test_only_refused_rows_have_no_effect_and_are_reported(service: Served, on_refused: str) -> None:
    make_namespace_known(service)
    for reason_pattern in (
        "vector_id: '-.' in namespace 'docs' is unknown",
        "refused when it was",
        "refused when",
    ):
        result = NumberedPart(options(service, onRefused=on_refused), "job/4").send(rows(KEYS_WITH_UNKNOWN))
        assert (result.deltas, result.refused) == (98, 3)
        assert [
            (refused_row.row, refused_row.vector_id) for refused_row in result.refused_rows
        ] == REFUSED_ROWS
        for refused_row in result.refused_rows:
            assert (refused_row.part, refused_row.code) == (4, ErrorCode.INVALID_DELTA)
            assert re.match(reason_pattern.replace("-.", refused_row.vector_id), refused_row.text)
        assert Counter(keys_in_log(service)) == Counter(["first", *KEYS])


def test_second_run_of_a_job_adds_nothing_to_the_audit_log(
    service: Served, caplog: pytest.LogCaptureFixture
) -> None:
    make_namespace_known(service)
    # These are more blocks than those whose checksums the service stores.
    keys = [*KEYS, *(f"more-{number}" for number in range(800))]
    for _ in range(3):
        assert not NumberedPart(options(service), "job/0").send(rows(keys)).refused
        assert not NumberedPart(options(service), "one/0").send(rows(["alone"])).refused
    assert not [one for one in caplog.records if one.name == "delta_prop.audit"]
    assert NumberedPart(options(service), "job/1").send(rows(KEYS_WITH_UNKNOWN)).refused == 3
    refused = [vars(one)["code"] for one in caplog.records if one.name == "delta_prop.audit"]
    assert set(refused) == {"INVALID_DELTA"}
    caplog.clear()
    assert NumberedPart(options(service), "job/1").send(rows(KEYS_WITH_UNKNOWN)).refused == 3
    assert not [one for one in caplog.records if one.name == "delta_prop.audit"]


def test_only_the_first_of_many_refused_rows_are_reported(service: Served) -> None:
    make_namespace_known(service)
    result = NumberedPart(options(service), "job/0").send(
        rows([*KEYS[:4], *(f"-{number}" for number in range(20))])
    )
    assert (result.refused, len(result.refused_rows)) == (20, direct.REASONS_MAX)


def test_refused_last_row_is_reported_each_time(service: Served) -> None:
    make_namespace_known(service)
    for _ in range(2):
        result = NumberedPart(options(service), "job/0").send(rows([*KEYS[:4], "-last"]))
        assert [(one.row, one.vector_id) for one in result.refused_rows] == [(4, "-last")]
    assert Counter(keys_in_log(service)) == Counter(["first", *KEYS[:4]])


def test_rows_survive_a_death_while_refused_blocks_are_resent(
    service: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_namespace_known(service)
    call_count, original_offer_rows = 0, direct.offer_rows

    def offer_until_killed(producer: SyncProducer, block: pa.RecordBatch, *args: Any) -> Any:
        nonlocal call_count
        if producer.name.endswith("/again"):
            call_count += 1
            if call_count == 6:
                producer.flush()
                raise TaskDied
        return original_offer_rows(producer, block, *args)

    monkeypatch.setattr(direct, "offer_rows", offer_until_killed)
    with pytest.raises(TaskDied):
        NumberedPart(options(service, onRefused="skip"), "job/0").send(rows(KEYS_WITH_UNKNOWN))
    monkeypatch.setattr(direct, "offer_rows", original_offer_rows)
    assert (
        NumberedPart(options(service, onRefused="skip"), "job/0").send(rows(KEYS_WITH_UNKNOWN)).refused == 3
    )
    assert Counter(keys_in_log(service)) == Counter(["first", *KEYS])


def test_two_concurrent_tasks_store_each_row_once(service: Served) -> None:
    slow, quick = NumberedPart(options(service), "job/0"), NumberedPart(options(service), "job/0")
    results: list[PartResult] = []

    def rows_overtaken() -> Iterator[pa.RecordBatch]:
        for number, batch in enumerate(rows(KEYS)):
            if number == 6:
                results.append(quick.send(rows(KEYS)))
            yield batch

    assert slow.send(rows_overtaken()).deltas == 95
    assert results[0].deltas == 95
    assert keys_in_log(service) == KEYS


@pytest.mark.parametrize("keys", [[*KEYS[3:], "-x"], ["-x", *KEYS[3:]]])
def test_overtaken_task_leaves_refused_rows_to_the_next_attempt(service: Served, keys: list[str]) -> None:
    make_namespace_known(service)

    def rows_overtaken() -> Iterator[pa.RecordBatch]:
        for number, batch in enumerate(rows(keys)):
            if number == 6:
                assert NumberedPart(options(service), "job/0").send(rows(keys)).refused == 1
            yield batch

    with pytest.raises(
        UsageError, match="another attempt took over job/0, and rows of it were refused: this one"
    ):
        NumberedPart(options(service), "job/0").send(rows_overtaken())
    (refused_row,) = NumberedPart(options(service), "job/0").send(rows(keys)).refused_rows
    assert refused_row.vector_id == "-x"
    assert Counter(keys_in_log(service)) == Counter(["first", *KEYS[3:]])


def test_task_overtaken_by_one_that_stopped_is_refused(service: Served) -> None:
    def rows_overtaken() -> Iterator[pa.RecordBatch]:
        for number, batch in enumerate(rows(KEYS)):
            if number == 6:
                with pytest.raises(TaskDied):
                    NumberedPart(options(service), "job/0").send(rows(KEYS, dies_after=60))
            yield batch

    with pytest.raises(UsageError, match=r"another attempt took over job/0 and stopped at row \d+ of 95"):
        NumberedPart(options(service, deliveryTimeoutSeconds="0.5"), "job/0").send(rows_overtaken())
    NumberedPart(options(service), "job/0").send(rows(KEYS))
    assert keys_in_log(service) == KEYS


def test_part_with_fewer_rows_than_before_is_refused(service: Served) -> None:
    NumberedPart(options(service), "job/0").send(rows(KEYS))
    with pytest.raises(UsageError, match="job/0 has 90 rows, but 95 were written under its name before"):
        NumberedPart(options(service), "job/0").send(rows(KEYS[:90]))


def test_each_micro_batch_of_a_stream_is_stored_once(service: Served) -> None:
    def send(batch: int, keys: list[str]) -> None:
        NumberedPart(options(service), "q/0", (batch + 1) * COUNTERS_PER_BATCH).send(rows(keys))

    send(0, KEYS[:20])
    send(0, KEYS[:20])
    send(1, KEYS[20:21])
    send(4, KEYS[21:60])
    send(4, KEYS[21:60])
    assert keys_in_log(service) == KEYS[:60]
    expected = "q/0 has written micro-batch 4, but this is micro-batch 1, so the checkpoint was lost or reset"
    with pytest.raises(UsageError, match=expected):
        send(1, KEYS[20:21])


def test_lost_checkpoint_is_reported_in_a_new_partition_too(service: Served) -> None:
    def send(batch: int, part: int) -> None:
        NumberedPart(options(service), f"q/{part}", (batch + 1) * COUNTERS_PER_BATCH).send(rows([f"k{part}"]))

    send(0, 3)  # before part 0 has written anything
    send(0, 0)
    send(5, 0)
    send(5, 7)
    for batch, part in ((0, 0), (0, 3), (0, 9), (1, 9)):
        expected = (
            f"q/0 has written micro-batch 5, but this is micro-batch {batch}, so the checkpoint was lost"
        )
        with pytest.raises(UsageError, match=expected):
            send(batch, part)
    assert keys_in_log(service) == ["k3", "k0", "k0", "k7"]
    send(6, 9)
    send(6, 7)
    assert keys_in_log(service)[4:] == ["k9", "k7"]


def test_part_rereads_the_watermark_only_after_a_gap(
    service: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    original_read = direct._read_watermark
    monkeypatch.setattr(direct, "_read_watermark", lambda *args: (calls.append(1), original_read(*args))[1])
    for batch in (0, 1, 2, 2, 3):
        NumberedPart(options(service), "q/1", (batch + 1) * COUNTERS_PER_BATCH).send(rows(KEYS))
    assert len(calls) == 2


def test_row_without_vector_id_is_reported_by_its_row(service: Served) -> None:
    keys = [*KEYS[:34], None, *KEYS[35:]]
    expected = (
        "vector_id: missing in row 34 of its partition, counted from 0, after vector_id 'k33': show such"
    )
    with pytest.raises(Refused, match=expected):
        NumberedPart(options(service), "job/0").send(rows(keys))
    with pytest.raises(Refused, match=expected):
        stage_part(rows(keys), options(service), "nightly", 0, 17)
    expected = (
        "vector_id: missing in row 94 of its partition, counted from 0, after vector_id 'k93': show such"
    )
    with pytest.raises(Refused, match=expected):
        NumberedPart(options(service), "job/1").send(rows([*KEYS[:94], None]))


def test_bad_value_is_reported_before_its_block_is_sent(service: Served) -> None:
    bad = pa.RecordBatch.from_pylist(
        [row("a"), {"vector_id": "b", "op": "create", "vector": [float("nan")]}], schema=SCHEMA
    )
    with pytest.raises(Refused, match="vector: of vector_id 'b': number 0 is nan"):
        NumberedPart(options(service), "job/0").send(iter([bad]))
    assert keys_in_log(service) == []


def make_namespace_known(service: Served) -> None:
    """Publish to the namespace, so that the service can report vectors that do not exist in it."""
    with SyncProducer(service.address, name="known") as p:
        p.publish(Delta("first", create([1.0, 2.0]), "docs"))


# --- staged writes


def commit(service: Served, job: str, parts: list[tuple[int, int, PartResult]]) -> JobState:
    staged_parts = [
        StagedPart(part, attempt, *result.staged[0][:2]) for part, attempt, result in parts if result.staged
    ]
    state = decide(service.address, job, Decision.COMMIT, staged_parts).state
    for _ in range(400):
        if state is JobState.PUBLISHED:
            return state
        state = decide(service.address, job, Decision.QUERY).state
    return state


def test_job_is_visible_only_after_its_commit(service: Served) -> None:
    first = stage_part(rows(KEYS[:60]), options(service), "nightly", 0, 17)
    with pytest.raises(TaskDied):
        stage_part(rows(KEYS[60:], dies_after=20), options(service), "nightly", 1, 18)
    second = stage_part(rows(KEYS[60:]), options(service), "nightly", 1, 19)
    empty = stage_part(rows([]), options(service), "nightly", 2, 20)
    assert [one.deltas for one in (first, second, empty)] == [60, 35, 0]
    assert keys_in_log(service) == []
    assert commit(service, "nightly", [(0, 17, first), (1, 19, second), (2, 20, empty)]) is JobState.PUBLISHED
    assert keys_in_log(service) == KEYS
    for attempt in (0, 18):
        result = stage_part(rows(KEYS[60:]), options(service), "nightly", 1, attempt)
        assert result == PartResult(35, staged={0: second.staged[0]._replace(was_decided=True)})
    assert commit(service, "nightly", [(0, 1, first), (1, 2, second)]) is JobState.PUBLISHED
    assert keys_in_log(service) == KEYS
    with pytest.raises(Refused, match="JOB_DECIDED"):
        commit(service, "nightly", [(0, 1, first)])


def test_other_rows_under_a_committed_name_are_refused(service: Served) -> None:
    first = stage_part(rows(KEYS[:60]), options(service), "nightly", 0, 17)
    assert commit(service, "nightly", [(0, 17, first)]) is JobState.PUBLISHED
    other = stage_part(rows(KEYS[1:61]), options(service), "nightly", 0, 18)
    assert (other.deltas, other.was_decided) == (first.deltas, True)
    with pytest.raises(Refused, match="JOB_DECIDED"):
        commit(service, "nightly", [(0, 18, other)])
    assert keys_in_log(service) == KEYS[:60]


def test_part_with_another_checksum_is_not_committed(service: Served) -> None:
    result = stage_part(rows(KEYS[:60]), options(service), "nightly", 0, 17)
    deltas, checksum, _ = result.staged[0]
    result.staged[0] = StagedRows(deltas, checksum ^ 1)
    with pytest.raises(Refused, match=r"UNKNOWN_JOB.*nothing is decided"):
        commit(service, "nightly", [(0, 17, result)])
    assert keys_in_log(service) == []


def test_aborted_job_can_be_rerun_under_its_name(service: Served) -> None:
    stage_part(rows(KEYS), options(service), "nightly", 0, 1)
    decide(service.address, "nightly", Decision.ABORT)
    result = stage_part(rows(KEYS), options(service), "nightly", 0, 2)
    assert not result.was_decided
    commit(service, "nightly", [(0, 2, result)])
    assert keys_in_log(service) == KEYS
