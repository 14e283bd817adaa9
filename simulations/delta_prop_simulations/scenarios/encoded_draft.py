"""Deltas encoded in advance: a body is created once and offered many times, each time with new dots.

The service processes it like any call; only the caller's encoding is saved.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from delta_prop.ingest.work import MatrixDraft
from delta_prop_wire.batch import Batch
from delta_prop_wire.crc import crc32c
from delta_prop_wire.delta import DEFAULT_NAMESPACE, Kind
from delta_prop_wire.encode import encode_batch
from delta_prop_wire.layout import BODY_HEADER
from delta_prop_wire.spec import CRC_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from delta_prop.receipt import Receipt
    from delta_prop_wire.delta import AckLevel, Delta, Dot, Priority

_ORIGIN, _EPOCH, _BASE, _TIME = 4, 5, 7, 8
"""Positions of the header's words."""
_NO_MATRIX = np.zeros((0, 0), np.float32)


class Template:
    """Deltas of one priority, and their body."""

    def __init__(self, deltas: list[Delta], priority: Priority, ack_level: AckLevel) -> None:
        self.deltas = deltas
        self.batch = encode_batch(deltas, origin=0, base=1, priority=priority, ack_level=ack_level)
        self._words = list(BODY_HEADER.unpack_from(self.batch.raw))
        self._rest = bytes(self.batch.raw[BODY_HEADER.size : -CRC_BYTES])

    def with_dots(self, origin: int, base: int, hybrid_time: int) -> Batch:
        """Return the same deltas with the dots from (origin, base) on."""
        words = self._words
        words[_ORIGIN], words[_EPOCH], words[_BASE], words[_TIME] = origin, 1, base, hybrid_time
        signed = BODY_HEADER.pack(*words) + self._rest
        batch = Batch(signed + crc32c(signed).to_bytes(CRC_BYTES, "little"))
        same = self.batch
        batch.keys, batch.namespace_names, batch.namespace = same.keys, same.namespace_names, same.namespace
        batch.row_values = same.row_values
        return batch


class EncodedDraft(MatrixDraft):
    """A draft whose body is encoded already."""

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
        """Return the batch of all rows with the dots from (origin, base) on."""
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
