"""A failing plan is shrunk while its run breaks the same promise, and its file can be run."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from delta_prop_simulations.chaos import shrink as shrinker_module
from delta_prop_simulations.chaos.chaos_run import Outcome
from delta_prop_simulations.chaos.plan import Plan
from delta_prop_simulations.chaos.plan_generator import draw
from delta_prop_simulations.chaos.shrink import is_same_violation, shrink_plan
from delta_prop_simulations.chaos.violation import Violation
from delta_prop_simulations.commands import dispatch
from delta_prop_simulations.commands import sweep as command

if TYPE_CHECKING:
    from pathlib import Path

LOST = Violation("lost", "writer-0's delta 7")


def fake_run(plan: Plan) -> Outcome:
    """Return the outcome of a service that loses a delta if a strike kills it while there are writers."""
    has_kill = any(strike.kind == "kill" for strike in plan.strikes) and plan.writers
    other = Violation("state", "another promise") if len(plan.strikes) == 2 else None
    violation = LOST if has_kill else other
    return Outcome(plan.seed, violation, None, {}, "", 1, 1.0)  # type: ignore[arg-type]


@pytest.fixture
def plan_with_kill(monkeypatch: pytest.MonkeyPatch) -> Plan:
    monkeypatch.setattr(shrinker_module, "run", fake_run)
    monkeypatch.setattr(command, "run_plan", fake_run)
    plans = (draw(seed) for seed in range(200))
    return next(
        plan for plan in plans if any(strike.kind == "kill" for strike in plan.strikes) and plan.readers
    )


def test_shrunk_plan_keeps_only_what_breaks_the_promise(plan_with_kill: Plan) -> None:
    reported_runs: list[int] = []
    plan = shrink_plan(plan_with_kill, LOST, report=lambda runs, _: reported_runs.append(runs))
    assert [strike.kind for strike in plan.strikes] == ["kill"]
    assert (len(plan.writers), plan.readers, plan.seed) == (1, (), plan_with_kill.seed)
    assert reported_runs == sorted(reported_runs)
    assert len(plan.to_json()) < len(plan_with_kill.to_json()) / 3


def test_other_promise_or_error_is_another_violation() -> None:
    assert is_same_violation(LOST, Violation("lost", "writer-1's delta 9"))
    assert not is_same_violation(LOST, Violation("state", LOST.what))
    crash = Violation("crash", "node-0, life 2: LogCorrupted: corruption in a file")
    assert is_same_violation(crash, Violation("crash", "node-1, life 3: LogCorrupted: corruption in another"))
    assert not is_same_violation(crash, Violation("crash", "node-0, life 2: TypeError: corruption in a file"))


def test_command_writes_shrunk_plan_to_given_path(
    plan_with_kill: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "small.json"
    assert dispatch("sweep", ["--seed", str(plan_with_kill.seed), "--shrink", str(path)]) == 1
    assert "lost: writer-0's delta 7" in capsys.readouterr().out
    assert len(json.loads(path.read_text())["strikes"]) == 1
    assert dispatch("sweep", ["--plan", str(path)]) == 1
    harmless = replace(plan_with_kill, strikes=())
    path.write_text(harmless.to_json())
    assert dispatch("sweep", ["--plan", str(path), "--shrink", str(tmp_path / "none.json")]) == 0
    assert not (tmp_path / "none.json").exists()
