"""Clients that get no answer log one warning within seconds, and one message when the outage ends."""

from __future__ import annotations

import socket
import subprocess
import sys
from typing import TYPE_CHECKING

import anyio
import pytest

from delta_prop.client import ClientSettings, Producer, Subscriber, SyncProducer, Unreachable, facts
from delta_prop.client import outage as outages
from delta_prop.client.outage import Outage
from delta_prop.commands.wait_reporter import WaitReporter
from delta_prop_wire.delta import Delta, opaque
from tests.delta_prop.client.threaded_service import served
from tests.delta_prop.client.virtual_service import ADDRESS, Site, with_service

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def unreachable_address() -> Iterator[str]:
    """Yield an address where nothing listens until the block ends."""
    with socket.socket() as bound_socket:
        bound_socket.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{bound_socket.getsockname()[1]}"


def outage_warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.name == outages.logger.name]


def test_outage_and_its_end_are_each_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    outage = Outage(["a:1", "b:2"])  # type: ignore[list-item]
    outage.on_answer()
    for since_s in (0.0, 2.9, 3.2, 9.0):
        outage.on_silence(OSError("refused"), since_s, 30 - since_s)
    outage.on_answer()
    outage.on_answer()
    outage.on_silence(TimeoutError(), 4.0, 1.0)
    assert outage_warnings(caplog) == [
        "a:1, b:2: no answer for 3 s (refused): trying for another 27 s",
        "a:1, b:2: answers again",
        "a:1, b:2: no answer for 4 s (TimeoutError): trying for another 1 s",
    ]
    assert {one.levelname for one in caplog.records} == {"WARNING"}


@pytest.mark.parametrize("kind", ["producer", "subscriber"])
def test_async_clients_report_an_outage(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(site: Site) -> None:
        await site.stop()
        client = (
            Producer(ADDRESS, name="p", world=site.world)
            if kind == "producer"
            else Subscriber(ADDRESS, "*", world=site.world)
        )
        async with anyio.create_task_group() as tasks:

            async def restart_later() -> None:
                await anyio.sleep(2.5)
                assert outage_warnings(caplog) == []
                await anyio.sleep(6)
                assert len(outage_warnings(caplog)) == 1
                await tasks.start(site.run)

            tasks.start_soon(restart_later)
            async with client:
                warning, recovered = outage_warnings(caplog)
                assert warning.startswith(f"{ADDRESS}: no answer for ")
                assert "trying for another 2" in warning
                assert recovered == f"{ADDRESS}: answers again"
            tasks.cancel_scope.cancel()

    with_service(scenario)


def test_sync_producer_reports_an_outage(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, unreachable_address: str
) -> None:
    monkeypatch.setattr(outages, "WARN_S", 0.2)
    with (
        pytest.raises(Unreachable),
        SyncProducer(unreachable_address, name="p", settings=ClientSettings(open_timeout_s=1.0)),
    ):
        pass
    (warning,) = outage_warnings(caplog)
    assert warning.startswith(
        f"{unreachable_address}: no answer for 0 s ([Errno 111] Connection refused): trying for "
    )
    caplog.clear()
    with served() as service, SyncProducer(service.address, name="p") as p:
        p.publish(Delta("a", opaque(b"a")))
        service.drop_connections()
        p.publish(Delta("b", opaque(b"b")))
    assert outage_warnings(caplog) == []


def test_outage_inside_a_wait_reporter_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def command() -> None:
        async with WaitReporter().report():
            Outage([]).on_silence(None, 9.0, 9.0)

    anyio.run(command)
    with WaitReporter().report_in_thread():
        Outage([]).on_silence(None, 9.0, 9.0)
    assert outage_warnings(caplog) == []
    Outage([]).on_silence(None, 9.0, 9.0)
    assert len(outage_warnings(caplog)) == 1


def test_fact_request_reports_an_outage(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, unreachable_address: str
) -> None:
    monkeypatch.setattr(outages, "WARN_S", 0.2)
    with pytest.raises(Unreachable):
        facts.describe(unreachable_address, timeout_s=1.0)
    assert len(outage_warnings(caplog)) == 1


def test_outage_is_printed_without_logging_set_up(unreachable_address: str) -> None:
    program = f"""
from delta_prop.client import ClientSettings, SyncProducer, outage
outage.WARN_S = 0.2
SyncProducer({unreachable_address!r}, name="p", settings=ClientSettings(open_timeout_s=1.0)).__enter__()
"""
    result = subprocess.run(
        [sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=60
    )
    first, *_, last = result.stderr.splitlines()
    assert first.startswith(f"{unreachable_address}: no answer for 0 s (")
    assert "Unreachable" in last
