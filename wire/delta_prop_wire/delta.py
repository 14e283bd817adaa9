"""A delta, one change to one fact, as a value; and its operation.

Values only: `validate.py` checks bounds, `algebra.py` has the arithmetic, `batch.py` the bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, dataclass_transform

import numpy as np

from delta_prop_wire.spec import LANE_BITS, PARTITION_BITS, PRODUCER_ID_BITS

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

T = TypeVar("T")

DEFAULT_NAMESPACE = "default"


class Kind(IntEnum):
    """The kinds of operations. Numbers are part of the format; unknown kinds travel as opaque bytes."""

    CREATE = 0
    SPARSE = 1
    DENSE = 2
    SCALE = 3
    OFFSET = 4
    TRANSFORM = 5
    DELETE = 6
    SPARSE_ADD = 7
    OPAQUE = 8
    METADATA = 9


_OPAQUE = Kind.OPAQUE

FULL_KINDS = frozenset({Kind.CREATE, Kind.DENSE, Kind.OPAQUE})
"""Kinds that set the full vector, whether it existed or not."""

PARTIAL_KINDS = frozenset({Kind.SPARSE, Kind.SPARSE_ADD, Kind.SCALE, Kind.OFFSET, Kind.METADATA})
"""Kinds that need an existing vector; without one they have no effect."""


class Priority(IntEnum):
    """The four lanes, most urgent first."""

    CRITICAL = 0
    HIGH = 1
    NORMAL = 2
    LOW = 3


class Source(IntEnum):
    """The entry point of a delta: a local writer, another service, an import, a transform."""

    LOCAL = 0
    REPLICA = 1
    IMPORT = 2
    TRANSFORM = 3


class KnownIds(IntEnum):
    """The share of a batch's rows whose id had been accepted before the batch was logged."""

    NONE = 0
    SOME = 1
    ALL = 2


class AckLevel(IntEnum):
    """The ack levels, from weak to strong: the failures that acknowledged deltas survive.

    QUORUM is reserved.
    """

    MEMORY = 0
    LOGGED = 1
    DURABLE = 2
    QUORUM = 3


class ParentPosition(NamedTuple):
    """A parent named by its place in the log of another partition: the partition's number, the epoch of its
    leader when it appended the parent, and the parent's offset.
    """

    partition: int
    epoch: int
    offset: int


class Dot(NamedTuple):
    """The identity of a delta: its origin, and its counter among that origin's deltas, from 1."""

    origin: int
    counter: int

    def __str__(self) -> str:
        return f"{self.origin:016x}:{self.counter}"


ABSENT = Dot(0, 0)
"""The `expect` of a delta whose vector must not exist: never created, or deleted."""


class Head(NamedTuple):
    """The last delta of a vector; `alive` is True if the vector exists after it."""

    dot: Dot
    alive: bool

    def __str__(self) -> str:
        return str(self.dot) if self.alive else f"{self.dot}, which deletes it"


def producer_id_of(name: str, stream: int = 0) -> int:
    """Return the 44-bit producer id of a name in a stream; in the default stream, that of the name alone."""
    salt = stream.to_bytes(4, "little")
    digest = blake2b(name.encode(), digest_size=8, person=b"delta-prop", salt=salt).digest()
    return int.from_bytes(digest, "big") >> (64 - PRODUCER_ID_BITS)


def make_origin(producer_id: int, lane: int, partition: int = 0) -> int:
    """Return the origin of one sequencer: 44 bits producer id, 16 bits partition, 4 bits lane."""
    assert 0 <= producer_id < 1 << PRODUCER_ID_BITS
    assert 0 <= partition < 1 << PARTITION_BITS
    assert 0 <= lane < 1 << LANE_BITS
    return producer_id << (PARTITION_BITS + LANE_BITS) | partition << LANE_BITS | lane


def origin_lane(origin: int) -> int:
    """Return the lane (a Priority) that an origin writes to."""
    return origin & ((1 << LANE_BITS) - 1)


def origin_partition(origin: int) -> int:
    """Return the partition that an origin writes to."""
    return origin >> LANE_BITS & ((1 << PARTITION_BITS) - 1)


@dataclass_transform(frozen_default=True)
def _value(*, eq: bool) -> Callable[[type[T]], type[T]]:
    """Return the decorator of a dataclass that type checkers hold to be frozen.

    At run time a frozen dataclass sets each field through `object.__setattr__`, so building a delta would
    take as long as publishing it.
    """

    def decorate(cls: type[T]) -> type[T]:
        return dataclass(slots=True, eq=eq, unsafe_hash=eq)(cls)

    return decorate


@_value(eq=False)
class Operation:
    """One operation: its kind, and the operands that this kind needs. Never changed once it is created.

    `values` (float32): the vector of create and dense, the values of sparse and sparse_add, the one number of
    scale and offset. `indices` (uint32): of sparse and sparse_add. `data`: the bytes of opaque or of an
    unknown kind, or the UTF-8 name of a transform.
    """

    kind: int
    values: NDArray[np.float32] | None = None
    indices: NDArray[np.uint32] | None = None
    data: bytes = b""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Operation):
            return NotImplemented
        return self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[int, bytes | None, bytes | None, bytes]:
        return (
            self.kind,
            None if self.values is None else self.values.tobytes(),
            None if self.indices is None else self.indices.tobytes(),
            self.data,
        )


