"""`audit` on this machine: output, exit statuses, repairs, and error messages."""

from __future__ import annotations

import json
import re
import sqlite3
import subprocess
import sys
from contextlib import closing
from functools import partialmethod
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import numpy as np
import pytest

from delta_prop import Propagator
from delta_prop.auditing import audit, repair, repairs
from delta_prop.auditing.repairing import log_id_of
from delta_prop.cli import main
from delta_prop.client import ClientSettings, SyncProducer
from delta_prop.commands import wait_reporter
from delta_prop_sinks import StorageSink
from delta_prop_wire.delta import Delta, create
from delta_prop_wire.errors import UsageError
from tests.delta_prop.client.threaded_service import served
from tests.delta_prop.commands.support import create_line
from tests.delta_prop.durable.quarantined import RejectingSink, Store

if TYPE_CHECKING:
    from tests.delta_prop.commands.support import Command


@pytest.fixture(autouse=True)
def without_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the packages that Spark jobs need."""
    for module in ("pyspark", "py4j", "pyarrow", "pandas"):
        monkeypatch.setitem(sys.modules, module, None)


@pytest.fixture
def file(command: Command, tmp_path: Path) -> Path:
    """Return a storage sink's file with 30 vectors and a deleted one, next to its log."""
    lines = [
        create_line(f"v{number}", float(number), 0.5, namespace="n", metadata={"at": number})
        for number in range(30)
    ]
    assert command.publish([*lines, '{"vector_id": "v1", "namespace": "n", "op": "delete"}']).status == 0
    path = tmp_path / "vectors.db"
    store(command, path)
    return path


def store(command: Command, path: Path) -> None:
    """Attach a storage sink, and wait until it has applied the complete log."""

    async def run() -> None:
        async with Propagator(data=command.data) as p:
            await p.attach(StorageSink(path))
            await p.wait_visible(p.statistics().log.next_offset - 1, committed=True)

    anyio.run(run)


def execute(path: Path, *statements: str) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        for statement in statements:
            connection.execute(statement)


CORRUPTION = (
    "DELETE FROM vectors WHERE vector_id = 'v7'",
    "UPDATE vectors SET metadata = '{}' WHERE vector_id = 'v9'",
)


def test_correct_file_has_no_differences(command: Command, file: Path) -> None:
    result = command("audit", "--storage", file)
    assert (result.status, result.out, result.err) == (0, "", "delta-prop: no differences\n")
    assert command("audit", "--storage", file, "--repair").status == 0


def test_audit_without_spark_loads_no_spark_and_needs_no_java(command: Command, file: Path) -> None:
    program = (
        "import sys; sys.modules.update(dict.fromkeys(['pyspark', 'py4j', 'pyarrow', 'pandas'])); "
        "from delta_prop.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    audit_arguments = [
        sys.executable,
        "-c",
        program,
        "audit",
        "--data",
        str(command.data),
        "--storage",
        str(file),
    ]
    result = subprocess.run(
        audit_arguments, capture_output=True, text=True, check=False, env={"PATH": ""}, timeout=120
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "delta-prop: no differences\n")


def test_differences_are_shown_written_and_repaired(command: Command, file: Path, tmp_path: Path) -> None:
    execute(file, *CORRUPTION)
    shown = command("audit", "--storage", file)
    assert shown.status == 1
    assert shown.err == "delta-prop: 2 differences: 1 corrupted, 1 missing\n"
    assert [line.split()[:3] for line in shown.out.splitlines()] == [
        ["difference", "namespace", "vector_id"],
        ["missing", "n", "v7"],
        ["corrupted", "n", "v9"],
    ]
    first, second = command("audit", "--storage", file, "--json").lines
    assert first["reason"] == "the log has it since offset 7; the sink has no row"
    repaired_by = first["repaired_by"]
    assert (repaired_by["op"], repaired_by["vector"], repaired_by["metadata"]) == (
        "create",
        [7.0, 0.5],
        {"at": 7},
    )
    assert second["reason"] == "its metadata differ in 'at'; it has the delta at offset 9"
    out = tmp_path / "found.jsonl"
    repaired = command("audit", "--storage", file, "--output", out, "--repair")
    assert repaired.status == 0
    assert "2 of 2 were republished; 0 have changed since, 0 were refused" in repaired.err
    assert [json.loads(line) for line in out.read_text().splitlines()] == [first, second]
    store(command, file)
    assert command("audit", "--storage", file).status == 0
    with closing(sqlite3.connect(file)) as connection:
        query = "SELECT metadata FROM vectors WHERE vector_id IN ('v7', 'v9') ORDER BY vector_id"
        assert [json.loads(one) for (one,) in connection.execute(query)] == [{"at": 7}, {"at": 9}]


