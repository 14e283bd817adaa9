"""A mutant of the simulation itself: it reports a violation where there is none."""

from __future__ import annotations

from delta_prop_simulations.chaos.mutants.mutant import Mutant, edit
from delta_prop_simulations.chaos.node import Node

JUDGING = (
    Mutant(
        "judged-too-early",
        "a service counts as at rest while its log does not show all that it holds",
        "every violation that the simulation reports is one",
        (edit(Node.waits_for, ("if log.high_watermark < log.next_offset:", "if False:")),),
    ),
)
