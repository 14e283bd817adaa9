"""Saved results: reading, checking, merging and comparing them. An error names the invalid field."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks._measure import Figure
from benchmarks._results import GATE, Goal

FAR_WORSE = "far worse"
FORMAT = 1
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
        _check(results)
    except ValueError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    for goal in results["goals"]:
        # The verdict is computed again, as its wording may have changed since the file was written.
        goal["verdict"] = _verdict_of(goal)
    return results


def _check(results: Mapping[str, Any]) -> None:
    """Raise ValueError if the results have an invalid field; the error names the first one."""
    if results["format"] != FORMAT:
        raise ValueError(f"its format is {results['format']!r}, but this version reads {FORMAT}")
    for names, is_right, expected in _FIELDS:
        for name in names:
            if not is_right(results.get(name)):
                raise ValueError(f"{name} is not {expected}")
    for name, figure in results["figures"].items():
        if not _is_figure(figure) or not _has_value(figure, unit=str, less=bool):
            raise ValueError(
                f"figure '{name}' needs the numbers median, low and high, a text unit, a boolean less"
            )
    for index, goal in enumerate(results["goals"]):
        if not _is_goal(goal):
            raise ValueError(
                f"goal {index + 1} needs the texts row, what and unit, a boolean less, a number target, and "
                "moonshot and found, which may be null"
            )
    samples = results["more"].get("memory", [])
    if not _is_list_of(samples, list) or not all(
        len(one) == 2 and all(map(_is_number, one)) for one in samples
    ):
        raise ValueError("more.memory is not a list of pairs of numbers")


def _verdict_of(goal: Mapping[str, Any]) -> str:
    fields = {name: goal[name] for name in ("row", "what", "target", "moonshot", "unit", "less")}
    return Goal(**fields).verdict(None if goal["found"] is None else Figure(**goal["found"]))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_list_of(value: object, kind: type) -> bool:
    return isinstance(value, list) and all(isinstance(one, kind) for one in value)


def _has_value(value: Mapping[str, Any], **kinds: type) -> bool:
    return all(isinstance(value.get(name), kind) for name, kind in kinds.items())


def _is_figure(value: object) -> bool:
    return isinstance(value, dict) and all(_is_number(value.get(name)) for name in ("median", "low", "high"))


def _is_goal(value: object) -> bool:
    if not isinstance(value, dict) or not _has_value(value, row=str, what=str, unit=str, less=bool):
        return False
    if not _is_number(value.get("target")) or not {"moonshot", "found"} <= value.keys():
        return False
    moonshot, found = value["moonshot"], value["found"]
    is_found_valid = found is None or (_is_figure(found) and len(found) == 3)
    return is_found_valid and (moonshot is None or _is_number(moonshot))


_FIELDS: tuple[tuple[tuple[str, ...], Callable[[Any], bool], str], ...] = (
    (("bench", "measured_at"), lambda value: isinstance(value, str), "a text"),
    (("calibration_ns", "load"), _is_number, "a number"),
    (("tables", "notes", "failures"), lambda value: _is_list_of(value, str), "a list of texts"),
    (("figures", "more"), lambda value: isinstance(value, dict), "an object"),
    (("goals",), lambda value: _is_list_of(value, dict), "a list of objects"),
)


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
