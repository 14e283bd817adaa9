"""A directory of format 1: every verb refuses it in one line, and `log migrate` converts it to format 2."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from delta_prop.cli import main
from delta_prop.client.jobs import Decision, JobState, StagedPart, decide
from delta_prop.testing import run_virtual
from delta_prop_broker.corruption import FormatOutdated
from delta_prop_broker.local_disk import LocalDisk
from delta_prop_broker.segments.identity import FORMAT, read_format
from delta_prop_broker.segments.paths import DIRECTORY
from tests.delta_prop.server.jobs import JOB, serve_jobs, wait_published
from tests.golden.directory_history import SETTINGS, service
from tests.golden.migrating import disk_of, migrate_disk
from tests.golden.reading import read_content
from tests.golden.test_golden import EACH_DIRECTORY, GOLDEN, read_expected, write_files
from tests.golden.write_golden_directory import HERE, serve_and_query, unpack

if TYPE_CHECKING:
    from pathlib import Path

OLD = HERE / "0.1.0-controls.tar.gz"
REFUSAL_LINE = (
    f"delta-prop: 'my facts' has format 1: this version reads only format {FORMAT}: run "
    "`delta-prop log migrate 'my facts'`; nothing was changed\n"
)


def read_tree(root: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_golden_directories_cover_each_format() -> None:
    formats = [read_format(disk_of(unpack(packed))) for packed in GOLDEN]
    assert {file.number for file in formats if file is not None} == set(range(1, FORMAT + 1))


@pytest.mark.parametrize(
    "arguments",
    [
        ["serve", "--port", "0", "--http-port", "0", "--log-level", "error"],
        ["log", "verify"],
        ["log", "show"],
        ["log", "export"],
        ["log", "export", "--to", "copy"],
        ["status"],
        ["sinks"],
        ["quarantine", "list"],
        ["get", "one", "--namespace", "ids"],
        ["publish", "-"],
        ["subscribe", "--no-follow"],
    ],
    ids=" ".join,
)
def test_verbs_refuse_old_format_in_one_line_and_change_nothing(
    arguments: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    files = write_files(unpack(OLD), tmp_path / "my facts")
    assert main([*arguments, "--data", "my facts"]) == 1
    shown = capfd.readouterr()
    assert (shown.out, shown.err) == ("", REFUSAL_LINE)
    assert read_tree(tmp_path / "my facts") == files


def test_propagator_refuses_old_format_and_changes_nothing() -> None:
    disk = disk_of(unpack(OLD))

    async def run() -> None:
        async with service(disk, 1, SETTINGS):
            raise AssertionError("the directory was opened")

    with pytest.raises(FormatOutdated, match="log migrate facts") as caught:
        run_virtual(run)
    assert (caught.value.format, caught.value.known) == (1, FORMAT)
    assert {path: disk.peek(path) for path in disk.paths()} == unpack(OLD)


# --- the command


@pytest.mark.parametrize("name", ["none", "file", "folder"])
def test_migrate_names_path_that_is_not_a_data_directory(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    assert main(["log", "migrate", f"{tmp_path}/{name}"]) == 2
    shown = capsys.readouterr()
    assert (shown.out, shown.err.count("\n")) == ("", 1)
    assert f"'{tmp_path}/{name}'" in shown.err
    assert "the one that `" in shown.err
    assert not list((tmp_path / "folder").iterdir())


@EACH_DIRECTORY
def test_migrate_reports_its_rewrite_and_log_verifies(
    packed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = write_files(unpack(packed), tmp_path)
    old = json.loads((tmp_path / "format").read_text())["format"]
    assert main(["log", "migrate", str(tmp_path)]) == 0
    shown = capsys.readouterr()
    if old == FORMAT:
        assert (shown.out, shown.err) == (f"{tmp_path}: format 2 already; nothing was changed\n", "")
        assert {path: raw for path, raw in read_tree(tmp_path).items() if path.name != "lock"} == files
    else:
        assert shown.out.startswith(f"{tmp_path}: format 1 to 2: 1")
        assert "segments are rewritten, from the first control row at offset 31 on; up to 1,0" in shown.err
        assert "bytes are needed, " in shown.err
        assert shown.err.count("\n") == 1, "a progress bar without a terminal"
    assert not list(tmp_path.rglob("*.new"))
    assert main(["log", "verify", "--data", str(tmp_path)]) == 0
    assert "intact" in capsys.readouterr().out


def test_migrate_reports_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_files(unpack(OLD), tmp_path)
    for expected in (
        {"from_format": 1, "format": 2, "completed": False, "segments_rewritten": 11, "control_batches": 7},
        {"from_format": 2, "format": 2, "completed": False, "segments_rewritten": 0, "control_batches": 0},
    ):
        assert main(["log", "migrate", str(tmp_path), "--json"]) == 0
        (line,) = capsys.readouterr().out.splitlines()
        report = json.loads(line)
        assert {name: report[name] for name in expected} == expected
        assert (report["bytes_needed"] > report["bytes_written"]) == (expected["segments_rewritten"] > 0)


@pytest.mark.parametrize("name", ["nowhere", "empty"])
def test_migrate_refuses_missing_or_empty_directory(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    assert main(["log", "migrate", str(tmp_path / name)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not list((tmp_path / "empty").iterdir())


def test_migrate_of_locked_directory_fails_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = write_files(unpack(OLD), tmp_path)
    lock = LocalDisk(tmp_path).lock("lock")
    assert main(["log", "migrate", str(tmp_path)]) == 1
    lock.release()
    assert "stop that one" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in files} == files


# --- files that stay unchanged


def test_migration_leaves_files_without_stamps_unchanged() -> None:
    files, disk = unpack(OLD), disk_of(unpack(OLD))
    migrate_disk(disk)
    changed = {path for path in disk.paths() if path != "lock" and disk.peek(path) != files.get(path)}
    first_rewritten = f"{DIRECTORY}/{28:020}"
    assert changed >= {"format", f"{first_rewritten}.log", f"{first_rewritten}.index"}
    for path in changed - {"format", f"{DIRECTORY}/mark", f"{DIRECTORY}/log"}:
        assert path.endswith((".log", ".index", ".checkpoint")), path
        assert path >= first_rewritten, "a file before the first control row has changed"
    assert not changed & {"cursors", "groups/reports.cursor", "quarantine/adds.journal", f"{DIRECTORY}/time"}


def test_staged_job_is_published_after_migration() -> None:
    disk = disk_of(unpack(OLD))
    migrate_disk(disk)
    with serve_jobs(disk) as server:
        before = len(server.keys())
        status = decide(server.address, JOB, Decision.QUERY)
        assert (status.state, status.deltas) == (JobState.STAGING, 12)
        decide(server.address, JOB, Decision.COMMIT, [StagedPart(1, 0, 12)])
        assert wait_published(server.address).published == 12
        assert server.keys()[before:] == [f"1-{number}" for number in range(12)]


def tear_log(files: dict[str, bytes]) -> dict[str, bytes]:
    """Return the files as a crash leaves them: without a recovery point, and with a torn frame at the end."""
    last = max(path for path in files if path.endswith(".log"))
    return {path: raw for path, raw in files.items() if not path.endswith("/mark")} | {
        last: files[last] + files[last][:100]
    }


def test_migration_recovers_unclosed_directory_first() -> None:
    disk = disk_of(tear_log(unpack(OLD)))
    migrate_disk(disk)
    content, expected = json.loads(json.dumps(read_content(disk))), read_expected(OLD)["kept"]
    assert [epoch[0] for epoch in content.pop("epochs")] == [1, 2, 3]
    for name, cursor in content["cursors"].items():  # a later version may add fields
        content["cursors"][name] = {field: cursor[field] for field in expected["cursors"][name]}
    for part in content:
        assert content[part] == expected[part], part
    served = serve_and_query({path: disk.peek(path) for path in disk.paths() if path != "lock"})
    assert served["outcomes"] == read_expected(OLD)["served"]["outcomes"]
