"""A delta, one change to one fact, as a value; and the operation it carries.

Values only: checking bounds is `validate.py`, arithmetic `algebra.py`, bytes `batch.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import IntEnum
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from delta_prop_wire.spec import LANE_BITS, PARTITION_BITS, PRODUCER_ID_BITS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import ArrayLike, NDArray

DEFAULT_NAMESPACE = "default"


class Kind(IntEnum):
    """What an operation does. Numbers are part of the format; unknown ones travel opaque."""

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

WHOLE_KINDS = frozenset({Kind.CREATE, Kind.DENSE, Kind.OPAQUE})
"""Kinds that set the whole vector, whether it was there or not."""

PARTIAL_KINDS = frozenset({Kind.SPARSE, Kind.SPARSE_ADD, Kind.SCALE, Kind.OFFSET, Kind.METADATA})
"""Kinds that need a living vector; on any other they have no effect."""


class Priority(IntEnum):
    """The four lanes, most urgent first."""

    CRITICAL = 0
    HIGH = 1
    NORMAL = 2
    LOW = 3


class Source(IntEnum):
    """Where a delta entered: a local writer, another service, an import, a transform."""

    LOCAL = 0
    REPLICA = 1
    IMPORT = 2
    TRANSFORM = 3


class KnownIds(IntEnum):
    """Of how many rows of a batch the id had been accepted before the batch was logged."""

    NONE = 0
    SOME = 1
    ALL = 2


class AckLevel(IntEnum):
    """What an acknowledgement promises to survive."""

    MEMORY = 0
    LOGGED = 1
    DURABLE = 2
    QUORUM = 3


class Place(NamedTuple):
    """A parent's position in another partition of its stream: the leader epoch and the offset there."""

    partition: int
    epoch: int
    offset: int


class Dot(NamedTuple):
    """Identity of a delta: who made it and their how-manieth it is. Counters start at 1."""

    origin: int
    counter: int

    def __str__(self) -> str:
        return f"{self.origin:016x}:{self.counter}"

    def to_id(self) -> bytes:
        """The 16-byte id that a dot stands for."""
        return self.origin.to_bytes(8, "big") + self.counter.to_bytes(8, "big")


ABSENT = Dot(0, 0)
"""What a delta expects of a vector that is not to be there: never made, or deleted."""


class Head(NamedTuple):
    """The last delta of a vector, and whether the vector is there behind it."""

    dot: Dot
    alive: bool

    def __str__(self) -> str:
        return str(self.dot) if self.alive else f"{self.dot}, which deletes it"


def producer_id_of(name: str) -> int:
    """The 44-bit producer id that a name stands for."""
    digest = blake2b(name.encode(), digest_size=8, person=b"delta-prop").digest()
    return int.from_bytes(digest, "big") >> (64 - PRODUCER_ID_BITS)


def make_origin(producer_id: int, lane: int, partition: int = 0) -> int:
    """The origin of one sequencer: 44 bits producer id, 16 bits partition, 4 bits lane."""
    assert 0 <= producer_id < 1 << PRODUCER_ID_BITS
    assert 0 <= partition < 1 << PARTITION_BITS
    assert 0 <= lane < 1 << LANE_BITS
    return producer_id << (PARTITION_BITS + LANE_BITS) | partition << LANE_BITS | lane


def origin_lane(origin: int) -> int:
    """The lane (a Priority) that an origin writes to."""
    return origin & ((1 << LANE_BITS) - 1)


def origin_partition(origin: int) -> int:
    """The partition that an origin writes to: which of several services it is that a client spreads over."""
    return origin >> LANE_BITS & ((1 << PARTITION_BITS) - 1)


def origin_producer(origin: int) -> int:
    """The 44-bit producer id of an origin."""
    return origin >> (PARTITION_BITS + LANE_BITS)


def _open_twin(slots: tuple[str, ...]) -> Any:
    """A class with the same slots that lets them be set. A frozen dataclass sets each field through
    `object.__setattr__`, which made a delta cost as much as publishing it; so a value is made as its twin,
    and is of its own class from then on.
    """
    return type("OpenTwin", (), {"__slots__": slots})


@dataclass(frozen=True, slots=True, eq=False, init=False)
class Operation:
    """One operation: its kind, and what that kind needs.

    `values` float32: the vector of create and dense, the values of sparse and sparse_add, the one
    number of scale and offset. `indices` uint32: of sparse and sparse_add. `data`: the bytes of
    opaque, of an unknown kind, the UTF-8 name of a transform.
    """

    kind: int
    values: NDArray[np.float32] | None = None
    indices: NDArray[np.uint32] | None = None
    data: bytes = b""

    def __new__(
        cls,
        kind: int,
        values: NDArray[np.float32] | None = None,
        indices: NDArray[np.uint32] | None = None,
        data: bytes = b"",
    ) -> Operation:
        """The fields, in order."""
        made = _OPEN_OPERATION()
        made.kind = kind
        made.values = values
        made.indices = indices
        made.data = data
        made.__class__ = cls
        return made  # type: ignore[no-any-return]

    def __getnewargs__(self) -> tuple[int]:
        """What a copy begins with."""
        return (self.kind,)

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


