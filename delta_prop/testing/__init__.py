"""For tests of programs that embed delta-prop: virtual time, a world to go with it, a propagator in it."""

from __future__ import annotations

from delta_prop.testing.loop import Stuck, VirtualLoop, run_virtual
from delta_prop.testing.propagator import run_propagator
from delta_prop.testing.recorded import RecordedPropagator, RecordingSink
from delta_prop.testing.world import virtual_world

__all__ = [
    "RecordedPropagator",
    "RecordingSink",
    "Stuck",
    "VirtualLoop",
    "run_propagator",
    "run_virtual",
    "virtual_world",
]
