"""Positions of a stream stay within its log, advance by a limit per batch, and never skip removed deltas."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("pyspark")

from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

from delta_prop.api.settings import Settings
from delta_prop.client import SyncProducer
from delta_prop.directory.log_positions import LogPosition
from delta_prop.spark.columns import READ_SCHEMA
from delta_prop.spark.data_source.reading import Reader, StreamReader
from delta_prop.spark.data_source.served import served_range
from delta_prop.spark.options import read_options
from delta_prop_wire.delta import Delta, opaque
from delta_prop_wire.errors import Refused, UsageError
from tests.delta_prop.client.threaded_service import Served, served

NOW_US = 1_900_000_000_000_000
"""A time after all times in the tests."""

READ_ALL = ReadAllAvailable()


def stream(service: Served, **options: str) -> StreamReader:
    return StreamReader(
        read_options({"url": service.address} | options, {}, NOW_US, stream=True), READ_SCHEMA
    )


def publish(service: Served, count: int) -> None:
    with SyncProducer(service.address, name="test") as p:
        for first in range(0, count, 50):
            p.publish(*(Delta(f"k{first + row}", opaque(b"x")) for row in range(min(50, count - first))))


def offset(position: dict[str, Any]) -> int:
    return int(position["0"]["offset"])


def moved(position: dict[str, Any], offset: int) -> dict[str, Any]:
    return {"0": position["0"] | {"offset": offset}}


def test_stream_advances_by_its_limit_up_to_the_log_end() -> None:
    with served() as service:
        publish(service, 120)
        reader = stream(service, maxOffsetsPerTrigger="50", partitions="2")
        limit = reader.getDefaultReadLimit()
        assert limit == ReadMaxRows(50)
        positions = [reader.initialOffset()]
        while (latest := reader.latestOffset(positions[-1], limit)) != positions[-1]:
            positions.append(latest)
        assert list(map(offset, positions)) == [0, 50, 100, 120]
        ranges = reader.partitions(positions[0], positions[1])
        assert [(one.start, one.end) for one in ranges] == [(0, 25), (25, 50)]
        assert sum(rows.num_rows for one in ranges for rows in reader.read(one)) == 50
        assert reader.partitions(positions[1], positions[1]) == []
        assert offset(reader.reportLatestOffset()) == 120


def test_available_now_ends_where_the_log_ended() -> None:
    with served() as service:
        publish(service, 100)
        reader = stream(service)
        assert reader.getDefaultReadLimit() == READ_ALL
        reader.prepareForTriggerAvailableNow()
        publish(service, 50)
        position = reader.latestOffset(reader.initialOffset(), READ_ALL)
        assert offset(position) == 100
        assert reader.latestOffset(position, READ_ALL) == position
        beyond = moved(position, 120)
        assert reader.latestOffset(beyond, READ_ALL) == beyond


@pytest.mark.parametrize(("start", "expected"), [("earliest", 0), ("latest", 7), ("5", 5)])
def test_start_option_sets_the_initial_offset(start: str, expected: int) -> None:
    with served() as service:
        publish(service, 7)
        assert offset(stream(service, start=start).initialOffset()) == expected


def test_start_beyond_the_log_is_refused_on_the_driver() -> None:
    with served() as service:
        publish(service, 7)
        expected = (
            "option start 8 is after the end of the log .its last delta has offset 6, the next one will "
            "have 7.: give an offset up to 7, earliest or latest"
        )
        with pytest.raises(UsageError, match=expected):
            stream(service, start="8").initialOffset()
        with pytest.raises(UsageError, match=expected):
            Reader(read_options({"url": service.address, "start": "8"}, {}, NOW_US), READ_SCHEMA).partitions()
        with pytest.raises(UsageError, match="offset 8 is after the end of the log"):
            served_range(
                read_options({"url": service.address}, {}, NOW_US).remote, start=LogPosition(offset=8)
            )


def test_another_log_is_refused_and_not_skipped() -> None:
    with served() as service:
        publish(service, 7)
        position = stream(service).initialOffset()
    with served() as other:
        publish(other, 50)
        reader = stream(other)
        for call in (reader.latestOffset, reader.partitions):
            with pytest.raises(
                UsageError, match=f"of log {position['0']['log']}, but the log here is .* give the url"
            ):
                call(position, READ_ALL)


def test_offsets_removed_from_the_log_are_reported() -> None:
    with served(propagator={"settings": Settings(log_deltas_max=100)}) as service:
        publish(service, 50)
        reader = stream(service)
        position = reader.initialOffset()
        (early,) = reader.partitions(position, moved(position, 10))
        publish(service, 300)
        first = reader._bounds()[0].start_offset
        removed = f"option start 3: the log has removed the offsets before {first}: give that one, a later"
        with pytest.raises(UsageError, match=removed):
            stream(service, start="3").initialOffset()
        expected = f"has removed the offsets before {first}, so the stream misses {first} of them"
        with pytest.raises(UsageError, match=expected):
            reader.latestOffset(position, READ_ALL)
        with pytest.raises(Refused, match="CURSOR_TOO_OLD"):  # removed between the plan and the read
            list(reader.read(early))


def test_log_shorter_than_the_checkpoint_is_refused() -> None:
    with served() as service:
        publish(service, 7)
        reader = stream(service)
        ahead = moved(reader.initialOffset(), 9)
        with pytest.raises(UsageError, match="at offset 9, but the log ends at 7, because a disk failure"):
            reader.latestOffset(ahead, READ_ALL)
