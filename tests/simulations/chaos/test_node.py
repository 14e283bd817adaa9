"""A node of a chaos run, as its faults use it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from delta_prop_simulations.chaos.node import Node
from delta_prop_simulations.disk_faults import SimCrash


def test_crash_of_the_machine_at_the_read_of_a_lag_does_not_end_the_run() -> None:
    def crash() -> None:
        raise SimCrash("the machine went off before call 133")

    node: Any = SimpleNamespace(propagator=SimpleNamespace(statistics=crash))
    Node.resume_paused(node)
