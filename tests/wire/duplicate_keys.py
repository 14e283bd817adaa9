"""Metadata with a duplicate key, which no encoder of the project writes."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import msgpack

from delta_prop_wire.delta import Delta, create
from delta_prop_wire.encode import assemble, encode_batch
from delta_prop_wire.layout import Column
from delta_prop_wire.packing import pack

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from delta_prop_wire.batch import Batch


def packed_map(*pairs: tuple[str, bytes]) -> bytes:
    """Return a msgpack map of these keys and packed values, in this order."""
    head: bytes = msgpack.Packer().pack_map_header(len(pairs))
    return head + b"".join(pack(key) + value for key, value in pairs)


FLAT = packed_map(("a", b"\x01"), ("b", b"\x03"), ("a", b"\x02"))
DEEP = packed_map(("a", packed_map(("b", packed_map(("x", b"\x01"), ("x", b"\x02"))))))
IN_LIST = packed_map(("a", b"\x92\x00" + packed_map(("x", b"\x01"), ("x", b"\x02"))))
NULLED = packed_map(("a", b"\x01"), ("a", b"\xc0"))
"""Packed maps with a duplicate key: at the top, in an inner map, in a list's map, and with nil at last."""


def with_metadata(
    packed: Mapping[int, bytes],
    count: int = 1,
    *,
    deltas: Sequence[Delta] | None = None,
    origin: int = 1,
    base: int = 1,
    epoch: int = 1,
) -> Batch:
    """Return a batch of `deltas`, or else of `count` creates. `packed`: unchecked metadata by row number."""
    deltas = deltas or [Delta(f"v{row}", create([float(row)]), "n") for row in range(count)]
    batch = encode_batch(deltas, origin=origin, base=base, epoch=epoch)
    columns = {Column(index): batch.column(Column(index)) for index in range(len(Column))}
    parts = [packed.get(row, b"") for row in range(len(deltas))]
    ends = [sum(map(len, parts[: row + 1])) for row in range(len(parts))]
    columns |= {Column.METADATA: b"".join(parts), Column.METADATA_ENDS: struct.pack(f"<{len(ends)}I", *ends)}
    return assemble(
        {column: raw for column, raw in columns.items() if raw is not None},
        attributes=batch.attributes, count=batch.count, origin=origin, epoch=epoch, base=base,
        hybrid_time=batch.hybrid_time, kinds_mask=batch.kinds_mask, dimension=batch.dimension,
    )  # fmt: skip
