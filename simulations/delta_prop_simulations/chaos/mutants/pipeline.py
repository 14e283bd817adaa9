"""Mutants of the pipeline: duplicates, causal order, refusals, and the state that a start restores.

The quoted lines are production code; if that code changes, a test names the mutants to update.
"""

from __future__ import annotations

from delta_prop.partition.ack_tracker import AckTracker
from delta_prop.partition.core.appender import Appender
from delta_prop.partition.duplicate_batches import ack_duplicate
from delta_prop.partition.ingest.expectations import check_expects
from delta_prop.partition.order.orderer import Orderer
from delta_prop.partition.pipeline import Pipeline
from delta_prop.partition.storage.log_reopener import LogReopener
from delta_prop_simulations.chaos.mutants.mutant import Mutant, edit

PIPELINE = (
    Mutant(
        "watermarks-forgotten",
        "a start does not restore the watermark of each origin",
        "a duplicate has one effect, across a restart too",
        (
            edit(
                Pipeline.restore,
                ("self.orderer.note_delivered(batch.origin, batch.last, accepted_ids(batch))", "pass"),
            ),
        ),
    ),
    Mutant(
        "duplicate-given-a-new-offset",
        "a duplicate is acknowledged with an offset at the log's end",
        "a duplicate is acknowledged with the offset of its first copy",
        (
            edit(
                ack_duplicate,
                (
                    "    return PublishAck(offsets[0], batch",
                    "    offsets = {row: log.next_offset - batch.count + row for row in offsets}\n"
                    "    return PublishAck(offsets[0], batch",
                ),
            ),
        ),
    ),
    Mutant(
        "state-moves-without-the-log",
        "watermarks move though the log has refused the batch",
        "every acknowledged delta is in the log",
        (
            edit(
                Pipeline._append,
                (
                    "        self._refuse_all(self.orderer.refuse(entry, refusal))",
                    "        self.orderer.note_delivered(entry.origin, entry.last)\n"
                    "        self._refuse_all(self.orderer.refuse(entry, refusal))",
                ),
            ),
        ),
    ),
    Mutant(
        "parents-ignored",
        "a delta does not wait for its parents",
        "the log's order is causal",
        (edit(Orderer.check, ("return not entry.parents or self._has_parents(entry)", "return True")),),
    ),
    Mutant(
        "noop-not-logged",
        "the dot of a delta that is finally refused stays open",
        "deltas after a refused one are processed",
        (
            edit(
                Appender.append_sequenced,
                (
                    "if (\n"
                    "                not refusal.is_final\n"
                    "                or refusal.code is ErrorCode.UNAUTHORIZED\n"
                    "                or _is_split_by_sender(work)\n"
                    "            ):\n"
                    "                raise",
                    "raise",
                ),
            ),
        ),
    ),
    Mutant(
        "expect-ignored",
        "a delta is accepted though its vector's head is not the one that it expects",
        "of two writers that expect the same head one is refused",
        (edit(check_expects, ("expects.get(row)", "None")),),
    ),
    Mutant(
        "expect-judged-before-the-batch",
        "expected heads of a batch's rows are compared with the vectors before the entire batch",
        "of two rows of a batch that expect the same head one is refused",
        (edit(check_expects, ("heads[ref] = Head(", "_ = Head(")),),
    ),
    Mutant(
        "lamport-forgotten",
        "a start does not restore the highest Lamport number",
        "in one service Lamport numbers rise with the log",
        (
            edit(
                Appender.restore,
                ("self.lamport = max(self.lamport, logged.lamport + batch.count - 1)", "pass"),
            ),
        ),
    ),
    Mutant(
        "failure-reported-as-success",
        "callers that wait for a failed commit get a success",
        "no delta is acknowledged that the disk refused",
        (edit(AckTracker._resolve, ("None if next_offset <= end else refusal", "None")),),
    ),
    Mutant(
        "delivered-before-the-commit",
        "sinks get a batch as soon as it has its offset",
        "no row is visible that the log may still lose",
        (
            edit(
                AckTracker.route_when_visible,
                ("not self._not_visible and logged.next_offset <= self._log.high_watermark", "True"),
            ),
        ),
    ),
    Mutant(
        "state-retained-after-a-failure",
        "a log that was recovered in place continues with the old pipeline state",
        "the pipeline's state is the one that its log yields",
        (edit(LogReopener._try, ("await self._storage.rebuild_state()", "pass")),),
    ),
)
