"""`subscribe` prints the requested lines from the requested start; a group misses no delta."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import anyio
import pytest

from delta_prop.api.propagator import Propagator
from delta_prop.cli import main
from delta_prop.client import SyncProducer
from delta_prop_broker.local_disk import LocalDisk
from delta_prop_wire.delta import Delta, create
from tests.delta_prop.commands.server_thread import served
from tests.delta_prop.commands.support import Command, create_line, create_lines

if TYPE_CHECKING:
    from pathlib import Path

ALL = ("--start", "earliest", "--no-follow")


def offsets(command: Command, *arguments: object) -> list[int]:
    result = command("subscribe", *arguments)
    assert result.status == 0
    return [line["offset"] for line in result.lines]


def test_lines_come_back_as_they_were_published(local_or_remote: Command) -> None:
    local_or_remote.publish([create_line("a", 1.5, topics=["t"], metadata={"k": [1]}), create_line("b", 2.0)])
    lines = local_or_remote("subscribe", *ALL).lines
    assert lines[0] == {
        "offset": 0,
        "vector_id": "a",
        "namespace": "default",
        "op": "create",
        "vector": [1.5],
        "metadata": {"k": [1]},
        "topics": ["t"],
        "dot": lines[0]["dot"],
    }
    other = Command(local_or_remote.data.parent / "other", local_or_remote.capsys)
    other.input.parent.mkdir()
    other.publish([json.dumps(line) for line in lines])
    assert [line["vector"] for line in other("subscribe", *ALL).lines] == [[1.5], [2.0]]


def test_topics_select_lines(local_or_remote: Command) -> None:
    local_or_remote.publish(
        [*create_lines(3), create_line("x", namespace="docs"), create_line("y", topics=["hot"])]
    )
    assert offsets(local_or_remote, *ALL, "--topic", "v:v1") == [1]
    assert offsets(local_or_remote, *ALL, "--topic", "ns:docs", "--topic", "c:hot") == [3, 4]
    assert offsets(local_or_remote, *ALL, "--topic", "op:delete") == []


def test_start_and_count_select_the_offsets(local_or_remote: Command) -> None:
    local_or_remote.publish(create_lines(5))
    assert offsets(local_or_remote, "--start", "3", "--no-follow") == [3, 4]
    assert offsets(local_or_remote, "--start", "1", "--count", "2") == [1, 2]
    assert offsets(local_or_remote, "--start", "latest", "--no-follow") == []
    assert offsets(local_or_remote, "--no-follow") == []
    assert offsets(local_or_remote, "--start", "2020-01-01", "--no-follow") == [0, 1, 2, 3, 4]
    assert offsets(local_or_remote, "--start", "now", "--no-follow") == []


@pytest.mark.parametrize("fault", ["missing", "empty"])
def test_log_without_its_recovery_point_is_not_read_as_empty(fault: str, command: Command) -> None:
    command.publish(create_lines(5))
    (recovery_point,) = command.data.glob("streams/default/0/mark")
    recovery_point.unlink() if fault == "missing" else recovery_point.write_bytes(b"")
    shown = [line["offset"] for line in command("log", "show", "--json").lines]
    assert shown
    assert offsets(command, *ALL) == shown
    assert offsets(command, "--group", "g", "--no-follow") == shown
    assert (
        f"mark: {'the file is missing' if fault == 'missing' else 'it is empty'}\n"
        in command("log", "verify").err
    )


def test_batch_may_be_read_in_parts(command: Command) -> None:
    async def publish_many() -> None:
        async with Propagator(data=command.data) as p:
            await p.publish_many([f"v{n}" for n in range(6)], [[1.0]] * 6)

    anyio.run(publish_many)
    assert offsets(command, "--start", "2", "--no-follow") == [2, 3, 4, 5]
    for n in range(3):
        assert offsets(command, "--group", "g", "--count", "1") == [n]
    assert offsets(command, "--group", "g", "--no-follow") == [3, 4, 5]


def test_noops_are_skipped(local_or_remote: Command) -> None:
    wrong = json.dumps({"vector_id": "a", "op": "sparse", "indices": [9], "values": [1]})
    local_or_remote.publish([create_line("a"), wrong, create_line("b")])
    assert offsets(local_or_remote, *ALL) == [0, 2]


def test_group_resumes_at_its_cursor(command: Command) -> None:
    command.publish(create_lines(5))
    group = ("--group", "a/.. b", "--no-follow")
    assert offsets(command, *group, "--count", "2") == [0, 1]
    assert offsets(command, *group, "--count", "1") == [2]
    assert offsets(command, *group, "--topic", "v:v3") == [3]
    assert offsets(command, *group) == []
    command.publish(create_lines(1))
    (row,) = command("sinks", "--json").lines
    assert 0 < row.pop("lag_s") < 600
    assert (row.pop("stream"), row.pop("partition")) == ("default", 0)
    assert row == {"name": "a/.. b", "kind": "group", "offset": 5, "required": False, "lag": 1}
    assert offsets(command, *group) == [5]
    assert offsets(command, *group, "--start", "4") == [], "the start was applied to an existing group"
    assert command("groups", "reset", "a/.. b", "--to", "4").status == 0
    assert offsets(command, *group) == [4, 5]
    assert command("sinks", "forget", "a/.. b").status == 0
    assert offsets(command, *group) == [0, 1, 2, 3, 4, 5]


def test_group_resumes_at_its_cursor_on_a_server_too(local_or_remote: Command) -> None:
    local_or_remote.publish(create_lines(5))
    group = ("--group", "a/.. b", "--no-follow")
    assert offsets(local_or_remote, *group, "--count", "2") == [0, 1]
    assert offsets(local_or_remote, *group, "--count", "1") == [2]
    assert offsets(local_or_remote, *group, "--topic", "v:v3") == [3]
    assert offsets(local_or_remote, *group) == []
    local_or_remote.publish(create_lines(1))
    assert offsets(local_or_remote, *group) == [5]
    assert offsets(local_or_remote, *group, "--start", "4") == [], (
        "the start was applied to an existing group"
    )
    assert local_or_remote("groups", "reset", "a/.. b", "--to", "earliest").status == 0
    assert offsets(local_or_remote, *group, "--count", "1") == [0]
    assert offsets(local_or_remote, *group) == [1, 2, 3, 4, 5]
    assert offsets(local_or_remote, "--group", "new", "--start", "4", "--no-follow") == [4, 5]


def test_group_of_another_log_starts_over(command: Command) -> None:
    command.publish(create_lines(2))
    assert offsets(command, "--group", "g", "--no-follow") == [0, 1]
    for path in sorted(command.data.glob("streams/**/*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    command.publish(create_lines(3))
    assert offsets(command, "--group", "g", "--no-follow") == [0, 1, 2]


def test_group_that_is_being_read_cannot_be_forgotten(command: Command) -> None:
    command.publish(create_lines(1))
    assert offsets(command, "--group", "g", "--no-follow") == [0]
    lock = LocalDisk(command.data).lock("groups/g.cursor.lock")
    result = command("sinks", "forget", "g")
    assert result.status == 2
    assert "group 'g' is read by" in result.err
    assert result.err.count("\n") == 1
    lock.release()


def test_corrupted_group_cursor_is_refused(command: Command) -> None:
    command.publish(create_lines(1))
    offsets(command, "--group", "g", "--no-follow")
    path = command.data / "groups" / "g.cursor"
    path.write_bytes(path.read_bytes().replace(b"1", b"0"))
    result = command("subscribe", "--group", "g")
    assert result.status == 2
    assert "corrupted" in result.err
    assert command("sinks", "forget", "g").status == 0
    assert offsets(command, "--group", "g", "--no-follow") == [0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--start", "soon"], "give earliest, latest, an offset, a time like"),
        (["--start", "7"], "the log ends at offset 1"),
        (["--count", "0"], "give 1 or more"),
        (["--topic", "docs"], "is unknown: give * (all)"),
        (["--group", "x" * 65], "group: 65 bytes"),
    ],
)
def test_mistake_is_reported_in_one_line(
    arguments: list[str], message: str, local_or_remote: Command
) -> None:
    local_or_remote.publish(create_lines(1))
    result = local_or_remote("subscribe", *arguments)
    assert result.status == 2
    assert message in result.err
    assert result.err.count("\n") == 1


def test_missing_data_directory_is_reported(command: Command) -> None:
    for verb in (["subscribe"], ["status"], ["sinks"], ["log", "verify"], ["log", "show"], ["get", "a"]):
        result = command(*verb)
        assert result.status == 2
        assert "no data directory at" in result.err
    command.data.mkdir()
    assert "is not a data directory" in command("status").err
    assert list(command.data.iterdir()) == []


def test_follow_prints_lines_as_others_publish_them(command: Command) -> None:
    command.publish(create_lines(1))
    arguments = ["subscribe", "--data", str(command.data), "--start", "earliest", "--group", "g"]
    with subprocess.Popen(
        [sys.executable, "-m", "delta_prop", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        for n in range(3):
            assert json.loads(process.stdout.readline())["offset"] == n
            command.publish(create_lines(1))
        assert json.loads(process.stdout.readline())["offset"] == 3
        process.send_signal(2)
        process.wait(10)
    assert process.returncode == 130
    assert offsets(command, "--group", "g", "--no-follow") == []


def test_follow_on_a_server_prints_lines_as_they_are_published(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (
        served(tmp_path / "facts") as addresses,
        SyncProducer(addresses.protocol_address, name="others") as others,
    ):
        others.publish(Delta("v0", create([1.0])))
        timer = threading.Timer(0.2, lambda: others.publish(Delta("v1", create([1.0]))))
        timer.start()
        assert (
            main(["subscribe", "--from", addresses.protocol_address, "--start", "earliest", "--count", "2"])
            == 0
        )
        timer.join()
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(one["offset"], one["vector_id"]) for one in rows] == [(0, "v0"), (1, "v1")]
