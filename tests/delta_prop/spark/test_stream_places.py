"""Positions of a stream: within its log, limited per batch, never skipping removed deltas."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("pyspark")

from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

from delta_prop.client import SyncProducer
from delta_prop.commands.log_positions import LogPosition
from delta_prop.config import Settings
from delta_prop.spark.columns import READ_SCHEMA
from delta_prop.spark.options import read_options
from delta_prop.spark.reads.reading import Reader, StreamReader
from delta_prop.spark.reads.served import served_range
from delta_prop_wire.delta import Delta, opaque
from delta_prop_wire.errors import Refused, UsageError
from tests.delta_prop.client.threaded import Served, served

NOW_US = 1_900_000_000_000_000
"""Behind every time that the tests name."""

ALL_THERE_IS = ReadAllAvailable()


def stream(service: Served, **options: str) -> StreamReader:
    return StreamReader(
        read_options({"url": service.address} | options, {}, NOW_US, stream=True), READ_SCHEMA
    )


def publish(service: Served, count: int) -> None:
    with SyncProducer(service.address, name="test") as p:
        for at in range(0, count, 50):
            p.publish(*(Delta(f"k{at + row}", opaque(b"x")) for row in range(min(50, count - at))))


def offset(place: dict[str, Any]) -> int:
    return int(place["0"])


def test_it_goes_on_by_so_many_offsets_until_there_is_nothing_new() -> None:
    with served() as service:
        publish(service, 120)
        reader = stream(service, maxOffsetsPerTrigger="50", partitions="2")
        limit = reader.getDefaultReadLimit()
        assert limit == ReadMaxRows(50)
        places = [reader.initialOffset()]
        while (latest := reader.latestOffset(places[-1], limit)) != places[-1]:
            places.append(latest)
        assert list(map(offset, places)) == [0, 50, 100, 120]
        ranges = reader.partitions(places[0], places[1])
        assert [(one.start, one.end) for one in ranges] == [(0, 25), (25, 50)]
        assert sum(rows.num_rows for one in ranges for rows in reader.read(one)) == 50
        assert reader.partitions(places[1], places[1]) == []
        assert offset(reader.reportLatestOffset()) == 120


def test_available_now_ends_where_the_log_ended() -> None:
    with served() as service:
        publish(service, 100)
        reader = stream(service)
        assert reader.getDefaultReadLimit() == ALL_THERE_IS
        reader.prepareForTriggerAvailableNow()
        publish(service, 50)
        place = reader.latestOffset(reader.initialOffset(), ALL_THERE_IS)
        assert offset(place) == 100
        assert reader.latestOffset(place, ALL_THERE_IS) == place
        beyond = place | {"0": 120}
        assert reader.latestOffset(beyond, ALL_THERE_IS) == beyond


@pytest.mark.parametrize(("start", "wanted"), [("earliest", 0), ("latest", 7), ("5", 5)])
def test_where_a_new_stream_begins(start: str, wanted: int) -> None:
    with served() as service:
        publish(service, 7)
        assert offset(stream(service, start=start).initialOffset()) == wanted


def test_a_place_outside_the_log_is_told_on_the_driver() -> None:
    with served() as service:
        publish(service, 7)
        told = (
            "option start 8 is after the end of the log .its last delta has offset 6, the next one will "
            "have 7.: give an offset up to 7, earliest or latest"
        )
        with pytest.raises(UsageError, match=told):
            stream(service, start="8").initialOffset()
        with pytest.raises(UsageError, match=told):
            Reader(read_options({"url": service.address, "start": "8"}, {}, NOW_US), READ_SCHEMA).partitions()
        with pytest.raises(UsageError, match="offset 8 is after the end of the log"):
            served_range(
                read_options({"url": service.address}, {}, NOW_US).remote, start=LogPosition(offset=8)
            )


def test_another_log_is_refused_and_not_skipped() -> None:
    with served() as service:
        publish(service, 7)
        place = stream(service).initialOffset()
    with served() as other:
        publish(other, 50)
        reader = stream(other)
        for call in (reader.latestOffset, reader.partitions):
            with pytest.raises(
                UsageError, match=f"of log {place['log']}, but the log here is .* give the url"
            ):
                call(place, ALL_THERE_IS)


def test_what_the_log_has_let_go_of_is_told() -> None:
    with served(propagator={"settings": Settings(log_deltas_max=100)}) as service:
        publish(service, 50)
        reader = stream(service)
        place = reader.initialOffset()
        (early,) = reader.partitions(place, place | {"0": 10})
        publish(service, 300)
        first = reader._range_reader().bounds().start_offset
        gone = f"option start 3: the log has removed the offsets before {first}: give that one, a later"
        with pytest.raises(UsageError, match=gone):
            stream(service, start="3").initialOffset()
        told = f"at offset 0, but the log has removed the offsets before {first}, so {first} are lost"
        with pytest.raises(UsageError, match=told):
            reader.latestOffset(place, ALL_THERE_IS)
        with pytest.raises(Refused, match="CURSOR_TOO_OLD"):  # between the plan and the read
            list(reader.read(early))


def test_a_log_that_is_shorter_than_the_checkpoint() -> None:
    with served() as service:
        publish(service, 7)
        reader = stream(service)
        ahead = reader.initialOffset() | {"0": 9}
        with pytest.raises(UsageError, match="at offset 9, but the log ends at 7, as later deltas were lost"):
            reader.latestOffset(ahead, ALL_THERE_IS)
