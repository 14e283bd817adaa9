"""What a log still tells of one vector: its deltas, behind a state where the log's past begins with one.

And how they are folded again into a slot of a table.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

from delta_prop_sinks.chain import ENTRY_BYTES, Batches, Beneath, Chain, Checkpoint, Entry
from delta_prop_sinks.table import ABSENT, ODD, OPAQUE, VECTOR, Misfit, vector_of
from delta_prop_wire.batch import SPARSE_KINDS
from delta_prop_wire.delta import Kind, KnownIds, Source
from delta_prop_wire.states import state_of
from delta_prop_wire.twins import Identified, without_effect

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from delta_prop_sinks.chain import Chains, Ref
    from delta_prop_sinks.sink import SinkContext
    from delta_prop_sinks.table import Table
    from delta_prop_wire.algebra import Key, State
    from delta_prop_wire.batch import LoggedBatch

_RESETS = frozenset({Kind.CREATE, Kind.DELETE})
_RUN_MIN = 4
"""From so many sparse deltas in a row on, a few calls over arrays are faster than a call a delta."""


class Past:
    """What the log tells of one vector up to an offset, taken row by row in its order; then, as a chain.

    `offset`: of the last delta that it tells, which may lie behind the one that was asked for, where the
    log's past begins with a later state.
    """

    def __init__(self, end: int) -> None:
        self.offset = self._end = end
        self.twins: set[Key] = set()
        """Once the chain is made: the keys of deltas that have no effect, as one before them has their id."""
        self.beneath = 0
        """Likewise: how many of the rows in hand sort before the state with which the log's past begins, so
        that what they would have changed is not there any more.
        """
        self._state, self._state_offset = Checkpoint(), -1
        self._known: dict[Key, Entry] = {}
        self._may_have_twins = False

    def __len__(self) -> int:
        return len(self._known)

    @property
    def entries(self) -> Iterable[Entry]:
        """The deltas that were taken."""
        return self._known.values()

    def take(self, logged: LoggedBatch, row: int) -> bool:
        """Take what the log tells next; whether that is a delta more."""
        if logged.batch.is_state:
            self._state, self._state_offset = (
                _checkpoint_of(state_of(logged.batch, row)),
                logged.row_offset(row),
            )
        elif logged.offset + row <= self._end and (key := logged.key(row)) not in self._known:
            self._known[key] = Entry(key, logged, row)
            self._may_have_twins |= logged.known_ids is not KnownIds.NONE
            return True
        return False

    def chain(self, rows: Sequence[Entry], *, whole: bool) -> Chain | None:
        """All of it, to be folded; None where the log does not tell all that it begins with.

        `rows`: those in hand, which are in it, whatever the log tells of them. Deltas beneath a state have no
        effect and count as ignored, as they do where a log is compacted. `whole`: the log still tells of all
        deltas, one by one or by a state.
        """
        known, state, base = self._known, self._state, self._state.key
        from_state = self._state_offset >= 0
        self.offset = max(self._end, self._state_offset)
        fresh = [row for row in rows if row.offset > self._state_offset]
        known |= {row.key: row for row in fresh}
        entries = [known[key] for key in sorted(known)]
        if from_state:
            above = bisect_right(entries, base, key=_entry_key)
            state.ignored += above - (base in known)
            entries = entries[above:]
            self.beneath = sum(row.key < base for row in fresh)
        chain = _chain_of(entries, state, from_state=from_state, whole=whole)
        if self._may_have_twins or any(row.may_be_twin for row in fresh):
            identified = (Identified.of(entry.logged, entry.row) for entry in entries)
            self.twins = without_effect(identified, whole=whole and not from_state)
            for entry in () if chain is None else chain.entries:
                entry.without_effect = entry.key in self.twins
        return chain


async def read_pasts(context: SinkContext, ends: Mapping[Ref, int], *, bytes_max: int) -> dict[Ref, Past]:
    """What the log tells of some vectors, each up to an offset; where that is more than so many bytes, of
    those with the shortest past, but of one at least.
    """
    told, batches, count = {ref: Past(end) for ref, end in ends.items()}, Batches(), 0
    async for logged, row in context.history(ends.keys()):
        past = told.get((logged.batch.namespaces[row], logged.batch.keys[row]))
        if past is None or not past.take(logged, row):
            continue
        count += 1
        batches.hold(logged.batch)
        if batches.size + count * ENTRY_BYTES > bytes_max and len(told) > 1:
            for ref in sorted(told, key=lambda ref: len(told[ref]))[len(told) // 2 :]:
                past = told.pop(ref)
                batches.drop(past.entries)
                count -= len(past)
    return told


def _chain_of(entries: list[Entry], state: Checkpoint, *, from_state: bool, whole: bool) -> Chain | None:
    """A vector's deltas from its first, a state, or a reset that nothing lost can follow; None without one.

    A reset by this service's own writers has a larger Lamport number than all that the log held
    before it; so what the log has dropped since sorts before that reset.
    """
    beneath = Beneath.STATE if from_state else Beneath.NOTHING
    if not (from_state or whole):
        resets = [at for at, entry in enumerate(entries) if _is_own_reset(entry)]
        if not resets:
            return None
        entries, beneath = entries[resets[-1] :], Beneath.DELTAS
    chain = Chain(state, beneath, entries)
    chain.first_changed = 0
    return chain


def _is_own_reset(entry: Entry) -> bool:
    """Whether this service's own writers made the vector anew here."""
    return entry.logged.source != Source.REPLICA and entry.logged.batch.kinds[entry.row] in _RESETS


