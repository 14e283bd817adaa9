"""The mends of what was found, each taken back as a mutant: with it the plan of that name fails again.

Where nothing is taken back for a plan, later mends keep it whole as well.
"""

from __future__ import annotations

from delta_prop.producer import _before
from delta_prop.settling import Settling
from delta_prop_simulations.disasters.mutants import MUTANTS
from delta_prop_simulations.disasters.mutants.mutant import Mutant, edit

UNDONE = (
    Mutant(
        "repeat-asks-for-more",
        "a repeat that asks for more than its first copy did waits for a sync that nobody orders",
        "a repeat is answered",
        (
            edit(
                Settling.when_kept,
                (
                    "if level >= AckLevel.DURABLE:  # a repeat may ask for more than its first copy did",
                    "if False:",
                ),
            ),
        ),
    ),
    Mutant(
        "leap-over-another-lane",
        "after a recovery a producer fills numbers that belong to another of its lanes",
        "a delta that is not acknowledged can be sent again",
        (
            edit(
                _before, ("return batch.previous if batch.leaps else batch.base - 1", "return batch.base - 1")
            ),
        ),
    ),
    MUTANTS["watermark-of-a-failed-log"],
    MUTANTS["doubt-told-as-refused"],
    MUTANTS["folded-for-each-batch"],
    MUTANTS["judged-too-early"],
)
