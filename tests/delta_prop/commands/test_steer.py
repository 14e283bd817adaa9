"""`sinks pause`, `resume`, `reset`, `rebuild`: a sink is steered beside the service, or before the next."""

from __future__ import annotations

import sqlite3
from typing import TYPE_CHECKING

import anyio

from delta_prop import Delta, Propagator, create
from delta_prop_sinks import CallbackSink, StorageSink
from tests.delta_prop.commands.support import many

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from tests.delta_prop.commands.support import Command, Done


def serve(
    command: Command, main: Callable[[Propagator], Awaitable[None]], seen: list[int] | None = None
) -> list[int]:
    """A service with one sink; the offsets that came."""
    offsets: list[int] = [] if seen is None else seen

    async def run() -> None:
        async with Propagator(data=command.data) as p:
            await p.attach(CallbackSink(lambda offset, _: offsets.append(offset), name="audit"))
            await main(p)

    anyio.run(run)
    return offsets


async def all_of_it(p: Propagator) -> None:
    await p.wait_visible(p.statistics().log.next_offset, timeout_s=10)


async def a_while(p: Propagator) -> None:
    await p.publish(Delta("more", create([1.0])))
    await anyio.sleep(0.3)


async def from_outside(command: Command, *arguments: str) -> Done:
    return await anyio.to_thread.run_sync(lambda: command(*arguments))


def test_a_paused_sink_stays_paused_over_starts_until_it_is_resumed(command: Command) -> None:
    command.publish(many(3))
    assert serve(command, all_of_it) == [0, 1, 2]
    done = command("sinks", "pause", "audit")
    assert (done.status, done.out.startswith("recorded: pause of sink 'audit'")) == (0, True)
    assert command("sinks").out.splitlines()[1].endswith("yes       pause requested")
    for _ in range(2):
        assert serve(command, a_while) == []
        (told,) = command("sinks", "--json").lines
        assert told["paused"] is True
        assert told["required"] is True
    assert told["lag"] == 2
    assert command("sinks").out.splitlines()[1].endswith("  paused")
    command("sinks", "resume", "audit")
    assert serve(command, all_of_it) == [3, 4]
    assert command("sinks", "--json").lines[0]["paused"] is False


def test_a_served_sink_is_steered(command: Command) -> None:
    command.publish(many(5))
    seen: list[int] = []

    async def main(p: Propagator) -> None:
        await all_of_it(p)
        await anyio.sleep(1.2)  # within a second the sink is known in the directory
        assert (await from_outside(command, "sinks", "pause", "audit")).out == "done: pause of sink 'audit'\n"
        assert p.statistics().sinks["audit"].state == "paused"
        await a_while(p)
        assert seen == list(range(5))
        reset = await from_outside(command, "sinks", "reset", "audit", "--to", "3")
        assert reset.out == "done: reset of sink 'audit' to offset 3\n"
        assert p.statistics().sinks["audit"].state == "paused"
        await from_outside(command, "sinks", "resume", "audit")
        await all_of_it(p)
        assert seen == [*range(5), 3, 4, 5]

    serve(command, main, seen)


def test_a_sink_is_reset_before_it_comes_back(command: Command) -> None:
    command.publish(many(4))
    assert serve(command, all_of_it) == [0, 1, 2, 3]
    assert "to offset 0; the next service" in command("sinks", "reset", "audit", "--to", "earliest").out
    assert serve(command, all_of_it) == [0, 1, 2, 3]
    command("sinks", "reset", "audit", "--to", "1")
    command("sinks", "reset", "audit", "--to", "latest")  # in their order
    assert serve(command, a_while) == [4]


def test_what_cannot_be_is_refused_with_its_cure(command: Command, tmp_path: Path) -> None:
    command.publish(many(2))

    async def storage() -> None:
        async with Propagator(data=command.data) as p:
            await p.attach(StorageSink(tmp_path / "facts.db"))
            await p.wait_visible(2)

    anyio.run(storage)
    serve(command, all_of_it)
    command("subscribe", "--group", "g", "--no-follow")
    for arguments, cure in [
        (("pause", "nobody"), "name an existing one (audit, storage)"),
        (("pause", "g"), "move it with `groups reset g --to POSITION`"),
        (("reset", "storage", "--to", "earliest"), "sinks rebuild storage --data "),
        (("reset", "audit", "--to", "3"), "an offset from 0 to 2"),
        (("reset", "audit", "--to", "soon"), "give earliest, latest"),
    ]:
        done = command("sinks", *arguments)
        assert (done.status, done.out) == (2, "")
        assert cure in done.err


