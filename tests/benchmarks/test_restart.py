"""The benchmark of starts, with small amounts: what it builds and measures, that it sees what is wrong."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np
import pytest

from benchmarks import _restart_service, restart
from benchmarks._restart_service import LifeOptions, build, nearest, start

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def terms(tmp_path: Path) -> LifeOptions:
    found = LifeOptions(str(tmp_path), "vectors", vectors=3_500, origins=8, changes=1_000)
    anyio.run(build, found)
    return found


def life(
    terms: LifeOptions, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> dict[str, Any]:
    monkeypatch.setattr("sys.stdin", io.StringIO("close\n"))
    anyio.run(start, terms)
    told: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return told


def test_a_start_is_measured_and_its_search_checked(
    terms: LifeOptions, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = life(terms, monkeypatch, capsys)
    assert first["right"]
    assert first["vectors"] >= 3_500
    assert first["image"] == "loaded, with 0 rows that were written later"
    assert 0 < first["open_s"] <= first["accepted_s"] <= first["storage_s"] <= first["searched_s"]
    second = life(replace(terms, life=1), monkeypatch, capsys)
    assert second["right"], "what the first life changed is known to the check"
    real = _restart_service.nearest
    monkeypatch.setattr(_restart_service, "nearest", lambda *given: [*real(*given)[1:], "another"])
    assert not life(replace(terms, life=2), monkeypatch, capsys)["right"]


def test_the_check_follows_what_lives_have_changed() -> None:
    terms = LifeOptions("", "vectors", vectors=3_500, changes=1_000)
    built, changed = terms.rows_of(1, 0), terms.rows_of(1, 2)
    assert list(terms.changed_batches(1)) == [1]
    assert not np.array_equal(built[1], changed[1])
    assert np.array_equal(replace(terms, life=1).rows(1)[1], built[1])
    assert np.array_equal(replace(terms, life=2).rows(1)[1], changed[1])
    query = changed[1][7]
    assert nearest(replace(terms, life=2), query)[0] == "vector-00001007"
    assert nearest(replace(terms, life=1), query)[0] != "vector-00001007"


def test_a_missed_target_and_a_wrong_search_are_told(capsys: pytest.CaptureFixture[str]) -> None:
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
    given = restart.parser().parse_args(["--vectors", "10"])

    def failed(**spoilt: object) -> bool:
        kinds = {restart.CLOSED: [good], restart.KILLED: [{**good, **spoilt}]}
        results = restart.report({"vectors": kinds, "plain": kinds}, given)
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
    given.quick = True
    assert not failed(accepted_s=5.1)
    assert failed(accepted_s=6.1), "of the plain log it is more than three times"
    assert failed(right=False)
