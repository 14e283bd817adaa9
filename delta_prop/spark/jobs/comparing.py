"""Computes by columns the deltas that turn one table's facts into another's.

Needs pyarrow, not Spark. Rows come sorted by namespace, vector id and table, and have the columns of
`tables.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from delta_prop.auditing.differences import diff_metadata
from delta_prop.spark.arrays import schema_of
from delta_prop.spark.jobs.pairs import FACTS, MEMBER, Pairs, is_first_of_vector, pair_rows, row_error
from delta_prop.spark.states.folding_numbers import Lists, expand_spans
from delta_prop_wire.delta import Kind
from delta_prop_wire.metadata import merge
from delta_prop_wire.topics import kind_name

DELTAS_DDL = (
    "vector_id string, namespace string, op string, vector array<float>, indices array<int>, "
    "values array<float>, data binary, metadata string"
)
DELTAS = schema_of(DELTAS_DDL)
"""Columns of deltas as they are written."""
_UNCHANGED = 255
_OPERATIONS = pa.array([kind_name(kind) for kind in range(max(Kind) + 1)], pa.string())


def compare(batches: Iterable[pa.RecordBatch], threshold: float = 0.0) -> Iterator[pa.RecordBatch]:
    """Yield the deltas. `threshold`: an old number stays if the new one differs from it by up to this.

    Raises InvalidDelta, naming table, vector id and column.
    """
    pending: pa.RecordBatch | None = None
    for batch in batches:
        if not batch.num_rows:
            continue
        rows = batch if pending is None else pa.concat_batches([pending, batch])
        last = int(is_first_of_vector(rows).nonzero()[0][-1])
        pending = rows.slice(last)  # the vector's other row may be in the next batch
        if last:
            yield _compare_rows(rows.slice(0, last), threshold)
    if pending is not None:
        yield _compare_rows(pending, threshold)


def _compare_rows(rows: pa.RecordBatch, threshold: float) -> pa.RecordBatch:
    pairs = pair_rows(rows)
    kinds, vectors, indices, values = _compare_numbers(pairs, threshold)
    _compare_data(pairs, kinds)
    patches = _make_patches(pairs)
    only_metadata = (kinds == _UNCHANGED) & patches.is_valid().to_numpy(zero_copy_only=False)
    kinds[only_metadata] = Kind.METADATA
    sources = pa.array(np.where(pairs.new >= 0, pairs.new, pairs.old))
    opaque = np.where(kinds == Kind.OPAQUE, pairs.new, -1)
    columns = {
        "vector_id": rows.column("vector_id").take(sources),
        "namespace": rows.column("namespace").take(sources),
        "op": _OPERATIONS.take(pa.array(kinds.astype(np.int32), mask=kinds == _UNCHANGED)),
        "vector": _mask_absent(vectors, np.isin(kinds, (Kind.CREATE, Kind.DENSE)), pa.float32()),
        "indices": _mask_absent(indices, kinds == Kind.SPARSE, pa.int32()),
        "values": _mask_absent(values, kinds == Kind.SPARSE, pa.float32()),
        "data": rows.column("data").take(pa.array(opaque, mask=opaque < 0)),
        "metadata": patches,
    }
    deltas = pa.RecordBatch.from_arrays([columns[name] for name in DELTAS.names], schema=DELTAS)
    return deltas.filter(pa.array(kinds != _UNCHANGED))


# --- numbers


def _compare_numbers(pairs: Pairs, threshold: float) -> tuple[NDArray[np.uint8], Lists, Lists, Lists]:
    """Return each pair's kind, the full vectors to set, and the indices and values of sparse changes."""
    old, new, vectors = pairs.old, pairs.new, pairs.vectors
    kinds = np.full(len(old), _UNCHANGED, np.uint8)
    kinds[new < 0] = Kind.DELETE
    had_vector, has_vector = (old >= 0) & pairs.has_vector[old], (new >= 0) & pairs.has_vector[new]
    kinds[has_vector & (old < 0)] = Kind.CREATE
    kinds[has_vector & (old >= 0)] = Kind.DENSE
    comparable = (had_vector & has_vector & (vectors.sizes[old] == vectors.sizes[new])).nonzero()[0]
    before, after = vectors.take(old[comparable]), vectors.take(new[comparable])
    changed = _find_changed(before.flat, after.flat, threshold)
    changed_counts = _count_flags(changed, after)
    sizes = after.sizes
    kinds[comparable[changed_counts == 0]] = _UNCHANGED
    # A change is sparse if its indices and values are together fewer numbers than the full vector.
    sparse = (changed_counts > 0) & (2 * changed_counts < sizes)
    kinds[comparable[sparse]] = Kind.SPARSE
    full = vectors.take(np.where(np.isin(kinds, (Kind.CREATE, Kind.DENSE)), new, -1))
    dense = (changed_counts > 0) & ~sparse
    final = np.where(changed, after.flat, before.flat)[expand_spans(after.bounds[:-1][dense], sizes[dense])]
    full.flat[expand_spans(full.bounds[comparable[dense]], sizes[dense])] = final
    return kinds, full, *_select_elements(len(old), comparable, after, changed & np.repeat(sparse, sizes))


def _find_changed(old: NDArray[np.float32], new: NDArray[np.float32], threshold: float) -> NDArray[np.bool_]:
    """Return a mask of the numbers that differ by more than `threshold`."""
    if threshold > 0:
        is_changed: NDArray[np.bool_] = np.abs(new.astype(np.float64) - old) > threshold
        return is_changed
    has_other_bits: NDArray[np.bool_] = new.view(np.uint32) != old.view(np.uint32)  # 0.0 is not -0.0
    return has_other_bits


