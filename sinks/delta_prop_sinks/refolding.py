"""Collects the out-of-order rows of all deliveries of a call, then refolds each of their vectors once.

A vector is refolded from the last savepoint before its first out-of-order row (`delta_chain.py`) or, if its
chain starts too late, from the log, which is read once for all vectors of a call. The work yields to the
event loop. A result replaces the vector atomically once it is complete: until then readers see the old state.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from delta_prop_sinks.delta_chain import DeltaChain, DeltaChains, Entry, Ref
from delta_prop_sinks.pace import Pace
from delta_prop_sinks.resident_tables import ResidentTables
from delta_prop_sinks.sink import Delivery, SinkContext, StopSink
from delta_prop_sinks.vector_history import VectorHistory, base_at, fold_entries, read_histories
from delta_prop_sinks.vector_table import DIRTY, STALE, VectorTable, restore
from delta_prop_wire.algebra import Key

_STEP_ENTRIES = 64
"""Deltas folded between two checks of the clock."""


@dataclass(slots=True)
class DeferredVector:
    """The rows of one vector in this call, in log order. `head`: its highest key, these rows included.

    `out_of_order`: the number of rows that sort before an earlier one. `inserted`: the number of rows that
    are in the chain. `offset`: the offset of the last delta that the vector includes once it is folded.
    """

    table: VectorTable
    slot: int
    head: Key
    rows: list[Entry] = field(default_factory=list)
    out_of_order: int = 0
    inserted: int = 0
    offset: int = -1


class Refolder:
    """The rows of a call that cannot be folded on top, by vector; and counts since the object was made.

    `deliveries`: those with deferred rows, and all after them.

    `out_of_order`: rows that sort before an earlier one of their vector. `below_snapshot`: rows that sort
    before the state with which the log starts. `duplicates`: rows whose dot was known.
    `vectors_from_log`: vectors folded from the log. `log_passes`: reads of the log. `refolded`: deltas folded
    by refolds, the out-of-order rows included.
    """

    def __init__(self, chains: DeltaChains) -> None:
        self.deferred: dict[Ref, DeferredVector] = {}
        self.deliveries: list[Delivery] = []
        self.out_of_order = self.below_snapshot = self.duplicates = 0
        self.vectors_from_log = self.log_passes = self.refolded = 0
        self._chains = chains

    def add(self, ref: Ref, table: VectorTable, slot: int, row: Entry) -> None:
        """Defer a row. Later rows of its vector must be deferred too, until all are folded."""
        vector = self.deferred.get(ref)
        if vector is None:
            vector = self.deferred[ref] = DeferredVector(table, slot, table.head(slot)[:3])
        elif row.offset <= vector.offset:
            self.duplicates += 1
            return
        if row.key > vector.head:
            vector.head = row.key
        else:
            vector.out_of_order += 1
        vector.rows.append(row)
        vector.offset = row.offset

    def clear(self) -> None:
        """Drop rows that are not folded, which are redelivered, and the chains that contain some of them."""
        for ref in self.deferred:
            chain = self._chains.get(ref)
            if chain is not None and chain.first_changed is not None:
                self._chains.forget(ref)
        self.deferred.clear()
        self.deliveries.clear()

    async def fold(
        self, tables: ResidentTables, context: SinkContext, pace: Pace, *, log_is_complete: bool
    ) -> int:
        """Fold all vectors; return the number of rows.

        `log_is_complete`: no delta was folded before this log was first opened.

        Raises StopSink if the log lacks deltas that are needed, and the errors of `pace`.
        """
        not_in_chain, row_count = [], 0
        for ref, vector in list(self.deferred.items()):
            if not self._insert(ref, vector, context.clock.now()):
                not_in_chain.append(ref)
                continue
            row_count += await self._fold(ref, pace)
            tables.table(ref[0])
        log_is_complete = log_is_complete and bool(not_in_chain) and context.log_start == 0
        while not_in_chain:
            self.log_passes += 1
            ends = {ref: self.deferred[ref].rows[-1].offset for ref in not_in_chain}
            histories = await read_histories(context, ends, bytes_max=self._chains.bytes_max)
            pace.check()
            for ref, history in histories.items():
                self._load_history(ref, history, context, log_is_complete=log_is_complete)
                row_count += await self._fold(ref, pace)
                tables.table(ref[0])
            not_in_chain = [ref for ref in not_in_chain if ref not in histories]
        return row_count

    def _insert(self, ref: Ref, vector: DeferredVector, now: float) -> bool:
        """Insert rows into the vector's chain until one sorts too early for it; True if all were inserted."""
        chain = self._chains.get(ref)
        if chain is None:
            return False
        for row in vector.rows:
            if not chain.can_insert(row):
                return False
            if row.key < chain.base.key:
                chain.count_ignored()
                self.below_snapshot += 1
            elif not self._chains.insert(ref, chain, row, now):
                self.duplicates += 1
            vector.inserted += 1
        return True

    def _load_history(
        self, ref: Ref, history: VectorHistory, context: SinkContext, *, log_is_complete: bool
    ) -> None:
        """Start a vector's chain from its history in the log.

        If the log lacks some of the history, the present chain continues with rows that sort after all
        others; for these rows, the log only needs to show which are duplicates.
        """
        vector, chains, now = self.deferred[ref], self._chains, context.clock.now()
        new_chain = history.chain(vector.rows, log_is_complete=log_is_complete)
        if new_chain is not None:
            chains.start(ref, new_chain, now)
            vector.offset = max(vector.offset, history.offset)
            self.vectors_from_log += 1
            self.below_snapshot += history.below_snapshot
            return
        chain = chains.get(ref)
        if chain is None:
            chain = chains.start(ref, DeltaChain(base_at(vector.table, vector.slot)), now)
        for row in vector.rows[vector.inserted :]:
            can_insert = chain.can_insert(row)
            if not can_insert and row.key <= chain.end_key:
                raise StopSink(
                    f"needs snapshot: the delta at offset {row.offset} sorts before the stored history of "
                    f"vector {ref[1]!r}, and the log starts at offset {context.log_start}: "
                    "rebuild the sink from a snapshot"
                )
            if not chains.insert(ref, chain, row, now):
                self.duplicates += 1
            elif not can_insert:
                row.is_duplicate = row.key in history.duplicates

    async def _fold(self, ref: Ref, pace: Pace) -> int:
        """Fold a vector's chain from its last savepoint, in pieces, and replace the vector by the result."""
        vector, chain = self.deferred[ref], self._chains.get(ref)
        assert chain is not None
        index, state = chain.last_savepoint()
        entries, positions = chain.entries, chain.savepoint_positions()
        scratch = VectorTable(vector.table.namespace)
        if vector.table.dimension is not None:
            scratch.fix_dimension(vector.table.dimension)
        slot = scratch.slot_of(ref[1])
        restore(scratch, slot, state)
        while index < len(entries):
            end = min(index + _STEP_ENTRIES, len(entries), *positions[-1:])
            fold_entries(scratch, slot, entries[index:end])
            self.refolded += end - index
            index = end
            if positions and index == positions[-1]:
                positions.pop()
                scratch.set_head(slot, *entries[index - 1].key, 0)
                self._chains.add_savepoint(chain, index, base_at(scratch, slot))
            if pace.is_due:
                await pace.rest()
        table = vector.table
        restore(table, vector.slot, base_at(scratch, slot))
        table.set_head(vector.slot, *chain.end_key, vector.offset)
        table.flags[vector.slot] = DIRTY | STALE
        chain.first_changed = None
        self.out_of_order += vector.out_of_order
        del self.deferred[ref]
        return len(vector.rows)
