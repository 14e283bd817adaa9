"""The delta chain: per vector, a base state and the deltas after it, for deltas that arrive out of order.

Only a forwarded delta can sort before one that is already folded, so chains are kept from the first forwarded
delta on. Between its deltas a chain stores *savepoints*, states to resume a fold from: many near its end,
where concurrent writers insert their deltas, and fewer towards its start. A chain expires 60 s after the last
delta of its vector. If all chains together exceed their bound in bytes, the least recently changed chains
drop the deltas below their first savepoint, then all. A delta that sorts before the base causes a refold from
the log.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from delta_prop_sinks.vector_table import ABSENT
from delta_prop_wire.algebra import Key, VectorState
from delta_prop_wire.batch import Batch, LoggedBatch
from delta_prop_wire.delta import KnownIds, Operation

Ref = tuple[str, str]
"""Namespace and vector id."""

NOTHING_KEY: Key = (-1, 0, 0)
"""The key of a base that contains no delta."""

SAVEPOINT_ENTRIES = 16
"""The maximum number of deltas between the last savepoint of a chain and its end."""

ENTRY_BYTES = 500
"""Bytes of a delta with its key, its operation and its entry in the id index, without its batch."""

_BASE_BYTES = 200


class Entry:
    """One delta of a chain. `is_duplicate`: an earlier delta has the same id, so this one has no effect."""

    __slots__ = ("_operation", "is_duplicate", "key", "logged", "row")

    def __init__(self, key: Key, logged: LoggedBatch, row: int) -> None:
        self.key = key
        self.logged = logged
        self.row = row
        self.is_duplicate = False
        self._operation: Operation | None = None

    @property
    def offset(self) -> int:
        """The delta's offset in the log."""
        return self.logged.offset + self.row

    @property
    def id(self) -> bytes | None:
        """The delta's id, or None."""
        ids = self.logged.batch.ids
        return None if ids is None else ids[self.row]

    @property
    def can_be_duplicate(self) -> bool:
        """True if the log already held some ids of the delta's batch, as the frame says."""
        return self.logged.known_ids is not KnownIds.NONE

    @property
    def operation(self) -> Operation:
        """The delta's operation; decoded once, as a delta may be refolded many times."""
        operation = self._operation
        if operation is None:
            operation = self.logged.batch.operation(self.row)
            if not operation.data:  # an operation with bytes is not stored: it has a copy of them
                self._operation = operation
        return operation


@dataclass(slots=True)
class ChainBase:
    """A vector's state, and the key of the last delta in it. `form`: as in `VectorTable.forms`."""

    key: Key = NOTHING_KEY
    form: int = 0
    vector: NDArray[np.float32] | None = None
    data: bytes | None = None
    metadata: dict[str, Any] | None = None
    ignored: int = 0

    @property
    def size(self) -> int:
        """Approximate bytes, without the metadata, which the table shares."""
        return _BASE_BYTES + (0 if self.vector is None else self.vector.nbytes)

    @property
    def state(self) -> VectorState:
        """The base as a vector state."""
        return VectorState(
            alive=self.form != ABSENT,
            vector=self.vector,
            data=self.data,
            metadata=self.metadata or {},
            ignored=self.ignored,
            key=None if self.key == NOTHING_KEY else self.key,
        )


class BelowBase(Enum):
    """The deltas that lie below a chain's base."""

    NOTHING = "nothing: the chain holds all deltas of its vector"
    STATE = "a state instead of deltas that the log dropped: nothing can be inserted there"
    DELTAS = "deltas that the log may still hold"


