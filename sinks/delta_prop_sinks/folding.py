"""The public fold: what a sink that keeps states does with forwarded rows that it cannot apply on top.

In `apply`, for each row: where its vector is in `again` already, or `must_fold_again(logged, row, state.key)`
is true, set `again[namespace, vector_id] = logged.offset + row`; else apply it, unless the state has its key.
Behind the last row: `states |= await fold_again(context, again)`; then write, and return, as always.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from delta_prop_sinks.pace import Pace
from delta_prop_sinks.past import Past, read_pasts
from delta_prop_sinks.sink import StopSink
from delta_prop_wire.algebra import apply, ignoring
from delta_prop_wire.delta import KnownIds, Source

if TYPE_CHECKING:
    from collections.abc import Mapping

    from delta_prop_sinks.sink import SinkContext
    from delta_prop_wire.algebra import Key, State
    from delta_prop_wire.batch import LoggedBatch

_BYTES_MAX = 64 << 20


def must_fold_again(logged: LoggedBatch, row: int, key: Key | None) -> bool:
    """Whether a row cannot be applied to its vector's state, whose last delta has this key (None: no delta).

    It was forwarded, and sorts before that delta, or may have the id of one that came before. Where it only
    came again, folding its vector again changes nothing.
    """
    if logged.source is not Source.REPLICA or key is None:
        return False
    return logged.known_ids is not KnownIds.NONE or logged.key(row) < key


async def fold_again(
    context: SinkContext, vectors: Mapping[tuple[str, str], int]
) -> dict[tuple[str, str], State]:
    """The states of vectors (namespace, id), each of all its deltas up to an offset, that one's among them.

    The log is read once for all of them, so call it once for all that a call of `apply` brings. Raises
    StopSink where the log no longer tells enough, TryAgain where it lets go of what is being read.
    """
    states: dict[tuple[str, str], State] = {}
    pace, whole = Pace(context.clock), not vectors or context.log_start == 0
    while left := {ref: offset for ref, offset in vectors.items() if ref not in states}:
        for ref, past in (await read_pasts(context, left, bytes_max=_BYTES_MAX)).items():
            states[ref] = await _folded(ref, past, pace, whole=whole)
    return states


async def _folded(ref: tuple[str, str], past: Past, pace: Pace, *, whole: bool) -> State:
    chain = past.chain((), whole=whole)
    if chain is None:
        raise StopSink(
            f"needs snapshot: vector {ref[1]!r} is to be folded again, and the log does not tell all of it: "
            "rebuild the sink from a snapshot"
        )
    state = chain.checkpoint.state
    for entry in chain.entries:
        if entry.without_effect:
            state = ignoring(state, 1, entry.key)
        else:
            state = apply(state, entry.operation, entry.logged.batch.metadata(entry.row), entry.key)
        if pace.is_due:
            await pace.rest()
    return state
