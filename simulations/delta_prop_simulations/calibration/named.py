"""The law that a scenario's sink names: `law = "calibrated"`, with a file and a sink in it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from delta_prop_simulations.calibration.record import Calibration
from delta_prop_simulations.files import beside, read_text
from delta_prop_simulations.laboratory.laws import SpokenLaw

if TYPE_CHECKING:
    from delta_prop_simulations.laboratory.laws import Law
    from delta_prop_simulations.laboratory.scenario import SinkSpec


def law_of(spec: SinkSpec, scenario: str) -> Law:
    """What this sink's calls take; the file's name counts from the scenario's folder. Raises UsageError."""
    if spec.file is None:
        return SpokenLaw(spec)
    path = beside(scenario, spec.file)
    return Calibration.from_text(read_text(path), path).law(spec.sink or spec.name)
