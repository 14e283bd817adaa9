"""What a source sends: deltas drawn from its mix, over its keys, ready to be offered.

What a value is makes no difference to anybody here, so most calls are drawn from some that are made once.
What was recorded comes as bytes of the recorded sizes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from delta_prop_simulations.laboratory.ready import Template
from delta_prop_simulations.laboratory.scenario import Between
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
    from delta_prop.recorded_traffic import RecordedBatch
    from delta_prop_simulations.chance import Random
    from delta_prop_simulations.laboratory.scenario import SourceSpec
    from delta_prop_simulations.laboratory.sources import Arrival
    from delta_prop_wire.delta import AckLevel, Operation

POOL = 10_000
"""Names that are drawn at first and then drawn from."""
TEMPLATES_MAX = 100
TEMPLATES_A_COUNT_MIN = 2
"""Calls that are made once: of each number of deltas as many, two at least."""
OPERATIONS = 32
"""Operations of each kind that are made once."""
SPARSE_SHARE = 8
"""One number of so many is changed by a sparse delta."""

Rows: TypeAlias = Template | list[Delta]


class Maker:
    """Draws what one source sends. Names are in no order, so a run of them is drawn as well as each."""

    def __init__(self, spec: SourceSpec, random: Random, ack_level: AckLevel) -> None:
        self._spec, self._random, self._ack_level = spec, random, ack_level
        shares = spec.deltas.mix.shares
        self._kinds, self._weights = list(shares), list(shares.values())
        self._names = [self._name() for _ in range(POOL)]
        self._operations: dict[Kind, list[Operation]] = {}
        self._alive: set[str] | None = set() if PARTIAL_KINDS & shares.keys() else None
        counts = spec.batch.max - spec.batch.min + 1 if isinstance(spec.batch, Between) else 1
        self._templates_a_count = max(TEMPLATES_MAX // counts, TEMPLATES_A_COUNT_MIN)
        self._templates: dict[int, list[Template]] = {}

    def make(self, arrival: Arrival) -> Rows:
        """What comes with an arrival."""
        if arrival.recorded is not None:
            return self._recorded(arrival.recorded)
        if self._alive is not None or self._spec.writers:
            return self._deltas(arrival.deltas)
        made = self._templates.setdefault(arrival.deltas, [])
        place = int(self._random.random() * self._templates_a_count)
        if place >= len(made):
            made.append(Template(self._deltas(arrival.deltas), self._spec.priority, self._ack_level))
            return made[-1]
        return made[place]

    def _deltas(self, count: int) -> list[Delta]:
        first = int(self._random.random() * (POOL - count))
        return [self._delta(name) for name in self._names[first : first + count]]

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

    def _delta(self, name: str) -> Delta:
        (kind,) = self._kinds if len(self._kinds) == 1 else self._random.choices(self._kinds, self._weights)
        if self._alive is not None:
            # A change of what is not there would be refused: who has no vector yet gets one.
            if kind in PARTIAL_KINDS and name not in self._alive:
                kind = Kind.CREATE
            (self._alive.discard if kind is Kind.DELETE else self._alive.add)(name)
        made = self._operations.setdefault(kind, [])
        if len(made) < OPERATIONS:
            made.append(self._operation(kind))
        return Delta(
            name,
            made[int(self._random.random() * len(made))],
            self._spec.namespace,
            priority=self._spec.priority,
            metadata={"changed": self._random.randrange(100)} if kind is Kind.METADATA else None,
        )

    def _operation(self, kind: Kind) -> Operation:
        deltas, random = self._spec.deltas, self._random
        if kind is Kind.OPAQUE:
            return opaque(random.randbytes(deltas.size_bytes))
        if kind in (Kind.CREATE, Kind.DENSE):
            vector = [random.random() for _ in range(deltas.dimension)]
            return create(vector) if kind is Kind.CREATE else dense(vector)
        if kind in (Kind.SPARSE, Kind.SPARSE_ADD):
            count = max(deltas.dimension // SPARSE_SHARE, 1)
            places = sorted(random.sample(range(deltas.dimension), count))
            return (sparse if kind is Kind.SPARSE else sparse_add)(places, [random.random()] * count)
        if kind is Kind.SCALE:
            return scale(1 + random.random() / 100)
        if kind is Kind.OFFSET:
            return offset(random.random())
        return delete() if kind is Kind.DELETE else metadata_only()
