"""Reverted fixes: each is a mutant that brings a found fault back, so that the plan of the same name fails
again.

A plan without a reverted fix cannot fail again this way, since later fixes prevent its fault, too.
"""

from __future__ import annotations

from delta_prop.api.producer import _previous_counter
from delta_prop.partition.ack_tracker import AckTracker
from delta_prop_simulations.chaos.mutants import MUTANTS
from delta_prop_simulations.chaos.mutants.mutant import Mutant, edit

REVERTED_FIXES = (
    Mutant(
        "duplicate-at-a-higher-level",
        "a duplicate that asks for more than its first copy did waits for a sync that nobody requests",
        "a duplicate is answered",
        (
            edit(
                AckTracker.when_reached,
                ("if level >= AckLevel.DURABLE:", "if False:"),
            ),
        ),
    ),
    Mutant(
        "gap-filled-in-another-lane",
        "after a recovery a producer fills numbers that belong to another of its lanes",
        "a delta that is not acknowledged can be resent",
        (
            edit(
                _previous_counter,
                ("return batch.previous if batch.has_gaps else batch.base - 1", "return batch.base - 1"),
            ),
        ),
    ),
    MUTANTS["watermark-of-a-failed-log"],
    MUTANTS["doubt-reported-as-refused"],
    MUTANTS["folded-for-each-batch"],
    MUTANTS["judged-too-early"],
)
