"""Runs of batches and coalesced drafts, appended in few steps: the fast paths of `Appender`.

Pure but for the log that it is given. What they do not take, the pipeline appends one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby, takewhile
from operator import attrgetter
from typing import TYPE_CHECKING

from delta_prop.partition.core.appender import Appender
from delta_prop.partition.ingest.origins import OriginState
from delta_prop_wire.batch import Batch, LoggedBatch
from delta_prop_wire.core import core_mode
from delta_prop_wire.delta import Source
from delta_prop_wire.errors import Refused

if TYPE_CHECKING:
    from delta_prop.partition.core.coalesced_draft import CoalescedDraft, JoinedDraft
    from delta_prop.partition.core.fast_heads import FastVectorHeads

_NAMESPACE_AND_KIND = attrgetter("namespace", "kind")


class FastAppender(Appender):
    """An appender with the same effects as `Appender`, which also takes several batches or calls at once."""

    vectors: FastVectorHeads

    @property
    def is_fast(self) -> bool:
        """True unless the fast paths are turned off."""
        return core_mode.is_fast

    def append_run(
        self, batches: Sequence[Batch], state: OriginState, source: Source, now: float
    ) -> list[LoggedBatch]:
        """Append consecutive batches of one origin that has said hello, faster than `append_sequenced`.

        Return those that were appended: none if the log lacks the capacity for all; otherwise those before
        the first batch whose rows must be checked one by one.
        """
        if not (core_mode.is_fast and self.log.make_capacity_for(batches)):
            return []
        valid_count, first_lamport = 0, self.lamport + 1
        for uniform in _group_uniform(batches):
            noted_count = self._note_uniform(uniform, source) if uniform[0].homogeneous else 0
            if noted_count < len(uniform):
                noted_count += self._note_each(uniform[noted_count:], source)
            valid_count += noted_count
            if noted_count < len(uniform):
                break
        if not valid_count:
            return []
        accepted = batches if valid_count == len(batches) else batches[:valid_count]
        self.lamport += sum([batch.count for batch in accepted])
        logged_batches = self.log.append_run(accepted, lamport=first_lamport, source=source)
        self._origins.note_appended_run(state, accepted, logged_batches[0].offset, now)
        self._clocks.note_appended(batches[0].origin, ())
        self.counters.accepted += self.lamport + 1 - first_lamport
        return logged_batches

    def append_coalesced(
        self, draft: CoalescedDraft | JoinedDraft, origin: int, now: float
    ) -> LoggedBatch | None:
        """Append a draft that names no ids and no parents, so that it holds no duplicates.

        Return None if its numbers are invalid. Raises Refused; in either case nothing has changed.
        """
        vectors, clock = self.vectors, self._find_clock_changes(draft, origin)
        hybrid_time_before = self._hybrid_time
        batch = draft.encode(
            origin=origin,
            base=self._watermarks.get(origin, 0) + 1,
            clock=clock,
            hybrid_time=self._next_hybrid_time(),
        )
        if not draft.is_valid(batch):
            self._hybrid_time = hybrid_time_before
            return None
        vectors.check(batch, self._load_head)
        logged = self.log.append(batch, lamport=self.lamport + 1, source=Source.LOCAL)
        self.lamport += batch.count
        self.counters.accepted += batch.count
        self._origins.note_appended(self._require_state(batch), batch, logged.offset, now)
        self._clocks.note_appended(origin, clock)
        vectors.note_appended(batch, Source.LOCAL)
        return logged

    def _note_uniform(self, batches: Sequence[Batch], source: Source) -> int:
        """Move heads and count concurrent updates, of all these batches or none; return how many it noted."""
        seen = self._seen_counters_of(batches[0].origin)
        is_noted = all(map(core_mode.core.batch_is_valid, batches)) and self.vectors.append_uniform(
            batches, source, seen
        )
        return len(batches) if is_noted else 0

    def _seen_counters_of(self, origin: int) -> Callable[[int], int]:
        """Return a function that returns the counter of another origin that this origin has seen."""
        return lambda other: self._clocks.seen_counter(origin, (), other)

    def _note_each(self, batches: Sequence[Batch], source: Source) -> int:
        """Note heads and concurrent updates batch by batch; return the number before the first refused."""
        valid, noted_count = [*takewhile(core_mode.core.batch_is_valid, batches)], 0
        while noted_count < len(valid):
            if not valid[noted_count].homogeneous:
                noted_count += self.vectors.append_heterogeneous(
                    valid[noted_count:], self._seen_counters_of(batches[0].origin)
                )
                if noted_count == len(valid):
                    break
            batch = valid[noted_count]
            try:
                self.vectors.check(batch, self._load_head)
            except Refused:
                break
            self._count_concurrent(batch)
            self.vectors.note_appended(batch, source)
            noted_count += 1
        return noted_count


def _group_uniform(batches: Sequence[Batch]) -> Iterable[Sequence[Batch]]:
    """Group consecutive batches of one namespace and one kind."""
    if len(batches) == 1:
        return (batches,)
    return [[*group] for _, group in groupby(batches, _NAMESPACE_AND_KIND)]
