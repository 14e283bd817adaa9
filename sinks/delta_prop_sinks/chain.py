"""The delta chain: per vector, a checkpoint of its state and the deltas since, for those that come late.

Only a forwarded delta can sort before one that is already folded, so chains begin with the first of
those. Between its deltas a chain keeps *marks*, states to fold on from: close together at its end, where
concurrent writers put their deltas, ever further apart towards its beginning. A chain ends 60 s after the
last delta of its vector; where all chains together grow beyond their bytes, the least recently changed ones
lose what lies below their first mark, then all. What sorts before a checkpoint is folded again from the log.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from delta_prop_sinks.table import ABSENT
from delta_prop_wire.algebra import State
from delta_prop_wire.delta import KnownIds

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy as np
    from numpy.typing import NDArray

    from delta_prop_wire.algebra import Key
    from delta_prop_wire.batch import Batch, LoggedBatch
    from delta_prop_wire.delta import Operation

Ref = tuple[str, str]
"""Namespace and vector id."""

NOTHING_KEY: Key = (-1, 0, 0)

MARK_ENTRIES = 16
"""The end of a chain is at most so many deltas from a mark."""

ENTRY_BYTES = 500
"""What a delta takes with its key, its operation and its place among those found by id, its batch aside."""

_CHECKPOINT_BYTES = 200


class Entry:
    """One delta of a chain. `without_effect`: one that comes before it has its id."""

    __slots__ = ("_operation", "key", "logged", "row", "without_effect")

    def __init__(self, key: Key, logged: LoggedBatch, row: int) -> None:
        self.key = key
        self.logged = logged
        self.row = row
        self.without_effect = False
        self._operation: Operation | None = None

    @property
    def offset(self) -> int:
        """Where it stands in the log."""
        return self.logged.offset + self.row

    @property
    def id(self) -> bytes | None:
        """Its id, where it has one."""
        ids = self.logged.batch.ids
        return None if ids is None else ids[self.row]

    @property
    def may_be_twin(self) -> bool:
        """True if its frame says that ids in it stood in the log before."""
        return self.logged.known_ids is not KnownIds.NONE

    @property
    def operation(self) -> Operation:
        """What it does; looked for once, as a delta may be folded again and again."""
        found = self._operation
        if found is None:
            found = self.logged.batch.operation(self.row)
            if not found.data:  # bytes are a copy
                self._operation = found
        return found


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
        return _CHECKPOINT_BYTES + (0 if self.vector is None else self.vector.nbytes)

    @property
    def state(self) -> State:
        """The same as a state."""
        return State(
            alive=self.form != ABSENT,
            vector=self.vector,
            data=self.data,
            metadata=self.metadata or {},
            ignored=self.ignored,
            key=None if self.key == NOTHING_KEY else self.key,
        )


class Beneath(Enum):
    """What lies beneath a chain's checkpoint."""

    NOTHING = "nothing: the chain holds all deltas of its vector"
    STATE = "what the log no longer tells one by one: nothing can be put there any more"
    DELTAS = "deltas that the log may still tell"


