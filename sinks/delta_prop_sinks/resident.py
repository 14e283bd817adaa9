"""Resident vectors: the present state of every vector, in one bounded structure that sinks share.

The rule: each delta changes a vector once, and vectors are folded in canonical order, whichever of the
sinks that share the structure brings a delta first. They must be subscribed to the same topics, topics
that match whole vectors (all, a namespace, a vector id): a state is a fold of all of a vector's deltas.
"""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING

import anyio
import numpy as np

from delta_prop_sinks.bounds import check_at_least
from delta_prop_sinks.chain import Chains, Entry
from delta_prop_sinks.evicting import missing_of, oldest_first
from delta_prop_sinks.pace import Pace
from delta_prop_sinks.past import checkpoint_at, checkpoints_of, note_block
from delta_prop_sinks.refolding import Refolding
from delta_prop_sinks.resident_statistics import ResidentStatistics
from delta_prop_sinks.runs import SETTING_KINDS, Folded, Run, Unfolded, fold_new
from delta_prop_sinks.sink import RejectDelta, StopSink, TryAgain
from delta_prop_sinks.storage_image import add_block
from delta_prop_sinks.table import (
    BLOCK_KINDS,
    BLOCK_ROWS_MIN,
    DIRTY,
    FOLDED_KINDS,
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
    state_of,
    unknown_kind,
)
from delta_prop_wire.algebra import State
from delta_prop_wire.delta import Dot, Head, Kind, KnownIds, Source
from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from delta_prop_sinks.chain import Checkpoint, Ref
    from delta_prop_sinks.sink import Delivery, SinkContext
    from delta_prop_sinks.storage_image import Block
    from delta_prop_wire.algebra import Key
    from delta_prop_wire.batch import LoggedBatch
    from delta_prop_wire.states import StateRow

