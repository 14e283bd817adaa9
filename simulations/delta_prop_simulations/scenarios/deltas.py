"""Generates a source's deltas, with operations drawn from its mix and vector ids drawn from its keys.

The values of the deltas do not matter, so most calls reuse templates that are created once. Recorded traffic
is replayed as opaque deltas of the recorded sizes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from delta_prop_simulations.scenarios.encoded_draft import Template
from delta_prop_simulations.scenarios.scenario import Between
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
    from delta_prop.directory.recorded_traffic import RecordedBatch
    from delta_prop_simulations.rng import Random
    from delta_prop_simulations.scenarios.scenario import SourceSpec
    from delta_prop_simulations.scenarios.sources import Arrival
    from delta_prop_wire.delta import AckLevel, Operation

POOL_SIZE = 10_000
"""Number of vector ids that are drawn at the start; each call then uses a slice of them."""
TEMPLATES_MAX = 100
TEMPLATES_PER_COUNT_MIN = 2
"""Maximum number of templates in total, split evenly over the possible numbers of deltas per call; but each
of these numbers gets at least two templates.
"""
OPERATIONS_PER_KIND = 32
"""Number of operations that are created of each kind, and then reused."""
SPARSE_SHARE = 8
"""A sparse delta changes one in this many numbers."""

Rows: TypeAlias = Template | list[Delta]


class DeltaGenerator:
    """Draws the deltas of one source. The pool of ids is in random order, so each slice of it is a random
    sample.
    """

    def __init__(self, spec: SourceSpec, random: Random, ack_level: AckLevel) -> None:
        self._spec, self._random, self._ack_level = spec, random, ack_level
        shares = spec.deltas.mix.shares
        self._kinds, self._weights = list(shares), list(shares.values())
        self._names = [self._draw_name() for _ in range(POOL_SIZE)]
        self._operations: dict[Kind, list[Operation]] = {}
        self._live_names: set[str] | None = set() if PARTIAL_KINDS & shares.keys() else None
        counts = spec.batch.max - spec.batch.min + 1 if isinstance(spec.batch, Between) else 1
        self._templates_per_count = max(TEMPLATES_MAX // counts, TEMPLATES_PER_COUNT_MIN)
        self._templates: dict[int, list[Template]] = {}

    def make(self, arrival: Arrival) -> Rows:
        """Return the deltas of an arrival."""
        if arrival.recorded is not None:
            return self._from_recording(arrival.recorded)
        if self._live_names is not None or self._spec.writers:
            return self._draw_deltas(arrival.deltas)
        templates = self._templates.setdefault(arrival.deltas, [])
        index = int(self._random.random() * self._templates_per_count)
        if index >= len(templates):
            templates.append(
                Template(self._draw_deltas(arrival.deltas), self._spec.priority, self._ack_level)
            )
            return templates[-1]
        return templates[index]

    def _draw_deltas(self, count: int) -> list[Delta]:
        first = int(self._random.random() * (POOL_SIZE - count))
        return [self._draw_delta(name) for name in self._names[first : first + count]]

    def _from_recording(self, batch: RecordedBatch) -> list[Delta]:
        keys, namespaces, sizes = batch.keys.tolist(), batch.namespaces.tolist(), batch.sizes.tolist()
        return [
            Delta(f"{key:016x}", opaque(bytes(size)), f"{namespace:016x}", priority=batch.priority)
            for key, namespace, size in zip(keys, namespaces, sizes, strict=True)
        ]

    def _draw_name(self) -> str:
        deltas, random = self._spec.deltas, self._random
        hot_count = 0 if deltas.hot is None else max(round(deltas.keys * deltas.hot.share), 1)
        if deltas.hot is not None and random.random() < deltas.hot.of:
            return f"v{random.randrange(hot_count)}"
        return f"v{random.randrange(min(hot_count, deltas.keys - 1), deltas.keys)}"

    def _draw_delta(self, name: str) -> Delta:
        (kind,) = self._kinds if len(self._kinds) == 1 else self._random.choices(self._kinds, self._weights)
        if self._live_names is not None:
            # The service refuses a partial change of a missing vector, so the vector is created first.
            if kind in PARTIAL_KINDS and name not in self._live_names:
                kind = Kind.CREATE
            (self._live_names.discard if kind is Kind.DELETE else self._live_names.add)(name)
        operations = self._operations.setdefault(kind, [])
        if len(operations) < OPERATIONS_PER_KIND:
            operations.append(self._draw_operation(kind))
        return Delta(
            name,
            operations[int(self._random.random() * len(operations))],
            self._spec.namespace,
            priority=self._spec.priority,
            metadata={"changed": self._random.randrange(100)} if kind is Kind.METADATA else None,
        )

    def _draw_operation(self, kind: Kind) -> Operation:
        deltas, random = self._spec.deltas, self._random
        if kind is Kind.OPAQUE:
            return opaque(random.randbytes(deltas.size_bytes))
        if kind in (Kind.CREATE, Kind.DENSE):
            vector = [random.random() for _ in range(deltas.dimension)]
            return create(vector) if kind is Kind.CREATE else dense(vector)
        if kind in (Kind.SPARSE, Kind.SPARSE_ADD):
            count = max(deltas.dimension // SPARSE_SHARE, 1)
            positions = sorted(random.sample(range(deltas.dimension), count))
            return (sparse if kind is Kind.SPARSE else sparse_add)(positions, [random.random()] * count)
        if kind is Kind.SCALE:
            return scale(1 + random.random() / 100)
        if kind is Kind.OFFSET:
            return offset(random.random())
        return delete() if kind is Kind.DELETE else metadata_only()
