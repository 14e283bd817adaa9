"""`delta-prop simulate SCENARIO`: shipped scenarios by name, others by file, mistakes in one line."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from delta_prop_simulations.commands import dispatch
from delta_prop_simulations.files import read_shipped
from delta_prop_simulations.scenarios.reading import read_setups
from delta_prop_simulations.scenarios.run import RunInputs, run
from delta_prop_wire.errors import UsageError
from tests.simulations.scenarios.small_scenarios import TWO_SINKS

if TYPE_CHECKING:
    from pathlib import Path


def test_scenario_file_is_run_and_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "two.toml"
    path.write_text(TWO_SINKS)
    assert dispatch(str(path), ["--duration", "1s", "--seed", "5", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["scenario"], result["seed"], result["duration_s"]) == ("two sinks", 5, 1.0)
    assert dispatch(str(path), ["--duration", "1s"]) == 0
    assert "× real time" in capsys.readouterr().out


def test_mistakes_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "two.toml"
    path.write_text(TWO_SINKS.replace("rate", "rat"))
    with pytest.raises(UsageError, match=r"two.toml: source\[0\].rat"):
        dispatch(str(path), [])
    with pytest.raises(UsageError, match=r"unknown scenario: give a TOML file, or one of .*storm"):
        dispatch("strom", [])
    with pytest.raises(UsageError, match="not readable"):
        dispatch(str(tmp_path / "none.toml"), [])
    with pytest.raises(UsageError, match="--only 'x'"):
        dispatch("storm", ["--only", "x"])


def test_shipped_scenarios_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert dispatch("list", []) == 0
    listing = capsys.readouterr().out
    assert all(name in listing for name in read_shipped())


@pytest.mark.parametrize("name", read_shipped())
def test_shipped_scenario_has_description_and_keeps_promises(name: str) -> None:
    setups = read_setups(read_shipped()[name], duration=0.5)
    assert all(setup.about for setup in setups)
    result = run(setups[0], RunInputs(checks=True))
    assert result.totals["offered"] > 0
    assert result.totals["steps_checked"] > 0
    assert [verdict for verdict in result.verdicts if verdict.ok is False] == []
