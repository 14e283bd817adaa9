"""The delta chain: per vector, a checkpoint of its state and the deltas since, for those that come late.

Only a forwarded delta can sort before one that is already folded, so chains begin with the first of
those. A checkpoint moves up to the present, by forgetting the chain, when it holds 100 deltas, when its
oldest is 60 s old, when a replay took over 1 ms, and when all chains together grow beyond their bytes.
What sorts before a checkpoint is folded again from the log.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from delta_prop_wire.delta import KnownIds

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from delta_prop_wire.algebra import Key
    from delta_prop_wire.batch import LoggedBatch

Ref = tuple[str, str]
"""Namespace and vector id."""

NOTHING_KEY: Key = (-1, 0, 0)

_ENTRY_BYTES = 150


@dataclass(slots=True)
class Entry:
    """One delta of a chain. `without_effect`: one that comes before it has its id."""

    key: Key
    logged: LoggedBatch
    row: int
    without_effect: bool = False

    @property
    def id(self) -> bytes | None:
        """Its id, where it has one."""
        ids = self.logged.batch.ids
        return None if ids is None else ids[self.row]


@dataclass(slots=True)
class Checkpoint:
    """A vector's state, and the key of the last delta in it."""

    key: Key = NOTHING_KEY
    form: int = 0
    vector: NDArray[np.float32] | None = None
    data: bytes | None = None
    metadata: dict[str, Any] | None = None
    ignored: int = 0

    @property
    def size(self) -> int:
        """About how many bytes it takes, its metadata aside (shared with the table)."""
        return _ENTRY_BYTES + (0 if self.vector is None else self.vector.nbytes)


@dataclass(slots=True)
class Chain:
    """A checkpoint and the deltas since, in canonical order."""

    checkpoint: Checkpoint
    entries: list[Entry] = field(default_factory=list)

    def knows(self, entry: Entry) -> bool:
        """Whether it reaches back far enough to put a delta in its place: before it, and before one with its
        id where there may be one.
        """
        if entry.key <= self.checkpoint.key:
            return False
        return entry.logged.known_ids is KnownIds.NONE or bool(self._twins(entry))

    def _twins(self, entry: Entry) -> list[Entry]:
        """The deltas that have this one's id."""
        wanted = entry.id
        found = [] if wanted is None else [one for one in self.entries if one.id == wanted]
        oldest = min(found, key=_entry_offset, default=None)
        return [one for one in found if one is oldest or one.logged.known_ids is not KnownIds.NONE]

    def add(self, entry: Entry) -> bool:
        """Put a delta in its place; False where the chain has it already.

        Of those with its id, which `knows` has found, the first has an effect; none has where that is in the
        checkpoint.
        """
        at = bisect_left(self.entries, entry.key, key=_entry_key)
        if at < len(self.entries) and self.entries[at].key == entry.key:
            return False
        if entry.logged.known_ids is not KnownIds.NONE:
            effective = [one for one in self._twins(entry) if not one.without_effect]
            entry.without_effect = all(one.key < entry.key for one in effective)
            for one in effective:
                one.without_effect = not entry.without_effect
        self.entries.insert(at, entry)
        return True


@dataclass(slots=True)
class _Held:
    """A batch that chains refer to, since when, and which chains."""

    since: float
    logged: LoggedBatch
    refs: set[Ref]


class Chains:
    """All chains, bounded in deltas a vector, in age, and in bytes together."""

    def __init__(self, *, deltas_max: int = 100, age_s_max: float = 60.0, bytes_max: int = 64 << 20) -> None:
        self.deltas_max = deltas_max
        self.age_s_max = age_s_max
        self.bytes_max = bytes_max
        self.active = False
        self.size = 0
        self._chains: dict[Ref, Chain] = {}
        self._held: deque[_Held] = deque()

    def __len__(self) -> int:
        return len(self._chains)

    def get(self, ref: Ref) -> Chain | None:
        """The chain of a vector, if one is kept."""
        return self._chains.get(ref)

    def note(self, ref: Ref, entry: Entry, checkpoint: Checkpoint | None, now: float) -> None:
        """Add the vector's next delta; `checkpoint` is its state before, where no chain is kept yet."""
        chain = self._chains.get(ref)
        if chain is None:
            assert checkpoint is not None
            chain = self.start(ref, checkpoint)
        chain.entries.append(entry)
        self.hold(ref, chain, entry.logged, now)

    def start(self, ref: Ref, checkpoint: Checkpoint) -> Chain:
        """Begin a vector's chain anew."""
        self.forget(ref)
        chain = self._chains[ref] = Chain(checkpoint)
        self.size += checkpoint.size
        return chain

    def hold(self, ref: Ref, chain: Chain, logged: LoggedBatch, now: float) -> None:
        """Keep an added delta's batch; forget the chain where it has grown too long."""
        if not self._held or self._held[-1].logged is not logged:
            self._held.append(_Held(now, logged, set()))
            self.size += logged.batch.size
        self._held[-1].refs.add(ref)
        self.size += _ENTRY_BYTES
        if len(chain.entries) >= self.deltas_max:
            self.forget(ref)

    def forget(self, ref: Ref) -> None:
        """Move a vector's checkpoint to the present."""
        chain = self._chains.pop(ref, None)
        if chain is not None:
            self.size -= chain.checkpoint.size + _ENTRY_BYTES * len(chain.entries)

    def expire(self, now: float) -> None:
        """Let the oldest batches go, with the chains that refer to them, until age and bytes fit."""
        held = self._held
        while held and (held[0].since < now - self.age_s_max or self.size > self.bytes_max):
            oldest = held.popleft()
            self.size -= oldest.logged.batch.size
            for ref in oldest.refs:
                self.forget(ref)

    def clear(self) -> None:
        """Forget all chains."""
        self._chains.clear()
        self._held.clear()
        self.size = 0


def _entry_key(entry: Entry) -> Key:
    return entry.key


def _entry_offset(entry: Entry) -> int:
    return entry.logged.offset + entry.row