def test_repair_is_sent_to_the_service_of_the_directory(
    command: Command, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    execute(file, *CORRUPTION)
    audit_arguments = ["audit", "--data", str(command.data), "--storage", str(file), "--repair"]
    with served(propagator={"data": str(command.data)}) as running:
        assert main(audit_arguments) == 2
        assert "send the repair to that service with --to HOST:PORT" in capsys.readouterr().err
        assert main([*audit_arguments, "--to", running.address]) == 0
        assert "2 of 2 were republished" in capsys.readouterr().err
    store(command, file)
    assert command("audit", "--storage", file).status == 0


def test_repair_to_the_service_of_another_log_is_refused(
    command: Command, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    execute(file, "UPDATE vectors SET vector_id = 'ghost' WHERE vector_id = 'v7'")
    differences = list(audit(str(command.data), str(file)))
    audit_arguments = ["audit", "--data", str(command.data), "--storage", str(file), "--repair"]
    with (
        served(propagator={"data": str(tmp_path / "other")}) as other,
        SyncProducer(other.address, name="live") as p,
    ):
        p.publish(Delta("ghost", create([1.0]), "n"))
        assert main([*audit_arguments, "--to", other.address]) == 2
        error_line = capsys.readouterr().err.splitlines()[-1]
        with pytest.raises(UsageError) as caught:
            repair(repairs(differences), p, data=str(command.data))
        assert p.log_id is not None
        ids = [p.log_id.hex(), log_id_of(str(command.data)).hex()]
        tail = (
            f" has log {ids[0]}, but {str(command.data)!r} has log {ids[1]}: name the server of that "
            "directory"
        )
        assert error_line.endswith(other.address + tail)
        assert str(caught.value).endswith(tail)
        assert other.keys() == ["ghost"]


def test_differences_are_printed_before_waiting_for_a_service(
    command: Command, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wait_reporter, "REPORT_AFTER_S", 0.5)
    monkeypatch.setattr(
        ClientSettings, "__init__", partialmethod(ClientSettings.__init__, open_timeout_s=1.5)
    )
    execute(file, *CORRUPTION)
    result = command("audit", "--storage", file, "--repair", "--to", "127.0.0.1:1")
    assert result.status == 1
    assert [line.split()[0] for line in result.out.splitlines()] == ["difference", "missing", "corrupted"]
    found, waiting, failed = result.err.splitlines()
    assert found == "delta-prop: 2 differences: 1 corrupted, 1 missing"
    assert waiting.startswith("delta-prop: waiting, no answer for ")
    assert "no connection" in waiting
    assert "none of 127.0.0.1:1 has answered for 1.5 s" in failed


def test_contents_in_json_lines_are_compared(command: Command, file: Path, tmp_path: Path) -> None:
    contents = tmp_path / "held"
    contents.mkdir()
    facts = [
        json.loads(create_line(f"v{number}", float(number), 0.5, namespace="n"))
        for number in range(30)
        if number != 1
    ]
    (contents / "part-1.jsonl").write_text("\n".join(map(json.dumps, facts[:20])) + "\n")
    (contents / "part-2.jsonl").write_text("\n".join(map(json.dumps, facts[20:])) + "\n")
    assert command("audit", "--contents", contents / "part-1.jsonl").err.count("9 missing") == 1
    json_folder = contents.rename(tmp_path / "held.json")
    assert command("audit", "--contents", json_folder).status == 0, (
        "metadata were compared, although no line has any"
    )
    table = tmp_path / "held.jsonl"
    facts[0]["metadata"] = {"at": 0}
    facts[3]["vector"] = [4.0, 0.25]
    table.write_text("\n".join(map(json.dumps, facts)))
    lines = command("audit", "--contents", table, "--json").lines
    assert len(lines) == 28, "lines without metadata were not compared, although another line has some"
    (vector,) = (one for one in lines if "number" in one["reason"])
    assert vector["reason"] == "number 1 is 0.25, not 0.5; it has the delta at offset 4"
    at_offset_10 = command("audit", "--contents", table, "--next-offset", "10", "--json").lines
    # A vector that was created after offset 10, such as v20, is extra in the contents.
    assert {one["difference"] for one in at_offset_10 if one["vector_id"] > "v2"} >= {"extra"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--storage y --to localhost:1", "--to: only a repair sends something; add --repair"),
        (
            "--storage y --next-offset 3",
            "--next-offset 3: give an offset of at least 0, together with --contents",
        ),
        (
            "--contents y --next-offset -3",
            "--next-offset -3: give an offset of at least 0, together with --contents",
        ),
        ("--contents y.parquet", "--contents 'y.parquet': only JSON lines are read without --spark"),
        ("--storage y --output x.parquet", "only JSON lines are written without --spark"),
        ("--storage y --master local[4]", "--master, --spark-log: they need --spark: add it"),
        ("--storage y", "no storage file at 'y': name the one that the storage sink writes"),
        ("--contents none.jsonl", "table 'none.jsonl' does not exist: name a file or a folder of JSON lines"),
        ("--contents none", "--contents 'none': only JSON lines are read without --spark: name a file or a "),
        ("--contents odd.jsonl --sink nosuch", "no sink named 'nosuch' is remembered in "),
        ("--contents odd.jsonl", "odd.jsonl, line 2: "),
        ("", "one of the arguments --storage --contents is required"),
        ("--spark --storage y", "pyspark is not installed: pip install 'delta-prop[spark]'"),
    ],
)
def test_mistake_is_reported_in_one_line(
    command: Command, arguments: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert command.publish([create_line("a")]).status == 0
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("delta_prop.spark.java._PACKAGES", ("pyspark",))
    (tmp_path / "odd.jsonl").write_text(
        '{"vector_id": "a", "vector": [1]}\n{"vector_id": "a", "data": "?"}\n'
    )
    result = command("audit", *arguments.split())
    assert result.status == 2
    assert message in result.err
    assert len(result.err.splitlines()) == 1


def test_audit_of_a_named_sink_needs_a_known_sink(command: Command, file: Path) -> None:
    execute(file, *CORRUPTION)
    result = command("audit", "--storage", file, "--sink", "storage", "--json")
    assert [one["difference"] for one in result.lines] == ["missing", "corrupted"]
    result = command("audit", "--storage", file, "--sink", "other")
    assert (result.status, result.err.count("give one of these: storage\n")) == (2, 1)


def test_vectors_in_the_quarantine_are_reported_and_not_repaired(command: Command, tmp_path: Path) -> None:
    async def quarantine() -> None:
        async with Propagator(data=command.data) as p:
            await p.attach(RejectingSink(Store(keeps_cursor=False), {7.0}))
            await p.publish(*(Delta(key, create([1.0])) for key in ("changed", "wrong")))
            await p.publish(Delta("changed", create([7.0])), Delta("new", create([7.0])))
            await p.wait_visible(4)
            assert {one.vector[1] for one in p.quarantine("totals")} == {"changed", "new"}

    anyio.run(quarantine)
    contents = tmp_path / "contents.jsonl"
    contents.write_text(
        "".join(
            json.dumps({"vector_id": key, "namespace": "default", "vector": [value]}) + "\n"
            for key, value in (("changed", 1.0), ("wrong", 0.5))
        )
    )
    audit_arguments = ("audit", "--contents", contents)
    without_sink_name = {
        one["vector_id"]: one["difference"] for one in command(*audit_arguments, "--json").lines
    }
    assert without_sink_name == {"changed": "corrupted", "wrong": "corrupted", "new": "missing"}
    expected = {"changed": "quarantined", "wrong": "corrupted", "new": "quarantined"}
    result = command(*audit_arguments, "--sink", "totals", "--json", "--repair")
    assert {one["vector_id"]: one["difference"] for one in result.lines} == expected
    for one in result.lines:
        assert one["reason"].endswith("; deltas of it are in the quarantine") == (one["vector_id"] != "wrong")
        assert ("repaired_by" in one) == (one["vector_id"] == "wrong")
    assert result.status == 1, "the differences of vectors in the quarantine were not counted"
    assert "1 of 3 were republished; 0 have changed since, 0 were refused" in result.err
    assert [line["vector_id"] for line in command("subscribe", "--start", "4", "--no-follow").lines] == [
        "wrong"
    ]


def test_page_sample_matches_the_output(
    command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (Path(__file__).parents[3] / "docs" / "operating.md").read_text()
    (block,) = re.findall(r"```console\n\$ delta-prop audit (.*?)```", text, re.DOTALL)
    first, second = block.split("$ delta-prop audit ")
    lines = [create_line(f"doc-{number}", 0, 0, 0.25, namespace="docs") for number in range(10)]
    assert command.publish(lines).status == 0
    file = tmp_path / "vectors.db"
    store(command, file)
    corrupted_value = np.array([0, 0, 0.5], "<f4").tobytes().hex()
    execute(
        file,
        "DELETE FROM vectors WHERE vector_id = 'doc-7'",
        f"UPDATE vectors SET value = x'{corrupted_value}' WHERE vector_id = 'doc-9'",
    )
    result = command("audit", "--storage", file)
    assert (result.out + result.err).splitlines() == first.splitlines()[1:]
    repair_arguments = ["audit", "--data", str(command.data), "--storage", str(file), "--repair", "--to"]
    with served(propagator={"data": str(command.data)}) as running:
        assert main([*repair_arguments, running.address]) == 0
    assert capsys.readouterr().err.splitlines()[-1] == second.splitlines()[-1]
