"""A block: the columns of many deltas before they have their dots, from who has columns already.

Pure. What `encode_batch` makes of deltas one by one, `Block.encode` makes of columns, to the same bytes.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from delta_prop_wire.batch import PRINTABLE
from delta_prop_wire.bounds import finite, name_is_sound
from delta_prop_wire.delta import AckLevel, Kind, Priority
from delta_prop_wire.encode import assemble
from delta_prop_wire.layout import Column
from delta_prop_wire.plain import name_in
from delta_prop_wire.spec import (
    ACK_LEVEL_SHIFT,
    BATCH_ROWS_MAX,
    DIMENSION_MAX,
    NAMESPACE_BYTES_MAX,
    PRIORITY_SHIFT,
    VECTOR_ID_BYTES_MAX,
)
from delta_prop_wire.validate import validate_batch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from delta_prop_wire.batch import Batch

_PLAIN = {Column.KEY_ENDS, Column.KEYS, Column.NAMESPACES, Column.VALUES}
_OF_WHOLE_VECTORS = (1 << Kind.CREATE, 1 << Kind.DENSE)


@dataclass(frozen=True, slots=True)
class Block:
    """`columns`: as they lie in a body, without clock and counters; a view has bytes for its elements, which
    stay as they are. `kinds_mask`: bit k set where a row has
    kind k; `dimension`: of whole vectors, 0 where there are none or they differ. `hybrid_time`: of all rows
    that have none of their own.
    """

    count: int
    columns: Mapping[Column, bytes | memoryview]
    kinds_mask: int
    dimension: int = 0
    hybrid_time: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.count <= BATCH_ROWS_MAX:
            raise ValueError(f"{self.count} rows; a block has 1 to {BATCH_ROWS_MAX}")

    @property
    def size(self) -> int:
        """Bytes, about."""
        return sum(map(len, self.columns.values()))

    def check(self) -> None:
        """Look at every row. Raises InvalidDelta, with the first bad one."""
        if not self._is_plain_and_sound():
            validate_batch(self.encode(origin=0, base=1))

    def content_crc(self, before: int = 0) -> int:
        """The checksum of what the rows say, as a batch of them tells it, continued from another."""
        return self.encode(origin=0, base=1).content_crc(before)

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
        """The batch under the dots (origin, base), (origin, base + 1) and so on.

        `previous`: the origin's last counter before it, where counters may leap. Raises Refused (TOO_LARGE)
        beyond the frame's bound.
        """
        columns: dict[Column, bytes | memoryview] = dict(self.columns)
        leaps = previous is not None and base != previous + 1
        if leaps:
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
            previous=previous or 0 if leaps else 0,
        )

    def _is_plain_and_sound(self) -> bool:
        """Whether these are whole vectors of one namespace and kind, and sound, as `validate_batch` tells of
        the batch; told without making that, nor a text of each name.
        """
        columns, count, width = self.columns, self.count, self.dimension
        if columns.keys() != _PLAIN or self.kinds_mask not in _OF_WHOLE_VECTORS:
            return False
        ends, text = np.frombuffer(columns[Column.KEY_ENDS], "<u4"), bytes(columns[Column.KEYS])
        named = name_in(bytes(columns[Column.NAMESPACES]))
        values = np.frombuffer(columns[Column.VALUES], "<f4")
        if len(ends) != count or int(ends[-1]) != len(text) or text.translate(None, PRINTABLE):
            return False
        sizes = np.diff(ends.astype(np.int64), prepend=0)
        return (
            int(sizes.min()) >= 1
            and int(sizes.max()) <= VECTOR_ID_BYTES_MAX
            and named is not None
            and name_is_sound(named[0], NAMESPACE_BYTES_MAX)
            and 1 <= width <= DIMENSION_MAX
            and len(values) == count * width
            and finite(values)
        )
