"""A plan whose run breaks a promise, made smaller while a run still breaks the same one."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from delta_prop_simulations.disasters.plan import Plan
from delta_prop_simulations.disasters.shrink import RUNS_MAX, shrink
from delta_prop_simulations.disasters.sound import check_plan
from delta_prop_simulations.disasters.story import run
from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from delta_prop_simulations.disasters.shrink import Plain
    from delta_prop_simulations.disasters.violation import Violation

_ERROR = re.compile(r"\b([A-Z]\w+): ")
"""In the evidence of a crash: what was raised."""


def smaller(
    plan: Plan,
    broken: Violation,
    *,
    runs_max: int = RUNS_MAX,
    tell: Callable[[int, Plan], None] = lambda runs, plan: None,
) -> Plan:
    """Make the plan of a run that found `broken` smaller. `tell` hears of each smaller one, and after how
    many runs it was found.
    """
    runs = 0

    def fails(told: Plain) -> bool | None:
        nonlocal runs
        try:
            proposal = Plan.from_json(json.dumps(told))
            check_plan(proposal)
        except UsageError:
            return None
        runs += 1
        found = run(proposal).violation
        if found is None or not same(found, broken):
            return False
        tell(runs, proposal)
        return True

    shrunk = shrink(json.loads(plan.to_json()), fails, runs_max=runs_max, kept=("seed", "name", "node", "on"))
    return Plan.from_json(json.dumps(shrunk.data))


def same(one: Violation, other: Violation) -> bool:
    """Whether two runs break the same promise; of crashes, whether they end with the same error."""
    if one.check != other.check:
        return False
    return one.check != "crash" or _ERROR.findall(one.what)[:1] == _ERROR.findall(other.what)[:1]
