"""RangeReader reads a range of a log exactly once: over broken connections, within its bounds and topics."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from delta_prop.api.settings import Settings
from delta_prop.client import ClientSettings, SyncProducer, Unreachable
from delta_prop.client.ranges import RangeReader
from delta_prop.platform.ports import Tls
from delta_prop.server import consumer_session
from delta_prop_wire.delta import Delta, Priority, create, make_origin, opaque, producer_id_of
from delta_prop_wire.errors import Refused, UsageError
from delta_prop_wire.slicing import deltas_of
from delta_prop_wire.topics import Topic
from tests.delta_prop.client.threaded_service import served
from tests.delta_prop.platform.networks import files

if TYPE_CHECKING:
    from pathlib import Path

    from delta_prop_wire.batch import LoggedBatch

SHORT_TIMEOUT = ClientSettings(open_timeout_s=0.3)
PROGRESS_INTERVAL_S = 20.0
"""The interval of progress reports, long enough to show that nothing waits for one."""


def make_delta(key: str, **more: Any) -> Delta:
    return Delta(key, opaque(key.encode()), **more)


def rows_of(batches: list[LoggedBatch]) -> list[tuple[int, int, str]]:
    """Return the offset, Lamport number and vector id of each row."""
    rows = []
    for logged in batches:
        for row, delta in enumerate(deltas_of(logged.batch)):
            offset = logged.row_offset(row)
            rows.append((offset, logged.lamport + offset - logged.offset, delta.vector_id))
    return rows


def publish(address: str, counts: list[int], namespaces: tuple[str, ...] = ("docs",)) -> list[str]:
    """Publish a batch of each size, with the namespaces in turn; return the vector ids by offset."""
    keys: list[str] = []
    with SyncProducer(address, name="test") as p:
        for count in counts:
            batch_keys = [f"k{len(keys) + row}" for row in range(count)]
            p.publish(
                *(
                    make_delta(key, namespace=namespaces[(len(keys) + row) % len(namespaces)])
                    for row, key in enumerate(batch_keys)
                )
            )
            keys += batch_keys
    return keys


def test_range_is_read_exactly_for_any_bounds() -> None:
    with served() as service:
        keys = publish(service.address, [3, 1, 4, 5])
        reader = RangeReader(service.address)
        bounds = reader.bounds()
        assert (bounds.start_offset, bounds.end_offset) == (0, 13)
        log = (bounds.log_id, bounds.epoch)
        for start in range(13):
            for end in range(start, 14):
                rows = rows_of(list(reader.read(start, end, log=log)))
                assert rows == [(offset, offset + 1, keys[offset]) for offset in range(start, end)]


def test_topics_select_rows_and_the_end_is_reported_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consumer_session, "PROGRESS_INTERVAL_S", PROGRESS_INTERVAL_S)
    with served() as service:
        keys = publish(service.address, [10, 20], ("docs", "rows", "rows"))
        reader = RangeReader(service.address)
        began = time.monotonic()
        topics = [Topic.parse("ns:docs"), Topic.parse("v:k4")]
        rows = rows_of(list(reader.read(2, 29, topics)))
        expected = [offset for offset in range(2, 29) if offset % 3 == 0 or offset == 4]
        assert rows == [(offset, offset + 1, keys[offset]) for offset in expected]
        assert list(reader.read(0, 30, [Topic.parse("ns:nobody's")])) == []
        assert time.monotonic() - began < PROGRESS_INTERVAL_S, (
            "the reader must not wait for a progress report"
        )


def test_broken_connections_lose_and_duplicate_nothing() -> None:
    with served() as service:
        keys = publish(service.address, [5] * 40)
        batches: list[LoggedBatch] = []
        for batch in RangeReader(service.address).read(2, 199, credit_bytes=300):
            batches.append(batch)
            if len(batches) % 5 == 0:
                service.drop_connections()
        assert rows_of(batches) == [(offset, offset + 1, keys[offset]) for offset in range(2, 199)]


def test_server_sends_no_rows_beyond_the_credit() -> None:
    with served() as service, SyncProducer(service.address, name="big") as p:
        matrix = np.zeros((200, 1_000), np.float32)
        for number in range(40):
            p.publish_many([f"{number}-{row}" for row in range(200)], matrix, namespace="n")
        batches = RangeReader(service.address).read(0, 8_000, credit_bytes=1_000_000)
        assert next(batches).count == 200
        time.sleep(0.2)
        sent_count = service.call(
            lambda: sum(one.deliveries.session.processed for one in service.peers() if one.deliveries.session)
        )
        assert sent_count < 1_000
        assert sum(one.count for one in batches) == 7_800


def test_removed_future_or_foreign_offsets_are_refused() -> None:
    settings = Settings(log_deltas_max=100)
    with served(propagator={"settings": settings}) as service:
        publish(service.address, [50] * 6)
        reader = RangeReader(service.address, settings=SHORT_TIMEOUT)
        bounds = reader.bounds()
        assert bounds.start_offset > 0
        with pytest.raises(Refused, match=f"CURSOR_TOO_OLD: offset 0: .* starts at {bounds.start_offset}"):
            list(reader.read(0, 10))
        with pytest.raises(Refused, match="offsets up to 500: the log ends at 300"):
            list(reader.read(250, 500))
        with pytest.raises(UsageError, match=r"log 0101[0-9a-f]* is expected here"):
            list(reader.read(250, 300, log=(bytes([1]) * 16, bounds.epoch)))


def test_noops_of_the_log_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consumer_session, "PROGRESS_INTERVAL_S", PROGRESS_INTERVAL_S)
    with served() as service, SyncProducer(service.address, name="test") as p:
        p.publish(Delta("a", create([1.0]), "n"))
        with pytest.raises(Refused, match="INVALID_DELTA"):
            p.publish(Delta("b", create([1.0, 2.0]), "n"))
        began = time.monotonic()
        assert rows_of(list(RangeReader(service.address).read(0, 2))) == [(0, 1, "a")]
        assert time.monotonic() - began < PROGRESS_INTERVAL_S


def test_time_is_resolved_to_its_offset(tmp_path: Path) -> None:
    with served(propagator={"data": str(tmp_path / "data")}) as service:
        publish(service.address, [3])
        time.sleep(0.01)
        between_publishes = datetime.now(UTC)
        publish(service.address, [2])
        reader = RangeReader(service.address)
        assert reader.offset_at(round(between_publishes.timestamp() * 1e6)) == 3
        assert reader.offset_at(0) == 0


def test_watermark_is_read_without_fencing_its_producer() -> None:
    origin = make_origin(producer_id_of("job"), Priority.NORMAL)
    with served() as service, SyncProducer(service.address, name="job") as p:
        p.publish(make_delta("a"), make_delta("b"))
        reader = RangeReader(service.address)
        assert reader.watermark(origin, 1) == 2
        p.publish(make_delta("c"))
        assert reader.watermark(origin, 1) == 3
        with SyncProducer(service.address, name="job"):
            with pytest.raises(Refused, match="FENCED"):
                reader.watermark(origin, 1)
            assert reader.watermark(origin, 2) == 3


def test_absent_service_is_unreachable() -> None:
    with served() as service:
        pass
    began = time.monotonic()
    unreachable = RangeReader(service.address, settings=SHORT_TIMEOUT)
    with pytest.raises(Unreachable, match=r"has answered for 0\.3 s"):
        unreachable.bounds()
    with pytest.raises(Unreachable, match=r"has answered for 0\.3 s"):
        list(unreachable.read(0, 1))
    assert time.monotonic() - began < 20


def test_another_address_of_the_service_is_tried() -> None:
    with served() as stopped:
        pass
    with served() as service:
        publish(service.address, [2])
        assert len(rows_of(list(RangeReader([stopped.address, service.address]).read(0, 2)))) == 2


def test_bounds_are_read_over_tls() -> None:
    made_files = files()
    server = Tls(made_files.server, made_files.server_key, made_files.authority)
    client = Tls(made_files.client, made_files.client_key, made_files.authority)
    with served(server) as service:
        assert RangeReader(service.address, tls=client).bounds().end_offset == 0