def _count_flags(flags: NDArray[np.bool_], lists: Lists) -> NDArray[np.int64]:
    total = np.concatenate([[0], np.cumsum(flags)])
    counts: NDArray[np.int64] = np.diff(total[lists.bounds])
    return counts


def _select_elements(
    count: int, comparable: NDArray[np.intp], after: Lists, selected: NDArray[np.bool_]
) -> tuple[Lists, Lists]:
    """Return indices and values of the selected numbers, one list for each of `count` pairs.

    `after`: the new vectors of the `comparable` pairs; `selected`: a mask of their numbers.
    """
    sizes = np.zeros(count, np.int64)
    sizes[comparable] = _count_flags(selected, after)
    bounds = np.concatenate([[0], np.cumsum(sizes)])
    positions = selected.nonzero()[0]
    row_of = np.searchsorted(after.bounds, positions, "right") - 1
    return Lists(bounds, (positions - after.bounds[row_of]).astype(np.int32)), Lists(
        bounds, after.flat[positions]
    )


def _mask_absent(lists: Lists, is_present: NDArray[np.bool_], kind: pa.DataType) -> pa.Array:
    """Return the lists as an Arrow array, null where `is_present` is false."""
    bounds = pa.array(lists.bounds.astype(np.int32))
    return pa.ListArray.from_arrays(bounds, pa.array(lists.flat, kind), mask=pa.array(~is_present))


def _compare_data(pairs: Pairs, kinds: NDArray[np.uint8]) -> None:
    """Set the kind of facts with bytes: opaque if the bytes are new or differ, else unchanged."""
    has_new_data = (pairs.new >= 0) & pairs.has_data[pairs.new] & ~pairs.has_vector[pairs.new]
    if not has_new_data.any():
        return
    data = pairs.rows.column("data")
    old, new = (
        data.take(pa.array(rows, mask=rows < 0))
        for rows in (np.where(has_new_data, pairs.old, -1), pairs.new)
    )
    same = pc.fill_null(pc.equal(old, new), False).to_numpy(zero_copy_only=False)
    kinds[has_new_data] = np.where(same[has_new_data], _UNCHANGED, Kind.OPAQUE)


# --- metadata


def _make_patches(pairs: Pairs) -> pa.Array:
    """Return each fact's metadata change as a merge patch; null if there is none or the fact is deleted."""
    rows = pairs.rows
    names = rows.schema.names[len(FACTS) :]
    if names:
        return _join_patches(rows, pairs, names)
    patches: list[str | None] = [None] * len(pairs.new)
    column = rows.column("metadata")
    if column.null_count == len(column):
        return pa.array(patches, pa.string())
    old, new = (column.take(pa.array(side, mask=side < 0)) for side in (pairs.old, pairs.new))
    differ = ~pc.fill_null(pc.equal(old, new), False).to_numpy(zero_copy_only=False) & (pairs.new >= 0)
    differ &= ~pc.and_(old.is_null(), new.is_null()).to_numpy(zero_copy_only=False)
    for pair in differ.nonzero()[0].tolist():
        patch = diff_metadata(_read_metadata(rows, pairs.old[pair]), _read_metadata(rows, pairs.new[pair]))
        patches[pair] = json.dumps(patch, ensure_ascii=False, separators=(",", ":")) if patch else None
    return pa.array(patches, pa.string())


def _read_metadata(rows: pa.RecordBatch, row: int) -> dict[str, Any]:
    text = None if row < 0 else rows.column("metadata")[int(row)].as_py()
    if text is None:
        return {}
    try:
        metadata = json.loads(text)
    except ValueError as error:
        raise row_error(rows, row, f"metadata {text!r:.60} is not JSON: {error}") from None
    if not isinstance(metadata, dict):
        raise row_error(rows, row, f"metadata {text!r:.60} is not a JSON object: give one")
    return merge({}, metadata)


def _join_patches(rows: pa.RecordBatch, pairs: Pairs, names: Sequence[str]) -> pa.Array:
    """Return the patches of tables with a column for each member: join the members that differ."""
    in_new = pairs.new >= 0
    pieces, has_patch = [], np.zeros(len(in_new), bool)
    opening, comma, closing, empty = map(pa.scalar, ("{", ",", "}", ""))
    for name in names:
        column = rows.column(name)
        old, new = (column.take(pa.array(side, mask=side < 0)) for side in (pairs.old, pairs.new))
        removed = pa.scalar(f"{json.dumps(name.removeprefix(MEMBER), ensure_ascii=False)}:null")
        old_present, new_present = (one.is_valid().to_numpy(zero_copy_only=False) for one in (old, new))
        same = pc.fill_null(pc.equal(old, new), False).to_numpy(zero_copy_only=False)
        differs = in_new & ~same & (old_present | new_present)
        piece = pc.binary_join_element_wise(comma, pc.coalesce(new, removed), empty)
        pieces.append(pc.if_else(pa.array(differs), piece, empty))
        has_patch |= differs
    joined = pc.utf8_slice_codeunits(pc.binary_join_element_wise(*pieces, empty), 1)
    patches = pc.binary_join_element_wise(opening, joined, closing, empty)
    return pc.if_else(pa.array(has_patch), patches, pa.scalar(None, pa.string()))
