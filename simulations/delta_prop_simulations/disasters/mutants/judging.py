"""A mutant of the simulation itself: what it calls a violation has to be one."""

from __future__ import annotations

from delta_prop_simulations.disasters.mutants.mutant import Mutant, edit
from delta_prop_simulations.disasters.node import Node

JUDGING = (
    Mutant(
        "judged-too-early",
        "a service is judged as at rest while its log does not show all yet that it holds",
        "what the simulation calls a violation is one",
        (edit(Node.waits_for, ("if log.visible < log.next_offset:", "if False:")),),
    ),
)
