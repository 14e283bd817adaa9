"""Arguments of benchmarks: invalid ones are refused in one line, before anything is measured."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from benchmarks import __main__ as bench
from benchmarks import peers, pipeline, restart, stages
from benchmarks._arguments import select_names

ROOT = Path(__file__).parents[2]
NAMES = bench.benchmark_names(ROOT / "benchmarks")
UNWRITABLE_JSON = ("--json", "/nonexistent/x.json")
WRITING_BENCHMARKS = [name for name in NAMES if name not in ("compare", "controllers", "report")]
SCENES = [scene.name for scene in pipeline.SCENES]


def refusal_line(
    name: str, *arguments: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> str:
    """Return the line with which a benchmark refuses its arguments."""
    monkeypatch.setattr(sys, "argv", ["bench", *arguments])
    with pytest.raises(SystemExit) as exit_info:
        import_module(f"benchmarks.{name}").main()
    printed = capsys.readouterr()
    assert (exit_info.value.code, printed.out) == (2, "")
    (line,) = printed.err.splitlines()
    assert line.startswith(f"./run bench {name}: ")
    return line


@pytest.mark.parametrize("name", WRITING_BENCHMARKS)
def test_unwritable_file_is_refused_at_start(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refusal_line(name, *UNWRITABLE_JSON, monkeypatch=monkeypatch, capsys=capsys)
    assert "/nonexistent" in line


@pytest.mark.parametrize("value", ["nan", "-1", "inf", "0", "1e400", "many"])
@pytest.mark.parametrize(
    ("name", "option"),
    [
        *(("peers", "--seconds"), ("pipeline", "--seconds"), ("sustained", "--seconds")),
        *(("index", "--seconds"), ("controllers", "--duration"), ("powercut", "--minutes")),
        *(("restart", "--mib"), ("log", "--acks"), ("stages", "--samples"), ("mix", "--rounds")),
        *(("scale", "--rounds"), ("memory", "--rounds"), ("crash", "--producers")),
    ],
)
def test_invalid_number_is_refused_with_its_bounds(
    name: str, option: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refusal_line(name, option, value, monkeypatch=monkeypatch, capsys=capsys)
    assert f"argument {option}: {value} is not a" in line


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("peers", ("--scenes", "nope"), "no name contains 'nope': choose from publish to "),
        ("peers", ("--peers", "nope"), "'nope' is not a peer: choose from jetstream, redis"),
        ("peers", ("--peers", ","), "'' is not a peer"),
        ("peers", ("--directory", "/nonexistent"), "there is no directory /nonexistent"),
        ("peers", ("--size", "12"), "not a multiple of 8"),
        ("pipeline", ("--only", "nope"), "; batch 1000"),
        ("growth", ("--only", "nope"), "; 8 sinks; "),
        ("memory", ("--only", "nope"), "; connection; "),
        ("log", ("--directory", "/nonexistent"), "there is no directory /nonexistent"),
        ("restart", ("--directory", "/nonexistent"), "there is no directory /nonexistent"),
        ("restart", ("--keep", "/dev/null/x"), "/dev/null/x cannot be created"),
        ("restart", ("--vectors", "0", "--starts", "0"), "nothing is left to measure"),
        (
            "compare",
            ("/nonexistent/a", "b"),
            "/nonexistent/a cannot be read (No such file or directory): name",
        ),
        ("report", ("--to", "/nonexistent/page.md"), "there is no directory /nonexistent"),
        ("report", ("--keep", "/dev/null/x"), "/dev/null/x cannot be created"),
    ],
)
def test_invalid_argument_is_refused_with_message(
    name: str,
    arguments: tuple[str, ...],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert message in refusal_line(name, *arguments, monkeypatch=monkeypatch, capsys=capsys)


def test_directory_as_output_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refusal_line("mix", "--json", str(tmp_path), monkeypatch=monkeypatch, capsys=capsys)
    assert f"{tmp_path} is a directory" in line


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("", SCENES),
        ("batch 1", ["batch 1"]),
        ("batch 10", ["batch 10"]),
        ("batch", ["batch 1", "batch 10", "batch 100", "batch 1000"]),
        ("geo,single", ["single sink", "geo"]),
        ("geo,batch 1,", None),
    ],
)
def test_exact_name_wins_over_partial_matches(pattern: str, expected: list[str] | None) -> None:
    if expected is None:
        with pytest.raises(Exception, match="no name contains ''"):
            select_names(SCENES)(pattern)
    else:
        assert select_names(SCENES)(pattern) == expected


def test_name_with_comma_can_be_selected() -> None:
    scenes = [scene.name for scene in peers.SCENES]
    assert select_names(scenes)("2,000 a second") == ["2,000 a second"]
    assert select_names(scenes)("2,000") == ["2,000 a second"]


@pytest.mark.parametrize("name", NAMES)
def test_help_explains_exit_status(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", "--help"])
    with pytest.raises(SystemExit) as exit_info:
        import_module(f"benchmarks.{name}").main()
    assert exit_info.value.code == 0
    help_text = " ".join(capsys.readouterr().out.split())
    assert help_text.startswith(f"usage: ./run bench {name} ")
    assert "exit status: 0; 1: " in help_text


def test_every_reported_benchmark_accepts_quick(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in import_module("benchmarks.report").BENCHES:
        assert "/nonexistent" in refusal_line(
            name, "--quick", *UNWRITABLE_JSON, monkeypatch=monkeypatch, capsys=capsys
        )


def test_quick_restart_uses_small_amounts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    built_options = []

    class Stop(Exception):
        pass

    def fake_build(options: object) -> float:
        built_options.append(options)
        raise Stop

    monkeypatch.setattr(restart, "build_directory", fake_build)
    for extra_arguments in ([], ["--vectors", "5000"]):
        with pytest.raises(Stop):
            restart.main(["--quick", "--keep", str(tmp_path), *extra_arguments])
    assert [(options.vectors, options.changes) for options in built_options] == [
        (100_000, 10_000),
        (5_000, 5_000),
    ]  # type: ignore[attr-defined]


# --- ./run bench


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)


def test_help_lists_benchmarks_with_first_docstring_line() -> None:
    help_run = run("--help")
    assert (help_run.returncode, help_run.stderr) == (0, "")
    for name in NAMES:
        first_line = (import_module(f"benchmarks.{name}").__doc__ or "").splitlines()[0]
        assert f"  {name:12} {first_line}\n" in help_run.stdout
    without_arguments = run()
    assert (without_arguments.returncode, without_arguments.stdout, without_arguments.stderr) == (
        2,
        "",
        help_run.stdout,
    )


def test_benchmark_runs_under_its_importable_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []
    scale = import_module("benchmarks.scale")
    monkeypatch.setattr(bench.signal, "signal", lambda *_: None)  # the tests keep their own handlers
    monkeypatch.setattr(
        scale, "main", lambda: calls.append((scale.ProgramMeasurement.__module__, sys.argv)) or 3
    )
    monkeypatch.setattr(sys, "argv", [])
    assert bench.main(["scale", "--quick"]) == 3
    assert calls == [("benchmarks.scale", ["./run bench scale", "--quick"])]


def test_interruption_is_reported_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def main() -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(bench.signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(import_module("benchmarks.mix"), "main", main)
    assert bench.main(["mix"]) == 130
    assert capsys.readouterr().err == "./run bench mix: interrupted\n"


def test_stages_announce_work_before_measuring(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(_size: int, _count: int) -> list[object]:
        raise KeyboardInterrupt

    monkeypatch.setattr(stages, "_batches", interrupt)
    with pytest.raises(KeyboardInterrupt):
        stages.main(["--quick"])
    assert capsys.readouterr().err == "stages, batches of 1: 5 rounds\n"
    stages.cpu_us_rounds(2, {"order": lambda: 1})
    assert capsys.readouterr().err == "round 1 of 2\nround 2 of 2\n"
