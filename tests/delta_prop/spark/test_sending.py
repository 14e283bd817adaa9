"""A part is sent by tasks that die, come again and run twice at once: each of its rows has one effect."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

pa = pytest.importorskip("pyarrow")

from delta_prop.client import SyncProducer  # noqa: E402
from delta_prop.client.jobs import Decision, JobState, StagedPart, decide  # noqa: E402
from delta_prop.client.ranges import RangeReader  # noqa: E402
from delta_prop.spark.options import WriteOptions, write_options  # noqa: E402
from delta_prop.spark.writes import direct, slicing  # noqa: E402
from delta_prop.spark.writes.direct import COUNTERS_PER_BATCH, NumberedPart  # noqa: E402
from delta_prop.spark.writes.results import PartResult  # noqa: E402
from delta_prop.spark.writes.sending import stage_part  # noqa: E402
from delta_prop_wire.delta import Delta, Priority, create  # noqa: E402
from delta_prop_wire.errors import Refused, UsageError  # noqa: E402
from delta_prop_wire.slicing import deltas_of  # noqa: E402
from delta_prop_wire.spec import ErrorCode  # noqa: E402
from tests.delta_prop.client.threaded import Served, served  # noqa: E402

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


class Died(Exception):
    """A task's failure."""


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slicing, "BLOCK_ROWS", 10)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Served]:
    with served(propagator={"data": str(tmp_path / "data")}) as one:
        yield one


def options(service: Served, **more: str) -> WriteOptions:
    return write_options({"url": service.address, "namespace": "docs", **more}, {})


def rows(keys: Sequence[str | None], *, dies_after: int | None = None) -> Iterator[pa.RecordBatch]:
    """Batches of 7 rows; a key that begins with - changes a part of a vector that is not there."""
    for at in range(0, len(keys), 7):
        if dies_after is not None and at >= dies_after:
            raise Died
        yield pa.RecordBatch.from_pylist([row(key) for key in keys[at : at + 7]], schema=SCHEMA)


def row(key: str | None) -> dict[str, Any]:
    if key is not None and key.startswith("-"):
        return {"vector_id": key, "op": "sparse", "indices": [0], "values": [1.0]}
    return {"vector_id": key, "op": "create", "vector": [1.0, 2.0]}


def in_log(service: Served) -> list[str]:
    asker = RangeReader(service.address)
    bounds = asker.bounds()
    found = asker.read(bounds.start_offset, bounds.end_offset)
    return [delta.vector_id for one in found for delta in deltas_of(one.batch)]


KEYS = [f"k{at}" for at in range(95)]

# --- into the log at once


def test_a_part_in_order_once(service: Served) -> None:
    assert NumberedPart(options(service), "job/0").send(rows(KEYS)).deltas == 95
    assert in_log(service) == KEYS
    again = NumberedPart(options(service), "job/0").send(rows(KEYS))
    assert (again.deltas, again.refused) == (95, 0)
    assert in_log(service) == KEYS
    assert NumberedPart(options(service), "job/1").send(rows([])) == PartResult()


@pytest.mark.parametrize("dies_after", [7, 21, 60, 91])
def test_a_task_that_died_is_gone_on_with(service: Served, dies_after: int) -> None:
    with pytest.raises(Died):
        NumberedPart(options(service), "job/0").send(rows(KEYS, dies_after=dies_after))
    there = len(in_log(service))
    assert 0 < there < 95 or dies_after == 7
    assert NumberedPart(options(service), "job/0").send(rows(KEYS)).processed_before == there
    assert in_log(service) == KEYS
    assert NumberedPart(options(service), "job/0").send(rows(KEYS)).processed_before == 95


def test_one_row_alone_and_another_priority(service: Served) -> None:
    for _ in range(2):
        assert NumberedPart(options(service, priority="low"), "job/0").send(rows(["a"])).deltas == 1
    (found,) = list(RangeReader(service.address).read(0, 1))
    assert (found.batch.priority, found.batch.namespace) == (Priority.LOW, "docs")
    assert in_log(service) == ["a"]


BAD = [*KEYS[:13], "-x", *KEYS[13:40], "-y", "-z", *KEYS[40:]]


