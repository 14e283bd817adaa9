"""Measuring: calibration, medians of interleaved rounds, tables, JSON for programs."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class Figure:
    """A median with the spread of its rounds, in the caller's unit."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, rounds: Sequence[float]) -> Figure:
        """Return the figure of these rounds."""
        return cls(statistics.median(rounds), min(rounds), max(rounds))

    def __str__(self) -> str:
        return f"{format_number(self.median)} ({format_number(self.low)}-{format_number(self.high)})"


def format_number(value: float) -> str:
    """Format a number: from 1,000 on without decimals, below that with three significant digits."""
    return f"{value:,.0f}" if abs(value) >= 1_000 else f"{value:.3g}"


def ratios(values: Iterable[float], references: Iterable[float]) -> list[float]:
    """Return the ratio of both values of each round."""
    return [value / reference for value, reference in zip(values, references, strict=True)]


def calibration_ns() -> float:
    """Measure the CPU ns of one turn of a nearly empty loop, which relates the figures of two machines."""
    count = 200_000
    start = time.process_time_ns()
    total = 0
    for number in range(count):
        total += number & 7
    return (time.process_time_ns() - start) / count


def cpu_us(rounds: int, stages: Mapping[str, Callable[[], int]]) -> dict[str, Figure]:
    """Measure the CPU µs per unit of each stage, in interleaved rounds: each stage runs once per round.

    A stage runs its work and returns the number of units (calls or deltas).
    """
    times_by_stage: dict[str, list[float]] = {name: [] for name in stages}
    for _ in range(rounds):
        for name, stage in stages.items():
            start = time.process_time_ns()
            units = stage()
            times_by_stage[name].append((time.process_time_ns() - start) / 1000 / units)
    return {name: Figure.of(times) for name, times in times_by_stage.items()}


def percentile(samples: Sequence[float], share: float) -> float:
    """Return the sample below which `share` of all samples are."""
    ordered = sorted(samples)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def table(title: str, header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a text table, first column left-aligned, the others right-aligned."""
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    lines = [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]
    return "\n".join([title, lines[0], "-" * len(lines[0]), *lines[1:], ""])


def write_json(path: Path | str | None, figures: Mapping[str, object]) -> None:
    """Write the figures as JSON, if a path is given."""
    if path is not None:
        with open(path, "w") as file:
            json.dump(figures, file, indent=2, default=lambda value: getattr(value, "__dict__", str(value)))
