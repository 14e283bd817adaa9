"""Bounds of the parts of a delta: each check names the field, the value, its bound and the cure.

Pure, and blind to how parts belong together: `validate.py` knows that.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NoReturn

import msgpack
import numpy as np

from delta_prop_wire.delta import ABSENT, AckLevel, Dot, Kind, Operation
from delta_prop_wire.errors import InvalidDelta, UsageError
from delta_prop_wire.packed_metadata import PackedMetadata, json_fault, json_fault_of
from delta_prop_wire.spec import (
    CLOCK_ENTRIES_MAX,
    COUNTER_MAX,
    DELTA_BYTES_MAX,
    DELTA_ID_BYTES,
    DIMENSION_MAX,
    METADATA_BYTES_MAX,
    METADATA_DEPTH_MAX,
    PARENTS_PER_DELTA_MAX,
    TOPIC_BYTES_MAX,
    TOPICS_PER_DELTA_MAX,
    TRANSFORM_NAME_BYTES_MAX,
)
from delta_prop_wire.topics import KIND_MAX, kind_name, kind_names

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

FLOAT_BOUND = "±3.4028235e+38 (float32)"
SPARSE_KINDS = frozenset({Kind.SPARSE, Kind.SPARSE_ADD})
UNFIT = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
"""What no name may hold: control characters and lone surrogates."""

_KIND_FIELDS: dict[int, str] = {
    Kind.CREATE: "vector",
    Kind.DENSE: "vector",
    Kind.SCALE: "factor",
    Kind.OFFSET: "amount",
    Kind.TRANSFORM: "name",
}
# How many numbers, and how many bytes of data, an operation of each kind has.
NUMBERS_MIN = [0] * (KIND_MAX + 1)
NUMBERS_MAX = [0] * (KIND_MAX + 1)
BYTES_MAX = [DELTA_BYTES_MAX] * (KIND_MAX + 1)
for _kind, _least, _most in (
    (Kind.CREATE, 1, DIMENSION_MAX),
    (Kind.DENSE, 1, DIMENSION_MAX),
    (Kind.SPARSE, 0, DELTA_BYTES_MAX // 8),
    (Kind.SPARSE_ADD, 0, DELTA_BYTES_MAX // 8),
    (Kind.SCALE, 1, 1),
    (Kind.OFFSET, 1, 1),
    (Kind.DELETE, 0, 0),
    (Kind.METADATA, 0, 0),
):
    NUMBERS_MIN[_kind], NUMBERS_MAX[_kind], BYTES_MAX[_kind] = _least, _most, 0
BYTES_MAX[Kind.TRANSFORM] = TRANSFORM_NAME_BYTES_MAX
_FEW = 40
"""Below so many numbers a Python loop is quicker than a call of numpy."""


def check_level(level: AckLevel | str) -> AckLevel:
    """The ack level, which may be given by its name. Raises UsageError."""
    if type(level) is AckLevel:
        return level
    found = AckLevel.__members__.get(level.upper()) if isinstance(level, str) else None
    if found is None and type(level) is int and level in set(AckLevel):
        found = AckLevel(level)
    if found is None:
        raise UsageError(f"ack level {level!r:.40}: give memory, logged or durable")
    return found


def check_name(field: str, name: object, bytes_max: int) -> None:
    """Refuse what is not text of 1 to `bytes_max` bytes of UTF-8 without control characters."""
    if not isinstance(name, str):
        refuse(field, f"{name!r:.60} is a {type(name).__name__}: give text")
    if name.isascii() and name.isprintable() and 0 < len(name) <= bytes_max:
        return
    found = UNFIT.search(name)
    if found:
        refuse(
            field,
            f"character {found.start()} is U+{ord(found[0]):04X}; control characters and lone surrogates "
            "are not allowed: remove it",
        )
    size = len(name.encode())
    if not 1 <= size <= bytes_max:
        refuse(
            field,
            f"{size} bytes of UTF-8; allowed are 1 to {bytes_max}: {'shorten it' if size else 'give one'}",
        )


def name_is_sound(name: str, bytes_max: int) -> bool:
    """The same question as `check_name`, answered."""
    if name.isascii() and name.isprintable():
        return 0 < len(name) <= bytes_max
    return UNFIT.search(name) is None and 0 < len(name.encode()) <= bytes_max


def check_operation(operation: Operation) -> int:
    """Refuse an operation that is not what its kind says; return the bytes of what it carries."""
    kind, values, indices, data = operation.kind, operation.values, operation.indices, operation.data
    if not isinstance(kind, int) or not 0 <= kind <= KIND_MAX:
        refuse("op", f"kind {kind!r:.40} is none of {kind_names()}, nor a number to {KIND_MAX}")
    if not isinstance(data, bytes):
        refuse("data", f"a {type(data).__name__}: give bytes")
    field = _KIND_FIELDS.get(kind, "values")
    numbers = _length(field, values, "f4")
    check_shape(kind, numbers, len(data))
    pairs = _length("indices", indices, "u4")
    if pairs != (numbers if kind in SPARSE_KINDS else 0):
        refuse(
            "indices",
            f"{pairs} indices for {numbers} values: give one index a value, and only to sparse kinds",
        )
    if numbers and values is not None and not finite(values):
        place = int(np.argmin(np.isfinite(values)))
        refuse(
            field,
            f"number {place} is {values[place]}; numbers are finite and within {FLOAT_BOUND}: "
            "clamp it or leave it out",
        )
    if pairs and indices is not None:
        check_indices(indices, DIMENSION_MAX)
    if kind == Kind.TRANSFORM:
        _check_transform(data)
    return 4 * (numbers + pairs) + len(data)


def _length(field: str, array: NDArray[Any] | None, dtype: str) -> int:
    if array is None:
        return 0
    if not isinstance(array, np.ndarray) or array.dtype.str[1:] != dtype or array.ndim != 1:
        refuse(field, f"not a flat array of {dtype}: build operations with create(), sparse() and so on")
    return len(array)


def check_shape(kind: int, numbers: int, size: int) -> None:
    """Refuse too few or too many numbers, or bytes of data, for an operation of that kind."""
    least, most = NUMBERS_MIN[kind], NUMBERS_MAX[kind]
    if not least <= numbers <= most:
        bound = str(most) if least == most else f"{least} to {most}"
        cure = "give more" if numbers < least else "give fewer"
        refuse(_KIND_FIELDS.get(kind, "values"), f"{numbers} numbers; {kind_name(kind)} has {bound}: {cure}")
    if size > BYTES_MAX[kind]:
        field = "name" if kind == Kind.TRANSFORM else "data"
        refuse(field, f"{size} bytes; {kind_name(kind)} has at most {BYTES_MAX[kind]}: give fewer")


def _check_transform(data: bytes) -> None:
    try:
        check_name("name", str(data, "utf-8"), TRANSFORM_NAME_BYTES_MAX)
    except UnicodeDecodeError as error:
        refuse("name", f"byte {error.start} is not UTF-8: give the transform's name as UTF-8")


def check_indices(indices: NDArray[np.uint32], dimension: int) -> None:
    """Refuse an index at or above the dimension."""
    if not below(indices, dimension):
        place = int(np.argmax(indices >= dimension))
        refuse(
            "indices",
            f"index {int(indices[place])} at place {place}; with {dimension} elements the highest is "
            f"{dimension - 1}: count from 0",
        )


def check_size(size: int) -> None:
    """Refuse a delta whose numbers, data and metadata are too many bytes."""
    if size > DELTA_BYTES_MAX:
        refuse(
            "delta", f"{size} bytes of numbers, data and metadata; allowed are {DELTA_BYTES_MAX}: split it"
        )


def check_metadata_given(kind: int, given: bool) -> None:
    """Refuse a delta that is to change metadata and brings none."""
    if kind == Kind.METADATA and not given:
        refuse("metadata", "missing, and a metadata delta is nothing else: give a patch, {} at least")


def check_metadata(patch: object) -> int:
    """Refuse what is not a JSON object of sound depth and size; return the bytes it takes.

    Of one that came packed those bytes count, which may be more than the shortest.
    """
    if isinstance(patch, PackedMetadata):
        check_metadata_size(len(patch.packed))
        packed_fault = json_fault_of(patch.packed)
        if packed_fault:
            refuse("metadata", packed_fault)
        return len(patch.packed)
    if not isinstance(patch, Mapping):
        refuse("metadata", f"a {type(patch).__name__}: give a JSON object")
    whole = dict(patch)
    fault = json_fault(whole, METADATA_DEPTH_MAX)
    if fault:
        refuse("metadata", fault)
    try:
        size = len(msgpack.packb(whole))
    except UnicodeEncodeError:
        refuse(
            "metadata", "text with half a character (a lone surrogate), which UTF-8 cannot hold: remove it"
        )
    check_metadata_size(size)
    return size


def check_metadata_size(size: int) -> None:
    """Refuse a patch of too many bytes."""
    if size > METADATA_BYTES_MAX:
        refuse(
            "metadata", f"{size} bytes packed; allowed are {METADATA_BYTES_MAX}: split it over several deltas"
        )


def is_id(value: object) -> bool:
    """Whether a value is a delta's id."""
    return isinstance(value, bytes) and len(value) == DELTA_ID_BYTES


