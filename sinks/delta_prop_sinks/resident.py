"""Resident vectors: the present state of every vector, in one bounded structure that sinks share.

The rule: each delta changes a vector once, and vectors are folded in canonical order, whichever of the
sinks that share the structure brings a delta first. They must be subscribed to the same topics, topics
that match whole vectors (all, a namespace, a vector id): a state is a fold of all of a vector's deltas.
"""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING

import numpy as np

from delta_prop_sinks.chain import Chains, Checkpoint, Entry
from delta_prop_sinks.evicting import missing_of, oldest_first
from delta_prop_sinks.past import (
    checkpoint_at,
    checkpoints_of,
    fold_entry,
    is_own_reset,
    note_block,
    past_of,
    replay,
)
from delta_prop_sinks.resident_statistics import ResidentStatistics
from delta_prop_sinks.runs import SETTING_KINDS, Folded, Run, Unfolded, fold_new
from delta_prop_sinks.sink import RejectDelta, StopSink
from delta_prop_sinks.storage_image import add_block
from delta_prop_sinks.table import (
    BLOCK_KINDS,
    BLOCK_ROWS_MIN,
    DIRTY,
    LAMPORT,
    NO_LAMPORT,
    OFFSET,
    SLOT_BYTES,
    STALE,
    VOID_OFFSET,
    Misfit,
    Table,
    heads_of,
    put,
    restore,
    state_of,
)
from delta_prop_wire.algebra import State
from delta_prop_wire.delta import Dot, Head, Kind, KnownIds, Source
from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from delta_prop_sinks.chain import Chain, Ref
    from delta_prop_sinks.past import Past
    from delta_prop_sinks.sink import Delivery, SinkContext
    from delta_prop_sinks.storage_image import Block
    from delta_prop_wire.algebra import Key
    from delta_prop_wire.batch import LoggedBatch
    from delta_prop_wire.states import StateRow

_TOO_SMALL = "an index needs all vectors in memory, {} bytes do not hold them: raise resident_bytes_max"


