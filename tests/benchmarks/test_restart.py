"""The benchmark of starts, with small amounts: it builds, measures, and finds wrong search results."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np
import pytest

from benchmarks import _restart_service, restart
from benchmarks._restart_service import RunOptions, build, nearest, start

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def options(tmp_path: Path) -> RunOptions:
    run_options = RunOptions(str(tmp_path), "vectors", vectors=3_500, origins=8, changes=1_000)
    anyio.run(build, run_options)
    return run_options


def run_service(
    options: RunOptions, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> dict[str, Any]:
    monkeypatch.setattr("sys.stdin", io.StringIO("close\n"))
    anyio.run(start, options)
    figures: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return figures


def test_start_is_measured_and_its_search_checked(
    options: RunOptions, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = run_service(options, monkeypatch, capsys)
    assert first["right"]
    assert first["vectors"] >= 3_500
    assert first["image"] == "loaded, with 0 rows that were written later"
    assert 0 < first["open_s"] <= first["accepted_s"] <= first["storage_s"] <= first["searched_s"]
    second = run_service(replace(options, starts_before=1), monkeypatch, capsys)
    assert second["right"], "the check does not know the changes of the first run"
    real = _restart_service.nearest
    monkeypatch.setattr(_restart_service, "nearest", lambda *arguments: [*real(*arguments)[1:], "another"])
    assert not run_service(replace(options, starts_before=2), monkeypatch, capsys)["right"]


def test_search_check_knows_changes_of_earlier_runs() -> None:
    options = RunOptions("", "vectors", vectors=3_500, changes=1_000)
    built, changed = options.rows_of_version(1, 0), options.rows_of_version(1, 2)
    assert list(options.changed_batches(1)) == [1]
    assert not np.array_equal(built[1], changed[1])
    assert np.array_equal(replace(options, starts_before=1).current_rows(1)[1], built[1])
    assert np.array_equal(replace(options, starts_before=2).current_rows(1)[1], changed[1])
    query = changed[1][7]
    assert nearest(replace(options, starts_before=2), query)[0] == "vector-00001007"
    assert nearest(replace(options, starts_before=1), query)[0] != "vector-00001007"


def test_missed_target_and_wrong_search_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    good = {
        **{f"{step}_{unit}": 1.0 for _, step in restart.STEPS for unit in ("s", "rss_mb", "peak_mb")},
        **dict.fromkeys(("imported_s", "search_s", "changes_s", "changes_applied_s", "end_s", "cpu_s"), 1.0),
        **{
            "image": "",
            "graphs": "",
            "recovery": "",
            "right": True,
            "vectors": 10,
            "accepted_after_open_s": 0.1,
        },
    }
    arguments = restart.make_parser().parse_args(["--vectors", "10"])

    def failed(**changed: object) -> bool:
        kinds = {restart.CLOSED: [good], restart.KILLED: [{**good, **changed}]}
        results = restart.report({"vectors": kinds, "plain": kinds}, arguments)
        print(results.text())
        return results.has_failed

    assert not failed()
    assert failed(right=False)
    assert failed(vectors=9)
    assert failed(accepted_s=5.1)
    assert failed(searched_s=30.1)
    assert "searched after 30.1 s, target 30 s" in capsys.readouterr().out
    assert not failed(accepted_s=1.9)
    assert failed(accepted_s=2.1)
    arguments.quick = True
    assert not failed(accepted_s=5.1)
    assert failed(accepted_s=6.1), "more than three times the target of the plain log is not far short"
    assert failed(right=False)
