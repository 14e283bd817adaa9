"""Saved results: reading, merging and comparing them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks._results import GATE
from benchmarks._results_schema import check, verdict_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

FAR_WORSE = "far worse"
Run = dict[str, dict[str, Any]]
"""The results of a run, by benchmark."""


def read(places: Iterable[Path]) -> Run:
    """Read files, and all JSON files of folders; merge several files of one benchmark.

    Of a figure or goal that several files have, the last file wins. Other JSON files in a folder are skipped.
    Raises ValueError if there are no results, or a file is not one that a benchmark writes.
    """
    files = [
        path for place in places for path in (sorted(place.glob("*.json")) if place.is_dir() else [place])
    ]
    run: Run = {}
    for path in files:
        results = _read_results(path)
        if results is None:
            if path in places:
                raise ValueError(f"{path} was not written by --json of a benchmark")
            continue
        before = run.get(results["bench"])
        run[results["bench"]] = results if before is None else _merge(before, results)
    if not run:
        raise ValueError(f"no results in {', '.join(map(str, places))}: name files that --json wrote")
    return run


def _read_results(path: Path) -> dict[str, Any] | None:
    """Read the results in this file; return None if another program wrote it."""
    try:
        results = json.loads(path.read_text())
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read ({error.strerror}): name a file that --json wrote, or a folder of them"
        ) from error
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(results, dict) or "format" not in results or "bench" not in results:
        return None
    try:
        check(results)
    except ValueError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    for goal in results["goals"]:
        # The verdict is computed again, as its wording may have changed since the file was written.
        goal["verdict"] = verdict_of(goal)
    return results


def _merge(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    goals = {(goal["row"], goal["what"]): goal for goal in (*first["goals"], *second["goals"])}
    return {
        **second,
        "figures": {**first["figures"], **second["figures"]},
        "goals": list(goals.values()),
        "tables": [*first["tables"], *second["tables"]],
        "notes": list(dict.fromkeys((*first["notes"], *second["notes"]))),
        "failures": [*first["failures"], *second["failures"]],
        "more": {**first["more"], **second["more"]},
    }


@dataclass(frozen=True, slots=True)
class Change:
    """One figure in the old and in the new run. With `less`, smaller is better."""

    bench: str
    name: str
    unit: str
    before: Mapping[str, float]
    now: Mapping[str, float]
    less: bool

    @property
    def ratio(self) -> float:
        """The factor by which the new figure is better; below 1 it is worse."""
        old, new = self.before["median"], self.now["median"]
        if min(old, new) <= 0:
            return 1.0
        return old / new if self.less else new / old

    @property
    def verdict(self) -> str:
        """The verdict; empty if the rounds of both runs overlap and the new figure is not far worse."""
        if self.ratio < 1 / GATE:
            return FAR_WORSE
        if self.now["low"] <= self.before["high"] and self.now["high"] >= self.before["low"]:
            return ""
        return "better" if self.ratio > 1 else "worse"


def changes(before: Run, now: Run) -> list[Change]:
    """Return every figure that both runs have."""
    return [
        Change(bench, name, figure["unit"], before[bench]["figures"][name], figure, figure["less"])
        for bench, results in now.items()
        if bench in before
        for name, figure in results["figures"].items()
        if name in before[bench]["figures"]
    ]
