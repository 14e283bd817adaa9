"""Mutants of the way to the sinks: cursors, failures, mailboxes, quarantine and rebuilds.

Each line of text is the code's own; where that changes, the table's test says which mutant to write anew.
"""

from __future__ import annotations

from delta_prop.route.feed import Feed
from delta_prop.route.mailbox import Mailbox
from delta_prop.route.rebuild import Rebuilder
from delta_prop_simulations.disasters.mutants.mutant import Mutant, edit
from delta_prop_sinks.resident import Resident

DELIVERY = (
    Mutant(
        "failed-delivery-not-repeated",
        "a delivery that failed is not brought again",
        "a sink gets each delta at least once",
        (
            edit(
                Feed._deliver,
                (
                    "deliveries = await self._after_failure(deliveries, brought, failure)",
                    "await self._after_failure(deliveries, brought, failure)\n            break",
                ),
            ),
        ),
    ),
    Mutant(
        "full-mailbox-drops",
        "what finds the mailbox full is dropped, and not read from the log later",
        "a full mailbox loses nothing",
        (
            edit(
                Feed.offer,
                (
                    "self._behind = True  # from here on it reads the log",
                    "self._behind = self._behind or self.ended",
                ),
            ),
        ),
    ),
    Mutant(
        "mailbox-unbounded",
        "a mailbox takes whatever is offered",
        "a slow sink costs no more memory than its mailbox",
        (
            edit(
                Mailbox.put,
                ("self._waiting and (deltas > self._deltas_max or size > self._bytes_max)", "False"),
            ),
        ),
    ),
    Mutant(
        "bell-not-rung",
        "a feed that waits is not woken by what is pushed",
        "what is in the log reaches every sink",
        (edit(Feed.offer, ("self._bell.set()", "pass")),),
    ),
    Mutant(
        "rebuild-misses-the-tail",
        "a sink that is rebuilt goes on from the log's end, not from its snapshot's",
        "a sink that was rebuilt holds what the log says",
        (edit(Rebuilder.run, ("feed.begin_at(offset)", "feed.begin_at(self._log.visible)")),),
    ),
    Mutant(
        "feed-pushed-too-early",
        "a sink that reads the log is pushed again before it has come to the log's end",
        "a sink gets each delta at least once",
        (edit(Feed._pull, ("self._behind = self._end < self._log.visible", "self._behind = False")),),
    ),
    Mutant(
        "folded-for-each-batch",
        "a call that brings late deltas folds their vectors for each of its batches, not once",
        "catching up after a cut takes time in proportion to what was missed",
        (
            edit(
                Resident.apply,
                (
                    "self._apply_one(one, context)\n",
                    "self._apply_one(one, context)\n"
                    "                await self._fold_gathered(context, pace)\n",
                ),
            ),
        ),
    ),
)
