"""Draws the arrivals of a source: the times of its calls, their numbers of deltas, and the deltas.

The values of the deltas do not matter, so most calls reuse templates that are created and encoded once; the
service processes these as any others. Recorded traffic is replayed as opaque deltas of the recorded sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from math import pi, sin
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from delta_prop.calls.receipt import Receipt
from delta_prop.partition.ingest.work import MatrixDraft
from delta_prop_simulations.scenarios.scenario import Between, SourceSpec
from delta_prop_wire.batch import Batch
from delta_prop_wire.crc import crc32c
from delta_prop_wire.delta import (
    DEFAULT_NAMESPACE,
    PARTIAL_KINDS,
    AckLevel,
    Delta,
    Dot,
    Kind,
    Operation,
    Priority,
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
from delta_prop_wire.encode import encode_batch
from delta_prop_wire.layout import BODY_HEADER
from delta_prop_wire.spec import CRC_BYTES

if TYPE_CHECKING:
    from delta_prop.directory.recorded_traffic import RecordedBatch, RecordedTraffic
    from delta_prop_simulations.rng import Random


class Arrival(NamedTuple):
    """One call of a source, at `at_s` seconds of the run. `recorded`: the batch to replay, if any."""

    at_s: float
    deltas: int
    recorded: RecordedBatch | None = None


def arrivals(
    spec: SourceSpec, random: Random, duration_s: float, traffic: RecordedTraffic | None = None
) -> Iterator[Arrival]:
    """Return all arrivals of a source within the run, in order. `traffic`: the traffic to replay, if any."""
    end_s = duration_s if spec.stop is None else min(spec.stop, duration_s)
    if traffic is None:
        unbounded = (Arrival(at_s, _draw_count(spec.batch, random)) for at_s in _draw_times(spec, random))
    else:
        unbounded = (
            Arrival(spec.start + at_s, batch.count, batch) for at_s, batch in traffic.arrivals(spec.speed)
        )
    return takewhile(lambda arrival: arrival.at_s < end_s, unbounded)


def mean_batch(batch: int | Between) -> float:
    """Return the mean number of deltas per call."""
    return batch if isinstance(batch, int) else (batch.min + batch.max) / 2


def _draw_count(batch: int | Between, random: Random) -> int:
    return batch if isinstance(batch, int) else random.randint(batch.min, batch.max)


def _draw_times(spec: SourceSpec, random: Random) -> Iterator[float]:
    calls_per_s = spec.rate / mean_batch(spec.batch)
    if spec.pattern == "constant":
        return _constant(spec.start, calls_per_s)
    if spec.pattern == "poisson":
        return _thinned_poisson(spec.start, calls_per_s, lambda at_s: 1.0, random)
    if spec.pattern == "bursty":
        return _bursty(spec, calls_per_s, random)
    assert spec.pattern == "diurnal", "a replay has its own times"
    low, period_s = spec.day.low, spec.day.period
    mean = (1 + low) / 2

    def share(at_s: float) -> float:
        return mean + (1 - mean) * sin(2 * pi * at_s / period_s)

    return _thinned_poisson(spec.start, calls_per_s / mean, share, random)


def _constant(start_s: float, calls_per_s: float) -> Iterator[float]:
    number = 0
    while True:
        yield start_s + number / calls_per_s
        number += 1


def _thinned_poisson(
    start_s: float, calls_per_s: float, share: Callable[[float], float], random: Random
) -> Iterator[float]:
    """Yield the times of a Poisson process whose rate is a varying share of `calls_per_s`, by thinning."""
    at_s = start_s
    while True:
        at_s += random.expovariate(calls_per_s)
        rate_share = share(at_s)
        if rate_share >= 1 or random.random() < rate_share:
            yield at_s


def _bursty(spec: SourceSpec, calls_per_s: float, random: Random) -> Iterator[float]:
    """Yield the times of a Poisson process during bursts; the time between bursts does not count for it."""
    on_s, off_s = spec.burst.on, spec.burst.off
    burst_s, peak_per_s = 0.0, calls_per_s * (on_s + off_s) / on_s
    while True:
        burst_s += random.expovariate(peak_per_s)
        earlier_bursts, into_s = divmod(burst_s, on_s)
        yield spec.start + earlier_bursts * (on_s + off_s) + into_s


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


POOL_SIZE = 10_000
"""Number of vector ids that are drawn at the start; each call then uses a slice of them."""
TEMPLATES_MAX = 100
TEMPLATES_PER_COUNT_MIN = 2
"""Maximum number of templates over all numbers of deltas per call, and the minimum for each."""
OPERATIONS_PER_KIND = 32
"""Number of operations that are created of each kind, and then reused."""
SPARSE_SHARE = 8
"""A sparse delta changes one in this many numbers."""

Rows: TypeAlias = Template | list[Delta]


class DeltaGenerator:
    """Draws the deltas of one source: slices of a pool of ids in random order are random samples."""

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
