"""Bounds of the parts of a delta: each check names the field, the value, its bound and the fix.

Pure. Checks each part by itself; `validate.py` checks that the parts agree.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NoReturn

import msgpack
import numpy as np

from delta_prop_wire.delta import ABSENT, AckLevel, Dot, Kind, Operation
from delta_prop_wire.errors import InvalidDelta, UsageError
from delta_prop_wire.packed_metadata import PackedMetadata, json_fault, packed_json_fault
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
    from numpy.typing import NDArray

FLOAT_BOUND = "±3.4028235e+38 (float32)"
SPARSE_KINDS = frozenset({Kind.SPARSE, Kind.SPARSE_ADD})
INVALID_CHARACTERS = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
"""Characters that no name may hold: control characters and lone surrogates."""

_KIND_FIELDS: dict[int, str] = {
    Kind.CREATE: "vector",
    Kind.DENSE: "vector",
    Kind.SCALE: "factor",
    Kind.OFFSET: "amount",
    Kind.TRANSFORM: "name",
}
# By kind: how many numbers and how many bytes of data an operation may have.
NUMBERS_MIN = [0] * (KIND_MAX + 1)
NUMBERS_MAX = [0] * (KIND_MAX + 1)
BYTES_MAX = [DELTA_BYTES_MAX] * (KIND_MAX + 1)
for _kind, _count_min, _count_max in (
    (Kind.CREATE, 1, DIMENSION_MAX),
    (Kind.DENSE, 1, DIMENSION_MAX),
    (Kind.SPARSE, 0, DELTA_BYTES_MAX // 8),
    (Kind.SPARSE_ADD, 0, DELTA_BYTES_MAX // 8),
    (Kind.SCALE, 1, 1),
    (Kind.OFFSET, 1, 1),
    (Kind.DELETE, 0, 0),
    (Kind.METADATA, 0, 0),
):
    NUMBERS_MIN[_kind], NUMBERS_MAX[_kind], BYTES_MAX[_kind] = _count_min, _count_max, 0
BYTES_MAX[Kind.TRANSFORM] = TRANSFORM_NAME_BYTES_MAX
_NUMPY_MIN = 40
"""Below this many numbers a Python loop is faster than a call of numpy."""


def check_ack_level(level: AckLevel | str) -> AckLevel:
    """Return the ack level, which may be given by its name. Raises UsageError."""
    if type(level) is AckLevel:
        return level
    parsed = AckLevel.__members__.get(level.upper()) if isinstance(level, str) else None
    if parsed is None and type(level) is int and level in set(AckLevel):
        parsed = AckLevel(level)
    if parsed is None:
        raise UsageError(f"ack level {level!r:.40}: give memory, logged or durable")
    return parsed


def check_name(field: str, name: object, bytes_max: int) -> None:
    """Raise InvalidDelta unless `name` is text of 1 to `bytes_max` bytes and has no control characters."""
    if not isinstance(name, str):
        refuse(field, f"{name!r:.60} is of type {type(name).__name__}: give text")
    if name.isascii() and name.isprintable() and 0 < len(name) <= bytes_max:
        return
    match = INVALID_CHARACTERS.search(name)
    if match:
        refuse(
            field,
            f"character {match.start()} is U+{ord(match[0]):04X}; control characters and lone surrogates "
            "are not allowed: remove it",
        )
    size = len(name.encode())
    if not 1 <= size <= bytes_max:
        refuse(
            field,
            f"{size} bytes of UTF-8; must be 1 to {bytes_max}: {'shorten it' if size else 'give one'}",
        )


def name_is_valid(name: str, bytes_max: int) -> bool:
    """True if `check_name` accepts this text."""
    if name.isascii() and name.isprintable():
        return 0 < len(name) <= bytes_max
    return INVALID_CHARACTERS.search(name) is None and 0 < len(name.encode()) <= bytes_max


def check_operation(operation: Operation) -> int:
    """Raise InvalidDelta unless an operation has what its kind requires; return its size in bytes."""
    kind, values, indices, data = operation.kind, operation.values, operation.indices, operation.data
    if not isinstance(kind, int) or not 0 <= kind <= KIND_MAX:
        refuse(
            "op", f"kind {kind!r:.40} is unknown: give one of {kind_names()}, or a number up to {KIND_MAX}"
        )
    if not isinstance(data, bytes):
        refuse("data", f"it is of type {type(data).__name__}: give bytes")
    field = _KIND_FIELDS.get(kind, "values")
    value_count = _checked_length(field, values, "f4")
    check_operand_sizes(kind, value_count, len(data))
    index_count = _checked_length("indices", indices, "u4")
    if index_count != (value_count if kind in SPARSE_KINDS else 0):
        refuse(
            "indices",
            f"{index_count} indices for {value_count} values: give a sparse operation one index per "
            "value, and other operations none",
        )
    if value_count and values is not None and not all_finite(values):
        index = int(np.argmin(np.isfinite(values)))
        refuse(
            field,
            f"number {index} is {values[index]}; must be finite and within {FLOAT_BOUND}: "
            "clamp it or leave it out",
        )
    if index_count and indices is not None:
        check_indices(indices, DIMENSION_MAX)
    if kind == Kind.TRANSFORM:
        _check_transform(data)
    return 4 * (value_count + index_count) + len(data)


def _checked_length(field: str, array: NDArray[Any] | None, dtype: str) -> int:
    if array is None:
        return 0
    if not isinstance(array, np.ndarray) or array.dtype.str[1:] != dtype or array.ndim != 1:
        refuse(field, f"not a flat array of {dtype}: build operations with create(), sparse() and so on")
    return len(array)


def check_operand_sizes(kind: int, number_count: int, data_bytes: int) -> None:
    """Raise InvalidDelta if an operation of this kind has too few or too many numbers, or too many bytes."""
    count_min, count_max = NUMBERS_MIN[kind], NUMBERS_MAX[kind]
    if not count_min <= number_count <= count_max:
        bound = str(count_max) if count_min == count_max else f"{count_min} to {count_max}"
        fix = "give more" if number_count < count_min else "give fewer"
        refuse(
            _KIND_FIELDS.get(kind, "values"), f"{number_count} numbers; {kind_name(kind)} has {bound}: {fix}"
        )
    if data_bytes > BYTES_MAX[kind]:
        field = "name" if kind == Kind.TRANSFORM else "data"
        refuse(field, f"{data_bytes} bytes; {kind_name(kind)} has up to {BYTES_MAX[kind]}: give fewer")


def _check_transform(data: bytes) -> None:
    try:
        check_name("name", str(data, "utf-8"), TRANSFORM_NAME_BYTES_MAX)
    except UnicodeDecodeError as error:
        refuse("name", f"byte {error.start} is not UTF-8: give the transform's name as UTF-8")


def check_indices(indices: NDArray[np.uint32], dimension: int) -> None:
    """Raise InvalidDelta if an index is at or above the dimension."""
    if not all_below(indices, dimension):
        position = int(np.argmax(indices >= dimension))
        refuse(
            "indices",
            f"index {int(indices[position])} at position {position}; with {dimension} elements the highest "
            f"is {dimension - 1}: count from 0",
        )


def check_size(size: int) -> None:
    """Raise InvalidDelta if a delta's numbers, data and metadata take too many bytes."""
    if size > DELTA_BYTES_MAX:
        refuse(
            "delta",
            f"{size} bytes of numbers, data and metadata; the maximum is {DELTA_BYTES_MAX}: split it",
        )


