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
from delta_prop_sinks import StorageSink
from delta_prop_wire.murmur import partition_of
from delta_prop_wire.spec import COUNTER_MAX
from tests.delta_prop.commands.server_thread import hosted_streams, served_streams
from tests.delta_prop.server.process import served

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from delta_prop.hosting.streams import Streams

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
    assert run("streams", "alter", "orders", "--set", "retention_s=60", "--data", data) == 0
    assert "altered: stream 'orders', id 1, 3 partitions" in capsys.readouterr().out
    assert run("streams", "list", "--data", data, "--json") == 0
    default = {"name": "default", "id": 0, "partitions": 1, "settings": {}}
    orders = {"name": "orders", "id": 1, "partitions": 3, "settings": {"retention_s": 60}}
    assert read_json(capsys) == [default, orders]
    assert run("streams", "alter", "orders", "--set", "retention_s=", "--data", data) == 0
    assert run("streams", "delete", "orders", "--yes", "--data", data) == 0
    capsys.readouterr()
    assert run("streams", "list", "--data", data, "--json") == 0
    assert read_json(capsys) == [default]


@pytest.fixture(params=["directory", "server"])
def place(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[str, str]]:
    """Yield the options that name a directory in one run of the test, and its server in the other."""
    data = str(tmp_path / "facts")
    assert run("streams", "create", "orders", "--partitions", 2, "--data", data) == 0
    if request.param == "directory":
        yield "--data", data
    else:
        with served_streams(tmp_path / "facts") as address:
            yield "--to", address


