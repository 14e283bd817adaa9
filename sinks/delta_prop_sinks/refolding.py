"""Rows that come behind later ones of their vectors: gathered from all that a call brings, then folded once.

A vector is folded from the last mark below the first of its rows (`chain.py`); where its chain does not reach
back far enough, from the log, which is read once for all vectors of a call. The event loop gets its turns
meanwhile. What is folded takes its place at once when it is whole: until then readers see what there was.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from delta_prop_sinks.chain import Chain, Entry
from delta_prop_sinks.past import Past, checkpoint_at, fold_entries, read_pasts
from delta_prop_sinks.sink import StopSink
from delta_prop_sinks.table import DIRTY, STALE, Table, restore

if TYPE_CHECKING:
    from collections.abc import Callable

    from delta_prop_sinks.chain import Chains, Ref
    from delta_prop_sinks.pace import Pace
    from delta_prop_sinks.sink import SinkContext
    from delta_prop_wire.algebra import Key

_STEP_ENTRIES = 64
"""So many deltas are folded between two looks at the clock."""


@dataclass(slots=True)
class Gathered:
    """The rows in hand of one vector, in the order of the log. `head`: the key of the vector's last delta.

    `late`: how many sort before a delta that came earlier. `inserted`: so many of the rows are in the chain.
    `offset`: of the last delta that is in the vector once it is folded.
    """

    table: Table
    slot: int
    head: Key
    rows: list[Entry] = field(default_factory=list)
    late: int = 0
    inserted: int = 0
    offset: int = -1


class Refolding:
    """The rows of a call that cannot be folded where they stand, by vector; and what became of all so far.

    `beneath`: rows that sort before the state with which the log's past begins. `repeats`: rows whose dot
    was there. `from_log`: vectors that were folded from the log. `log_passes`: how often the log was read.
    `folded_again`: deltas that were folded for all this, those in hand among them.
    """

    def __init__(self, chains: Chains) -> None:
        self.vectors: dict[Ref, Gathered] = {}
        self.late = self.beneath = self.repeats = 0
        self.from_log = self.log_passes = self.folded_again = 0
        self._chains = chains

    def add(self, ref: Ref, table: Table, slot: int, row: Entry) -> None:
        """Gather a row. Later rows of its vector are gathered too, until all are folded."""
        vector = self.vectors.get(ref)
        if vector is None:
            vector = self.vectors[ref] = Gathered(table, slot, table.head(slot)[:3])
        elif row.offset <= vector.offset:
            self.repeats += 1
            return
        if row.key > vector.head:
            vector.head = row.key
        else:
            vector.late += 1
        vector.rows.append(row)
        vector.offset = row.offset

    def clear(self) -> None:
        """Let go of what is not folded: it comes again. Chains that have some of it end."""
        for ref in self.vectors:
            chain = self._chains.get(ref)
            if chain is not None and chain.first_changed is not None:
                self._chains.forget(ref)
        self.vectors.clear()

    async def fold(
        self, table_of: Callable[[str], Table], context: SinkContext, pace: Pace, *, whole: bool
    ) -> int:
        """Fold all vectors; return how many rows that were. `table_of`: has what changes in a table noted.
        `whole`: what was folded before this log was met lies in it too. Raises StopSink where the log does
        not tell enough, what a rest raises.
        """
        unknown, rows = [], 0
        for ref, vector in list(self.vectors.items()):
            if not self._insert(ref, vector, context.clock.now()):
                unknown.append(ref)
                continue
            rows += await self._fold(ref, pace)
            table_of(ref[0])
        whole = whole and bool(unknown) and context.log_start == 0
        while unknown:
            self.log_passes += 1
            ends = {ref: self.vectors[ref].rows[-1].offset for ref in unknown}
            told = await read_pasts(context, ends, bytes_max=self._chains.bytes_max)
            pace.check()
            for ref, past in told.items():
                self._take_past(ref, past, context, whole=whole)
                rows += await self._fold(ref, pace)
                table_of(ref[0])
            unknown = [ref for ref in unknown if ref not in told]
        return rows

    # --- where rows belong

    def _insert(self, ref: Ref, vector: Gathered, now: float) -> bool:
        """Put rows in their places in the vector's chain, as far as it knows these; whether it knew all."""
        chain = self._chains.get(ref)
        if chain is None:
            return False
        for row in vector.rows:
            if not chain.knows(row):
                return False
            if row.key < chain.checkpoint.key:
                chain.ignore()
                self.beneath += 1
            elif not self._chains.insert(ref, chain, row, now):
                self.repeats += 1
            vector.inserted += 1
        return True

    def _take_past(self, ref: Ref, past: Past, context: SinkContext, *, whole: bool) -> None:
        """Begin a vector's chain with what the log tells of it.

        Where that is not enough, the chain there is goes on with rows that sort behind all others: of these
        the log need only tell which have no effect.
        """
        vector, chains, now = self.vectors[ref], self._chains, context.clock.now()
        told = past.chain(vector.rows, whole=whole)
        if told is not None:
            chains.start(ref, told, now)
            vector.offset = max(vector.offset, past.offset)
            self.from_log += 1
            self.beneath += past.beneath
            return
        chain = chains.get(ref)
        if chain is None:
            chain = chains.start(ref, Chain(checkpoint_at(vector.table, vector.slot)), now)
        for row in vector.rows[vector.inserted :]:
            known = chain.knows(row)
            if not known and row.key <= chain.end_key:
                raise StopSink(
                    f"needs snapshot: a late delta at offset {row.offset} sorts before what is kept of "
                    f"vector {ref[1]!r}, and the log holds only what begins at offset {context.log_start}"
                )
            if not chains.insert(ref, chain, row, now):
                self.repeats += 1
            elif not known:
                row.without_effect = row.key in past.twins

    # --- folding

    async def _fold(self, ref: Ref, pace: Pace) -> int:
        """Fold a vector's chain from its last mark, in pieces, and put the result in the vector's place."""
        vector, chain = self.vectors[ref], self._chains.get(ref)
        assert chain is not None
        at, state = chain.last_mark()
        entries, places = chain.entries, chain.places_to_mark()
        beside = Table(vector.table.namespace)
        if vector.table.dimension is not None:
            beside.reserve(vector.table.dimension)
        slot = beside.slot_of(ref[1])
        restore(beside, slot, state)
        while at < len(entries):
            end = min(at + _STEP_ENTRIES, len(entries), *places[-1:])
            fold_entries(beside, slot, entries[at:end])
            self.folded_again += end - at
            at = end
            if places and at == places[-1]:
                places.pop()
                beside.set_head(slot, *entries[at - 1].key, 0)
                self._chains.mark(chain, at, checkpoint_at(beside, slot))
            if pace.is_due:
                await pace.rest()
        table = vector.table
        restore(table, vector.slot, checkpoint_at(beside, slot))
        table.set_head(vector.slot, *chain.end_key, vector.offset)
        table.marks[vector.slot] = DIRTY | STALE
        chain.first_changed = None
        self.late += vector.late
        del self.vectors[ref]
        return len(vector.rows)
