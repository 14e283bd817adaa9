"""Units of work of the pipeline: batches, which have their dots, and drafts, which get dots when appended.

They only hold values; `pipeline.py` decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from delta_prop_wire.batch import Batch
from delta_prop_wire.delta import AckLevel, Delta, Dot, Kind, Priority, Source
from delta_prop_wire.encode import encode_batch, encode_vectors
from delta_prop_wire.errors import Refused
from delta_prop_wire.spec import PARENTS_PER_DELTA_MAX

if TYPE_CHECKING:
    from delta_prop_core import PackedRows
    from numpy.typing import NDArray

    from delta_prop.calls.receipt import Receipt

DELTA_OVERHEAD_BYTES = 128
"""Bytes that a delta counts in the queue besides its payload, for fixed parts of a frame and for indexes."""


@dataclass(frozen=True, slots=True)
class Sender:
    """The sender of batches. `owner`: the owner of its origins, whose bounds apply. `source`: the
    source that it declared.

    A forwarder sends other services' batches, under their origins and Lamport numbers. `can_split`: if a
    batch of several rows is refused for good, its dots stay open, since the sender splits and resends it.
    """

    owner: str
    source: Source = Source.LOCAL
    can_split: bool = False

    @property
    def is_forwarder(self) -> bool:
        """True if batches come from other services' logs."""
        return self.source is Source.REPLICA


@dataclass(slots=True, eq=False)
class SequencedBatch:
    """A batch under its producer's dots; only a forwarder gives `lamport`."""

    batch: Batch
    sender: Sender
    receipt: Receipt
    lamport: int | None = None
    final_refusal: Refused | None = None
    duplicates: int = 0  # number of duplicates that wait for its outcome
    claims: int | None = None  # number of hellos of its origin when it was queued

    @property
    def is_forwarded(self) -> bool:
        """True if the batch comes from another service's log."""
        return self.sender.is_forwarder

    @property
    def priority(self) -> Priority:
        """The lane."""
        return self.batch.priority

    @property
    def count(self) -> int:
        """Number of rows."""
        return self.batch.count

    @property
    def size(self) -> int:
        """Size in bytes."""
        return self.batch.size

    def vectors(self) -> list[tuple[str, str]]:
        """Return (namespace, vector id) of each row."""
        if self.batch.is_control:
            return []
        return list(zip(self.batch.namespaces, self.batch.keys, strict=True))


@dataclass(slots=True, eq=False)
class Draft:
    """Deltas of one priority without dots, from callers in this process or sources without counters."""

    deltas: Sequence[Delta]
    receipt: Receipt
    priority: Priority
    ack_level: AckLevel
    source: Source = Source.LOCAL
    after: tuple[Receipt, ...] = ()  # receipts of work that must come before
    packed: PackedRows | None = None  # the one delta as the core packs it, if it does
    is_forwarded: ClassVar[bool] = False

    @property
    def count(self) -> int:
        """Number of rows."""
        return len(self.deltas)

    @property
    def size(self) -> int:
        """Approximate size in bytes."""
        if self.packed is not None:
            return DELTA_OVERHEAD_BYTES + self.packed.size
        return sum(map(delta_bytes, self.deltas))

    @property
    def ids(self) -> list[bytes] | None:
        """The rows' ids; None if they have none."""
        first = self.deltas[0].id
        return None if first is None else [delta.id or b"" for delta in self.deltas]

    @property
    def causes(self) -> set[Dot | bytes]:
        """Causal dependencies of the rows: their parents, and the entries of their clocks."""
        return {cause for delta in self.deltas for cause in (*delta.parents, *delta.clock)}

    @property
    def clock(self) -> set[Dot]:
        """The entries of the rows' clocks."""
        return {entry for delta in self.deltas for entry in delta.clock}

    def add_receipt_parents(self) -> None:
        """Add the dots of the receipts in `after` to the rows' parents, so that sinks get them, too.

        Dots beyond the bound on parents are left out: their deltas come first in the log in any case.
        """
        last_dots = [receipt.result().last_dot for receipt in self.after if receipt.acknowledged]
        dots = [dot for dot in last_dots if dot is not None]
        if dots:
            self.deltas = [
                replace(delta, parents=tuple(dict.fromkeys((*delta.parents, *dots)))[:PARENTS_PER_DELTA_MAX])
                for delta in self.deltas
            ]

    def vectors(self) -> list[tuple[str, str]]:
        """Return (namespace, vector id) of each row."""
        return [(delta.namespace, delta.vector_id) for delta in self.deltas]

    def encode(
        self, rows: Sequence[int] | None, *, origin: int, base: int, clock: Sequence[Dot], hybrid_time: int
    ) -> Batch:
        """Encode these rows, or all if `rows` is None, as a batch under the dots from (origin, base) on."""
        return encode_batch(
            self.deltas if rows is None else [self.deltas[row] for row in rows],
            origin=origin,
            base=base,
            clock=clock,
            ack_level=self.ack_level,
            priority=self.priority,
            hybrid_time=hybrid_time,
        )


@dataclass(slots=True, eq=False)
class MatrixDraft:
    """Whole vectors, or parts of vectors (with `indices`), as columns, so without an object for each row.

    `packed`: the rows as the core packs them, if it does.
    """

    keys: Sequence[str]
    matrix: NDArray[np.float32]
    namespace: str
    kind: Kind
    receipt: Receipt
    priority: Priority
    ack_level: AckLevel
    source: Source = Source.LOCAL
    after: tuple[Receipt, ...] = ()
    ids: list[bytes] | None = None
    indices: NDArray[np.uint32] | None = None
    packed: PackedRows | None = None
    is_forwarded: ClassVar[bool] = False
    clock: ClassVar[frozenset[Dot]] = frozenset()

    @property
    def count(self) -> int:
        """Number of rows."""
        return len(self.keys)

    @property
    def size(self) -> int:
        """Approximate size in bytes."""
        numbers = self.matrix.nbytes if self.indices is None else 2 * self.matrix.nbytes
        return numbers + DELTA_OVERHEAD_BYTES * len(self.keys)

    @property
    def causes(self) -> set[Dot | bytes]:
        """Causal dependencies: always none."""
        return set()

    def vectors(self) -> list[tuple[str, str]]:
        """Return (namespace, vector id) of each row."""
        return [(self.namespace, key) for key in self.keys]

    def encode(
        self, rows: Sequence[int] | None, *, origin: int, base: int, clock: Sequence[Dot], hybrid_time: int
    ) -> Batch:
        """Encode these rows, or all if `rows` is None, as a batch under the dots from (origin, base) on."""
        chosen = slice(None) if rows is None else list(rows)
        return encode_vectors(
            self.keys if rows is None else [self.keys[row] for row in rows],
            self.matrix[chosen],
            indices=None if self.indices is None else self.indices[chosen],
            namespace=self.namespace,
            kind=self.kind,
            ids=self.ids if rows is None or self.ids is None else [self.ids[row] for row in rows],
            origin=origin,
            base=base,
            clock=clock,
            ack_level=self.ack_level,
            priority=self.priority,
            hybrid_time=hybrid_time,
        )


def delta_bytes(delta: Delta) -> int:
    """Return the bytes that a delta counts in the bounds: its payload, names and a fixed overhead."""
    operation = delta.operation
    size = DELTA_OVERHEAD_BYTES + len(delta.vector_id) + len(operation.data)
    if operation.values is not None:
        size += operation.values.nbytes
    if operation.indices is not None:
        size += operation.indices.nbytes
    return size
