"""A block: the columns of many deltas before they have dots, for callers that already hold columns.

Pure. `Block.encode` makes the same bytes from columns as `encode_batch` does from deltas.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from delta_prop_wire.batch import PRINTABLE, Batch
from delta_prop_wire.bounds import all_finite, name_is_valid
from delta_prop_wire.delta import AckLevel, Kind, Priority
from delta_prop_wire.encode import assemble
from delta_prop_wire.layout import Column, read_single_name
from delta_prop_wire.spec import (
    ACK_LEVEL_SHIFT,
    BATCH_ROWS_MAX,
    DIMENSION_MAX,
    NAMESPACE_BYTES_MAX,
    PRIORITY_SHIFT,
    VECTOR_ID_BYTES_MAX,
)
from delta_prop_wire.validate import validate_batch

_HOMOGENEOUS_COLUMNS = {Column.KEY_ENDS, Column.KEYS, Column.NAMESPACES, Column.VALUES}
_FULL_VECTOR_MASKS = (1 << Kind.CREATE, 1 << Kind.DENSE)


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
        if not self._is_homogeneous_and_valid():
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

    def _is_homogeneous_and_valid(self) -> bool:
        """True if the rows are valid full vectors of one namespace and kind.

        Agrees with `validate_batch`, but encodes no batch and decodes no names.
        """
        columns, count, width = self.columns, self.count, self.dimension
        if columns.keys() != _HOMOGENEOUS_COLUMNS or self.kinds_mask not in _FULL_VECTOR_MASKS:
            return False
        ends, text = np.frombuffer(columns[Column.KEY_ENDS], "<u4"), bytes(columns[Column.KEYS])
        namespace_names = read_single_name(bytes(columns[Column.NAMESPACES]))
        values = np.frombuffer(columns[Column.VALUES], "<f4")
        if len(ends) != count or int(ends[-1]) != len(text) or text.translate(None, PRINTABLE):
            return False
        sizes = np.diff(ends.astype(np.int64), prepend=0)
        return (
            int(sizes.min()) >= 1
            and int(sizes.max()) <= VECTOR_ID_BYTES_MAX
            and namespace_names is not None
            and name_is_valid(namespace_names[0], NAMESPACE_BYTES_MAX)
            and 1 <= width <= DIMENSION_MAX
            and len(values) == count * width
            and all_finite(values)
        )
