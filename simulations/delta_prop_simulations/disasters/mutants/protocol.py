"""Mutants of what goes over the network: clients, the server's connections, groups and forwarding.

Each line of text is the code's own; where that changes, the table's test says which mutant to write anew.
"""

from __future__ import annotations

from delta_prop.client.lane import Lane
from delta_prop.server.intake import Intake, ranges_of
from delta_prop.server.outlet import Outlet
from delta_prop_simulations.disasters.mutants.mutant import Mutant, edit

PROTOCOL = (
    Mutant(
        "sent-again-under-new-dots",
        "a producer that comes back numbers anew what may have arrived",
        "a delta has one effect however often it is sent",
        (
            edit(
                Lane.line_up,
                (
                    "previous = self.watermark\n",
                    "previous = self.watermark\n"
                    "    for frame in sorted(self.open.values(), key=_base, reverse=True):\n"
                    "        if frame.sent and not frame.question and not frame.void:\n"
                    "            del self.open[frame.base]\n"
                    "            for row, offer in reversed(frame.offers):\n"
                    "                rows = range(row, row + offer.count)\n"
                    "                offer.deltas = [frame.batch.delta(at) for at in rows]\n"
                    "                offer.columns, offer.counter, offer.after = None, None, ()\n"
                    "                self.put_back([offer])\n"
                    "            self.next = max(self.watermark + 1, max(self.open, default=0) + 1)\n",
                ),
            ),
        ),
    ),
    Mutant(
        "refusal-told-as-acknowledged",
        "a refused delta is not told as such, so that the next Ack covers it",
        "a producer is told of each refusal",
        (edit(Intake._settled, ("if refusal is not None:", "if refusal is None and entry.done is None:")),),
    ),
    Mutant(
        "ack-one-off",
        "an Ack names the offset behind the right one",
        "an acknowledgement names the delta's offset",
        (
            edit(
                ranges_of,
                (
                    "first + published.count - 1, published.offset)",
                    "first + published.count - 1, published.offset + 1)",
                ),
            ),
        ),
    ),
    Mutant(
        "credit-given-twice",
        "what is owed to a producer is given twice",
        "what all producers have on their way is bounded",
        (
            edit(
                Intake._take_owed,
                (
                    "Credit(self._owed_deltas, self._owed_bytes)",
                    "Credit(2 * self._owed_deltas, 2 * self._owed_bytes)",
                ),
            ),
        ),
    ),
    Mutant(
        "credit-never-given-back",
        "a producer does not get back what it has spent",
        "a producer whose deltas are acknowledged goes on",
        (edit(Intake._take_owed, ("return credit", "return None")),),
    ),
    Mutant(
        "pushed-before-it-was-read",
        "a subscriber that reads the log is pushed again before it has come to the log's end",
        "a subscriber gets each delta of its topics",
        (edit(Outlet._read, ("self.behind = self._end < log.visible", "self.behind = False")),),
    ),
)
