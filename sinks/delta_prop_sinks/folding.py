"""The public fold: how a sink that stores states handles forwarded rows that sort before rows it has applied.

`apply` collects the vectors to fold again, in a dict `refolds` from (namespace, vector id) to the offset up
to which the vector is folded. For each row: if its vector is in `refolds` already, or
`must_fold_again(logged, row, state.key)` is true, set `refolds[namespace, vector_id] = logged.offset + row`;
else apply the row, unless the state's key is the row's or a later one. After the last row: `states |= await
fold_again(context, refolds)`; then write the states.
"""

from __future__ import annotations

from collections.abc import Mapping

from delta_prop_sinks.pace import Pace
from delta_prop_sinks.sink import SinkContext, StopSink
from delta_prop_sinks.vector_history import VectorHistory, read_histories
from delta_prop_wire.algebra import Key, VectorState, apply, with_ignored
from delta_prop_wire.batch import LoggedBatch
from delta_prop_wire.delta import KnownIds, Source

_BYTES_MAX = 64 << 20


def must_fold_again(logged: LoggedBatch, row: int, key: Key | None) -> bool:
    """True if a row cannot be applied to its vector's state. `key`: the state's, None if it has no delta.

    Such a row was forwarded, and sorts before the state's last delta, or may have the id of an earlier one.
    If it is only a duplicate, refolding its vector changes nothing.
    """
    if logged.source is not Source.REPLICA or key is None:
        return False
    return logged.known_ids is not KnownIds.NONE or logged.key(row) < key


async def fold_again(
    context: SinkContext, vectors: Mapping[tuple[str, str], int]
) -> dict[tuple[str, str], VectorState]:
    """Return the states of vectors (namespace, id), each folded from its deltas up to an offset, inclusive.

    One pass reads the log for all of them, so call this once per call of `apply`. Raises StopSink if the log
    no longer holds enough, TryAgain if it drops rows that are being read.
    """
    states: dict[tuple[str, str], VectorState] = {}
    pace, log_is_complete = Pace(context.clock), not vectors or context.log_start == 0
    while remaining := {ref: offset for ref, offset in vectors.items() if ref not in states}:
        for ref, history in (await read_histories(context, remaining, bytes_max=_BYTES_MAX)).items():
            states[ref] = await _fold_vector(ref, history, pace, log_is_complete=log_is_complete)
    return states


async def _fold_vector(
    ref: tuple[str, str], history: VectorHistory, pace: Pace, *, log_is_complete: bool
) -> VectorState:
    chain = history.chain((), log_is_complete=log_is_complete)
    if chain is None:
        raise StopSink(
            f"needs snapshot: vector {ref[1]!r} must be refolded, and the log lacks part of its history: "
            "rebuild the sink from a snapshot"
        )
    state = chain.base.state
    for entry in chain.entries:
        if entry.is_duplicate:
            state = with_ignored(state, 1, entry.key)
        else:
            state = apply(state, entry.operation, entry.logged.batch.metadata(entry.row), entry.key)
        if pace.is_due:
            await pace.rest()
    return state
