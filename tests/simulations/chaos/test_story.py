"""Runs of disasters: the same for a plan in every process, and what must not happen is told, not raised."""

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


def test_the_same_seed_does_the_same_in_processes_with_different_hash_seeds() -> None:
    told = []
    for hash_seed in ("1", "2"):
        environment = {"PYTHONPATH": ":".join(sys.path), "PYTHONHASHSEED": hash_seed}
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, check=True, timeout=60
        )
        told.append(done.stdout.decode().split())
    assert told[0] == told[1]
    assert len(set(told[0])) == 2
    assert run(draw(3)).trace == told[0][0]


def calm(number: int = 3) -> Plan:
    """A plan in which nothing strikes."""
    plan = draw(number)
    return replace(plan, strikes=(), network={})


def test_a_run_in_which_nothing_strikes_finds_nothing() -> None:
    outcome = run(calm())
    assert outcome.is_ok, outcome
    assert outcome.deltas >= 40
    assert outcome.struck["lives"] >= len(calm().nodes)


def test_a_run_that_did_nothing_is_vacuous() -> None:
    plan = calm()
    nobody = StrikePlan(10.0, "reset", "nobody")
    silent = tuple(replace(writer, deltas=0) for writer in plan.writers)
    assert run(replace(plan, writers=silent)).vacuous == "no delta was acknowledged"
    assert "no fault found a target" in str(run(replace(plan, strikes=(nobody,))).vacuous)


def test_what_falls_out_of_a_service_and_what_hangs_are_violations(monkeypatch) -> None:
    async def broken(*_args: object) -> None:
        raise ZeroDivisionError("by nobody")

    plan = calm()
    monkeypatch.setattr(Node, "attach", broken)
    violation = run(plan).violation
    assert violation is not None
    assert violation.check == "crash"
    assert "ZeroDivisionError: by nobody (chaos/test_story.py" in violation.what
    monkeypatch.undo()
    monkeypatch.setattr(Node, "waits_for", lambda _self: ["a node waits for Godot"])
    violation = run(plan).violation
    assert violation is not None
    assert violation.check == "progress"
    assert "Godot" in violation.what


def test_a_stopped_service_is_started_again_and_a_power_cut_comes_at_the_end() -> None:
    plan = calm()
    name = plan.nodes[0].name
    outcome = run(
        replace(
            plan,
            strikes=(StrikePlan(5.0, "stop", name, 1.0),),
            power_cut_at_end=plan.nodes[0].log is not None,
        )
    )
    assert outcome.is_ok, outcome
    assert outcome.struck["machine: ended"] >= 2
    assert outcome.struck["strike: stop"] == 1
