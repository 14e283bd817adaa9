"""The sweep: what it prints and what it returns."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from delta_prop.cli import main
from delta_prop_simulations.chaos import sweep as sweep_module
from delta_prop_simulations.chaos.chaos_run import Outcome
from delta_prop_simulations.chaos.plan import Plan
from delta_prop_simulations.chaos.plan_generator import draw
from delta_prop_simulations.chaos.violation import Violation
from delta_prop_simulations.commands import mutants
from delta_prop_simulations.commands import sweep as command


def outcome(plan: Plan) -> Outcome:
    """Of a run that finds something at every seed that 5 divides, and does nothing at 7."""
    seed = plan.seed
    return Outcome(
        seed=seed,
        violation=None if seed % 5 else Violation("lost", f"delta {seed}"),
        vacuous="nothing" if seed == 7 else None,
        struck=Counter(kill=2),
        trace="abc",
        deltas=10,
        virtual_s=2.5,
        lines=("0.1 a", "0.2 b"),
    )


@pytest.fixture
def false_runs(monkeypatch) -> None:
    monkeypatch.setattr(sweep_module, "run", outcome)
    monkeypatch.setattr(command, "run_plan", outcome)


def test_a_sweep_tells_what_struck_what_was_found_and_how_to_see_it_again(false_runs, capsys) -> None:
    assert main(["simulate", "sweep", "--seeds", "9", "--first", "1", "--jobs", "1"]) == 1
    told = capsys.readouterr().out
    assert "kill          18" in told
    assert "seed 5: lost: delta 5" in told
    assert "promised: every acknowledged delta" in told
    assert "repeat: delta-prop simulate sweep --seed 5" in told
    assert "seed 7: vacuous: nothing" in told
    assert "9 seeds: 1 violations, 1 vacuous; 90 deltas acknowledged in 22 virtual seconds" in told
    assert main(["simulate", "sweep", "--seeds", "4", "--first", "1", "--jobs", "1", "--json"]) == 0
    told_json = json.loads(capsys.readouterr().out)
    assert told_json == {"seeds": 4, "deltas": 40, "virtual_s": 10.0, "found": [], "struck": {"kill": 8}}


@pytest.mark.parametrize(("what", "said"), [("sweep", "0 of 4 seeds"), ("mutants", "0 of 2")])
def test_a_terminal_is_told_at_once_what_runs(what, said, monkeypatch, capsys) -> None:
    """Before the first process has been started."""
    monkeypatch.setattr(command.system.sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")

    def none(*_):
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr(command, "sweep", none)
    monkeypatch.setattr(mutants, "in_processes", none)
    named = ["ack-one-off"] if what == "mutants" else []
    assert main(["simulate", what, *named, "--seeds", "4"]) == 130
    assert said in capsys.readouterr().err


def test_one_seed_is_shown_with_the_end_of_its_trace_and_its_plan_can_be_kept(
    false_runs, capsys, tmp_path
) -> None:
    assert main(["simulate", "sweep", "--seed", "5"]) == 1
    told = capsys.readouterr().out
    assert "0.2 b" in told
    assert "lost: delta 5" in told
    assert main(["simulate", "sweep", "--seed", "6", "--show"]) == 0
    text = capsys.readouterr().out
    assert Plan.from_json(text) == draw(6)
    (tmp_path / "plan.json").write_text(text)
    assert main(["simulate", "sweep", "--plan", str(tmp_path / "plan.json")]) == 0
    assert "no violation" in capsys.readouterr().out
    assert main(["simulate", "sweep", "--seeds", "0"]) == 2
    assert "--seeds 0: give at least 1" in capsys.readouterr().err
    assert main(["simulate", "sweep", "--show"]) == 2


@pytest.mark.parametrize(("end", "status"), [(KeyboardInterrupt(), 130), (SystemExit(143), 143)])
def test_who_breaks_it_off_is_told_what_was_found_until_then(
    end, status, false_runs, capsys, monkeypatch
) -> None:
    def broken_off(first: int, count: int, jobs: int):
        yield sweep_module.run_seeds(range(4, 6))
        raise end

    monkeypatch.setattr(command, "sweep", broken_off)
    assert main(["simulate", "sweep", "--jobs", "1"]) == status
    told = capsys.readouterr()
    assert "seed 5: lost" in told.out
    assert "2 seeds of 100, interrupted" in told.out
    assert told.err == ("interrupted\n" if status == 130 else "")
