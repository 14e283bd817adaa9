"""Runs seeds until a mutant is found: until a run that calls the mutated code breaks a promise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from delta_prop_simulations.chaos.chaos_run import run
from delta_prop_simulations.chaos.mutants import MUTANTS, apply_mutant
from delta_prop_simulations.chaos.plan_generator import draw

if TYPE_CHECKING:
    from collections.abc import Iterable

    from delta_prop_simulations.chaos.chaos_run import Outcome
    from delta_prop_simulations.chaos.plan import Plan

SEEDS_MAX = 500


@dataclass(frozen=True, slots=True)
class Hunt:
    """The result for one mutant; for the unchanged program if `mutant` is None.

    `tried`: the number of seeds that were run; `reached`: the number of seeds whose run called the mutated
    code. `seed`, `check`, `evidence`: of the first run that broke a promise; None and empty if no run did.
    """

    mutant: str | None
    tried: int
    reached: int
    seed: int | None = None
    check: str = ""
    evidence: str = ""

    @property
    def is_found(self) -> bool:
        """True if a run broke a promise."""
        return self.seed is not None


def hunt(mutant: str | None, seeds: Iterable[int]) -> Hunt:
    """Run these seeds in order until one breaks a promise."""
    tried = reached = 0
    for seed in seeds:
        outcome, call_count = run_mutant(mutant, draw(seed))
        tried += 1
        reached += call_count > 0
        broken = outcome.violation
        if broken is not None and (call_count or mutant is None):
            return Hunt(mutant, tried, reached, seed, broken.check, broken.what)
    return Hunt(mutant, tried, reached)


def run_mutant(mutant: str | None, plan: Plan) -> tuple[Outcome, int]:
    """Run one plan; also return the number of calls of the mutated code."""
    if mutant is None:
        return run(plan), 0
    with apply_mutant(MUTANTS[mutant]) as calls:
        return run(plan), calls.count
