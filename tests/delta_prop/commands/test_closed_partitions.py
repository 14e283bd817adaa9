"""A server's lists say which partitions are not open, so that a lag there is not taken for none."""

from __future__ import annotations

import json
from argparse import Namespace
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from delta_prop.cli import main
from delta_prop.client import SyncProducer
from delta_prop.commands.tables import describe_closed, find_closed
from delta_prop.hosting.streams import Streams
from delta_prop_wire.delta import Delta, create
from tests.delta_prop.commands.server_thread import hosted_streams

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.delta_prop.commands.server_thread import ServerAddresses
    from tests.delta_prop.commands.support import Command

NOT_OPEN = "partitions that are not open, and knows nothing of them: "
SEE = ": --data DIR shows them, also beside a running server"


async def fill(data: Path) -> None:
    async with Streams(data=data) as streams:
        await streams.create("orders", 4)
        for number in range(2):
            p = await streams.open("orders", number)
            await p.publish(*(Delta(f"{number}-{row}", create([1.0])) for row in range(3)))


@pytest.fixture
def addresses(command: Command) -> Iterator[ServerAddresses]:
    """The addresses of a server that has started again: a group lags in a partition that is not open."""
    anyio.run(fill, command.data)
    place = ("--stream", "orders", "--partition", "1")
    assert command("subscribe", *place, "--group", "g", "--count", "1", "--no-follow").status == 0
    with hosted_streams(command.data) as addresses:
        yield addresses


@pytest.mark.parametrize("form", [(), ("--json",)])
@pytest.mark.parametrize("verb", [("groups", "list"), ("sinks",), ("jobs", "list")])
def test_list_of_a_server_names_the_partitions_that_are_not_open(
    verb: tuple[str, ...],
    form: tuple[str, ...],
    addresses: ServerAddresses,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = [*verb, *form, "--http", addresses.http_address]
    assert main([*arguments, "--stream", "orders"]) == 0
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert f"{NOT_OPEN}orders/0 to 3{SEE}" in captured.err
    assert main([*arguments, "--stream", "orders", "--partition", "1"]) == 0
    assert f"{NOT_OPEN}orders/1{SEE}" in capsys.readouterr().err
    assert main([*arguments, "--stream", "default"]) == 0
    assert capsys.readouterr().err == ""
    assert main(arguments) == 0
    assert f"{NOT_OPEN}orders/0 to 3{SEE}" in capsys.readouterr().err


def test_status_of_a_server_has_a_row_for_each_partition(
    addresses: ServerAddresses, capsys: pytest.CaptureFixture[str]
) -> None:
    with SyncProducer(addresses.protocol_address, name="p", stream="orders", partition=1) as producer:
        producer.publish(Delta("a", create([1.0])))
        arguments = ["status", "--http", addresses.http_address, "--stream", "orders"]
        assert main(arguments) == 0
        captured = capsys.readouterr()
        rows = [line.split() for line in captured.out.splitlines()]
        assert rows[1] == ["orders/0", "closed"]
        assert rows[2][:4] == ["orders/1", "open", "0", "4"]
        assert rows[2][5] == "1", "accepted"
        assert f"{NOT_OPEN}orders/0, orders/2 to 3{SEE}" in captured.err
        assert main([*arguments, "--json"]) == 0
        found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [(row["partition"], row["state"]) for row in found] == [
            (0, "closed"),
            (1, "open"),
            (2, "closed"),
            (3, "closed"),
        ]
        assert main(["status", "--http", addresses.http_address]) == 0
        captured = capsys.readouterr()
        shown = dict(line.split(maxsplit=1) for line in captured.out.splitlines())
        assert (shown["accepted"], shown["log.next_offset"], shown["log.stream"]) == ("1", "0", "default")
        assert NOT_OPEN in captured.err


def test_top_has_totals_and_a_row_for_another_stream(
    addresses: ServerAddresses, capsys: pytest.CaptureFixture[str]
) -> None:
    with SyncProducer(addresses.protocol_address, name="p", stream="orders", partition=1) as producer:
        producer.publish(Delta("a", create([1.0])))
        assert main(["top", "--once", "--http", addresses.http_address]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("log      default: offsets 0 to 0, ")
    assert "accepted 1 " in lines[2]
    (row,) = [line.split() for line in lines if line.startswith("orders/1  ")]
    assert row[:3] == ["orders/1", "0", "4"]


def test_many_partitions_that_are_not_open_are_named_in_one_line() -> None:
    streams: list[dict[str, Any]] = [
        {"name": f"s{number}", "partitions": 5, "open": [{"partition": 2}]} for number in range(9)
    ]
    closed = find_closed(streams, Namespace(stream=None, partition=None))
    assert len(closed) == 36
    assert "s0/0 to 1, s0/3 to 4, s1/0 to 1, " in describe_closed(closed)
    assert "s4/3 to 4 and 8 more: " in describe_closed(closed)