def check_metadata_present(kind: int, has_metadata: bool) -> None:
    """Raise InvalidDelta if a metadata delta has no metadata."""
    if kind == Kind.METADATA and not has_metadata:
        refuse("metadata", "missing; a metadata delta carries nothing else: give a patch, at least {}")


def check_metadata(patch: object) -> int:
    """Raise InvalidDelta unless `patch` is a JSON object within depth and size; return its packed size.

    For a patch that arrived packed this is the received size, even if it could be packed shorter.
    """
    if isinstance(patch, PackedMetadata):
        check_metadata_size(len(patch.packed))
        packed_fault = packed_json_fault(patch.packed)
        if packed_fault:
            refuse("metadata", packed_fault)
        return len(patch.packed)
    if not isinstance(patch, Mapping):
        refuse("metadata", f"it is of type {type(patch).__name__}: give a JSON object")
    patch_map = dict(patch)
    fault = json_fault(patch_map, METADATA_DEPTH_MAX)
    if fault:
        refuse("metadata", fault)
    try:
        size = len(msgpack.packb(patch_map))
    except UnicodeEncodeError:
        refuse(
            "metadata", "text with a lone surrogate (half a character), which UTF-8 cannot hold: remove it"
        )
    check_metadata_size(size)
    return size


def check_metadata_size(size: int) -> None:
    """Raise InvalidDelta if a patch has too many bytes."""
    if size > METADATA_BYTES_MAX:
        refuse(
            "metadata",
            f"{size} bytes packed; the maximum is {METADATA_BYTES_MAX}: split it over several deltas",
        )


