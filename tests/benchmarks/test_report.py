"""Saved benchmark runs are merged, compared, and formatted as a page that names shortfalls."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from typing import TYPE_CHECKING

import pytest

from benchmarks import compare, report
from benchmarks._bars import Bar, bars
from benchmarks._results import Goal, Results
from benchmarks._saved import changes, read

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType

FAST = Goal("1", "rate: ours / theirs", 5.0, 10.0)
SLOW = Goal("8", "p99: ours / theirs", 1.0, 0.8, less=True)


def save_results(path: Path, bench: str, rate: list[float], p99: list[float]) -> Path:
    results = Results(bench, calibration_ns=50.0)
    results.add_figure("publish: ours", rate, "deltas/s")
    results.add_figure("p99", p99, "µs", less=True)
    results.add_goal(FAST, rate)
    results.add_goal(SLOW, p99)
    results.tables.append("a table\n")
    results.notes.append("a note")
    results.more["memory"] = [(0.5, 100.0), (1.0, 101.0)]
    results.finish(str(path))
    return path


@pytest.mark.parametrize(
    ("rates", "verdict"),
    [
        ([10.0], "far beyond"),
        ([9.0], "reached"),
        ([4.9], "short"),
        ([1.6], "far short"),
        (None, "not measured"),
    ],
)
def test_goal_is_judged_by_its_median(rates: list[float] | None, verdict: str) -> None:
    assert Results("b", calibration_ns=1.0).add_goal(FAST, rates) == verdict


def test_less_is_better_if_goal_says_so() -> None:
    results = Results("b", calibration_ns=1.0)
    assert [results.add_goal(SLOW, [p99]) for p99 in (0.8, 1.0, 2.9, 3.1)] == [
        "far beyond",
        "reached",
        "short",
        "far short",
    ]
    assert results.has_failed


def test_partial_results_of_benchmark_are_merged(tmp_path: Path) -> None:
    save_results(tmp_path / "a.json", "peers", [5.0], [1.0])
    second = Results("peers", calibration_ns=50.0)
    second.add_goal(FAST, [7.0])
    second.add_goal(Goal("2", "other", 1.0), [1.0])
    second.finish(str(tmp_path / "b.json"))
    (tmp_path / "c.json").write_text("[]")
    run = read([tmp_path])
    assert [(goal["row"], goal["found"]["median"]) for goal in run["peers"]["goals"]] == [
        ("1", 7.0),
        ("8", 1.0),
        ("2", 1.0),
    ]
    assert run["peers"]["figures"].keys() == {"publish: ours", "p99"}
    with pytest.raises(ValueError, match=r"c\.json was not written by"):
        read([tmp_path / "c.json"])


def test_change_is_reported_only_beyond_noise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = save_results(tmp_path / "old.json", "peers", [90.0, 100.0, 110.0], [10.0, 11.0, 12.0])
    new = save_results(tmp_path / "new.json", "peers", [105.0, 120.0, 130.0], [8.0, 9.0, 9.5])
    verdicts = {
        change.name: (round(change.ratio, 2), change.verdict) for change in changes(read([old]), read([new]))
    }
    assert verdicts == {"publish: ours": (1.2, ""), "p99": (1.22, "better")}
    assert compare.main([str(old), str(new)]) == 0
    assert "2 figures in both, 1 of them within the noise" in capsys.readouterr().out
    assert compare.main([str(new), str(old)]) == 0
    assert "worse" in capsys.readouterr().out
    far = save_results(tmp_path / "far.json", "peers", [30.0, 30.0, 30.0], [10.0, 11.0, 12.0])
    assert compare.main([str(old), str(far), "--all"]) == 1
    assert "far worse" in capsys.readouterr().out


def test_page_shows_goals_shortfalls_and_reasons(tmp_path: Path) -> None:
    save_results(tmp_path / "p.json", "peers", [4.0], [0.5])
    save_results(tmp_path / "s.json", "sustained", [6.0], [0.9])
    shortfalls = [
        {
            "title": "The rate",
            "rows": ["1", "2"],
            "what": "rate",
            "limit": ["The loop.", "One core."],
            "tried": [["Do less work", "+ 10 %", "kept"]],
        },
        {"title": "Latency", "rows": ["1"], "what": "latency", "limit": ["not this"], "tried": []},
    ]
    report.write(read([tmp_path]), tmp_path / "performance.md", shortfalls)
    page = (tmp_path / "performance.md").read_text()
    assert "| goals | 4: 3 reached, 1 of these far beyond; 1 [short](#short); 0 not measured |" in page
    assert "| 1 | rate: ours / theirs | ≥ 5 × | ≥ 10 × | 4 (4-4) | [short](#the-rate) |" in page
    assert (
        "### The rate\n\n- The loop.\n- One core.\n\n[What was tried](performance-tried.md#the-rate)" in page
    )
    tried = (tmp_path / "performance-tried.md").read_text()
    assert "## The rate\n\nGoals: rows 1, 2.\n\n| tried | result | verdict |" in tried
    assert "| Do less work | + 10 % | kept |" in tried
    assert "Latency" not in tried
    assert "not this" not in page
    assert page.count("a table") == 2
    for plot in (report.GOALS_PLOT, report.RATES_PLOT, report.MEMORY_PLOT):
        assert plot in page
        ET.parse(tmp_path / plot)


def test_failed_run_sets_exit_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "BENCHES", ("sustained",))
    calls = []

    class Failed:
        def __init__(self, command: list[str]) -> None:
            calls.append(command)
            save_results(tmp_path / "sustained.json", "sustained", [6.0], [0.9])

        def wait(self, timeout_s: float) -> int:
            return 1

        def poll(self) -> int:
            return 1

    monkeypatch.setattr(report.subprocess, "Popen", Failed)
    page = tmp_path / "docs.md"
    assert report.main(["--keep", str(tmp_path), "--quick", "--to", str(page)]) == 1
    assert page.exists()
    (command,) = calls
    assert command[-1] == "--quick"


def test_bars_begin_at_one_on_a_logarithmic_axis() -> None:
    text = bars("t <", [Bar("low", 0.1, "0.1"), Bar("high", 100.0, "100")], (0.1, 1, 10), logarithmic=True)
    root = ET.fromstring(text)
    low, high = (element for element in root.iter() if (element.get("class") or "").startswith("bar"))
    assert float(low.get("x") or 0) + float(low.get("width") or 0) == pytest.approx(
        float(high.get("x") or 0), abs=0.1
    )
    assert float(high.get("width") or 0) == pytest.approx(float(low.get("width") or 0), abs=0.2)
    assert json.dumps(text)


@pytest.mark.parametrize("folder_exists", [False, True])
def test_page_without_results_is_refused_in_one_line(
    folder_exists: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "results"
    if folder_exists:
        folder.mkdir()
    with pytest.raises(SystemExit, match="2"):
        report.main(["--from", str(folder), "--to", str(tmp_path / "page.md")])
    assert str(folder) in capsys.readouterr().err
    assert not (tmp_path / "page.md").exists()


def test_verdict_is_recomputed_when_read(tmp_path: Path) -> None:
    path = save_results(tmp_path / "a.json", "peers", [5.0], [9.0])
    data = json.loads(path.read_text())
    for goal in data["goals"]:
        goal["verdict"] = "a word of another version"
    path.write_text(json.dumps(data))
    assert [goal["verdict"] for goal in read([path])["peers"]["goals"]] == ["reached", "far short"]


@pytest.mark.parametrize(
    ("key_path", "value"),
    [
        (("format",), 2),
        (("bench",), 7),
        (("calibration_ns",), "50"),
        (("calibration_ns",), float("nan")),
        (("load",), None),
        (("tables",), "a table"),
        (("notes", 0), 7),
        (("figures",), 5),
        (("figures", "p99"), 5),
        (("figures", "p99", "median"), "fast"),
        (("figures", "p99", "low"), True),
        (("figures", "p99", "less"), "no"),
        (("goals",), {}),
        (("goals", 0), 5),
        (("goals", 0, "target"), "5"),
        (("goals", 0, "moonshot"), []),
        (("goals", 0, "found"), 4.0),
        (("goals", 0, "found", "high"), None),
        (("more",), []),
        (("more", "memory"), [[1.0]]),
        (("measured_at",), 2026),
    ],
    ids=str,
)
def test_malformed_results_file_is_refused_and_named(
    key_path: tuple[str | int, ...], value: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = (save_results(tmp_path / f"{name}.json", "peers", [4.0], [0.5]) for name in ("good", "bad"))
    data = node = json.loads(bad.read_text())
    for step in key_path[:-1]:
        node = node[step]
    node[key_path[-1]] = value
    bad.write_text(json.dumps(data))
    for arguments in ([str(good), str(bad)], [str(bad), str(good)]):
        check_refused(compare, arguments, f"{bad} cannot be read: ", capsys)
    arguments = ["--from", str(tmp_path), "--to", str(tmp_path / "page.md")]
    check_refused(report, arguments, f"{bad} cannot be read: ", capsys)
    assert not (tmp_path / "page.md").exists()


def check_refused(
    module: ModuleType, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        module.main(arguments)
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


@pytest.mark.parametrize("text", ["", "{", "[]", "5", "{}", '{"figures": 5}', '"text"', "\x00"])
def test_foreign_file_is_refused(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, other = save_results(tmp_path / "good.json", "peers", [4.0], [0.5]), tmp_path / "other"
    other.write_text(text)
    check_refused(compare, [str(good), str(other)], str(other), capsys)
    check_refused(report, ["--from", str(other), "--to", str(tmp_path / "page.md")], str(other), capsys)


def test_runs_of_two_benchmarks_are_not_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    of_peers, of_scale = (
        save_results(tmp_path / f"{name}.json", name, [4.0], [0.5]) for name in ("peers", "scale")
    )
    check_refused(
        compare, [str(of_peers), str(of_scale)], f"{of_peers} is of peers, {of_scale} of scale", capsys
    )
    assert compare.main([str(tmp_path), str(of_peers)]) == 0
    assert capsys.readouterr().err == f"scale is skipped: only {tmp_path} has it\n"
