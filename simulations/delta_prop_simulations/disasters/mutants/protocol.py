"""Mutants of what goes over the network: clients, the server's connections, groups and forwarding.

Each line of text is the code's own; where that changes, the table's test says which mutant to write anew.
"""

from __future__ import annotations

from delta_prop.client.forwarding import ForwardLink
from delta_prop.client.incoming import Incoming
from delta_prop.client.lane import Lane
from delta_prop.client.session import Session
from delta_prop.server.groups import Groups
from delta_prop.server.hot import HotQueue
from delta_prop.server.intake import Intake
from delta_prop.server.outlet import Outlet
from delta_prop.server.peer import Peer
from delta_prop_simulations.disasters.mutants.mutant import Mutant, edit
from delta_prop_sinks.forwarding import ForwardSink

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
        "not-sent-again",
        "a producer that comes back does not send what was under way",
        "a delta that is not acknowledged is sent again",
        (
            edit(
                Lane.line_up,
                (
                    "self.again = sorted(self.open.values(), key=_base)",
                    "self.again = [one for one in sorted(self.open.values(), key=_base) if not one.sent]",
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
                Intake._add_ranges,
                (
                    "AckRange(entry.first, entry.last, offset)",
                    "AckRange(entry.first, entry.last, offset + 1)",
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
        "subscriber-window-ignored",
        "a subscriber is sent more than it has granted",
        "a subscriber that does not read is sent no more than it granted",
        (
            edit(HotQueue.take, ("made < MADE_MAX and window.open", "made < MADE_MAX")),
            edit(Outlet._take, ("if not self._window.open:", "if False:")),
        ),
    ),
    Mutant(
        "acked-before-delivery",
        "a subscriber says that it has dealt with what has only come",
        "a group goes on behind what its reader has dealt with, no further",
        (
            edit(
                Incoming._deliver,
                (
                    "self.received = batch.next_offset",
                    "self.received = self._handed = self._dealt_with = batch.next_offset",
                ),
            ),
        ),
    ),
    Mutant(
        "group-not-fenced",
        "a second reader of a group does not end the first",
        "one member at a time reads for a group",
        (edit(Groups.join, ("held.member.fence(_fenced(name))", "pass")),),
    ),
    Mutant(
        "pushed-before-it-was-read",
        "a subscriber that reads the log is pushed again before it has come to the log's end",
        "a subscriber gets each delta of its topics",
        (edit(Outlet._read, ("self.behind = self._end < log.visible", "self.behind = False")),),
    ),
    Mutant(
        "full-outlet-drops",
        "what finds a connection's queue full is dropped, and not read from the log later",
        "a subscriber gets each delta of its topics",
        (edit(Outlet.offer, ("    self.behind = True", "    pass")),),
    ),
    Mutant(
        "silence-ignored",
        "a client waits for ever for a server that has gone silent",
        "a connection that is dead is given up and made anew",
        (
            edit(
                Session.patience_s,
                ("max(self._heard_at + settings.silence_s_max - now, 0.0)", "3600.0"),
            ),
            edit(Peer._fault, ("now - self._heard_at > settings.silence_s_max", "False")),
        ),
    ),
    Mutant(
        "control-rows-not-forwarded",
        "a forwarder leaves out the rows that only fill places",
        "a forwarded log goes on behind a refused delta",
        (
            edit(
                ForwardLink._covers,
                ("return logged.batch.last", "return logged.batch.is_control or logged.batch.last"),
            ),
        ),
    ),
    Mutant(
        "forwarded-under-new-numbers",
        "what is forwarded gets new Lamport numbers",
        "services that hold the same deltas hold the same states",
        (
            edit(
                Intake.batch,
                (
                    "lamport = frame.stamp.lamport if frame.stamp is not None and self.forwards else None",
                    "lamport = None",
                ),
            ),
        ),
    ),
    Mutant(
        "loss-elsewhere-not-noticed",
        "a forwarder does not look whether the other service still has what it was brought",
        "services that are connected come to hold the same deltas",
        (
            edit(
                ForwardSink._check_has_what_came_before,
                ("if missing is None or missing >= offset:", "if offset >= 0:"),
            ),
        ),
    ),
)
