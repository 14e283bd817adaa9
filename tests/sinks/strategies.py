"""Strategies for random histories: local and forwarded batches, mixed kinds, few vectors, extreme numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st

from delta_prop_wire.delta import (
    Delta,
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
from tests.sinks.support import FakeLog

if TYPE_CHECKING:
    from delta_prop_wire.batch import Batch

DIMENSION = 3
REMOTE = (0x20, 0xF000_0000_0000_0030)

numbers = st.sampled_from([0.0, 1.0, -1.0, 0.5, 0.1, -7.3, 1e-38, 3e38, -3e38])
full_vectors = st.lists(numbers, min_size=DIMENSION, max_size=DIMENSION)
sparse_pairs = st.lists(st.tuples(st.integers(0, DIMENSION), numbers), max_size=3)  # index 3 has no effect


def _sparse(make_operation: Any, changes: list[tuple[int, float]]) -> Any:
    return make_operation([index for index, _ in changes], [value for _, value in changes])


operations = st.one_of(
    full_vectors.map(create),
    full_vectors.map(dense),
    sparse_pairs.map(lambda changes: _sparse(sparse, changes)),
    sparse_pairs.map(lambda changes: _sparse(sparse_add, changes)),
    numbers.map(scale),
    numbers.map(offset),
    st.just(delete()),
    st.binary(max_size=3).map(opaque),
    st.just(metadata_only()),
)
patches = st.one_of(
    st.none(),
    st.dictionaries(
        st.sampled_from("xyz"),
        st.one_of(st.none(), st.integers(0, 3), st.dictionaries(st.sampled_from("pq"), st.integers(0, 3))),
        max_size=2,
    ),
)
deltas = st.builds(
    Delta,
    vector_id=st.sampled_from(["a", "b", "c"]),
    operation=operations,
    namespace=st.sampled_from(["default", "default", "other"]),
    metadata=patches,
)


@st.composite
def rows_of_one_kind(draw: st.DrawFn) -> list[Delta]:
    """Draw rows of one kind, enough of them for the fast path."""
    kind = draw(st.sampled_from(["create", "dense", "sparse", "sparse_add", "scale", "offset", "delete"]))
    count = draw(st.integers(5, 9))
    width = draw(st.integers(0, 3))
    indices = st.lists(st.integers(0, DIMENSION - 1), min_size=width, max_size=width)
    values = st.lists(numbers, min_size=width, max_size=width)
    operations_by_kind = {
        "create": full_vectors.map(create),
        "dense": full_vectors.map(dense),
        "sparse": st.builds(sparse, indices, values),
        "sparse_add": st.builds(sparse_add, indices, values),
        "scale": numbers.map(scale),
        "offset": numbers.map(offset),
        "delete": st.just(delete()),
    }
    names = st.sampled_from(["a", "b", "c", *(f"v{i}" for i in range(8))])
    rows = draw(st.lists(st.tuples(names, operations_by_kind[kind]), min_size=count, max_size=count))
    return [Delta(name, operation) for name, operation in rows]


batches = st.one_of(st.lists(deltas, min_size=1, max_size=4), rows_of_one_kind())
wider_vectors = st.lists(numbers, min_size=DIMENSION + 1, max_size=DIMENSION + 1)
IDS = [bytes([number]) * 16 for number in range(9)]


@st.composite
def logs(draw: st.DrawFn, *, with_forwarded: bool = True) -> FakeLog:
    """Draw a log of up to 6 batches; forwarded ones with any Lamport number, known ids, other dimensions."""
    log = FakeLog()
    for content in draw(st.lists(batches, min_size=1, max_size=6)):
        if with_forwarded and draw(st.booleans()):
            rows = _with_ids(draw, content)
            if draw(st.integers(0, 3)) == 0:
                rows[0] = replace(
                    rows[0], operation=draw(wider_vectors.map(create) | wider_vectors.map(dense))
                )
            log.forward(_remote_batch(log, draw(st.sampled_from(REMOTE)), rows), draw(st.integers(1, 60)))
        else:
            rows = _with_ids(draw, content) if with_forwarded else content
            # The service would log a no-op for a known id, so these rows get no ids.
            has_known_id = any(row.id in log.ids for row in rows)
            log.append(*(content if has_known_id else rows))
    return log


def _with_ids(draw: st.DrawFn, rows: list[Delta]) -> list[Delta]:
    if draw(st.booleans()):
        return list(rows)
    ids = draw(st.permutations(IDS))
    return [replace(row, id=id_) for row, id_ in zip(rows, ids, strict=False)]


def _remote_batch(log: FakeLog, origin: int, content: list[Delta]) -> Batch:
    base = log.counters.get(origin, 0) + 1
    log.counters[origin] = base + len(content) - 1
    return encode_batch(content, origin=origin, base=base)