def _entry_key(entry: Entry) -> Key:
    return entry.key


def _checkpoint_of(state: State) -> Checkpoint:
    assert state.key is not None, "the state of a vector names its last delta"
    form = OPAQUE if state.data is not None else ABSENT if state.vector is None else VECTOR
    return Checkpoint(state.key, form, state.vector, state.data, dict(state.metadata) or None, state.ignored)


def checkpoint_at(table: Table, slot: int) -> Checkpoint:
    """What a slot holds, as something to fold on from."""
    form = int(table.forms[slot])
    return Checkpoint(
        table.head(slot)[:3],
        form,
        vector_of(table, slot) if form in (VECTOR, ODD) else None,
        table.data.get(slot) if form == OPAQUE else None,
        table.metadata.get(slot),
        table.ignored.get(slot, 0),
    )


def fold_entries(table: Table, slot: int, entries: Iterable[Entry]) -> None:
    """Fold deltas in their order; those without effect are counted.

    One of an unknown kind is passed over: it was set aside when it came.
    """
    for kind, run in groupby(entries, key=_run_kind):
        some = list(run)
        if kind is not None and len(some) >= _RUN_MIN and _fold_sparse(table, slot, kind, some):
            continue
        for entry in some:
            try:
                if entry.without_effect:
                    table.ignore(slot)
                else:
                    table.fold_operation(slot, entry.operation, entry.logged.batch, entry.row)
            except Misfit:
                continue


def _run_kind(entry: Entry) -> int | None:
    kind = entry.operation.kind
    if kind not in SPARSE_KINDS or entry.without_effect or entry.logged.batch.has_metadata:
        return None
    return kind


def _fold_sparse(table: Table, slot: int, kind: int, entries: Sequence[Entry]) -> bool:
    """Fold sparse deltas of one kind; False, and nothing changed, where they need a closer look."""
    operations = [entry.operation for entry in entries]
    indices = np.concatenate([one.indices for one in operations])
    values = np.concatenate([one.values for one in operations])
    return table.fold_sparse(slot, kind, indices, values)


def checkpoints_of(table: Table, slots: NDArray[np.intp], chains: Chains) -> dict[Ref, Checkpoint]:
    """States before a block, of vectors that have no chain yet."""
    refs = ((slot, (table.namespace, str(table.ids[slot]))) for slot in set(slots.tolist()))
    return {ref: checkpoint_at(table, slot) for slot, ref in refs if chains.get(ref) is None}


def note_block(
    chains: Chains,
    logged: LoggedBatch,
    rows: NDArray[np.intp] | None,
    table: Table,
    slots: NDArray[np.intp],
    *,
    before: dict[Ref, Checkpoint],
    now: float,
) -> None:
    """Put the rows of a block, which are folded, into their vectors' chains; `before`: states before it, of
    those that have no chain yet.
    """
    at = range(logged.count) if rows is None else rows.tolist()
    namespace, ids, note = table.namespace, table.ids, chains.note
    chains.hold(logged.batch, len(slots))
    for row, slot in zip(at, slots.tolist(), strict=True):
        ref, key = (namespace, str(ids[slot])), logged.key(row)
        chain = note(ref, Entry(key, logged, row), before.get(ref), now)
        if len(chain.entries) >= chain.mark_at and key == table.head(slot)[:3]:
            chains.mark(chain, len(chain.entries), checkpoint_at(table, slot))
