"""What resident vectors consist of: their tables, the progress of their fold, their residency, their rebuild.

Bookkeeping only: `resident.py` decides which rows are folded, and when; the sharing sinks read it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from delta_prop_sinks.delta_chain import ChainBase, DeltaChains, Ref
from delta_prop_sinks.pace import Pace
from delta_prop_sinks.ports import Clock
from delta_prop_sinks.sink import Delivery, SinkContext, StopSink, TryAgain
from delta_prop_sinks.storage_image import Block, add_block
from delta_prop_sinks.vector_table import (
    ABSENT,
    DIRTY,
    IN_FLIGHT,
    LAMPORT,
    NO_LAMPORT,
    OFFSET,
    VectorTable,
    put,
    tombstones_before,
)
from delta_prop_wire.errors import UsageError
from delta_prop_wire.state_rows import StateRow

_SLOTS_PER_STEP = 1024
"""Slots searched for tombstones in one step: to release as many takes a few ms."""


class FoldProgress:
    """Progress of the fold, and the log that the deltas are from.

    `lamport`: the highest Lamport number that was folded; `lamport_before_log`: that before this log was
    first opened. `next_offset`: below it, all deltas for these vectors are folded. `folded`, `duplicates`:
    numbers of deltas since the vectors were made. `watchers`: called whenever deltas have been folded, or a
    rebuild has ended.
    """

    def __init__(self) -> None:
        self.log_id: bytes | None = None
        self.lamport = 0
        self.lamport_before_log = 0
        self.next_offset = 0
        self.folded = self.duplicates = 0
        self.watchers: list[Callable[[], None]] = []
        self._topics: frozenset[str] = frozenset()

    def enter(self, context: SinkContext) -> bool:
        """Prepare for deltas of the context's log; return True if it is another log than before.

        Raises UsageError if sinks that share the vectors subscribe to different topics: one would skip deltas
        that the other has not applied.
        """
        if self.log_id == context.log_id:
            if self._topics != context.topics:
                raise UsageError(
                    f"topics {sorted(context.topics)} differ from {sorted(self._topics)} of a sink that uses "
                    "the vectors: give both the same topics, or each its own ResidentVectors"
                )
            return False
        self._topics = context.topics
        is_another = self.log_id is not None
        if is_another:
            self.next_offset = 0
        self.log_id = context.log_id
        self.lamport_before_log = self.lamport
        return is_another

    def note_lamport(self, lamport: int) -> None:
        """Note a Lamport number that is folded."""
        self.lamport = max(self.lamport, lamport)

    def restart(self, log_id: bytes, next_offset: int, lamport: int) -> None:
        """Note that the vectors are the fold of all deltas of this log below `next_offset`."""
        self.log_id, self.next_offset, self.lamport = log_id, next_offset, lamport
        self.lamport_before_log = 0

    def notify_watchers(self) -> None:
        """Call all watchers."""
        for notify in self.watchers:
            notify()


class Residency:
    """Residency of the vectors: all are in memory, or some only in a store.

    `complete`: True if all are in memory. `stored`: True if a storage sink shares the vectors: it is the
    store. `loaded`: True once the store has loaded its rows. `evicted`: number of rows evicted so far.
    """

    def __init__(self) -> None:
        self.complete = True
        self.stored = self.loaded = False
        self.evicted = 0
        self._pins = 0

    @property
    def is_pinned(self) -> bool:
        """True if no row may be evicted."""
        return self._pins > 0 or not self.stored

    def pin(self, bytes_max: int) -> None:
        """Forbid eviction for a reader of all rows. Raises StopSink if some are evicted."""
        if not self.complete:
            raise _too_small(bytes_max)
        self._pins += 1

    def unpin(self) -> None:
        """Undo one `pin`."""
        self._pins -= 1

    def begin_partial(self, bytes_max: int) -> None:
        """Note that some rows are in the store only. Raises StopSink if no row may be evicted."""
        if self._pins:
            raise _too_small(bytes_max)
        self.complete = False

    def note_evicted(self, rows: int) -> None:
        """Count evicted rows."""
        self.evicted += rows
        self.complete = self.complete and not rows


class VectorRebuild:
    """The rebuild of the vectors from states, by one of the sinks that share them.

    `is_running`: True from its start to its end: no sink may fold meanwhile. `count`: the number of rebuilds
    that have ended.
    """

    def __init__(self) -> None:
        self.is_running = False
        self.count = 0
        self._context: SinkContext | None = None  # of the sink that rebuilds

    def begin(self, context: SinkContext) -> bool:
        """Begin a rebuild by this sink; False if another sink rebuilds the vectors."""
        if self._context is not None and self._context is not context:
            return False
        self._context, self.is_running = context, True
        return True

    def is_by(self, context: SinkContext) -> bool:
        """True if this sink rebuilds the vectors."""
        return self._context is context

    def abandon(self) -> None:
        """Let another sink rebuild the vectors, since this one closes."""
        self._context = None

    def end(self) -> None:
        """End the rebuild."""
        self._context, self.is_running = None, False
        self.count += 1


def _too_small(bytes_max: int) -> StopSink:
    return StopSink(
        f"resident_bytes_max {bytes_max} is too small for all vectors, which an index needs in memory: "
        "raise it"
    )


@dataclass(frozen=True, slots=True)
class ResidentStatistics:
    """Counts since the vectors were created, and their present contents.

    `out_of_order`: forwarded deltas that sort before an earlier one of their vector.
    `below_snapshot`: forwarded deltas that sort before the state with which the log begins; they have no
    effect, and count as ignored.
    `refolded_from_log`: vectors folded from the log, in `log_passes` reads of it.
    `refolded`: deltas folded by refolds, the out-of-order deltas included.
    """

    vectors: int
    bytes: int
    bytes_max: int
    complete: bool
    pinned: bool
    lamport: int
    folded: int
    duplicates: int
    ignored: int
    out_of_order: int
    below_snapshot: int
    refolded_from_log: int
    log_passes: int
    refolded: int
    evicted: int
    chains: int
    chain_bytes: int


class ResidentTables:
    """The present tables, their bytes, and the bound of these.

    `by_namespace`: the present tables; `staged`: the new ones of a rebuild, until they are swapped in.
    `touched`: an ordered set of tables that may have dirty rows. `version`: changes when the vectors become
    invalid, which aborts a running `apply`.
    """

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.by_namespace: dict[str, VectorTable] = {}
        self.staged: dict[str, VectorTable] | None = None
        self.touched: dict[VectorTable, None] = {}
        self.version = 0
        self._size = 0
        self._unsized: set[VectorTable] = set()  # tables whose size may differ from `counted_size`
        self._dimension_of: Callable[[str], int | None] = lambda _: None

    def follow_dimensions(self, dimension_of: Callable[[str], int | None]) -> None:
        """Give new tables the dimension that the log has fixed for their namespaces."""
        self._dimension_of = dimension_of

    @property
    def size(self) -> int:
        """Bytes of the rows, or of the staged rows while there are any."""
        if self.staged is not None:
            return sum(table.size for table in self.staged.values())
        for table in self._unsized:  # only the tables touched since, because there may be many tables
            size = table.size
            self._size += size - table.counted_size
            table.counted_size = size
        self._unsized.clear()
        return self._size

    def table(self, namespace: str) -> VectorTable:
        """Return the table of a namespace, to be changed; create it if there is none."""
        if (staged := self.staged) is not None:
            return staged.get(namespace) or staged.setdefault(namespace, self._new_table(namespace))
        table = self.by_namespace.get(namespace)
        if table is None:
            table = self.by_namespace[namespace] = self._new_table(namespace)
        self._unsized.add(table)
        self.touched[table] = None
        return table

    def _new_table(self, namespace: str) -> VectorTable:
        table = VectorTable(namespace)
        dimension = self._dimension_of(namespace)
        if dimension is not None:
            table.fix_dimension(dimension)
        return table

    def take_touched(self) -> dict[VectorTable, None]:
        """Return the tables that may have become dirty since the last call."""
        touched, self.touched = self.touched, {}
        return touched

    def replace(self, tables: dict[str, VectorTable]) -> None:
        """Replace all tables, atomically."""
        self.by_namespace, self.touched = tables, {}
        self.version += 1
        self._size, self._unsized = 0, set(tables.values())
        for table in tables.values():
            table.counted_size = 0

    def adopt(self, tables: Iterable[VectorTable]) -> None:
        """Adopt complete tables, while there are none."""
        assert not self.by_namespace
        for table in tables:
            self.by_namespace[table.namespace] = table
            self._unsized.add(table)

    def load_states(self, rows: Iterable[StateRow]) -> None:
        """Set vectors to these states unconditionally."""
        for row in rows:
            put(self.table(row.namespace), row.vector_id, row.state, row.offset)

    def load_block(self, block: Block) -> None:
        """Load many rows; rows that are resident already stay."""
        add_block(self.table(block.namespace), block)

    def load(self, namespace: str, vector_id: str, stored: ChainBase, offset: int) -> bool:
        """Load a row; False if it is resident already, since that one is newer."""
        table = self.table(namespace)
        if vector_id in table.slots:
            return False
        put(table, vector_id, stored, offset)
        return True

    def tombstones_before(self, offset: int) -> Iterator[list[Ref]]:
        """Yield the present tombstones whose last delta has an offset below `offset`, or an unknown one.

        Each step searches a bounded number of slots; the tables may change between steps.
        """
        for table in list(self.by_namespace.values()):
            start = 0
            while start < table.used:
                end = min(start + _SLOTS_PER_STEP, table.used)
                yield [
                    (table.namespace, vector_id) for vector_id in tombstones_before(table, start, end, offset)
                ]
                start = end

    def is_alive(self, ref: Ref) -> bool | None:
        """True if a vector is alive, False if it has a tombstone, None if it is not resident."""
        table = self.by_namespace.get(ref[0])
        slot = None if table is None else table.slots.get(ref[1])
        if table is None or slot is None or table.head(slot)[0] == NO_LAMPORT:
            return None
        return bool(table.forms[slot] != ABSENT)

    def release_tombstones(self, refs: Iterable[Ref], chains: DeltaChains) -> None:
        """Release the slots of those vectors that are not alive, and drop their chains."""
        for namespace, vector_id in refs:
            for tables in (self.by_namespace, self.staged or {}):
                table = tables.get(namespace)
                slot = None if table is None else table.slots.get(vector_id)
                if table is not None and slot is not None and table.forms[slot] == ABSENT:
                    chains.forget((namespace, vector_id))
                    table.release(slot)
                    if tables is self.by_namespace:
                        self._unsized.add(table)

    def evict(self, chains: DeltaChains) -> int:
        """Evict clean rows, least recently used first, down to 7/8 of the bound; return their number."""
        excess = self.size - self.bytes_max // 8 * 7
        evicted = 0
        for table, vector_id in oldest_first(self.by_namespace.values()):
            if excess <= 0:
                break
            before = table.size
            chains.forget((table.namespace, vector_id))
            table.release(table.slots[vector_id])
            self._unsized.add(table)
            excess -= before - table.size
            evicted += 1
        return evicted


class FoldPace(Pace):
    """The pace of a fold, which ends if the vectors become invalid in a pause."""

    def __init__(self, clock: Clock, tables: ResidentTables) -> None:
        super().__init__(clock)
        self._tables, self._version = tables, tables.version

    def check(self) -> None:
        """Raise TryAgain if the vectors have become invalid."""
        if self._tables.version != self._version:
            raise TryAgain("the vectors were rebuilt while deltas were folded: all rows are redelivered")


def in_steps(refs: Sequence[Ref]) -> Iterator[list[Ref]]:
    """Yield the different vectors among these, some per step."""
    distinct = list(dict.fromkeys(refs))
    for start in range(0, len(distinct), _SLOTS_PER_STEP):
        yield distinct[start : start + _SLOTS_PER_STEP]


def missing_vectors(tables: Mapping[str, VectorTable], deliveries: Iterable[Delivery]) -> list[Ref]:
    """Return the vectors that deliveries touch and that are in none of these tables."""
    missing: dict[Ref, None] = {}
    for delivery in deliveries:
        batch = delivery.batch
        if batch.is_control:
            continue
        namespaces, keys = batch.namespaces, batch.keys
        for row in range(batch.count) if delivery.rows is None else delivery.rows.tolist():
            table = tables.get(namespaces[row])
            if table is None or keys[row] not in table.slots:
                missing[namespaces[row], keys[row]] = None
    return list(missing)


def oldest_first(tables: Iterable[VectorTable]) -> Iterator[tuple[VectorTable, str]]:
    """Yield evictable vectors, least recently used first. The caller may release each one at once."""
    ages: list[NDArray[np.int64]] = []
    candidates: list[tuple[VectorTable, str]] = []
    for table in tables:
        used = table.used
        idle = (table.flags[:used] & (DIRTY | IN_FLIGHT)) == 0
        idle &= table.heads[:used, LAMPORT] != NO_LAMPORT
        slots = idle.nonzero()[0]
        ages.append(np.maximum(table.heads[slots, OFFSET], table.read_offsets[slots]))
        candidates.extend((table, str(table.slots.id(slot))) for slot in slots.tolist())
    if candidates:
        for index in np.argsort(np.concatenate(ages), kind="stable").tolist():
            yield candidates[index]
