"""`delta-prop simulate calibrate` writes distributions for scenarios and refuses mistakes in one line."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from delta_prop_simulations.calibration.calibration_file import Calibration, distribution_of
from delta_prop_simulations.commands import dispatch
from delta_prop_simulations.scenarios.scenario import SinkSpec
from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path


def test_scenario_draws_from_measured_sink(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "measured.json"
    assert dispatch("calibrate", ["--sinks", "cache", "--for", "0.5s", "--to", str(path)]) == 0
    assert "| cache | 1,000 |" in capsys.readouterr().out
    distribution = Calibration.from_text(path.read_text()).distribution("cache")
    spec = SinkSpec("store", distribution="calibrated", file="measured.json", sink="cache")
    assert distribution_of(spec, str(tmp_path / "scenario.toml")) == distribution
    assert 0 < distribution.quantile(0.5, 1) < 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--sinks", "stor"], "give one of storage, index, subscriber"),
        (["--compare", "--sinks", "cache"], "give one of storage, index, subscriber"),
        (["--for", "0"], r"give 0\.5 s to 1 h"),
        (["--for", "soon"], "is not a duration"),
        (["--rounds", "0"], "give 1 to 100"),
        (["--compare", "--to", "measured.json"], "writes no distributions"),
    ],
)
def test_mistake_is_refused_with_its_fix(options: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        dispatch("calibrate", options)


def test_unreadable_calibration_file_is_refused(tmp_path: Path) -> None:
    spec = SinkSpec("store", distribution="calibrated", file="none.json")
    with pytest.raises(UsageError, match=r"none\.json: not readable"):
        distribution_of(spec, str(tmp_path / "scenario.toml"))