REFUSED = [(13, "-x"), (41, "-y"), (42, "-z")]


@pytest.mark.parametrize("refused", ["fail", "skip"])
def test_refused_rows_alone_have_no_effect_and_are_told_each_time(service: Served, refused: str) -> None:
    known(service)
    for why in ("vector_id: '-.' in namespace 'docs' is unknown", "refused when it was", "refused when"):
        sent = NumberedPart(options(service, onRefused=refused), "job/4").send(rows(BAD))
        assert (sent.deltas, sent.refused) == (98, 3)
        assert [(one.row, one.vector_id) for one in sent.refused_rows] == REFUSED
        for one in sent.refused_rows:
            assert (one.part, one.code) == (4, ErrorCode.INVALID_DELTA)
            assert re.match(why.replace("-.", one.vector_id), one.text)
        assert Counter(in_log(service)) == Counter(["first", *KEYS])


def test_a_job_that_runs_again_leaves_nothing_in_the_audit(
    service: Served, caplog: pytest.LogCaptureFixture
) -> None:
    known(service)
    keys = [*KEYS, *(f"more-{at}" for at in range(800))]  # more blocks than the service keeps checksums of
    for _ in range(3):
        assert not NumberedPart(options(service), "job/0").send(rows(keys)).refused
        assert not NumberedPart(options(service), "one/0").send(rows(["alone"])).refused
    assert not [one for one in caplog.records if one.name == "delta_prop.audit"]
    assert NumberedPart(options(service), "job/1").send(rows(BAD)).refused == 3
    refused = [vars(one)["code"] for one in caplog.records if one.name == "delta_prop.audit"]
    assert set(refused) == {"INVALID_DELTA"}
    caplog.clear()
    assert NumberedPart(options(service), "job/1").send(rows(BAD)).refused == 3
    assert not [one for one in caplog.records if one.name == "delta_prop.audit"]


def test_of_many_refused_rows_the_first_ones_are_told(service: Served) -> None:
    known(service)
    sent = NumberedPart(options(service), "job/0").send(rows([*KEYS[:4], *(f"-{at}" for at in range(20))]))
    assert (sent.refused, len(sent.refused_rows)) == (20, direct.REASONS_MAX)


def test_a_last_row_that_is_refused_is_told_each_time(service: Served) -> None:
    known(service)
    for _ in range(2):
        sent = NumberedPart(options(service), "job/0").send(rows([*KEYS[:4], "-last"]))
        assert [(one.row, one.vector_id) for one in sent.refused_rows] == [(4, "-last")]
    assert Counter(in_log(service)) == Counter(["first", *KEYS[:4]])