class DeltaChain:
    """A base and the deltas after it, in canonical order, with savepoints between them.

    `first_changed`: the index of the first delta to refold; None if the vector's state is up to date.
    `changed_at`: when the last delta was added, by the clock's `now()`. `size`: approximate bytes, without
    the batches. `savepoint_at`: the number of deltas at which a new savepoint is due.
    """

    __slots__ = (
        "_by_id",
        "_savepoints",
        "base",
        "below_base",
        "changed_at",
        "entries",
        "first_changed",
        "savepoint_at",
        "size",
    )

    def __init__(
        self, base: ChainBase, below_base: BelowBase = BelowBase.DELTAS, entries: list[Entry] | None = None
    ) -> None:
        """`entries`: deltas after the base, in canonical order, which are not folded yet."""
        self.base = base
        self.below_base = below_base
        self.entries = entries or []
        self.first_changed: int | None = 0 if entries else None
        self.size = base.size + ENTRY_BYTES * len(self.entries)
        self.changed_at = 0.0
        self.savepoint_at = SAVEPOINT_ENTRIES
        self._savepoints: list[tuple[int, ChainBase]] = []  # (number of the chain's deltas included, state)
        self._by_id: dict[bytes, list[Entry]] | None = None  # built on first use

    def can_insert(self, entry: Entry) -> bool:
        """True if the chain starts before the delta, and before the first delta with the same id."""
        if self.below_base is not BelowBase.DELTAS:
            return True
        if entry.key <= self.base.key:
            return False
        return not entry.can_be_duplicate or bool(self._with_same_id(entry))

    def append(self, entry: Entry) -> None:
        """Add the vector's next delta in canonical order."""
        self.entries.append(entry)
        self.size += ENTRY_BYTES
        if self._by_id is not None:
            self._note_id(entry)

    def insert(self, entry: Entry) -> bool:
        """Insert a delta that `can_insert` accepts; False if the chain has it already.

        Of several deltas with one id, only the first has an effect. If the first is below the base, none in
        the chain has one.
        """
        entries = self.entries
        index = len(entries)
        if entries and entry.key <= entries[-1].key:
            index = bisect_left(entries, entry.key, key=attrgetter("key"))
            if entries[index].key == entry.key:
                return False
        if entry.can_be_duplicate:
            self._mark_duplicates(entry)
        if self._by_id is not None:
            self._note_id(entry)
        entries.insert(index, entry)
        self.size += ENTRY_BYTES
        self._change_from(index)
        return True

    @property
    def end_key(self) -> Key:
        """The key of the last delta."""
        return self.entries[-1].key if self.entries else self.base.key

    def count_ignored(self) -> None:
        """Count as ignored a delta that sorts before a base below which nothing can be inserted."""
        for state in (self.base, *(state for _, state in self._savepoints)):
            state.ignored += 1
        if self.first_changed is None:
            self.first_changed = len(self.entries)

    def _change_from(self, index: int) -> None:
        self.first_changed = index if self.first_changed is None else min(self.first_changed, index)
        savepoints = self._savepoints
        while savepoints and savepoints[-1][0] > index:
            self.size -= savepoints.pop()[1].size
        self.savepoint_at = SAVEPOINT_ENTRIES + (savepoints[-1][0] if savepoints else 0)

    # --- duplicate ids

    def _with_same_id(self, entry: Entry) -> list[Entry]:
        """Return the deltas with this id: the oldest in the log, and those that can be duplicates."""
        if self._by_id is None:
            self._by_id = {}
            for other in self.entries:
                self._note_id(other)
        same_id = self._by_id.get(entry.id, [])  # type: ignore[arg-type]
        oldest = min(same_id, key=attrgetter("offset"), default=None)
        return [other for other in same_id if other is oldest or other.can_be_duplicate]

    def _note_id(self, entry: Entry) -> None:
        assert self._by_id is not None
        if entry.id is not None:
            self._by_id.setdefault(entry.id, []).append(entry)

    def _mark_duplicates(self, entry: Entry) -> None:
        same_id = self._with_same_id(entry)
        if not same_id:  # a delta of another vector has the id, or a delta that the chain dropped
            entry.is_duplicate = (
                self.below_base is not BelowBase.NOTHING and entry.logged.known_ids is KnownIds.ALL
            )
            return
        effective = [other for other in same_id if not other.is_duplicate]
        entry.is_duplicate = all(other.key < entry.key for other in effective)
        if not entry.is_duplicate:  # it sorts before the others, so the refold includes them
            for other in effective:
                other.is_duplicate = True

    # --- savepoints

    def last_savepoint(self) -> tuple[int, ChainBase]:
        """Return the state to resume a fold from: (the number of deltas that it includes, the state)."""
        return self._savepoints[-1] if self._savepoints else (0, self.base)

    def savepoint_positions(self) -> list[int]:
        """Return the positions at which a fold from the last savepoint should add savepoints, descending."""
        start, end = self.last_savepoint()[0], len(self.entries)
        positions, step = [], SAVEPOINT_ENTRIES
        while end - step > start:
            positions.append(end - step)
            step *= 2
        changed = end if self.first_changed is None else self.first_changed
        if changed >= start + SAVEPOINT_ENTRIES and changed not in positions:
            positions.append(changed)
            positions.sort(reverse=True)
        return positions

    def add_savepoint(self, count: int, state: ChainBase) -> None:
        """Add a savepoint after `count` deltas. Drop older ones so that a refold from a savepoint folds at
        most twice as many deltas as follow the changed one.
        """
        savepoints, end = self._savepoints, len(self.entries)
        savepoints.append((count, state))
        self.savepoint_at = count + SAVEPOINT_ENTRIES
        self.size += state.size
        index = 0
        while index < len(savepoints) - 1:
            before, after = savepoints[index - 1][0] if index else 0, savepoints[index + 1][0]
            if after - before <= end - after:
                self.size -= savepoints.pop(index)[1].size
            else:
                index += 1

    def shorten(self) -> list[Entry]:
        """Make the first savepoint the base; return the deltas that this drops, none without a savepoint."""
        if not self._savepoints:
            return []
        count, state = self._savepoints.pop(0)
        dropped, self.entries = self.entries[:count], self.entries[count:]
        self._savepoints = [(position - count, savepoint) for position, savepoint in self._savepoints]
        self.savepoint_at -= count
        self.size -= self.base.size + ENTRY_BYTES * count
        self.base, self.below_base, self._by_id = state, BelowBase.DELTAS, None
        return dropped


