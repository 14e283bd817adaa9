"""Two tables' facts, side by side, become the deltas that make the one of the other. By columns.

Needs pyarrow, not Spark. Rows come sorted by namespace, vector id and table, those of a vector one behind the
other; `tables.py` has made them alike.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from delta_prop.auditing.differences import patch_between
from delta_prop.spark.jobs.pairs import FACTS, MEMBER, Pairs, fault, first_of_vector, paired
from delta_prop.spark.states.folding_numbers import Lists, spans
from delta_prop_wire.delta import Kind
from delta_prop_wire.metadata import merge
from delta_prop_wire.topics import kind_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

DELTAS = pa.schema(
    [
        pa.field("vector_id", pa.string()),
        pa.field("namespace", pa.string()),
        pa.field("op", pa.string()),
        pa.field("vector", pa.list_(pa.float32())),
        pa.field("indices", pa.list_(pa.int32())),
        pa.field("values", pa.list_(pa.float32())),
        pa.field("data", pa.binary()),
        pa.field("metadata", pa.string()),
    ]
)
"""Deltas as they are written."""
DELTAS_DDL = (
    "vector_id string, namespace string, op string, vector array<float>, indices array<int>, "
    "values array<float>, data binary, metadata string"
)
_NOTHING = 255
_OPERATIONS = pa.array([kind_name(kind) for kind in range(max(Kind) + 1)], pa.string())


def compare(batches: Iterable[pa.RecordBatch], threshold: float = 0.0) -> Iterator[pa.RecordBatch]:
    """The deltas. `threshold`: numbers that differ by no more are the same, and stay the old ones exactly.

    Raises InvalidDelta, naming table, vector id and column.
    """
    waiting: pa.RecordBatch | None = None
    for some in batches:
        if not some.num_rows:
            continue
        rows = some if waiting is None else pa.concat_batches([waiting, some])
        last = int(first_of_vector(rows).nonzero()[0][-1])
        waiting = rows.slice(last)  # its vector may go on in the next batch
        if last:
            yield _compared(rows.slice(0, last), threshold)
    if waiting is not None:
        yield _compared(waiting, threshold)


def _compared(rows: pa.RecordBatch, threshold: float) -> pa.RecordBatch:
    pairs = paired(rows)
    kinds, vectors, indices, values = _numbers(pairs, threshold)
    _compare_data(pairs, kinds)
    patches = _patches(pairs)
    only = (kinds == _NOTHING) & patches.is_valid().to_numpy(zero_copy_only=False)
    kinds[only] = Kind.METADATA
    told = pa.array(np.where(pairs.new >= 0, pairs.new, pairs.old))
    opaque = np.where(kinds == Kind.OPAQUE, pairs.new, -1)
    columns = {
        "vector_id": rows.column("vector_id").take(told),
        "namespace": rows.column("namespace").take(told),
        "op": _OPERATIONS.take(pa.array(kinds.astype(np.int32), mask=kinds == _NOTHING)),
        "vector": _present(vectors, np.isin(kinds, (Kind.CREATE, Kind.DENSE)), pa.float32()),
        "indices": _present(indices, kinds == Kind.SPARSE, pa.int32()),
        "values": _present(values, kinds == Kind.SPARSE, pa.float32()),
        "data": rows.column("data").take(pa.array(opaque, mask=opaque < 0)),
        "metadata": patches,
    }
    found = pa.RecordBatch.from_arrays([columns[name] for name in DELTAS.names], schema=DELTAS)
    return found.filter(pa.array(kinds != _NOTHING))


# --- numbers


def _numbers(pairs: Pairs, threshold: float) -> tuple[NDArray[np.uint8], Lists, Lists, Lists]:
    """Kinds of what is to be done to vectors, the whole ones that are to be set, what of others is to be."""
    old, new, vectors = pairs.old, pairs.new, pairs.vectors
    kinds = np.full(len(old), _NOTHING, np.uint8)
    kinds[new < 0] = Kind.DELETE
    had, has = (old >= 0) & pairs.has_vector[old], (new >= 0) & pairs.has_vector[new]
    kinds[has & (old < 0)] = Kind.CREATE
    kinds[has & (old >= 0)] = Kind.DENSE
    alike = (had & has & (vectors.sizes[old] == vectors.sizes[new])).nonzero()[0]
    before, after = vectors.taken(old[alike]), vectors.taken(new[alike])
    changed = _differ(before.flat, after.flat, threshold)
    count = _sums(changed, after)
    sizes = after.sizes
    kinds[alike[count == 0]] = _NOTHING
    few = (count > 0) & (2 * count < sizes)  # an index and a number for each of some, or a number for all
    kinds[alike[few]] = Kind.SPARSE
    whole = vectors.taken(np.where(np.isin(kinds, (Kind.CREATE, Kind.DENSE)), new, -1))
    many = (count > 0) & ~few
    kept = np.where(changed, after.flat, before.flat)[spans(after.bounds[:-1][many], sizes[many])]
    whole.flat[spans(whole.bounds[alike[many]], sizes[many])] = kept
    return kinds, whole, *_parts(len(old), alike, after, changed & np.repeat(few, sizes))


def _differ(old: NDArray[np.float32], new: NDArray[np.float32], threshold: float) -> NDArray[np.bool_]:
    if threshold > 0:
        found: NDArray[np.bool_] = np.abs(new.astype(np.float64) - old) > threshold
        return found
    bits: NDArray[np.bool_] = new.view(np.uint32) != old.view(np.uint32)  # 0.0 is not -0.0
    return bits


def _sums(flags: NDArray[np.bool_], of: Lists) -> NDArray[np.int64]:
    """How many flags each list has."""
    total = np.concatenate([[0], np.cumsum(flags)])
    found: NDArray[np.int64] = np.diff(total[of.bounds])
    return found


def _parts(
    count: int, alike: NDArray[np.intp], after: Lists, chosen: NDArray[np.bool_]
) -> tuple[Lists, Lists]:
    """Indices and values of the numbers that are chosen, a list a vector."""
    sizes = np.zeros(count, np.int64)
    sizes[alike] = _sums(chosen, after)
    bounds = np.concatenate([[0], np.cumsum(sizes)])
    places = chosen.nonzero()[0]
    of = np.searchsorted(after.bounds, places, "right") - 1
    return Lists(bounds, (places - after.bounds[of]).astype(np.int32)), Lists(bounds, after.flat[places])


def _present(lists: Lists, there: NDArray[np.bool_], kind: pa.DataType) -> pa.Array:
    """The lists, null where they are not there."""
    bounds = pa.array(lists.bounds.astype(np.int32))
    return pa.ListArray.from_arrays(bounds, pa.array(lists.flat, kind), mask=pa.array(~there))


def _compare_data(pairs: Pairs, kinds: NDArray[np.uint8]) -> None:
    """Whatever has bytes now and had others, or none, gets them."""
    has = (pairs.new >= 0) & pairs.has_data[pairs.new] & ~pairs.has_vector[pairs.new]
    if not has.any():
        return
    data = pairs.rows.column("data")
    old, new = (
        data.take(pa.array(rows, mask=rows < 0)) for rows in (np.where(has, pairs.old, -1), pairs.new)
    )
    same = pc.fill_null(pc.equal(old, new), False).to_numpy(zero_copy_only=False)
    kinds[has] = np.where(same[has], _NOTHING, Kind.OPAQUE)


# --- metadata


def _patches(pairs: Pairs) -> pa.Array:
    """What each vector's metadata become, as a merge patch; null where they stay, or all goes."""
    rows = pairs.rows
    names = rows.schema.names[len(FACTS) :]
    if names:
        return _joined(rows, pairs, names)
    found: list[str | None] = [None] * len(pairs.new)
    column = rows.column("metadata")
    if column.null_count == len(column):
        return pa.array(found, pa.string())
    old, new = (column.take(pa.array(at, mask=at < 0)) for at in (pairs.old, pairs.new))
    differ = ~pc.fill_null(pc.equal(old, new), False).to_numpy(zero_copy_only=False) & (pairs.new >= 0)
    differ &= ~pc.and_(old.is_null(), new.is_null()).to_numpy(zero_copy_only=False)
    for at in differ.nonzero()[0].tolist():
        patch = patch_between(_read(rows, pairs.old[at]), _read(rows, pairs.new[at]))
        found[at] = json.dumps(patch, ensure_ascii=False, separators=(",", ":")) if patch else None
    return pa.array(found, pa.string())


