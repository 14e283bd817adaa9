"""Drafts that are encoded in advance: a body is encoded once, and offered many times under new dots.

The service processes such a draft as it does any other; the simulation only saves the time of encoding it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from delta_prop.partition.ingest.work import MatrixDraft
from delta_prop_wire.batch import Batch
from delta_prop_wire.crc import crc32c
from delta_prop_wire.delta import DEFAULT_NAMESPACE, Kind
from delta_prop_wire.encode import encode_batch
from delta_prop_wire.layout import BODY_HEADER
from delta_prop_wire.spec import CRC_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from delta_prop.calls.receipt import Receipt
    from delta_prop_wire.delta import AckLevel, Delta, Dot, Priority

_ORIGIN, _EPOCH, _BASE, _TIME = 4, 5, 7, 8
"""Indexes of the fields in the body's header."""
_NO_MATRIX = np.zeros((0, 0), np.float32)


class Template:
    """Deltas of one priority, and their encoded body."""

    def __init__(self, deltas: list[Delta], priority: Priority, ack_level: AckLevel) -> None:
        self.deltas = deltas
        self.batch = encode_batch(deltas, origin=0, base=1, priority=priority, ack_level=ack_level)
        self._header = list(BODY_HEADER.unpack_from(self.batch.raw))
        self._columns = bytes(self.batch.raw[BODY_HEADER.size : -CRC_BYTES])

    def with_dots(self, origin: int, base: int, hybrid_time: int) -> Batch:
        """Return a batch of the same deltas, whose first dot is (origin, base)."""
        header = self._header
        header[_ORIGIN], header[_EPOCH], header[_BASE], header[_TIME] = origin, 1, base, hybrid_time
        body = BODY_HEADER.pack(*header) + self._columns
        batch = Batch(body + crc32c(body).to_bytes(CRC_BYTES, "little"))
        first = self.batch  # its decoded columns are shared
        batch.keys, batch.namespace_names = first.keys, first.namespace_names
        batch.namespace, batch.values_per_row = first.namespace, first.values_per_row
        return batch


class EncodedDraft(MatrixDraft):
    """A draft whose body is already encoded."""

    __slots__ = ("template",)

    def __init__(self, template: Template, receipt: Receipt, priority: Priority, ack_level: AckLevel) -> None:
        super().__init__(
            template.batch.keys, _NO_MATRIX, DEFAULT_NAMESPACE, Kind.OPAQUE, receipt, priority, ack_level
        )
        self.template = template

    @property
    def size(self) -> int:
        """The size in bytes."""
        return self.template.batch.size

    def vectors(self) -> list[tuple[str, str]]:
        """Return (namespace, vector id) of each row."""
        batch = self.template.batch
        return list(zip(batch.namespaces, batch.keys, strict=True))

    def encode(
        self, rows: Sequence[int] | None, *, origin: int, base: int, clock: Sequence[Dot], hybrid_time: int
    ) -> Batch:
        """Return a batch of all rows, whose first dot is (origin, base)."""
        assert rows is None, "a template has no ids, so no row is a duplicate"
        if not clock:
            return self.template.with_dots(origin, base, hybrid_time)
        return encode_batch(
            self.template.deltas,
            origin=origin,
            base=base,
            clock=clock,
            ack_level=self.ack_level,
            priority=self.priority,
            hybrid_time=hybrid_time,
        )
