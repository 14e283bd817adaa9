"""An in-process cache: states of requested vectors, refreshed or dropped as deltas arrive.

It drops each state that it cannot keep correct: readers may have to wait for a load, but never get a wrong
state.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import anyio
import anyio.lowlevel
import numpy as np
from numpy.typing import NDArray

from delta_prop_sinks.argument_checks import check_at_least, check_sink_name, check_texts
from delta_prop_sinks.cache_entries import CacheEntries
from delta_prop_sinks.delta_chain import Ref
from delta_prop_sinks.sink import Delivery, ResumePoint, SinkContext
from delta_prop_sinks.vector_table import FOLDED_KINDS, Misfit, fold_leading
from delta_prop_wire.algebra import Key, VectorState
from delta_prop_wire.batch import LoggedBatch
from delta_prop_wire.cursor import Cursor
from delta_prop_wire.delta import Kind, KnownIds, Source
from delta_prop_wire.errors import UsageError
from delta_prop_wire.state_rows import StateRow

_COMPLETE_KINDS = frozenset({Kind.CREATE, Kind.DELETE})
"""Kinds that define the full state; dense and opaque retain older metadata."""

_REPLICA, _NO_IDS = Source.REPLICA, KnownIds.NONE
"""Members of enums, which take long to look up."""

_LOADS_MAX = 3
"""Maximum number of loads for one request, if newer deltas overtake them."""
_COUNTS = ("hits", "misses", "loads", "refreshed", "dropped", "evicted", "out_of_order")


@dataclass(frozen=True, slots=True)
class CacheStatistics:
    """Counts since the cache was made, and its contents.

    `refreshed`: deltas that were applied to entries. `dropped`: entries that a delta made invalid; `evicted`:
    entries that exceeded a bound. `out_of_order`: forwarded deltas that sort before the last one of their
    vector.
    """

    entries: int
    bytes: int
    hits: int
    misses: int
    loads: int
    refreshed: int
    dropped: int
    evicted: int
    out_of_order: int


@dataclass(slots=True)
class _Load:
    """A load in progress, and the key of the newest delta that has arrived for its vector meanwhile.

    `is_stale`: the load must be repeated, whatever state it returns.
    """

    done: anyio.Event = field(default_factory=anyio.Event)
    newest: Key | None = None
    is_stale: bool = False

    def is_covered_by(self, state: VectorState | None) -> bool:
        """True if a loaded state includes every delta that has arrived meanwhile."""
        if self.is_stale:
            return False
        if self.newest is None:
            return True
        return state is not None and state.key is not None and state.key >= self.newest


class CacheSink:
    """Caches states by namespace and vector id; the least recently requested is evicted first.

    `refresh` (the default) applies deltas to cached states, and caches the state that a create or delete
    defines; `invalidate` drops each vector that a delta touches. `loader(namespace, vector_id)` answers
    misses, usually a storage sink's `get`; a load that a newer delta overtakes is repeated, never cached. If
    the loader's source may lag this sink, `loader_offset` returns the offset that the source has applied: a
    state loaded while the source lags is returned and not cached. A DENSE does not bring an uncached vector
    into the cache, because the vector may have older metadata. A state's `ignored` counts from when the cache
    first knew the vector.
    """

    def __init__(
        self,
        *,
        name: str = "cache",
        entries_max: int = 100_000,
        bytes_max: int = 256 << 20,
        mode: Literal["refresh", "invalidate"] = "refresh",
        loader: Callable[[str, str], Awaitable[VectorState | None]] | None = None,
        loader_offset: Callable[[], int] | None = None,
    ) -> None:
        check_at_least(1, entries_max=entries_max, bytes_max=bytes_max)
        if mode not in ("refresh", "invalidate"):
            raise UsageError(f'mode {mode!r} is not "refresh" or "invalidate": give one of them')
        self.name = check_sink_name(name)
        self.mode = mode
        self._loader, self._loader_offset = loader, loader_offset
        self._entries = CacheEntries(entries_max, bytes_max)
        self._loading: dict[Ref, _Load] = {}
        self._counts = dict.fromkeys(_COUNTS, 0)
        self._log_id = b""
        self._next_offset = self._lamport = 0
        self._report_committed: Callable[[int], None] | None = None

    @property
    def entries_max(self) -> int:
        """Maximum number of entries."""
        return self._entries.entries_max

    @entries_max.setter
    def entries_max(self, count: int) -> None:
        self._entries.entries_max = count

    @property
    def bytes_max(self) -> int:
        """Maximum bytes of the entries."""
        return self._entries.bytes_max

    @bytes_max.setter
    def bytes_max(self, size: int) -> None:
        self._entries.bytes_max = size

    async def open(self, context: SinkContext) -> ResumePoint:
        """Continue at the offset where this object stopped; a new object begins at the start of the log."""
        if context.log_id != self._log_id:
            self._log_id, self._next_offset = context.log_id, 0
        self._report_committed = context.committed
        return ResumePoint(Cursor(context.log_id, context.epoch, self._next_offset), self._lamport)

    async def apply(self, deliveries: Sequence[Delivery]) -> None:
        """Refresh the entries of the deltas' vectors, or drop them."""
        self.apply_now(deliveries)

    def apply_now(self, deliveries: Sequence[Delivery]) -> bool:
        """Apply deliveries without waiting, and return True."""
        for delivery in deliveries:
            logged = delivery.logged
            if not logged.batch.is_control:
                self._apply_one(logged, delivery.rows)
            next_offset = delivery.next_offset
            if next_offset > self._next_offset and not delivery.redelivered:
                self._next_offset = next_offset
            lamport = logged.lamport + logged.count - 1
            self._lamport = max(self._lamport, lamport)
        if self._report_committed is not None:  # the sink is open
            # Entries exist in this process only, so after a crash no applied row needs redelivery.
            self._report_committed(self._next_offset)
        return True

    async def forget(self, erased: Sequence[tuple[str, str]], before: int) -> None:
        """Drop the entries of tombstones, as `HoldsTombstones` says; loads of erased vectors are repeated.

        A loader whose source still has a tombstone returns it: so its source should forget first.
        """
        for ref in erased:
            if (load := self._loading.get(ref)) is not None:
                load.is_stale = True
        for refs in self._entries.tombstones(erased, before):
            for ref in refs:
                self._drop(ref)
            await anyio.lowlevel.checkpoint()

    async def begin_rebuild(self, offset: int) -> None:
        """Drop all entries; loads in progress are repeated."""
        self._entries.clear()
        for load in self._loading.values():
            load.is_stale = True
        self._next_offset = offset

    async def load_states(self, rows: Sequence[StateRow]) -> None:
        """In refresh mode, cache the states that fit; a newer entry that was loaded meanwhile stays."""
        if self.mode != "refresh":
            return
        for row in rows:
            ref, key = (row.namespace, row.vector_id), row.state.key
            if ref in self._entries.order:
                table = self._entries.tables[ref[0]]
                if key is None or key <= table.head(table.slots[ref[1]])[:3]:
                    continue
                self._drop(ref)
            self._put(ref, row.state)

    async def end_rebuild(self, offset: int, lamport: int) -> None:
        """Continue from `offset`."""
        self._next_offset, self._lamport = offset, lamport
        if self._report_committed is not None:
            self._report_committed(offset)

    async def aclose(self) -> None:
        """Drop all entries: without deltas they would become outdated."""
        self._entries.clear()
        self._next_offset = 0

    def statistics(self) -> CacheStatistics:
        """Return a snapshot of counts and sizes."""
        return CacheStatistics(entries=len(self._entries.order), bytes=self._entries.size, **self._counts)

    def peek(self, namespace: str, vector_id: str) -> VectorState | None:
        """Return the cached state, or None; loads nothing."""
        ref = (namespace, vector_id)
        entries = self._entries
        if ref not in entries.order:
            check_texts(namespace=namespace, vector_id=vector_id)
            self._counts["misses"] += 1
            return None
        self._counts["hits"] += 1
        entries.order.move_to_end(ref)
        return entries.state(ref)

    async def get(self, namespace: str, vector_id: str) -> VectorState | None:
        """Return the state, loaded on a miss; None if it is unknown. A deleted vector has a tombstone."""
        state = self.peek(namespace, vector_id)
        if state is not None or self._loader is None:
            return state
        ref = (namespace, vector_id)
        while (load := self._loading.get(ref)) is not None:  # one load of a vector at a time
            await load.done.wait()
            if ref in self._entries.order:
                return self._entries.state(ref)
        return await self._load(ref, self._loader)

    def _apply_one(self, logged: LoggedBatch, rows: NDArray[np.intp] | None) -> None:
        taken, count = 0, logged.count if rows is None else len(rows)
        is_ordinary = logged.source is not _REPLICA and logged.known_ids is _NO_IDS
        if is_ordinary and self.mode == "refresh" and not self._loading:
            tables = list(map(self._entries.tables.get, logged.batch.namespace_names))
            taken, refreshed = fold_leading(tables, logged, rows, adds=False)
            self._counts["refreshed"] += refreshed
            if taken == count:
                return
        self._change_rows(logged, range(taken, count) if rows is None else rows[taken:].tolist())
        self._evict_excess()

    def _change_rows(self, logged: LoggedBatch, rows: Iterable[int]) -> None:
        batch = logged.batch
        names, keys, kinds = batch.namespaces, batch.keys, batch.kinds
        change = self._refresh if self.mode == "refresh" else self._invalidate
        for row in rows:
            ref = (names[row], keys[row])
            if ref in self._entries.order or kinds[row] in _COMPLETE_KINDS or self._loading:
                change(ref, logged, row, kinds[row])

    def _refresh(self, ref: Ref, logged: LoggedBatch, row: int, kind: int) -> None:
        key, is_forwarded = logged.key(row), logged.source is _REPLICA
        self._notify_load(ref, key, is_forwarded=is_forwarded)
        is_cached = ref in self._entries.order
        if is_cached and logged.known_ids is not _NO_IDS:
            self._drop(ref)  # whether the delta has an effect depends on the vector's full history
            return
        if not is_cached and (kind not in _COMPLETE_KINDS or is_forwarded):
            return  # a forwarded create may sort before deltas that the cache does not know
        if kind not in FOLDED_KINDS:
            self._drop(ref)
            return
        table = self._entries.table(ref[0])
        slot = table.slot_of(ref[1])
        self._entries.order.setdefault(ref)
        head = table.head(slot)[:3]
        if key <= head:
            # A local delta is in the state already. A forwarded one may be missing in it: drop the entry.
            if is_forwarded and key != head:
                self._counts["out_of_order"] += 1
                self._drop(ref)
            return
        try:
            table.fold_row(logged.batch, row, slot)
        except Misfit:
            self._drop(ref)
            return
        table.set_head(slot, *key, logged.offset + row)
        self._counts["refreshed"] += 1

    def _invalidate(self, ref: Ref, logged: LoggedBatch, row: int, kind: int) -> None:
        key, is_forwarded = logged.key(row), logged.source is _REPLICA
        self._notify_load(ref, key, is_forwarded=is_forwarded)
        if ref not in self._entries.order:
            return
        table = self._entries.tables[ref[0]]
        head = table.head(table.slots[ref[1]])[:3]
        if key > head or (is_forwarded and key != head):
            self._drop(ref)

    def _notify_load(self, ref: Ref, key: Key, *, is_forwarded: bool) -> None:
        load = self._loading.get(ref)
        if load is not None:
            load.newest = key if load.newest is None else max(load.newest, key)
            load.is_stale |= is_forwarded

    async def _load(
        self, ref: Ref, loader: Callable[[str, str], Awaitable[VectorState | None]]
    ) -> VectorState | None:
        load = self._loading[ref] = _Load()
        state = None
        try:
            for _ in range(_LOADS_MAX):
                load.newest, load.is_stale = None, False
                is_lagging = self._loader_offset is not None and self._loader_offset() < self._next_offset
                state = await loader(*ref)
                self._counts["loads"] += 1
                if load.is_covered_by(state):
                    if state is not None and not is_lagging and ref not in self._entries.order:
                        self._put(ref, state)
                    break
            if ref not in self._entries.order:
                return state
            return self._entries.state(ref)
        finally:
            del self._loading[ref]
            load.done.set()

    def _put(self, ref: Ref, state: VectorState) -> None:
        if state.key is None:
            return  # without a key, it is unknown which deltas the state includes
        self._entries.put(ref, state)
        self._evict_excess()

    def _drop(self, ref: Ref) -> None:
        self._counts["dropped"] += 1
        self._entries.drop(ref)

    def _evict_excess(self) -> None:
        self._counts["evicted"] += self._entries.evict_excess()
