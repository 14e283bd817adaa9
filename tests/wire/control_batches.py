"""Control batches for tests, also invalid ones that no version writes."""

from __future__ import annotations

from itertools import accumulate
from struct import pack
from typing import TYPE_CHECKING

from delta_prop_wire.delta import Kind
from delta_prop_wire.encode import assemble
from delta_prop_wire.layout import Column
from delta_prop_wire.spec import Attribute

if TYPE_CHECKING:
    from delta_prop_wire.batch import Batch


def control_batch(*blobs: bytes, origin: int = 0, base: int = 1, epoch: int = 0) -> Batch:
    """Return a control batch with these blobs, one per row, valid or not."""
    ends = list(accumulate(map(len, blobs)))
    return assemble(
        {Column.BLOB_ENDS: pack(f"<{len(ends)}I", *ends), Column.BLOBS: b"".join(blobs)},
        attributes=Attribute.CONTROL,
        count=len(blobs),
        origin=origin,
        epoch=epoch,
        base=base,
        hybrid_time=0,
        kinds_mask=1 << Kind.OPAQUE,
    )


def without_types(batch: Batch) -> Batch:
    """Return the batch as format 1 of the data directory stores it: its rows have no type."""
    blobs = [batch.blob(row)[1:] for row in range(batch.count)]
    columns = {
        column: bytes(batch.column(column) or b"") for column in Column if batch.columns_mask >> column & 1
    }
    columns |= {
        Column.BLOB_ENDS: pack(f"<{len(blobs)}I", *accumulate(map(len, blobs))),
        Column.BLOBS: b"".join(blobs),
    }
    names = ("attributes", "count", "origin", "epoch", "base", "hybrid_time", "kinds_mask", "previous")
    return assemble(columns, **{name: getattr(batch, name) for name in names})
