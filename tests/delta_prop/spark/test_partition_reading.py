"""Reads of several partitions: a range of each, a position of each, one limit for all."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

pa = pytest.importorskip("pyarrow")
pytest.importorskip("pyspark")

from pyspark.sql.datasource import EqualTo, In  # noqa: E402
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows  # noqa: E402

from delta_prop.client import SyncProducer  # noqa: E402
from delta_prop.spark.columns import READ_SCHEMA, STREAM_READ_SCHEMA  # noqa: E402
from delta_prop.spark.data_source.reading import PushingReader, Reader, StreamReader  # noqa: E402
from delta_prop.spark.data_source.source import DeltaPropSource  # noqa: E402
from delta_prop.spark.data_source.stream_positions import share_limit  # noqa: E402
from delta_prop.spark.options import read_options  # noqa: E402
from delta_prop_wire.delta import Delta, opaque  # noqa: E402
from delta_prop_wire.errors import UsageError  # noqa: E402
from tests.delta_prop.spark.stream_services import STREAM, create, serving  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator

NOW_US = 1_900_000_000_000_000
"""A time after all times in the tests."""
COUNTS = (100, 20, 0)
"""Number of deltas in each partition."""
READ_ALL = ReadAllAvailable()


def publish(address: str, partition: int, count: int, stream: str = STREAM) -> None:
    with SyncProducer(address, name="test", stream=stream, partition=partition) as p:
        for number in range(count):
            p.offer(Delta(f"p{partition}-{number}", opaque(b"x")))


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(tmp_path_factory.mktemp("log") / "data") as running:
        for partition, count in enumerate(COUNTS):
            publish(running, partition, count)
        yield running


@pytest.fixture
def more(address: str, request: pytest.FixtureRequest) -> str:
    """The name of a stream of the test's own, with a delta in partition 1."""
    name = str(request.node.name)
    create(address, name, 3)
    publish(address, 1, 1, name)
    return name


def reader(address: str, **options: str) -> Reader:
    given = {"url": address, "stream": STREAM, **options}
    return Reader(read_options(given, {}, NOW_US), STREAM_READ_SCHEMA)


def stream_reader(address: str, **options: str) -> StreamReader:
    given = {"url": address, "stream": STREAM, **options}
    return StreamReader(read_options(given, {}, NOW_US, stream=True), STREAM_READ_SCHEMA)


def rows_of(one: Reader | StreamReader, ranges: Any) -> list[tuple[int, int, str]]:
    """Return partition, offset and vector of each row, in the order in which tasks read them."""
    return [
        (row["partition"], row["offset"], row["vector_id"])
        for part in ranges
        for batch in one.read(part)
        for row in batch.to_pylist()
    ]


def offsets(position: dict[str, Any]) -> list[int]:
    return [at["offset"] for at in json.loads(json.dumps(position)).values()]


# --- batches


def test_each_row_of_each_partition_is_read_once_in_order(address: str) -> None:
    one = reader(address, partitions="6")
    ranges = one.partitions()
    assert [(part.log.partition, part.start, part.end) for part in ranges] == [
        *((0, start, start + 20) for start in range(0, 100, 20)),
        (1, 0, 20),
    ]
    assert rows_of(one, ranges) == [
        (partition, number, f"p{partition}-{number}")
        for partition, count in enumerate(COUNTS)
        for number in range(count)
    ]


def test_one_partition_is_read_from_an_offset(address: str) -> None:
    one = reader(address, partition="1", start="15", end="18")
    assert rows_of(one, one.partitions()) == [(1, number, f"p1-{number}") for number in (15, 16, 17)]
    expected = "option start 15 is an offset, but each of the 3 partitions has its own: give a time, earliest"
    with pytest.raises(UsageError, match=expected):
        reader(address, start="15").partitions()
    with pytest.raises(UsageError, match="partition 3: stream 'orders' has 3: give 0 to 2"):
        reader(address, partition="3").partitions()
    with pytest.raises(UsageError, match="partition 1: stream 'default' has 1: give 0 to 0"):
        reader(address, stream="default", partition="1").partitions()


def test_positions_by_time_hold_in_each_partition(address: str) -> None:
    one = reader(address, start="2000-01-01")
    assert len(rows_of(one, one.partitions())) == sum(COUNTS)
    assert [part.size for part in reader(address, start="latest").partitions()] == [0]
    with pytest.raises(UsageError, match="options start and end: the read would begin at offset"):
        reader(address, start="latest", end="2000-01-01").partitions()


