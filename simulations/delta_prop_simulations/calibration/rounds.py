"""Predicted beside measured: rounds in which calibration and measurement take turns, and what they come to.

Nothing of a measured run goes into its prediction: laws come from slices of calibration that lie between the
measured ones, and the rate of an open loop from calibration alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import anyio

from delta_prop_simulations.calibration import edge
from delta_prop_simulations.calibration.busy_loop import BusyTime
from delta_prop_simulations.calibration.driving import Observed, poisson
from delta_prop_simulations.calibration.laws import Samples
from delta_prop_simulations.calibration.machine_times import LATE
from delta_prop_simulations.calibration.models import Draws
from delta_prop_simulations.chance import Seed

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path
    from typing import TypeAlias

    from delta_prop_simulations.calibration.driving import RealRig, Rig
    from delta_prop_simulations.calibration.laws import Law

    Drive: TypeAlias = Callable[[Rig, float], Awaitable[None]]

SLICES = 3
"""What is measured in a round comes in so many slices, with one of calibration before and after each."""


@dataclass(frozen=True, slots=True)
class SetUp:
    """What is predicted. `share`: of the predicted peak, for the open loop in which lags are seen; None: lags
    are seen at the peak, where the sink paces its source. `sent`: deltas a publish. `ahead_max`: at the
    peak, deltas that may wait to be applied. `settle_s`: what comes first in each run, and does not count.
    """

    name: str
    about: str
    sent: int
    ahead_max: int
    share: float | None
    settle_s: float
    real: Callable[[Path], AbstractAsyncContextManager[RealRig]]
    model: Callable[[Draws, Callable[[], float]], AbstractAsyncContextManager[Rig]]


@dataclass(frozen=True, slots=True)
class Figures:
    """What one round says, predicted or measured: the peak in deltas a second, lags in seconds."""

    peak_per_s: float
    lag_p50_s: float
    lag_p99_s: float
    lags: int


@dataclass(frozen=True, slots=True)
class Round:
    """One round. `asked_per_s`: of the open loop, None where there was none. `load`: the machine's."""

    predicted: Figures
    measured: Figures
    asked_per_s: float | None
    load: float


def one_round(set_up: SetUp, seed: Seed, seconds: float) -> Round:
    """Calibrate and measure in turns, and predict. `seconds`: how long lags are seen."""
    run = _Runs(set_up, seed)
    of_peak = seconds if set_up.share is None else seconds / 2
    peak, at_peak = run.both("peak", partial(_flat_out, set_up), of_peak)
    asked, predicted, measured = None, at_peak, peak
    if set_up.share is not None:
        asked = set_up.share * at_peak.rate
        drive = partial(_open_loop, set_up, seed.child("arrivals"), asked)
        measured, predicted = run.both("open loop", drive, seconds)
    return Round(_figures(at_peak, predicted), _figures(peak, measured), asked, edge.load())


class _Runs:
    def __init__(self, set_up: SetUp, seed: Seed) -> None:
        self._set_up = set_up
        self._seed = seed

    def both(self, name: str, drive: Drive, seconds: float) -> tuple[Observed, Observed]:
        """What is seen on the machine, in slices between those of calibration; and what is predicted."""
        measured, laws = anyio.run(self._measure, name, drive, seconds)
        return measured, self._predict(name, drive, seconds, laws)

    async def _measure(self, name: str, drive: Drive, seconds: float) -> tuple[Observed, Mapping[str, Law]]:
        samples, measured = Samples(), Observed()
        random = self._seed.stream(f"{name}: calibration")
        with edge.folder() as folder:
            async with self._set_up.real(folder) as rig:
                with edge.at_rest():
                    await rig.calibrate(samples, random)
                    for _ in range(SLICES):
                        measured.add(await _observed(rig, drive, self._set_up.settle_s, seconds / SLICES))
                        await rig.calibrate(samples, random)
        return measured, samples.laws()

    def _predict(self, name: str, drive: Drive, seconds: float, laws: Mapping[str, Law]) -> Observed:
        seed = self._seed.child(f"{name}: prediction")
        late = seed.stream("timers")
        time = BusyTime(lambda: laws[LATE].draw(late, 1))

        async def main() -> Observed:
            draws = Draws(laws, time, seed.stream("service times"))
            async with self._set_up.model(draws, anyio.current_time) as rig:
                return await _observed(rig, drive, self._set_up.settle_s, seconds)

        return time.run(main, self._seed.number)


async def _observed(rig: Rig, drive: Drive, settle_s: float, seconds: float) -> Observed:
    await drive(rig, settle_s)
    rig.watch.begin()
    await drive(rig, seconds)
    return rig.watch.end()


async def _flat_out(set_up: SetUp, rig: Rig, seconds: float) -> None:
    await rig.source.as_fast_as_it_goes(seconds, set_up.ahead_max)


async def _open_loop(set_up: SetUp, seed: Seed, per_s: float, rig: Rig, seconds: float) -> None:
    await rig.source.steadily(poisson(seed.stream("gaps"), per_s / set_up.sent), seconds)


def _figures(peak: Observed, steady: Observed) -> Figures:
    return Figures(peak.rate, steady.lag_s(0.5), steady.lag_s(0.99), len(steady.lags_s))
