"""An in-process cache: states of the vectors that are asked for, kept current or dropped as deltas come.

What it cannot keep right it drops: a miss is slow, a wrong answer is wrong.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import anyio

from delta_prop_sinks.sink import ResumePoint
from delta_prop_sinks.table import weigh
from delta_prop_wire.algebra import State, apply
from delta_prop_wire.cursor import Cursor
from delta_prop_wire.delta import Kind, Source
from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from delta_prop_sinks.chain import Ref
    from delta_prop_sinks.sink import Delivery, SinkContext
    from delta_prop_wire.algebra import Key
    from delta_prop_wire.batch import Batch, LoggedBatch

_ENTRY_BYTES = 700
"""What an entry takes beside numbers, bytes and metadata."""

_COMPLETE_KINDS = frozenset({Kind.CREATE, Kind.DELETE})
"""Kinds after which a state is known whatever it was before; dense and opaque keep older metadata."""

_COMPLETE_MASK = 1 << Kind.CREATE | 1 << Kind.DELETE
_KNOWN_KINDS = frozenset(map(int, Kind)) - {int(Kind.TRANSFORM)}
_LOADS_MAX = 3


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
    and not cached. A state's `ignored` counts from where the cache began to know it.
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
        if entries_max < 1 or bytes_max < 1:
            raise UsageError(f"entries_max {entries_max} and bytes_max {bytes_max} must be at least 1")
        if mode not in ("refresh", "invalidate"):
            raise UsageError(f'mode {mode!r} is not "refresh" or "invalidate"')
        self.name = name
        self.entries_max = entries_max
        self.bytes_max = bytes_max
        self.mode = mode
        self._loader, self._loader_offset = loader, loader_offset
        self._entries: OrderedDict[Ref, tuple[State, int]] = OrderedDict()
        self._loading: dict[Ref, _Load] = {}
        self._bytes = 0
        self._log_id = b""
        self._next_offset = self._lamport = 0
        self._hits = self._misses = self._loads = 0
        self._refreshed = self._dropped = self._evicted = self._late = 0

    # --- the contract

    async def open(self, context: SinkContext) -> ResumePoint:
        """Go on where this object left off; a new one begins at the log's beginning."""
        if context.log_id != self._log_id:
            self._log_id, self._next_offset = context.log_id, 0
        return ResumePoint(Cursor(context.log_id, context.epoch, self._next_offset), self._lamport)

    async def apply(self, deliveries: Sequence[Delivery]) -> None:
        """Bring entries up to date, or drop them."""
        for delivery in deliveries:
            logged, batch = delivery.logged, delivery.batch
            self._next_offset = max(self._next_offset, delivery.next_offset)
            self._lamport = max(self._lamport, logged.lamport + logged.count - 1)
            if batch.is_control:
                continue
            if not self._entries and not self._loading and not batch.kinds_mask & _COMPLETE_MASK:
                continue
            self._change(delivery)

    async def aclose(self) -> None:
        """Drop everything: without deltas no entry stays right."""
        self._entries.clear()
        self._bytes = 0
        self._next_offset = 0

    def statistics(self) -> CacheStatistics:
        """A snapshot of counts and sizes."""
        return CacheStatistics(
            entries=len(self._entries),
            bytes=self._bytes,
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
        entry = self._entries.get(ref)
        if entry is None:
            self._misses += 1
            return None
        self._hits += 1
        self._entries.move_to_end(ref)
        return entry[0]

    async def get(self, namespace: str, vector_id: str) -> State | None:
        """The state, loaded on a miss; a tombstone is a state that is not alive. None: unknown here."""
        state = self.peek(namespace, vector_id)
        if state is not None or self._loader is None:
            return state
        ref = (namespace, vector_id)
        while (load := self._loading.get(ref)) is not None:  # one load of a vector at a time
            await load.done.wait()
            if ref in self._entries:
                return self._entries[ref][0]
        return await self._load(ref, self._loader)

    # --- helpers

    def _change(self, delivery: Delivery) -> None:
        logged, batch = delivery.logged, delivery.batch
        keys, name, kind = batch.keys, batch.namespace, batch.kind
        names = batch.namespaces if name is None else [name] * batch.count
        kinds = batch.kinds if kind is None else [kind] * batch.count
        change = self._refresh if self.mode == "refresh" else self._invalidate
        for row in range(batch.count) if delivery.rows is None else delivery.rows.tolist():
            ref = (names[row], keys[row])
            if ref in self._entries or kinds[row] in _COMPLETE_KINDS or self._loading:
                change(ref, logged, row, kinds[row])

    def _refresh(self, ref: Ref, logged: LoggedBatch, row: int, kind: int) -> None:
        key, forwarded = logged.key(row), logged.source == Source.REPLICA
        if self._loading:
            self._tell_load(ref, key, forwarded)
        entry = self._entries.get(ref)
        state = State() if entry is None else entry[0]
        if entry is None and (kind not in _COMPLETE_KINDS or forwarded):
            return  # a forwarded create may sort before deltas that are not known here
        if entry is not None and (state.key is None or kind not in _KNOWN_KINDS):
            self._drop(ref)
        elif state.key is not None and key <= state.key:
            # A local delta is in the state already. A forwarded one may be, or may come late: reload.
            if forwarded and key != state.key:
                self._late += 1
                self._drop(ref)
        else:
            self._refreshed += 1
            after = _after_sparse(state, logged.batch, row, key) if kind == Kind.SPARSE else None
            if after is not None and entry is not None:
                self._entries[ref] = (after, entry[1])
            else:
                self._put(ref, apply(state, logged.batch.operation(row), logged.batch.metadata(row), key))

    def _invalidate(self, ref: Ref, logged: LoggedBatch, row: int, kind: int) -> None:
        key, forwarded = logged.key(row), logged.source == Source.REPLICA
        self._tell_load(ref, key, forwarded)
        entry = self._entries.get(ref)
        if entry is None:
            return
        held = entry[0].key
        if held is None or key > held or (forwarded and key != held):
            self._drop(ref)

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
                    if state is not None and not behind and ref not in self._entries:
                        self._put(ref, state)
                    break
            cached = self._entries.get(ref)
            return state if cached is None else cached[0]
        finally:
            del self._loading[ref]
            load.done.set()

    def _put(self, ref: Ref, state: State) -> None:
        entries = self._entries
        size = _ENTRY_BYTES + len(ref[1]) + _size(state)
        old = entries.get(ref)
        self._bytes += size - (0 if old is None else old[1])
        entries[ref] = (state, size)  # in the place it has: a delta is no use, only a reader's question is
        while len(entries) > self.entries_max or self._bytes > self.bytes_max:
            _, (_, freed) = entries.popitem(last=False)
            self._bytes -= freed
            self._evicted += 1

    def _drop(self, ref: Ref) -> None:
        _, size = self._entries.pop(ref)
        self._bytes -= size
        self._dropped += 1


def _after_sparse(state: State, batch: Batch, row: int, key: Key) -> State | None:
    """What `apply` gives for the commonest delta, in half its time; None where a closer look is needed."""
    width = batch.row_values
    if state.vector is None or width is None or batch.has_metadata or batch.kind != Kind.SPARSE:
        return None
    vector = state.vector.copy()
    part = slice(row * width, (row + 1) * width)
    try:
        vector[batch.indices[part]] = batch.values[part]
    except IndexError:
        return None
    return State(True, vector, None, state.metadata, state.ignored, key)


def _size(state: State) -> int:
    size = weigh(dict(state.metadata)) if state.metadata else 0
    if state.vector is not None:
        size += state.vector.nbytes
    return size + (0 if state.data is None else len(state.data))
