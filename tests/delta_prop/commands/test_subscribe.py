"""`subscribe`: the lines asked for, from where they are asked for; a group misses nothing."""

from __future__ import annotations

import json
import subprocess
import sys

import anyio
import pytest

from delta_prop.embedded import Propagator
from delta_prop_broker.local_disk import LocalDisk
from tests.delta_prop.commands.support import Command, created, many

ALL = ("--start", "earliest", "--no-follow")


def offsets(command: Command, *arguments: object) -> list[int]:
    done = command("subscribe", *arguments)
    assert done.status == 0
    return [line["offset"] for line in done.lines]


def test_lines_come_back_as_they_were_published(command: Command) -> None:
    command.publish([created("a", 1.5, topics=["t"], metadata={"k": [1]}), created("b", 2.0)])
    lines = command("subscribe", *ALL).lines
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
    again = Command(command.data.parent / "other", command._capsys)
    again._input.parent.mkdir()
    again.publish([json.dumps(line) for line in lines])
    assert [line["vector"] for line in again("subscribe", *ALL).lines] == [[1.5], [2.0]]


def test_topics_choose_lines(command: Command) -> None:
    command.publish([*many(3), created("x", namespace="docs"), created("y", topics=["hot"])])
    assert offsets(command, *ALL, "--topic", "v:v1") == [1]
    assert offsets(command, *ALL, "--topic", "ns:docs", "--topic", "c:hot") == [3, 4]
    assert offsets(command, *ALL, "--topic", "op:delete") == []


def test_places_to_start_and_how_many(command: Command) -> None:
    command.publish(many(5))
    assert offsets(command, "--start", "3", "--no-follow") == [3, 4]
    assert offsets(command, "--start", "1", "--count", "2") == [1, 2]
    assert offsets(command, "--start", "latest", "--no-follow") == []
    assert offsets(command, "--no-follow") == []
    assert offsets(command, "--start", "2020-01-01", "--no-follow") == [0, 1, 2, 3, 4]
    assert offsets(command, "--start", "2999-01-01T00:00:00+01:00", "--no-follow") == []


@pytest.mark.parametrize("lost", ["missing", "empty"])
def test_a_log_whose_mark_is_lost_is_no_empty_one(lost: str, command: Command) -> None:
    command.publish(many(5))
    (mark,) = command.data.glob("streams/default/0/mark")
    mark.unlink() if lost == "missing" else mark.write_bytes(b"")
    shown = [line["offset"] for line in command("log", "show", "--json").lines]
    assert shown
    assert offsets(command, *ALL) == shown
    assert offsets(command, "--group", "g", "--no-follow") == shown
    assert (
        f"mark: {'the file is missing' if lost == 'missing' else 'it is empty'};"
        in command("log", "verify").err
    )


def test_a_batch_may_be_read_in_parts(command: Command) -> None:
    async def publish_many() -> None:
        async with Propagator(data=command.data) as p:
            await p.publish_many([f"v{n}" for n in range(6)], [[1.0]] * 6)

    anyio.run(publish_many)
    assert offsets(command, "--start", "2", "--no-follow") == [2, 3, 4, 5]
    for n in range(3):
        assert offsets(command, "--group", "g", "--count", "1") == [n]
    assert offsets(command, "--group", "g", "--no-follow") == [3, 4, 5]


def test_voids_are_passed_over(command: Command) -> None:
    wrong = json.dumps({"vector_id": "a", "op": "sparse", "indices": [9], "values": [1]})
    command.publish([created("a"), wrong, created("b")])
    assert offsets(command, *ALL) == [0, 2]


def test_a_group_goes_on_where_it_stopped(command: Command) -> None:
    command.publish(many(5))
    group = ("--group", "a/.. b", "--no-follow")
    assert offsets(command, *group, "--count", "2") == [0, 1]
    assert offsets(command, *group, "--count", "1") == [2]
    assert offsets(command, *group, "--topic", "v:v3") == [3]
    assert offsets(command, *group) == []
    command.publish(many(1))
    (kept,) = command("sinks", "--json").lines
    assert kept == {"name": "a/.. b", "kind": "group", "offset": 5, "required": False, "lag": 1}
    assert offsets(command, *group) == [5]
    assert offsets(command, *group, "--start", "4") == [4, 5]
    assert command("sinks", "forget", "a/.. b").status == 0
    assert offsets(command, *group) == [0, 1, 2, 3, 4, 5]


def test_a_group_of_another_log_begins_anew(command: Command) -> None:
    command.publish(many(2))
    assert offsets(command, "--group", "g", "--no-follow") == [0, 1]
    for path in sorted(command.data.glob("streams/**/*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    command.publish(many(3))
    assert offsets(command, "--group", "g", "--no-follow") == [0, 1, 2]


def test_one_process_at_a_time_reads_for_a_group(command: Command) -> None:
    command.publish(many(1))
    assert offsets(command, "--group", "g", "--no-follow") == [0]
    lock = LocalDisk(command.data).lock("groups/g.cursor.lock")
    for done in (command("subscribe", "--group", "g"), command("sinks", "forget", "g")):
        assert done.status == 2
        assert "group 'g' is read by" in done.err
        assert done.err.count("\n") == 1
    lock.release()


def test_a_damaged_place_is_not_guessed(command: Command) -> None:
    command.publish(many(1))
    offsets(command, "--group", "g", "--no-follow")
    path = command.data / "groups" / "g.cursor"
    path.write_bytes(path.read_bytes().replace(b"1", b"0"))
    done = command("subscribe", "--group", "g")
    assert done.status == 2
    assert "damaged" in done.err
    assert command("sinks", "forget", "g").status == 0
    assert offsets(command, "--group", "g", "--no-follow") == [0]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--start", "soon"], "give earliest, latest, an offset, or a time like"),
        (["--start", "7"], "the log ends at offset 1"),
        (["--count", "0"], "give 1 or more"),
        (["--topic", "docs"], "none of: * (all)"),
        (["--group", "x" * 65], "group: 65 bytes"),
    ],
)
def test_a_mistake_gets_one_line(arguments: list[str], said: str, command: Command) -> None:
    command.publish(many(1))
    done = command("subscribe", *arguments)
    assert done.status == 2
    assert said in done.err
    assert done.err.count("\n") == 1


def test_a_directory_that_is_none_is_told(command: Command) -> None:
    for verb in (["subscribe"], ["status"], ["sinks"], ["log", "verify"], ["log", "show"], ["get", "a"]):
        done = command(*verb)
        assert done.status == 2
        assert "no data directory at" in done.err
    command.data.mkdir()
    assert "is no data directory" in command("status").err
    assert list(command.data.iterdir()) == []


def test_lines_come_as_they_are_published_by_others(command: Command) -> None:
    command.publish(many(1))
    arguments = ["subscribe", "--data", str(command.data), "--start", "earliest", "--group", "g"]
    with subprocess.Popen(
        [sys.executable, "-m", "delta_prop", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        for n in range(3):
            assert json.loads(process.stdout.readline())["offset"] == n
            command.publish(many(1))
        assert json.loads(process.stdout.readline())["offset"] == 3
        process.send_signal(2)
        process.wait(10)
    assert process.returncode == 130
    assert offsets(command, "--group", "g", "--no-follow") == []
