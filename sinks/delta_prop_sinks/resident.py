"""Resident vectors: the present state of every vector, in one bounded structure that sinks share.

The rule: each delta changes a vector once, and vectors are folded in canonical order, whichever of the
sharing sinks brings a delta first. These sinks must subscribe to the same topics, and topics must match full
vectors (all, a namespace, a vector id), because a state is a fold of all of a vector's deltas.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager

import anyio
import numpy as np
from numpy.typing import NDArray

from delta_prop_sinks.argument_checks import check_at_least
from delta_prop_sinks.delta_chain import ChainBase, DeltaChains, Entry, Ref
from delta_prop_sinks.pace import Pace
from delta_prop_sinks.refolding import Refolder
from delta_prop_sinks.resident_tables import (
    FoldPace,
    FoldProgress,
    Residency,
    ResidentStatistics,
    ResidentTables,
    VectorRebuild,
    in_steps,
    missing_vectors,
)
from delta_prop_sinks.sink import Delivery, RejectDelta, SinkContext, StopSink
from delta_prop_sinks.storage_image import Block
from delta_prop_sinks.vector_history import base_at
from delta_prop_sinks.vector_table import (
    DIRTY,
    FOLDED_KINDS,
    LAMPORT,
    NO_LAMPORT,
    NO_OFFSET,
    OFFSET,
    STALE,
    Misfit,
    VectorTable,
    fold_leading,
    state_of,
    unknown_kind,
)
from delta_prop_wire.algebra import Key, VectorState
from delta_prop_wire.batch import LoggedBatch
from delta_prop_wire.delta import Dot, Head, KnownIds, Source
from delta_prop_wire.state_rows import StateRow

_REFOLD_DELTAS = 10_000
_NO_REF = ("", "")
_REPLICA, _NO_IDS = Source.REPLICA, KnownIds.NONE
"""Members of enums, which take long to look up."""


class FoldedRange:
    """The newest contiguous range of fully folded batches, to detect a duplicate batch by one comparison."""

    def __init__(self) -> None:
        self._start = self._end = 0

    def clear(self) -> None:
        """Empty the range: the folded rows were dropped, or the log has changed."""
        self._start = self._end = 0

    def note(self, delivery: Delivery, next_offset: int) -> None:
        """Add a folded delivery that ends at `next_offset`."""
        if delivery.rows is None and delivery.end is None and not delivery.redelivered:
            offset = delivery.logged.offset
            if offset != self._end:
                self._start = offset
            self._end = next_offset

    def has_all_of(self, delivery: Delivery) -> bool:
        """True if all rows of a delivery are in the range."""
        return (
            self._start <= delivery.logged.offset
            and delivery.next_offset <= self._end
            and not delivery.redelivered
        )


class ResidentVectors:
    """The fold of all deltas, by namespace and vector id.

    `resident_bytes_max` bounds the rows. While no row may be evicted (an index reads them all, or no store
    has a copy), exceeding it raises StopSink; otherwise the storage sink evicts the least recently used rows.
    """

    def __init__(
        self,
        *,
        resident_bytes_max: int = 1 << 30,
        chain_age_s_max: float = 60.0,
        chain_bytes_max: int = 64 << 20,
    ) -> None:
        check_at_least(0, resident_bytes_max=resident_bytes_max)
        self.progress = FoldProgress()
        self.residency = Residency()
        self.rebuild = VectorRebuild()
        self.chains = DeltaChains(age_s_max=chain_age_s_max, bytes_max=chain_bytes_max)
        self.deltas_per_call = 0
        """Deltas wanted in the next call: many during refolds, as each call refolds a vector once."""
        self._tables = ResidentTables(resident_bytes_max)
        self._refolder = Refolder(self.chains)
        self._deferred_vectors = self._refolder.deferred  # read for each row, so held here for speed
        self._folded_range = FoldedRange()
        self._apply_done: anyio.Event | None = None  # exists while an `apply` that yields is running

    @property
    def resident_bytes_max(self) -> int:
        """The bound of the rows, in bytes."""
        return self._tables.bytes_max

    @resident_bytes_max.setter
    def resident_bytes_max(self, bytes_max: int) -> None:
        self._tables.bytes_max = bytes_max

    @property
    def lamport(self) -> int:
        """The highest Lamport number that was folded."""
        return self.progress.lamport

    @property
    def next_offset(self) -> int:
        """Below this offset, all deltas for these vectors are folded."""
        return self.progress.next_offset

    @property
    def complete(self) -> bool:
        """True if all vectors are in memory, none only in the store."""
        return self.residency.complete

    @property
    def rebuilding(self) -> bool:
        """True from the start of a rebuild to its end: no sink may fold meanwhile."""
        return self.rebuild.is_running

    # --- sharing

    def enter(self, context: SinkContext) -> None:
        """Prepare for deltas of the context's log; if that is another log, stored offsets become invalid.

        Raises UsageError if sinks that share these vectors subscribe to different topics: one would skip
        deltas that the other has not applied.
        """
        self._tables.follow_dimensions(context.dimension)
        if self.progress.enter(context):
            for table in self.tables.values():
                table.heads[:, OFFSET] = NO_OFFSET
            self._tables.version += 1
            self.chains.clear()
            self._folded_range.clear()

    def note_lamport_before_log(self, lamport: int) -> None:
        """Note the highest Lamport number that was folded before this log was first opened."""
        progress = self.progress
        progress.lamport_before_log = max(progress.lamport_before_log, lamport)
        progress.note_lamport(lamport)

    def note_loaded(self, next_offset: int) -> None:
        """Note that the store has loaded its rows, with all deltas below `next_offset` of this log."""
        self.residency.loaded = True
        self.progress.next_offset = max(self.progress.next_offset, next_offset)

    @property
    def pinned(self) -> bool:
        """True if no row may be evicted."""
        return self.residency.is_pinned

    @property
    def tables(self) -> dict[str, VectorTable]:
        """Tables by namespace."""
        return self._tables.by_namespace

    @property
    def size(self) -> int:
        """Bytes of the rows, or of the staged rows while there are any; chains have their own bound."""
        return self._tables.size

    @property
    def is_full(self) -> bool:
        """True if the rows exceed their bound."""
        tables = self._tables
        return tables.size > tables.bytes_max

    def state(self, namespace: str, vector_id: str) -> VectorState | None:
        """Return the present state of a vector, None if it is not resident."""
        table = self.tables.get(namespace)
        slot = None if table is None else table.slots.get(vector_id)
        if table is None or slot is None or table.head(slot)[0] == NO_LAMPORT:
            return None
        table.read_offsets[slot] = self.next_offset
        return state_of(table, slot)

    def dimensions(self) -> dict[str, int]:
        """Return the dimension of each namespace of which a vector was resident."""
        return {name: table.dimension for name, table in self.tables.items() if table.dimension}

    def head(self, namespace: str, vector_id: str) -> Head | None:
        """Return a vector's last dot and True if it is alive; None if it is not resident."""
        state = self.state(namespace, vector_id)
        if state is None or state.key is None:
            return None
        return Head(Dot(state.key[1], state.key[2]), state.alive)

    def rows(self) -> Iterator[tuple[str, str, VectorState]]:
        """Yield all resident states, tombstones included: (namespace, vector id, state)."""
        for namespace, table in self.tables.items():
            for vector_id, slot in table.vectors():
                if table.head(slot)[0] != NO_LAMPORT:
                    yield namespace, vector_id, state_of(table, slot)

    def statistics(self) -> ResidentStatistics:
        """Return a snapshot of counts and sizes."""
        refolding = self._refolder
        return ResidentStatistics(
            vectors=sum(int(np.count_nonzero(table.forms)) for table in self.tables.values()),
            bytes=self.size,
            bytes_max=self.resident_bytes_max,
            complete=self.complete,
            pinned=self.pinned,
            lamport=self.lamport,
            folded=self.progress.folded,
            duplicates=self.progress.duplicates + refolding.duplicates,
            ignored=sum(sum(table.ignored.values()) for table in self.tables.values()),
            out_of_order=refolding.out_of_order,
            below_snapshot=refolding.below_snapshot,
            refolded_from_log=refolding.vectors_from_log,
            log_passes=refolding.log_passes,
            refolded=refolding.refolded,
            evicted=self.residency.evicted,
            chains=len(self.chains),
            chain_bytes=self.chains.size,
        )

    async def apply(self, deliveries: Sequence[Delivery], context: SinkContext) -> int:
        """Fold the new rows; return their number.

        Long work yields to other tasks. Raises RejectDelta, StopSink; TryAgain if the vectors are rebuilt
        meanwhile.
        """
        while self._apply_done is not None:
            await self._apply_done.wait()
        progress = self.progress
        before, pace = progress.folded, FoldPace(context.clock, self._tables)
        try:
            for delivery in deliveries:
                self._apply_one(delivery, context)
                if pace.is_due:
                    self._hold_other_calls()
                    await pace.yield_to_others()
        except RejectDelta:
            await self._fold_deferred(context, pace)  # rows before the rejected one are applied
            raise
        else:
            if progress.folded > before:
                self.deltas_per_call = 0
            await self._fold_deferred(context, pace)
        finally:
            self._end_apply(context)
        progress.notify_watchers()
        return progress.folded - before

    def apply_now(self, deliveries: Sequence[Delivery], context: SinkContext) -> bool:
        """Fold as `apply` does; False if that would take long: call `apply`. Raises RejectDelta, StopSink."""
        if self._apply_done is not None:
            return False
        try:
            for delivery in deliveries:
                self._apply_one(delivery, context)
            is_done = not self._deferred_vectors
        finally:
            if self.chains.active:
                self._end_apply(context)
        if self.progress.watchers:
            self.progress.notify_watchers()
        return is_done

    def _hold_other_calls(self) -> None:
        if self._apply_done is None:
            self._apply_done = anyio.Event()

    async def _fold_deferred(self, context: SinkContext, pace: Pace) -> None:
        if not self._deferred_vectors:
            return
        self.deltas_per_call = _REFOLD_DELTAS
        self._hold_other_calls()
        log_is_complete = self.progress.lamport_before_log == 0
        self.progress.folded += await self._refolder.fold(
            self._tables, context, pace, log_is_complete=log_is_complete
        )
        for delivery in self._refolder.deliveries:
            self._note(delivery)

    def _end_apply(self, context: SinkContext) -> None:
        """Drop the rows that were deferred and not folded, and admit the next call."""
        if self._deferred_vectors or self._refolder.deliveries:
            self._refolder.clear()
        if self.chains.active:
            self.chains.expire(context.clock.now())
        self._admit_other_calls()

    def _admit_other_calls(self) -> None:
        if self._apply_done is not None:
            self._apply_done.set()
            self._apply_done = None

    def _note(self, delivery: Delivery) -> None:
        next_offset, progress = delivery.next_offset, self.progress
        self._folded_range.note(delivery, next_offset)
        if next_offset > progress.next_offset and not delivery.redelivered:
            progress.next_offset = next_offset

    def _apply_one(self, delivery: Delivery, context: SinkContext) -> None:
        """Fold a delivery, or defer its rows, and those after them, until `_fold_deferred`."""
        if self._folded_range.has_all_of(delivery):
            self.progress.duplicates += delivery.count  # another sink that shares these vectors brought them
            return
        self.check_fits()
        self._fold_rows(delivery.logged, delivery.rows, context)
        if self._deferred_vectors:
            self._refolder.deliveries.append(delivery)
        else:
            self._note(delivery)

    def check_fits(self) -> None:
        """Raise StopSink if the rows that must stay in memory are too large."""
        if self.is_full and self.pinned:
            raise StopSink(
                f"vectors in memory take {self.size} bytes, the bound is {self.resident_bytes_max}: "
                "raise resident_bytes_max" + (", or detach the index" if self.residency.stored else "")
            )

    def _fold_rows(self, logged: LoggedBatch, rows: NDArray[np.intp] | None, context: SinkContext) -> None:
        batch = logged.batch
        if batch.is_control:
            return
        if logged.source is _REPLICA:
            self.chains.active = True
        progress, lamport = self.progress, logged.lamport + logged.count - 1
        progress.lamport = max(progress.lamport, lamport)
        tables = list(map(self._tables.table, batch.namespace_names))
        taken, count = 0, batch.count if rows is None else len(rows)
        if not (self.chains.active or self._deferred_vectors or logged.known_ids is not _NO_IDS):
            taken, _ = fold_leading(tables, logged, rows, adds=True)
            progress.folded += taken
            if taken == count:
                return
        namespaces, keys = batch.namespaces, batch.keys
        table_of = dict(zip(batch.namespace_names, tables, strict=True))
        for row in range(taken, count) if rows is None else rows[taken:].tolist():
            self._fold_or_defer_row(logged, row, table_of[namespaces[row]], keys[row], context)

    def _fold_or_defer_row(
        self, logged: LoggedBatch, row: int, table: VectorTable, vector_id: str, context: SinkContext
    ) -> None:
        offset, key = logged.offset + row, logged.key(row)
        slot = table.slot_of(vector_id)
        lamport, origin, counter, head_offset = table.head(slot)
        if offset <= head_offset:
            self.progress.duplicates += 1
            return
        chains = self.chains
        ref = (table.namespace, vector_id) if chains.active else _NO_REF
        if (
            (lamport >= key[0] and (lamport, origin, counter) >= key)
            or (logged.known_ids is not _NO_IDS and lamport != NO_LAMPORT)
            or ref in self._deferred_vectors
        ):
            self._defer_row(Entry(key, logged, row), table, slot)
            return
        if not chains.active:
            self._fold_row(logged, row, table, slot, key)
            return
        base = base_at(table, slot) if chains.get(ref) is None else None
        self._fold_row(logged, row, table, slot, key)
        chain = chains.note(ref, Entry(key, logged, row), base, context.clock.now())
        chains.hold(logged.batch)
        if len(chain.entries) >= chain.savepoint_at:
            chains.add_savepoint(chain, len(chain.entries), base_at(table, slot))

    def _defer_row(self, entry: Entry, table: VectorTable, slot: int) -> None:
        """Defer a row, to fold it with others of its vector, unless it is the vector's last delta again."""
        vector_id = str(table.slots.id(slot))
        ref = (table.namespace, vector_id)
        if ref not in self._deferred_vectors and table.head(slot)[:3] == entry.key:
            self.progress.duplicates += 1
            table.set_head(slot, *entry.key, entry.offset)  # the same delta, at another offset
            return
        if (kind := entry.logged.batch.kinds[entry.row]) not in FOLDED_KINDS:
            raise RejectDelta(entry.offset, f"{vector_id!r}: {unknown_kind(kind)}")
        self.chains.active = True
        self._refolder.add(ref, table, slot, entry)

    def _fold_row(self, logged: LoggedBatch, row: int, table: VectorTable, slot: int, key: Key) -> None:
        """Fold a row into its vector's present state. Raises RejectDelta."""
        try:
            table.fold_row(logged.batch, row, slot)
        except Misfit as error:
            vector_id = table.slots.id(slot)
            if table.head(slot)[0] == NO_LAMPORT:
                table.release(slot)
            raise RejectDelta(logged.offset + row, f"{vector_id!r}: {error}") from None
        table.set_head(slot, *key, logged.offset + row)
        table.flags[slot] = DIRTY | STALE
        self.progress.folded += 1

    # --- tombstones

    @asynccontextmanager
    async def hold(self) -> AsyncIterator[None]:
        """Wait until no `apply` runs; calls of it wait until the scope ends."""
        while self._apply_done is not None:
            await self._apply_done.wait()
        self._hold_other_calls()
        try:
            yield
        finally:
            self._admit_other_calls()

    def tombstones_before(self, offset: int) -> Iterator[list[Ref]]:
        """Yield the tombstones below an offset, in bounded steps; some steps find none."""
        return self._tables.tombstones_before(offset) if offset > 0 else iter(())

    def is_alive(self, ref: Ref) -> bool | None:
        """True if a vector is alive, False if it has a tombstone, None if it is not resident."""
        return self._tables.is_alive(ref)

    def release_tombstones(self, refs: Iterable[Ref]) -> None:
        """Release the slots of those vectors that are not alive. Call it within `hold`, and, if there is a
        store, once the store has removed their rows.
        """
        self._tables.release_tombstones(refs, self.chains)

    async def forget(self, erased: Sequence[Ref], before: int, context: SinkContext) -> None:
        """Remove tombstones, as `HoldsTombstones.forget` does, of vectors that no store holds."""
        pace = FoldPace(context.clock, self._tables)
        for refs in itertools.chain(in_steps(erased), self.tombstones_before(before)):
            async with self.hold():
                self.release_tombstones(refs)
            if pace.is_due:
                await pace.yield_to_others()

    # --- rebuilds from states

    def begin_rebuild(self, context: SinkContext) -> bool:
        """Invalidate the vectors, which stay readable; False if another sink rebuilds them."""
        if not self.rebuild.begin(context):
            return False
        self._tables.version += 1
        self._folded_range.clear()
        self.chains.clear()
        self.chains.active = False
        return True

    def abandon_rebuild(self, context: SinkContext) -> None:
        """Note that a sink closes: if it was rebuilding the vectors, another sink may rebuild them."""
        if self.rebuild.is_by(context):
            self.rebuild.abandon()
            self._tables.staged = None

    def clear(self, *, staged: bool = False) -> None:
        """Drop all rows; with `staged`, they stay readable until `swap_in_staged`."""
        self._tables.staged = {} if staged else None
        if not staged:
            self._swap_tables({})
            self.residency.complete = not self.residency.stored  # readers use the store's rows meanwhile

    def load_states(self, rows: Iterable[StateRow]) -> None:
        """Set vectors to these states unconditionally."""
        self._tables.load_states(rows)

    def swap_in_staged(self) -> None:
        """Replace all tables by the staged ones, atomically."""
        if self._tables.staged is not None:
            incoming, self._tables.staged = self._tables.staged, None
            self._swap_tables(incoming)

    def end_rebuild(self, context: SinkContext, offset: int, lamport: int) -> None:
        """Note that the vectors are now the fold of all deltas below `offset` of the present log."""
        self.rebuild.end()
        self.progress.restart(context.log_id, offset, lamport)
        self.progress.notify_watchers()

    def _swap_tables(self, tables: dict[str, VectorTable]) -> None:
        self._tables.replace(tables)
        self._folded_range.clear()

    # --- the store's side

    def missing(self, deliveries: Iterable[Delivery]) -> list[Ref]:
        """Return the vectors that deliveries touch and that are not in memory, but may be in the store."""
        return [] if self.residency.complete else missing_vectors(self.tables, deliveries)

    def take_touched(self) -> dict[VectorTable, None]:
        """Return the tables whose rows may have become dirty since the last call."""
        return self._tables.take_touched()

    def restore_touched(self, touched: dict[VectorTable, None]) -> None:
        """Return tables of `take_touched` whose rows were not written."""
        self._tables.touched.update(touched)

    def adopt(self, tables: Iterable[VectorTable], lamport: int) -> None:
        """Adopt complete tables from the store, while nothing is resident yet."""
        self._tables.adopt(tables)
        self.progress.note_lamport(lamport)

    def load_block(self, block: Block) -> None:
        """Load many rows from the store; rows that are resident already stay."""
        self._tables.load_block(block)
        self.progress.note_lamport(int(block.heads[:, LAMPORT].max()))

    def load(self, namespace: str, vector_id: str, stored: ChainBase, offset: int) -> None:
        """Load a row from the store; a resident one stays, because it is newer."""
        if self._tables.load(namespace, vector_id, stored, offset):
            self.progress.note_lamport(stored.key[0])

    def evict(self) -> int:
        """Evict clean rows, least recently used first, down to 7/8 of the bound; return their number."""
        if self.pinned or self.size <= self.resident_bytes_max:
            return 0
        evicted = self._tables.evict(self.chains)
        self.residency.note_evicted(evicted)
        return evicted
