"""The history of one vector in a log: its deltas, after a state if the log starts with one.

The module also folds deltas into a slot of a table.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from operator import attrgetter

import numpy as np

from delta_prop_sinks.delta_chain import (
    ENTRY_BYTES,
    BatchReferences,
    BelowBase,
    ChainBase,
    DeltaChain,
    Entry,
    Ref,
)
from delta_prop_sinks.sink import SinkContext
from delta_prop_sinks.vector_table import (
    ABSENT,
    OPAQUE,
    OTHER_DIMENSION,
    VECTOR,
    Misfit,
    VectorTable,
    vector_of,
)
from delta_prop_wire.algebra import Key, VectorState
from delta_prop_wire.batch import SPARSE_KINDS, LoggedBatch
from delta_prop_wire.delta import Kind, KnownIds, Source
from delta_prop_wire.duplicate_ids import IdentifiedDelta, find_duplicates
from delta_prop_wire.state_rows import state_of

_RESET_KINDS = frozenset({Kind.CREATE, Kind.DELETE})
_RUN_MIN = 4
"""From this many consecutive sparse deltas on, a few calls over arrays are faster than one call per delta."""


class VectorHistory:
    """The log's rows of one vector up to an offset: collected in log order, then converted to a chain.

    `offset`: that of the last delta, which may be above the requested end if the log starts with a later
    state.
    """

    def __init__(self, end: int) -> None:
        self.offset = self._end = end
        self.duplicates: set[Key] = set()
        """After `chain`: the keys of deltas without effect, because an earlier delta has the same id."""
        self.below_snapshot = 0
        """After `chain`: the number of its `rows` that sort before the state with which the log starts; they
        can no longer take effect.
        """
        self._state, self._state_offset = ChainBase(), -1
        self._entries: dict[Key, Entry] = {}
        self._can_have_duplicates = False

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def entries(self) -> Iterable[Entry]:
        """The collected deltas."""
        return self._entries.values()

    def add(self, logged: LoggedBatch, row: int) -> bool:
        """Collect the log's next row; True if it is a delta not collected before."""
        if logged.batch.is_state:
            self._state, self._state_offset = (_base_of(state_of(logged.batch, row)), logged.row_offset(row))
        elif logged.offset + row <= self._end and (key := logged.key(row)) not in self._entries:
            self._entries[key] = Entry(key, logged, row)
            self._can_have_duplicates |= logged.known_ids is not KnownIds.NONE
            return True
        return False

    def chain(self, rows: Sequence[Entry], *, log_is_complete: bool) -> DeltaChain | None:
        """Return the chain to fold, or None if the log lacks its beginning.

        `rows`: rows of this call, which belong to the history even if the log lacks them. Deltas that sort
        before a state have no effect and count as ignored, as in a compacted log. `log_is_complete`: the
        log still covers all deltas, one by one or by a state.
        """
        entries_by_key, state, state_key = self._entries, self._state, self._state.key
        has_state = self._state_offset >= 0
        self.offset = max(self._end, self._state_offset)
        new_rows = [row for row in rows if row.offset > self._state_offset]
        entries_by_key |= {row.key: row for row in new_rows}
        entries = [entries_by_key[key] for key in sorted(entries_by_key)]
        if has_state:
            first_after = bisect_right(entries, state_key, key=attrgetter("key"))
            state.ignored += first_after - (state_key in entries_by_key)
            entries = entries[first_after:]
            self.below_snapshot = sum(row.key < state_key for row in new_rows)
        chain = _chain_of(entries, state, has_state=has_state, log_is_complete=log_is_complete)
        if self._can_have_duplicates or any(row.can_be_duplicate for row in new_rows):
            identified = (IdentifiedDelta.of(entry.logged, entry.row) for entry in entries)
            self.duplicates = find_duplicates(identified, complete=log_is_complete and not has_state)
            for entry in () if chain is None else chain.entries:
                entry.is_duplicate = entry.key in self.duplicates
        return chain


