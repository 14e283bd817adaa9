"""`streams` and the other verbs with --stream: on a directory and on a server, in processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from delta_prop.cli import main
from delta_prop_wire.murmur import partition_of
from tests.delta_prop.server.process import served

if TYPE_CHECKING:
    from pathlib import Path

LINES = 15_000


def run(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


def read_json(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def write_lines(path: Path, count: int) -> Path:
    lines = [
        json.dumps({"vector_id": f"v{number}", "op": "opaque", "data": "aGk="}) for number in range(count)
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_streams_of_a_directory_are_changed_and_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "facts"
    assert run("streams", "create", "orders", "--partitions", 3, "--data", data) == 0
    assert "created: stream 'orders', id 1, 3 partitions" in capsys.readouterr().out
    assert run("streams", "create", "orders", "--partitions", 3, "--if-not-exists", "--data", data) == 0
    assert run("streams", "alter", "orders", "--set", "retention_s=60", "--data", data) == 0
    assert run("streams", "create", "more", "--dry-run", "--data", data) == 0
    assert "would be created" in capsys.readouterr().out
    assert run("streams", "list", "--data", data, "--json") == 0
    default = {"name": "default", "id": 0, "partitions": 1, "settings": {}}
    orders = {"name": "orders", "id": 1, "partitions": 3, "settings": {"retention_s": 60}}
    assert read_json(capsys) == [default, orders]
    assert run("streams", "alter", "orders", "--set", "retention_s=", "--data", data) == 0
    assert run("streams", "delete", "orders", "--yes", "--data", data) == 0
    capsys.readouterr()
    assert run("streams", "list", "--data", data, "--json") == 0
    assert read_json(capsys) == [default]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["create", "a/b"], "give 1 to 249 of the characters"),
        (["create", "_own"], "are the service's"),
        (["create", "orders"], "exists already"),
        (["create", "orders", "--partitions", "3", "--if-not-exists"], "their number is fixed"),
        (["create", "rows", "--partitions", "65537"], "give 1 to 65536"),
        (["create", "rows", "--set", "speed=1"], "not a setting of a stream"),
        (["create", "rows", "--set", "retention_s"], "give NAME=VALUE"),
        (["create", "rows", "--set", "retention_s=-1"], "above 0"),
        (["alter", "orders"], "nothing to alter"),
        (["alter", "rows", "--set", "compact=false"], "UNKNOWN_STREAM"),
        (["delete", "orders"], "give --yes"),
        (["delete", "default", "--yes"], "exists in every data directory"),
        (["truncate", "orders", "--before", "1"], "give 0 to 0"),
        (["truncate", "orders", "--before", "0", "--partition", "7"], "WRONG_PARTITION"),
        (["erase", "orders", "--vector", "v"], "give --yes"),
        (["erase", "rows", "--vector", "v", "--yes"], "UNKNOWN_STREAM"),
        (["show", "rows"], "UNKNOWN_STREAM"),
    ],
)
def test_mistake_is_one_line_and_changes_nothing(
    arguments: list[str], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "facts"
    assert run("streams", "create", "orders", "--partitions", 2, "--data", data) == 0
    capsys.readouterr()
    assert run("streams", *arguments, "--data", data) != 0
    printed = capsys.readouterr()
    assert expected in printed.err
    assert len(printed.err.splitlines()) == 1
    assert run("streams", "list", "--data", data, "--json") == 0
    assert [row["name"] for row in read_json(capsys)] == ["default", "orders"]


def test_erased_vector_is_in_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, lines = tmp_path / "facts", tmp_path / "lines"
    rows = [
        {"vector_id": f"person-{number}", "op": "create", "vector": [number, 0.5]} for number in range(30)
    ]
    lines.write_text("".join(json.dumps(row | {"metadata": {"tag": "x"}}) + "\n" for row in rows))

    def files_with(text: bytes) -> list[Path]:
        return [path for path in data.rglob("*") if path.is_file() and text in path.read_bytes()]

    with served(data) as server:
        to = ("--to", f"127.0.0.1:{server.port}")
        assert run("streams", "create", "people", "--partitions", 2, *to) == 0
        assert run("publish", lines, "--stream", "people", *to) == 0
        assert files_with(b"person-17")
        capsys.readouterr()
        assert run("streams", "erase", "people", "--vector", "person-17", "--yes", *to) == 0
        assert "erased vector 'person-17': stream 'people'" in capsys.readouterr().out
        assert not files_with(b"person-17")
        assert files_with(b"person-18")
    assert not files_with(b"person-17")
    assert run("streams", "erase", "people", "--vector", "person-18", "--yes", "--data", data) == 0
    assert not files_with(b"person-18")
    assert files_with(b"person-19")


def test_server_carries_out_the_same_verbs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with served(tmp_path / "facts") as server:
        to = ("--to", f"127.0.0.1:{server.port}")
        assert run("streams", "create", "orders", "--partitions", 2, *to) == 0
        assert run("publish", write_lines(tmp_path / "lines", 50), "--stream", "orders", *to) == 0
        assert run("streams", "alter", "orders", "--set", "compress=lz4", *to) == 0
        capsys.readouterr()
        assert run("streams", "show", "orders", "--json", *to) == 0
        (row,) = read_json(capsys)
        assert row["settings"] == {"compress": "lz4"}
        assert sum(each["next_offset"] for each in row["ranges"]) == 50
        assert run("streams", "delete", "orders", *to) == 2
        assert run("streams", "delete", "orders", "--yes", *to) == 0
        assert run("streams", "show", "orders", *to) != 0
        assert "UNKNOWN_STREAM" in capsys.readouterr().err
    assert not [path for path in (tmp_path / "facts" / "streams").iterdir() if "orders" in path.name]


def test_import_killed_and_restarted_has_one_effect_for_each_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = write_lines(tmp_path / "lines", LINES)
    with served(tmp_path / "facts") as server:
        to = ("--to", f"127.0.0.1:{server.port}")
        assert run("streams", "create", "orders", "--partitions", 3, *to) == 0
        publish = ("publish", str(lines), "--stream", "orders", "--producer", "import-7", *to)
        killed = 0
        for wait_s in (1.2, 1.5, 1.8):
            process = subprocess.Popen(
                [sys.executable, "-m", "delta_prop", *publish], stdout=subprocess.DEVNULL
            )
            time.sleep(wait_s)
            killed += process.poll() is None
            process.kill()
            process.wait()
        capsys.readouterr()
        assert run(*publish) == 0
        (totals,) = read_json(capsys)
        assert (totals["acknowledged"], totals["refused"]) == (LINES, 0)
        found: Counter[str] = Counter()
        for partition in range(3):
            read = ("subscribe", "--stream", "orders", "--partition", partition, "--start", "earliest")
            assert run(*read, "--no-follow", "--from", to[1]) == 0
            ids = [row["vector_id"] for row in read_json(capsys)]
            assert {partition_of("default", vector_id, 3) for vector_id in ids} == {partition}
            found.update(ids)
    assert found == {f"v{number}": 1 for number in range(LINES)}
    assert killed, "no run was killed: write more lines"
