"""What a log still tells of one vector: its deltas, behind a state where the log's past begins with one.

And how they are folded again into a slot of a table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from delta_prop_sinks.chain import Checkpoint, Entry
from delta_prop_sinks.table import ABSENT, ODD, OPAQUE, VECTOR, Misfit, restore, vector_of
from delta_prop_wire.delta import Kind, KnownIds, Source
from delta_prop_wire.states import state_of
from delta_prop_wire.twins import Identified, without_effect

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy as np
    from numpy.typing import NDArray

    from delta_prop_sinks.chain import Chain, Chains, Ref
    from delta_prop_sinks.table import Table
    from delta_prop_wire.algebra import State
    from delta_prop_wire.batch import LoggedBatch

_RESETS = frozenset({Kind.CREATE, Kind.DELETE})


@dataclass(slots=True)
class Past:
    """A vector's deltas in canonical order, and the state that they are folded onto.

    `beyond`: that state is of a later offset than the delta in hand, the one named here. `beneath`: whether
    that delta sorts before the state's last one, so that what it would have changed is not there any more.
    """

    entries: list[Entry]
    checkpoint: Checkpoint
    from_state: bool = False
    beyond: int | None = None
    beneath: bool = False


def past_of(history: Iterable[tuple[LoggedBatch, int]], late: Entry, offset: int, *, whole: bool) -> Past:
    """A vector's history up to `offset`, where the delta in hand stands, that one among it.

    Deltas beneath a state have no effect and count as ignored, as they do where a log is compacted.
    `whole`: the log still tells of all deltas, one by one or by a state.
    """
    past = Past([], Checkpoint())
    known, repeats = {late.key: late}, late.logged.known_ids is not KnownIds.NONE
    for logged, row in history:
        if logged.batch.is_state:
            past.checkpoint, past.from_state = _checkpoint_of(state_of(logged.batch, row)), True
            if logged.row_offset(row) >= offset:
                past.beyond = logged.row_offset(row)
                return past
        elif logged.offset + row <= offset:
            known.setdefault(logged.key(row), Entry(logged.key(row), logged, row))
            repeats |= logged.known_ids is not KnownIds.NONE
    base = past.checkpoint.key
    past.entries = [known[key] for key in sorted(known) if key > base]
    if repeats:
        rows = (Identified.of(entry.logged, entry.row) for entry in past.entries)
        none = without_effect(rows, whole=whole and not past.from_state)
        for entry in past.entries:
            entry.without_effect = entry.key in none
    if past.from_state:
        past.beneath = late.key < base
        past.checkpoint.ignored += sum(key < base for key in known)
    return past


def is_own_reset(entry: Entry) -> bool:
    """Whether this service's own writers made the vector anew here."""
    return entry.logged.source != Source.REPLICA and entry.logged.batch.kinds[entry.row] in _RESETS


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


def fold_entry(table: Table, slot: int, entry: Entry) -> None:
    """Fold one delta, or count it where it has no effect. Raises Misfit, with nothing changed."""
    if entry.without_effect:
        table.ignore(slot)
    else:
        table.fold_row(entry.logged.batch, entry.row, slot)


def replay(table: Table, slot: int, chain: Chain, new: Entry) -> Misfit | None:
    """Fold a chain from its checkpoint; return why the new delta cannot be folded, if so."""
    restore(table, slot, chain.checkpoint)
    misfit = None
    for entry in chain.entries:
        try:
            fold_entry(table, slot, entry)
        except Misfit as error:  # an old one was set aside when it came
            if entry.key == new.key:
                misfit = error
    return misfit


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
    """Put the rows of a block into their vectors' chains; states `before` it, of those that have none yet."""
    at = range(logged.count) if rows is None else rows.tolist()
    for row, slot in zip(at, slots.tolist(), strict=True):
        ref = (table.namespace, str(table.ids[slot]))
        if chains.get(ref) is None and ref not in before:
            continue  # its chain grew too long within this block: the next one begins behind it
        chains.note(ref, Entry(logged.key(row), logged, row), before.pop(ref, None), now)
