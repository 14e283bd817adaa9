"""What the simulation found in our own code: each the plan of a run that failed, and what had gone wrong.

A plan lies beside this as JSON, for `sweep --plan` too. With its mend taken back (`undone.py`) it fails.
Beside those that were made small lie plans as sweeps drew them.
"""

from __future__ import annotations

from delta_prop_simulations.disasters.plan import Plan
from delta_prop_simulations.files import packaged

STORIES = {
    "repeat-asks-for-more": (
        "Two services forward to each other beside logs that show what is written. A batch that its "
        "producer wanted no more than logged comes back from the other service, whose forwarder asks for "
        "durable. As a repeat it waited for a sync of its first copy, and nobody had asked for one: the "
        "forwarder tried again for ever."
    ),
    "leap-over-another-lane": (
        "A producer in the service's process numbers its own deltas over two lanes. When the log was "
        "recovered in place, numbers up to its first open batch were filled, also those that belong to "
        "the other lane; the open batch, which says what it stands behind, then overlapped for ever."
    ),
    "forwarder-not-told-of-a-loss": (
        "A disk fails and the log is recovered in place without what was acknowledged as logged. A "
        "forwarder whose connection outlived that was never told; what it brought next waited for what "
        "was lost, for ever."
    ),
    "watermark-of-a-failed-log": (
        "A commit fails and the log is recovered in place without it. Until the state was read back, a hello "
        "was told watermarks that counted that commit; the producer took what they covered for kept, and it "
        "was acknowledged as durable without being in the log."
    ),
    "doubt-told-as-refused": (
        "What was written when a sync fails may be there after the recovery. Its callers were told at once "
        "that it had not happened; some of it had."
    ),
    "folded-for-each-batch": (
        "After a long cut between services that change the same vectors an index folded a vector anew for "
        "each late delta, so the work grew with the square of what was missed."
    ),
    "queued-before-a-hello": (
        "A slow sink sets the pace, so batches wait in the queue. Their connection breaks; the producer says "
        "hello, hears that they have no place yet, and encodes them anew behind what has. What had been "
        "queued before got its place first, and the new copy, in other bytes, was told that its dots were "
        "used."
    ),
    "judged-too-early": (
        "The simulation's own fault: it took a service for at rest whose log did not show yet all that it "
        "held, and called that a violation."
    ),
}
"""What went wrong, by name."""

SEEDS = (23, 115, 192, 292, 342, 1_001_235, 1_002_078, 1_003_045, 2_000_817, 3_000_068, 17_000_813)
"""Seeds that failed once, whose plans are kept as they were drawn then."""


def plan_of(name: str) -> Plan:
    """The plan of the run that showed it."""
    return Plan.from_json(packaged("delta_prop_simulations.disasters.found", f"{name}.json"))
