"""Runs many seeds on all cores, and sums up their findings and event counts.

The worker processes return only text and numbers, which are cheap to transfer.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from delta_prop_simulations.chaos.chaos_run import run
from delta_prop_simulations.chaos.plan_generator import draw
from delta_prop_simulations.processes import in_processes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from delta_prop_simulations.chaos.chaos_run import Outcome

SEEDS_PER_TASK = 5


@dataclass(frozen=True, slots=True)
class Finding:
    """A seed whose run found a violation, or tested nothing; then `check` is `vacuous`."""

    seed: int
    check: str
    what: str


@dataclass(slots=True)
class Summary:
    """The sum of the results of several runs; `delta_count`: the number of acknowledged deltas."""

    seed_count: int = 0
    delta_count: int = 0
    virtual_s: float = 0.0
    findings: list[Finding] = field(default_factory=list)
    event_counts: Counter[str] = field(default_factory=Counter)

    def add(self, outcome: Outcome) -> None:
        """Add one run."""
        self.seed_count += 1
        self.delta_count += outcome.delta_count
        self.virtual_s += outcome.virtual_s
        self.event_counts += outcome.event_counts
        if outcome.violation is not None:
            self.findings.append(Finding(outcome.seed, outcome.violation.check, outcome.violation.what))
        elif outcome.vacuous is not None:
            self.findings.append(Finding(outcome.seed, "vacuous", outcome.vacuous))

    def add_all(self, other: Summary) -> None:
        """Add the results of other runs."""
        self.seed_count += other.seed_count
        self.delta_count += other.delta_count
        self.virtual_s += other.virtual_s
        self.event_counts += other.event_counts
        self.findings = sorted([*self.findings, *other.findings], key=lambda finding: finding.seed)


def sweep(first: int, count: int, jobs: int) -> Iterator[Summary]:
    """Run `count` seeds from `first` on; yield the summary of each task of `SEEDS_PER_TASK` seeds as soon as
    it ends.
    """
    ranges = [
        range(start, min(start + SEEDS_PER_TASK, first + count))
        for start in range(first, first + count, SEEDS_PER_TASK)
    ]
    return in_processes((partial(run_seeds, seeds) for seeds in ranges), jobs)


def run_seeds(seeds: range) -> Summary:
    """Run these seeds in this process, and return their summary."""
    summary = Summary()
    for seed in seeds:
        summary.add(run(draw(seed)))
    return summary