_OPEN_OPERATION = _open_twin(("kind", "values", "indices", "data"))


def _floats(values: ArrayLike) -> NDArray[np.float32]:
    try:
        array = np.asarray(values)
    except (ValueError, TypeError, OverflowError):
        array = np.empty((0, 0))
    if array.ndim != 1 or (array.size and array.dtype.kind not in "fiu"):
        from delta_prop_wire.errors import InvalidDelta

        raise InvalidDelta("values", f"{values!r:.80} is not one row of numbers: give a flat list or array")
    # A number too large for float32 becomes inf here and is refused by validation, with its field.
    with np.errstate(over="ignore", invalid="ignore"):
        return np.ascontiguousarray(array, dtype=np.float32)


def _indices(values: ArrayLike) -> NDArray[np.uint32]:
    array = np.asarray(values)
    if array.size and (array.dtype.kind not in "ui" or array.min() < 0 or array.max() > 0xFFFFFFFF):
        from delta_prop_wire.errors import InvalidDelta

        raise InvalidDelta("indices", f"{array.tolist()!r:.80} are not whole numbers from 0 to 4294967295")
    return np.ascontiguousarray(array, dtype=np.uint32).reshape(-1)


def create(vector: ArrayLike) -> Operation:
    """Set the whole vector and clear its metadata."""
    return Operation(Kind.CREATE, _floats(vector))


def dense(vector: ArrayLike) -> Operation:
    """Set the whole vector, keep its metadata."""
    return Operation(Kind.DENSE, _floats(vector))


def sparse(indices: ArrayLike, values: ArrayLike) -> Operation:
    """Set some elements of a vector."""
    return Operation(Kind.SPARSE, _floats(values), _indices(indices))


def sparse_add(indices: ArrayLike, values: ArrayLike) -> Operation:
    """Add to some elements of a vector."""
    return Operation(Kind.SPARSE_ADD, _floats(values), _indices(indices))


def scale(factor: float) -> Operation:
    """Multiply every element by `factor`."""
    return Operation(Kind.SCALE, _floats([factor]))


def offset(amount: float) -> Operation:
    """Add `amount` to every element."""
    return Operation(Kind.OFFSET, _floats([amount]))


def transform(name: str) -> Operation:
    """Apply the function registered under `name`; resolved into a dense delta before it is queued."""
    if not isinstance(name, str):
        from delta_prop_wire.errors import InvalidDelta

        raise InvalidDelta("name", f"{name!r:.80} is a {type(name).__name__}: give text")
    return Operation(Kind.TRANSFORM, data=name.encode())


def delete() -> Operation:
    """Remove the vector; a tombstone stays."""
    return Operation(Kind.DELETE)


def opaque(data: bytes) -> Operation:
    """Set the fact to these bytes: for facts that are not vectors."""
    if type(data) is bytes:
        return Operation(_OPAQUE, None, None, data)
    if not isinstance(data, bytes | bytearray | memoryview):
        from delta_prop_wire.errors import InvalidDelta

        raise InvalidDelta("data", f"{data!r:.80} is a {type(data).__name__}: give bytes")
    return Operation(Kind.OPAQUE, data=bytes(data))


def metadata_only() -> Operation:
    """Change nothing but the metadata."""
    return Operation(Kind.METADATA)


@dataclass(frozen=True, slots=True, init=False)
class Delta:
    """One change to one vector (fact).

    `id` 16 bytes, for sources without counters. `parents`: dots or 16-byte ids that must come first.
    `timestamp` hybrid: 48 bits of ms, 16 logical, information only. `metadata`: a JSON merge patch.
    `expect`: refuse with CONFLICT unless the vector's last delta is this dot; ABSENT: unless there is none.
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

    def __new__(  # noqa: PLR0917 - the fields may be given by position
        cls,
        vector_id: str,
        operation: Operation,
        namespace: str = DEFAULT_NAMESPACE,
        id: bytes | None = None,
        dot: Dot | None = None,
        parents: tuple[Dot | bytes, ...] = (),
        clock: tuple[Dot, ...] = (),
        timestamp: int = 0,
        priority: Priority = Priority.NORMAL,
        source: Source = Source.LOCAL,
        metadata: Mapping[str, Any] | None = None,
        topics: tuple[str, ...] = (),
        expect: Dot | None = None,
    ) -> Delta:
        """The fields, in order."""
        made = _OPEN_DELTA()
        made.vector_id = vector_id
        made.operation = operation
        made.namespace = namespace
        made.id = id
        made.dot = dot
        made.parents = parents
        made.clock = clock
        made.timestamp = timestamp
        made.priority = priority
        made.source = source
        made.metadata = metadata
        made.topics = topics
        made.expect = expect
        made.__class__ = cls
        return made  # type: ignore[no-any-return]

    def __getnewargs__(self) -> tuple[str, Operation]:
        """What a copy begins with."""
        return self.vector_id, self.operation


_OPEN_DELTA = _open_twin(tuple(one.name for one in fields(Delta)))


def namespace_of(vector_id: str) -> str:
    """The namespace of a source that names none: the text before the first ":", else `default`."""
    head, colon, _ = vector_id.partition(":")
    return head if colon and head else DEFAULT_NAMESPACE
