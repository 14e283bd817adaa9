"""`delta-prop simulate sweep`: many runs of disasters, or one of them looked at closely.

Exit status 1 where any found something, or did nothing; one that is broken off tells what it has, and ends
with the status of the signal.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from delta_prop.commands import edge
from delta_prop_simulations.disasters.drawing import draw
from delta_prop_simulations.disasters.plan import Plan
from delta_prop_simulations.disasters.smaller import smaller
from delta_prop_simulations.disasters.sound import check_plan
from delta_prop_simulations.disasters.story import run as run_plan
from delta_prop_simulations.disasters.sweep import Summary, sweep
from delta_prop_simulations.disasters.violation import CHECKS
from delta_prop_simulations.files import read_text, write_text
from delta_prop_simulations.processes import cores
from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from delta_prop_simulations.disasters.story import Outcome

_FOUND_TOLD_MAX = 20
_LINES_TOLD = 60


def add_arguments(parser: ArgumentParser) -> None:
    """What can be said."""
    parser.description = (
        "Runs the service under faults drawn from seeds: killed processes, power cuts, failing disks, cut "
        "networks, failing sinks. What was promised is checked all the while, and once all is well again."
    )
    parser.add_argument("--seeds", type=int, default=100, metavar="N", help="how many runs (default: 100)")
    parser.add_argument("--first", type=int, default=0, metavar="K", help="the first seed (default: 0)")
    parser.add_argument("--seed", type=int, metavar="S", help="this one alone, with what happened last")
    parser.add_argument("--plan", metavar="FILE", help="the plan in this file alone, with what happened last")
    parser.add_argument("--show", action="store_true", help="with --seed: print its plan, and run nothing")
    parser.add_argument(
        "--shrink",
        metavar="FILE",
        help="with --seed or --plan, where that finds something: make the plan smaller while it still does, "
        "and write it here, for --plan",
    )
    parser.add_argument("--jobs", type=int, metavar="J", help="processes (default: one a core)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(options: Namespace) -> int:
    """Do it; 1 where anything was found."""
    for name, least in (("seeds", 1), ("first", 0), ("jobs", 1), ("seed", 0)):
        value = getattr(options, name)
        if value is not None and value < least:
            raise UsageError(f"--{name} {value}: give at least {least}")
    if options.show and options.seed is None:
        raise UsageError("--show prints the plan of one seed: name it with --seed")
    if options.seed is None and options.plan is None:
        if options.shrink is not None:
            raise UsageError("--shrink makes one plan smaller: name it with --seed or --plan")
        return _run_many(options)
    plan = draw(options.seed) if options.plan is None else _plan_in(options.plan)
    if options.show:
        edge.put(plan.to_json())
        return 0
    if options.shrink is not None:
        plan = _shrunk(plan, options.shrink)
    return _run_one(plan, as_json=options.json)


# --- many


def _plan_in(path: str) -> Plan:
    """The plan of a file, which can be carried out. Raises UsageError."""
    text = read_text(path)
    try:
        plan = Plan.from_json(text)
        check_plan(plan)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None
    return plan


def _run_many(options: Namespace) -> int:
    summary, progress = Summary(), edge.Progress()
    try:
        progress.tell(f"0 of {options.seeds:,} seeds")
        for part in sweep(options.first, options.seeds, options.jobs or cores()):
            summary.add_all(part)
            progress.tell(
                f"{summary.seeds:,} of {options.seeds:,} seeds, {summary.deltas:,} deltas, "
                f"{len(summary.found)} found"
            )
    finally:  # of a sweep that is broken off too
        progress.end()
        lines = [json.dumps(_as_json(summary))] if options.json else _told(summary, options.seeds)
        edge.put_all(iter(lines))
    return int(bool(summary.found))


def _told(summary: Summary, wanted: int) -> list[str]:
    width = max((len(what) for what in summary.struck), default=0)
    lines = [f"{what:<{width}}  {count:>10,}" for what, count in sorted(summary.struck.items())]
    lines.append("")
    for found in summary.found[:_FOUND_TOLD_MAX]:
        lines.append(f"seed {found.seed}: {found.check}: {found.what}")
        if (promise := CHECKS.get(found.check)) is not None:
            lines.append(f"  promised: {promise}")
        lines.append(f"  again: delta-prop simulate sweep --seed {found.seed}")
    if (more := len(summary.found) - _FOUND_TOLD_MAX) > 0:
        lines.append(
            f"and {more} more: " + " ".join(str(one.seed) for one in summary.found[_FOUND_TOLD_MAX:])
        )
    vacuous = sum(found.check == "vacuous" for found in summary.found)
    of = "" if summary.seeds == wanted else f" of {wanted:,}, broken off"
    lines.append(
        f"{summary.seeds:,} seeds{of}: {len(summary.found) - vacuous} violations, {vacuous} vacuous; "
        f"{summary.deltas:,} deltas acknowledged in {summary.virtual_s:,.0f} virtual seconds"
    )
    return lines


def _as_json(summary: Summary) -> dict[str, Any]:
    return {
        "seeds": summary.seeds,
        "deltas": summary.deltas,
        "virtual_s": summary.virtual_s,
        "found": [{"seed": one.seed, "check": one.check, "what": one.what} for one in summary.found],
        "struck": dict(sorted(summary.struck.items())),
    }


# --- one


def _run_one(plan: Plan, *, as_json: bool) -> int:
    outcome = run_plan(plan)
    if as_json:
        summary = Summary()
        summary.add(outcome)
        edge.put(json.dumps({**_as_json(summary), "trace": outcome.trace, "lines": outcome.lines}))
    else:
        for line in outcome.lines[-_LINES_TOLD:]:
            edge.put(line)
        edge.put("")
        edge.put(_verdict(outcome))
        edge.put(
            f"{outcome.deltas:,} deltas in {outcome.virtual_s:,.1f} virtual seconds, trace {outcome.trace}"
        )
    return 0 if outcome.ok else 1


def _verdict(outcome: Outcome) -> str:
    if outcome.violation is not None:
        violation = outcome.violation
        return f"{violation.check}: {violation.what}\npromised: {CHECKS[violation.check]}"
    return "no violation" if outcome.vacuous is None else f"vacuous: {outcome.vacuous}"


def _shrunk(plan: Plan, path: str) -> Plan:
    """The smallest plan that was found, written to a file; the same where its run finds nothing."""
    found = run_plan(plan).violation
    if found is None:
        return plan
    progress = edge.Progress()
    whole = len(plan.to_json())

    def tell(runs: int, smaller_one: Plan) -> None:
        progress.tell(f"{runs} runs: {100 * len(smaller_one.to_json()) // whole} % of the plan")

    try:
        plan = smaller(plan, found, tell=tell)
    finally:
        progress.end()
    write_text(path, plan.to_json())
    return plan
