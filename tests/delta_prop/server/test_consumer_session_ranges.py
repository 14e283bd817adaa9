"""Catching up by sendfile ranges of segments: which subscribers get them, and reports of corruption."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import pytest

from delta_prop.server import log_reader
from delta_prop.server.settings import ServerSettings
from delta_prop_broker.log.durable import DurableLog
from delta_prop_broker.segments import sendfile
from delta_prop_wire.delta import Source
from delta_prop_wire.errors import ProtocolError
from delta_prop_wire.frames import Credit, Filter, Start, StartAt
from delta_prop_wire.spec import ErrorCode
from tests.broker.compressed import compress_next_segment
from tests.delta_prop.server.session_fakes import (
    EARLIEST,
    LARGE_LOG,
    FakeService,
    FakeSubscriber,
    expected_rows,
    multi_segment_service,
    refusal_of,
    subscription,
)

if TYPE_CHECKING:
    from delta_prop_wire.frames import Subscription

# --- sendfile ranges


@pytest.fixture(autouse=True)
def _small_sendfile_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sendfile, "BYTES_MIN", 8_000)
    monkeypatch.setattr(log_reader, "RangeBounds", partial(sendfile.RangeBounds, bytes_min=8_000))


def holds_file(subscriber: FakeSubscriber) -> bool:
    """Return True if the session holds a segment open; no public name says so."""
    reader = subscriber.session._reader._sendfile_reader
    assert reader is not None
    return reader._opened is not None


def test_unfiltered_lagging_subscriber_gets_file_ranges() -> None:
    service = multi_segment_service()
    subscriber = FakeSubscriber(service)
    subscriber.subscribe(subscription(start=EARLIEST))
    subscriber.write_all()
    assert subscriber.received == expected_rows(service)
    assert subscriber.chunk_kinds[0] == "parts", "the first rows should be read and checked"
    assert subscriber.chunk_kinds.count("range") >= 3
    assert sum(1 for kind in subscriber.chunk_kinds if kind == "parts") < 20
    service.append_rows(1)
    service.commit()
    subscriber.write_all()
    assert subscriber.received == expected_rows(service)
    assert not holds_file(subscriber), "a subscriber that keeps up should hold no file"


def test_range_size_follows_the_send_timeout() -> None:
    """Finding a range costs more than sending 256 KiB, so ranges are as long as the timeout allows."""
    longest_ranges = {}
    for seconds in (60.0, 1.5):
        settings = ServerSettings(send_timeout_s=seconds)
        service = FakeService.on_disk(
            replace(LARGE_LOG, segment_bytes_max=3_000_000, bytes_max=12_000_000), settings=settings
        )
        for _ in range(300):
            service.append_rows(1, data=bytes(9_000))
            service.commit()
        subscriber = FakeSubscriber(service)
        subscriber.subscribe(subscription(start=EARLIEST))
        subscriber.write_all()
        assert subscriber.received == expected_rows(service)
        assert subscriber.chunk_kinds[-1] == "range"
        assert not holds_file(subscriber), "an idle subscriber should hold no file"
        longest_ranges[seconds] = max(subscriber.range_sizes)
    assert (
        longest_ranges[1.5]
        <= ServerSettings().send_bytes_max
        < 600_000
        < longest_ranges[60.0]
        <= 60 * 16 * 1024
    )


def test_credit_bounds_file_ranges() -> None:
    service = multi_segment_service()
    subscriber = FakeSubscriber(service)
    subscriber.subscribe(subscription(start=EARLIEST, credit=Credit(1 << 40, 40_000)))
    subscriber.write_all()
    while subscriber.session.is_catching_up:
        subscriber.grant(400, 40_000)
        subscriber.write_all()
    subscriber.grant(400, 40_000)
    subscriber.write_all()
    assert subscriber.received == expected_rows(service)
    assert "range" in subscriber.chunk_kinds


@pytest.mark.parametrize(
    ("request_", "scope"),
    [
        (subscription(1, "ns:rows", start=EARLIEST), None),
        (subscription(start=EARLIEST, deltas=True), None),
        (subscription(start=EARLIEST, filter=Filter(sources=(Source.LOCAL,))), None),
        (subscription(start=EARLIEST), frozenset({"rows"})),
    ],
)
def test_restricted_subscriber_never_gets_file_ranges(
    request_: Subscription, scope: frozenset[str] | None
) -> None:
    service = multi_segment_service()
    subscriber = FakeSubscriber(service, scope=scope)
    subscriber.subscribe(request_)
    subscriber.write_all()
    assert subscriber.received == expected_rows(service)
    assert "range" not in subscriber.chunk_kinds


def test_stored_compressed_frames_go_to_capable_subscribers() -> None:
    service = FakeService.on_disk(replace(LARGE_LOG, segment_bytes_max=60_000, compress="lz4"))
    for _ in range(300):
        service.append_rows(3, data=bytes(400))
        service.commit()
    assert isinstance(service.log, DurableLog)
    compressed_segments = 0
    while compress_next_segment(service.log) is not None:
        compressed_segments += 1
    assert compressed_segments > 1, "several segments should hold compressed frames"
    sizes = {}
    for codecs in (frozenset[int](), frozenset({1}), frozenset({2})):
        subscriber = FakeSubscriber(service, codecs=codecs, bytes_max=100_000)
        subscriber.subscribe(subscription(start=EARLIEST))
        subscriber.write_all()
        assert subscriber.received == expected_rows(service)
        sizes[codecs] = subscriber.bytes
    uncompressed, compressed, with_other_codec = sizes.values()
    assert uncompressed == with_other_codec > 3 * compressed


def test_corruption_is_reported_by_the_next_connection() -> None:
    service = multi_segment_service()
    assert service.disk is not None
    segment = service.log.segments.all[0]  # type: ignore[union-attr]
    position = segment.size // 2
    service.disk.flip(segment.path, at=position)
    subscriber = FakeSubscriber(service)
    subscriber.subscribe(subscription(start=EARLIEST))
    with pytest.raises(ProtocolError):  # the corruption is in a range, so the client detects it
        subscriber.write_all()
    subscriber.session.close()
    second = FakeSubscriber(service)
    service.settings = ServerSettings()
    filtered = FakeSubscriber(service)
    second.subscribe(subscription(start=Start(StartAt.OFFSET, subscriber.offsets()[-1] + 1)))
    refusal = refusal_of(second.write_all)
    assert second.received == []
    filtered.subscribe(subscription(1, "ns:rows", start=EARLIEST))
    assert refusal_of(filtered.write_all).message == refusal.message
    assert filtered.received == subscriber.received, "all rows before the corruption should be sent"
    assert refusal.code is ErrorCode.PROCESSING_FAILED
    assert segment.path in refusal.message
    assert not service.sinks.sessions
