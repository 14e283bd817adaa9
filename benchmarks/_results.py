"""Results of a benchmark: figures by name, verdicts on goals, tables; as text and as JSON.

Every benchmark writes the same JSON format, so that one report and one comparison can read all of them.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks._arguments import FAILED, Arguments, bounded_int, writable_file
from benchmarks._measure import Figure, calibration_ns, format_number, table

GATE = 3.0
"""A run fails if a figure misses its target by more than this factor, more than the noise of a shared
machine."""
FAR_BEYOND, REACHED, SHORT, FAR_SHORT = "far beyond", "reached", "short", "far short"
NOT_MEASURED = "not measured"


@dataclass(frozen=True, slots=True)
class Goal:
    """The target of a figure, which `what` describes. With `less`, smaller is better."""

    row: str
    """The row of the list of goals; several goals may belong to one row."""
    what: str
    target: float
    moonshot: float | None = None
    """The value from which a figure counts as far beyond the target."""
    unit: str = "×"
    less: bool = False

    def is_within(self, value: float, bound: float) -> bool:
        """Return True if a value is at least as good as a bound."""
        return value <= bound if self.less else value >= bound

    def verdict(self, figure: Figure | None) -> str:
        """Return the verdict on a figure."""
        if figure is None:
            return NOT_MEASURED
        if self.moonshot is not None and self.is_within(figure.median, self.moonshot):
            return FAR_BEYOND
        if self.is_within(figure.median, self.target):
            return REACHED
        gate = self.target * GATE if self.less else self.target / GATE
        return SHORT if self.is_within(figure.median, gate) else FAR_SHORT


@dataclass(slots=True)
class Results:
    """The results of one run of one benchmark."""

    bench: str
    calibration_ns: float = field(default_factory=calibration_ns)
    load: float = field(default_factory=lambda: os.getloadavg()[0])
    """The machine's load average when the run began."""
    tables: list[str] = field(default_factory=list)
    figures: dict[str, dict[str, Any]] = field(default_factory=dict)
    goals: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Remarks for readers of the figures."""
    failures: list[str] = field(default_factory=list)
    """Errors that fail the run, whatever the speed."""
    more: dict[str, Any] = field(default_factory=dict)
    """Additional data for programs, such as rounds."""

    def add_figure(self, name: str, rounds: Sequence[float], unit: str, *, less: bool = False) -> Figure:
        """Add a figure and return it; with `less`, smaller is better."""
        figure = Figure.of(rounds)
        self.figures[name] = {**asdict(figure), "unit": unit, "less": less}
        return figure

    def add_goal(self, goal: Goal, rounds: Sequence[float] | None) -> str:
        """Judge a goal by its rounds, and add it; return the verdict."""
        figure = Figure.of(rounds) if rounds else None
        verdict = goal.verdict(figure)
        found = None if figure is None else asdict(figure)
        self.goals.append({**asdict(goal), "found": found, "verdict": verdict})
        return verdict

    @property
    def has_failed(self) -> bool:
        """True if there is a failure, or a goal is far short."""
        return bool(self.failures) or any(goal["verdict"] == FAR_SHORT for goal in self.goals)

    def text(self) -> str:
        """Return the results as text."""
        parts = [
            f"calibration: {self.calibration_ns:.0f} ns of CPU per turn of its loop; load {self.load:.1f}\n"
        ]
        parts += self.tables
        if self.goals:
            parts.append(goal_table(self.goals))
        parts += [f"note: {note}" for note in self.notes]
        parts += [f"FAILED: {failure}" for failure in self.failures]
        return "\n".join(parts)

    def finish(self, path: Path | str | None) -> int:
        """Print the results, write the JSON if a path is given; return the exit status."""
        print(self.text())
        if path is not None:
            document = {"format": 1, "measured_at": time.strftime("%Y-%m-%d"), **asdict(self)}
            Path(path).write_text(json.dumps(document, indent=1))
        return int(self.has_failed)


def goal_table(goals: Sequence[dict[str, Any]]) -> str:
    """Return the table of goals: target, moonshot, figure, verdict."""
    rows = []
    for goal in goals:
        bound, found = "<=" if goal["less"] else ">=", goal["found"]
        target, moonshot = (
            "" if goal[field] is None else f"{bound} {format_number(goal[field])} {goal['unit']}"
            for field in ("target", "moonshot")
        )
        rows.append(
            (f"{goal['row']:>4}  {goal['what']}", target, moonshot, format_figure(found), goal["verdict"])
        )
    return table("Goals", (" row", "target", FAR_BEYOND, "found", ""), rows)


def format_figure(figure: dict[str, Any] | None) -> str:
    """Format a figure from JSON as a median with its range."""
    return "-" if figure is None else str(Figure(figure["median"], figure["low"], figure["high"]))


def options_of(
    bench: str, about: str | None, *, rounds: int, rounds_min: int = 1, status_1: str = FAILED
) -> Arguments:
    """Return a parser with the options of every benchmark that writes results."""
    parser = Arguments(bench, about, status_1=status_1)
    parser.option(
        "--rounds",
        bounded_int(rounds_min, 10_000),
        rounds,
        f"interleaved rounds, at least {rounds_min}; default: {rounds}",
    )
    parser.add_argument("--quick", action="store_true", help="a short run: rough figures")
    parser.add_argument("--json", type=writable_file, metavar="FILE", help="also write the results to FILE")
    return parser
