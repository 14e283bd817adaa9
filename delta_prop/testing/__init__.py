"""Tools to test programs that embed delta-prop: virtual time, a fake world and network, a propagator."""

from __future__ import annotations

from delta_prop.testing.loop import Stuck, VirtualLoop, run_virtual
from delta_prop.testing.network import VirtualNetwork
from delta_prop.testing.network_path import NetworkConditions
from delta_prop.testing.recorded import RecordedPropagator, RecordingSink, run_propagator
from delta_prop.testing.world import virtual_world

__all__ = [
    "NetworkConditions",
    "RecordedPropagator",
    "RecordingSink",
    "Stuck",
    "VirtualLoop",
    "VirtualNetwork",
    "run_propagator",
    "run_virtual",
    "virtual_world",
]
