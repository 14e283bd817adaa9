"""The entries of a cache: vectors in tables, within bounds; the least recently requested is evicted first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from delta_prop_sinks.delta_chain import Ref
from delta_prop_sinks.vector_table import ABSENT, NO_OFFSET, VectorTable, restore, state_of, tombstones_before
from delta_prop_wire.algebra import VectorState

_ENTRY_BYTES = 500
"""Bytes of a state object without its numbers; its data and metadata are shared."""

_STATES_DIVISOR = 8
"""State objects may take `bytes_max` divided by this; each is made once for many readers."""

_STEP = 1024
"""Entries searched for tombstones in one step."""


class CacheEntries:
    """Entries by namespace and vector id, up to `entries_max` and `bytes_max`.

    `tables`: the entries' vectors; `order`: the entries, least recently requested first. `states`: entries as
    state objects, made when they are requested. `unsized`: tables whose size may have changed.
    """

    def __init__(self, entries_max: int, bytes_max: int) -> None:
        self.entries_max = entries_max
        self.bytes_max = bytes_max
        self.tables: dict[str, VectorTable] = {}
        self.order: OrderedDict[Ref, None] = OrderedDict()
        self.states: dict[Ref, VectorState] = {}
        self.unsized: set[VectorTable] = set()
        self._states_bytes = 0
        self._tables_bytes = 0

    @property
    def size(self) -> int:
        """Bytes of tables and state objects."""
        return self._tables_bytes + self._states_bytes

    def clear(self) -> None:
        """Drop all entries."""
        self.tables.clear()
        self.unsized.clear()
        self.order.clear()
        self._forget_states()
        self._tables_bytes = 0

    def table(self, namespace: str) -> VectorTable:
        """Return the table of a namespace, to be changed; create it if there is none."""
        table = self.tables.get(namespace)
        if table is None:
            table = self.tables[namespace] = VectorTable(namespace)
        self.unsized.add(table)
        return table

    def put(self, ref: Ref, state: VectorState) -> None:
        """Add an entry with a state that has a key."""
        assert state.key is not None
        table = self.table(ref[0])
        slot = table.slot_of(ref[1])
        restore(table, slot, state)
        table.set_head(slot, *state.key, NO_OFFSET)
        self.order[ref] = None

    def tombstones(self, erased: Sequence[Ref], before: int) -> Iterator[list[Ref]]:
        """Yield the tombstones of these vectors, and those whose last delta has an offset below `before`, or
        an unknown one; some per step. The entries may change between steps.
        """
        for start in range(0, len(erased), _STEP):
            refs = dict.fromkeys(ref for ref in erased[start : start + _STEP] if ref in self.order)
            yield [ref for ref in refs if not self._is_alive(ref)]
        for table in list(self.tables.values()) if before > 0 else ():
            for start in range(0, table.used, _STEP):
                end = min(start + _STEP, table.used)
                yield [
                    (table.namespace, vector_id) for vector_id in tombstones_before(table, start, end, before)
                ]

    def _is_alive(self, ref: Ref) -> bool:
        table = self.tables[ref[0]]
        return bool(table.forms[table.slots[ref[1]]] != ABSENT)

    def drop(self, ref: Ref) -> None:
        """Drop an entry."""
        del self.order[ref]
        self._release(ref)

    def _release(self, ref: Ref) -> None:
        table = self.tables[ref[0]]
        table.release(table.slots[ref[1]])
        self.unsized.add(table)
        self._forget_state(ref)

    def evict_excess(self) -> int:
        """Evict entries until their count and bytes are within bounds; return how many were evicted."""
        bytes_max, evicted = self.bytes_max - self.bytes_max // _STATES_DIVISOR, 0
        while True:
            self._measure()
            excess = max(len(self.order) - self.entries_max, self._tables_bytes > bytes_max)
            if not excess or not self.order:
                return evicted
            for _ in range(excess):
                ref, _ = self.order.popitem(last=False)
                self._release(ref)
                evicted += 1

    def _measure(self) -> None:
        for table in self.unsized:
            size = table.size if table.slots else 0
            self._tables_bytes += size - table.counted_size
            table.counted_size = size
            if not table.slots and self.tables.get(table.namespace) is table:
                del self.tables[table.namespace]
        self.unsized.clear()

    def state(self, ref: Ref) -> VectorState:
        """Return an entry as a state object, made once for many readers."""
        table, state = self.tables[ref[0]], self.states.get(ref)
        slot = table.slots[ref[1]]
        if state is None or state.key != table.head(slot)[:3]:
            self._forget_state(ref)
            state = state_of(table, slot)
            size = _state_bytes(state)
            if self._states_bytes + size > self.bytes_max // _STATES_DIVISOR:
                self._forget_states()
            if size <= self.bytes_max // _STATES_DIVISOR:
                self.states[ref] = state
                self._states_bytes += size
        return state

    def _forget_state(self, ref: Ref) -> None:
        state = self.states.pop(ref, None)
        if state is not None:
            self._states_bytes -= _state_bytes(state)

    def _forget_states(self) -> None:
        self.states.clear()
        self._states_bytes = 0


def _state_bytes(state: VectorState) -> int:
    return _ENTRY_BYTES + (0 if state.vector is None else state.vector.nbytes)
