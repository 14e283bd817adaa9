"""Output, exit statuses and error messages of the verbs of `delta-prop spark`."""

from __future__ import annotations

import json
import os
import select
import signal
import sqlite3
import subprocess
import sys
import time
from argparse import Namespace
from contextlib import closing, contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyspark")

from delta_prop.cli import main
from delta_prop.commands import spark_verbs as verbs
from delta_prop.commands.spark_log import SparkLog
from delta_prop.commands.spark_verbs import JobFailed, translate_error
from delta_prop.platform.system import Progress
from delta_prop_sinks.storage_file import StorageFile
from delta_prop_wire.cursor import Cursor
from delta_prop_wire.delta import Delta, create
from delta_prop_wire.errors import UsageError
from delta_prop_wire.jsonlines import delta_from_line
from tests.broker.histories import Step
from tests.delta_prop.client.threaded_service import served
from tests.delta_prop.commands.support import Command, create_line
from tests.delta_prop.spark.logs import write

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pyspark.sql import SparkSession


SPARK_TIMEOUT_S = 120.0
"""Seconds that Spark may take to start or to end."""


@pytest.fixture
def on_spark(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> SparkSession:
    """Let the verbs share the tests' session, because starting one takes ten seconds."""
    original_open_session = verbs._open_session

    @contextmanager
    def shared_session(*given: Any) -> Iterator[SparkSession]:
        with monkeypatch.context() as patched:
            patched.setattr("delta_prop.spark.data_source.sessions.session", lambda *_, **__: spark)
            patched.setattr(type(spark), "stop", lambda _: None)
            with original_open_session(*given) as opened:
                yield opened

    monkeypatch.setattr(verbs, "_open_session", shared_session)
    return spark


@pytest.fixture
def command(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Command:
    return Command(tmp_path, capfd)


@pytest.mark.spark
def test_verbs_replay_diff_rebuild_audit_and_count_a_directory(
    on_spark: SparkSession, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [
        create_line(f"v{number}", float(number), 0.5, namespace="n", metadata={"at": number})
        for number in range(30)
    ]
    assert command.publish([*lines, '{"vector_id": "v1", "namespace": "n", "op": "delete"}']).status == 0

    shown = command("spark", "replay", "--alive")
    assert shown.status == 0
    assert shown.out.splitlines()[0].split() == [
        "namespace",
        "vector_id",
        "alive",
        "vector",
        "metadata",
        "offset",
    ]
    assert shown.out.splitlines()[-1] == "and more: give --json or --output to get all"
    rows = command("spark", "replay", "--json", "--at", "29").lines
    assert len(rows) == 30
    assert next(row for row in rows if row["vector_id"] == "v1")["alive"]
    replayed = tmp_path / "then.parquet"
    assert command("spark", "replay", "--output", replayed).status == 0

    contents = tmp_path / "held.jsonl"
    assert command("spark", "replay", "--alive", "--output", contents).status == 0
    assert command("audit", "--spark", "--contents", contents).status == 0, (
        "an audit must accept the output of a replay"
    )

    new = on_spark.read.parquet(str(replayed)).where("alive and vector_id != 'v2'")
    new = new.selectExpr("vector_id", "vector", "offset as at").where("at != 3")
    new.write.parquet(str(tmp_path / "new.parquet"))
    changes = command("spark", "diff", tmp_path / "new.parquet", "--namespace", "n").lines
    assert [delta_from_line(json.dumps(one)) for one in changes]
    assert {one["vector_id"]: one["op"] for one in changes} == {"v2": "delete", "v3": "delete"}

    file = tmp_path / "vectors.db"
    steps: list[str] = []
    monkeypatch.setattr(Progress, "report", lambda _, text: steps.append(text))
    rebuilt = command("spark", "rebuild", "--storage", file)
    assert rebuilt.status == 0
    starts = "Spark is starting, which takes some seconds"
    assert (steps[:2], steps[-1]) == ([starts, "reading the log"], "30 rows")
    assert rebuilt.out == f"{file}: 30 rows, 29 of them alive; its sink continues from offset 31\n"
    second = command("spark", "rebuild", "--storage", file, "--replace", "--json").lines
    assert second == [{"storage": str(file), "rows": 30, "alive": 29, "next_offset": 31}]
    assert command("spark", "rebuild", "--storage", file).status == 2
    steps.clear()
    clean = command("audit", "--spark", "--storage", file)
    assert steps == [starts, "the sink is compared with the log"]
    assert (clean.status, clean.out, clean.err) == (0, "", "delta-prop: no differences\n")
    with closing(sqlite3.connect(file)) as connection, connection:
        connection.execute("DELETE FROM vectors WHERE vector_id = 'v7'")
    corrupted = command("audit", "--spark", "--storage", file)
    assert corrupted.status == 1
    assert corrupted.err == "delta-prop: 1 differences: 1 missing\n"
    assert "v7" in corrupted.out.splitlines()[1]
    repaired = command("audit", "--spark", "--storage", file, "--repair", "--json")
    assert repaired.status == 0
    assert repaired.lines[0]["repaired_by"]["op"] == "create"
    assert "1 of 1 were republished; 0 have changed since, 0 were refused" in repaired.err

    (summary,) = command("spark", "stats", "--top", "1", "--json").lines
    assert [(row["op"], row["deltas"]) for row in summary["traffic"]] == [("create", 31), ("delete", 1)]
    assert [row["deltas"] for row in summary["vectors"]] == [2]
    assert "32 deltas" in command("spark", "stats").out


@pytest.mark.spark
def test_table_imported_twice_is_stored_once(
    on_spark: SparkSession, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    table = tmp_path / "table.csv"
    table.write_text('key,vector\nx,"[1, 0.5]"\ny,"[2, 1]"\n')
    with served(propagator={"data": str(tmp_path / "log")}) as running:
        job = ["spark", "import", str(table), "--key", "key", "--to", running.address, "--producer", "one"]
        assert [main(job), main([*job, "--json"])] == [0, 0]
        summary = json.loads(capsys.readouterr().out)
        assert summary == {"producer": "one", "state": "published", "deltas": 2} | {
            "published": 2,
            "duplicates": 0,
            "refused": 0,
        }
        assert sorted(running.keys()) == ["x", "y"]
    assert main(["spark", "import", str(tmp_path / "none*.csv"), "--key", "key"]) == 2
    assert "delta-prop: Spark: [PATH_NOT_FOUND] Path does not exist" in capsys.readouterr().err
    (tmp_path / "odd.csv").write_text("key,x,y\na,1,NaN\n")
    import_odd = ["spark", "import", str(tmp_path / "odd.csv"), "--key", "key", "--vector", "x,y"]
    assert main([*import_odd, "--output", str(tmp_path / "out.jsonl")]) == 2
    assert "vector_id 'a' has a number that is not finite" in capsys.readouterr().err
    (tmp_path / "odd.csv").write_text("key,x,y\na,1,1e300\n")
    assert main([*import_odd, "--output", str(tmp_path / "out.parquet")]) == 1
    assert "a: number 1.0E300 does not fit in float32" in capsys.readouterr().err
    assert not list(tmp_path.glob("out*")), "a failed import must leave no output"
    assert main(["spark", "import", str(table), "--key", "key"]) == 0
    assert [json.loads(line)["vector_id"] for line in capsys.readouterr().out.splitlines()] == ["x", "y"]
    assert main(["spark", "import", str(table)]) == 2
    assert "column vector_id, the key, is missing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["diff", "one.parquet"], "tables: 1 given: name the old and the new one"),
        (
            ["diff", "a", "b", "--data", "facts"],
            "tables: 2 given: name only the new one with --data",
        ),
        (["import", "a.csv", "--to", "localhost:1"], "--to: give --producer too"),
        (["replay", "--data", "x", "--at", "soon"], "--at 'soon': give an offset, a time like"),
        (["replay"], "one of the arguments --data --from is required"),
        (["stats", "--data", "x", "--top", "0"], "argument --top: '0': give a whole number, 1 or more"),
        (["diff", "a.csv", "b.csv", "--threshold", "nan"], "--threshold nan: give a number from 0 on"),
        (["diff", "a.csv", "b.csv", "--key", ""], "argument --key: the name is empty: give a name"),
        (
            ["import", "a.csv", "--master", "nonsense"],
            "'nonsense' is not a Spark master: give local[*], local[4], spark:",
        ),
        (
            ["import", "a.csv", "--to", "x:1", "--producer", "p" * 241],
            "--producer: 241 bytes of UTF-8; must be",
        ),
        (
            ["import", "a.csv", "--to", "http://x", "--producer", "p"],
            "--to: address 'http://x': give host:port",
        ),
        (
            ["import", "a.csv", "--to", "127.0.0.1:1", "--producer", "p", "--tls-ca", "no.pem"],
            "--tls-ca 'no.pem'",
        ),
    ],
)
def test_mistake_is_reported_before_spark_starts(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verbs, "_open_session", None)
    monkeypatch.setattr(verbs, "check_spark", None)
    assert main(["spark", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with a log, a full storage file, tables and other files; Spark cannot start."""
    write(tmp_path / "facts", [Step([Delta("a", create([1.0, 2.0])), Delta("b", create([1.0, 2.0]))], 1, 0)])
    (tmp_path / "other").mkdir()
    (tmp_path / "there.jsonl").touch()
    (tmp_path / "table.csv").write_text("vector_id\na\n")
    full = StorageFile(tmp_path / "full.db", wal_bytes_max=1 << 20)
    full.connect(bytes(16))
    full.begin_rebuild()
    full.end_rebuild(Cursor(bytes(16), 1, 1), 1)
    full.close()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(verbs, "_open_session", None)
    monkeypatch.setattr(verbs, "check_spark", lambda: None)
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("replay --data none", "no data directory at 'none': give the one that `publish --data DIR` created"),
        ("replay --data other", "'other' is not a data directory: give the one that"),
        ("replay --data facts --at 2", "offset 2 is after the end of the log: give an offset below 2"),
        (
            "replay --data facts --output there.jsonl",
            "--output 'there.jsonl': it exists and is not over",
        ),
        (
            "replay --data facts --output no/x.parquet",
            "--output 'no/x.parquet' cannot be created (there is no fol",
        ),
        (
            "replay --from nonsense.invalid:1",
            "--from 'nonsense.invalid:1': host 'nonsense.invalid' is unknown",
        ),
        ("stats --data other", "'other' is not a data directory"),
        (
            "stats --data facts --start 3",
            "offset 3 is after the end of the log (its last delta has offset 1",
        ),
        ("stats --data facts --start soon", "--start 'soon': give earliest, latest, an offset"),
        ("rebuild --data none --storage x.db", "no data directory at 'none'"),
        ("rebuild --data other --storage x.db", "'other' is not a data directory"),
        (
            "rebuild --data facts --storage no/x.db",
            "--storage 'no/x.db' cannot be created (there is no folder '",
        ),
        (
            "rebuild --data facts --storage full.db",
            "full.db already holds vectors: name a new file, or allow it to",
        ),
        ("rebuild --data facts --storage table.csv", "table.csv is not a SQLite file"),
        ("rebuild --data facts --storage other", "other cannot be opened"),
        ("audit --spark --data none --storage full.db", "no data directory at 'none'"),
        ("audit --spark --data facts --storage none.db", "no storage file at 'none.db'"),
        ("audit --spark --data facts --storage table.csv", "table.csv"),
        (
            "audit --spark --data facts --storage full.db",
            "full.db belongs to log 00000000000000000000000000000000, but ",
        ),
        (
            "audit --spark --data facts --contents none.csv",
            "table 'none.csv' does not exist: name a file or a folder of Parquet",
        ),
        (
            "audit --spark --data facts --contents table.csv --output there.jsonl",
            "'there.jsonl': it exists",
        ),
        ("diff table.csv none.csv", "table 'none.csv' does not exist"),
        ("diff table.csv there", "table 'there': its name has no known suffix: give parquet, csv or json"),
        ("diff table.csv table.csv --output there.jsonl", "'there.jsonl': it exists"),
        ("diff table.csv --data other", "'other' is not a data directory"),
        ("import none.parquet", "table 'none.parquet' does not exist"),
        ("import table.csv --output there.jsonl", "'there.jsonl': it exists"),
        ("import table.csv --namespace a\tb", "--namespace: character 1 is U+0009"),
        (
            "import table.csv --to 127.0.0.1:1 --producer p --token-file none",
            "token file 'none': it cannot be",
        ),
    ],
)
def test_unusable_input_is_reported_before_spark_starts(
    arguments: str, message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = arguments.split(" ")
    assert main(words if words[0] == "audit" else ["spark", *words]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert len(err.splitlines()) == 1
    assert sorted(one.name for one in folder.glob("x*")) == []


def test_paths_not_on_this_machine_are_left_to_spark(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments in (
        "import s3://there/table.csv --output s3://there/x.parquet",
        "import /none.csv --master yarn --output /none/x.parquet",
        "import none*.csv",
        f"import file://{folder}/table.csv --output x[1].jsonl",
    ):
        with pytest.raises(TypeError, match="'NoneType' object is not callable"):  # Spark would start
            main(["spark", *arguments.split()])
    monkeypatch.setenv("HADOOP_CONF_DIR", "/etc/hadoop")
    with pytest.raises(TypeError, match="'NoneType' object is not callable"):
        main(["spark", "import", "/none.csv"])


def test_repair_of_a_served_log_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with served(propagator={"data": "facts"}):
        assert main(["audit", "--spark", "--data", "facts", "--storage", "full.db", "--repair"]) == 2
    assert "'facts' is in use by process " in (err := capsys.readouterr().err)
    assert "send the repair to that service with --to HOST:PORT" in err


def test_service_without_jobs_is_reported_before_spark_starts(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with served() as in_memory:
        job = ["import", "table.csv", "--to", in_memory.address, "--producer", "p"]
        assert main(["spark", *job]) == 2
    assert "the service has no jobs: keep its log in a directory" in capsys.readouterr().err


def test_storage_file_in_use_is_reported(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    used = StorageFile("full.db", wal_bytes_max=1 << 20)
    used.connect(bytes(16))
    assert main(["spark", "rebuild", "--data", "facts", "--storage", "full.db", "--replace"]) == 2
    assert "full.db is in use by another process or sink: stop that one" in capsys.readouterr().err
    used.close()


def test_missing_packages_are_reported_in_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("delta_prop.spark.java._PACKAGES", ("pyspark_that_is_not_there",))
    for module in ("delta_prop.spark.jobs.replaying", "pyarrow", "pyspark"):
        monkeypatch.setitem(sys.modules, module, None)
    assert main(["spark", "replay", "--data", "facts"]) == 2
    expected = "delta-prop: pyspark_that_is_not_there is not installed: pip install 'delta-prop[spark]'\n"
    assert capsys.readouterr().err == expected


def test_missing_java_is_reported_in_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAVA_HOME", "/nowhere")
    assert main(["spark", "stats", "--data", "facts"]) == 2
    err = capsys.readouterr().err
    assert err.startswith(
        "delta-prop: Spark needs Java 17 or later, but JAVA_HOME=/nowhere holds no bin/java"
    )
    assert len(err.splitlines()) == 1


@pytest.mark.spark
def test_interrupt_is_raised_as_such_if_py4j_fails_to_clean_up(monkeypatch: pytest.MonkeyPatch) -> None:
    from py4j.protocol import Py4JError

    session = SimpleNamespace(stop=lambda: None)
    monkeypatch.setattr("delta_prop.spark.data_source.sessions.session", lambda *_args, **_options: session)

    def clean_up_in_vain() -> None:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            raise Py4JError("Gateway must be connected to send cancel cmd.")  # noqa: B904 - as py4j does

    options = Namespace(spark_log=False, master=None)
    with pytest.raises(KeyboardInterrupt), verbs._open_session(options):
        clean_up_in_vain()
    with pytest.raises(JobFailed, match="Gateway"), verbs._open_session(options):
        raise Py4JError("Gateway must be connected to send cancel cmd.")


@pytest.mark.spark
def test_job_interrupted_at_a_terminal_prints_one_line(command: Command, full: bool) -> None:
    if not full:
        pytest.skip("starts Java once more")
    command.publish([create_line(f"v{number}", 1.0) for number in range(30)])
    terminal, process_end = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "delta_prop", "spark", "stats", "--data", str(command.data)],
        stdout=subprocess.DEVNULL,
        stderr=process_end,
        env=os.environ | {"TERM": "xterm"},
        start_new_session=True,
    )
    os.close(process_end)
    try:
        message = read_until(terminal, b"seconds\r\x1b[K")  # Spark has started
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        message = read_until(terminal, b"")
        assert process.wait(SPARK_TIMEOUT_S) == 130
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
    assert message.rpartition(b"\x1b[K")[2] == b"interrupted\r\n"
    assert message.count(b"\n") == 1


def read_until(terminal: int, end_mark: bytes) -> bytes:
    """Read until `end_mark` has come, or to the end of the output if it is empty."""
    message, deadline = b"", time.monotonic() + SPARK_TIMEOUT_S
    while not end_mark or end_mark not in message:
        assert select.select([terminal], [], [], max(deadline - time.monotonic(), 0))[0], message
        try:
            message += os.read(terminal, 65_536)
        except OSError:  # the last writer has closed it
            break
    return message


def test_only_lines_of_delta_prop_are_shown_from_the_spark_log(capfd: pytest.CaptureFixture[str]) -> None:
    lines = ["Setting default log level", "delta_prop: job x: 3 deltas", "Error: no room", "\tat y"]
    program = "import sys; print(*sys.argv[1:], '\\r[Stage 1]\\r', sep='\\n', end='', file=sys.stderr)"
    for shown, expected in ((False, lines[1:2]), (True, lines)):
        log = SparkLog(shown=shown)
        with log.capture():
            subprocess.run([sys.executable, "-c", program, *lines], check=True)
        log.drain()
        err = capfd.readouterr().err.replace("\r[Stage 1]\r", "")  # Spark's progress bar
        assert err.splitlines() == expected
        assert log.last_line() == "Error: no room"
    why = translate_error(Exception("[JAVA_GATEWAY_EXITED] Java gateway process exited"), log.last_line())
    assert str(why) == "Spark did not start: Error: no room"


def test_error_of_a_task_is_reported_without_its_traceback() -> None:
    message = "delta_prop_wire.errors.InvalidDelta: INVALID_DELTA: old"
    text = f"[PYTHON_EXCEPTION] An exception was thrown\n  File x\n{message}\n at y"
    assert str(translate_error(Exception(text))) == "INVALID_DELTA: old"
    assert isinstance(
        translate_error(Exception("x\ndelta_prop_wire.errors.UsageError: name another\n")), UsageError
    )
    other = translate_error(
        Exception("An error occurred while calling o1.x.\n: org.apache.X: no room SQLSTATE: 42000\n")
    )
    assert str(other) == "Spark: org.apache.X: no room"
