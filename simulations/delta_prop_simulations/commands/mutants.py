"""`delta-prop simulate mutants`: tests that the checks find named faulty versions of the production code.

The unchanged program must break no promise, and each mutant must be found within the given number of seeds.
"""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial

from delta_prop.platform import system
from delta_prop_simulations.chaos.chaos_run import Outcome
from delta_prop_simulations.chaos.chaos_run import run as run_plan
from delta_prop_simulations.chaos.mutants.catalogue import MUTANTS
from delta_prop_simulations.chaos.mutants.mutant import apply_mutant
from delta_prop_simulations.chaos.plan import Plan
from delta_prop_simulations.chaos.plan_generator import draw
from delta_prop_simulations.processes import cores, in_processes
from delta_prop_wire.errors import UsageError

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
        return run_plan(plan), 0
    with apply_mutant(MUTANTS[mutant]) as calls:
        return run_plan(plan), calls.count


_EVIDENCE_MAX = 60
_SEEDS_PER_TASK = 25
"""Number of seeds of the unchanged program that a process runs at a time."""


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options."""
    parser.description = (
        "Puts named faults into the running code, one at a time, and runs seeds until a check finds each. "
        "Exit status 1 if one is not found, or the unchanged program breaks a promise."
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these mutants (default: all)")
    parser.add_argument("--seeds", type=int, default=SEEDS_MAX, metavar="N", help="maximum seeds per mutant")
    parser.add_argument("--jobs", type=int, default=cores(), metavar="J", help="processes (default: cores)")
    parser.add_argument("--list", action="store_true", help="describe each mutant, and run none")
    parser.add_argument("--json", action="store_true", help="print the outcome as JSON")


def run(options: Namespace) -> int:
    """Hunt the mutants; return 1 if one is not found, or the unchanged program fails."""
    if options.list:
        for mutant in MUTANTS.values():
            print(f"{mutant.name}: {mutant.what}; promised: {mutant.promise}")
        return 0
    names = select_mutants(options.names)
    results = list(_run_hunts(names, options.seeds, options.jobs))
    unchanged = join_hunts(one for one in results if one.mutant is None)
    hunts = sorted((one for one in results if one.mutant), key=lambda one: names.index(one.mutant or ""))
    if options.json:
        print(json.dumps([asdict(one) for one in (unchanged, *hunts)], indent=1))
    else:
        print("\n".join(format_table([unchanged, *hunts])))
    return int(unchanged.is_found or not all(one.is_found for one in hunts))


def select_mutants(names: Sequence[str]) -> list[str]:
    """Return the selected mutants, in order; all if no name is given. Raises UsageError."""
    for name in names:
        if name not in MUTANTS:
            raise UsageError(f"{name}: unknown mutant: give one of --list")
    return [name for name in MUTANTS if not names or name in names]


def _run_hunts(names: Sequence[str], seeds: int, jobs: int) -> Iterator[Hunt]:
    tasks = [partial(hunt, name, range(seeds)) for name in names]
    for start in range(0, seeds, _SEEDS_PER_TASK):
        tasks.append(partial(hunt, None, range(start, min(start + _SEEDS_PER_TASK, seeds))))
    progress = system.Progress()
    try:
        progress.report(f"0 of {len(tasks)} hunts")
        for done, one in enumerate(in_processes(tasks, jobs), 1):
            progress.report(f"{done} of {len(tasks)} hunts")
            yield one
    finally:
        progress.end()


def join_hunts(parts: Iterable[Hunt]) -> Hunt:
    """Join the results of one program for several ranges of seeds."""
    parts = list(parts)
    first = min(
        (one for one in parts if one.is_found), key=lambda one: one.seed or 0, default=Hunt(None, 0, 0)
    )
    tried, reached = sum(one.tried for one in parts), sum(one.reached for one in parts)
    return Hunt(first.mutant, tried, reached, first.seed, first.check, first.evidence)


def format_table(hunts: Sequence[Hunt]) -> list[str]:
    """Return a table in Markdown, which is readable in a terminal, too."""
    width = max(len(one.mutant or "the unchanged program") for one in hunts)
    lines = [f"{'mutant':{width}}  {'seeds':>5}  {'check':10}  evidence"]
    return lines + [_line(one, width) for one in hunts]


def _line(result: Hunt, width: int) -> str:
    name = result.mutant or "the unchanged program"
    if result.is_found:
        evidence = f"seed {result.seed}: {result.evidence[:_EVIDENCE_MAX]}"
    elif result.mutant is None:
        evidence = f"0 of {result.tried} seeds break a promise"
    elif result.reached:
        evidence = f"not found; {result.reached} seeds ran its code"
    else:
        evidence = "never reached"
    return f"{name:{width}}  {result.tried:5}  {result.check or '-':10}  {evidence}"
