"""Runs rounds: a round calibrates and measures a set-up in turns, and predicts the same figures.

No part of a measured run is used for its prediction: the distributions come from slices of calibration
between the measured slices, and the rate of an open loop comes from the prediction of the peak.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, TypeAlias

import anyio

from delta_prop.platform.ports import Timer
from delta_prop.testing.world import VirtualClock
from delta_prop_simulations.calibration import system
from delta_prop_simulations.calibration.busy_loop import BusyTime
from delta_prop_simulations.calibration.distributions import Distribution, Samples
from delta_prop_simulations.calibration.driving import Observation, RealRig, Rig, poisson
from delta_prop_simulations.calibration.machine_times import TIMER_DELAY
from delta_prop_simulations.calibration.models import Draws
from delta_prop_simulations.rng import Seed

if TYPE_CHECKING:
    Drive: TypeAlias = Callable[[Rig, float], Awaitable[None]]

SLICES = 3
"""Number of measured slices in a round; there is a slice of calibration before and after each."""


@dataclass(frozen=True, slots=True)
class SetUp:
    """A set-up to measure and to predict. `peak_share`: the share of the predicted peak rate at which lags
    are measured, in an open loop; None to measure them at the peak, for a sink that paces its source.
    `unapplied_max`: how many deltas may wait to be applied at the peak. `settle_s`: the warm-up of each run,
    which does not count. `real`, `model`: open the real set-up, and its model.
    """

    name: str
    about: str
    deltas_per_publish: int
    unapplied_max: int
    peak_share: float | None
    settle_s: float
    real: Callable[[Path], AbstractAsyncContextManager[RealRig]]
    model: Callable[[Draws, Timer], AbstractAsyncContextManager[Rig]]


@dataclass(frozen=True, slots=True)
class Figures:
    """The predicted or the measured figures of one round. `lags`: the number of measured lags."""

    peak_per_s: float
    lag_p50_s: float
    lag_p99_s: float
    lags: int


@dataclass(frozen=True, slots=True)
class Round:
    """One round. `asked_per_s`: the open loop's rate, if any; `load`: the machine's load average."""

    predicted: Figures
    measured: Figures
    asked_per_s: float | None
    load: float


def run_round(set_up: SetUp, seed: Seed, seconds: float) -> Round:
    """Calibrate and measure in turns, and predict. `seconds`: the time for which lags are measured."""
    runs = _Runs(set_up, seed)
    peak_s = seconds if set_up.peak_share is None else seconds / 2
    measured_peak, predicted_peak = runs.measure_and_predict(
        "peak", partial(_run_closed_loop, set_up), peak_s
    )
    asked_per_s, measured, predicted = None, measured_peak, predicted_peak
    if set_up.peak_share is not None:
        asked_per_s = set_up.peak_share * predicted_peak.rate
        drive = partial(_run_open_loop, set_up, seed.child("arrivals"), asked_per_s)
        measured, predicted = runs.measure_and_predict("open loop", drive, seconds)
    return Round(
        _figures(predicted_peak, predicted),
        _figures(measured_peak, measured),
        asked_per_s,
        system.load_average(),
    )


class _Runs:
    def __init__(self, set_up: SetUp, seed: Seed) -> None:
        self._set_up = set_up
        self._seed = seed

    def measure_and_predict(self, name: str, drive: Drive, seconds: float) -> tuple[Observation, Observation]:
        """Return the sum of the measured slices, which alternate with calibration, and the prediction."""
        measured, distributions = anyio.run(self._measure, name, drive, seconds)
        return measured, self._predict(name, drive, seconds, distributions)

    async def _measure(
        self, name: str, drive: Drive, seconds: float
    ) -> tuple[Observation, Mapping[str, Distribution]]:
        samples, measured = Samples(), Observation()
        random = self._seed.stream(f"{name}: calibration")
        with system.folder() as folder:
            async with self._set_up.real(folder) as rig:
                with system.without_gc():
                    await rig.calibrate(samples, random)
                    for _ in range(SLICES):
                        measured.add(await _observe(rig, drive, self._set_up.settle_s, seconds / SLICES))
                        await rig.calibrate(samples, random)
        return measured, samples.distributions()

    def _predict(
        self, name: str, drive: Drive, seconds: float, distributions: Mapping[str, Distribution]
    ) -> Observation:
        seed = self._seed.child(f"{name}: prediction")
        time = BusyTime(distributions[TIMER_DELAY], seed.stream("timers"))

        async def main() -> Observation:
            draws = Draws(distributions, time, seed.stream("service times"))
            async with self._set_up.model(draws, VirtualClock()) as rig:
                return await _observe(rig, drive, self._set_up.settle_s, seconds)

        return time.run(main, self._seed.number)


async def _observe(rig: Rig, drive: Drive, settle_s: float, seconds: float) -> Observation:
    await drive(rig, settle_s)
    rig.watch.begin()
    await drive(rig, seconds)
    return rig.watch.end()


async def _run_closed_loop(set_up: SetUp, rig: Rig, seconds: float) -> None:
    await rig.source.send_closed_loop(seconds, set_up.unapplied_max)


async def _run_open_loop(set_up: SetUp, seed: Seed, per_s: float, rig: Rig, seconds: float) -> None:
    await rig.source.send_open_loop(poisson(seed.stream("gaps"), per_s / set_up.deltas_per_publish), seconds)


def _figures(peak: Observation, steady: Observation) -> Figures:
    return Figures(peak.rate, steady.lag_s(0.5), steady.lag_s(0.99), len(steady.lags_s))


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

    def compare_figure(
        what: str, name: str, unit: str, scale: float, bounds: tuple[float, float]
    ) -> ComparedFigure:
        predicted: list[float] = [scale * getattr(each.predicted, name) for each in rounds]
        measured: list[float] = [scale * getattr(each.measured, name) for each in rounds]
        ratios = [one / other for one, other in zip(predicted, measured, strict=True)]
        ratio, (low, high) = median(ratios), bounds
        good = low <= ratio <= high
        values = (median(predicted), median(measured), ratio, min(ratios), max(ratios), good)
        return ComparedFigure(what, unit, *values)

    bounds, p99_bounds = (1 - ERROR_MAX, 1 + ERROR_MAX), (1 / P99_FACTOR_MAX, P99_FACTOR_MAX)
    figures = (
        compare_figure("throughput", "peak_per_s", "deltas/s", 1, bounds),
        compare_figure("lag p50", "lag_p50_s", "ms", 1e3, bounds),
        compare_figure("lag p99", "lag_p99_s", "ms", 1e3, p99_bounds),
    )
    return Comparison(name, about, figures, tuple(rounds))


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