HUGE = "9" * 23


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["create", "rows", "--partitions", HUGE], f"partitions = {HUGE}: give 1 to 65536"),
        (["create", "rows", "--partitions", "1_000"], "'1_000' is not a whole number: give 1 or more"),
        (["create", "rows", "--partitions", " 3"], "' 3' is not a whole number"),
        (["create", "rows", "--partitions", "٣"], "'٣' is not a whole number"),
        (["create", "rows", "--partitions", "9" * 5000], "has 5000 digits: give up to 100"),
        (["create", "rows", "--set", "retention_s=1_000"], "retention_s = '1_000': give a number"),
        (["create", "rows", "--set", "partitions=3"], "number with --partitions"),
        (["create", "rows", "--set", "compress=slow"], "compress = 'slow': give one of none, lz4, zstd"),
        (["create", ""], "stream '': give 1 to 249 of the characters"),
        (["create", "x" * 250], "give 1 to 249 of the characters"),
        (["create", "\udcff"], "stream '\\udcff': give 1 to 249 of the characters"),
        (["alter", "orders", "--set", f"retention_bytes={HUGE}"], f"retention_bytes {HUGE}: give at most"),
        (
            ["alter", "orders", "--set", f"rows_in_s={HUGE}"],
            f"rows_in_s = {HUGE}: give at most {COUNTER_MAX}",
        ),
        (["alter", "orders", "--set", "retention_s=-1"], "retention_s = -1: give a number above 0"),
        (["alter", "a/b", "--set", "retention_s=1"], "stream 'a/b': give 1 to 249 of the characters"),
        (["delete", "", "--yes"], "stream '': give 1 to 249 of the characters"),
        (["show", ""], "stream '': give 1 to 249 of the characters"),
        (["truncate", "orders", "--before", HUGE], f"--before {HUGE}: give up to {COUNTER_MAX}"),
        (
            ["truncate", "orders", "--before", "1", "--partition", HUGE],
            f"--partition {HUGE}: give up to 65535",
        ),
        (["erase", "orders", "--vector", "\udcff", "--yes"], "--vector: character 0 is U+DCFF"),
        (
            ["erase", "orders", "--vector", "v" * 513, "--yes"],
            "--vector: 513 bytes of UTF-8; must be 1 to 512",
        ),
        (["erase", "orders", "--vector", "v", "--namespace", "", "--yes"], "--namespace: 0 bytes of UTF-8"),
        (["erase", "orders", "--vector", "v", "--timeout-s", HUGE, "--yes"], "give up to 4294967"),
    ],
)
def test_bad_argument_has_one_message_in_a_directory_and_on_a_server(
    arguments: list[str], expected: str, place: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert run("streams", *arguments, *place) == 2
    printed = capsys.readouterr()
    assert expected in printed.err
    assert (len(printed.err.splitlines()), printed.out) == (1, "")


def test_creation_says_that_the_stream_exists(
    place: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    create = ("streams", "create", "orders", "--partitions", 2, "--if-not-exists", *place)
    capsys.readouterr()
    for dry_run in ((), ("--dry-run",)):
        assert run(*create, *dry_run) == 0
        assert capsys.readouterr().out == "exists already: stream 'orders', id 1, 2 partitions\n"
    assert run(*create, "--json") == 0
    assert read_json(capsys)[0]["existed"] is True
    assert run(*create, "--set", "retention_s=5") != 0
    assert "change it with `streams alter`" in capsys.readouterr().err
    assert run("streams", "create", "more", "--if-not-exists", *place) == 0
    assert capsys.readouterr().out == "created: stream 'more', id 2, 1 partition\n"


def test_dry_run_says_what_would_be_done(place: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    orders = "stream 'orders', id 1, 2 partitions"
    capsys.readouterr()
    for arguments, expected in (
        (["create", "more"], "would create stream 'more', id 2, 1 partition"),
        (["alter", "orders", "--set", "retention_s=5"], f"would alter {orders}"),
        (["delete", "orders"], f"would delete {orders}"),
        (["truncate", "orders", "--before", "0"], f"would truncate {orders}"),
    ):
        assert run("streams", *arguments, "--dry-run", *place) == 0
        assert capsys.readouterr().out == f"{expected}\n"


def test_no_verb_creates_a_directory_unless_it_creates_a_stream(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "typo"
    for arguments, expected in (
        (["create", "orders", "--dry-run"], "no data directory at"),
        (["alter", "orders", "--set", "retention_s=5"], "no data directory at"),
        (["delete", "orders", "--yes"], "no data directory at"),
        (["truncate", "orders", "--before", "0"], "no data directory at"),
        (["erase", "orders", "--vector", "v", "--yes"], "no data directory at"),
        (["create", "default"], "exists already"),
        (["create", "orders", "--partitions", "65536"], "would have 65537"),
    ):
        assert run("streams", *arguments, "--data", data) == 2
        assert expected in capsys.readouterr().err
        assert not data.exists()


def erase(place: tuple[str, str], *arguments: str) -> int:
    return run("streams", "erase", "orders", "--vector", "doc-9", *arguments, *place)


def publish_doc(tmp_path: Path, stream: str, to: tuple[str, str]) -> None:
    line = {"vector_id": "doc-9", "namespace": "docs", "op": "create", "vector": [1, 2]}
    (tmp_path / "doc").write_text(json.dumps(line) + "\n")
    assert run("publish", tmp_path / "doc", "--stream", stream, *to) == 0


def test_erasure_names_where_and_notes_an_unknown_vector(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = ("--data", str(tmp_path / "facts"))
    assert run("streams", "create", "orders", "--partitions", 3, *data) == 0
    publish_doc(tmp_path, "orders", data)
    numbers = {name: partition_of(name, "doc-9", 3) for name in ("default", "docs")}
    lines = {
        name: f"vector 'doc-9' of namespace {name!r}: stream 'orders', partition {number}"
        for name, number in numbers.items()
    }
    capsys.readouterr()
    for arguments, out, note in (
        (["--dry-run"], f"would erase {lines['default']}\n", "would be removed: give --namespace"),
        (["--yes"], f"erased {lines['default']}\n", "was removed: give --namespace"),
        (["--namespace", "docs", "--dry-run"], f"would erase {lines['docs']}; the log has it\n", None),
        (["--namespace", "docs", "--yes"], f"erased {lines['docs']}\n", None),
        (["--namespace", "docs", "--yes"], f"erased {lines['docs']}\n", "has no vector 'doc-9'"),
    ):
        assert erase(data, *arguments) == 0
        printed = capsys.readouterr()
        assert printed.out == out
        assert printed.err == "" if note is None else note in printed.err
        assert len(printed.err.splitlines()) == (note is not None)
    assert erase(data, "--namespace", "docs", "--yes", "--json") == 0
    (row,) = read_json(capsys)
    expected = {"vector_id": "doc-9", "namespace": "docs", "partition": numbers["docs"], "found": False}
    assert expected.items() <= row.items()


def test_erasure_on_a_server_asks_its_sink_of_states(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def attach(streams: Streams) -> None:
        await (await streams.open()).attach(StorageSink(tmp_path / "vectors.db"))

    with hosted_streams(tmp_path / "facts", attach) as addresses:
        to = ("--to", addresses.protocol_address)
        assert run("streams", "create", "orders", *to) == 0
        publish_doc(tmp_path, "default", to)
        default = ("streams", "erase", "default", "--vector", "doc-9", "--json", "--dry-run", *to)
        capsys.readouterr()
        for arguments, found in (((), False), (("--namespace", "docs"), True)):
            assert run(*default, *arguments) == 0
            printed = capsys.readouterr()
            assert json.loads(printed.out)["found"] is found
            assert ("has no vector" in printed.err) is not found
        assert erase(to, "--yes") == 0  # in a stream without such a sink
        assert "it is not known whether stream 'orders' had vector 'doc-9'" in capsys.readouterr().err


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
        partition = partition_of("default", "person-17", 2)
        expected = "erased vector 'person-17' of namespace 'default': stream 'people', partition "
        assert capsys.readouterr().out == f"{expected}{partition}\n"
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
