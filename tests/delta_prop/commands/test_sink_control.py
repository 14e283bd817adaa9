"""`sinks pause`, `resume`, `reset`, `rebuild`, requested while the service runs or before its next start."""

from __future__ import annotations

import sqlite3
from typing import TYPE_CHECKING

import anyio

from delta_prop import Delta, Propagator, create
from delta_prop_sinks import CallbackSink, StorageSink
from tests.delta_prop.commands.support import create_lines

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from tests.delta_prop.commands.support import Command, VerbResult


def serve(
    command: Command, main: Callable[[Propagator], Awaitable[None]], offsets_so_far: list[int] | None = None
) -> list[int]:
    """Run a service with one sink, which appends to `offsets_so_far` if given; return its offsets."""
    offsets: list[int] = [] if offsets_so_far is None else offsets_so_far

    async def run() -> None:
        async with Propagator(data=command.data) as p:
            await p.attach(CallbackSink(lambda offset, _: offsets.append(offset), name="audit"))
            await main(p)

    anyio.run(run)
    return offsets


async def wait_all_applied(p: Propagator) -> None:
    await p.wait_visible(p.statistics().log.next_offset, timeout_s=10)


async def publish_and_wait(p: Propagator) -> None:
    await p.publish(Delta("more", create([1.0])))
    await anyio.sleep(0.3)


async def run_outside(command: Command, *arguments: str) -> VerbResult:
    return await anyio.to_thread.run_sync(lambda: command(*arguments))


def test_paused_sink_stays_paused_over_restarts_until_resumed(command: Command) -> None:
    command.publish(create_lines(3))
    assert serve(command, wait_all_applied) == [0, 1, 2]
    result = command("sinks", "pause", "audit")
    assert (result.status, result.out.startswith("recorded: pause of sink 'audit'")) == (0, True)
    assert command("sinks").out.splitlines()[1].endswith("yes       pause requested")
    for _ in range(2):
        assert serve(command, publish_and_wait) == []
        (row,) = command("sinks", "--json").lines
        assert row["paused"] is True
        assert row["required"] is True
    assert row["lag"] == 2
    assert command("sinks").out.splitlines()[1].endswith("  paused")
    command("sinks", "resume", "audit")
    assert serve(command, wait_all_applied) == [3, 4]
    assert command("sinks", "--json").lines[0]["paused"] is False


def test_served_sink_is_paused_reset_and_resumed(command: Command) -> None:
    command.publish(create_lines(5))
    offsets_so_far: list[int] = []

    async def main(p: Propagator) -> None:
        await wait_all_applied(p)
        await anyio.sleep(1.2)  # the service writes the sink's cursor to the directory within a second
        assert (await run_outside(command, "sinks", "pause", "audit")).out == "done: pause of sink 'audit'\n"
        assert p.statistics().sinks["audit"].state == "paused"
        await publish_and_wait(p)
        assert offsets_so_far == list(range(5))
        reset = await run_outside(command, "sinks", "reset", "audit", "--to", "3")
        assert reset.out == "done: reset of sink 'audit' to offset 3\n"
        assert p.statistics().sinks["audit"].state == "paused"
        await run_outside(command, "sinks", "resume", "audit")
        await wait_all_applied(p)
        assert offsets_so_far == [*range(5), 3, 4, 5]

    serve(command, main, offsets_so_far)


def test_detached_sink_is_reset_before_the_next_start(command: Command) -> None:
    command.publish(create_lines(4))
    assert serve(command, wait_all_applied) == [0, 1, 2, 3]
    assert "to offset 0; the next service" in command("sinks", "reset", "audit", "--to", "earliest").out
    assert serve(command, wait_all_applied) == [0, 1, 2, 3]
    command("sinks", "reset", "audit", "--to", "1")
    command("sinks", "reset", "audit", "--to", "latest")  # the service executes requests in order
    assert serve(command, publish_and_wait) == [4]


def test_impossible_request_is_refused_with_its_fix(command: Command, tmp_path: Path) -> None:
    command.publish(create_lines(2))

    async def attach_storage_sink() -> None:
        async with Propagator(data=command.data) as p:
            await p.attach(StorageSink(tmp_path / "facts.db"))
            await p.wait_visible(2)

    anyio.run(attach_storage_sink)
    serve(command, wait_all_applied)
    command("subscribe", "--group", "g", "--no-follow")
    for arguments, fix in [
        (("pause", "nobody"), "name an existing one (audit, storage)"),
        (("pause", "g"), "move it with `groups reset g --to POSITION`"),
        (("reset", "storage", "--to", "earliest"), "sinks rebuild storage --data "),
        (("reset", "audit", "--to", "3"), "an offset from 0 to 2"),
        (("reset", "audit", "--to", "soon"), "give earliest, latest"),
    ]:
        result = command("sinks", *arguments)
        assert (result.status, result.out) == (2, "")
        assert fix in result.err


