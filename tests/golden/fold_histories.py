"""The 200 histories of the golden folds: each rule of the fold alone, then random mixtures.

The module holds only values. A history's name says what it tests; the last histories are drawn from seeds.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from itertools import count
from random import Random
from typing import TYPE_CHECKING, Any

import msgpack
import numpy as np

from delta_prop_wire.delta import (
    Kind,
    Operation,
    create,
    delete,
    dense,
    metadata_only,
    offset,
    opaque,
    scale,
    sparse,
    sparse_add,
    transform,
)
from tests.wire.duplicate_keys import packed_map

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from delta_prop_wire.algebra import Key

HISTORY_COUNT = 200
NAMESPACE = "golden"
ORIGIN, OTHER, THIRD = 0x0000_0ABC_DEF0_0002, 0x0000_0ABC_DEF0_0012, 0xFFFF_FFFF_FFFF_FFF2
"""Three origins, in canonical order."""
MAX = struct.unpack("<f", bytes.fromhex("ffff7f7f"))[0]
"""The largest finite float32."""
NORMAL_MIN, DENORMAL_MIN = 2.0**-126, 2.0**-149
HALF_ULP_OF_MAX = 2.0**103


@dataclass(frozen=True, slots=True)
class Change:
    """One delta. `patch`: its metadata in msgpack. `log_only`: valid in a log, refused from a producer."""

    operation: Operation
    patch: bytes | None = None
    id: bytes | None = None
    vector_id: str = "v"
    lamport: int = 0
    origin: int = ORIGIN
    counter: int = 0
    log_only: bool = False

    @property
    def key(self) -> Key:
        """The canonical key."""
        return self.lamport, self.origin, self.counter


def change(operation: Operation, patch: dict[str, Any] | bytes | None = None, **fields: Any) -> Change:
    """Make a change. `patch`: as a dictionary or in msgpack."""
    packed = msgpack.packb(patch) if isinstance(patch, dict) else patch
    return Change(operation, packed, **fields)


def number_changes(changes: Sequence[Change]) -> list[Change]:
    """Assign the missing Lamport numbers and counters, as a log does."""
    numbered, lamport, counters = [], 0, dict[int, int]()
    for item in changes:
        lamport = item.lamport or lamport + 1
        counter = item.counter or counters.get(item.origin, 0) + 1
        counters[item.origin] = max(counter, counters.get(item.origin, 0))
        numbered.append(replace(item, lamport=lamport, counter=counter))
    return numbered


def histories() -> Iterator[tuple[str, list[Change]]]:
    """Yield all histories with their names, the same each time."""
    groups = (
        _each_operation_on_each_state,
        _rounding,
        _ends_of_the_range,
        _small_numbers,
        _zeros,
        _duplicate_indices,
        _dimensions,
        _metadata,
        _odd_metadata,
        _order,
        _duplicate_ids,
        _refused,
    )
    number = count()
    for group in groups:
        for name, changes in group():
            yield name, _with_own_ids(number_changes(changes), next(number))
    for seed in range(HISTORY_COUNT - next(number)):
        changes = number_changes(_draw_history(Random(seed)))
        yield f"mixed {seed}", _with_own_ids(changes, HISTORY_COUNT + seed)


def _with_own_ids(changes: list[Change], number: int) -> list[Change]:
    """Give each history its own ids, so that one log can hold all histories."""
    return [
        item if item.id is None else replace(item, id=struct.pack(">QQ", number, item.id[0]))
        for item in changes
    ]


NamedHistory = tuple[str, "list[Change]"]

ONE, TWO = b"\x01", b"\x02"
"""Ids, which `_with_own_ids` makes 16 bytes long."""


# --- operations and states


def _each_operation_on_each_state() -> Iterator[NamedHistory]:
    operations = {
        "create": create([4.5, -2.0]),
        "sparse": sparse([1], [9.25]),
        "dense": dense([0.125, 3.0]),
        "scale": scale(-1.5),
        "offset": offset(0.1),
        "transform": transform("double"),
        "delete": delete(),
        "sparse_add": sparse_add([0], [0.75]),
        "opaque": opaque(b"\x00row"),
        "metadata": metadata_only(),
        "unknown 10": Operation(10, data=b"\x01\x02"),
        "unknown 63": Operation(63),
    }
    metadata = {"title": "Ü", "tags": {"a": 1, "b": 2}}
    states = {
        "absent": [],
        "vector": [change(create([1.0, 2.0]), metadata)],
        "deleted": [change(create([1.0, 2.0]), metadata), change(delete(), {"why": "old"})],
        "opaque": [change(opaque(b"\xff\x00"), metadata)],
    }
    patch = {"tags": {"a": None, "c": [1, None]}, "size": 4}
    for kind_name, operation in operations.items():
        for state_name, before in states.items():
            yield f"{kind_name} on {state_name}", [*before, change(operation, patch)]
    creations = (create([7.0]), dense([7.0]), opaque(b""))
    for first in creations:
        for second in creations:
            name = f"{Kind(first.kind).name.lower()}, delete, {Kind(second.kind).name.lower()}"
            yield (
                name,
                [change(first, {"a": 1}), change(delete()), change(delete()), change(second, {"b": None})],
            )


# --- numbers


def _vector_history(*operations: Operation) -> list[Change]:
    return [change(operation) for operation in operations]


def _rounding() -> Iterator[NamedHistory]:
    big = 2.0**24
    yield "product rounds once", _vector_history(create([0.1, 1 / 3, 1.1, 16777215.0]), scale(0.3))
    yield "sum rounds once", _vector_history(create([0.1, 1 / 3, 1e8, -0.7]), offset(0.7))
    yield (
        "ties go to even",
        _vector_history(create([big, big + 2, 1 + 2**-23, 1.0]), offset(1.0), offset(2.0**-24)),
    )
    yield "each step rounds", _vector_history(create([1.0]), *[scale(1.1)] * 8, *[offset(0.1)] * 8)
    yield (
        "additions round one by one",
        _vector_history(create([big, 1.0]), sparse_add([0, 0, 1, 1], [1, 1, 1, big])),
    )
    yield (
        "above a tie by little",
        _vector_history(create([1.0, 1.0]), sparse_add([0, 1], [2**-24 + 2**-47, 2**-24])),
    )
    yield (
        "far exponents",
        _vector_history(create([1e30, 1e-30, 1.0]), offset(1e-30), offset(-1e30), scale(1e-30)),
    )
    yield "scale is not undone", _vector_history(create([0.1, 7.0, 1e-3]), scale(3), scale(1 / 3))
    yield "offset is not undone", _vector_history(create([0.1, 1e-9]), offset(1e9), offset(-1e9))


def _ends_of_the_range() -> Iterator[NamedHistory]:
    below, half_step = HALF_ULP_OF_MAX - 2.0**79, HALF_ULP_OF_MAX
    yield "product saturates", _vector_history(create([MAX, -MAX, 3e38, 1.0]), scale(2))
    yield "negative product saturates", _vector_history(create([MAX, -MAX, 3e38, 1.0]), scale(-MAX))
    yield "sum saturates", _vector_history(create([MAX, 3e38, -MAX]), offset(MAX))
    yield "negative sum saturates", _vector_history(create([-MAX, -3e38, MAX]), offset(-MAX))
    yield "half a step above the end", _vector_history(create([MAX, -MAX, MAX]), offset(half_step))
    yield (
        "less than half a step above the end",
        _vector_history(create([MAX, MAX]), sparse_add([0, 1], [below, -below])),
    )
    yield "saturated, then back", _vector_history(create([MAX, 1.0]), scale(4), scale(0.25), offset(-MAX))
    yield (
        "each addition saturates",
        _vector_history(create([MAX, 1.0]), sparse_add([0, 0, 1], [MAX, -MAX, 1])),
    )
    yield (
        "each addition saturates below",
        _vector_history(create([-MAX, 5.0]), sparse_add([0, 1, 0, 0], [-1e38, 1, 2e38, 3e38])),
    )
    yield (
        "saturated twice",
        _vector_history(create([3e38] * 3), scale(1.5), sparse_add([0, 1], [1e38, -1e38]), scale(2)),
    )
    yield (
        "the ends themselves",
        _vector_history(create([MAX, -MAX]), scale(1), offset(0), sparse_add([0], [0])),
    )
    yield (
        "additions of many deltas",
        _vector_history(
            create([2e38, 0.5]), *[sparse_add([0, 1], [1e38, 0.25])] * 3, *[sparse_add([0], [-1e38])] * 5
        ),
    )


def _small_numbers() -> Iterator[NamedHistory]:
    small = [DENORMAL_MIN, -DENORMAL_MIN, NORMAL_MIN, DENORMAL_MIN - NORMAL_MIN]
    yield (
        "denormals are kept",
        _vector_history(create(small), dense(small[::-1]), sparse([1], [DENORMAL_MIN * 3])),
    )
    yield "product of denormals", _vector_history(create(small), scale(0.5))
    yield (
        "ties of denormals go to even",
        _vector_history(create([n * DENORMAL_MIN for n in (1, 2, 3, 5)]), scale(0.5)),
    )
    yield "above half a denormal", _vector_history(create([DENORMAL_MIN, -DENORMAL_MIN]), scale(0.5000001))
    yield "a denormal factor", _vector_history(create([2.0**23, 1.0, -0.75, 2.0**100]), scale(DENORMAL_MIN))
    yield "product falls to zero", _vector_history(create([1e-30, -1e-30, 1.0]), scale(1e-30), offset(0))
    yield (
        "sum of denormals",
        _vector_history(create(small), offset(DENORMAL_MIN), sparse_add([2, 2], [-1e-40, 1e-41])),
    )
    yield (
        "normal less normal is denormal",
        _vector_history(create([1.5 * NORMAL_MIN, NORMAL_MIN]), offset(-NORMAL_MIN)),
    )
    yield (
        "small and back",
        _vector_history(create([1.0, 1.5]), scale(2.0**-140), scale(2.0**120), scale(2.0**20)),
    )


def _zeros() -> Iterator[NamedHistory]:
    yield "negative zero is set", _vector_history(create([-0.0, 0.0]), sparse([1], [-0.0]))
    yield "negative zero in dense", _vector_history(create([1.0, 1.0]), dense([0.0, -0.0]))
    yield "zero times a negative", _vector_history(create([0.0, -0.0, 3.0, -3.0]), scale(-1))
    yield "times zero", _vector_history(create([MAX, -MAX, -0.0, 1.0]), scale(0))
    yield "times negative zero", _vector_history(create([MAX, -MAX, -0.0, 0.0]), scale(-0.0))
    yield "negative zero plus zero", _vector_history(create([-0.0, -0.0, 0.0]), offset(0.0))
    yield "negative zero plus negative zero", _vector_history(create([-0.0, 0.0, 1.0]), offset(-0.0))
    yield (
        "sums that vanish",
        _vector_history(create([1.0, -1.0, -0.0]), sparse_add([0, 1, 2, 2], [-1, 1, -0.0, 0.0])),
    )


def _duplicate_indices() -> Iterator[NamedHistory]:
    start = create([1.0, 2.0, 3.0])
    yield "sparse, last one wins", _vector_history(start, sparse([1, 0, 1, 1], [5, 6, 7, 8]))
    yield "sparse, all the same", _vector_history(start, sparse([2] * 6, [6, 5, 4, 3, 2, -0.0]))
    yield "sparse_add, all count", _vector_history(start, sparse_add([1, 0, 1, 1], [0.1, 0.2, 0.3, 0.4]))
    yield "sparse_add, order counts", _vector_history(start, sparse_add([0] * 4, [1e8, 1, -1e8, 0.1]))
    yield "sparse_add, other order", _vector_history(start, sparse_add([0] * 4, [1e8, -1e8, 1, 0.1]))
    yield "sparse_add, saturated between", _vector_history(start, sparse_add([0] * 4, [MAX, MAX, -MAX, 1]))
    yield "sparse of nothing", [change(start), change(sparse([], []), {"a": 1})]
    yield "sparse_add of nothing", [change(start), change(sparse_add([], []), {"a": 1})]
    yield (
        "sparse and sparse_add in turn",
        _vector_history(
            start,
            sparse([0, 0], [1, 9]),
            sparse_add([0, 0], [1, 9]),
            sparse([0], [0.1]),
            sparse_add([0], [0.2]),
        ),
    )


def _dimensions() -> Iterator[NamedHistory]:
    """Yield histories that only a forwarder or several services can produce."""
    patch = {"seen": True}
    yield "index at the dimension", [change(create([1.0, 2.0])), change(sparse([0, 2], [5, 5]), patch)]
    yield "sum at the dimension", [change(create([1.0, 2.0])), change(sparse_add([2, 0], [5, 5]), patch)]
    yield "index far above", [change(create([1.0])), change(sparse([65_535], [5]), patch)]
    yield (
        "another dimension",
        _vector_history(
            create([1.0, 2.0]), create([1.0, 2.0, 3.0]), sparse([2], [9]), dense([4.0]), sparse_add([1], [1])
        ),
    )
    yield (
        "another dimension, all operations",
        _vector_history(
            create([1.0]),
            dense([0.1, 0.2, 0.3]),
            scale(3),
            offset(0.1),
            sparse_add([2], [1]),
            sparse([1], [0.5]),
        ),
    )
    rows = [change(create([n / 10, -n]), vector_id=f"v{n}") for n in range(6)]
    scaled = [replace(row, operation=scale(0.7)) for row in rows]
    added = [replace(row, operation=sparse_add([0, 1], [0.1, n])) for n, row in enumerate(rows)]
    yield "many facts", [*rows, *scaled, *added]
    rows = [replace(row, operation=create([n * 3e37, -MAX])) for n, row in enumerate(rows)]
    scaled = [replace(row, operation=scale(n - 2.5)) for n, row in enumerate(rows)]
    added = [replace(row, operation=sparse_add([0, 0, 1], [3e38, -3e38, -1e38])) for row in rows]
    yield "many facts at the ends of the range", [*rows, *added, *scaled]


# --- metadata


def _with_patches(*patches: dict[str, Any] | bytes) -> list[Change]:
    return [change(create([1.0])), *(change(metadata_only(), patch) for patch in patches)]


def _metadata() -> Iterator[NamedHistory]:
    yield "members are set and replaced", _with_patches({"a": 1, "b": "x"}, {"b": [1, 2], "c": True})
    yield "nil removes", _with_patches({"a": 1, "b": 2}, {"a": None, "z": None})
    yield "objects merge", _with_patches({"o": {"a": 1, "b": 2}}, {"o": {"b": None, "c": {"d": 3}}})
    yield "an object in place of a number", _with_patches({"o": 5}, {"o": {"a": 1, "b": None}})
    yield "a number in place of an object", _with_patches({"o": {"a": 1}}, {"o": 5})
    yield "an object in place of an array", _with_patches({"o": [1]}, {"o": {"a": {"b": None}}})
    yield "an empty object", _with_patches({"o": 5, "p": {"a": 1}}, {"o": {}, "p": {}, "q": {}})
    yield "arrays are replaced", _with_patches({"l": [1, 2, 3]}, {"l": [{"a": None, "b": 1}, None, []]})
    yield "nil inside a new object", _with_patches({"o": {"a": None, "b": {"c": None}}})
    yield "nothing is left", _with_patches({"a": {"b": 1}}, {"a": {"b": None}}, {"a": None})
    yield "an empty patch", _with_patches({"a": 1}, {})
    yield "create clears", [*_with_patches({"a": 1}), change(create([2.0]), {"b": None, "c": 1})]
    yield "create clears without a patch", [*_with_patches({"a": 1}), change(create([2.0]))]
    yield (
        "dense and opaque keep",
        [
            *_with_patches({"a": 1, "b": 1}),
            change(dense([2.0]), {"a": 2}),
            change(opaque(b"x"), {"b": None}),
            change(dense([3.0]), {"d": {"e": None}}),
        ],
    )
    yield "a patch without effect", [change(opaque(b"x")), change(scale(2), {"a": 1}), change(scale(2))]
    yield (
        "a patch beside numbers",
        [
            *_with_patches({"n": 0}),
            change(scale(2), {"n": 1}),
            change(offset(1), {"m": 1}),
            change(sparse([0], [3]), {"n": None}),
            change(sparse_add([0], [3]), {"k": "v"}),
        ],
    )
    yield (
        "delete clears",
        [*_with_patches({"a": 1}), change(delete(), {"b": 1}), change(opaque(b""), {"c": 1})],
    )


def _odd_metadata() -> Iterator[NamedHistory]:
    integers = {
        "least": -(1 << 63),
        "most": (1 << 64) - 1,
        "small": -33,
        "byte": 128,
        "two": 65_535,
        "four": 65_536,
    }
    yield "whole numbers", _with_patches(integers, {"least": -1, "zero": 0, "minus": -32, "more": -32_769})
    floats = {
        "zero": -0.0,
        "whole": 2.0,
        "one": 1,
        "tenth": 0.1,
        "large": 1e300,
        "least": 5e-324,
        "big": 2.0**63,
    }
    yield "floats stay floats", _with_patches(floats, {"one": 1.0, "whole": 2})
    yield (
        "floats of 32 bits",
        _with_patches(packed_map(("a", b"\xca\x3d\xcc\xcc\xcd"), ("b", b"\xca\x40\x00\x00\x00"))),
    )
    long = packed_map(("a", b"\xd3" + bytes(7) + b"\x05"), ("b", b"\xcd\x00\x01"), ("c", b"\xd9\x01x"))
    yield "longer forms than need be", _with_patches(long)
    names = {"\U0001f600": 1, "\ufffd": 2, "z": 3, "Z": 4, "": 5, "é": 6, "e\u0301": 7, "a b": 8, "\x00": 9}
    yield "names in order of their bytes", _with_patches(names, {"10": 1, "9": 2, "o": names})
    yield (
        "texts",
        _with_patches({"a": "x" * 31, "b": "x" * 32, "c": "x" * 256, "d": "\x00\u2028\U0001f600\ufeff"}),
    )
    yield "many members", _with_patches({f"k{n}": n for n in range(20)}, {"l": list(range(17)), "k3": None})
    yield (
        "names of every object",
        _with_patches({"__proto__": {"constructor": 1}, "toString": 2}, {"__proto__": {"a": 2}}),
    )
    yield "array of arrays", _with_patches({"l": [[{"b": 1, "a": [None, {"d": 1, "c": 2}]}]]})
    deep: Any = 1
    for _ in range(32):
        deep = {"x": deep}
    inner: Any = {"y": 2}
    for _ in range(31):
        inner = {"x": inner}
    yield "as deep as can be", _with_patches(deep, inner)
    one, two = msgpack.packb(1), msgpack.packb(2)
    flat = packed_map(("a", one), ("b", one), ("a", two))
    nested = packed_map(("o", packed_map(("x", one))), ("o", packed_map(("y", one), ("y", two))))
    nil = packed_map(("a", two), ("a", b"\xc0"))
    yield (
        "a key twice in a log",
        [
            change(create([1.0])),
            *(change(metadata_only(), patch, log_only=True) for patch in (flat, nested, nil)),
        ],
    )


# --- order and duplicate ids


def _keyed(unplaced: Change, lamport: int, origin: int = ORIGIN, counter: int = 0) -> Change:
    """Return a change with this canonical key; `number_changes` replaces a counter of 0."""
    return replace(unplaced, lamport=lamport, origin=origin, counter=counter)


def _order() -> Iterator[NamedHistory]:
    start, doubled, more = (
        change(create([1.0]), {"n": 0}),
        change(scale(2), {"n": 2}),
        change(offset(1), {"n": 1}),
    )
    yield "a late delta", [_keyed(start, 1), _keyed(doubled, 9), _keyed(more, 5, OTHER)]
    yield "backwards", [_keyed(doubled, 9, OTHER), _keyed(more, 5), _keyed(start, 1, THIRD)]
    yield (
        "one Lamport number, smaller origin first",
        [_keyed(start, 1), _keyed(doubled, 5, OTHER, 1), _keyed(more, 5)],
    )
    yield "origins have no sign", [_keyed(start, 1), _keyed(doubled, 5, THIRD), _keyed(more, 5, OTHER)]
    yield (
        "one Lamport number and origin",
        [_keyed(start, 1), _keyed(doubled, 5, counter=9), _keyed(more, 5, counter=8)],
    )
    large = (1 << 62) - 3
    yield "large Lamport numbers", [_keyed(start, 1), _keyed(doubled, large + 1), _keyed(more, large, OTHER)]
    yield (
        "large counters",
        [_keyed(start, 1), _keyed(doubled, 7, counter=(1 << 62) + 1), _keyed(more, 7, counter=1 << 62)],
    )
    yield (
        "a dot that comes again",
        [
            _keyed(start, 1, counter=1),
            _keyed(more, 2, counter=2),
            _keyed(doubled, 3, counter=3),
            _keyed(more, 2, counter=2),
            _keyed(doubled, 3, counter=3),
        ],
    )
    yield (
        "a late create",
        [_keyed(change(scale(2)), 4), _keyed(change(offset(1)), 6), _keyed(start, 5, OTHER)],
    )
    yield (
        "a late delete",
        [_keyed(start, 1), _keyed(doubled, 4), _keyed(change(delete()), 3, OTHER), _keyed(more, 5)],
    )
    yield (
        "late metadata",
        [
            _keyed(start, 1),
            _keyed(change(metadata_only(), {"n": 7, "o": {"b": None}}), 9),
            _keyed(change(metadata_only(), {"n": 6, "o": {"a": 1, "b": 1}}), 5, OTHER),
        ],
    )
    yield (
        "a late unknown kind",
        [_keyed(start, 1), _keyed(doubled, 4), _keyed(change(Operation(40, data=b"x")), 2, OTHER)],
    )
    yield "an unknown kind, then more", [_keyed(start, 1), _keyed(change(Operation(40)), 2), _keyed(more, 3)]


def _duplicate_ids() -> Iterator[NamedHistory]:
    start = change(create([1.0]))
    add = change(sparse_add([0], [1]), id=ONE)
    yield "two of one id", [_keyed(start, 1), _keyed(add, 3), _keyed(add, 5, OTHER)]
    yield (
        "two of one id, first one late",
        [_keyed(start, 1), _keyed(add, 5), _keyed(change(scale(2)), 4), _keyed(add, 3, OTHER)],
    )
    yield "three of one id", [_keyed(start, 1), _keyed(add, 5), _keyed(add, 3, OTHER), _keyed(add, 4, THIRD)]
    yield "two of one id at one Lamport number", [_keyed(start, 1), _keyed(add, 5, OTHER), _keyed(add, 5)]
    yield "two of one id, first one without effect", [_keyed(add, 2), _keyed(start, 3), _keyed(add, 5, OTHER)]
    yield (
        "two creates of one id",
        [
            _keyed(change(create([1.0]), {"a": 1}, id=ONE), 1),
            _keyed(change(scale(3), {"b": 1}), 2),
            _keyed(change(create([1.0]), {"a": 1}, id=ONE), 3, OTHER),
        ],
    )
    yield (
        "two deletes of one id",
        [
            _keyed(start, 1),
            _keyed(change(delete(), id=ONE), 2),
            _keyed(change(opaque(b"x")), 3),
            _keyed(change(delete(), id=ONE), 4, OTHER),
        ],
    )
    other = [replace(delta, vector_id="w") for delta in (start, add)]
    yield (
        "one id on two facts",
        [_keyed(start, 1), _keyed(add, 3), _keyed(other[0], 2, OTHER), _keyed(other[1], 4, OTHER)],
    )
    yield (
        "two ids",
        [_keyed(start, 1), _keyed(add, 3), _keyed(replace(add, id=TWO), 4), _keyed(add, 5, OTHER)],
    )


# --- refused operations


def _with_bits(operation: Operation, *words: int) -> Operation:
    """Replace the numbers of an operation by these bit patterns."""
    values = np.frombuffer(struct.pack(f"<{len(words)}I", *words), "<f4")
    return Operation(operation.kind, values, operation.indices)


def _refused() -> Iterator[NamedHistory]:
    quiet, signalling, infinite, minus = 0x7FC00000, 0xFF800001, 0x7F800000, 0xFF800000
    one = 0x3F800000
    bad = {
        "create of NaN": _with_bits(create([0, 0]), one, quiet),
        "create of infinity": _with_bits(create([0, 0]), infinite, one),
        "dense of a signalling NaN": _with_bits(dense([0, 0]), signalling, one),
        "dense of both infinities": _with_bits(dense([0, 0]), infinite, minus),
        "sparse of NaN": _with_bits(sparse([0], [0]), quiet),
        "sparse_add of infinity": _with_bits(sparse_add([0, 1], [0, 0]), one, minus),
        "scale by NaN": _with_bits(scale(0), quiet),
        "scale by infinity": _with_bits(scale(0), minus),
        "offset by infinity": _with_bits(offset(0), infinite),
    }
    start = change(create([1.0, 2.0]), {"a": 1})
    for name, operation in bad.items():
        yield f"refused: {name}", [start, change(operation, {"a": 2}), change(scale(2))]
    yield "refused: nothing else", _vector_history(bad["create of NaN"])
    for name, number in {"NaN": float("nan"), "infinity": float("inf")}.items():
        yield (
            f"refused: metadata with {name}",
            [start, change(scale(2), {"a": {"b": [number]}}), change(scale(3))],
        )


# --- random mixtures

_SPECIAL = (0, 1 << 31, 1, 0x80000001, 0x007FFFFF, 0x00800000, 0x7F7FFFFF, 0xFF7FFFFF, 0x3F800000, 0xBF800000)
_ORIGINS = (ORIGIN, ORIGIN, OTHER, THIRD)


def _draw_float(rng: Random) -> float:
    """Draw any finite number, more often one at the ends of the range or near 1."""
    choice = rng.randrange(4)
    if choice == 0:
        word = rng.choice(_SPECIAL)
    elif choice == 1:
        word = rng.getrandbits(32)
    else:
        word = rng.getrandbits(1) << 31 | (127 + rng.randrange(-4, 5)) << 23 | rng.getrandbits(23)
    if word >> 23 & 0xFF == 0xFF:
        word ^= 1 << 30
    return float(struct.unpack("<f", struct.pack("<I", word))[0])


def _draw_json(rng: Random, depth: int) -> Any:
    leaves = (None, True, 0, -5, 1 << 40, 0.5, 3.0, "", "text", [1, None, {"b": None, "a": 1}])
    if depth == 0 or rng.randrange(3):
        return rng.choice(leaves)
    return {rng.choice("abcde"): _draw_json(rng, depth - 1) for _ in range(rng.randrange(3))}


def _draw_operation(rng: Random, dimension: int) -> Operation:
    indices = [rng.randrange(dimension + (not rng.randrange(8))) for _ in range(rng.randrange(1, 5))]
    values = [_draw_float(rng) for _ in indices]
    vector = [_draw_float(rng) for _ in range(dimension)]
    return rng.choice((
        create(vector), dense(vector),
        sparse(indices, values), sparse(indices, values),
        sparse_add(indices, values), sparse_add(indices, values),
        scale(values[0]), scale(values[0]), offset(values[0]), offset(values[0]),
        delete(), opaque(rng.getrandbits(16).to_bytes(2, "big")), metadata_only(), metadata_only(),
        transform("t"), Operation(rng.randrange(10, 64), data=b"?"),
    ))  # fmt: skip


def _draw_history(rng: Random) -> list[Change]:
    """Draw deltas of two facts, some late, some with duplicate ids."""
    dimension = rng.randrange(1, 5)
    changes = [change(create([_draw_float(rng) for _ in range(dimension)]), {"a": 0})]
    for number in range(2, rng.randrange(8, 15)):
        operation = _draw_operation(rng, dimension)
        needs_patch, may_have_id = (
            operation.kind == Kind.METADATA,
            operation.kind < 10 and operation.kind != Kind.TRANSFORM,
        )
        patch = (
            {rng.choice("abcde"): _draw_json(rng, 2) for _ in range(2)}
            if needs_patch or not rng.randrange(3)
            else None
        )
        changes.append(
            change(
                operation,
                patch,
                id=bytes([rng.randrange(3)]) if may_have_id and not rng.randrange(6) else None,
                vector_id=rng.choice("vvvw"),
                lamport=max(1, 2 * number - (rng.randrange(9) if not rng.randrange(3) else 0)),
                origin=rng.choice(_ORIGINS),
            )
        )
    return changes
