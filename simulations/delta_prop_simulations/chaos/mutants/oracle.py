"""A mutant of the simulation itself, which reports a violation where there is none."""

from __future__ import annotations

from delta_prop_simulations.chaos.mutants.mutant import Mutant, edit
from delta_prop_simulations.chaos.node import Node

ORACLE = (
    Mutant(
        "judged-too-early",
        "a service counts as idle although readers do not see all rows of its log yet",
        "the simulation reports only real violations",
        (edit(Node.waits_for, ("if log.high_watermark < log.next_offset:", "if False:")),),
    ),
)