class Chain:
    """A checkpoint and the deltas since, in canonical order, with marks between them.

    `first_changed`: from that delta on the vector is to be folded again; None where its state is up to date.
    `size`: about how many bytes it takes, its batches aside. `mark_at`: so many deltas it holds when its end
    is too far from the last mark.
    """

    __slots__ = (
        "_by_id",
        "_marks",
        "beneath",
        "changed_at",
        "checkpoint",
        "entries",
        "first_changed",
        "mark_at",
        "size",
    )

    def __init__(
        self, checkpoint: Checkpoint, beneath: Beneath = Beneath.DELTAS, entries: list[Entry] | None = None
    ) -> None:
        """`entries`: deltas behind the checkpoint, in canonical order, which are to be folded."""
        self.checkpoint = checkpoint
        self.beneath = beneath
        self.entries = entries or []
        self.first_changed: int | None = 0 if entries else None
        self.size = checkpoint.size + ENTRY_BYTES * len(self.entries)
        self.changed_at = 0.0
        self.mark_at = MARK_ENTRIES
        self._marks: list[tuple[int, Checkpoint]] = []  # how many deltas are in each
        self._by_id: dict[bytes, list[Entry]] | None = None  # made when it is first needed

    # --- what it holds

    def knows(self, entry: Entry) -> bool:
        """Whether it reaches back far enough to put a delta in its place: before it, and before one with its
        id where there may be one.
        """
        if self.beneath is not Beneath.DELTAS:
            return True
        if entry.key <= self.checkpoint.key:
            return False
        return not entry.may_be_twin or bool(self._twins(entry))

    def append(self, entry: Entry) -> None:
        """Add the vector's next delta in canonical order."""
        self.entries.append(entry)
        self.size += ENTRY_BYTES
        if self._by_id is not None:
            self._note_id(entry)

    def insert(self, entry: Entry) -> bool:
        """Put a delta that it `knows` in its place; False where the chain has it already.

        Of those with its id the first has an effect. None has where that one is beneath the checkpoint.
        """
        entries = self.entries
        at = len(entries)
        if entries and entry.key <= entries[-1].key:
            at = bisect_left(entries, entry.key, key=_entry_key)
            if entries[at].key == entry.key:
                return False
        if entry.may_be_twin:
            self._settle_twins(entry)
        if self._by_id is not None:
            self._note_id(entry)
        entries.insert(at, entry)
        self.size += ENTRY_BYTES
        self._change_from(at)
        return True

    @property
    def end_key(self) -> Key:
        """The key of the last delta."""
        return self.entries[-1].key if self.entries else self.checkpoint.key

    def ignore(self) -> None:
        """Count a delta that sorts before the checkpoint, below which nothing can be put any more."""
        for state in (self.checkpoint, *(state for _, state in self._marks)):
            state.ignored += 1
        if self.first_changed is None:
            self.first_changed = len(self.entries)

    def _change_from(self, at: int) -> None:
        self.first_changed = at if self.first_changed is None else min(self.first_changed, at)
        marks = self._marks
        while marks and marks[-1][0] > at:
            self.size -= marks.pop()[1].size
        self.mark_at = MARK_ENTRIES + (marks[-1][0] if marks else 0)

    # --- twins

    def _twins(self, entry: Entry) -> list[Entry]:
        """The deltas that have this one's id."""
        if self._by_id is None:
            self._by_id = {}
            for one in self.entries:
                self._note_id(one)
        found = self._by_id.get(entry.id, [])  # type: ignore[arg-type]
        oldest = min(found, key=_entry_offset, default=None)
        return [one for one in found if one is oldest or one.may_be_twin]

    def _note_id(self, entry: Entry) -> None:
        assert self._by_id is not None
        if entry.id is not None:
            self._by_id.setdefault(entry.id, []).append(entry)

    def _settle_twins(self, entry: Entry) -> None:
        twins = self._twins(entry)
        if not twins:  # one on another vector has its id, or one that is gone
            entry.without_effect = (
                self.beneath is not Beneath.NOTHING and entry.logged.known_ids is KnownIds.ALL
            )
            return
        effective = [one for one in twins if not one.without_effect]
        entry.without_effect = all(one.key < entry.key for one in effective)
        if not entry.without_effect:  # it sorts before them, so they are folded again too
            for one in effective:
                one.without_effect = True

    # --- marks

    def last_mark(self) -> tuple[int, Checkpoint]:
        """The state to fold on from: how many deltas are in it, and the state."""
        return self._marks[-1] if self._marks else (0, self.checkpoint)

    def places_to_mark(self) -> list[int]:
        """Where to put marks while it is folded from its last one on; the first one last."""
        begin, end = self.last_mark()[0], len(self.entries)
        places, step = [], MARK_ENTRIES
        while end - step > begin:
            places.append(end - step)
            step *= 2
        changed = end if self.first_changed is None else self.first_changed
        if changed >= begin + MARK_ENTRIES and changed not in places:
            places.append(changed)
            places.sort(reverse=True)
        return places

    def mark(self, count: int, state: Checkpoint) -> None:
        """Keep the state behind so many deltas; of others only so many that who folds again from one folds
        at most twice as many deltas as there are behind the one that changed.
        """
        marks, end = self._marks, len(self.entries)
        marks.append((count, state))
        self.mark_at = count + MARK_ENTRIES
        self.size += state.size
        at = 0
        while at < len(marks) - 1:
            before, behind = marks[at - 1][0] if at else 0, marks[at + 1][0]
            if behind - before <= end - behind:
                self.size -= marks.pop(at)[1].size
            else:
                at += 1

    def shorten(self) -> list[Entry]:
        """Move the checkpoint up to the first mark; return the deltas that are gone, none without a mark."""
        if not self._marks:
            return []
        count, state = self._marks.pop(0)
        gone, self.entries = self.entries[:count], self.entries[count:]
        self._marks = [(place - count, mark) for place, mark in self._marks]
        self.mark_at -= count
        self.size -= self.checkpoint.size + ENTRY_BYTES * count
        self.checkpoint, self.beneath, self._by_id = state, Beneath.DELTAS, None
        return gone