class BatchReferences:
    """Counts references to batches of a log, one per delta in use. `size`: their bytes, each batch once."""

    def __init__(self) -> None:
        self.size = 0
        self._uses: dict[int, int] = {}

    def hold(self, batch: Batch, count: int = 1) -> None:
        """Add `count` references to a batch, one per delta."""
        uses = self._uses.get(id(batch), 0)
        self._uses[id(batch)] = uses + count
        if not uses:
            self.size += batch.size

    def drop(self, entries: Iterable[Entry]) -> None:
        """Drop the references of these deltas to their batches."""
        uses = self._uses
        for entry in entries:
            batch = entry.logged.batch
            remaining = uses[id(batch)] - 1
            if remaining:
                uses[id(batch)] = remaining
            else:
                del uses[id(batch)]
                self.size -= batch.size

    def clear(self) -> None:
        """Drop all references."""
        self._uses.clear()
        self.size = 0


class DeltaChains:
    """All chains, bounded by the time since a vector's last delta, and by their total bytes."""

    def __init__(self, *, age_s_max: float = 60.0, bytes_max: int = 64 << 20) -> None:
        self.age_s_max = age_s_max
        self.bytes_max = bytes_max
        self.active = False
        """True from the first forwarded delta on: the owner then notes each delta here."""
        self._bytes = 0
        self._batches = BatchReferences()
        self._chains: OrderedDict[Ref, DeltaChain] = OrderedDict()  # least recently changed first

    def __len__(self) -> int:
        return len(self._chains)

    @property
    def size(self) -> int:
        """Approximate bytes of all chains, batches included."""
        return self._bytes + self._batches.size

    def get(self, ref: Ref) -> DeltaChain | None:
        """Return the chain of a vector, or None."""
        return self._chains.get(ref)

    def note(self, ref: Ref, entry: Entry, base: ChainBase | None, now: float) -> DeltaChain:
        """Add the vector's next delta. `base`: the state before it, for a vector without a chain."""
        chain = self._chains.get(ref)
        if chain is None:
            assert base is not None
            chain = self._chains[ref] = DeltaChain(base)
            self._bytes += chain.size
        else:
            self._chains.move_to_end(ref)
        chain.append(entry)
        chain.changed_at = now
        self._bytes += ENTRY_BYTES
        return chain

    def hold(self, batch: Batch, count: int = 1) -> None:
        """Add references to a batch of which `count` deltas were noted."""
        self._batches.hold(batch, count)

    def start(self, ref: Ref, chain: DeltaChain, now: float) -> DeltaChain:
        """Replace a vector's chain."""
        self.forget(ref)
        self._chains[ref] = chain
        self._bytes += chain.size
        for entry in chain.entries:
            self._batches.hold(entry.logged.batch)
        chain.changed_at = now
        return chain

    def insert(self, ref: Ref, chain: DeltaChain, entry: Entry, now: float) -> bool:
        """Insert a delta into a chain; False if the chain has it already."""
        before = chain.size
        if not chain.insert(entry):
            return False
        self._bytes += chain.size - before
        self._batches.hold(entry.logged.batch)
        chain.changed_at = now
        self._chains.move_to_end(ref)
        return True

    def add_savepoint(self, chain: DeltaChain, count: int, state: ChainBase) -> None:
        """Add a savepoint to a chain."""
        before = chain.size
        chain.add_savepoint(count, state)
        self._bytes += chain.size - before

    def forget(self, ref: Ref) -> None:
        """Drop a vector's chain."""
        chain = self._chains.pop(ref, None)
        if chain is not None:
            self._bytes -= chain.size
            self._batches.drop(chain.entries)

    def expire(self, now: float) -> None:
        """Drop chains that are too old; above the bound of bytes, shorten or drop the least recent ones."""
        while self._chains:
            ref, chain = next(iter(self._chains.items()))
            if chain.changed_at >= now - self.age_s_max:
                if self.size <= self.bytes_max:
                    return
                before = chain.size
                if dropped := chain.shorten():
                    self._bytes -= before - chain.size
                    self._batches.drop(dropped)
                    continue
            self.forget(ref)

    def clear(self) -> None:
        """Drop all chains."""
        self._chains.clear()
        self._batches.clear()
        self._bytes = 0