def _read(rows: pa.RecordBatch, row: int) -> dict[str, Any]:
    text = None if row < 0 else rows.column("metadata")[int(row)].as_py()
    if text is None:
        return {}
    try:
        told = json.loads(text)
    except ValueError as error:
        raise fault(rows, row, f"metadata {text!r:.60} is no JSON: {error}") from None
    if not isinstance(told, dict):
        raise fault(rows, row, f"metadata {text!r:.60} is no object")
    return merge({}, told)


def _joined(rows: pa.RecordBatch, pairs: Pairs, names: Sequence[str]) -> pa.Array:
    """The patches where each of the metadata has a column: those that differ, one beside the other."""
    there = pairs.new >= 0
    pieces, some = [], np.zeros(len(there), bool)
    begin, comma, end, nothing = map(pa.scalar, ("{", ",", "}", ""))
    for name in names:
        column = rows.column(name)
        old, new = (column.take(pa.array(at, mask=at < 0)) for at in (pairs.old, pairs.new))
        gone = pa.scalar(f"{json.dumps(name.removeprefix(MEMBER), ensure_ascii=False)}:null")
        was, now = (one.is_valid().to_numpy(zero_copy_only=False) for one in (old, new))
        same = pc.fill_null(pc.equal(old, new), False).to_numpy(zero_copy_only=False)
        differs = there & ~same & (was | now)
        piece = pc.binary_join_element_wise(comma, pc.coalesce(new, gone), nothing)
        pieces.append(pc.if_else(pa.array(differs), piece, nothing))
        some |= differs
    joined = pc.utf8_slice_codeunits(pc.binary_join_element_wise(*pieces, nothing), 1)
    whole = pc.binary_join_element_wise(begin, joined, end, nothing)
    return pc.if_else(pa.array(some), whole, pa.scalar(None, pa.string()))