def _to_floats(values: ArrayLike) -> NDArray[np.float32]:
    try:
        array = np.asarray(values)
    except (ValueError, TypeError, OverflowError):
        array = np.empty((0, 0))
    if array.ndim != 1 or (array.size and array.dtype.kind not in "fiu"):
        from delta_prop_wire.errors import InvalidDelta

        raise InvalidDelta("values", f"{values!r:.80} is not one row of numbers: give a flat list or array")
    # A number too large for float32 becomes inf here, and validation refuses it with its field.
    with np.errstate(over="ignore", invalid="ignore"):
        return np.ascontiguousarray(array, dtype=np.float32)


def _to_indices(values: ArrayLike) -> NDArray[np.uint32]:
    array = np.asarray(values)
    if array.size and (array.dtype.kind not in "ui" or array.min() < 0 or array.max() > 0xFFFFFFFF):
        from delta_prop_wire.errors import InvalidDelta

        raise InvalidDelta("indices", f"{array.tolist()!r:.80}: give whole numbers from 0 to 4294967295")
    return np.ascontiguousarray(array, dtype=np.uint32).reshape(-1)


def create(vector: ArrayLike) -> Operation:
    """Return an operation that sets the full vector and clears its metadata."""
    return Operation(Kind.CREATE, _to_floats(vector))


def dense(vector: ArrayLike) -> Operation:
    """Return an operation that sets the full vector and keeps its metadata."""
    return Operation(Kind.DENSE, _to_floats(vector))


def sparse(indices: ArrayLike, values: ArrayLike) -> Operation:
    """Return an operation that sets some elements of a vector."""
    return Operation(Kind.SPARSE, _to_floats(values), _to_indices(indices))


def sparse_add(indices: ArrayLike, values: ArrayLike) -> Operation:
    """Return an operation that adds to some elements of a vector."""
    return Operation(Kind.SPARSE_ADD, _to_floats(values), _to_indices(indices))


def scale(factor: float) -> Operation:
    """Return an operation that multiplies every element by `factor`."""
    return Operation(Kind.SCALE, _to_floats([factor]))


def offset(amount: float) -> Operation:
    """Return an operation that adds `amount` to every element."""
    return Operation(Kind.OFFSET, _to_floats([amount]))


def transform(name: str) -> Operation:
    """Return an operation that applies the function registered under `name`.

    The service replaces it by a dense delta before it queues the delta.
    """
    if not isinstance(name, str):
        from delta_prop_wire.errors import InvalidDelta

        raise InvalidDelta("name", f"{name!r:.80} is of type {type(name).__name__}: give text")
    return Operation(Kind.TRANSFORM, data=name.encode())


def delete() -> Operation:
    """Return an operation that removes the vector and leaves a tombstone."""
    return Operation(Kind.DELETE)


def opaque(data: bytes) -> Operation:
    """Return an operation that sets a fact to `data`, for facts that are not vectors."""
    if type(data) is bytes:
        return Operation(_OPAQUE, None, None, data)
    if not isinstance(data, bytes | bytearray | memoryview):
        from delta_prop_wire.errors import InvalidDelta

        raise InvalidDelta("data", f"{data!r:.80} is of type {type(data).__name__}: give bytes")
    return Operation(Kind.OPAQUE, data=bytes(data))


def metadata_only() -> Operation:
    """Return an operation that changes only the metadata."""
    return Operation(Kind.METADATA)


@_value(eq=True)
class Delta:
    """One change to one vector (fact). Never changed once it is created.

    `id`: 16 bytes, for sources without counters. `parents`: dots or 16-byte ids of deltas that must be
    delivered first. `clock`: the highest counters of other origins that the writer had seen. `topics`: custom
    topics, by which subscribers can select it. `timestamp`: hybrid, 48 bits of ms and 16 logical, information
    only. `metadata`: a JSON merge patch. `expect`: the service refuses the delta with CONFLICT unless the
    vector's last delta has this dot; ABSENT: unless the vector does not exist.
    """

    vector_id: str
    operation: Operation
    namespace: str = DEFAULT_NAMESPACE
    id: bytes | None = None
    dot: Dot | None = None
    parents: tuple[Dot | bytes, ...] = ()
    clock: tuple[Dot, ...] = ()
    timestamp: int = 0
    priority: Priority = Priority.NORMAL
    source: Source = Source.LOCAL
    metadata: Mapping[str, Any] | None = field(default=None, hash=False)
    topics: tuple[str, ...] = ()
    expect: Dot | None = None


def namespace_of(vector_id: str) -> str:
    """Return the namespace of a delta that names none: the text before the first ":", else `default`."""
    head, colon, _ = vector_id.partition(":")
    return head if colon and head else DEFAULT_NAMESPACE
