"""Chaos runs: equal traces for equal plans in every process; crashes and hangs are reported as violations."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

from delta_prop_simulations.chaos.chaos_run import run
from delta_prop_simulations.chaos.node import Node
from delta_prop_simulations.chaos.plan import Plan, StrikePlan
from delta_prop_simulations.chaos.plan_generator import draw

PROGRAM = """
from delta_prop_simulations.chaos.plan_generator import draw
from delta_prop_simulations.chaos.chaos_run import run
for seed in (3, 5):
    print(run(draw(seed)).trace)
"""


def test_same_seed_gives_same_trace_for_any_hash_seed() -> None:
    traces = []
    for hash_seed in ("1", "2"):
        environment = {"PYTHONPATH": ":".join(sys.path), "PYTHONHASHSEED": hash_seed}
        completed = subprocess.run(
            [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, check=True, timeout=60
        )
        traces.append(completed.stdout.decode().split())
    assert traces[0] == traces[1]
    assert len(set(traces[0])) == 2
    assert run(draw(3)).trace == traces[0][0]


def calm_plan(seed: int = 3) -> Plan:
    """Return a plan without strikes."""
    plan = draw(seed)
    return replace(plan, strikes=(), network={})


def test_run_without_strikes_finds_nothing() -> None:
    outcome = run(calm_plan())
    assert outcome.is_ok, outcome
    assert outcome.delta_count >= 40
    assert outcome.event_counts["processes started"] >= len(calm_plan().nodes)


def test_run_without_deltas_or_without_a_fault_that_hits_is_vacuous() -> None:
    plan = calm_plan()
    strike_without_target = StrikePlan(10.0, "reset", "nobody")
    silent_writers = tuple(replace(writer, deltas=0) for writer in plan.writers)
    assert run(replace(plan, writers=silent_writers)).vacuous == "no delta was acknowledged"
    assert "no fault found a target" in str(run(replace(plan, strikes=(strike_without_target,))).vacuous)


def test_service_crash_and_hang_are_violations(monkeypatch) -> None:
    async def fail_to_attach(*_args: object) -> None:
        raise ZeroDivisionError("by nobody")

    plan = calm_plan()
    monkeypatch.setattr(Node, "attach", fail_to_attach)
    violation = run(plan).violation
    assert violation is not None
    assert violation.check == "crash"
    assert "ZeroDivisionError: by nobody (chaos/test_chaos_run.py" in violation.what
    monkeypatch.undo()
    monkeypatch.setattr(Node, "waits_for", lambda _self: ["a node waits for Godot"])
    violation = run(plan).violation
    assert violation is not None
    assert violation.check == "progress"
    assert "Godot" in violation.what


def test_stopped_service_restarts_before_final_power_cut() -> None:
    plan = calm_plan()
    name = plan.nodes[0].name
    outcome = run(
        replace(
            plan,
            strikes=(StrikePlan(5.0, "stop", name, 1.0),),
            power_cut_at_end=plan.nodes[0].log is not None,
        )
    )
    assert outcome.is_ok, outcome
    assert outcome.event_counts["machine: ended"] >= 2
    assert outcome.event_counts["strike: stop"] == 1
