"""Mutants of the network protocol: clients, the server's connections, groups and forwarding.

The quoted lines are production code; if that code changes, a test names the mutants to update.
"""

from __future__ import annotations

from delta_prop.client.sequence_sender import SequenceSender
from delta_prop.server.log_reader import LogReader
from delta_prop.server.outcome_collector import OutcomeCollector, make_ack_ranges
from delta_prop_simulations.chaos.mutants.mutant import Mutant, edit

PROTOCOL = (
    Mutant(
        "resent-under-new-dots",
        "a producer that reconnects gives new numbers to deltas that may have arrived",
        "a delta has one effect however often it is sent",
        (
            edit(
                SequenceSender.requeue_all,
                (
                    "previous = watermark\n",
                    "previous = watermark\n"
                    "    for frame in sorted(self.unacked.values(), key=_base, reverse=True):\n"
                    "        if frame.send_count and not frame.is_outcome_query and not frame.is_withdrawn:\n"
                    "            del self.unacked[frame.batch.base]\n"
                    "            for row, offer in reversed(frame.offers):\n"
                    "                rows = range(row, row + offer.count)\n"
                    "                offer.deltas = [frame.batch.delta(at) for at in rows]\n"
                    "                offer.columns, offer.counter, offer.after = None, None, ()\n"
                    "                self.requeue_offers([offer])\n"
                    "            highest = max(self.unacked, default=0)\n"
                    "            self.counters.next = 1 + max(self.claim.watermark, highest)\n",
                ),
            ),
        ),
    ),
    Mutant(
        "refusal-reported-as-acknowledged",
        "a refused delta is not reported, so that the next Ack covers it",
        "a producer is notified of each refusal",
        (
            edit(
                OutcomeCollector.settle,
                ("if refusal is not None:", "if refusal is None and entry.done is None:"),
            ),
        ),
    ),
    Mutant(
        "ack-one-off",
        "an Ack names the offset after the right one",
        "an acknowledgement names the delta's offset",
        (
            edit(
                make_ack_ranges,
                (
                    "first + published.count - 1, published.offset)",
                    "first + published.count - 1, published.offset + 1)",
                ),
            ),
        ),
    ),
    Mutant(
        "credit-given-twice",
        "credit owed to a producer is granted twice",
        "the deltas in flight from all producers are bounded",
        (
            edit(
                OutcomeCollector._take_owed_credit,
                (
                    "Credit(self.owed_deltas, self.owed_bytes)",
                    "Credit(2 * self.owed_deltas, 2 * self.owed_bytes)",
                ),
            ),
        ),
    ),
    Mutant(
        "credit-never-given-back",
        "a producer does not get back the credit that it has spent",
        "a producer whose deltas are acknowledged can continue",
        (edit(OutcomeCollector._take_owed_credit, ("return credit", "return None")),),
    ),
    Mutant(
        "pushed-before-it-was-read",
        "a subscriber that catches up is pushed to before it has reached the log's end",
        "a subscriber gets each delta of its topics",
        (
            edit(
                LogReader.read,
                (
                    "self.is_catching_up = self.next_offset < log.high_watermark",
                    "self.is_catching_up = False",
                ),
            ),
        ),
    ),
)
