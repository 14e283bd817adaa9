"""A verb that finds nothing prints a correct message that names where to look instead."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from delta_prop import LogSettings, Propagator
from delta_prop_wire.delta import Delta, create
from tests.delta_prop.commands.support import Command, create_line, create_lines


@pytest.mark.parametrize("target", ["/proc/x", "/dev/null/x", "x" * 300, "a\0b"])
def test_impossible_copy_is_reported_with_its_fix(target: str, command: Command) -> None:
    command.publish(create_lines(1))
    for verb in (("log", "export", "--to", target), ("log", "restore", "--from", command.data)):
        restores = verb[1] == "restore"
        command.data, before = (Path(target), command.data) if restores else (command.data, command.data)
        result = command(*verb)
        command.data = before
        assert result.status == 2, result.err
        assert result.err.count("\n") == 1
        assert "cannot be created" in result.err
        assert "name a new directory" in result.err


def test_totals_name_the_log_end_if_all_lines_are_refused(command: Command) -> None:
    assert command.publish(["nonsense"]).lines[-1]["next_offset"] == 0
    command.publish(create_lines(3))
    result = command.publish(["nonsense", "{}"])
    assert (result.status, result.lines[-1]["acknowledged"]) == (1, 0)
    assert result.lines[-1]["next_offset"] == 3
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
    result = command("get", "a")
    assert (result.status, result.lines[0]["alive"]) == (1, False)
    assert "'a' is not in namespace 'default', but in 'docs', 'other'" in result.err
    assert "--namespace" in result.err
    assert command("get", "a", "--namespace", "docs").err == ""
    assert command("get", "c").err == ""
    command.publish([create_line("d", namespace=f"n{number}") for number in range(9)])
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
            for number in range(400):
                await p.publish(Delta(f"v{number}", create([1.0] * 32), "fill"))
            with anyio.fail_after(20):
                while not list(command.data.rglob("*.snapshot")):  # noqa: ASYNC110 - no event signals the file
                    await anyio.sleep(0.05)

    anyio.run(fill)
    assert "'a' is not in namespace 'default', but in 'docs'" in command("get", "a").err
