"""What can be calibrated, by name, and what is compared; and how both are done."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio

from delta_prop_simulations.calibration import edge, index, storage, subscriber
from delta_prop_simulations.calibration.comparison import compare
from delta_prop_simulations.calibration.laws import Samples
from delta_prop_simulations.calibration.plain import PLAIN
from delta_prop_simulations.calibration.rounds import one_round
from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from delta_prop_simulations.calibration.comparison import Comparison
    from delta_prop_simulations.calibration.driving import RealRig
    from delta_prop_simulations.calibration.laws import Law
    from delta_prop_simulations.calibration.rounds import Round, SetUp
    from delta_prop_simulations.chance import Seed

SET_UPS: dict[str, SetUp] = {one.name: one for one in (storage.SET_UP, index.SET_UP, subscriber.SET_UP)}
SINKS: dict[str, Callable[[Path], AbstractAsyncContextManager[RealRig]]] = {
    **{name: one.real for name, one in SET_UPS.items()},
    **PLAIN,
}


def chosen(names: str | None, known: Iterable[str]) -> list[str]:
    """The names in a list with commas, all where there is none. Raises UsageError."""
    known = list(known)
    wanted = known if names is None else [name.strip() for name in names.split(",")]
    for name in wanted:
        if name not in known:
            raise UsageError(f"--sinks {name}: there is no such sink here; there is {', '.join(known)}")
    return wanted


def calibrated(name: str, seed: Seed, seconds: float) -> Mapping[str, Law]:
    """The laws of one sink, measured for about so long."""

    async def measure() -> Mapping[str, Law]:
        samples, random = Samples(), seed.stream(name)
        with edge.folder() as folder:
            async with SINKS[name](folder) as rig:
                with edge.at_rest():
                    until = edge.now_s() + seconds
                    await rig.calibrate(samples, random)
                    while edge.now_s() < until:
                        await rig.calibrate(samples, random)
        return samples.laws()

    return anyio.run(measure)


def compared(
    names: Sequence[str], seed: Seed, rounds: int, seconds: float, tell: Callable[[str], None]
) -> list[Comparison]:
    """Rounds of all set-ups in turns, so that what the machine does meanwhile strikes all of them."""
    done: dict[str, list[Round]] = {name: [] for name in names}
    for at in range(rounds):
        for name in names:
            tell(f"round {at + 1} of {rounds}: {name}")
            done[name].append(one_round(SET_UPS[name], seed.child(f"{name} {at}"), seconds))
    return [compare(name, SET_UPS[name].about, done[name]) for name in names]
