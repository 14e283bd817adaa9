"""Shrinks a plan whose run found a violation, as long as the smaller plan's run finds the same violation."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from delta_prop_simulations.chaos.chaos_run import run
from delta_prop_simulations.chaos.plan import Plan
from delta_prop_simulations.chaos.plan_validation import check_plan
from delta_prop_simulations.chaos.shrink import RUNS_MAX, shrink
from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from delta_prop_simulations.chaos.shrink import JsonValue
    from delta_prop_simulations.chaos.violation import Violation

_ERROR = re.compile(r"\b([A-Z]\w+): ")
"""Finds the types of the errors in the evidence of a crash."""


def shrink_plan(
    plan: Plan,
    violation: Violation,
    *,
    runs_max: int = RUNS_MAX,
    report: Callable[[int, Plan], None] = lambda runs, plan: None,
) -> Plan:
    """Shrink the plan of a run that found `violation`. `report` is called with the number of runs so far and
    the smaller plan.
    """
    run_count = 0

    def fails(data: JsonValue) -> bool | None:
        nonlocal run_count
        try:
            proposal = Plan.from_json(json.dumps(data))
            check_plan(proposal)
        except UsageError:
            return None
        run_count += 1
        proposal_violation = run(proposal).violation
        if proposal_violation is None or not is_same_violation(proposal_violation, violation):
            return False
        report(run_count, proposal)
        return True

    shrunk = shrink(
        json.loads(plan.to_json()), fails, runs_max=runs_max, fixed=("seed", "name", "node", "on")
    )
    return Plan.from_json(json.dumps(shrunk.data))


def is_same_violation(one: Violation, other: Violation) -> bool:
    """True if two violations are of the same check; two crashes must also have the same error type."""
    if one.check != other.check:
        return False
    return one.check != "crash" or _ERROR.findall(one.what)[:1] == _ERROR.findall(other.what)[:1]
