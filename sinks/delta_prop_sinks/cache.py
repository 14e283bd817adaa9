"""An in-process cache: states of the vectors that are asked for, kept current or dropped as deltas come.

What it cannot keep right it drops: a miss is slow, a wrong answer is wrong.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from operator import itemgetter
from typing import TYPE_CHECKING, Literal

import anyio
import numpy as np

from delta_prop_sinks.bounds import check_at_least, check_sink_name, check_texts
from delta_prop_sinks.runs import SETTING_KINDS, Run, Unfolded, fold_new
from delta_prop_sinks.sink import ResumePoint
from delta_prop_sinks.table import (
    BLOCK_KINDS,
    BLOCK_ROWS_MIN,
    FOLDED_KINDS,
    LAMPORT,
    VOID_OFFSET,
    Misfit,
    Table,
    heads_of,
    restore,
    state_of,
)
from delta_prop_wire.algebra import State
from delta_prop_wire.cursor import Cursor
from delta_prop_wire.delta import Kind, KnownIds, Source
from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from numpy.typing import NDArray

    from delta_prop_sinks.chain import Ref
    from delta_prop_sinks.sink import Delivery, SinkContext
    from delta_prop_wire.algebra import Key
    from delta_prop_wire.batch import LoggedBatch
    from delta_prop_wire.states import StateRow


_ENTRY_BYTES = 500
"""What an answer takes beside its numbers; its bytes and metadata are shared."""

_ANSWERS_SHARE = 8
"""One part in so many of the bytes is for answers, made once for many readers."""

_COMPLETE_KINDS = frozenset({Kind.CREATE, Kind.DELETE})
"""Kinds after which a state is known whatever it was before; dense and opaque keep older metadata."""

_COMPLETE_MASK = 1 << Kind.CREATE | 1 << Kind.DELETE
_LOADS_MAX = 3
_NOWHERE = np.zeros(0, np.intp)


@dataclass(frozen=True, slots=True)
class CacheStatistics:
    """Counts since the cache was made, and what it holds."""

    entries: int
    bytes: int
    hits: int
    misses: int
    loads: int
    refreshed: int
    dropped: int
    evicted: int
    late: int


@dataclass(slots=True)
class _Load:
    """A load under way, and the newest delta that its vector got meanwhile."""

    done: anyio.Event = field(default_factory=anyio.Event)
    newest: Key | None = None
    spoiled: bool = False

    def covered_by(self, state: State | None) -> bool:
        """Whether a loaded state has all that came meanwhile."""
        if self.spoiled:
            return False
        if self.newest is None:
            return True
        return state is not None and state.key is not None and state.key >= self.newest


class CacheSink:
    """States by namespace and vector id, least recently asked for first out.

    `refresh` (the default) applies deltas to cached states, and caches what a create or delete makes known;
    `invalidate` drops what a delta touches. `loader(namespace, vector_id)` answers misses, usually a storage
    sink's `get`; a load that a newer delta overtakes is repeated, never cached. Where the loader's source may
    be behind this sink, `loader_offset` tells how far it has applied: what it gives while behind is returned
    and not cached. Without a loader, a vector whose first delta is a DENSE is not known here: it may have
    older metadata, which only a create or a loader tells. A state's `ignored` counts from where the cache
    began to know it.
    """

    def __init__(
        self,
        *,
        name: str = "cache",
        entries_max: int = 100_000,
        bytes_max: int = 256 << 20,
        mode: Literal["refresh", "invalidate"] = "refresh",
        loader: Callable[[str, str], Awaitable[State | None]] | None = None,
        loader_offset: Callable[[], int] | None = None,
    ) -> None:
        check_at_least(1, entries_max=entries_max, bytes_max=bytes_max)
        if mode not in ("refresh", "invalidate"):
            raise UsageError(f'mode {mode!r} is not "refresh" or "invalidate"')
        self.name = check_sink_name(name)
        self.entries_max = entries_max
        self.bytes_max = bytes_max
        self.mode = mode
        self._loader, self._loader_offset = loader, loader_offset
        self._tables: dict[str, Table] = {}
        self._order: OrderedDict[Ref, None] = OrderedDict()
        self._answers: dict[Ref, State] = {}
        self._answer_bytes = 0
        self._loading: dict[Ref, _Load] = {}
        self._touched: set[Table] = set()
        self._unfolded = Unfolded(SETTING_KINDS - _COMPLETE_KINDS)
        self._bytes = 0
        self._log_id = b""
        self._next_offset = self._lamport = 0
        self._committed: Callable[[int], None] | None = None
        self._hits = self._misses = self._loads = 0
        self._refreshed = self._dropped = self._evicted = self._late = 0

    # --- the contract

    async def open(self, context: SinkContext) -> ResumePoint:
        """Go on where this object left off; a new one begins at the log's beginning."""
        if context.log_id != self._log_id:
            self._log_id, self._next_offset = context.log_id, 0
        self._committed = context.committed
        return ResumePoint(Cursor(context.log_id, context.epoch, self._next_offset), self._lamport)

    async def apply(self, deliveries: Sequence[Delivery]) -> None:
        """Bring entries up to date, or drop them."""
        self.apply_now(deliveries)

    def apply_now(self, deliveries: Sequence[Delivery]) -> bool:
        """The same: nothing is ever waited for."""
        for delivery in deliveries:
            logged = delivery.logged
            batch = logged.batch
            if not self._takes(delivery) and not batch.is_control:
                self._settle()
                if self._order or self._loading or batch.kinds_mask & _COMPLETE_MASK:
                    if not self._change_block(delivery):
                        self._change_rows(delivery)
                    self._make_room()
            next_offset = logged.next_offset if delivery.end is None else delivery.end
            if next_offset > self._next_offset and not delivery.late:
                self._next_offset = next_offset
            self._lamport = max(self._lamport, logged.lamport + logged.count - 1)
        if self._committed is not None:  # open
            self._committed(self._next_offset)  # what is applied need not come again: entries live as long
        return True

    async def begin_rebuild(self, offset: int) -> None:
        """Drop everything; what is loaded from here on has to be as new as `offset`."""
        self._clear()
        for load in self._loading.values():
            load.spoiled = True
        self._next_offset = offset

    async def take_states(self, rows: Sequence[StateRow]) -> None:
        """Where entries are refreshed, cache what fits; a newer entry that was loaded meanwhile stays."""
        if self.mode != "refresh":
            return
        self._settle()
        for row in rows:
            ref, key = (row.namespace, row.vector_id), row.state.key
            if ref in self._order:
                table = self._tables[ref[0]]
                if key is None or key <= table.head(table.slots[ref[1]])[:3]:
                    continue
                self._drop(ref)
            self._put(ref, row.state)

    async def end_rebuild(self, offset: int, lamport: int) -> None:
        """Go on from there."""
        self._next_offset, self._lamport = offset, lamport
        if self._committed is not None:
            self._committed(offset)

    async def aclose(self) -> None:
        """Drop everything: without deltas no entry stays right."""
        self._clear()
        self._next_offset = 0

    def _clear(self) -> None:
        self._tables.clear()
        self._touched.clear()
        self._unfolded.forget()
        self._order.clear()
        self._forget_answers()
        self._bytes = 0

    def statistics(self) -> CacheStatistics:
        """A snapshot of counts and sizes."""
        self._settle()
        return CacheStatistics(
            entries=len(self._order),
            bytes=self._bytes + self._answer_bytes,
            hits=self._hits,
            misses=self._misses,
            loads=self._loads,
            refreshed=self._refreshed,
            dropped=self._dropped,
            evicted=self._evicted,
            late=self._late,
        )

    # --- for readers

    def peek(self, namespace: str, vector_id: str) -> State | None:
        """The cached state, None where there is none: nothing is loaded."""
        ref = (namespace, vector_id)
        if ref not in self._order:
            check_texts(namespace=namespace, vector_id=vector_id)
            self._misses += 1
            return None
        self._hits += 1
        self._order.move_to_end(ref)
        return self._answer(ref)

    async def get(self, namespace: str, vector_id: str) -> State | None:
        """The state, loaded on a miss; a tombstone is a state that is not alive. None: unknown here."""
        state = self.peek(namespace, vector_id)
        if state is not None or self._loader is None:
            return state
        ref = (namespace, vector_id)
        while (load := self._loading.get(ref)) is not None:  # one load of a vector at a time
            await load.done.wait()
            if ref in self._order:
                return self._answer(ref)
        return await self._load(ref, self._loader)

    # --- deltas

    def _takes(self, delivery: Delivery) -> bool:
        """Have rows wait to be folded with others: new ones, of a namespace of which something is cached."""
        unfolded = self._unfolded
        if delivery.logged.lamport <= self._lamport or self._loading:
            return False
        if unfolded.go_on(delivery):
            if unfolded.is_full:
                self._settle()
            return True
        if self.mode != "refresh" or not unfolded.may_wait(delivery):
            return False
        table = self._tables.get(delivery.logged.batch.namespace)  # type: ignore[arg-type]
        if table is None:
            return True
        if not unfolded.add(delivery, table, delivery.count):
            self._settle()
            unfolded.add(delivery, table, delivery.count)
        if unfolded.is_full:
            self._settle()
        return True

    def _settle(self) -> None:
        """Fold what waits; all who read or change entries do so first."""
        if self._unfolded.rows:
            self._unfolded.fold(self._fold_run)
            self._make_room()

    def _fold_run(self, run: Run) -> None:
        table, keys = run.table, run.keys
        slots = table.known(keys)
        # What is not above its entry's last delta is in it: the loader's source was ahead.
        rows = ((slots >= 0) & (run.heads[:, LAMPORT] > table.heads[slots, LAMPORT])).nonzero()[0]
        if not len(rows):
            return
        self._touched.add(table)
        fold_new(run, slots[rows], rows)
        self._refreshed += len(rows)
        if self._answers:
            for key in keys:
                self._forget_answer((table.namespace, key))

    def _change_block(self, delivery: Delivery) -> bool:
        """Fold many rows of one kind at once; False, and nothing changed, where rows need a closer look."""
        logged, batch, rows = delivery.logged, delivery.batch, delivery.rows
        kind, name = batch.kind, batch.namespace
        if (
            delivery.count < BLOCK_ROWS_MIN
            or kind not in BLOCK_KINDS
            or name is None
            or logged.source == Source.REPLICA
            or self.mode != "refresh"
            or self._loading
        ):
            return False
        keys: Sequence[str] = batch.keys if rows is None else itemgetter(*rows.tolist())(batch.keys)
        if kind in _COMPLETE_KINDS:
            return self._complete_block(delivery, self._table(name), keys)
        table = self._tables.get(name)
        slots = _NOWHERE if table is None else table.known(keys)
        here = (slots >= 0).nonzero()[0]
        if table is None or not len(here):
            return True
        chosen = here if rows is None else rows[here]
        known = [keys[at] for at in here.tolist()]
        return self._fold_block(delivery, table, slots[here], chosen, known)

    def _complete_block(self, delivery: Delivery, table: Table, keys: Sequence[str]) -> bool:
        """Creates and deletes: what was not cached is, from now on."""
        width = delivery.batch.row_values
        if delivery.batch.kind == Kind.CREATE:
            if table.dimension is None and width is not None:
                table.reserve(width)
            if width != table.dimension:
                return False
        slots = table.slots_of(keys)
        for key in keys:
            self._order.setdefault((table.namespace, key))
        return self._fold_block(delivery, table, slots, delivery.rows, keys)

    def _fold_block(
        self,
        delivery: Delivery,
        table: Table,
        slots: NDArray[np.intp],
        rows: NDArray[np.intp] | None,
        keys: Sequence[str],
    ) -> bool:
        logged, kind = delivery.logged, delivery.batch.kind
        assert kind is not None
        block = heads_of(logged, rows)
        # A local delta that is not above its vector's last one is in the state: it came again, or the
        # loader's source was ahead.
        fresh = block[:, LAMPORT] > table.heads[slots, LAMPORT]
        if not fresh.all():
            rows = fresh.nonzero()[0] if rows is None else rows[fresh]
            slots, block = slots[fresh], block[fresh]
        if not len(slots):
            return True
        self._touched.add(table)
        if not table.fold_block(logged.batch, kind, rows, slots):
            return False
        table.heads[slots] = block
        self._refreshed += len(slots)
        if self._answers:
            for key in keys:
                self._forget_answer((table.namespace, key))
        return True

    def _change_rows(self, delivery: Delivery) -> None:
        logged, batch = delivery.logged, delivery.batch
        keys, name, kind = batch.keys, batch.namespace, batch.kind
        names = batch.namespaces if name is None else [name] * batch.count
        kinds = batch.kinds if kind is None else [kind] * batch.count
        change = self._refresh if self.mode == "refresh" else self._invalidate
        for row in range(batch.count) if delivery.rows is None else delivery.rows.tolist():
            ref = (names[row], keys[row])
            if ref in self._order or kinds[row] in _COMPLETE_KINDS or self._loading:
                change(ref, logged, row, kinds[row])

    def _refresh(self, ref: Ref, logged: LoggedBatch, row: int, kind: int) -> None:
        key, forwarded = logged.key(row), logged.source == Source.REPLICA
        self._tell_load(ref, key, forwarded)
        cached = ref in self._order
        if cached and logged.known_ids is not KnownIds.NONE:
            self._drop(ref)  # whether it has an effect only the vector's whole past tells
            return
        if not cached and (kind not in _COMPLETE_KINDS or forwarded):
            return  # a forwarded create may sort before deltas that are not known here
        if kind not in FOLDED_KINDS:
            self._drop(ref)
            return
        table = self._table(ref[0])
        slot = table.slot_of(ref[1])
        self._order.setdefault(ref)
        head = table.head(slot)[:3]
        if key <= head:
            # A local delta is in the state already. A forwarded one may be, or may come late: reload.
            if forwarded and key != head:
                self._late += 1
                self._drop(ref)
            return
        try:
            table.fold_row(logged.batch, row, slot)
        except Misfit:
            self._drop(ref)
            return
        table.set_head(slot, *key, VOID_OFFSET)
        self._refreshed += 1
        self._forget_answer(ref)

    def _invalidate(self, ref: Ref, logged: LoggedBatch, row: int, kind: int) -> None:
        key, forwarded = logged.key(row), logged.source == Source.REPLICA
        self._tell_load(ref, key, forwarded)
        if ref not in self._order:
            return
        table = self._tables[ref[0]]
        head = table.head(table.slots[ref[1]])[:3]
        if key > head or (forwarded and key != head):
            self._drop(ref)

    # --- loads

    def _tell_load(self, ref: Ref, key: Key, forwarded: bool) -> None:
        load = self._loading.get(ref)
        if load is not None:
            load.newest = key if load.newest is None else max(load.newest, key)
            load.spoiled |= forwarded

    async def _load(self, ref: Ref, loader: Callable[[str, str], Awaitable[State | None]]) -> State | None:
        load = self._loading[ref] = _Load()
        state = None
        try:
            for _ in range(_LOADS_MAX):
                load.newest, load.spoiled = None, False
                behind = self._loader_offset is not None and self._loader_offset() < self._next_offset
                state = await loader(*ref)
                self._loads += 1
                if load.covered_by(state):
                    if state is not None and not behind and ref not in self._order:
                        self._put(ref, state)
                    break
            return self._answer(ref) if ref in self._order else state
        finally:
            del self._loading[ref]
            load.done.set()

    def _put(self, ref: Ref, state: State) -> None:
        if state.key is None:
            return  # nobody could tell which deltas are in it
        table = self._table(ref[0])
        slot = table.slot_of(ref[1])
        restore(table, slot, state)
        table.set_head(slot, *state.key, VOID_OFFSET)
        self._order[ref] = None
        self._make_room()

    # --- entries

    def _table(self, namespace: str) -> Table:
        table = self._tables.get(namespace)
        if table is None:
            table = self._tables[namespace] = Table(namespace)
        self._touched.add(table)
        return table

    def _answer(self, ref: Ref) -> State:
        """An entry as a state; made once for many readers."""
        self._settle()
        state = self._answers.get(ref)
        if state is None:
            table = self._tables[ref[0]]
            state = state_of(table, table.slots[ref[1]])
            size = _answer_bytes(state)
            if self._answer_bytes + size > self.bytes_max // _ANSWERS_SHARE:
                self._forget_answers()
            if size <= self.bytes_max // _ANSWERS_SHARE:
                self._answers[ref] = state
                self._answer_bytes += size
        return state

    def _forget_answer(self, ref: Ref) -> None:
        state = self._answers.pop(ref, None)
        if state is not None:
            self._answer_bytes -= _answer_bytes(state)

    def _forget_answers(self) -> None:
        self._answers.clear()
        self._answer_bytes = 0

    def _drop(self, ref: Ref) -> None:
        del self._order[ref]
        self._dropped += 1
        self._release(ref)

    def _release(self, ref: Ref) -> None:
        table = self._tables[ref[0]]
        table.release(table.slots[ref[1]])
        self._touched.add(table)
        self._forget_answer(ref)

    def _make_room(self) -> None:
        """Let entries go until count and bytes are in their bounds, answers having a share of their own."""
        bytes_max = self.bytes_max - self.bytes_max // _ANSWERS_SHARE
        while True:
            self._weigh()
            excess = max(len(self._order) - self.entries_max, self._bytes > bytes_max)
            if not excess or not self._order:
                return
            for _ in range(excess):
                ref, _ = self._order.popitem(last=False)
                self._release(ref)
                self._evicted += 1

    def _weigh(self) -> None:
        for table in self._touched:
            size = table.size if table.slots else 0
            self._bytes += size - table.counted
            table.counted = size
            if not table.slots and self._tables.get(table.namespace) is table:
                del self._tables[table.namespace]
        self._touched.clear()


def _answer_bytes(state: State) -> int:
    return _ENTRY_BYTES + (0 if state.vector is None else state.vector.nbytes)
