"""Each operators' verb, for the partitions of a stream: in a directory, and at the server that has it."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING

import anyio
import pytest

from delta_prop.cli import main
from delta_prop.client import SyncProducer
from delta_prop.client.jobs import JobPart
from delta_prop.hosting.streams import Streams
from delta_prop_sinks import CallbackSink, RejectDelta, StorageSink
from delta_prop_wire.delta import Delta, create
from tests.delta_prop.commands.server_thread import hosted_streams

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from delta_prop import Propagator
    from tests.delta_prop.commands.support import Command, VerbResult

COUNTS = (3, 5)
"""The number of deltas of each partition of the stream. The first of each is rejected by its sink."""


class Service:
    """A program with a stream of two partitions, each with a sink `audit`, that runs several times."""

    def __init__(self, data: Path) -> None:
        self.data = data
        self.seen: list[tuple[int, int]] = []
        self.rejects = True

    async def attach(self, streams: Streams) -> None:
        for number in range(len(COUNTS)):
            await self._attach_to(await streams.open("orders", number), number)

    async def _attach_to(self, p: Propagator, number: int) -> None:
        def take(offset: int, _: Delta) -> None:
            if offset == 0 and self.rejects:
                raise RejectDelta(0, f"partition {number} rejects it")
            self.seen.append((number, offset))

        await p.attach(CallbackSink(take, name="audit"))

    def run(self, use: Callable[[Streams], Awaitable[None]]) -> None:
        async def run() -> None:
            async with Streams(data=self.data) as streams:
                await use(streams)

        anyio.run(run)

    async def fill(self, streams: Streams) -> None:
        await streams.create("orders", len(COUNTS))
        await streams.create("empty", 3)
        await self.attach(streams)
        await (await streams.open()).publish(Delta("own", create([1.0])))
        for number, count in enumerate(COUNTS):
            p = await streams.open("orders", number)
            await p.publish(*(Delta(f"{number}-{row}", create([1.0])) for row in range(count)))
            await p.internals().sinks.feed("audit").wait(count)

    def run_sinks(self) -> list[tuple[int, int]]:
        """Run it with its sinks for a moment; return what they got."""
        self.seen.clear()

        async def use(streams: Streams) -> None:
            await self.attach(streams)
            await anyio.sleep(0.3)

        self.run(use)
        return sorted(self.seen)


@pytest.fixture
def service(command: Command) -> Service:
    service = Service(command.data)
    service.run(service.fill)
    for number in range(len(COUNTS)):
        group = ("--group", "g", "--count", str(number + 1))
        assert command("subscribe", *in_partition(number), *group, "--no-follow").status == 0
    return service


def in_partition(number: int) -> tuple[str, ...]:
    return ("--stream", "orders", "--partition", str(number))


def labels(result: VerbResult) -> list[str]:
    """Return the first column of a table."""
    return [line.split()[0] for line in result.out.splitlines()]


def places(result: VerbResult) -> list[tuple[str, int]]:
    return [(line["stream"], line["partition"]) for line in result.lines]


# --- lists


ORDERS = [("orders", 0), ("orders", 1)]


@pytest.mark.parametrize(
    ("verb", "rows"),
    [
        (("status",), [("default", 0), *ORDERS]),
        (("sinks",), [("orders", 0), ("orders", 0), ("orders", 1), ("orders", 1)]),
        (("groups", "list"), ORDERS),
        (("quarantine", "list"), ORDERS),
        (("jobs", "list"), []),
        (("log", "verify"), [("default", 0), *ORDERS]),
    ],
)
def test_list_has_all_partitions_or_the_named_ones(
    verb: tuple[str, ...], rows: list[tuple[str, int]], service: Service, command: Command
) -> None:
    assert places(command(*verb, "--json")) == rows
    assert places(command(*verb, "--json", "--stream", "orders")) == [row for row in rows if row in ORDERS]
    assert places(command(*verb, "--json", *in_partition(1))) == [row for row in rows if row == ("orders", 1)]
    assert places(command(*verb, "--json", "--stream", "default")) == [
        row for row in rows if row == ("default", 0)
    ]
    table = command(*verb)
    assert table.status == 0
    expected = [f"{stream}/{number}" for stream, number in rows]
    if verb == ("log", "verify"):
        expected = [f"{label}:" for label in expected]
        assert [label for label in labels(table) if "/" in label] == expected
    else:
        assert labels(table)[-len(rows) - 1 :] == ["partition", *expected]
    for place, reason in (
        (("--stream", "nosuch"), "stream 'nosuch': unknown: give one of default, empty, orders"),
        (in_partition(2), "stream 'orders' has 2: name 0 to 1"),
    ):
        result = command(*verb, *place)
        assert (result.status > 0, result.out, result.err.count("\n")) == (True, "", 1)
        assert reason in result.err


def test_status_describes_the_named_partition_in_full(service: Service, command: Command) -> None:
    (fields,) = command("status", "--json", *in_partition(1)).lines
    assert (fields["next_offset"], fields["sinks"], fields["quarantined"]) == (5, 2, {"audit": 1})
    assert fields["lags"]["orders/1 g"]["deltas"] == 3
    shown = dict(line.split(maxsplit=1) for line in command("status", *in_partition(1)).out.splitlines())
    assert (shown["stream"], shown["partition"], shown["next_offset"]) == ("orders", "1", "5")
    shown = dict(line.split(maxsplit=1) for line in command("status", "--stream", "default").out.splitlines())
    assert shown["next_offset"] == "1"
    assert "stream" not in shown


def test_status_and_verify_report_a_corrupted_partition(service: Service, command: Command) -> None:
    (segment,) = command.data.glob("streams/orders-1/1/*.log")
    content = bytearray(segment.read_bytes())
    content[100] ^= 1
    segment.write_bytes(content)
    result = command("log", "verify", "--json")
    assert result.status == 1
    assert [line["intact"] for line in result.lines] == [True, True, False]
    assert command("log", "verify", *in_partition(0)).status == 0
    assert "streams/orders-1/1/" in command("log", "verify").err
    catalogue = command.data / "streams" / "catalogue"
    catalogue.write_bytes(b"what?")
    for verb in (("status", "--json"), ("log", "verify", "--json")):
        result = command(*verb)
        assert (result.status, places(result)) == (1, [("default", 0)])
        assert "catalogue" in result.out


# --- log


def test_log_is_shown_by_partition(service: Service, command: Command) -> None:
    rows = command("log", "show", "--json", *in_partition(1)).lines
    assert [row["vector_id"] for row in rows if "vector_id" in row] == [f"1-{row}" for row in range(5)]
    result = command("log", "show", "--stream", "orders")
    assert (result.status, result.out) == (2, "")
    assert "stream 'orders' has 2 partitions: name one with --partition" in result.err
    assert (
        "partition 0 of stream 'empty' was never used"
        in command("log", "show", "--stream", "empty", "--partition", "0").err
    )


def test_log_is_exported_partition_after_partition(service: Service, command: Command) -> None:
    lines = command("log", "export", "--stream", "orders").lines
    assert [(line["partition"], line["offset"]) for line in lines] == [
        (number, offset) for number, count in enumerate(COUNTS) for offset in range(count)
    ]
    lines = command("log", "export", "--stream", "orders", "--count", "4", "--skip-corrupt").lines
    assert [(line["partition"], line["offset"]) for line in lines] == [(0, 0), (0, 1), (0, 2), (1, 0)]
    one = command("log", "export", *in_partition(1), "--start", "3").lines
    assert [(line.get("partition"), line["offset"]) for line in one] == [(None, 3), (None, 4)]
    assert [line["vector_id"] for line in command("log", "export").lines] == ["own"]
    for arguments, fix in (
        (("--start", "3"), "name one with --partition"),
        (("--format", "frames"), "name one with --partition"),
    ):
        result = command("log", "export", "--stream", "orders", *arguments)
        assert (result.status, result.out) == (2, "")
        assert fix in result.err


def test_copy_has_all_streams_and_opens(service: Service, command: Command, tmp_path: Path) -> None:
    result = command("log", "export", "--to", tmp_path / "backup")
    assert (result.status, result.err) == (0, "")
    assert "3 partitions" in result.out
    before = [command("sinks", "--json").lines, command("quarantine", "list", "--json").lines]
    command.data = service.data = tmp_path / "restored"
    assert command("log", "restore", "--from", tmp_path / "backup").status == 0
    assert command("log", "verify").status == 0
    after = [command("sinks", "--json").lines, command("quarantine", "list", "--json").lines]
    for rows in (*before, *after):
        for row in rows:
            row.pop("lag_s", None)
    assert after == before
    assert service.run_sinks() == []

    async def use(streams: Streams) -> None:
        assert streams.catalogue.require("orders").partitions == 2
        assert streams.catalogue.last_id == 2
        await (await streams.open("orders", 1)).publish(Delta("new", create([1.0])))

    service.run(use)
    assert service.run_sinks() == [(1, 5)]


# --- sinks and groups


def test_sink_of_one_partition_is_controlled_before_the_next_start(
    service: Service, command: Command
) -> None:
    result = command("sinks", "reset", "audit", "--to", "2", *in_partition(1))
    assert result.out.startswith("recorded: reset of sink 'audit' in orders/1 to offset 2; the next service")
    result = command("sinks", "pause", "audit", *in_partition(0))
    assert (result.status, command("sinks", *in_partition(1), "--json").lines[0]["requested"]) == (
        0, ["reset"],
    )  # fmt: skip
    assert service.run_sinks() == [(1, 2), (1, 3), (1, 4)]
    rows = [row for row in command("sinks", "--json").lines if row["kind"] == "sink"]
    assert [(row["partition"], row["paused"]) for row in rows] == [(0, True), (1, False)]
    command("sinks", "resume", "audit", *in_partition(0))
    command("sinks", "reset", "audit", "--to", "earliest", *in_partition(0))
    service.rejects = False
    assert service.run_sinks()[-3:] == [(0, 0), (0, 1), (0, 2)]
    for arguments, fix in (
        (
            ("pause", "nobody", *in_partition(1)),
            "there is no such sink in orders/1: name an existing one (audit)",
        ),
        (("pause", "audit"), "name an existing one (none)"),
        (("pause", "audit", "--stream", "orders"), "name one with --partition"),
        (("reset", "audit", "--to", "4", *in_partition(0)), "an offset from 0 to 3"),
    ):
        result = command("sinks", *arguments)
        assert (result.status, result.out) == (2, "")
        assert fix in result.err


def test_sink_of_one_partition_is_forgotten(service: Service, command: Command) -> None:
    result = command("sinks", "forget", "audit", *in_partition(1))
    assert result.out == (
        "done: sink 'audit' in orders/1 is forgotten; its quarantine held 1 rejected deltas and 0 blocked by "
        "them\n"
    )
    assert (
        command("sinks", "forget", "g", *in_partition(0)).out == "done: group 'g' in orders/0 is forgotten\n"
    )
    rows = [(row["name"], row["partition"]) for row in command("sinks", "--json").lines]
    assert rows == [("audit", 0), ("g", 1)]
    assert "no such sink or group in orders/1" in command("sinks", "forget", "audit", *in_partition(1)).err


def test_group_of_one_partition_is_reset(service: Service, command: Command) -> None:
    result = command("groups", "reset", "g", "--to", "latest", *in_partition(1))
    assert result.out == "done: group 'g' in orders/1 goes on at offset 5\n"
    assert [row["offset"] for row in command("groups", "list", "--json").lines] == [1, 5]
    assert (
        "no such group in orders/0" in command("groups", "reset", "x", "--to", "latest", *in_partition(0)).err
    )


# --- quarantine


def test_quarantine_of_one_partition_is_shown_and_released(service: Service, command: Command) -> None:
    (fields,) = command("quarantine", "show", "audit", "0", "--json", *in_partition(1)).lines
    assert (fields["reason"], fields["delta"]["vector_id"]) == ("partition 1 rejects it", "1-0")
    assert (fields["stream"], fields["partition"]) == ("orders", 1)
    result = command("quarantine", "drop", "audit", "0", *in_partition(0))
    assert result.out.startswith(
        "recorded: drop for sink 'audit' in orders/0 (rejected: 1, blocked by them: 0)"
    )
    command("quarantine", "replay", "audit", "--all", *in_partition(1))
    service.rejects = False

    async def use(streams: Streams) -> None:
        await service.attach(streams)
        with anyio.fail_after(10):
            while list((service.data / "requests").iterdir()):  # noqa: ASYNC110 - another task removes them
                await anyio.sleep(0.05)

    service.seen.clear()
    service.run(use)
    assert service.seen == [(1, 0)]
    assert command("quarantine", "list", "--json").lines == []
    assert (
        "sink 'nobody': it has no quarantine in orders/1"
        in command("quarantine", "replay", "nobody", "--all", *in_partition(1)).err
    )


# --- a server


def at_server(command: Command, address: str, *arguments: str) -> VerbResult:
    from tests.delta_prop.commands.support import VerbResult

    command.capsys.readouterr()
    status = main([*arguments, address])
    captured = command.capsys.readouterr()
    return VerbResult(status, captured.out, captured.err)


def stage_job(address: str, number: int, rows: int) -> None:
    part = JobPart("nightly", 0, 1)
    with SyncProducer(address, name="nightly/0", job=part, stream="orders", partition=number) as producer:
        for row in range(rows):
            producer.offer(Delta(f"j{row}", create([1.0])))
        producer.flush()


def test_verbs_of_a_served_directory(service: Service, command: Command) -> None:
    with hosted_streams(command.data, service.attach) as addresses:
        result = command("sinks", "pause", "audit", *in_partition(1))
        assert result.out == "done: pause of sink 'audit' in orders/1\n"
        result = at_server(command, addresses.http_address, "sinks", "--json", "--http")
        assert [(row["partition"], row["state"]) for row in result.lines if row["stream"] == "orders"] == [
            (0, "idle"), (1, "paused"),
        ]  # fmt: skip
        for verb in (("sinks",), ("groups", "list"), ("jobs", "list")):
            shown = at_server(command, addresses.http_address, *verb, "--json", *in_partition(1), "--http")
            assert {(row["stream"], row["partition"]) for row in shown.lines} <= {("orders", 1)}
            table = at_server(command, addresses.http_address, *verb, "--stream", "orders", "--http")
            assert table.status == 0
            wrong = at_server(command, addresses.http_address, *verb, "--stream", "nosuch", "--http")
            assert "stream 'nosuch': unknown: give one of default, empty, orders" in wrong.err
        table = at_server(command, addresses.http_address, "sinks", "--http")
        assert labels(table) == ["partition", "orders/0", "orders/1"]
        shown = at_server(command, addresses.http_address, "status", *in_partition(1), "--json", "--http")
        assert [(row["partition"], row["next_offset"]) for row in shown.lines] == [(1, 5)]
        assert "orders/1 " in at_server(command, addresses.http_address, "status", "--http").out
        assert "orders/1 audit" in at_server(command, addresses.http_address, "top", "--once", "--http").out


def test_jobs_of_a_partition_are_listed_shown_and_aborted(service: Service, command: Command) -> None:
    with hosted_streams(command.data) as addresses:
        address = addresses.protocol_address
        for number in range(2):
            stage_job(address, number, number + 1)
        shown = at_server(command, address, "jobs", "show", "nightly", "--json", *in_partition(1), "--to")
        assert shown.lines[0]["deltas"] == 2
        listed = at_server(command, addresses.http_address, "jobs", "list", "--json", "--http")
        assert [(row["partition"], row["deltas"]) for row in listed.lines] == [(0, 1), (1, 2)]
        assert at_server(command, address, "jobs", "abort", "nightly", *in_partition(1), "--to").status == 0
        assert "UNKNOWN_JOB" in at_server(command, address, "jobs", "show", "nightly", "--to").err
    rows = {row["partition"]: row["state"] for row in command("jobs", "list", "--json").lines}
    assert rows[0] == "staging"
    assert json.loads(command("jobs", "show", "nightly", "--json", *in_partition(0)).out)["partition"] == 0
    assert labels(command("jobs", "list"))[:2] == ["partition", "orders/0"]
    assert command("jobs", "abort", "nightly", *in_partition(0)).status == 0
    assert "staging" not in command("jobs", "list").out


# --- audit


def test_sink_of_one_partition_is_audited_and_repaired(
    service: Service, command: Command, tmp_path: Path
) -> None:
    async def store(streams: Streams) -> None:
        p = await streams.open("orders", 1)
        await p.attach(StorageSink(tmp_path / "one.db"))
        await p.wait_visible(5, committed=True)

    def spoil() -> None:
        with closing(sqlite3.connect(tmp_path / "one.db")) as connection, connection:
            connection.execute("DELETE FROM vectors WHERE vector_id = '1-3'")

    service.run(store)
    arguments = ("audit", "--storage", str(tmp_path / "one.db"), *in_partition(1))
    assert command(*arguments).err.endswith("no differences\n")
    spoil()
    (line,) = command(*arguments, "--json").lines
    assert (line["vector_id"], line["difference"]) == ("1-3", "missing")
    assert "belongs to log" in command(*arguments[:3], *in_partition(0)).err
    assert command(*arguments, "--repair").status == 0
    service.run(store)
    assert command(*arguments).status == 0
    spoil()
    with hosted_streams(command.data) as addresses:
        result = command(*arguments, "--repair", "--to", addresses.protocol_address)
        assert "1 of 1 were republished" in result.err
    service.run(store)
    assert command(*arguments).status == 0
    assert [row["next_offset"] for row in command("status", "--json").lines] == [1, 3, 7]
