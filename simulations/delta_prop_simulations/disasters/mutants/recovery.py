"""Mutants of a log that fails and is recovered in place: what may be lost is told, or what was kept denied.

Each line of text is the code's own; where that changes, the table's test says which mutant to write anew.
"""

from __future__ import annotations

from delta_prop.client.answers import outcome_of
from delta_prop.client.outgoing import Outgoing
from delta_prop.pipeline import Chain
from delta_prop.server.peer import Peer
from delta_prop_simulations.disasters.mutants.mutant import Mutant, edit

RECOVERY = (
    Mutant(
        "watermark-of-a-failed-log",
        "a hello is told watermarks that count what may be lost, and what they cover is acknowledged",
        "what is acknowledged is in the log, though that has failed and is recovered",
        (
            edit(Chain.check_running, ("if self.stopped is not None:", "if False:")),
            edit(Peer._hello, ("self._chain.when_kept(answer)", "answer(None)")),
            edit(
                Outgoing.welcomed,
                (
                    "lane.line_up(lost=lost, is_lost=self._is_lost)\n",
                    "lane.line_up(lost=lost, is_lost=self._is_lost)\n"
                    "        for frame in lane.again.copy():\n"
                    "            if frame.batch.last <= lane.watermark and not frame.question:\n"
                    "                lane.again.remove(frame)\n"
                    "                self._acknowledged(frame)\n",
                ),
            ),
            edit(
                outcome_of,
                (
                    "return unknown(batch.dot(row))",
                    "return Published(0, batch.dot(row), count, level, dict.fromkeys(range(count), 0))",
                ),
            ),
        ),
    ),
    Mutant(
        "doubt-told-as-refused",
        "what was written when a sync failed is told as not happened before the recovery has decided",
        "what is refused has not happened",
        (edit(Chain.stop, ("self.settling.suspend(refusal)", "self.settling.fail(refusal)")),),
    ),
)
