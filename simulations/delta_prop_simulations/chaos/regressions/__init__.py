"""Faults that the simulation found in our own code: for each, a description and the plan of a run that
failed.

A plan is a JSON file beside this module, which `sweep --plan` also accepts. If the fix is reverted, the
plan's run fails again. Some plans are shrunk, others are as a sweep drew them.
"""

from __future__ import annotations

from delta_prop.partition.ack_tracker import AckTracker
from delta_prop.producing.origin_sequence import SentBatch
from delta_prop_simulations.chaos.mutants.catalogue import MUTANTS
from delta_prop_simulations.chaos.mutants.mutant import Mutant, edit, getter
from delta_prop_simulations.chaos.plan import Plan
from delta_prop_simulations.files import read_packaged

DESCRIPTIONS = {
    "duplicate-at-a-higher-level": (
        "Two services forward to each other, with logs whose read level is logged. A batch "
        "acknowledged as logged comes back through the other service's forwarder, which asks for durable. "
        "The duplicate waited for a sync of the first copy, which nobody had requested: the forwarder "
        "retried for ever."
    ),
    "gap-filled-in-another-lane": (
        "A producer in the service's process numbers its own deltas over two lanes. When the log was "
        "recovered in place, a lane filled all numbers below its first open batch, also those of the other "
        "lane. The open batch names the number before it in its own lane, which is below the filled ones, "
        "so it was refused as an overlap for ever."
    ),
    "forwarder-not-notified-of-a-loss": (
        "A disk fails and the log is recovered in place without rows that were acknowledged as logged. A "
        "forwarder whose connection survived was never notified; its next deltas waited for the lost ones "
        "for ever."
    ),
    "watermark-of-a-failed-log": (
        "A commit fails and the log is recovered in place without it. Until the state was read back, a hello "
        "was answered with watermarks that counted that commit; the producer took all deltas below them for "
        "stored, and they were acknowledged as durable without being in the log."
    ),
    "doubt-reported-as-refused": (
        "Rows written when a sync fails may be there after the recovery. Their callers were notified at once "
        "that they had not happened; some had."
    ),
    "folded-for-each-batch": (
        "After a long cut between services that change the same vectors an index folded a vector once for "
        "each late delta, so the work grew with the square of the number of missed deltas."
    ),
    "queued-before-a-hello": (
        "A slow sink limits the rate, so batches wait in the queue. Their connection breaks; the producer "
        "sends hello, learns that they have no offset yet, and encodes them again after those that have one. "
        "The queued copies were appended first, and the new copies, in other bytes, were refused as reused "
        "dots."
    ),
    "judged-too-early": (
        "A fault of the simulation itself: it took a service for idle although readers did not see all rows "
        "of its log yet, and reported that as a violation."
    ),
}
"""Descriptions of the faults, by name."""

SEEDS = (23, 115, 192, 292, 342, 1_001_235, 1_002_078, 1_003_045, 2_000_817, 3_000_068, 17_000_813)
"""Seeds that failed once. The plan file of each has the plan that the seed drew at that time."""

REVERTED_FIXES = (
    Mutant(
        "duplicate-at-a-higher-level",
        "a duplicate that asks for more than its first copy did waits for a sync that nobody requests",
        "a duplicate is answered",
        edit(AckTracker._wait, "if level >= AckLevel.DURABLE:", "if False:"),
    ),
    Mutant(
        "gap-filled-in-another-lane",
        "after a recovery a producer fills numbers that belong to another of its lanes",
        "a delta that is not acknowledged can be resent",
        edit(
            getter(SentBatch, "previous_counter"),
            "return self.batch.previous if self.batch.has_gaps else",
            "return",
        ),
    ),
    MUTANTS["watermark-of-a-failed-log"],
    MUTANTS["doubt-reported-as-refused"],
    MUTANTS["folded-for-each-batch"],
    MUTANTS["judged-too-early"],
)
"""Mutants that bring found faults back; of the other plans, later fixes prevent the faults, too."""


def plan_of(name: str) -> Plan:
    """Return the plan of the run that found the fault."""
    return Plan.from_json(read_packaged("delta_prop_simulations.chaos.regressions", f"{name}.json"))
