"""Compares the predictions of several rounds with the measurements, and judges if they are good enough.

`format_table` formats the comparison for people, `to_json` for programs.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from delta_prop_simulations.calibration.rounds import Figures, Round

ERROR_MAX = 0.2
"""Maximum error of a predicted throughput or median lag, as a share of the measured value."""
P99_FACTOR_MAX = 1.5
"""Maximum factor between a predicted and a measured 99 % quantile of the lag."""


@dataclass(frozen=True, slots=True)
class ComparedFigure:
    """One figure over all rounds: medians, and the ratio of predicted to measured, round by round."""

    what: str
    unit: str
    predicted: float
    measured: float
    ratio: float
    ratio_low: float
    ratio_high: float
    good: bool


@dataclass(frozen=True, slots=True)
class Comparison:
    """One set-up, with its figures and rounds."""

    name: str
    about: str
    figures: tuple[ComparedFigure, ...]
    rounds: tuple[Round, ...]

    @property
    def is_good(self) -> bool:
        """True if every figure was predicted well enough."""
        return all(figure.good for figure in self.figures)

    def to_json(self) -> dict[str, Any]:
        """Return JSON data, including the rounds."""
        return asdict(self) | {"good": self.is_good}


def compare(name: str, about: str, rounds: Sequence[Round]) -> Comparison:
    """Compare the predicted figures with the measured ones."""

    def compare_figure(what: str, unit: str, scale: float, bounds: tuple[float, float]) -> ComparedFigure:
        predicted = [scale * _figure(each.predicted, what) for each in rounds]
        measured = [scale * _figure(each.measured, what) for each in rounds]
        ratios = [one / other for one, other in zip(predicted, measured, strict=True)]
        ratio, (low, high) = median(ratios), bounds
        good = low <= ratio <= high
        values = (median(predicted), median(measured), ratio, min(ratios), max(ratios), good)
        return ComparedFigure(what, unit, *values)

    bounds, p99_bounds = (1 - ERROR_MAX, 1 + ERROR_MAX), (1 / P99_FACTOR_MAX, P99_FACTOR_MAX)
    figures = (
        compare_figure("throughput", "deltas/s", 1, bounds),
        compare_figure("lag p50", "ms", 1e3, bounds),
        compare_figure("lag p99", "ms", 1e3, p99_bounds),
    )
    return Comparison(name, about, figures, tuple(rounds))


def _figure(figures: Figures, what: str) -> float:
    return {
        "throughput": figures.peak_per_s,
        "lag p50": figures.lag_p50_s,
        "lag p99": figures.lag_p99_s,
    }[what]


def format_table(comparisons: Sequence[Comparison], machine: Mapping[str, str]) -> str:
    """Return a table in Markdown, which is readable in a terminal, too."""
    lines = [
        "| set-up | what | predicted | measured | predicted / measured (rounds) | |",
        "|---|---|---:|---:|---:|---|",
    ]
    for comparison in comparisons:
        for figure in comparison.figures:
            lines.append(
                f"| {comparison.name} | {figure.what}, {figure.unit} | {_format_number(figure.predicted)} | "
                f"{_format_number(figure.measured)} | {figure.ratio:.2f} ({figure.ratio_low:.2f} to "
                f"{figure.ratio_high:.2f}) | {'good' if figure.good else 'off'} |"
            )
    for comparison in comparisons:
        rounds = comparison.rounds
        lag_count = sum(each.measured.lags for each in rounds)
        load = max(each.load for each in rounds)
        lines.append(
            f"\n{comparison.name}: {comparison.about}. {len(rounds)} rounds, {lag_count:,} lags, "
            f"{_format_rates(rounds)}; the machine's load was up to {load:.1f}."
        )
    lines.append(f"\n{machine['processors']}, {machine['system']}, Python {machine['python']}.")
    return "\n".join(lines)


def _format_rates(rounds: Sequence[Round]) -> str:
    rates = [each.asked_per_s for each in rounds if each.asked_per_s is not None]
    return f"lags at {median(rates):,.0f} deltas/s" if rates else "lags at the peak"


def _format_number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1_000 else f"{value:.3g}"
