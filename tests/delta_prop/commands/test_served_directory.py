"""Verbs on a directory that another process serves: reading works, writing is refused."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.delta_prop.commands.support import Command

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SERVE = """
import sys
import anyio
from delta_prop import Delta, LogSettings, Propagator, create
from delta_prop_sinks import CallbackSink

async def main():
    async with Propagator(data=sys.argv[1], log=LogSettings(segment_bytes_max=2048)) as propagator:
        await propagator.attach(CallbackSink(lambda offset, delta: None, name="audit"))
        for number in range(40):
            await propagator.publish(Delta(f"v{number}", create([float(number)])))
        await propagator.wait_visible(40)
        await anyio.sleep(1.2)  # until the sink's cursor is written
        print("ready", flush=True)
        await anyio.to_thread.run_sync(sys.stdin.read)

anyio.run(main)
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, int]]:
    """Yield a data directory and the id of the process that serves it."""
    data = tmp_path_factory.mktemp("served") / "facts"
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE, str(data)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield data, process.pid
    finally:
        process.communicate(b"")
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["get", "v7"], '"vector": [7.0]'),
        (["status"], "next_offset    40"),
        (["log", "show", "--count", "3"], "v2"),
        (["log", "verify"], "offsets 0 to 40: intact"),
        (["log", "export", "--count", "2", "--output", "OUT"], ""),
        (["log", "export", "--format", "frames", "--output", "OUT"], ""),
        (["log", "export", "--to", "OUT"], "offsets 0 to 40,"),
        (["sinks"], "audit"),
        (["quarantine", "list"], ""),
        (["subscribe", "--start", "38", "--no-follow"], '"offset": 39'),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_reading_verb_works_beside_the_writer_process(
    arguments: list[str],
    shown: str,
    served: tuple[Path, int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = Command(tmp_path, capsys)
    command.data, pid = served
    result = command(*[str(tmp_path / "out") if one == "OUT" else one for one in arguments])
    assert (result.status, result.err) == (0, "")
    assert shown in result.out
    if "--to" in arguments:  # no process has locked the copy, so it can be written
        command.data = tmp_path / "out"
        assert command.publish(['{"vector_id": "v7", "op": "create", "vector": [8]}']).status == 0
        assert command("get", "v7").lines[0]["vector"] == [8.0]
    elif arguments == ["status"]:
        assert f"writer         {pid:,}" in result.out


@pytest.mark.parametrize("arguments", [["publish"], ["sinks", "forget", "audit"]], ids=" ".join)
def test_writing_verb_is_refused_and_names_the_process(
    arguments: list[str], served: tuple[Path, int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = Command(tmp_path, capsys)
    command.data, pid = served
    if arguments == ["publish"]:
        result = command.publish(['{"vector_id": "a", "op": "create", "vector": [1]}'])
    else:
        result = command(*arguments)
    assert (result.status, result.err.count("\n")) == (1, 1)
    assert f"process {pid}: stop that one, or name another directory" in result.err
