"""Injected faults of a real disk: requested calls fail, missing tools are reported, nothing stays mounted."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from benchmarks import crash
from benchmarks._crash_disk import EMBEDDED, DiskSetup, EmbeddedDirectory, Totals, report
from benchmarks._disk_faults import (
    ALWAYS,
    CALLS,
    FULL,
    NAMES,
    NO_RULE,
    SYNCS,
    WRITES,
    Ballast,
    FailingCalls,
    Rule,
    build,
    draw_failure,
)
from benchmarks._images import UnusableError, check_usable, mount_image
from tests.benchmarks.test_interruption import ROOT, group_processes, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks._disk_faults import Failure

ROUNDS_MAX = 10
CHILD = """
import os, sys
from delta_prop_broker.local_disk import LocalDisk
disk = LocalDisk(sys.argv[1])
def call_or_errno(call):
    try:
        return call()
    except OSError as error:
        return error.errno
disk.make_directory("a")
file = disk.open("a/one", create=True)
elsewhere = LocalDisk(sys.argv[2]).open("one", create=True)
print("ready", flush=True)
sys.stdin.readline()
results = [call_or_errno(lambda: file.write(0, [b"x" * 100])) for _ in range(4)]
results += [call_or_errno(file.sync) for _ in range(2)]
results.append(call_or_errno(lambda: disk.rename("a/one", "a/two")))
results.append(call_or_errno(lambda: elsewhere.write(0, [b"x" * 100])))
print(results)
"""


@pytest.fixture
def library(tmp_path: Path) -> Path:
    try:
        return build(tmp_path)
    except UnusableError as reason:
        pytest.skip(f"NOT RUN: {reason}")


def results_with_faults(library: Path, folder: Path, *rules: Rule) -> tuple[list[int | None], int]:
    """Run four writes, two syncs, a rename, and a write elsewhere; return results and failures."""
    data, elsewhere = folder / "data", folder / "elsewhere"
    elsewhere.mkdir(exist_ok=True)
    failing = FailingCalls(library, folder / "faults", data)
    command = [sys.executable, "-c", CHILD, str(data), str(elsewhere)]
    process = subprocess.Popen(
        command, env=os.environ | failing.env, stdin=-1, stdout=-1, text=True, cwd=ROOT
    )
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        failing.arm((rules[0], rules[1] if len(rules) > 1 else NO_RULE))
        process.stdin.write("go\n")
        process.stdin.close()
        results = json.loads(process.stdout.read().replace("None", "null"))
    failed_call_count = failing.failed_calls
    failing.close()
    return results, failed_call_count


def test_only_requested_calls_fail(library: Path, tmp_path: Path) -> None:
    eio, full = errno.EIO, errno.ENOSPC
    without_faults = [100, 100, 100, 100, None, None, None, 100]
    assert results_with_faults(library, tmp_path, Rule(WRITES, 1, 2, full)) == (
        [100, full, full, *without_faults[3:]],
        2,
    )
    assert results_with_faults(library, tmp_path, Rule(SYNCS, 1, ALWAYS, eio)) == (
        [*without_faults[:5], eio, None, 100],
        1,
    )
    assert results_with_faults(library, tmp_path, Rule(NAMES, 0, 1, eio)) == (
        [*without_faults[:6], eio, 100],
        1,
    )
    short_write, errors = Rule(WRITES, 1, 1, 0), Rule(WRITES | SYNCS, 1, 2, eio)
    assert results_with_faults(library, tmp_path, short_write, errors) == (
        [100, 50, 100, eio, eio, None, None, 100],
        3,
    )
    assert results_with_faults(library, tmp_path, NO_RULE) == (without_faults, 0)


def test_missing_compiler_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "/nowhere/cc")
    with pytest.raises(UnusableError, match="/nowhere/cc cannot be run"):
        build(tmp_path)
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UnusableError, match="no C compiler: install gcc"):
        build(tmp_path)


def test_unavailable_faults_are_reported_as_not_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CC", "/nowhere/cc")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert crash.main(["--disk-faults", "--rounds", "1"]) == 77
    printed = capsys.readouterr()
    assert printed.out == ""
    assert [line.split(":")[:2] for line in printed.err.splitlines()] == [
        ["NOT RUN", " calls that fail"],
        ["NOT RUN", " full file systems"],
    ]


def test_option_for_kills_only_is_refused_with_disk_faults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        crash.main(["--disk-faults", "--plant", "cut-log"])
    assert exit_info.value.code == 2
    assert "--plant works with kills only" in capsys.readouterr().err


def test_every_failure_kind_is_drawn_with_its_rules() -> None:
    rng = random.Random(1)
    failures: list[Failure] = [draw_failure(kind, rng, 1.0) for kind in (*CALLS, FULL) for _ in range(50)]
    for failure in failures:
        assert 0 < failure.after_s < 1
        assert (failure.kind == FULL) == (failure.rules == (NO_RULE, NO_RULE))
        assert str(failure).startswith("file system full" if failure.kind == FULL else failure.kind)
    assert {failure.rules[0].times for failure in failures} == {0, 1, 3, ALWAYS}
    assert any(failure.rules[1].classes == WRITES | SYNCS | NAMES for failure in failures)


def test_incomplete_or_violated_report_fails(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    totals = Totals(rounds=4, log_failures=3)
    totals.answers["acknowledged"] = 4_000
    assert report("disks", {EMBEDDED: totals}, [], None) == 0
    assert report("disks", {EMBEDDED: replace(totals, log_failures=1)}, [], None) == 1
    assert report("disks", {}, ["full file systems: only root can mount"], None) == 1
    assert "not run: full file systems: only root can mount" in capsys.readouterr().out
    totals.verdict.add("lost", "k1 was acknowledged")
    assert report("disks", {EMBEDDED: totals}, [], tmp_path / "figures.json") == 1
    assert "lost: k1 was acknowledged" in capsys.readouterr().out
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert (figures["violations"], figures[EMBEDDED]["verdict"]["counts"]) == (1, {"lost": 1})


# --- as root


@pytest.fixture
def image(tmp_path: Path) -> Iterator[Path]:
    try:
        check_usable("ext4")
    except UnusableError as reason:
        pytest.skip(f"NOT RUN: {reason}")
    with mount_image("ext4", tmp_path, 16 * 1024 * 1024) as mounted:
        yield mounted.mount


def test_ballast_fills_disk_and_frees_it(image: Path) -> None:
    ballast = Ballast(image / "ballast")
    ballast.fill()
    with pytest.raises(OSError, match="No space left"):
        (image / "one").write_bytes(bytes(8192))
    ballast.free()
    (image / "one").write_bytes(bytes(8192))


# --- real processes


@pytest.mark.alone
def test_one_round_ends_with_correct_answers(library: Path, tmp_path: Path) -> None:
    totals, rng = Totals(), random.Random(1)
    setup = DiskSetup(tmp_path / "data", tmp_path, library, ["sync"])
    while (
        not totals.log_failures and totals.rounds < ROUNDS_MAX
    ):  # on a slow machine the round may end before the fault
        EmbeddedDirectory(setup, totals, rng).run_rounds(range(1, 2), 1)
    assert totals.verdict.examples == []
    assert totals.log_failures == 1
    assert totals.answers["acknowledged"] > 100


@pytest.mark.alone
@pytest.mark.skipif(not Path("/proc/self/mounts").exists(), reason="reads the mounts from /proc")
def test_terminated_benchmark_leaves_no_mount_or_file(library: Path, tmp_path: Path) -> None:
    folder = tmp_path / "tmp"
    folder.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks", "crash", "--disk-faults", "--rounds", "9"],
        cwd=ROOT,
        env=os.environ | {"TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        wait_until(lambda: list(folder.glob("*/*/log/streams/default/0/*.log")) or process.poll() is not None)
        time.sleep(0.5)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
        assert process.returncode == 143
        wait_until(lambda: not group_processes(process.pid))
        assert str(folder) not in Path("/proc/self/mounts").read_text()
        assert not list(folder.iterdir())
    finally:
        process.kill()
        process.wait()
