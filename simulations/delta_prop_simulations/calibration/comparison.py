"""The results of rounds: medians of predicted over measured, their spread, and if they are good enough.

Values only; `table` is for people, `to_json` for programs.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from delta_prop_simulations.calibration.rounds import Figures, Round

OFF_MAX = 0.2
"""The maximum error of a predicted peak, or a median lag, as a share of the measured one."""
P99_FACTOR_MAX = 1.5


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
        """Return plain data, with each round."""
        return asdict(self) | {"good": self.is_good}


def compare(name: str, about: str, rounds: Sequence[Round]) -> Comparison:
    """Compare the predicted figures with the measured ones."""

    def one(what: str, unit: str, scale: float, factors: tuple[float, float]) -> ComparedFigure:
        predicted = [scale * _figure(each.predicted, what) for each in rounds]
        measured = [scale * _figure(each.measured, what) for each in rounds]
        ratios = [one / other for one, other in zip(predicted, measured, strict=True)]
        ratio, (low, high) = median(ratios), factors
        good = low <= ratio <= high
        values = (median(predicted), median(measured), ratio, min(ratios), max(ratios), good)
        return ComparedFigure(what, unit, *values)

    near, tail = (1 - OFF_MAX, 1 + OFF_MAX), (1 / P99_FACTOR_MAX, P99_FACTOR_MAX)
    figures = (
        one("throughput", "deltas/s", 1, near),
        one("lag p50", "ms", 1e3, near),
        one("lag p99", "ms", 1e3, tail),
    )
    return Comparison(name, about, figures, tuple(rounds))


def _figure(figures: Figures, what: str) -> float:
    return {
        "throughput": figures.peak_per_s,
        "lag p50": figures.lag_p50_s,
        "lag p99": figures.lag_p99_s,
    }[what]


def table(comparisons: Sequence[Comparison], machine: Mapping[str, str]) -> str:
    """Return a table in Markdown, which a terminal shows as well as a page."""
    lines = [
        "| set-up | what | predicted | measured | predicted / measured (rounds) | |",
        "|---|---|---:|---:|---:|---|",
    ]
    for comparison in comparisons:
        for figure in comparison.figures:
            lines.append(
                f"| {comparison.name} | {figure.what}, {figure.unit} | {_short(figure.predicted)} | "
                f"{_short(figure.measured)} | {figure.ratio:.2f} ({figure.ratio_low:.2f} to "
                f"{figure.ratio_high:.2f}) | {'good' if figure.good else 'off'} |"
            )
    for comparison in comparisons:
        rounds = comparison.rounds
        lags = sum(one.measured.lags for one in rounds)
        load = max(one.load for one in rounds)
        lines.append(
            f"\n{comparison.name}: {comparison.about}. {len(rounds)} rounds, {lags:,} lags, "
            f"{_format_asked_rates(rounds)}; the machine's load was up to {load:.1f}."
        )
    lines.append(f"\n{machine['processors']}, {machine['system']}, Python {machine['python']}.")
    return "\n".join(lines)


def _format_asked_rates(rounds: Sequence[Round]) -> str:
    asked = [one.asked_per_s for one in rounds if one.asked_per_s is not None]
    return f"lags at {median(asked):,.0f} deltas/s" if asked else "lags at the peak"


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 1_000 else f"{value:.3g}"
