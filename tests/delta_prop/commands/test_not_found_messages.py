"""Messages of verbs that find nothing: each is correct and says where to look."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from delta_prop import LogSettings, Propagator
from delta_prop_wire.delta import Delta, create
from tests.delta_prop.commands.support import Command, create_line, create_lines


@pytest.mark.parametrize("place", ["/proc/x", "/dev/null/x", "x" * 300, "a\0b"])
def test_impossible_copy_is_reported_with_its_fix(place: str, command: Command) -> None:
    command.publish(create_lines(1))
    for verb in (("log", "export", "--to", place), ("log", "restore", "--from", command.data)):
        to_restore = verb[1] == "restore"
        command.data, before = (Path(place), command.data) if to_restore else (command.data, command.data)
        done = command(*verb)
        command.data = before
        assert done.status == 2, done.err
        assert done.err.count("\n") == 1
        assert "cannot be created" in done.err
        assert "name a new directory" in done.err


def test_totals_of_refused_lines_name_the_log_end(command: Command) -> None:
    assert command.publish(["nonsense"]).lines[-1]["next_offset"] == 0
    command.publish(create_lines(3))
    done = command.publish(["nonsense", "{}"])
    assert (done.status, done.lines[-1]["acknowledged"]) == (1, 0)
    assert done.lines[-1]["next_offset"] == 3
    assert command.publish([]).lines[-1]["next_offset"] == 3


def test_totals_from_a_server_without_acks_name_no_offset(command: Command) -> None:
    from tests.delta_prop.commands.server_thread import served

    with served(command.data) as command.addresses:
        assert command.publish(["nonsense"]).lines[-1]["next_offset"] is None


def test_get_names_the_namespaces_that_have_the_id(command: Command) -> None:
    command.publish(
        [
            create_line("a", namespace="docs"),
            create_line("a", namespace="other"),
            create_line("b", namespace="docs"),
        ]
    )
    done = command("get", "a")
    assert (done.status, done.lines[0]["alive"]) == (1, False)
    assert "'a' is not in namespace 'default', but in 'docs', 'other'" in done.err
    assert "--namespace" in done.err
    assert command("get", "a", "--namespace", "docs").err == ""
    assert command("get", "c").err == ""
    command.publish([create_line("d", namespace=f"n{at}") for at in range(9)])
    assert "and 4 more" in command("get", "d").err


def test_get_names_namespaces_known_only_to_a_snapshot(command: Command) -> None:
    small = LogSettings(
        segment_bytes_max=4096,
        bytes_max=1 << 20,
        retention_bytes=8192,
        min_compaction_lag_s=0.001,
        checkpoint_frames=10,
    )

    async def fill() -> None:
        async with Propagator(data=command.data, log=small) as p:
            await p.publish(Delta("a", create([1.0]), "docs"))
            for at in range(400):
                await p.publish(Delta(f"v{at}", create([1.0] * 32), "fill"))
            with anyio.fail_after(20):
                while not list(command.data.rglob("*.snapshot")):  # noqa: ASYNC110 - a file tells it
                    await anyio.sleep(0.05)

    anyio.run(fill)
    assert "'a' is not in namespace 'default', but in 'docs'" in command("get", "a").err
