"""Catching up by stretches of the log's files: who gets them, and what becomes of damage."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import pytest

from delta_prop.server import consumer_session as module
from delta_prop.server.settings import ServerSettings
from delta_prop_broker.log.files import sendfile as stretches
from delta_prop_wire.delta import Source
from delta_prop_wire.errors import ProtocolError
from delta_prop_wire.frames import Credit, Filter, Start, StartAt
from delta_prop_wire.spec import ErrorCode
from tests.broker.compressed import rewrite
from tests.delta_prop.server.outlets import (
    EARLIEST,
    ROOMY,
    House,
    Line,
    everything,
    refused,
    roomy,
    wanting,
)

if TYPE_CHECKING:
    from delta_prop_wire.frames import Subscription

# --- reading stretches of the files


@pytest.fixture(autouse=True)
def _small_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stretches, "BYTES_MIN", 8_000)
    monkeypatch.setattr(module, "RangeBounds", partial(stretches.RangeBounds, bytes_min=8_000))


def test_who_wants_everything_and_is_behind_is_sent_ranges_of_the_files() -> None:
    house = roomy()
    line = Line(house)
    line.subscribe(wanting(start=EARLIEST))
    line.write_all()
    assert line.got == everything(house)
    assert line.kinds[0] == "parts", "what comes first is read, and so checked"
    assert line.kinds.count("range") >= 3
    assert sum(1 for kind in line.kinds if kind == "parts") < 20
    house.rows(1)
    house.commit()
    line.write_all()
    assert line.got == everything(house)
    assert line.outlet._sendfile_reader is not None
    assert line.outlet._sendfile_reader._opened is None, "nobody who keeps up holds a file"


def test_a_range_is_as_long_as_who_reads_just_quickly_enough_takes_in_time() -> None:
    """Finding one costs more than sending 256 KiB: the longer they are, the better."""
    longest = {}
    for seconds in (60.0, 1.5):
        settings = ServerSettings(send_timeout_s=seconds)
        house = House.on_disk(
            replace(ROOMY, segment_bytes_max=3_000_000, bytes_max=12_000_000), settings=settings
        )
        for _ in range(300):
            house.rows(1, data=bytes(9_000))
            house.commit()
        line = Line(house)
        line.subscribe(wanting(start=EARLIEST))
        line.write_all()
        assert line.got == everything(house)
        assert line.kinds[-1] == "range"
        assert line.outlet._sendfile_reader is not None
        assert line.outlet._sendfile_reader._opened is None, "nobody who rests holds a file"
        longest[seconds] = max(line.ranges)
    assert longest[1.5] <= ServerSettings().send_bytes_max < 600_000 < longest[60.0] <= 60 * 16 * 1024


def test_credit_bounds_ranges_as_it_does_frames() -> None:
    house = roomy()
    line = Line(house)
    line.subscribe(wanting(start=EARLIEST, credit=Credit(1 << 40, 40_000)))
    line.write_all()
    while line.outlet.is_catching_up:
        line.grant(400, 40_000)
        line.write_all()
    line.grant(400, 40_000)
    line.write_all()
    assert line.got == everything(house)
    assert "range" in line.kinds


@pytest.mark.parametrize(
    ("request_", "scope"),
    [
        (wanting(1, "ns:rows", start=EARLIEST), None),
        (wanting(start=EARLIEST, deltas=True), None),
        (wanting(start=EARLIEST, filter=Filter(sources=(Source.LOCAL,))), None),
        (wanting(start=EARLIEST), frozenset({"rows"})),
    ],
)
def test_who_may_not_get_everything_is_never_sent_ranges(
    request_: Subscription, scope: frozenset[str] | None
) -> None:
    house = roomy()
    line = Line(house, may_read=None if scope is None else scope.__contains__)
    line.subscribe(request_)
    line.write_all()
    assert line.got == everything(house)
    assert "range" not in line.kinds


def test_compressed_frames_go_as_they_are_to_who_reads_them() -> None:
    house = House.on_disk(replace(ROOMY, segment_bytes_max=60_000, compress="lz4"))
    for _ in range(300):
        house.rows(3, data=bytes(400))
        house.commit()
    assert isinstance(house.log, object)
    while rewrite(house.log) is not None:  # type: ignore[arg-type]
        pass
    sizes = {}
    for codecs in (frozenset[int](), frozenset({1}), frozenset({2})):
        line = Line(house, codecs=codecs, bytes_max=100_000)
        line.subscribe(wanting(start=EARLIEST))
        line.write_all()
        assert line.got == everything(house)
        sizes[codecs] = line.bytes
    plain, compressed, other = sizes.values()
    assert plain == other > 3 * compressed


def test_damage_is_told_where_it_lies_and_at_the_next_connection_at_the_latest() -> None:
    house = roomy()
    assert house.disk is not None
    segment = house.log._segments.all[0]  # type: ignore[union-attr]
    at = segment.size // 2
    house.disk.flip(segment.path, at=at)
    line = Line(house)
    line.subscribe(wanting(start=EARLIEST))
    with pytest.raises(ProtocolError):  # it lies in a range, and is found by the client
        line.write_all()
    line.outlet.close()
    again = Line(house)
    house.settings = ServerSettings()
    reading = Line(house)
    again.subscribe(wanting(start=Start(StartAt.OFFSET, line.offsets()[-1] + 1)))
    refusal = refused(again.write_all)
    assert again.got == []
    reading.subscribe(wanting(1, "ns:rows", start=EARLIEST))
    assert refused(reading.write_all).message == refusal.message
    assert reading.got == line.got, "all that lies before it is sent"
    assert refusal.code is ErrorCode.PROCESSING_FAILED
    assert segment.path in refusal.message
    assert not house.sinks.outlets
