"""The audit log: one line per refusal with its fields, floods summarized, text of clients escaped."""

from __future__ import annotations

import logging
from typing import Any

import anyio
import pytest

from delta_prop.server.audit import LINES_PER_WINDOW, WINDOWS_MAX, Audit, host_of
from delta_prop.server.permissions import Permissions, Unauthorized
from delta_prop.testing import run_virtual, virtual_world
from delta_prop_wire.errors import ProtocolError, Refused
from delta_prop_wire.spec import ErrorCode
from tests.delta_prop.server.session_fakes import FixedClock

PERMISSIONS = Permissions("ci")
LIMITED = Refused(ErrorCode.RATE_LIMITED, "too much", retry_after_ms=5)


@pytest.fixture(autouse=True)
def _level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "delta_prop.audit")


def fields_of(record: logging.LogRecord) -> dict[str, Any]:
    names = ("peer", "token", "frame", "code", "what", "count")
    return {name: getattr(record, name) for name in names if hasattr(record, name)}


def test_refusal_is_one_record_with_its_fields(caplog: pytest.LogCaptureFixture) -> None:
    audit = Audit(FixedClock())
    audit.record_refusal("10.0.0.7:51", PERMISSIONS, "BATCH", Unauthorized("the token may not publish"))
    audit.record_refusal("10.0.0.8:52", None, "SUBSCRIBE", ProtocolError(ErrorCode.BAD_FRAME, "no map"))
    first, second = caplog.records
    assert first.name == "delta_prop.audit"
    assert first.getMessage() == second.getMessage() == "refused"
    assert fields_of(first) == {
        "peer": "10.0.0.7:51",
        "token": "ci",
        "frame": "BATCH",
        "code": "UNAUTHORIZED",
        "what": "the token may not publish",
    }
    assert fields_of(second) == {
        "peer": "10.0.0.8:52",
        "token": "-",
        "frame": "SUBSCRIBE",
        "code": "BAD_FRAME",
        "what": "no map",
    }
    assert audit.refusals == 2


def test_client_text_is_escaped_and_shortened(caplog: pytest.LogCaptureFixture) -> None:
    audit = Audit(FixedClock())
    refusal = Refused(ErrorCode.INVALID_DELTA, "a\nb\x1b[2J\u0085\ud800" + "x" * 1000)
    audit.record_refusal("10.0.0.7:51", None, "GET /\r\nHost: x", refusal)
    (record,) = caplog.records
    written = fields_of(record)
    assert written["what"].startswith("a\\nb\\x1b[2J\\x85\\ud800xxx")
    assert written["frame"] == "GET /\\r\\nHost: x"
    assert len(written["what"]) < 350


def test_flood_is_summarized_and_hides_no_other_peer(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        audit = Audit(virtual_world().clock)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(audit.run)
            for port in range(1000):
                audit.record_refusal(f"10.0.0.7:{port}", PERMISSIONS, "DELTA", LIMITED)
            audit.record_refusal("10.0.0.8:1", PERMISSIONS, "DELTA", LIMITED)
            audit.record_refusal("10.0.0.7:1", PERMISSIONS, "DELTA", Unauthorized("no"))
            assert len(caplog.records) == LINES_PER_WINDOW + 2
            await anyio.sleep(11.5)
            assert len(caplog.records) == LINES_PER_WINDOW + 3
            assert fields_of(caplog.records[-1]) == {
                "peer": "10.0.0.7",
                "token": "ci",
                "code": "RATE_LIMITED",
                "count": 990,
            }
            assert caplog.records[-1].getMessage() == "refused many more"
            audit.record_refusal("10.0.0.7:1", PERMISSIONS, "DELTA", LIMITED)
            assert len(caplog.records) == LINES_PER_WINDOW + 4, "a new window should write a line"
            tasks.cancel_scope.cancel()
        assert audit.refusals == 1003
        assert len(caplog.records) == LINES_PER_WINDOW + 4

    run_virtual(main)


def test_continuing_flood_is_summarized_each_window(caplog: pytest.LogCaptureFixture) -> None:
    clock = FixedClock()
    audit = Audit(clock)
    for step in range(100):
        clock.seconds = step * 0.5
        audit.record_refusal("10.0.0.7:1", PERMISSIONS, "DELTA", LIMITED)
    counts = [getattr(record, "count", None) for record in caplog.records]
    assert counts == ([None] * 10 + [10]) * 4 + [None] * 10


def test_pending_count_is_written_at_shutdown(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        audit = Audit(virtual_world().clock)
        with anyio.move_on_after(2):
            for _ in range(LINES_PER_WINDOW + 5):
                audit.record_refusal("10.0.0.7:1", PERMISSIONS, "DELTA", LIMITED)
            await audit.run()

    run_virtual(main)
    assert getattr(caplog.records[-1], "count", None) == 5


def test_flood_from_many_hosts_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    audit = Audit(FixedClock())
    for number in range(2 * WINDOWS_MAX):
        audit.record_refusal(f"10.{number >> 8}.{number & 255}.1:1", None, "SUBSCRIBE", LIMITED)
    assert len(caplog.records) == WINDOWS_MAX + LINES_PER_WINDOW
    assert audit.refusals == 2 * WINDOWS_MAX


@pytest.mark.parametrize(
    ("peer", "host"),
    [("10.0.0.1:80", "10.0.0.1"), ("[::1]:80", "::1"), ("::1:80", "::1"), ("client", "client")],
)
def test_host_of_strips_port(peer: str, host: str) -> None:
    assert host_of(peer) == host
