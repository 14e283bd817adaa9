"""`quarantine …`: list, show, replay and drop what sinks rejected, in a directory and at a server."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import anyio
import pytest

from delta_prop import Delta, Propagator, create, sparse_add
from delta_prop.directory import request_client
from tests.delta_prop.durable.quarantined import RejectingSink, Store

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tests.delta_prop.commands.support import Command


class RejectingService:
    """A service that a test runs several times on one directory; its sink rejects `rejected_values`."""

    def __init__(self, command: Command) -> None:
        self.command = command
        self.store = Store(keeps_cursor=False)
        self.rejected_values = {7.0}

    def serve(self, main: Callable[[Propagator], Awaitable[None]]) -> None:
        async def run() -> None:
            async with Propagator(data=self.command.data) as p:
                await p.attach(RejectingSink(self.store, self.rejected_values))
                await main(p)

        anyio.run(run)

    def quarantine_deltas(self) -> None:
        async def main(p: Propagator) -> None:
            await p.publish(Delta("a", create([1.0])))
            await p.publish(Delta("a", sparse_add([0], [7.0])), Delta("b", create([7.0])))
            await p.publish(Delta("a", sparse_add([0], [10.0])))
            await p.internals().sinks.feed("totals").wait(4)

        self.serve(main)


@pytest.fixture
def service(command: Command) -> RejectingService:
    rejecting_service = RejectingService(command)
    rejecting_service.quarantine_deltas()
    return rejecting_service


def test_quarantined_deltas_are_listed_and_shown(service: RejectingService) -> None:
    command = service.command
    rows = command("quarantine", "list", "--json").lines
    assert [
        (row["offset"], row["op"], row["vector_id"], row["reason"], row["blocked_by"]) for row in rows
    ] == [
        (1, "sparse_add", "a", "7 is bad", None),
        (2, "create", "b", "7 is bad", None),
        (3, "sparse_add", "a", None, 1),
    ]
    table = command("quarantine", "list", "--sink", "totals").out.splitlines()
    assert len(table) == 4
    assert table[1].endswith("default a                     7 is bad")
    assert table[3].endswith("blocked by 1")
    assert command("quarantine", "list", "--sink", "other", "--json").lines == []
    shown = command("quarantine", "show", "totals", "3", "--json").lines[0]
    assert (shown["delta"]["op"], shown["delta"]["values"]) == ("sparse_add", [10.0])
    assert shown["blocked_by"] == 1
    assert shown["dot"]
    text = command("quarantine", "show", "totals", "1").out
    assert "reason      7 is bad" in text
    status = command("status", "--json").lines[0]
    assert status["quarantined"] == {"totals": 3}
    assert "quarantined    totals 3" in command("status").out
    assert command("sinks", "--json").lines[0]["quarantined"] == 3


def test_mistake_is_reported_with_its_fix(service: RejectingService) -> None:
    command = service.command
    for arguments, fix in [
        (("show", "totals", "9"), "name one of its offsets (1, 2, 3)"),
        (("show", "none", "1"), "name a sink that has one (totals)"),
        (("replay", "totals"), "give offsets, or --all"),
        (("drop", "totals", "1", "--all"), "give offsets, or --all"),
        (("replay", "totals", "3"), "is blocked by 1: name that one"),
        (("drop", "totals", "0"), "is not in the quarantine"),
    ]:
        result = command("quarantine", *arguments)
        assert (result.status, result.out) == (2, "")
        assert fix in result.err
        assert result.err.count("\n") == 1


def test_requests_are_executed_by_the_next_service(service: RejectingService) -> None:
    command = service.command
    result = command("quarantine", "drop", "totals", "1")
    assert result.status == 0
    assert "drop for sink 'totals' (rejected: 1, blocked by them: 1)" in result.out
    assert "the next service that opens" in result.out
    command("quarantine", "replay", "totals", "2")
    rows = command("quarantine", "list", "--json").lines
    assert [row["requested"] for row in rows] == ["drop", "replay", "replay"]
    service.rejected_values.clear()

    service.serve(wait_until_quarantined(0))
    assert service.store.sums == {"a": 11.0, "b": 7.0}
    assert command("quarantine", "list", "--json").lines == []
    assert not list((command.data / "requests").glob("*.json"))

    async def publish_later(p: Propagator) -> None:  # no delta is applied twice
        await p.publish(Delta("a", sparse_add([0], [100.0])))
        await p.internals().sinks.feed("totals").wait(5)

    service.serve(publish_later)
    assert service.store.sums == {"a": 111.0, "b": 7.0}


def test_replay_in_a_served_directory_is_done_at_once(service: RejectingService) -> None:
    command = service.command
    service.rejected_values.clear()
    message: list[str] = []

    async def main(p: Propagator) -> None:
        result = await anyio.to_thread.run_sync(lambda: command("quarantine", "replay", "totals", "--all"))
        message.append(result.out)
        assert p.quarantine("totals") == []

    service.serve(main)
    assert message == ["done: replay for sink 'totals' (rejected: 2, blocked by them: 1)\n"]
    assert service.store.sums == {"a": 18.0, "b": 7.0}
    assert "nothing to drop" in command("quarantine", "drop", "totals", "--all").out


def test_request_stays_until_its_sink_is_attached(
    service: RejectingService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_client, "WAIT_S", 1.5)
    command = service.command
    message: list[str] = []

    async def serve_without_the_sink() -> None:
        async with Propagator(data=command.data):
            result = await anyio.to_thread.run_sync(lambda: command("quarantine", "replay", "totals", "1"))
            message.append(result.out)

    anyio.run(serve_without_the_sink)
    assert "has not done it within 1.5 s" in message[0]
    assert command("quarantine", "list", "--json").lines[0]["requested"] == "replay"
    service.rejected_values.clear()
    service.serve(wait_until_quarantined(1))
    assert service.store.sums == {"a": 18.0}


def wait_until_quarantined(count: int) -> Callable[[Propagator], Awaitable[None]]:
    async def main(p: Propagator) -> None:
        with anyio.fail_after(60):
            while len(p.quarantine("totals")) > count:  # noqa: ASYNC110 - no event signals it
                await anyio.sleep(0.05)

    return main


def test_forgetting_a_sink_removes_its_quarantine(service: RejectingService) -> None:
    command = service.command
    command("quarantine", "replay", "totals", "1")
    result = command("sinks", "forget", "totals")
    expected = (
        "done: sink 'totals' is forgotten; its quarantine held 2 rejected deltas and 1 blocked by them\n"
    )
    assert (result.status, result.out) == (0, expected)
    assert command("quarantine", "list", "--json").lines == []
    assert not list((command.data / "quarantine").iterdir())
    assert not list((command.data / "requests").iterdir())


def test_invalid_request_file_is_removed_and_logged(
    service: RejectingService, caplog: pytest.LogCaptureFixture
) -> None:
    directory = service.command.data / "requests"
    directory.mkdir()
    (directory / "00000000000000000001.json").write_text("what?")
    body = json.dumps({"verb": "drop", "sink": "totals", "log_id": "00", "offsets": []}).encode()
    (directory / "00000000000000000002.json").write_bytes(b"00000000\n" + body)

    async def main(p: Propagator) -> None:
        assert len(p.quarantine("totals")) == 3

    service.serve(main)
    assert caplog.text.count("is not a request, so it is removed") == 2
    assert not list(directory.iterdir())
