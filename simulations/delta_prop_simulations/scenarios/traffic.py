"""Provides recorded traffic for sources that replay it; each run reads the file anew."""

from __future__ import annotations

from typing import TYPE_CHECKING

from delta_prop.directory.recorded_traffic import RecordedTraffic
from delta_prop_simulations.files import FilePieces, resolve_beside

if TYPE_CHECKING:
    from delta_prop_simulations.scenarios.scenario import SourceSpec


def traffic_of(spec: SourceSpec, scenario: str) -> RecordedTraffic | None:
    """Return the traffic that a source replays, if any. `scenario`: its path, to which `trace` is relative.
    Raises UsageError.
    """
    if spec.trace is None:
        return None
    path = resolve_beside(scenario, spec.trace)
    return RecordedTraffic(FilePieces(path), path)
