"""Provides the distribution of a scenario's sink; with `distribution = "calibrated"`, from a calibration
file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from delta_prop_simulations.calibration.calibration_file import Calibration
from delta_prop_simulations.files import read_text, resolve_beside
from delta_prop_simulations.scenarios.distributions import ConfiguredDistribution

if TYPE_CHECKING:
    from delta_prop_simulations.scenarios.distributions import Distribution
    from delta_prop_simulations.scenarios.scenario import SinkSpec


def distribution_of(spec: SinkSpec, scenario: str) -> Distribution:
    """Return the distribution of a sink's calls. `scenario`: its path, to which `file` is relative. Raises
    UsageError.
    """
    if spec.file is None:
        return ConfiguredDistribution(spec)
    path = resolve_beside(scenario, spec.file)
    return Calibration.from_text(read_text(path), path).distribution(spec.sink or spec.name)
