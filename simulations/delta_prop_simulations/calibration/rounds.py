"""Runs rounds: a round calibrates and measures a set-up in turns, and predicts the same figures.

No part of a measured run is used for its prediction: the distributions come from slices of calibration
between the measured slices, and the rate of an open loop comes from the prediction of the peak.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import anyio

from delta_prop.testing.world import VirtualClock
from delta_prop_simulations.calibration import system
from delta_prop_simulations.calibration.busy_loop import BusyTime
from delta_prop_simulations.calibration.distributions import Samples
from delta_prop_simulations.calibration.driving import Observation, poisson
from delta_prop_simulations.calibration.machine_times import TIMER_DELAY
from delta_prop_simulations.calibration.models import Draws
from delta_prop_simulations.rng import Seed

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path
    from typing import TypeAlias

    from delta_prop.platform.ports import Timer
    from delta_prop_simulations.calibration.distributions import Distribution
    from delta_prop_simulations.calibration.driving import RealRig, Rig

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
    """One round. `asked_per_s`: the rate of the open loop; None if there was none. `load`: the machine's load
    average.
    """

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
