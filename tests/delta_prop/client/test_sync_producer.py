"""SyncProducer over real sockets: the guarantees of Producer, without the import of an event loop."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import pytest

from delta_prop.client import ClientSettings, SyncProducer, Unreachable
from delta_prop.platform.connection_faults import Misconfigured
from delta_prop.platform.ports import Tls
from delta_prop_wire.delta import AckLevel, Delta, Priority, create, opaque
from delta_prop_wire.errors import Refused, UsageError
from tests.delta_prop.client.threaded_service import served
from tests.delta_prop.platform.networks import files


def make_delta(key: str, **more: Any) -> Delta:
    return Delta(key, opaque(key.encode()), **more)


def test_sync_producer_publishes_offers_and_flushes() -> None:
    with served() as service, SyncProducer(service.address, name="job") as p:
        first = p.publish(make_delta("a"), make_delta("b"))
        assert (first.offset, first.count, first.level) == (0, 2, AckLevel.MEMORY)
        receipts = [p.offer(make_delta(f"k{number}")) for number in range(2_500)]
        cause = p.offer(make_delta("cause", priority=Priority.LOW))
        effect = p.offer(make_delta("effect", priority=Priority.CRITICAL), after=[cause])
        assert p.publish_many(["x", "y"], [[1, 2], [3, 4]], namespace="vectors").count == 2
        p.flush()
        assert [one.result().offset for one in receipts] == list(range(2, 2_502))
        assert cause.result().offset < effect.result().offset  # type: ignore[operator]
        assert p.statistics().batches < 20
        p.publish(Delta("v", create([1.0]), "n"))
        with pytest.raises(Refused, match="INVALID_DELTA"):
            p.publish(Delta("v", create([1.0, 2.0]), "n"))


def test_broken_connections_lose_and_duplicate_nothing() -> None:
    with served() as service:
        with SyncProducer(service.address, name="job") as p:
            for number in range(60):
                p.offer(make_delta(f"k{number}"))
                if number % 20 == 10:
                    p.flush()
                    p.offer(make_delta(f"then {number}"))
                    service.drop_connections()
            p.publish(make_delta("last"))
        keys = service.keys()
        assert len(keys) == len(set(keys)) == 64


def test_close_waits_for_offers_and_open_has_a_timeout() -> None:
    with served() as service:
        with SyncProducer(service.address, name="job") as p:
            receipt = p.offer(make_delta("a"))
        assert receipt.result().offset == 0
        with pytest.raises(UsageError, match="closed"):
            p.publish(make_delta("b"))
    settings = ClientSettings(open_timeout_s=0.3)
    began = time.monotonic()
    with (
        pytest.raises(Unreachable, match=r"has answered for 0\.3 s"),
        SyncProducer(service.address, name="job", settings=settings),
    ):
        pass
    assert time.monotonic() - began < 20


def test_lost_service_is_reported_within_the_timeouts() -> None:
    with served() as service:
        p = SyncProducer(service.address, name="job", settings=ClientSettings(close_timeout_s=0.2))
        p.__enter__()
        p.publish(make_delta("a"))
    with pytest.raises(Refused, match="has not happened"):
        p.publish(make_delta("b"), timeout_s=0.3)
    p.offer(make_delta("c"))
    with pytest.raises(Refused, match="1 calls were not acknowledged"):
        p.__exit__(None, None, None)


def test_second_producer_of_a_name_fences_the_first() -> None:
    with served() as service, SyncProducer(service.address, name="job") as first:
        first.publish(make_delta("a"))
        with SyncProducer(service.address, name="job") as second:
            second.publish(make_delta("b"))
        for _ in range(2):
            with pytest.raises(Refused, match="FENCED"):
                first.publish(make_delta("c"))


def test_numbered_deltas_of_a_second_run_are_duplicates() -> None:
    with served() as service:
        for _ in range(2):
            with SyncProducer(service.address, name="import") as p:
                receipts = [p.offer_numbered(number, make_delta(f"line {number}")) for number in range(1, 50)]
                p.flush()
        assert [one.result().duplicates for one in receipts] == [{0: number} for number in range(49)]
        assert len(service.keys()) == 49


def test_sync_producer_connects_with_tls_and_a_certificate() -> None:
    made_files = files()
    server = Tls(made_files.server, made_files.server_key, made_files.authority)
    client = Tls(made_files.client, made_files.client_key, made_files.authority)
    with served(server) as service:
        with SyncProducer(service.address, name="job", tls=client) as p:
            for number in range(300):
                p.offer(Delta(f"k{number}", opaque(bytes(2_000))))
            assert p.publish(make_delta("last")).offset == 300
        short_timeout = ClientSettings(open_timeout_s=0.3)
        without_certificate = SyncProducer(
            service.address, name="x", tls=Tls(authorities=made_files.authority), settings=short_timeout
        )
        with pytest.raises(Misconfigured, match="certificate required"), without_certificate:
            pass
        with (
            pytest.raises(Misconfigured, match="speaks TLS"),
            SyncProducer(service.address, name="x", settings=short_timeout),
        ):
            pass


def test_sync_producer_imports_no_event_loop() -> None:
    program = "import sys; from delta_prop.client import SyncProducer; print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded = set(result.stdout.split())
    assert {
        "delta_prop.client.sync_producer",
        "delta_prop_wire.connection",
        "numpy",
        "msgpack",
        "crc32c",
    } <= loaded
    for name in (
        "anyio",
        "asyncio",
        "trio",
        "delta_prop.calls.receipt",
        "delta_prop_broker",
        "delta_prop_sinks",
    ):
        assert name not in loaded