# --- rebuilding


def serve_storage(command: Command, path: Path, main: Callable[[Propagator], Awaitable[None]]) -> None:
    """Run a service with a storage sink on this file and a sink that cannot be rebuilt."""

    async def run() -> None:
        async with Propagator(data=command.data) as p:
            await p.attach(StorageSink(path))
            await p.attach(CallbackSink(lambda *_: None, name="audit"))
            await wait_all_applied(p)
            await main(p)

    anyio.run(run)


async def do_nothing(_: Propagator) -> None:
    """Do nothing: the service only opens and closes."""


def corrupt(path: Path) -> None:
    """Change a row of a storage file without its sink."""
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE vectors SET value = zeroblob(4) WHERE vector_id = 'v2'")
    connection.close()


def is_corrupted(path: Path) -> bool:
    with sqlite3.connect(path) as connection:
        (value,) = connection.execute("SELECT value FROM vectors WHERE vector_id = 'v2'").fetchone()
    connection.close()
    return bytes(value) == bytes(4)


async def wait_rebuilt(p: Propagator) -> None:
    with anyio.fail_after(10):
        while not p.statistics().sinks["storage"].rebuilds:  # noqa: ASYNC110
            await anyio.sleep(0.01)


def test_served_sink_is_rebuilt(command: Command, tmp_path: Path) -> None:
    command.publish(create_lines(4))
    store = tmp_path / "facts.db"
    serve_storage(command, store, do_nothing)
    corrupt(store)

    async def main(p: Propagator) -> None:
        await anyio.sleep(1.2)  # the service writes the sink's cursor to the directory within a second
        assert is_corrupted(store), "the row was not corrupted before the rebuild"
        result = await run_outside(command, "sinks", "rebuild", "storage")
        assert (result.status, result.out.startswith("done: rebuild of sink 'storage' is requested; `")) == (
            0,
            True,
        )
        await wait_rebuilt(p)
        await wait_all_applied(p)

    serve_storage(command, store, main)
    assert not is_corrupted(store)


def test_detached_sink_is_rebuilt_at_the_next_start(command: Command, tmp_path: Path) -> None:
    command.publish(create_lines(4))
    store = tmp_path / "facts.db"
    serve_storage(command, store, do_nothing)
    corrupt(store)
    result = command("sinks", "rebuild", "storage")
    assert result.out.startswith("recorded: rebuild of sink 'storage'; the next service that opens")
    assert command("sinks").out.splitlines()[2].endswith("rebuild requested")

    async def open_without_sink() -> None:
        async with Propagator(data=command.data):
            pass  # the service stores the request in its own state

    anyio.run(open_without_sink)
    assert not list((command.data / "requests").iterdir())
    assert command("sinks").out.splitlines()[2].endswith("rebuild requested")
    serve_storage(command, store, wait_rebuilt)
    assert not is_corrupted(store)
    assert "rebuild requested" not in command("sinks").out
    corrupt(store)
    serve_storage(command, store, do_nothing)
    assert is_corrupted(store), "one request caused a second rebuild"


def test_impossible_rebuild_is_reported_to_the_caller(command: Command, tmp_path: Path) -> None:
    command.publish(create_lines(2))
    store = tmp_path / "facts.db"

    async def main(p: Propagator) -> None:
        await anyio.sleep(1.2)
        result = await run_outside(command, "sinks", "rebuild", "audit")
        assert (result.status, result.out, result.err.count("\n")) == (1, "", 1)
        assert "rebuild of sink 'audit' was not done: sink 'audit' cannot be rebuilt: it stores" in result.err
        assert not list((command.data / "requests").iterdir())
        assert p.statistics().sinks["audit"].state == "idle"

    serve_storage(command, store, main)
    assert command("sinks", "rebuild", "audit").status == 0, (
        "a request was refused while the sink's kind was unknown"
    )
    serve_storage(command, store, do_nothing)  # the service drops the request with a warning
    nobody = command("sinks", "rebuild", "nobody")
    assert (nobody.status, "name an existing one (audit, storage)" in nobody.err) == (2, True)
