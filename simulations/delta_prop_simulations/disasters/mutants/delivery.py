"""Mutants of the way to the sinks: cursors, failures, mailboxes, quarantine and rebuilds.

Each line of text is the code's own; where that changes, the table's test says which mutant to write anew.
"""

from __future__ import annotations

from delta_prop.attached import Attached
from delta_prop.route.feed import Feed
from delta_prop.route.mailbox import Mailbox
from delta_prop.route.quarantine import Quarantine
from delta_prop.route.reading import deliveries_of
from delta_prop.route.rebuild import Rebuilder
from delta_prop.service_log import ServiceLog
from delta_prop_simulations.disasters.mutants.mutant import Mutant, edit

DELIVERY = (
    Mutant(
        "cursor-before-the-data",
        "the cursor that the service keeps moves when a delivery is handed over",
        "a sink gets each delta at least once",
        (
            edit(
                Feed.call,
                (
                    "self._handing = deliveries[-1].next_offset",
                    "self._handing = deliveries[-1].next_offset\n    self._progress(self._handing)",
                ),
            ),
        ),
    ),
    Mutant(
        "failed-delivery-not-repeated",
        "a delivery that failed is not brought again",
        "a sink gets each delta at least once",
        (
            edit(
                Feed._deliver,
                (
                    "deliveries = await self._after_failure(deliveries, failure)",
                    "await self._after_failure(deliveries, failure)\n        break",
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
        "breaker-never-tries",
        "a sink whose breaker has opened is never tried again",
        "a sink that is well again goes on by itself",
        (edit(Feed.back_off, ("with anyio.move_on_after(wait_s):", "with anyio.CancelScope():")),),
    ),
    Mutant(
        "quarantine-overtaken",
        "what follows a rejected delta of its vector is applied",
        "no delta of a vector overtakes one in the quarantine",
        (edit(Quarantine._in_the_way, ("return self._held[offsets[0]].behind", "return -1")),),
    ),
    Mutant(
        "kept-cursor-ahead-of-the-log",
        "cursors are written down ahead of what is synced",
        "a sink is never skipped forward over other deltas",
        (edit(ServiceLog.write_cursors, ("min(cursor.dealt_with, safe)", "cursor.dealt_with")),),
    ),
    Mutant(
        "ahead-not-noticed",
        "a sink that holds what the log lost goes on as if nothing were",
        "who holds what the log lost is told, and never skipped forward",
        (
            edit(
                Attached._check_not_ahead,
                ("if epoch > self._log.epoch or next_offset > end:", "if epoch < 0:"),
            ),
        ),
    ),
    Mutant(
        "resumed-one-too-late",
        "a sink that resumes within a batch misses the first row",
        "a sink gets each delta at least once",
        (edit(deliveries_of, ("chosen >= begin - logged.offset", "chosen > begin - logged.offset")),),
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
)