def is_id(value: object) -> bool:
    """True if a value can be a delta's id: bytes of the right length."""
    return isinstance(value, bytes) and len(value) == DELTA_ID_BYTES


def check_dot(field: str, dot: object) -> None:
    """Raise InvalidDelta unless `dot` can be the identity of a delta."""
    if not isinstance(dot, Dot) or not all(type(part) is int for part in dot):
        refuse(field, f"{dot!r:.60} is not a dot: give Dot(origin, counter)")
    if not (0 <= dot.origin < 1 << 64 and 1 <= dot.counter <= COUNTER_MAX):
        refuse(
            field,
            f"origin {dot.origin}, counter {dot.counter}; an origin has 64 bits, counters run from 1 to "
            f"{COUNTER_MAX}: copy the dot from an acknowledgement",
        )


def check_expect(dot: object) -> None:
    """Raise InvalidDelta unless `dot` can be expected of a vector: a dot or ABSENT."""
    if dot != ABSENT:
        check_dot("expect", dot)


def check_parents(parents: Iterable[object]) -> None:
    """Raise InvalidDelta if there are too many parents, or one is neither a dot nor an id."""
    parents = tuple(parents)
    check_count("parents", len(parents), PARENTS_PER_DELTA_MAX)
    for parent in parents:
        if not is_id(parent):
            check_dot("parents", parent)


def check_clock(clock: tuple[Dot, ...]) -> None:
    """Raise InvalidDelta if there are too many entries, one is not a dot, or an origin occurs twice.

    Requires at least one entry.
    """
    check_count("clock", len(clock), CLOCK_ENTRIES_MAX)
    for entry in clock:
        check_dot("clock", entry)
    origin, entry_count = Counter(entry.origin for entry in clock).most_common(1)[0]
    if entry_count > 1:
        refuse("clock", f"origin {origin:016x} has {entry_count} entries: keep the highest one")


def check_clock_order(clock: tuple[Dot, ...]) -> None:
    """Raise InvalidDelta if a received clock is not sorted. (The encoder sorts a caller's clock.)"""
    for entry, following in pairwise(clock):
        if entry.origin > following.origin:
            refuse("clock", f"origin {following.origin:016x} comes after {entry.origin:016x}: sort by origin")


def clock_is_valid(clock: tuple[Dot, ...]) -> bool:
    """True if `check_clock` and `check_clock_order` accept this clock."""
    return (
        len(clock) <= CLOCK_ENTRIES_MAX
        and all(1 <= entry.counter <= COUNTER_MAX for entry in clock)
        and all(entry.origin < following.origin for entry, following in pairwise(clock))
    )


def check_topics(topics: Iterable[object]) -> None:
    """Raise InvalidDelta if there are too many custom topics, or a name is out of bounds."""
    topics = tuple(topics)
    check_count("topics", len(topics), TOPICS_PER_DELTA_MAX)
    for topic in topics:
        check_name("topics", topic, TOPIC_BYTES_MAX)


def check_count(field: str, count: int, maximum: int) -> None:
    """Raise InvalidDelta if there are more than `maximum` entries."""
    if count > maximum:
        refuse(field, f"{count} entries; the maximum is {maximum}: name fewer")


def check_integer(field: str, value: object, maximum: int) -> None:
    """Raise InvalidDelta unless `value` is a whole number from 0 to `maximum`."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= maximum:
        refuse(field, f"{value!r:.40}: give a whole number from 0 to {maximum}")


def all_finite(values: NDArray[np.float32]) -> bool:
    """True if no number is infinite or NaN."""
    count = len(values)
    if count < _NUMPY_MIN:
        # A sum in float64 of finite float32 numbers is finite.
        return math.isfinite(sum(values.tolist()))
    return int(np.count_nonzero(np.isfinite(values))) == count  # takes half the time of `all`


def all_below(indices: NDArray[np.uint32], bound: int) -> bool:
    """True if all indices are below the bound."""
    count = len(indices)
    if count < _NUMPY_MIN:
        return count == 0 or max(indices.tolist()) < bound
    return int(indices.max()) < bound


def refuse(field: str, message: str) -> NoReturn:
    """Raise InvalidDelta for this field."""
    raise InvalidDelta(field, message)
