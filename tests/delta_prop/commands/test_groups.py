"""`groups list` and `groups reset`, in a directory and at a server; a standby member takes over."""

from __future__ import annotations

import shlex
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import anyio

from delta_prop.client import Subscriber
from delta_prop.delivery.group_cursor import GroupCursor, read_position
from delta_prop_broker.local_disk import LocalDisk
from tests.delta_prop.commands.server_thread import ServerAddresses, served
from tests.delta_prop.commands.support import create_lines
from tests.page_samples import mask_numbers, sample

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.delta_prop.commands.support import Command


def test_reset_refuses_bad_targets_and_reports_the_new_offset(command: Command) -> None:
    command.publish(create_lines(5))
    assert command("subscribe", "--group", "g", "--count", "3").status == 0
    assert command("groups", "list", "--json").lines == [
        {"name": "g", "stream": "default", "partition": 0, "offset": 3, "lag": 2}
    ]
    for arguments, fix in [
        (("nobody", "--to", "earliest"), "name an existing one (g)"),
        (("g", "--to", "9"), "an offset from 0 to 5"),
        (("g", "--to", "soon"), "a time like"),
    ]:
        result = command("groups", "reset", *arguments)
        assert (result.status, result.out) == (2, "")
        assert fix in result.err
    for to, offset in (("2026-01-31T12:00:00Z", 0), ("latest", 5), ("earliest", 0)):
        assert (
            command("groups", "reset", "g", "--to", to).out == f"done: group 'g' goes on at offset {offset}\n"
        )
    assert command("groups", "list").out.splitlines()[1].split() == ["g", "0", "5"]


def test_second_process_of_a_group_stands_by_and_takes_over(command: Command) -> None:
    command.publish(create_lines(5))
    assert command("subscribe", "--group", "g", "--count", "2").status == 0
    disk = LocalDisk(command.data)
    log_id = command("status", "--json").lines[0]["log_id"]
    first = GroupCursor(disk, "g", bytes.fromhex(log_id))
    refused = command("groups", "reset", "g", "--to", "earliest")
    assert (refused.status, "--force" in refused.err) == (2, True)
    assert "end that command first" in command("groups", "reset", "g", "--to", "earliest", "--force").err
    verb = [sys.executable, "-m", "delta_prop", "subscribe", "--data", str(command.data)]
    with subprocess.Popen(
        [*verb, "--group", "g", "--count", "1"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as second:
        assert second.stderr is not None
        assert "standing by until it ends" in second.stderr.readline()
        first.next_offset = 4
        first.close()
        out, err = second.communicate(timeout=30)
    assert '"offset": 4' in out
    assert "reading for group 'g' now" in err


def test_forced_reset_moves_a_group_that_is_being_read(command: Command) -> None:
    command.publish(create_lines(5))
    with served(command.data) as addresses:
        read_offsets: list[int] = []
        end = threading.Event()
        members_thread = threading.Thread(
            target=anyio.run, args=(_run_two_members, addresses, read_offsets, end)
        )
        members_thread.start()
        try:
            _wait_until(lambda: len(read_offsets) == 5)
            _wait_until(
                lambda: command("groups", "list", "--json").lines != []
            )  # the cursor is written with a delay
            (group,) = command("groups", "list", "--json").lines
            assert group["name"] == "g"
            assert "a member reads, 1 standing by" in _run_on_server(command, addresses, "groups", "list")
            assert "1 standing by" in _run_on_server(command, addresses, "top", "--once")
            refused = command("groups", "reset", "g", "--to", "3")
            assert (refused.status, "end that member, or give --force" in refused.err) == (2, True)
            result = command("groups", "reset", "g", "--to", "3", "--force")
            assert result.out == "done: group 'g' goes on at offset 3\n"
            _wait_until(lambda: read_offsets[5:] == [3, 4])
        finally:
            end.set()
            members_thread.join(20)
    position = read_position(
        LocalDisk(command.data), "g", bytes.fromhex(command("status", "--json").lines[0]["log_id"])
    )
    assert position is not None
    assert position.resets == 1


def test_page_sample_matches_the_output(command: Command) -> None:
    command.publish(create_lines(5))
    block, printed = sample("delta-prop groups list"), list[str]()
    with served(command.data) as addresses:
        read_offsets: list[int] = []
        end = threading.Event()
        members_thread = threading.Thread(
            target=anyio.run, args=(_run_two_members, addresses, read_offsets, end, "indexer")
        )
        members_thread.start()
        try:
            _wait_until(lambda: "1 standing by" in _run_on_server(command, addresses, "groups", "list"))
            for line in (line for line in block if line.startswith("$ ")):
                printed.append(line)
                _, *words = shlex.split(line[2:])
                if "--http" in words:
                    printed += _run_on_server(command, addresses, *words[:2]).splitlines()
                    continue
                result = command(*words[: words.index("--data")])
                printed += (result.out + result.err).splitlines()
                end.set()  # the page tells the operator to end the member; this ends both members
                members_thread.join(20)
        finally:
            end.set()
            members_thread.join(20)
    assert [mask_numbers(line) for line in printed] == [mask_numbers(line) for line in block]


async def _run_two_members(
    addresses: ServerAddresses, read_offsets: list[int], end: threading.Event, group: str = "g"
) -> None:
    """Run two members of a group, which append the offsets that they read to `read_offsets`."""

    async def read() -> None:
        async with Subscriber(addresses.protocol_address, "*", group=group) as s:
            async for row in s:
                read_offsets.append(row.offset)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(read)
        tasks.start_soon(read)
        await anyio.to_thread.run_sync(end.wait)
        tasks.cancel_scope.cancel()


def _run_on_server(command: Command, addresses: ServerAddresses, *verb: str) -> str:
    from delta_prop.cli import main

    command.capsys.readouterr()
    assert main([*verb, "--http", addresses.http_address]) == 0
    return command.capsys.readouterr().out


def _wait_until(condition: Callable[[], bool]) -> None:
    from time import monotonic, sleep

    deadline = monotonic() + 20
    while not condition():
        assert monotonic() < deadline
        sleep(0.02)