def test_a_task_that_died_while_refused_blocks_were_sent_again(
    service: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    known(service)
    sent, real = [0], direct.offer_rows

    def dying(producer: SyncProducer, block: pa.RecordBatch, *args: Any) -> Any:
        if producer.name.endswith("/again"):
            sent[0] += 1
            if sent[0] == 6:
                producer.flush()
                raise Died
        return real(producer, block, *args)

    monkeypatch.setattr(direct, "offer_rows", dying)
    with pytest.raises(Died):
        NumberedPart(options(service, onRefused="skip"), "job/0").send(rows(BAD))
    monkeypatch.setattr(direct, "offer_rows", real)
    assert NumberedPart(options(service, onRefused="skip"), "job/0").send(rows(BAD)).refused == 3
    assert Counter(in_log(service)) == Counter(["first", *KEYS])


def test_two_tasks_at_once(service: Served) -> None:
    slow, quick = NumberedPart(options(service), "job/0"), NumberedPart(options(service), "job/0")
    told: list[PartResult] = []

    def overtaken() -> Iterator[pa.RecordBatch]:
        for at, batch in enumerate(rows(KEYS)):
            if at == 6:
                told.append(quick.send(rows(KEYS)))
            yield batch

    assert slow.send(overtaken()).deltas == 95
    assert told[0].deltas == 95
    assert in_log(service) == KEYS


@pytest.mark.parametrize("bad", [[*KEYS[3:], "-x"], ["-x", *KEYS[3:]]])
def test_a_task_that_was_overtaken_leaves_what_was_refused_to_the_next_try(
    service: Served, bad: list[str]
) -> None:
    known(service)

    def overtaken() -> Iterator[pa.RecordBatch]:
        for at, batch in enumerate(rows(bad)):
            if at == 6:
                assert NumberedPart(options(service), "job/0").send(rows(bad)).refused == 1
            yield batch

    with pytest.raises(
        UsageError, match="another attempt took over job/0, and rows of it were refused: this one"
    ):
        NumberedPart(options(service), "job/0").send(overtaken())
    (told,) = NumberedPart(options(service), "job/0").send(rows(bad)).refused_rows
    assert told.vector_id == "-x"
    assert Counter(in_log(service)) == Counter(["first", *KEYS[3:]])


def test_a_task_that_was_overtaken_by_one_that_stands(service: Served) -> None:
    def overtaken() -> Iterator[pa.RecordBatch]:
        for at, batch in enumerate(rows(KEYS)):
            if at == 6:
                with pytest.raises(Died):
                    NumberedPart(options(service), "job/0").send(rows(KEYS, dies_after=60))
            yield batch

    with pytest.raises(UsageError, match=r"another attempt took over job/0 and stopped at row \d+ of 95"):
        NumberedPart(options(service, deliveryTimeoutSeconds="0.5"), "job/0").send(overtaken())
    NumberedPart(options(service), "job/0").send(rows(KEYS))
    assert in_log(service) == KEYS


def test_a_part_that_is_not_the_same_when_it_comes_again(service: Served) -> None:
    NumberedPart(options(service), "job/0").send(rows(KEYS))
    with pytest.raises(UsageError, match="job/0 has 90 rows, but 95 were written under its name before"):
        NumberedPart(options(service), "job/0").send(rows(KEYS[:90]))


def test_micro_batches_of_a_stream(service: Served) -> None:
    def send(batch: int, keys: list[str]) -> None:
        NumberedPart(options(service), "q/0", (batch + 1) * COUNTERS_PER_BATCH).send(rows(keys))

    send(0, KEYS[:20])
    send(0, KEYS[:20])
    send(1, KEYS[20:21])
    send(4, KEYS[21:60])
    send(4, KEYS[21:60])
    assert in_log(service) == KEYS[:60]
    told = "q/0 has written micro-batch 4, but this is micro-batch 1, so the checkpoint was lost or reset"
    with pytest.raises(UsageError, match=told):
        send(1, KEYS[20:21])


def test_a_stream_without_its_checkpoint_is_told_in_a_partition_that_it_never_wrote(service: Served) -> None:
    def send(batch: int, part: int) -> None:
        NumberedPart(options(service), f"q/{part}", (batch + 1) * COUNTERS_PER_BATCH).send(rows([f"k{part}"]))

    send(0, 3)  # before the first part has written
    send(0, 0)
    send(5, 0)
    send(5, 7)
    for batch, part in ((0, 0), (0, 3), (0, 9), (1, 9)):
        told = f"q/0 has written micro-batch 5, but this is micro-batch {batch}, so the checkpoint was lost"
        with pytest.raises(UsageError, match=told):
            send(batch, part)
    assert in_log(service) == ["k3", "k0", "k0", "k7"]
    send(6, 9)
    send(6, 7)
    assert in_log(service)[4:] == ["k9", "k7"]


def test_a_part_asks_for_its_stream_only_where_it_did_not_write_the_micro_batch_before(
    service: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    looked = direct._read_watermark
    monkeypatch.setattr(direct, "_read_watermark", lambda *args: (asked.append(1), looked(*args))[1])
    for batch in (0, 1, 2, 2, 3):
        NumberedPart(options(service), "q/1", (batch + 1) * COUNTERS_PER_BATCH).send(rows(KEYS))
    assert len(asked) == 2


def test_a_row_without_a_vector_id_is_told_by_its_row_of_the_part(service: Served) -> None:
    keys = [*KEYS[:34], None, *KEYS[35:]]
    told = "vector_id: missing in row 34 of its partition, counted from 0, after vector_id 'k33': show such"
    with pytest.raises(Refused, match=told):
        NumberedPart(options(service), "job/0").send(rows(keys))
    with pytest.raises(Refused, match=told):
        stage_part(rows(keys), options(service), "nightly", 0, 17)
    told = "vector_id: missing in row 94 of its partition, counted from 0, after vector_id 'k93': show such"
    with pytest.raises(Refused, match=told):
        NumberedPart(options(service), "job/1").send(rows([*KEYS[:94], None]))


def test_a_bad_value_is_told_before_its_block_is_sent(service: Served) -> None:
    bad = pa.RecordBatch.from_pylist(
        [row("a"), {"vector_id": "b", "op": "create", "vector": [float("nan")]}], schema=SCHEMA
    )
    with pytest.raises(Refused, match="vector: of vector_id 'b': number 0 is nan"):
        NumberedPart(options(service), "job/0").send(iter([bad]))
    assert in_log(service) == []


def known(service: Served) -> None:
    """The service knows the namespace, so that it tells which of its vectors are not there."""
    with SyncProducer(service.address, name="known") as p:
        p.publish(Delta("first", create([1.0, 2.0]), "docs"))


# --- kept aside


def commit(service: Served, job: str, parts: list[tuple[int, int, PartResult]]) -> JobState:
    named = [
        StagedPart(part, attempt, sent.deltas, sent.checksum) for part, attempt, sent in parts if sent.deltas
    ]
    state = decide(service.address, job, Decision.COMMIT, named).state
    for _ in range(400):
        if state is JobState.PUBLISHED:
            return state
        state = decide(service.address, job, Decision.QUERY).state
    return state


def test_a_job_is_seen_once_it_is_committed(service: Served) -> None:
    first = stage_part(rows(KEYS[:60]), options(service), "nightly", 0, 17)
    with pytest.raises(Died):
        stage_part(rows(KEYS[60:], dies_after=20), options(service), "nightly", 1, 18)
    second = stage_part(rows(KEYS[60:]), options(service), "nightly", 1, 19)
    empty = stage_part(rows([]), options(service), "nightly", 2, 20)
    assert [one.deltas for one in (first, second, empty)] == [60, 35, 0]
    assert in_log(service) == []
    assert commit(service, "nightly", [(0, 17, first), (1, 19, second), (2, 20, empty)]) is JobState.PUBLISHED
    assert in_log(service) == KEYS
    for attempt in (0, 18):
        sent = stage_part(rows(KEYS[60:]), options(service), "nightly", 1, attempt)
        assert sent == PartResult(35, was_decided=True, checksum=second.checksum)
    assert commit(service, "nightly", [(0, 1, first), (1, 2, second)]) is JobState.PUBLISHED
    assert in_log(service) == KEYS
    with pytest.raises(Refused, match="JOB_DECIDED"):
        commit(service, "nightly", [(0, 1, first)])


def test_as_many_other_rows_under_a_name_that_was_committed_are_refused(service: Served) -> None:
    first = stage_part(rows(KEYS[:60]), options(service), "nightly", 0, 17)
    assert commit(service, "nightly", [(0, 17, first)]) is JobState.PUBLISHED
    other = stage_part(rows(KEYS[1:61]), options(service), "nightly", 0, 18)
    assert (other.deltas, other.was_decided) == (first.deltas, True)
    with pytest.raises(Refused, match="JOB_DECIDED"):
        commit(service, "nightly", [(0, 18, other)])
    assert in_log(service) == KEYS[:60]


def test_a_part_that_says_something_else_than_its_task_knows_is_not_committed(service: Served) -> None:
    sent = stage_part(rows(KEYS[:60]), options(service), "nightly", 0, 17)
    sent.checksum ^= 1
    with pytest.raises(Refused, match=r"UNKNOWN_JOB.*nothing is decided"):
        commit(service, "nightly", [(0, 17, sent)])
    assert in_log(service) == []


def test_a_job_that_was_dropped_is_run_again_under_its_name(service: Served) -> None:
    stage_part(rows(KEYS), options(service), "nightly", 0, 1)
    decide(service.address, "nightly", Decision.ABORT)
    sent = stage_part(rows(KEYS), options(service), "nightly", 0, 2)
    assert not sent.was_decided
    commit(service, "nightly", [(0, 2, sent)])
    assert in_log(service) == KEYS
