"""Results that were written before: read again, put together, held against each other."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks._results import GATE
from benchmarks._shape import check, judged

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

FAR_WORSE = "far worse"
Run = dict[str, dict[str, Any]]
"""By benchmark, what it wrote."""


def read(places: Iterable[Path]) -> Run:
    """Files, and all files of folders. Of a benchmark that wrote several, what they have together.

    Of a figure or goal that several have, the last file's. What else lies in a folder is left out. Raises
    ValueError where nothing is there, or a file is not what a benchmark writes.
    """
    files = [
        path for place in places for path in (sorted(place.glob("*.json")) if place.is_dir() else [place])
    ]
    run: Run = {}
    for path in files:
        told = _told(path)
        if told is None:
            if path in places:
                raise ValueError(f"{path} was not written by --json of a benchmark")
            continue
        before = run.get(told["bench"])
        run[told["bench"]] = told if before is None else _together(before, told)
    if not run:
        raise ValueError(f"no results in {', '.join(map(str, places)) or 'nothing'}: give what --json wrote")
    return run


def _told(path: Path) -> dict[str, Any] | None:
    """What a benchmark wrote into this file; None where another program did."""
    try:
        told = json.loads(path.read_text())
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read ({error.strerror}): name a file that --json wrote, or a folder of them"
        ) from error
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(told, dict) or "format" not in told or "bench" not in told:
        return None
    try:
        check(told)
    except ValueError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    for goal in told["goals"]:
        # Judged anew, as the words may have been others when it was written.
        goal["verdict"] = judged(goal)
    return told


def _together(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
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
    """One figure, before and now."""

    bench: str
    name: str
    unit: str
    before: Mapping[str, float]
    now: Mapping[str, float]
    less: bool

    @property
    def ratio(self) -> float:
        """How many times better it is now, below 1: worse."""
        old, new = (one["median"] for one in (self.before, self.now))
        if min(old, new) <= 0:
            return 1.0
        return old / new if self.less else new / old

    @property
    def verdict(self) -> str:
        """In a word; within the spread of the rounds nothing is known."""
        if self.ratio < 1 / GATE:
            return FAR_WORSE
        apart = self.now["low"] > self.before["high"] or self.now["high"] < self.before["low"]
        if not apart:
            return ""
        return "better" if self.ratio > 1 else "worse"


def changes(before: Run, now: Run) -> list[Change]:
    """Every figure that both runs have."""
    return [
        Change(bench, name, figure["unit"], before[bench]["figures"][name], figure, figure["less"])
        for bench, told in now.items()
        if bench in before
        for name, figure in told["figures"].items()
        if name in before[bench]["figures"]
    ]