def check_dot(field: str, dot: object) -> None:
    """Refuse what cannot be the identity of a delta."""
    if not isinstance(dot, Dot) or not all(type(part) is int for part in dot):
        refuse(field, f"{dot!r:.60} is not a dot: give Dot(origin, counter)")
    if not (0 <= dot.origin < 1 << 64 and 1 <= dot.counter <= COUNTER_MAX):
        refuse(
            field,
            f"origin {dot.origin}, counter {dot.counter}; an origin has 64 bits, counters run from 1 to "
            f"{COUNTER_MAX}: give a dot as an acknowledgement names it",
        )


def check_expect(dot: object) -> None:
    """Refuse what cannot be expected of a vector."""
    if dot != ABSENT:
        check_dot("expect", dot)


def check_parents(parents: Iterable[object]) -> None:
    """Refuse too many parents, and what is neither a dot nor an id."""
    parents = tuple(parents)
    check_count("parents", len(parents), PARENTS_PER_DELTA_MAX)
    for parent in parents:
        if not is_id(parent):
            check_dot("parents", parent)


def check_clock(clock: tuple[Dot, ...]) -> None:
    """Refuse too many entries, what is not a dot, and an origin named twice. The clock is not empty."""
    check_count("clock", len(clock), CLOCK_ENTRIES_MAX)
    for entry in clock:
        check_dot("clock", entry)
    origin, times = Counter(entry.origin for entry in clock).most_common(1)[0]
    if times > 1:
        refuse("clock", f"origin {origin:016x} has {times} entries: keep the highest")


