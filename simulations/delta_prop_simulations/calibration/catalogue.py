"""Lists the sinks to calibrate and the set-ups to compare, and runs the calibration and the comparison."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio

from delta_prop_simulations.calibration import index, storage, subscriber, system
from delta_prop_simulations.calibration.comparison import compare
from delta_prop_simulations.calibration.distributions import Samples
from delta_prop_simulations.calibration.rounds import run_round
from delta_prop_simulations.calibration.shipped_sinks import SINK_RIGS
from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from delta_prop_simulations.calibration.comparison import Comparison
    from delta_prop_simulations.calibration.distributions import Distribution
    from delta_prop_simulations.calibration.driving import RealRig
    from delta_prop_simulations.calibration.rounds import Round, SetUp
    from delta_prop_simulations.rng import Seed

SET_UPS: dict[str, SetUp] = {one.name: one for one in (storage.SET_UP, index.SET_UP, subscriber.SET_UP)}
SINKS: dict[str, Callable[[Path], AbstractAsyncContextManager[RealRig]]] = {
    **{name: one.real for name, one in SET_UPS.items()},
    **SINK_RIGS,
}
"""The sinks that can be calibrated, by name: each function opens the sink's rig in a directory."""


def select_names(names: str | None, known: Iterable[str]) -> list[str]:
    """Return the names in a comma-separated list; all known ones if `names` is None. Raises UsageError."""
    known = list(known)
    selected = known if names is None else [name.strip() for name in names.split(",")]
    for name in selected:
        if name not in known:
            raise UsageError(f"--sinks {name}: unknown sink: give one of {', '.join(known)}")
    return selected


def calibrate(name: str, seed: Seed, seconds: float) -> Mapping[str, Distribution]:
    """Return the distributions of one sink, measured for about `seconds`."""

    async def measure() -> Mapping[str, Distribution]:
        samples, random = Samples(), seed.stream(name)
        with system.folder() as folder:
            async with SINKS[name](folder) as rig:
                with system.without_gc():
                    until = system.now_s() + seconds
                    await rig.calibrate(samples, random)
                    while system.now_s() < until:
                        await rig.calibrate(samples, random)
        return samples.distributions()

    return anyio.run(measure)


def compare_all(
    names: Sequence[str], seed: Seed, rounds: int, seconds: float, report: Callable[[str], None]
) -> list[Comparison]:
    """Run rounds of all set-ups in turns, so that other load of the machine affects all set-ups."""
    results: dict[str, list[Round]] = {name: [] for name in names}
    for number in range(rounds):
        for name in names:
            report(f"round {number + 1} of {rounds}: {name}")
            results[name].append(run_round(SET_UPS[name], seed.child(f"{name} {number}"), seconds))
    return [compare(name, SET_UPS[name].about, results[name]) for name in names]