async def read_histories(
    context: SinkContext, ends: Mapping[Ref, int], *, bytes_max: int
) -> dict[Ref, VectorHistory]:
    """Return histories of vectors, up to an offset each; above `bytes_max` only the shortest ones."""
    histories, batches, count = {ref: VectorHistory(end) for ref, end in ends.items()}, BatchReferences(), 0
    async for logged, row in context.history(ends.keys()):
        history = histories.get((logged.batch.namespaces[row], logged.batch.keys[row]))
        if history is None or not history.add(logged, row):
            continue
        count += 1
        batches.hold(logged.batch)
        if batches.size + count * ENTRY_BYTES > bytes_max and len(histories) > 1:
            for ref in sorted(histories, key=lambda ref: len(histories[ref]))[len(histories) // 2 :]:
                history = histories.pop(ref)
                batches.drop(history.entries)
                count -= len(history)
    return histories


def _chain_of(
    entries: list[Entry], state: ChainBase, *, has_state: bool, log_is_complete: bool
) -> DeltaChain | None:
    """Return a chain that starts at the first delta, at a state, or at a reset that no lost delta can follow;
    None if there is no such start.

    A reset by this service's own writers has a higher Lamport number than all deltas that the log held before
    it; so deltas that the log has dropped since sort before that reset.
    """
    below_base = BelowBase.STATE if has_state else BelowBase.NOTHING
    if not (has_state or log_is_complete):
        resets = [index for index, entry in enumerate(entries) if _is_own_reset(entry)]
        if not resets:
            return None
        entries, below_base = entries[resets[-1] :], BelowBase.DELTAS
    chain = DeltaChain(state, below_base, entries)
    chain.first_changed = 0
    return chain


def _is_own_reset(entry: Entry) -> bool:
    """True if this service's own writers recreated or deleted the vector here."""
    return entry.logged.source != Source.REPLICA and entry.logged.batch.kinds[entry.row] in _RESET_KINDS


def _base_of(state: VectorState) -> ChainBase:
    assert state.key is not None, "the state has no key of a last delta"
    form = OPAQUE if state.data is not None else ABSENT if state.vector is None else VECTOR
    return ChainBase(state.key, form, state.vector, state.data, dict(state.metadata) or None, state.ignored)


def base_at(table: VectorTable, slot: int) -> ChainBase:
    """Return a slot's content as a base to fold from."""
    form = int(table.forms[slot])
    return ChainBase(
        table.head(slot)[:3],
        form,
        vector_of(table, slot) if form in (VECTOR, OTHER_DIMENSION) else None,
        table.data.get(slot) if form == OPAQUE else None,
        table.metadata.get(slot),
        table.ignored.get(slot, 0),
    )


def fold_entries(table: VectorTable, slot: int, entries: Iterable[Entry]) -> None:
    """Fold deltas in order; count those without effect, skip unknown kinds, which were quarantined."""
    for kind, run in groupby(entries, key=_run_kind):
        run_entries = list(run)
        if kind is not None and len(run_entries) >= _RUN_MIN and _fold_sparse(table, slot, kind, run_entries):
            continue
        for entry in run_entries:
            try:
                if entry.is_duplicate:
                    table.count_ignored(slot)
                else:
                    table.fold_operation(slot, entry.operation, entry.logged.batch, entry.row)
            except Misfit:
                continue


def _run_kind(entry: Entry) -> int | None:
    """Return the kind of a sparse delta that can be folded with others of its kind, else None."""
    kind = entry.operation.kind
    if kind not in SPARSE_KINDS or entry.is_duplicate or entry.logged.batch.has_metadata:
        return None
    return kind


def _fold_sparse(table: VectorTable, slot: int, kind: int, entries: Sequence[Entry]) -> bool:
    """Fold sparse deltas of one kind; False, with nothing changed, if they need checks one by one."""
    operations = [entry.operation for entry in entries]
    indices = np.concatenate([operation.indices for operation in operations])
    values = np.concatenate([operation.values for operation in operations])
    return table.fold_sparse(slot, kind, indices, values)
