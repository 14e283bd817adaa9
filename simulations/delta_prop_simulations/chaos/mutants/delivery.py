"""Mutants of delivery to sinks: cursors, failures, mailboxes, quarantine and rebuilds.

The quoted lines are production code; if that code changes, a test names the mutants to update.
"""

from __future__ import annotations

from delta_prop.delivery.feed import Feed
from delta_prop.delivery.inbox import Inbox, Mailbox
from delta_prop.delivery.rebuild import Rebuilder
from delta_prop.delivery.sink_invoker import Deliverer
from delta_prop_simulations.chaos.mutants.mutant import Mutant, edit
from delta_prop_sinks.resident import ResidentVectors

DELIVERY = (
    Mutant(
        "failed-delivery-not-retried",
        "a delivery that failed is not retried",
        "a sink gets each delta at least once",
        (
            edit(
                Deliverer.deliver,
                (
                    "deliveries = await self._handle_failure(deliveries, called, failure)",
                    "await self._handle_failure(deliveries, called, failure)\n            break",
                ),
            ),
        ),
    ),
    Mutant(
        "full-mailbox-drops",
        "a delivery that finds the mailbox full is dropped, and not read from the log later",
        "a full mailbox loses nothing",
        (
            edit(
                Feed.offer,
                (
                    "inbox.is_catching_up = True  # from now on it reads the log",
                    "inbox.is_catching_up = inbox.is_catching_up or self.has_ended",
                ),
            ),
        ),
    ),
    Mutant(
        "mailbox-unbounded",
        "a mailbox accepts more than its bounds allow",
        "a slow sink costs no more memory than its mailbox",
        (
            edit(
                Mailbox.put,
                ("self._waiting and (deltas > self._deltas_max or size > self._bytes_max)", "False"),
            ),
        ),
    ),
    Mutant(
        "feed-not-notified",
        "a feed that waits is not woken by a push",
        "every row in the log reaches every sink",
        (edit(Inbox.push, ("self._wake_event.set()", "pass")),),
    ),
    Mutant(
        "rebuild-misses-the-tail",
        "a sink that is rebuilt continues at the log's end, not at its snapshot's",
        "a rebuilt sink holds the same state as the log",
        (edit(Rebuilder.run, ("feed.restart_at(offset)", "feed.restart_at(self._log.high_watermark)")),),
    ),
    Mutant(
        "feed-pushed-too-early",
        "a sink that catches up is pushed to before it has reached the log's end",
        "a sink gets each delta at least once",
        (
            edit(
                Inbox.read,
                ("self.is_catching_up = self.end < self._log.high_watermark", "self.is_catching_up = False"),
            ),
        ),
    ),
    Mutant(
        "folded-for-each-batch",
        "a call with late deltas folds their vectors for each of its batches, not once",
        "catching up after a network cut takes time in proportion to the missed deltas",
        (
            edit(
                ResidentVectors.apply,
                (
                    "self._apply_one(delivery, context)\n",
                    "self._apply_one(delivery, context)\n"
                    "                await self._fold_deferred(context, pace)\n",
                ),
            ),
        ),
    ),
)
