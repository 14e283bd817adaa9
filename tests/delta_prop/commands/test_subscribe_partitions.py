"""`subscribe --stream` without --partition reads all partitions, from a server and from a directory."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from delta_prop.cli import main
from delta_prop_wire.murmur import partition_of
from tests.delta_prop.commands.server_thread import served_streams
from tests.delta_prop.commands.support import create_line
from tests.open_files import open_below

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PARTITIONS = 3
ALL = ("--start", "earliest", "--no-follow")


class Site:
    """A stream `orders`, in a directory or on a server that has it."""

    def __init__(self, data: Path, capsys: pytest.CaptureFixture[str], server: str | None) -> None:
        self._capsys = capsys
        self._input = data.parent / "in.jsonl"
        self.source = ("--data", str(data)) if server is None else ("--from", server)
        self._target = ("--data", str(data)) if server is None else ("--to", server)
        assert main(["streams", "create", "orders", "--partitions", str(PARTITIONS), *self._target]) == 0

    def publish(self, *names: str, **fields: Any) -> None:
        self._input.write_text("".join(create_line(name, **fields) + "\n" for name in names))
        assert main(["publish", str(self._input), "--stream", "orders", *self._target]) == 0

    def run(self, *arguments: object) -> tuple[int, list[dict[str, Any]], str]:
        """Subscribe to the stream; return the exit status, the lines and the errors."""
        self._capsys.readouterr()
        status = main(["subscribe", "--stream", "orders", *map(str, arguments), *self.source])
        captured = self._capsys.readouterr()
        return status, [json.loads(line) for line in captured.out.splitlines()], captured.err

    def read(self, *arguments: object) -> list[tuple[int, int, str]]:
        """Subscribe; return the partition, offset and vector id of each line, in order."""
        status, lines, errors = self.run(*arguments)
        assert (status, errors) == (0, "")
        return sorted((line["partition"], line["offset"], line["vector_id"]) for line in lines)


@pytest.fixture(params=["directory", "server"])
def site(
    request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Iterator[Site]:
    data = tmp_path / "facts"
    if request.param == "directory":
        yield Site(data, capsys, None)
        assert not [path for path in open_below(tmp_path) if path.endswith(".log")]
        return
    with served_streams(data) as address:
        yield Site(data, capsys, address)


def expected_rows(*names: str) -> list[tuple[int, int, str]]:
    """Return the partition, offset and id of each vector, if they are published in this order."""
    counts = [0] * PARTITIONS
    rows = []
    for name in names:
        partition = partition_of("default", name, PARTITIONS)
        rows.append((partition, counts[partition], name))
        counts[partition] += 1
    return sorted(rows)


def names_of(count: int, first: int = 0) -> list[str]:
    return [f"v{number}" for number in range(first, first + count)]


def test_lines_of_all_partitions_have_their_partition(site: Site) -> None:
    site.publish(*names_of(30))
    assert site.read(*ALL) == expected_rows(*names_of(30))
    _, lines, _ = site.run(*ALL, "--count", 1)
    assert list(lines[0])[:3] == ["offset", "partition", "vector_id"]
    _, lines, _ = site.run(*ALL, "--partition", 1)
    assert "partition" not in lines[0]
    assert len(lines) == sum(row[0] == 1 for row in expected_rows(*names_of(30)))


def test_lines_with_partitions_are_published_as_they_are(site: Site, tmp_path: Path) -> None:
    site.publish(*names_of(9))
    _, lines, _ = site.run(*ALL)
    copied = tmp_path / "copied.jsonl"
    copied.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["publish", str(copied), "--data", str(tmp_path / "other")]) == 0


def test_topics_counts_and_starts_select_lines(site: Site) -> None:
    site.publish(*names_of(20))
    assert site.read("--no-follow") == [], "the default is latest"
    assert site.read("--start", "latest", "--no-follow") == []
    assert site.read("--start", "2020-01-01", "--no-follow") == expected_rows(*names_of(20))
    assert site.read("--start", "now", "--no-follow") == []
    assert [row[2] for row in site.read(*ALL, "--topic", "v:v7", "--topic", "v:v9")] == sorted(
        ["v7", "v9"], key=lambda name: partition_of("default", name, PARTITIONS)
    )
    assert site.read(*ALL, "--topic", "ns:other") == []
    assert len(site.read("--start", "earliest", "--count", 11)) == 11
    assert len(site.read(*ALL, "--count", 100)) == 20


def test_group_continues_in_each_partition(site: Site) -> None:
    site.publish(*names_of(20))
    group = ("--group", "g", "--no-follow")
    first = site.read(*group, "--count", 7)
    assert len(first) == 7
    assert sorted([*first, *site.read(*group)]) == expected_rows(*names_of(20))
    assert site.read(*group) == []
    site.publish(*names_of(5, first=20))
    assert {row[2] for row in site.read(*group)} == set(names_of(5, first=20))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--start", "5"], "--start 5: stream 'orders' has 3 partitions, each with its own offsets"),
        (["--start", "soon"], "give earliest, latest, an offset, a time like"),
        (["--partition", "3"], "partition 3: stream 'orders' has 3"),
        (["--topic", "docs"], "is unknown: give * (all)"),
        (["--stream", "missing"], "'missing'"),
        (["--group", "x" * 65], "group: 65 bytes"),
    ],
)
def test_mistake_is_reported_in_one_line(site: Site, arguments: list[str], message: str) -> None:
    site.publish(*names_of(5))
    status, lines, errors = site.run(*arguments)
    assert (status, lines) != (0, [])
    assert status in (1, 2)
    assert message in errors
    assert errors.count("\n") == 1


def test_deltas_are_followed_in_partitions_used_and_unused(site: Site) -> None:
    first, *others = names_of(20)
    site.publish(first)
    arguments = ["subscribe", "--stream", "orders", "--start", "latest", *site.source]
    with subprocess.Popen(
        [sys.executable, "-m", "delta_prop", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        stdout = process.stdout
        found: list[str] = []

        def read() -> None:
            found.extend(json.loads(stdout.readline())["vector_id"] for _ in range(19))

        thread = threading.Thread(target=read)
        thread.start()
        time.sleep(2)  # it follows by then
        site.publish(*others)
        thread.join(20)
        process.send_signal(2)
        process.wait(10)
    assert process.returncode == 130
    assert sorted(found) == sorted(others)


def test_unused_partitions_are_skipped(site: Site) -> None:
    assert site.read(*ALL) == []
    site.publish("v0")
    assert site.read(*ALL) == expected_rows("v0")


def test_second_member_of_a_group_stands_by_in_each_partition(site: Site) -> None:
    site.publish(*names_of(20))
    arguments = [sys.executable, "-m", "delta_prop", "subscribe", "--stream", "orders", *site.source]
    with subprocess.Popen([*arguments, "--group", "g"], stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdout is not None
        for _ in range(20):
            reader.stdout.readline()
        with subprocess.Popen(
            [*arguments, "--group", "g"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as second:
            assert second.stderr is not None
            assert second.stdout is not None
            notes = sorted(second.stderr.readline() for _ in range(PARTITIONS))
            for partition, note in enumerate(notes):
                assert f"reads partition {partition} for group 'g': standing by until it" in note
            reader.send_signal(2)
            reader.wait(10)
            notes = sorted(second.stderr.readline() for _ in range(PARTITIONS))
            for partition, note in enumerate(notes):
                assert f"reading partition {partition} for group 'g' now" in note
            site.publish("new")
            assert json.loads(second.stdout.readline())["vector_id"] == "new"
            second.send_signal(2)
            second.wait(10)