_MANY = 10_000
_NO_REF = ("", "")
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
        chain_age_s_max: float = 60.0,
        chain_bytes_max: int = 64 << 20,
    ) -> None:
        check_at_least(0, resident_bytes_max=resident_bytes_max)
        self.resident_bytes_max = resident_bytes_max
        self.chains = Chains(age_s_max=chain_age_s_max, bytes_max=chain_bytes_max)
        self._refolding = Refolding(self.chains)
        self._gathered = self._refolding.vectors  # looked into for each row, so at hand
        self._unnoted: list[Delivery] = []  # with rows that were gathered, or behind such
        self._under_way: anyio.Event | None = None  # an apply that lets others run; set when it has ended
        self._version = 0  # of what it applies to
        self.deltas_a_call = 0
        """How many the next call should bring: vectors are folded again once a call, however long that takes.
        """
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
        self._evicted = 0
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
            self._version += 1
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
        refolding = self._refolding
        return ResidentStatistics(
            vectors=sum(int(np.count_nonzero(table.forms)) for table in self.tables.values()),
            bytes=self.size,
            bytes_max=self.resident_bytes_max,
            complete=self.complete,
            pinned=self.pinned,
            lamport=self.lamport,
            folded=self._folded,
            repeats=self._repeats + refolding.repeats,
            ignored=sum(sum(table.ignored.values()) for table in self.tables.values()),
            late=refolding.late,
            beneath_snapshot=refolding.beneath,
            refolded_from_log=refolding.from_log,
            log_passes=refolding.log_passes,
            folded_again=refolding.folded_again,
            evicted=self._evicted,
            chains=len(self.chains),
            chain_bytes=self.chains.size,
        )

    # --- folding

    async def apply(self, deliveries: Sequence[Delivery], context: SinkContext) -> int:
        """Fold what is not yet folded, at once or when somebody reads; return how many rows that were.

        Long work lets others run. Raises RejectDelta, StopSink; TryAgain where the vectors are made anew
        meanwhile.
        """
        while self._under_way is not None:
            await self._under_way.wait()
        before, version = self._folded, self._version

        def check() -> None:
            if self._version != version:
                raise TryAgain("the vectors were made anew while deltas were folded: these are folded again")

        pace = Pace(context.clock, check)
        try:
            for one in deliveries:
                if not self._takes(one):
                    self._apply_one(one, context)
                if pace.is_due:
                    self._let_others_run()
                    await pace.give_way()
        except RejectDelta:
            await self._fold_gathered(context, pace)  # what stands before it is applied
            raise
        else:
            if self._folded > before:
                self.deltas_a_call = 0
            await self._fold_gathered(context, pace)
        finally:
            self._end_apply(context)
        self._tell()
        return self._folded - before

    def apply_now(self, deliveries: Sequence[Delivery], context: SinkContext) -> bool:
        """Do what `apply` does where nothing takes long; else False, and the same has to come by `apply`.

        Raises RejectDelta, StopSink.
        """
        if self._under_way is not None:
            return False
        try:
            for one in deliveries:
                if not self._takes(one):
                    self._apply_one(one, context)
            done = not self._gathered
        finally:
            if self.chains.active:
                self._end_apply(context)
        if self.watchers:
            self._tell()
        return done

    def _let_others_run(self) -> None:
        """Have other calls wait for the end of this one."""
        if self._under_way is None:
            self._under_way = anyio.Event()

    async def _fold_gathered(self, context: SinkContext, pace: Pace) -> None:
        if not self._gathered:
            return
        self.deltas_a_call = _MANY
        self._let_others_run()
        whole = self._lamport_before_log == 0
        self._folded += await self._refolding.fold(self._table, context, pace, whole=whole)
        for one in self._unnoted:
            self._note(one)

    def _end_apply(self, context: SinkContext) -> None:
        """Let go of what was gathered and not folded, and let the next call in."""
        if self._gathered or self._unnoted:
            self._refolding.clear()
            self._unnoted.clear()
        if self.chains.active:
            self.chains.expire(context.clock.now())
        if self._under_way is not None:
            self._under_way.set()
            self._under_way = None

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

    def _apply_one(self, delivery: Delivery, context: SinkContext) -> None:
        """Fold a delivery, or gather its rows, and those behind them, until `_fold_gathered`."""
        if self._folded_whole.has(delivery):
            self._repeats += delivery.count  # by another sink that shares these vectors
            return
        if self._unfolded.rows:
            self._settle()
        self.check_fits()
        self._deliver(delivery.logged, delivery.rows, context)
        if self._gathered:
            self._unnoted.append(delivery)
        else:
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
            and not self._gathered
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
        table.heads[slots] = block
        table.marks.put(slots, DIRTY | STALE)
        if self.chains.active:
            note_block(self.chains, logged, rows, table, slots, before=checkpoints, now=context.clock.now())
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
        chains = self.chains
        ref = (table.namespace, vector_id) if chains.active else _NO_REF
        if (
            (lamport >= key[0] and (lamport, origin, counter) >= key)
            or (logged.known_ids is not KnownIds.NONE and lamport != NO_LAMPORT)
            or ref in self._gathered
        ):
            self._gather(Entry(key, logged, row), table, slot)
            return
        if not chains.active:
            self._fold_row(logged, row, table, slot, key)
            return
        checkpoint = checkpoint_at(table, slot) if chains.get(ref) is None else None
        self._fold_row(logged, row, table, slot, key)
        chain = chains.note(ref, Entry(key, logged, row), checkpoint, context.clock.now())
        chains.hold(logged.batch)
        if len(chain.entries) >= chain.mark_at:
            chains.mark(chain, len(chain.entries), checkpoint_at(table, slot))

    def _gather(self, entry: Entry, table: Table, slot: int) -> None:
        """Have a row folded with others of its vector, unless that one's last delta came again."""
        vector_id = str(table.ids[slot])
        ref = (table.namespace, vector_id)
        if ref not in self._gathered and table.head(slot)[:3] == entry.key:  # under another offset
            self._repeats += 1
            table.set_head(slot, *entry.key, entry.offset)
            return
        if (kind := entry.logged.batch.kinds[entry.row]) not in FOLDED_KINDS:
            raise RejectDelta(entry.offset, f"{vector_id!r}: {unknown_kind(kind)}")
        self.chains.active = True
        self._refolding.add(ref, table, slot, entry)

    def _fold_row(self, logged: LoggedBatch, row: int, table: Table, slot: int, key: Key) -> None:
        """The short way of most rows, which nobody needs to fold again."""
        try:
            table.fold_row(logged.batch, row, slot)
        except Misfit as error:
            vector_id = table.ids[slot]
            if table.head(slot)[0] == NO_LAMPORT:
                table.release(slot)
            raise RejectDelta(logged.offset + row, f"{vector_id!r}: {error}") from None
        table.set_head(slot, *key, logged.offset + row)
        table.marks[slot] = DIRTY | STALE
        self._folded += 1

    # --- made anew from states

    def begin_rebuild(self, context: SinkContext) -> bool:
        """What is held is void from now on, though it can be read; False where another sink rebuilds it."""
        if self._rebuilder is not None and self._rebuilder is not context:
            return False
        if self._unfolded.rows:
            self._settle()
        self._rebuilder, self.void = context, True
        self._version += 1
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
        self._version += 1
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
