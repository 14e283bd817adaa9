"""The sweep: its printed lines and its exit status."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from delta_prop.cli import main
from delta_prop_simulations.chaos.chaos_run import Outcome
from delta_prop_simulations.chaos.plan import Plan
from delta_prop_simulations.chaos.plan_generator import draw
from delta_prop_simulations.chaos.violation import Violation
from delta_prop_simulations.commands import mutants
from delta_prop_simulations.commands import sweep as command


def fake_outcome(plan: Plan) -> Outcome:
    """Return the outcome of a run: a violation at seeds divisible by 5, vacuous at seed 7."""
    seed = plan.seed
    return Outcome(
        seed=seed,
        violation=None if seed % 5 else Violation("lost", f"delta {seed}"),
        vacuous="nothing" if seed == 7 else None,
        event_counts=Counter(kill=2),
        trace="abc",
        delta_count=10,
        virtual_s=2.5,
        lines=("0.1 a", "0.2 b"),
    )


@pytest.fixture
def fake_runs(monkeypatch) -> None:
    monkeypatch.setattr(command, "run_plan", fake_outcome)


def test_sweep_prints_strikes_violations_and_rerun_command(fake_runs, capsys) -> None:
    assert main(["simulate", "sweep", "--seeds", "9", "--first", "1", "--jobs", "1"]) == 1
    printed = capsys.readouterr().out
    assert "kill          18" in printed
    assert "seed 5: lost: delta 5" in printed
    assert "promised: every acknowledged delta" in printed
    assert "repeat: delta-prop simulate sweep --seed 5" in printed
    assert "seed 7: vacuous: nothing" in printed
    assert "9 seeds: 1 violations, 1 vacuous; 90 deltas acknowledged in 22 virtual seconds" in printed
    assert main(["simulate", "sweep", "--seeds", "4", "--first", "1", "--jobs", "1", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary == {"seeds": 4, "deltas": 40, "virtual_s": 10.0, "found": [], "event_counts": {"kill": 8}}


@pytest.mark.parametrize(("what", "progress"), [("sweep", "0 of 4 seeds"), ("mutants", "0 of 2")])
def test_terminal_shows_progress_before_first_result(what, progress, monkeypatch, capsys) -> None:
    """The interrupt comes before the first process is started."""
    monkeypatch.setattr(command.system.sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")

    def interrupt(*_):
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr(command, "sweep", interrupt)
    monkeypatch.setattr(mutants, "in_processes", interrupt)
    mutant_names = ["ack-one-off"] if what == "mutants" else []
    assert main(["simulate", what, *mutant_names, "--seeds", "4"]) == 130
    assert progress in capsys.readouterr().err


def test_single_seed_prints_end_of_trace_and_its_plan(fake_runs, capsys, tmp_path) -> None:
    assert main(["simulate", "sweep", "--seed", "5"]) == 1
    printed = capsys.readouterr().out
    assert "0.2 b" in printed
    assert "lost: delta 5" in printed
    assert main(["simulate", "sweep", "--seed", "6", "--show"]) == 0
    text = capsys.readouterr().out
    assert Plan.from_json(text) == draw(6)
    (tmp_path / "plan.json").write_text(text)
    assert main(["simulate", "sweep", "--plan", str(tmp_path / "plan.json")]) == 0
    assert "no violation" in capsys.readouterr().out
    assert main(["simulate", "sweep", "--seeds", "0"]) == 2
    assert "--seeds 0: give at least 1" in capsys.readouterr().err
    assert main(["simulate", "sweep", "--show"]) == 2


@pytest.mark.parametrize(("ending", "status"), [(KeyboardInterrupt(), 130), (SystemExit(143), 143)])
def test_interrupted_sweep_prints_violations_found_so_far(
    ending, status, fake_runs, capsys, monkeypatch
) -> None:
    def interrupted(first: int, count: int, jobs: int):
        yield command.run_seeds(range(4, 6))
        raise ending

    monkeypatch.setattr(command, "sweep", interrupted)
    assert main(["simulate", "sweep", "--jobs", "1"]) == status
    printed = capsys.readouterr()
    assert "seed 5: lost" in printed.out
    assert "2 seeds of 100, interrupted" in printed.out
    assert printed.err == ("interrupted\n" if status == 130 else "")
