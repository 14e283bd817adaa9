"""Runs seeds until a mutant is found: a run in which the wrong code ran, and a promise was broken."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from delta_prop_simulations.disasters.drawing import draw
from delta_prop_simulations.disasters.mutants import MUTANTS, applied
from delta_prop_simulations.disasters.story import run

if TYPE_CHECKING:
    from collections.abc import Iterable

    from delta_prop_simulations.disasters.plan import Plan
    from delta_prop_simulations.disasters.story import Outcome

SEEDS_MAX = 500


@dataclass(frozen=True, slots=True)
class Hunt:
    """What became of one mutant; of the right program where `mutant` is None.

    `tried`: how many seeds were run; `reached`: in how many of them the wrong code ran. `seed`, `check` and
    `evidence` are of the first run that broke a promise, None and empty where none did.
    """

    mutant: str | None
    tried: int
    reached: int
    seed: int | None = None
    check: str = ""
    evidence: str = ""

    @property
    def found(self) -> bool:
        """Whether some run broke a promise."""
        return self.seed is not None


def hunt(mutant: str | None, seeds: Iterable[int]) -> Hunt:
    """Run these seeds, in their order, until one breaks a promise."""
    tried = reached = 0
    for seed in seeds:
        outcome, strikes = run_wrong(mutant, draw(seed))
        tried += 1
        reached += strikes > 0
        broken = outcome.violation
        if broken is not None and (strikes or mutant is None):
            return Hunt(mutant, tried, reached, seed, broken.check, broken.what)
    return Hunt(mutant, tried, reached)


def run_wrong(mutant: str | None, plan: Plan) -> tuple[Outcome, int]:
    """One run, and how often the wrong code ran in it."""
    if mutant is None:
        return run(plan), 0
    with applied(MUTANTS[mutant]) as strikes:
        return run(plan), strikes.count
