"""Splits a batch that mixes known and new ids: its new rows are logged, control rows replace the others.

The pieces follow one another in counter order, so row i of the batch is always i offsets after row 0. A
control row records the checksum of the full frame, by which a duplicate is recognized. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import NamedTuple

import numpy as np

from delta_prop.calls.refusals import too_many_pieces
from delta_prop_wire.batch import Batch
from delta_prop_wire.encode import encode_noop
from delta_prop_wire.errors import InvalidDelta, Refused
from delta_prop_wire.slicing import select_rows
from delta_prop_wire.spec import ErrorCode

PIECES_MAX = 1_000
"""Maximum alternating runs of known and new rows in a batch."""


class BatchPiece(NamedTuple):
    """Consecutive rows of a batch. `first_offsets`: of the first copies, if the rows are known."""

    batch: Batch
    first_offsets: dict[int, int | None] | None


def slice_new_rows(batch: Batch, duplicates: Mapping[int, int | None]) -> tuple[Batch, list[int]]:
    """Return the rows of a batch that are not duplicates, as one batch to be checked, and their numbers."""
    rows = [row for row in range(batch.count) if row not in duplicates]
    return select_rows(
        batch, np.array(rows, np.intp), previous=_previous_counter(batch, 0), clock=batch.clock
    ), rows


def split_batch(batch: Batch, duplicates: Mapping[int, int | None], offset: int) -> list[BatchPiece]:
    """Split a batch whose row 0 gets `offset`. Raises Refused if there are too many pieces.

    `duplicates`: the known rows with their first copies, as `DuplicateIdFinder` returns them.
    """
    ranges = [(known, list(rows)) for known, rows in groupby(range(batch.count), duplicates.__contains__)]
    if len(ranges) > PIECES_MAX:
        raise too_many_pieces(len(ranges), PIECES_MAX)
    pieces: list[BatchPiece] = []
    for known, rows in ranges:
        previous, clock = _previous_counter(batch, rows[0]), () if pieces else batch.clock
        if not known:
            new = select_rows(batch, np.array(rows, np.intp), previous=previous, clock=clock)
            pieces.append(BatchPiece(new, None))
            continue
        copies = [duplicates[row] for row in rows]
        first_offsets = [copy if copy is None or copy >= 0 else offset - 1 - copy for copy in copies]
        counters = [batch.counter(row) for row in rows]
        has_gaps = counters[0] != previous + 1 or counters[-1] - counters[0] != len(rows) - 1
        noop = encode_noop(
            origin=batch.origin,
            base=counters[0],
            count=len(rows),
            code=ErrorCode.INVALID_DELTA,
            epoch=batch.epoch,
            clock=clock,
            previous=previous if has_gaps else 0,
            counters=counters if has_gaps else None,
            priority=batch.priority,
            hybrid_time=batch.hybrid_time,
            refused_crc=batch.crc,
            first_offsets=first_offsets,
        )
        pieces.append(BatchPiece(noop, dict(enumerate(first_offsets))))
    return pieces


def with_row(refusal: Refused, rows: list[int]) -> Refused:
    """Return the refusal with its row numbered as in the call; `rows`: the call's checked rows."""
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


def _previous_counter(batch: Batch, row: int) -> int:
    """Return the origin's last counter before a row."""
    if row:
        return batch.counter(row - 1)
    return batch.previous if batch.has_gaps else batch.base - 1
