"""`delta-prop simulate sweep`: does many runs with drawn faults, or one of them in detail.

The exit status is 1 if any run found a violation, or tested nothing. An interrupted sweep prints its results
so far, and exits with the status of the signal.
"""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from delta_prop.platform import system
from delta_prop_simulations.chaos.chaos_run import Outcome
from delta_prop_simulations.chaos.chaos_run import run as run_plan
from delta_prop_simulations.chaos.plan import Plan, check_plan
from delta_prop_simulations.chaos.plan_generator import draw
from delta_prop_simulations.chaos.shrink import shrink_plan
from delta_prop_simulations.chaos.violation import CHECKS
from delta_prop_simulations.files import read_text, write_text
from delta_prop_simulations.processes import cores, in_processes
from delta_prop_wire.errors import UsageError

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
    """Run `count` seeds from `first` on; yield the summary of each task as soon as it ends."""
    ranges = [
        range(start, min(start + SEEDS_PER_TASK, first + count))
        for start in range(first, first + count, SEEDS_PER_TASK)
    ]
    return in_processes((partial(run_seeds, seeds) for seeds in ranges), jobs)


def run_seeds(seeds: range) -> Summary:
    """Run these seeds in this process, and return their summary."""
    summary = Summary()
    for seed in seeds:
        summary.add(run_plan(draw(seed)))
    return summary


_FINDINGS_SHOWN_MAX = 20
_LINES_SHOWN = 60


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options."""
    parser.description = (
        "Runs the service under faults drawn from seeds: killed processes, power cuts, failing disks, cut "
        "networks, failing sinks. All promises are checked during each run, and once more after healing."
    )
    parser.add_argument("--seeds", type=int, default=100, metavar="N", help="number of runs (default: 100)")
    parser.add_argument("--first", type=int, default=0, metavar="K", help="the first seed (default: 0)")
    parser.add_argument("--seed", type=int, metavar="S", help="only this one, with its last events")
    parser.add_argument("--plan", metavar="FILE", help="only the plan in this file, with its last events")
    parser.add_argument("--show", action="store_true", help="with --seed: print its plan, and run nothing")
    parser.add_argument(
        "--shrink",
        metavar="FILE",
        help="with --seed or --plan: if the run finds a violation, write to FILE the smallest plan found "
        "that still has it; --plan FILE runs it",
    )
    parser.add_argument("--jobs", type=int, metavar="J", help="processes (default: one per core)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(options: Namespace) -> int:
    """Run the sweep, or one plan; return 1 if a violation was found."""
    for name, minimum in (("seeds", 1), ("first", 0), ("jobs", 1), ("seed", 0)):
        value = getattr(options, name)
        if value is not None and value < minimum:
            raise UsageError(f"--{name} {value}: give at least {minimum}")
    if options.show and options.seed is None:
        raise UsageError("--show: prints the plan of one seed: add --seed")
    if options.seed is None and options.plan is None:
        if options.shrink is not None:
            raise UsageError("--shrink: shrinks one plan: add --seed or --plan")
        return _run_sweep(options)
    plan = draw(options.seed) if options.plan is None else _read_plan(options.plan)
    if options.show:
        system.put(plan.to_json())
        return 0
    if options.shrink is not None:
        plan = _shrink(plan, options.shrink)
    return _run_one_plan(plan, as_json=options.json)


def _read_plan(path: str) -> Plan:
    """Return the plan in a file. Raises UsageError if it cannot be run."""
    text = read_text(path)
    try:
        plan = Plan.from_json(text)
        check_plan(plan)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None
    return plan


def _run_sweep(options: Namespace) -> int:
    summary, progress = Summary(), system.Progress()
    try:
        progress.report(f"0 of {options.seeds:,} seeds")
        for part in sweep(options.first, options.seeds, options.jobs or cores()):
            summary.add_all(part)
            progress.report(
                f"{summary.seed_count:,} of {options.seeds:,} seeds, {summary.delta_count:,} deltas, "
                f"{len(summary.findings)} found"
            )
    finally:  # an interrupted sweep prints its results, too
        progress.end()
        lines = [json.dumps(_as_json(summary))] if options.json else _format_summary(summary, options.seeds)
        system.put_all(iter(lines))
    return int(bool(summary.findings))


def _format_summary(summary: Summary, seed_count: int) -> list[str]:
    width = max((len(event) for event in summary.event_counts), default=0)
    lines = [f"{event:<{width}}  {count:>10,}" for event, count in sorted(summary.event_counts.items())]
    lines.append("")
    for finding in summary.findings[:_FINDINGS_SHOWN_MAX]:
        lines.append(f"seed {finding.seed}: {finding.check}: {finding.what}")
        if (promise := CHECKS.get(finding.check)) is not None:
            lines.append(f"  promised: {promise}")
        lines.append(f"  repeat: delta-prop simulate sweep --seed {finding.seed}")
    if (more := len(summary.findings) - _FINDINGS_SHOWN_MAX) > 0:
        lines.append(
            f"and {more} more: " + " ".join(str(one.seed) for one in summary.findings[_FINDINGS_SHOWN_MAX:])
        )
    vacuous = sum(finding.check == "vacuous" for finding in summary.findings)
    note = "" if summary.seed_count == seed_count else f" of {seed_count:,}, interrupted"
    lines.append(
        f"{summary.seed_count:,} seeds{note}: {len(summary.findings) - vacuous} violations, "
        f"{vacuous} vacuous; {summary.delta_count:,} deltas acknowledged in "
        f"{summary.virtual_s:,.0f} virtual seconds"
    )
    return lines


def _as_json(summary: Summary) -> dict[str, Any]:
    return {
        "seeds": summary.seed_count,
        "deltas": summary.delta_count,
        "virtual_s": summary.virtual_s,
        "found": [{"seed": one.seed, "check": one.check, "what": one.what} for one in summary.findings],
        "event_counts": dict(sorted(summary.event_counts.items())),
    }


def _run_one_plan(plan: Plan, *, as_json: bool) -> int:
    outcome = run_plan(plan)
    if as_json:
        summary = Summary()
        summary.add(outcome)
        system.put(json.dumps({**_as_json(summary), "trace": outcome.trace, "lines": outcome.lines}))
    else:
        for line in outcome.lines[-_LINES_SHOWN:]:
            system.put(line)
        system.put("")
        system.put(_verdict(outcome))
        system.put(
            f"{outcome.delta_count:,} deltas in {outcome.virtual_s:,.1f} virtual seconds, "
            f"trace {outcome.trace}"
        )
    return 0 if outcome.is_ok else 1


def _verdict(outcome: Outcome) -> str:
    if outcome.violation is not None:
        violation = outcome.violation
        return f"{violation.check}: {violation.what}\npromised: {CHECKS[violation.check]}"
    return "no violation" if outcome.vacuous is None else f"vacuous: {outcome.vacuous}"


def _shrink(plan: Plan, path: str) -> Plan:
    """Shrink a plan into a file, and return it; the plan itself if its run finds no violation."""
    violation = run_plan(plan).violation
    if violation is None:
        return plan
    progress = system.Progress()
    full_size = len(plan.to_json())

    def report(runs: int, smaller: Plan) -> None:
        progress.report(f"{runs} runs: {100 * len(smaller.to_json()) // full_size} % of the plan")

    try:
        plan = shrink_plan(plan, violation, report=report)
    finally:
        progress.end()
    write_text(path, plan.to_json())
    return plan
