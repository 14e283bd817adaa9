"""What a source sends: deltas drawn from its mix, over its keys, ready to be offered.

Whole vectors of one kind are drawn as columns; all else as deltas that are made once and drawn again, since
what a value is makes no difference to anybody here. What was recorded comes as bytes of the recorded sizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from delta_prop_wire.delta import (
    PARTIAL_KINDS,
    Delta,
    Kind,
    create,
    delete,
    dense,
    metadata_only,
    offset,
    opaque,
    scale,
    sparse,
    sparse_add,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from delta_prop.recorded_traffic import RecordedBatch
    from delta_prop_simulations.chance import Random
    from delta_prop_simulations.laboratory.scenario import SourceSpec
    from delta_prop_simulations.laboratory.sources import Arrival
    from delta_prop_wire.delta import Operation

POOL = 10_000
"""Names, and whole deltas, that are drawn at first and then drawn from."""
SPARSE_SHARE = 8
"""One number of so many is changed by a sparse delta."""


@dataclass(frozen=True, slots=True)
class Columns:
    """Whole vectors of one kind."""

    ids: list[str]
    matrix: NDArray[np.float32]
    kind: Kind


Rows: TypeAlias = Columns | list[Delta]


class Maker:
    """Draws what one source sends."""

    def __init__(self, spec: SourceSpec, random: Random) -> None:
        self._spec, self._random = spec, random
        shares = spec.deltas.mix.shares
        self._kinds, self._weights = list(shares), list(shares.values())
        self._names = [self._name() for _ in range(POOL)]
        self._columns = spec.writers == 0 and self._kinds in ([Kind.CREATE], [Kind.DENSE])
        self._matrix = self._numbers(POOL) if self._columns else None
        self._alive: set[str] | None = set() if PARTIAL_KINDS & shares.keys() else None
        self._ready: list[Delta] = []
        if self._matrix is None and self._alive is None:
            self._ready = [self._delta(name) for name in self._names]

    def make(self, arrival: Arrival) -> Rows:
        """What comes with an arrival."""
        if arrival.recorded is not None:
            return self._recorded(arrival.recorded)
        count = arrival.deltas
        if self._matrix is not None:
            first = self._random.randrange(POOL - count)
            ids = self._random.choices(self._names, k=count)
            return Columns(ids, self._matrix[first : first + count], self._kinds[0])
        if self._ready:
            return self._random.choices(self._ready, k=count)
        return [self._delta(name) for name in self._random.choices(self._names, k=count)]

    def _recorded(self, batch: RecordedBatch) -> list[Delta]:
        keys, spaces, sizes = batch.keys.tolist(), batch.namespaces.tolist(), batch.sizes.tolist()
        return [
            Delta(f"{key:016x}", opaque(bytes(size)), f"{space:016x}", priority=batch.priority)
            for key, space, size in zip(keys, spaces, sizes, strict=True)
        ]

    def _name(self) -> str:
        deltas, random = self._spec.deltas, self._random
        hot = 0 if deltas.hot is None else max(round(deltas.keys * deltas.hot.share), 1)
        if deltas.hot is not None and random.random() < deltas.hot.of:
            return f"v{random.randrange(hot)}"
        return f"v{random.randrange(min(hot, deltas.keys - 1), deltas.keys)}"

    def _numbers(self, rows: int) -> NDArray[np.float32]:
        drawn = [self._random.random() for _ in range(1_000)]
        return np.resize(np.array(drawn, np.float32), (rows, self._spec.deltas.dimension))

    def _delta(self, name: str) -> Delta:
        (kind,) = self._random.choices(self._kinds, self._weights)
        if self._alive is not None:
            # A change of what is not there would be refused: who has no vector yet gets one.
            if kind in PARTIAL_KINDS and name not in self._alive:
                kind = Kind.CREATE
            (self._alive.discard if kind is Kind.DELETE else self._alive.add)(name)
        return Delta(
            name,
            self._operation(kind),
            self._spec.namespace,
            priority=self._spec.priority,
            metadata={"changed": self._random.randrange(100)} if kind is Kind.METADATA else None,
        )

    def _operation(self, kind: Kind) -> Operation:
        deltas, random = self._spec.deltas, self._random
        if kind is Kind.OPAQUE:
            return opaque(random.randbytes(deltas.size_bytes))
        if kind in (Kind.CREATE, Kind.DENSE):
            return (create if kind is Kind.CREATE else dense)(self._numbers(1)[0])
        if kind in (Kind.SPARSE, Kind.SPARSE_ADD):
            count = max(deltas.dimension // SPARSE_SHARE, 1)
            places = sorted(random.sample(range(deltas.dimension), count))
            return (sparse if kind is Kind.SPARSE else sparse_add)(places, [random.random()] * count)
        if kind is Kind.SCALE:
            return scale(1 + random.random() / 100)
        if kind is Kind.OFFSET:
            return offset(random.random())
        return delete() if kind is Kind.DELETE else metadata_only()
