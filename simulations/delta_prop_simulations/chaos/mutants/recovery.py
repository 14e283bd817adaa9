"""Mutants of a log that fails and is recovered in place: lost rows are reported as stored, or stored rows as
refused.

The quoted lines are production code; if that code changes, a test names the mutants to update.
"""

from __future__ import annotations

from delta_prop.client.ack_ranges import outcome_of
from delta_prop.client.producer_state import ProducerState
from delta_prop.partition.pipeline import Pipeline
from delta_prop.server.connection_reader import FrameDispatcher
from delta_prop_simulations.chaos.mutants.mutant import Mutant, edit

RECOVERY = (
    Mutant(
        "watermark-of-a-failed-log",
        "a hello is answered with watermarks that count rows which may be lost, and these rows are "
        "acknowledged",
        "every acknowledged delta is in the log, even after the log failed and was recovered",
        (
            edit(Pipeline.check_running, ("if self.stop_refusal is not None:", "if False:")),
            edit(
                FrameDispatcher._handle_hello,
                ("context.partition.pipeline.when_reached(answer)", "answer(None)"),
            ),
            edit(
                ProducerState.on_welcome,
                (
                    "sender.requeue_all(lost=lost_count > 0, is_lost=self._senders.is_lost)\n",
                    "sender.requeue_all(lost=lost_count > 0, is_lost=self._senders.is_lost)\n"
                    "        for frame in sender.retries.batches.copy():\n"
                    "            is_known = frame.batch.last <= sender.claim.watermark\n"
                    "            if is_known and not frame.is_outcome_query:\n"
                    "                sender.retries.batches.remove(frame)\n"
                    "                self._settle_acked(frame)\n",
                ),
            ),
            edit(
                outcome_of,
                (
                    "return unknown_outcome(batch.dot(row))",
                    "return PublishAck(0, batch.dot(row), count, level, dict.fromkeys(range(count), 0))",
                ),
            ),
        ),
    ),
    Mutant(
        "doubt-reported-as-refused",
        "rows written when a sync failed are reported as refused before the recovery has decided",
        "a refused delta never takes effect",
        (edit(Pipeline.stop, ("self.ack_tracker.suspend(refusal)", "self.ack_tracker.fail(refusal)")),),
    ),
)