# --- rebuilding


def serve_storage(command: Command, path: Path, main: Callable[[Propagator], Awaitable[None]]) -> None:
    """A service with a store in that file, and a sink that cannot be rebuilt."""

    async def run() -> None:
        async with Propagator(data=command.data) as p:
            await p.attach(StorageSink(path))
            await p.attach(CallbackSink(lambda *_: None, name="audit"))
            await all_of_it(p)
            await main(p)

    anyio.run(run)


async def nothing(_: Propagator) -> None:
    """Open and close."""


def spoil(path: Path) -> None:
    """Change a row of a store behind its back."""
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE vectors SET value = zeroblob(4) WHERE vector_id = 'v2'")
    connection.close()


def spoiled(path: Path) -> bool:
    with sqlite3.connect(path) as connection:
        (value,) = connection.execute("SELECT value FROM vectors WHERE vector_id = 'v2'").fetchone()
    connection.close()
    return bytes(value) == bytes(4)


async def rebuilt(p: Propagator) -> None:
    with anyio.fail_after(10):
        while not p.statistics().sinks["storage"].rebuilds:  # noqa: ASYNC110
            await anyio.sleep(0.01)


def test_a_served_sink_is_rebuilt(command: Command, tmp_path: Path) -> None:
    command.publish(many(4))
    store = tmp_path / "facts.db"
    serve_storage(command, store, nothing)
    spoil(store)

    async def main(p: Propagator) -> None:
        await anyio.sleep(1.2)  # within a second the sink is known in the directory
        assert spoiled(store), "else nothing is shown"
        done = await from_outside(command, "sinks", "rebuild", "storage")
        assert (done.status, done.out.startswith("done: rebuild of sink 'storage' is requested; `")) == (
            0,
            True,
        )
        await rebuilt(p)
        await all_of_it(p)

    serve_storage(command, store, main)
    assert not spoiled(store)


def test_a_sink_that_is_away_is_rebuilt_when_it_comes_back(command: Command, tmp_path: Path) -> None:
    command.publish(many(4))
    store = tmp_path / "facts.db"
    serve_storage(command, store, nothing)
    spoil(store)
    done = command("sinks", "rebuild", "storage")
    assert done.out.startswith("recorded: rebuild of sink 'storage'; the next service that opens")
    assert command("sinks").out.splitlines()[2].endswith("rebuild requested")

    async def without_it() -> None:
        async with Propagator(data=command.data):
            pass  # the request is taken over, and outlasts this process

    anyio.run(without_it)
    assert not list((command.data / "requests").iterdir())
    assert command("sinks").out.splitlines()[2].endswith("rebuild requested")
    serve_storage(command, store, rebuilt)
    assert not spoiled(store)
    assert "rebuild asked" not in command("sinks").out
    spoil(store)
    serve_storage(command, store, nothing)
    assert spoiled(store), "it is rebuilt once"


def test_a_rebuild_that_cannot_be_is_told_to_who_asks(command: Command, tmp_path: Path) -> None:
    command.publish(many(2))
    store = tmp_path / "facts.db"

    async def main(p: Propagator) -> None:
        await anyio.sleep(1.2)
        done = await from_outside(command, "sinks", "rebuild", "audit")
        assert (done.status, done.out, done.err.count("\n")) == (1, "", 1)
        assert "rebuild of sink 'audit' was not done: sink 'audit' cannot be rebuilt: it stores" in done.err
        assert not list((command.data / "requests").iterdir())
        assert p.statistics().sinks["audit"].state == "idle"

    serve_storage(command, store, main)
    assert command("sinks", "rebuild", "audit").status == 0, "nobody knows yet what it is"
    serve_storage(command, store, nothing)  # which passes the wish over, with a warning
    nobody = command("sinks", "rebuild", "nobody")
    assert (nobody.status, "name an existing one (audit, storage)" in nobody.err) == (2, True)
