"""Refusal of deltas whose parent was refused permanently: they are refused as well, rather than wait for it.

Pure: it decides which deltas to refuse, and why; `pipeline.py` refuses them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from delta_prop.calls.argument_checks import check_deltas
from delta_prop.partition.ingest.work import Draft, MatrixDraft, SequencedBatch
from delta_prop_wire.bounds import is_id
from delta_prop_wire.delta import Delta, Dot, Priority, Source
from delta_prop_wire.errors import InvalidDelta, Refused
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from delta_prop.partition.ingest.refused_ids import RefusedIds
    from delta_prop.partition.ingest.seen_ids import SeenIds
    from delta_prop.partition.order.orderer import Entry, Orderer


class Orphans:
    """Finds work whose parents were refused permanently; forwarded work is not checked."""

    def __init__(self, orderer: Orderer, accepted: SeenIds, refused: RefusedIds) -> None:
        self._orderer = orderer
        self._accepted = accepted
        self._refused = refused

    def find_refusal(self, work: SequencedBatch | Draft | MatrixDraft) -> Refused | None:
        """Return the refusal of work of which a parent was refused permanently; None if none was."""
        if not len(self._refused) or work.is_forwarded:
            return None
        own_ids = work.batch.ids if isinstance(work, SequencedBatch) else work.ids
        for row, parent in _iter_parents(work):
            if not isinstance(parent, bytes) or parent in self._accepted or (own_ids and parent in own_ids):
                continue
            if (code := self._refused.code(parent)) is not None:
                return parent_refused_for_good(row, parent, code)
        return None

    def note_refused(
        self, ids: Iterable[object], refusal: Refused, source: Source = Source.LOCAL
    ) -> list[tuple[Entry, Refused]]:
        """Note the ids of refused deltas; return the entries that wait for them, each with its refusal.

        Nothing is noted if the refusal is retryable, or if its sender lacks a permission: a client that may
        not publish must not decide over others' deltas. Nor is anything noted for a transform after a
        conflict, since it is retried.
        """
        if not refusal.is_final or refusal.code is ErrorCode.UNAUTHORIZED:
            return []
        if source is Source.TRANSFORM and refusal.code is ErrorCode.CONFLICT:
            return []
        refused_ids = [
            id_ for id_ in ids if isinstance(id_, bytes) and is_id(id_) and id_ not in self._accepted
        ]
        self._refused.add(refused_ids, refusal.code)
        waiting = self._orderer.find_waiting(refused_ids)
        refusals = ((entry, self.find_refusal(entry.item)) for entry in waiting)  # type: ignore[arg-type]
        return [(entry, orphaned) for entry, orphaned in refusals if orphaned is not None]


def check_and_note(deltas: Sequence[Delta], note: Callable[[Iterable[object], Refused], None]) -> Priority:
    """Run `check_deltas`, and note the ids of deltas that it refuses. Raises as it does."""
    try:
        return check_deltas(deltas)
    except InvalidDelta as refusal:
        note([delta.id for delta in deltas], refusal)
        raise


def parent_refused_for_good(row: int, parent: bytes, code: ErrorCode) -> Refused:
    """Return the refusal of a row whose parent was refused permanently."""
    refusal = InvalidDelta(
        "parents",
        f"{parent.hex()} is the id of a delta that was refused for good ({code.name}): send that one "
        "corrected, then this one under a new dot",
        row=row,
    )
    refusal.details.update(blocked_by=parent.hex(), code=int(code))
    return refusal


def _iter_parents(work: SequencedBatch | Draft | MatrixDraft) -> Iterable[tuple[int, Dot | bytes]]:
    """Yield (row, parent) for each parent that a row names."""
    if isinstance(work, SequencedBatch):
        return work.batch.parents
    if not work.causes:
        return ()
    deltas = getattr(work, "deltas", ())
    return ((row, parent) for row, delta in enumerate(deltas) for parent in delta.parents)
