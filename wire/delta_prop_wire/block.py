"""A block: the columns of many deltas before they have dots, for callers that already hold columns.

Pure. `Block.encode` makes the same bytes from columns as `encode_batch` does from deltas.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass

from delta_prop_wire.batch import Batch
from delta_prop_wire.delta import AckLevel, Priority
from delta_prop_wire.encode import assemble
from delta_prop_wire.layout import Column
from delta_prop_wire.spec import (
    ACK_LEVEL_SHIFT,
    BATCH_ROWS_MAX,
    PRIORITY_SHIFT,
)
from delta_prop_wire.validate import validate_batch


@dataclass(frozen=True, slots=True)
class Block:
    """Columns of many deltas, and the fields of a batch's header that describe them.

    `columns`: as in a body, without clock and counters; a memoryview must have format `B`, and its memory
    must not change. `kinds_mask`: bit k is set if a row has kind k. `dimension`: the dimension of all full
    vectors; 0 if there are none or their dimensions differ. `hybrid_time`: the time of all rows without their
    own.
    """

    count: int
    columns: Mapping[Column, bytes | memoryview]
    kinds_mask: int
    dimension: int = 0
    hybrid_time: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.count <= BATCH_ROWS_MAX:
            raise ValueError(f"{self.count} rows; a block has 1 to {BATCH_ROWS_MAX}: split it")

    @property
    def size(self) -> int:
        """The approximate size in bytes."""
        return sum(map(len, self.columns.values()))

    def check(self) -> None:
        """Validate every row. Raises InvalidDelta that names the first bad row."""
        validate_batch(self.encode(origin=0, base=1))

    def content_crc(self, crc_before: int = 0) -> int:
        """Return the checksum of the rows' content from `crc_before` on, as `Batch.content_crc` does."""
        return self.encode(origin=0, base=1).content_crc(crc_before)

    def encode(
        self,
        *,
        origin: int,
        base: int,
        epoch: int = 1,
        previous: int | None = None,
        ack_level: AckLevel = AckLevel.MEMORY,
        priority: Priority = Priority.NORMAL,
    ) -> Batch:
        """Encode the rows under the dots (origin, base), (origin, base + 1) and so on.

        `previous`: the origin's counter before `base`, if counters may have gaps. Raises Refused (TOO_LARGE)
        if the batch is above the frame's bound.
        """
        columns: dict[Column, bytes | memoryview] = dict(self.columns)
        has_gap = previous is not None and base != previous + 1
        if has_gap:
            columns[Column.COUNTERS] = struct.pack(f"<{self.count}Q", *range(base, base + self.count))
        return assemble(
            columns,
            attributes=ack_level << ACK_LEVEL_SHIFT | priority << PRIORITY_SHIFT,
            count=self.count,
            origin=origin,
            epoch=epoch,
            base=base,
            hybrid_time=self.hybrid_time,
            kinds_mask=self.kinds_mask,
            dimension=self.dimension,
            previous=previous or 0 if has_gap else 0,
        )
