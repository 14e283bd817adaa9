"""A batch that mixes known and new ids, in pieces: its new rows to be logged, control rows for the others.

The pieces lie one behind the other in counter order, so row i of the batch stands i offsets behind row 0 in
any case. A control row of it names the checksum of the whole frame: by that a repeat is known again. Pure.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from delta_prop.refusals import too_many_pieces
from delta_prop_wire.cutting import part_of
from delta_prop_wire.encode import encode_void
from delta_prop_wire.errors import InvalidDelta, Refused
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from collections.abc import Mapping

    from delta_prop_wire.batch import Batch

PIECES_MAX = 1_000
"""Stretches of known and of new rows that a batch may consist of."""


class Piece(NamedTuple):
    """Rows of a batch that go together. `firsts`: of known ones, the offsets of the first copies."""

    batch: Batch
    firsts: dict[int, int | None] | None


def new_rows(batch: Batch, repeats: Mapping[int, int | None]) -> tuple[Batch, list[int]]:
    """Return the rows of a batch that repeat nothing, as one batch to be checked, and their numbers."""
    rows = [row for row in range(batch.count) if row not in repeats]
    return part_of(batch, np.array(rows, np.intp), previous=_before(batch, 0), clock=batch.clock), rows


def split(batch: Batch, repeats: Mapping[int, int | None], place: int) -> list[Piece]:
    """Split a batch whose row 0 gets the offset `place`. Raises Refused if there are too many pieces.

    `repeats`: the known rows with their first copies, as `IdRepeats` tells them.
    """
    stretches = [(known, list(rows)) for known, rows in groupby(range(batch.count), repeats.__contains__)]
    if len(stretches) > PIECES_MAX:
        raise too_many_pieces(len(stretches), PIECES_MAX)
    pieces: list[Piece] = []
    for known, rows in stretches:
        previous, clock = _before(batch, rows[0]), () if pieces else batch.clock
        if not known:
            new = part_of(batch, np.array(rows, np.intp), previous=previous, clock=clock)
            pieces.append(Piece(new, None))
            continue
        copies = [repeats[row] for row in rows]
        firsts = [at if at is None or at >= 0 else place - 1 - at for at in copies]
        counters = [batch.counter(row) for row in rows]
        leaps = counters[0] != previous + 1 or counters[-1] - counters[0] != len(rows) - 1
        void = encode_void(
            origin=batch.origin,
            base=counters[0],
            count=len(rows),
            code=ErrorCode.INVALID_DELTA,
            epoch=batch.epoch,
            clock=clock,
            previous=previous if leaps else 0,
            counters=counters if leaps else None,
            priority=batch.priority,
            hybrid_time=batch.hybrid_time,
            refused_crc=batch.crc,
            firsts=firsts,
        )
        pieces.append(Piece(void, dict(enumerate(firsts))))
    return pieces


def of_row(refusal: Refused, rows: list[int]) -> Refused:
    """Return a refusal of some rows of a call with the row numbered as in the call."""
    if refusal.row is None or rows[refusal.row] == refusal.row:
        return refusal
    row = rows[refusal.row]
    if isinstance(refusal, InvalidDelta):
        return InvalidDelta(refusal.field or "", refusal.reason, row=row)
    return Refused(
        refusal.code,
        f"row {row}: {refusal.message.removeprefix(f'row {refusal.row}: ')}",
        retry_after_ms=refusal.retry_after_ms,
        row=row,
        field=refusal.field,
        details=refusal.details,
    )


def _before(batch: Batch, row: int) -> int:
    """Return the origin's last counter before a row."""
    if row:
        return batch.counter(row - 1)
    return batch.previous if batch.leaps else batch.base - 1
