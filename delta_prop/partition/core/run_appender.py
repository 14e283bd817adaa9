"""Runs of batches and coalesced drafts, appended in few steps.

Pure but for the log that it is given. What they do not take, the pipeline appends one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import TYPE_CHECKING

from delta_prop.partition.core.appender import Appender
from delta_prop.partition.ingest.origins import OriginState
from delta_prop_wire.batch import Batch, LoggedBatch
from delta_prop_wire.delta import Source
from delta_prop_wire.validate import may_be_in_run

if TYPE_CHECKING:
    from delta_prop.partition.core.coalesced_draft import CoalescedDraft


class RunAppender(Appender):
    """An appender with the same effects as `Appender`, which also takes several batches or calls at once."""

    def append_run(
        self, batches: Sequence[Batch], state: OriginState, source: Source, now: float
    ) -> list[LoggedBatch]:
        """Append consecutive batches of one origin that has said hello, faster than `append_sequenced`.

        Return those that were appended: none if the log lacks the capacity for all; otherwise those before
        the first batch that is refused, or that has more than common columns.
        """
        if not self.log.make_capacity_for(batches):
            return []
        origin, first_lamport = batches[0].origin, self.lamport + 1
        valid_count = self.vectors.append_run(
            [*takewhile(may_be_in_run, batches)],
            source,
            lambda other: self._clocks.seen_counter(origin, (), other),
        )
        if not valid_count:
            return []
        accepted = batches if valid_count == len(batches) else batches[:valid_count]
        logged_batches = self.log.append_run(accepted, lamport=first_lamport, source=source)
        first, last = logged_batches[0], logged_batches[-1]
        self.lamport = last.lamport + last.count - 1
        self._origins.note_appended_run(state, accepted, first.offset, now)
        self._clocks.note_appended(origin, ())
        self.counters.accepted += last.next_offset - first.offset
        return logged_batches

    def append_coalesced(self, draft: CoalescedDraft, origin: int, now: float) -> LoggedBatch:
        """Append a draft that names no ids and no parents, so that it holds no duplicates.

        Raises Refused; then nothing has changed.
        """
        clock = self._find_clock_changes(draft, origin)
        batch = draft.encode(
            origin=origin,
            base=self._watermarks.get(origin, 0) + 1,
            clock=clock,
            hybrid_time=self._next_hybrid_time(),
        )
        appended = self.append_run([batch], self._require_state(batch), Source.LOCAL, now)
        if appended:
            return appended[0]
        self.vectors.check(batch, self._load_head)
        logged = self._append(batch, None, Source.LOCAL)
        self._note_appended(logged, now)
        return logged
