"""Mutants of the chain: repeats, causal order, refusals, and what a start has to remember.

Each line of text is the code's own; where that changes, the table's test says which mutant to write anew.
"""

from __future__ import annotations

from delta_prop.append import Appender
from delta_prop.ingest.expectations import check_expects
from delta_prop.order.orderer import Orderer
from delta_prop.pipeline import Chain
from delta_prop.reopening import Reopening
from delta_prop.repeats import answer_repeat
from delta_prop.settling import Settling
from delta_prop_simulations.disasters.mutants.mutant import Mutant, edit

CHAIN = (
    Mutant(
        "watermarks-forgotten",
        "a start does not take in how far each origin had come",
        "a repeat has one effect, across a restart too",
        (
            edit(
                Chain.restore,
                ("self.orderer.delivered(batch.origin, batch.last, accepted_ids(batch))", "pass"),
            ),
        ),
    ),
    Mutant(
        "repeat-told-a-new-offset",
        "a repeat is told the end of the log for its offset",
        "a repeat is told what its first copy was told",
        (
            edit(
                answer_repeat,
                (
                    "    return Published(firsts[0], batch",
                    "    firsts = {row: log.next_offset - batch.count + row for row in firsts}\n"
                    "    return Published(firsts[0], batch",
                ),
            ),
        ),
    ),
    Mutant(
        "state-moves-without-the-log",
        "watermarks move though the log has refused the batch",
        "what is acknowledged is in the log",
        (
            edit(
                Chain._append,
                (
                    "        self._refuse_all(self.orderer.refuse(entry, refusal))",
                    "        self.orderer.delivered(entry.origin, entry.last)\n"
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
        "void-not-logged",
        "the dot of a delta that is refused for good stays open",
        "what follows a refused delta goes on",
        (
            edit(
                Appender.sequenced,
                (
                    "if not refusal.voids or refusal.code is ErrorCode.UNAUTHORIZED or _is_split(work):\n"
                    "                raise",
                    "raise",
                ),
            ),
        ),
    ),
    Mutant(
        "expect-ignored",
        "a delta is taken though its vector's head is not the one that it expects",
        "of two writers that expect the same head one is refused",
        (edit(check_expects, ("expects.get(row)", "None")),),
    ),
    Mutant(
        "expect-judged-before-the-batch",
        "what rows of a batch expect is held against the vectors before the whole batch",
        "of two rows of a batch that expect the same head one is refused",
        (edit(check_expects, ("heads[ref] = Head(", "_ = Head(")),),
    ),
    Mutant(
        "lamport-forgotten",
        "a start does not take in the highest Lamport number",
        "in one service Lamport numbers rise with the log",
        (
            edit(
                Appender.restore,
                ("self.lamport = max(self.lamport, logged.lamport + batch.count - 1)", "pass"),
            ),
        ),
    ),
    Mutant(
        "failure-told-as-success",
        "whoever waits for a commit that fails is told that it is done",
        "nothing is acknowledged that the disk refused",
        (edit(Settling._decide, ("None if next_offset <= end else refusal", "None")),),
    ),
    Mutant(
        "delivered-before-the-commit",
        "sinks are pushed a batch as soon as it has its place",
        "nothing is shown that the log may still lose",
        (
            edit(
                Settling.placed,
                ("not self._unseen and logged.next_offset <= self._log.visible", "True"),
            ),
            edit(
                Settling.placed_run,
                ("not self._unseen and placed[-1].next_offset <= self._log.visible", "True"),
            ),
        ),
    ),
    Mutant(
        "state-kept-after-a-failure",
        "a log that was recovered in place goes on with the state of before",
        "the chain's state is what its log says",
        (edit(Reopening._try, ("await self._rebuild()", "pass")),),
    ),
)