def check_clock_order(clock: tuple[Dot, ...]) -> None:
    """Refuse a clock that came unsorted. (One that is handed in is sorted where it is encoded.)"""
    for one, other in pairwise(clock):
        if one.origin > other.origin:
            refuse("clock", f"origin {other.origin:016x} comes behind {one.origin:016x}: sort by origin")


def clock_is_sound(clock: tuple[Dot, ...]) -> bool:
    """The question of both, answered."""
    return (
        len(clock) <= CLOCK_ENTRIES_MAX
        and all(1 <= entry.counter <= COUNTER_MAX for entry in clock)
        and all(one.origin < other.origin for one, other in pairwise(clock))
    )


def check_topics(topics: Iterable[object]) -> None:
    """Refuse too many custom topics, and names out of bounds."""
    topics = tuple(topics)
    check_count("topics", len(topics), TOPICS_PER_DELTA_MAX)
    for topic in topics:
        check_name("topics", topic, TOPIC_BYTES_MAX)


def check_count(field: str, count: int, most: int) -> None:
    """Refuse too many entries."""
    if count > most:
        refuse(field, f"{count} entries; allowed are {most}: name fewer")


def check_whole(field: str, value: object, most: int) -> None:
    """Refuse what is not a whole number from 0 to `most`."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
        refuse(field, f"{value!r:.40} is not a whole number from 0 to {most}")


def finite(values: NDArray[np.float32]) -> bool:
    """Whether no number is infinite or NaN."""
    count = len(values)
    if count < _FEW:
        return math.isfinite(sum(values.tolist()))  # in float64, so that finite numbers have a finite sum
    return int(np.count_nonzero(np.isfinite(values))) == count  # half of what `all` takes


def below(indices: NDArray[np.uint32], bound: int) -> bool:
    """Whether all indices are below the bound."""
    count = len(indices)
    if count < _FEW:
        return count == 0 or max(indices.tolist()) < bound
    return int(indices.max()) < bound


def refuse(field: str, message: str) -> NoReturn:
    """Raise InvalidDelta."""
    raise InvalidDelta(field, message)
