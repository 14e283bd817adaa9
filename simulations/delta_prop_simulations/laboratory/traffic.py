"""Recorded traffic for sources that replay it: read from its file again for each run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from delta_prop.recorded_traffic import RecordedTraffic
from delta_prop_simulations.files import beside, read_pieces

if TYPE_CHECKING:
    from delta_prop_simulations.laboratory.scenario import SourceSpec


def traffic_of(spec: SourceSpec, scenario: str) -> RecordedTraffic | None:
    """What a source replays; names of files count from the scenario's folder. Raises UsageError."""
    if spec.trace is None:
        return None
    path = beside(scenario, spec.trace)
    return RecordedTraffic(lambda: read_pieces(path), path)