def test_pushed_down_filters_choose_partitions(address: str) -> None:
    given = read_options({"url": address, "stream": STREAM, "pushdown": "true"}, {}, NOW_US)
    for filters, expected in (
        ([EqualTo(("partition",), 1)], {1}),
        ([In(("partition",), (0, 1)), EqualTo(("partition",), 0)], {0}),
        ([EqualTo(("partition",), 7)], set()),
        ([EqualTo(("partition",), "x")], {0, 1}),
    ):
        one = PushingReader(given, STREAM_READ_SCHEMA)
        assert one.pushFilters(filters) == filters
        assert {row[0] for row in rows_of(one, one.partitions())} == expected


def test_column_partition_exists_if_a_stream_is_named(address: str) -> None:
    assert DeltaPropSource({"url": address}).schema() == READ_SCHEMA
    assert DeltaPropSource({"url": address, "Stream": "default"}).schema() == STREAM_READ_SCHEMA
    assert STREAM_READ_SCHEMA.names[:3] == ["offset", "partition", "vector_id"]


# --- streams


def test_stream_advances_by_its_limit_in_all_partitions_together(address: str) -> None:
    one = stream_reader(address, maxOffsetsPerTrigger="31")
    limit = one.getDefaultReadLimit()
    assert limit == ReadMaxRows(31)
    positions = [one.initialOffset()]
    while (latest := one.latestOffset(positions[-1], limit)) != positions[-1]:
        positions.append(latest)
    assert [offsets(position) for position in positions] == [
        [0, 0, 0],
        [16, 15, 0],
        [42, 20, 0],
        [73, 20, 0],
        [100, 20, 0],
    ]
    counts: Counter[tuple[int, int, str]] = Counter()
    for start, end in pairwise(positions):
        counts.update(rows_of(one, one.partitions(start, end)))
    assert counts == Counter(rows_of(one, reader(address).partitions()))
    assert one.partitions(positions[-1], positions[-1]) == []
    assert offsets(one.reportLatestOffset()) == [100, 20, 0]


def test_available_now_ends_where_the_logs_ended(address: str, more: str) -> None:
    one = stream_reader(address, stream=more)
    one.prepareForTriggerAvailableNow()
    publish(address, 0, 5, more)
    position = one.latestOffset(one.initialOffset(), READ_ALL)
    assert offsets(position) == [0, 1, 0]
    assert one.latestOffset(position, READ_ALL) is position
    assert offsets(stream_reader(address, stream=more).latestOffset(position, READ_ALL)) == [5, 1, 0]


def test_checkpoint_of_one_log_resumes_for_a_stream_with_one_partition(address: str) -> None:
    create(address, "single", 1)
    publish(address, 0, 9, "single")
    one = stream_reader(address, stream="single")
    log_id = one._bounds()[0].log_id.hex()
    position = {"0": 4, "log": log_id, "epoch": 1}
    end = one.latestOffset(position, READ_ALL)
    assert end == {"0": {"offset": 9, "log": log_id, "epoch": 1}}
    assert [offset for _, offset, _ in rows_of(one, one.partitions(position, end))] == [4, 5, 6, 7, 8]
    at_end = position | {"0": 9}
    assert one.latestOffset(at_end, READ_ALL) is at_end
    with pytest.raises(UsageError, match="has the partitions 0, but this stream reads 0, 1, 2"):
        stream_reader(address).latestOffset(position, READ_ALL)


def test_checkpoint_of_another_stream_or_partition_is_refused(address: str, more: str) -> None:
    position = stream_reader(address).initialOffset()
    log = position["0"]["log"]
    for call in (
        lambda one: one.latestOffset(position, READ_ALL),
        lambda one: one.partitions(position, position),
    ):
        with pytest.raises(UsageError, match=f"partition 0 is at offset 0 of log {log}, but"):
            call(stream_reader(address, stream=more))
        with pytest.raises(UsageError, match="has the partitions 0, 1, 2, but this stream reads 1: give the"):
            call(stream_reader(address, partition="1"))


def test_limit_is_shared_equally_and_in_turn() -> None:
    assert share_limit({0: 10, 1: 10}, 100, 0) == {0: 10, 1: 10}
    assert share_limit({0: 1_000, 1: 2, 2: 0, 3: 40}, 100, 0) == {0: 58, 1: 2, 2: 0, 3: 40}
    assert share_limit({0: 10**12, 5: 10**12}, 10**9 + 1, 0) == {0: 5 * 10**8 + 1, 5: 5 * 10**8}
    assert share_limit({0: 0, 1: 0}, 5, 3) == {0: 0, 1: 0}
    for limit in (1, 2, 4, 5):
        served: Counter[int] = Counter()
        for _ in range(30):
            served.update(share_limit(dict.fromkeys(range(3), 1_000), limit, served.total()))
        assert dict(served) == dict.fromkeys(range(3), 10 * limit)