class Resident:
    """The fold of all deltas, by namespace and vector id.

    `resident_bytes_max` bounds the rows; while every row must stay (an index reads them, or no store
    could give them back) reaching it is a StopSink, else the store's sink evicts the least recently used.
    """

    def __init__(
        self,
        *,
        resident_bytes_max: int = 1 << 30,
        chain_deltas_max: int = 100,
        chain_age_s_max: float = 60.0,
        chain_bytes_max: int = 64 << 20,
        replay_s_max: float = 0.001,
    ) -> None:
        self.resident_bytes_max = resident_bytes_max
        self.replay_s_max = replay_s_max
        self.chains = Chains(
            deltas_max=chain_deltas_max, age_s_max=chain_age_s_max, bytes_max=chain_bytes_max
        )
        self._tables: dict[str, Table] = {}
        self._unfolded, self._folded_whole = Unfolded(SETTING_KINDS), Folded()
        self._spare = 0  # bytes that what is not folded yet may take
        self._row_bytes = 0  # that a row may take of those that go on as the last did
        self._topics: frozenset[str] = frozenset()
        self._dimension: Callable[[str], int | None] = lambda _: None
        self.lamport = 0
        self.complete = True
        self.next_offset = 0
        self.stored = False
        self.loaded = False
        self._log_id: bytes | None = None
        self._lamport_before_log = 0
        self._pins = 0
        self.touched: dict[Table, None] = {}  # a set that keeps its order
        self._size = 0
        self._unsized: set[Table] = set()
        self._folded = self._repeats = 0
        self._late = self._beneath = self._refolded_from_log = self._evicted = 0
        self.rebuilds = 0
        """How often the vectors were made anew from states."""
        self.void = False
        """A rebuild was begun and has not ended: nobody may fold anything."""
        self.watchers: list[Callable[[], None]] = []
        """Called whenever deltas were folded, or a rebuild has ended."""
        self._rebuilder: SinkContext | None = None
        self._incoming: dict[str, Table] | None = None

    # --- who uses it

    def enter(self, context: SinkContext) -> None:
        """Get ready for deltas of the context's log: beside another log than before, offsets are void.

        Raises UsageError where sinks that share these vectors ask for different topics: one would skip
        what the other has not brought.
        """
        self._dimension = context.dimension
        if self._log_id == context.log_id:
            if self._topics != context.topics:
                raise UsageError(
                    f"sinks that share resident vectors must have the same topics; these were entered for "
                    f"{sorted(self._topics)}, now {sorted(context.topics)}: give each its own Resident"
                )
            return
        self._topics = context.topics
        if self._log_id is not None:
            for table in self.tables.values():
                table.heads[:, OFFSET] = VOID_OFFSET
            self.chains.clear()
            self._folded_whole.forget()
            self.next_offset = 0
        self._log_id = context.log_id
        self._lamport_before_log = self.lamport

    def note_past(self, lamport: int) -> None:
        """Tell up to which Lamport number vectors were already folded when this log was first met."""
        self._lamport_before_log = max(self._lamport_before_log, lamport)
        self.lamport = max(self.lamport, lamport)

    def opened(self, next_offset: int) -> None:
        """The store has loaded what it holds, which is all below that offset of the present log."""
        self.loaded = True
        self.next_offset = max(self.next_offset, next_offset)

    def begin_partial(self) -> None:
        """Tell that some rows are in the store alone. Raises StopSink where every row must stay."""
        if self._pins:
            raise StopSink(_TOO_SMALL.format(self.resident_bytes_max))
        self.complete = False

    def pin(self) -> None:
        """Keep every row from now on: someone reads them all. Raises StopSink where some are evicted."""
        if not self.complete:
            raise StopSink(_TOO_SMALL.format(self.resident_bytes_max))
        self._pins += 1

    def unpin(self) -> None:
        """The inverse of `pin`."""
        self._pins -= 1

    @property
    def pinned(self) -> bool:
        """Whether every row must stay."""
        return self._pins > 0 or not self.stored

    @property
    def tables(self) -> dict[str, Table]:
        """By namespace; all that was applied is folded."""
        if self._unfolded.rows:
            self._settle()
        return self._tables

    @property
    def size(self) -> int:
        """Bytes that the rows take, those that are loaded aside; chains have a bound of their own."""
        if self._unfolded.rows:
            self._settle()
        return self._measured()

    @property
    def is_full(self) -> bool:
        """Whether the rows take more than their bound; what is not folded yet is known to fit."""
        return self._measured() > self.resident_bytes_max

    def _measured(self) -> int:
        if self._incoming is not None:
            return sum(table.size for table in self._incoming.values())
        for table in self._unsized:  # those touched since: there may be very many others
            size = table.size
            self._size += size - table.counted
            table.counted = size
        self._unsized.clear()
        return self._size

    # --- reading

    def state(self, namespace: str, vector_id: str) -> State | None:
        """The present state of a vector, None where it is not resident."""
        table = self.tables.get(namespace)
        slot = None if table is None else table.slots.get(vector_id)
        if table is None or slot is None or table.head(slot)[0] == NO_LAMPORT:
            return None
        table.reads[slot] = self.next_offset
        return state_of(table, slot)

    def dimensions(self) -> dict[str, int]:
        """The dimension of each namespace of which a vector was resident."""
        return {name: table.dimension for name, table in self.tables.items() if table.dimension}

    def head(self, namespace: str, vector_id: str) -> Head | None:
        """The last dot of a vector and whether it is there, None where it is not resident."""
        state = self.state(namespace, vector_id)
        if state is None or state.key is None:
            return None
        return Head(Dot(state.key[1], state.key[2]), state.alive)

    def rows(self) -> Iterator[tuple[str, str, State]]:
        """All resident states, tombstones included: (namespace, vector id, state)."""
        for namespace, table in self.tables.items():
            for vector_id, slot in table.slots.items():
                if table.head(slot)[0] != NO_LAMPORT:
                    yield namespace, vector_id, state_of(table, slot)

    def statistics(self) -> ResidentStatistics:
        """A snapshot of counts and sizes."""
        return ResidentStatistics(
            vectors=sum(int(np.count_nonzero(table.forms)) for table in self.tables.values()),
            bytes=self.size,
            bytes_max=self.resident_bytes_max,
            complete=self.complete,
            pinned=self.pinned,
            lamport=self.lamport,
            folded=self._folded,
            repeats=self._repeats,
            ignored=sum(sum(table.ignored.values()) for table in self.tables.values()),
            late=self._late,
            beneath_snapshot=self._beneath,
            refolded_from_log=self._refolded_from_log,
            evicted=self._evicted,
            chains=len(self.chains),
            chain_bytes=self.chains.size,
        )

    # --- folding

    def apply(self, deliveries: Sequence[Delivery], context: SinkContext) -> int:
        """Fold what is not yet folded, at once or when somebody reads; return how many rows that were.

        Raises RejectDelta, StopSink.
        """
        before = self._folded
        if self.chains.active:
            self.chains.expire(context.clock.now())
        for one in deliveries:
            if not self._takes(one):
                self._apply_now(one, context)
        if self.watchers:
            self._tell()
        return self._folded - before

    def _takes(self, delivery: Delivery) -> bool:
        """Have rows wait to be folded with others. Above all Lamport numbers, they are new and in order."""
        logged, rows, unfolded = delivery.logged, delivery.rows, self._unfolded
        if logged.lamport <= self.lamport or self.chains.active:
            return False
        count = logged.count if rows is None else len(rows)
        spare = self._spare - count * self._row_bytes
        if spare < 0 or not unfolded.go_on(delivery):
            table = self._tables.get(logged.batch.namespace) if unfolded.may_wait(delivery) else None  # type: ignore[arg-type]
            if table is None or table.dimension is None or self.void:
                return False
            self._row_bytes = SLOT_BYTES + 4 * table.dimension
            spare = self._spare - count * self._row_bytes
            if spare < 0:
                return False
            if not unfolded.add(delivery, table, count):
                self._settle()
                return self._takes(delivery)
        self._spare = spare
        self.lamport = logged.lamport + logged.count - 1
        self._folded += count
        self._note(delivery)
        if unfolded.is_full:
            self._settle()
        return True

    def _note(self, delivery: Delivery) -> None:
        next_offset = delivery.logged.next_offset if delivery.end is None else delivery.end
        self._folded_whole.note(delivery, next_offset)
        if next_offset > self.next_offset and not delivery.late:
            self.next_offset = next_offset

    def _settle(self) -> None:
        """Fold what waits."""
        self._unfolded.fold(self._fold_run)
        self._spare = self.resident_bytes_max - self._measured()

    def _fold_run(self, run: Run) -> None:
        table = self._table(run.table.namespace)
        slots = table.slots_of(run.keys)
        fold_new(run, slots)
        table.marks.put(slots, DIRTY | STALE)

    def _apply_now(self, delivery: Delivery, context: SinkContext) -> None:
        if self._folded_whole.has(delivery):
            self._repeats += delivery.count  # by another sink that shares these vectors
            return
        if self._unfolded.rows:
            self._settle()
        self.check_fits()
        self._deliver(delivery.logged, delivery.rows, context)
        self._note(delivery)
        self._spare = self.resident_bytes_max - self._measured()

    def check_fits(self) -> None:
        """Raise StopSink where what must stay in memory is too large."""
        if self.pinned and self.is_full:
            raise StopSink(
                f"vectors in memory take {self.size} bytes, the bound is {self.resident_bytes_max}: "
                "raise resident_bytes_max" + (", or detach the index" if self.stored else "")
            )

    def _deliver(self, logged: LoggedBatch, rows: NDArray[np.intp] | None, context: SinkContext) -> None:
        batch = logged.batch
        if batch.is_control:
            return
        if logged.source == Source.REPLICA:
            self.chains.active = True
        self.lamport = max(self.lamport, logged.lamport + batch.count - 1)
        count = batch.count if rows is None else len(rows)
        kind, namespace = batch.kind, batch.namespace
        if (
            count >= BLOCK_ROWS_MIN
            and kind in BLOCK_KINDS
            and namespace is not None
            and logged.known_ids is KnownIds.NONE
            and self._deliver_block(logged, rows, self._table(namespace), context)
        ):
            return
        namespaces = None if namespace is not None else batch.namespaces
        keys = batch.keys
        for row in range(count) if rows is None else rows.tolist():
            name = namespace if namespaces is None else namespaces[row]
            assert name is not None
            self._deliver_row(logged, row, self._table(name), keys[row], context)

    def _table(self, namespace: str) -> Table:
        if (aside := self._incoming) is not None:
            return aside.get(namespace) or aside.setdefault(namespace, self._made(namespace))
        table = self._tables.get(namespace)
        if table is None:
            table = self._tables[namespace] = self._made(namespace)
        self._unsized.add(table)
        self.touched[table] = None
        return table

    def _made(self, namespace: str) -> Table:
        """A new table, of the dimension that the service has fixed, where it has."""
        table = Table(namespace)
        dimension = self._dimension(namespace)
        if dimension is not None:
            table.reserve(dimension)
        return table

    def _deliver_block(
        self, logged: LoggedBatch, rows: NDArray[np.intp] | None, table: Table, context: SinkContext
    ) -> bool:
        """Fold many rows of one kind at once; False, and nothing changed, where rows need a closer look."""
        batch, kind = logged.batch, logged.batch.kind
        assert kind is not None
        keys: Sequence[str] = batch.keys if rows is None else itemgetter(*rows.tolist())(batch.keys)
        if table.matrix is None and kind in (Kind.CREATE, Kind.DENSE) and batch.row_values is not None:
            table.reserve(batch.row_values)
        slots, block = table.slots_of(keys), heads_of(logged, rows)
        heads = table.heads.take(slots, axis=0)
        repeats = 0
        highest, lowest = np.maximum.reduce(heads).tolist(), block[0].tolist()
        # Rows of a block rise, so that mostly one look says that all are new and in order.
        if highest[OFFSET] >= lowest[OFFSET] or highest[LAMPORT] >= lowest[LAMPORT]:
            fresh = heads[:, OFFSET] < block[:, OFFSET]
            repeats = len(slots) - int(np.count_nonzero(fresh))
            if repeats == len(slots):
                self._repeats += repeats
                return True
            if repeats:
                rows = fresh.nonzero()[0] if rows is None else rows[fresh]
                slots, block, heads = slots[fresh], block[fresh], heads[fresh]
            if (heads[:, LAMPORT] >= block[:, LAMPORT]).any():
                return False
        checkpoints = checkpoints_of(table, slots, self.chains) if self.chains.active else {}
        if not table.fold_block(batch, kind, rows, slots):
            return False
        if self.chains.active:
            note_block(self.chains, logged, rows, table, slots, before=checkpoints, now=context.clock.now())
        table.heads[slots] = block
        table.marks.put(slots, DIRTY | STALE)
        self._folded += len(slots)
        self._repeats += repeats
        return True

    def _deliver_row(
        self, logged: LoggedBatch, row: int, table: Table, vector_id: str, context: SinkContext
    ) -> None:
        offset, key = logged.offset + row, logged.key(row)
        slot = table.slot_of(vector_id)
        lamport, origin, counter, head_offset = table.head(slot)
        if offset <= head_offset:
            self._repeats += 1
            return
        if lamport >= key[0] and (lamport, origin, counter) >= key:
            self._fold_late(Entry(key, logged, row), offset, table, slot, context)
            return
        if not self.chains.active and logged.known_ids is KnownIds.NONE:
            self._fold_row(logged, row, table, slot, key)
            return
        ref, chains, entry = (table.namespace, vector_id), self.chains, Entry(key, logged, row)
        if logged.known_ids is not KnownIds.NONE and lamport != NO_LAMPORT:
            past = self._past(ref, entry, offset, context)
            if past is not None and past.beyond is not None:
                self._jump(table, slot, past.checkpoint, past.beyond)
                return
            entry.without_effect |= past is None  # then its chain has one with its id
        checkpoint = checkpoint_at(table, slot) if chains.active and chains.get(ref) is None else None
        try:
            fold_entry(table, slot, entry)
        except Misfit as error:
            if lamport == NO_LAMPORT:
                table.release(slot)
            raise RejectDelta(offset, f"{vector_id!r}: {error}") from None
        if chains.active:
            chains.note(ref, entry, checkpoint, context.clock.now())
        self._done(table, slot, key, offset)

    def _fold_row(self, logged: LoggedBatch, row: int, table: Table, slot: int, key: Key) -> None:
        """The short way of most rows, which nobody needs to fold again."""
        try:
            table.fold_row(logged.batch, row, slot)
        except Misfit as error:
            vector_id = table.ids[slot]
            if table.head(slot)[0] == NO_LAMPORT:
                table.release(slot)
            raise RejectDelta(logged.offset + row, f"{vector_id!r}: {error}") from None
        self._done(table, slot, key, logged.offset + row)

    def _done(self, table: Table, slot: int, key: Key, offset: int) -> None:
        table.set_head(slot, *key, offset)
        table.marks[slot] = DIRTY | STALE
        self._folded += 1

    # --- late rows

    def _fold_late(self, entry: Entry, offset: int, table: Table, slot: int, context: SinkContext) -> None:
        """Fold a vector again whose new delta sorts before its last one."""
        head = table.head(slot)[:3]
        if entry.key == head:
            self._repeats += 1
            table.set_head(slot, *head, offset)
            return
        started = context.clock.now()
        ref = (table.namespace, str(table.ids[slot]))
        past, chain = self._past(ref, entry, offset, context), self.chains.get(ref)
        if past is not None and past.beyond is not None:
            self._jump(table, slot, past.checkpoint, past.beyond)
            return
        if past is not None or chain is None:
            assert past is not None
            chain = self._chain_from_log(ref, past, offset, context)
        elif not chain.add(entry):
            self._repeats += 1
            table.set_head(slot, *head, offset)
            return
        else:
            self.chains.hold(ref, chain, entry.logged, started)
        self._late += 1
        misfit = replay(table, slot, chain, entry)
        self._done(table, slot, head, offset)
        if context.clock.now() - started > self.replay_s_max:
            self.chains.forget(ref)
        if misfit is not None:
            raise RejectDelta(offset, f"{ref[1]!r}: {misfit}")

    def _past(self, ref: Ref, entry: Entry, offset: int, context: SinkContext) -> Past | None:
        """What the log tells of a vector up to a delta; None where its chain says enough."""
        chain = self.chains.get(ref)
        if chain is not None and chain.knows(entry):
            return None
        return past_of(context.history(*ref), entry, offset, whole=self._is_whole(context))

    def _is_whole(self, context: SinkContext) -> bool:
        """Whether the log tells of every delta that was folded."""
        return context.log_start == 0 and self._lamport_before_log == 0

    def _jump(self, table: Table, slot: int, state: Checkpoint, offset: int) -> None:
        """The log's past begins with a state that has this delta, and others that are still to come: take it.

        Those come as repeats then.
        """
        restore(table, slot, state)
        self._late += 1
        self.lamport = max(self.lamport, state.key[0])
        self._done(table, slot, state.key, offset)

    def _chain_from_log(self, ref: Ref, past: Past, offset: int, context: SinkContext) -> Chain:
        """A vector's deltas up to `offset`, from its first, a state, or a reset that nothing lost can follow.

        A reset by this service's own writers has a larger Lamport number than all that the log held
        before it; so what the log has dropped since sorts before that reset.
        """
        entries = past.entries
        resets = [at for at, entry in enumerate(entries) if is_own_reset(entry)]
        whole = self._is_whole(context)
        if past.from_state:
            whole, resets = True, []
            self._beneath += past.beneath
        if not resets and not whole:
            raise StopSink(
                f"needs snapshot: a late delta at offset {offset} sorts before what is kept of vector "
                f"{ref[1]!r}, and the log holds only what begins at offset {context.log_start}"
            )
        self._refolded_from_log += 1
        chain = self.chains.start(ref, past.checkpoint)
        if resets and (not whole or len(entries) >= self.chains.deltas_max):
            entries = entries[resets[-1] :]
        chain.entries = entries
        if len(chain.entries) < self.chains.deltas_max:
            now = context.clock.now()
            for entry in chain.entries:
                self.chains.hold(ref, chain, entry.logged, now)
        else:
            self.chains.forget(ref)
        return chain

    # --- made anew from states

    def begin_rebuild(self, context: SinkContext) -> bool:
        """What is held is void from now on, though it can be read; False where another sink rebuilds it."""
        if self._rebuilder is not None and self._rebuilder is not context:
            return False
        if self._unfolded.rows:
            self._settle()
        self._rebuilder, self.void = context, True
        self._folded_whole.forget()
        self.chains.clear()
        self.chains.active = False
        return True

    def is_rebuilt_by(self, context: SinkContext) -> bool:
        """Whether it is this sink that makes the vectors anew."""
        return self._rebuilder is context

    def abandon_rebuild(self, context: SinkContext) -> None:
        """The sink that rebuilds goes, done or not."""
        if self._rebuilder is context:
            self._rebuilder, self._incoming = None, None

    def clear(self, *, aside: bool = False) -> None:
        """Hold nothing; or, with `aside`, go on showing what there is until `take_over`, and load beside."""
        self._incoming = {} if aside else None
        if not aside:
            self._exchange({})
            self.complete = not self.stored  # what a store has can be read there meanwhile

    def take_states(self, rows: Iterable[StateRow]) -> None:
        """Set vectors to these states, whatever they are."""
        for row in rows:
            put(self._table(row.namespace), row.vector_id, row.state, row.offset)

    def take_over(self) -> None:
        """What was loaded aside takes the place of all else, at once."""
        if self._incoming is not None:
            incoming, self._incoming = self._incoming, None
            self._exchange(incoming)

    def end_rebuild(self, context: SinkContext, offset: int, lamport: int) -> None:
        """The vectors are what all below `offset` of the present log makes them."""
        self._log_id = context.log_id
        self._rebuilder, self.void = None, False
        self._lamport_before_log = 0
        self.lamport, self.next_offset = lamport, offset
        self.rebuilds += 1
        self._tell()

    def _tell(self) -> None:
        for tell in self.watchers:
            tell()

    def _exchange(self, tables: dict[str, Table]) -> None:
        self._tables, self.touched = tables, {}
        self._folded_whole.forget()
        self._size, self._unsized = 0, set(tables.values())
        for table in tables.values():
            table.counted = 0

    # --- the store's side

    def missing(self, deliveries: Iterable[Delivery]) -> list[Ref]:
        """Vectors that deliveries touch and that may be in the store alone."""
        return [] if self.complete else missing_of(self.tables, deliveries)

    def take_touched(self) -> dict[Table, None]:
        """The tables that may have dirty rows, since this was last asked."""
        if self._unfolded.rows:
            self._settle()
        taken, self.touched = self.touched, {}
        return taken

    def adopt(self, tables: Iterable[Table], lamport: int) -> None:
        """Take whole tables from the store, where nothing is resident yet."""
        assert not self._tables
        for table in tables:
            self._tables[table.namespace] = table
            self._unsized.add(table)
        self.lamport = max(self.lamport, lamport)

    def load_block(self, block: Block) -> None:
        """Take many rows from the store; those that are resident already are left as they are."""
        add_block(self._table(block.namespace), block)
        self.lamport = max(self.lamport, int(block.heads[:, LAMPORT].max()))

    def load(self, namespace: str, vector_id: str, stored: Checkpoint, offset: int) -> None:
        """Take a row from the store; one that is resident already is left as it is: it is newer."""
        table = self._table(namespace)
        if vector_id not in table.slots:
            put(table, vector_id, stored, offset)
            self.lamport = max(self.lamport, stored.key[0])

    def evict(self) -> int:
        """Let clean rows go, least recently used first, until 7/8 of the bound are kept; return how many."""
        excess = self.size - self.resident_bytes_max // 8 * 7
        if self.pinned or self.size <= self.resident_bytes_max:
            return 0
        evicted = 0
        for table, vector_id in oldest_first(self.tables.values()):
            if excess <= 0:
                break
            before = table.size
            self.chains.forget((table.namespace, vector_id))
            table.release(table.slots[vector_id])
            self._unsized.add(table)
            excess -= before - table.size
            evicted += 1
        self._evicted += evicted
        self.complete = self.complete and not evicted
        return evicted
