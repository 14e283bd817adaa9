"""Many seeds, one after the other, on all cores: what they found, and counts of all that struck.

Only texts and numbers come out of the processes.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from delta_prop_simulations.disasters.drawing import draw
from delta_prop_simulations.disasters.story import run
from delta_prop_simulations.processes import in_processes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from delta_prop_simulations.disasters.story import Outcome

SEEDS_A_PIECE = 5


@dataclass(frozen=True, slots=True)
class Found:
    """A seed whose run found something, or did nothing (`check` is `vacuous` then)."""

    seed: int
    check: str
    what: str


@dataclass(slots=True)
class Summary:
    """What some runs came to."""

    seeds: int = 0
    deltas: int = 0
    virtual_s: float = 0.0
    found: list[Found] = field(default_factory=list)
    struck: Counter[str] = field(default_factory=Counter)

    def add(self, outcome: Outcome) -> None:
        """One run more."""
        self.seeds += 1
        self.deltas += outcome.deltas
        self.virtual_s += outcome.virtual_s
        self.struck += outcome.struck
        if outcome.violation is not None:
            self.found.append(Found(outcome.seed, outcome.violation.check, outcome.violation.what))
        elif outcome.vacuous is not None:
            self.found.append(Found(outcome.seed, "vacuous", outcome.vacuous))

    def add_all(self, other: Summary) -> None:
        """All that other runs came to."""
        self.seeds += other.seeds
        self.deltas += other.deltas
        self.virtual_s += other.virtual_s
        self.struck += other.struck
        self.found = sorted([*self.found, *other.found], key=lambda found: found.seed)


def sweep(first: int, count: int, jobs: int) -> Iterator[Summary]:
    """Run so many seeds; some runs' summary as soon as it is there."""
    pieces = [
        range(begin, min(begin + SEEDS_A_PIECE, first + count))
        for begin in range(first, first + count, SEEDS_A_PIECE)
    ]
    return in_processes((partial(run_seeds, piece) for piece in pieces), jobs)


def run_seeds(seeds: range) -> Summary:
    """Run these seeds here."""
    summary = Summary()
    for seed in seeds:
        summary.add(run(draw(seed)))
    return summary