class Batches:
    """What is held of a log: batches, by some of their deltas; each counts once, in `size`."""

    def __init__(self) -> None:
        self.size = 0
        self._uses: dict[int, int] = {}

    def hold(self, batch: Batch, deltas: int = 1) -> None:
        """Hold a batch, by so many deltas more."""
        uses = self._uses.get(id(batch), 0)
        self._uses[id(batch)] = uses + deltas
        if not uses:
            self.size += batch.size

    def drop(self, entries: Iterable[Entry]) -> None:
        """Hold the batches of deltas by these no more."""
        uses = self._uses
        for entry in entries:
            batch = entry.logged.batch
            left = uses[id(batch)] - 1
            if left:
                uses[id(batch)] = left
            else:
                del uses[id(batch)]
                self.size -= batch.size

    def clear(self) -> None:
        """Hold nothing."""
        self._uses.clear()
        self.size = 0


class Chains:
    """All chains, bounded in the time since a vector's last delta, and in bytes together."""

    def __init__(self, *, age_s_max: float = 60.0, bytes_max: int = 64 << 20) -> None:
        self.age_s_max = age_s_max
        self.bytes_max = bytes_max
        self.active = False
        self._bytes = 0
        self._batches = Batches()
        self._chains: OrderedDict[Ref, Chain] = OrderedDict()  # least recently changed first

    def __len__(self) -> int:
        return len(self._chains)

    @property
    def size(self) -> int:
        """About how many bytes all take, their batches among them."""
        return self._bytes + self._batches.size

    def get(self, ref: Ref) -> Chain | None:
        """The chain of a vector, if one is kept."""
        return self._chains.get(ref)

    def note(self, ref: Ref, entry: Entry, checkpoint: Checkpoint | None, now: float) -> Chain:
        """Add the vector's next delta, whose batch `hold` is told of; `checkpoint` is its state before, where
        no chain is kept yet.
        """
        chain = self._chains.get(ref)
        if chain is None:
            assert checkpoint is not None
            chain = self._chains[ref] = Chain(checkpoint)
            self._bytes += chain.size
        else:
            self._chains.move_to_end(ref)
        chain.append(entry)
        chain.changed_at = now
        self._bytes += ENTRY_BYTES
        return chain

    def hold(self, batch: Batch, deltas: int = 1) -> None:
        """Count a batch of which so many deltas were noted."""
        self._batches.hold(batch, deltas)

    def start(self, ref: Ref, chain: Chain, now: float) -> Chain:
        """Begin a vector's chain anew."""
        self.forget(ref)
        self._chains[ref] = chain
        self._bytes += chain.size
        for entry in chain.entries:
            self._batches.hold(entry.logged.batch)
        chain.changed_at = now
        return chain

    def insert(self, ref: Ref, chain: Chain, entry: Entry, now: float) -> bool:
        """Put a delta in its place in a chain; False where the chain has it already."""
        before = chain.size
        if not chain.insert(entry):
            return False
        self._bytes += chain.size - before
        self._batches.hold(entry.logged.batch)
        chain.changed_at = now
        self._chains.move_to_end(ref)
        return True

    def mark(self, chain: Chain, count: int, state: Checkpoint) -> None:
        """Keep a state between a chain's deltas."""
        before = chain.size
        chain.mark(count, state)
        self._bytes += chain.size - before

    def forget(self, ref: Ref) -> None:
        """Move a vector's checkpoint to the present."""
        chain = self._chains.pop(ref, None)
        if chain is not None:
            self._bytes -= chain.size
            self._batches.drop(chain.entries)

    def expire(self, now: float) -> None:
        """Forget what is too old, and of the least recently changed what is too much."""
        while self._chains:
            ref, chain = next(iter(self._chains.items()))
            if chain.changed_at >= now - self.age_s_max:
                if self.size <= self.bytes_max:
                    return
                before = chain.size
                if gone := chain.shorten():
                    self._bytes -= before - chain.size
                    self._batches.drop(gone)
                    continue
            self.forget(ref)

    def clear(self) -> None:
        """Forget all chains."""
        self._chains.clear()
        self._batches.clear()
        self._bytes = 0


def _entry_key(entry: Entry) -> Key:
    return entry.key


def _entry_offset(entry: Entry) -> int:
    return entry.offset
