"""Compares a sink's vectors with the log's states: finds each difference, its reason and its repair.

Needs pyarrow, not Spark. It compares a bucket at a time: the sink's states and the log's changes. A sink is
compared up to its cursor: deltas after it do not count as missing.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Iterator
from typing import Any, NamedTuple

import msgpack
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from delta_prop.auditing.differences import LogState, SinkRow, Verdict, classify, make_difference
from delta_prop.spark.arrays import schema_of
from delta_prop.spark.states.buckets import SINK_STATES, UNORDERED, ChangeBuffer, unpack_blobs
from delta_prop.spark.states.changes import CHANGES, STATE
from delta_prop.spark.states.folding import column_of, fold
from delta_prop.spark.states.folding_numbers import Lists
from delta_prop.spark.states.folding_rows import state_of_row
from delta_prop.spark.states.storage_rows import UNKNOWN_METADATA
from delta_prop_wire.delta import Kind

DIFFERENCES_DDL = (
    "namespace string not null, vector_id string not null, difference string not null, "
    "reason string not null, op string, vector array<float>, data binary, metadata string, "
    "origin string, counter long"
)
DIFFERENCES = schema_of(DIFFERENCES_DDL)
"""`op`, `vector`, `data`, `metadata`: the delta that repairs the difference. `origin`, `counter`: the log's
last delta of the vector, on which the repair depends; null if there is none. A vector with quarantined deltas
gets no repair, as the quarantine would hold the repair, too.
"""


def find_differences(
    blobs: Iterable[pa.RecordBatch], sink_offset: int, quarantined: Container[str] = ()
) -> Iterator[pa.RecordBatch]:
    """Yield the differences between a bucket's states of the sink and the log's states of its vectors.

    The comparison is up to `sink_offset`; a row of the sink that is ahead of this offset is compared up to
    its own last delta. The blobs come sorted by `first`. `quarantined`: vectors with deltas in the sink's
    quarantine.
    """
    buffer, sink_batches, later_batches = ChangeBuffer(), [], []
    for first, changes in unpack_blobs(blobs):
        buffer.in_order = buffer.in_order and first != UNORDERED
        if first == SINK_STATES:
            sink_batches.append(changes)
            continue
        is_later = changes.column("offset").to_numpy() >= sink_offset
        is_later &= changes.column("kind").to_numpy() < STATE
        if is_later.any():
            later_batches.append(changes.filter(pa.array(is_later)))
        if not is_later.all():
            buffer.add(changes.filter(pa.array(~is_later)))
    sink, later_changes = (
        pa.Table.from_batches(batches, CHANGES).combine_chunks() for batches in (sink_batches, later_batches)
    )
    log = fold(pa.concat_tables([buffer.table(), _select_applied(later_changes, sink)]))
    row_differences = list(_compare(_StateColumns(log), _StateColumns(sink)))
    if row_differences:
        keys = pa.array([one.key for one in row_differences], pa.string())
        all_changes = pa.concat_tables([buffer.table(), later_changes])
        present = fold(all_changes.filter(pc.is_in(all_changes.column("key"), keys)))
        yield _to_batch(row_differences, {row["key"]: row for row in present.to_pylist()}, quarantined)


def _select_applied(changes: pa.Table, sink: pa.Table) -> pa.Table:
    """Return the changes after the cursor that the sink's rows include."""
    if not changes.num_rows or not sink.num_rows:
        return changes.slice(0, 0)
    sink_rows = pc.index_in(changes.column("key"), value_set=sink.column("key"))
    last_offsets = sink.column("offset").take(pc.fill_null(sink_rows, 0))
    return changes.filter(
        pc.and_(sink_rows.is_valid(), pc.less_equal(changes.column("offset"), last_offsets))
    )


class _RowDifference(NamedTuple):
    """Key, verdict and sink row of a differing vector."""

    key: str
    verdict: Verdict
    sink_row: SinkRow | None


class _StateColumns:
    """Columns of a table of states, each converted once."""

    def __init__(self, table: pa.Table) -> None:
        self.table = table
        self.keys = column_of(table, "key")
        self.kinds = column_of(table, "kind").to_numpy() & np.uint8(STATE - 1)
        self.values = Lists.of(column_of(table, "values"))
        self.data = column_of(table, "data")
        self.patches = column_of(table, "patch")
        self.alive = self.kinds != Kind.DELETE
        self.canonical = np.stack(
            [column_of(table, name).to_numpy() for name in ("lamport", "origin", "counter")], axis=1
        )
        self.offsets = column_of(table, "offset").to_numpy()

    def log_state(self, row: int) -> LogState:
        """Return a row as the log's state of a vector."""
        return LogState(state_of_row(self._row(row)), int(self.offsets[row]))

    def sink_row(self, row: int) -> SinkRow:
        """Return a row as a sink's row."""
        fields = self._row(row)
        kind = Kind(fields["kind"] & ~STATE)
        vector = np.array(fields["values"], np.float32) if kind is Kind.CREATE else None
        has_metadata = fields["patch"] != UNKNOWN_METADATA
        metadata = _unpack(fields["patch"]) if has_metadata else {}
        key = (fields["lamport"], fields["origin"], fields["counter"]) if fields["lamport"] else None
        return SinkRow(kind, vector, fields["data"] or b"", metadata, key, fields["offset"], has_metadata)

    def _row(self, row: int) -> dict[str, Any]:
        fields: dict[str, Any] = self.table.slice(row, 1).to_pylist()[0]
        return fields


def _compare(log: _StateColumns, sink: _StateColumns) -> Iterator[_RowDifference]:
    """Yield the differences: find the differing rows by columns, then classify each of them."""
    sink_rows = pc.index_in(log.keys, value_set=sink.keys)
    in_sink = sink_rows.is_valid().to_numpy(zero_copy_only=False)
    rows = pc.fill_null(sink_rows, -1).to_numpy()
    for row in (~in_sink & log.alive).nonzero()[0].tolist():
        yield _classify_row(log.keys[row].as_py(), log.log_state(row), None)
    in_log = np.zeros(len(sink.alive), bool)
    in_log[rows[in_sink]] = True
    for sink_row in (~in_log & sink.alive).nonzero()[0].tolist():
        yield _classify_row(sink.keys[sink_row].as_py(), None, sink.sink_row(sink_row))
    pairs = in_sink.nonzero()[0]
    for row in pairs[_find_different(log, sink, pairs, rows[pairs])].tolist():
        yield _classify_row(log.keys[row].as_py(), log.log_state(row), sink.sink_row(int(rows[row])))


def _classify_row(key: str, log_state: LogState | None, sink_row: SinkRow | None) -> _RowDifference:
    verdict = classify(log_state, sink_row)
    assert verdict is not None, key
    return _RowDifference(key, verdict, sink_row)


def _find_different(
    log: _StateColumns, sink: _StateColumns, log_rows: NDArray[np.intp], sink_rows: NDArray[np.intp]
) -> NDArray[np.bool_]:
    """Return a mask of the vectors that differ, given the rows of each in the log and in the sink."""
    log_keys, sink_keys = log.canonical[log_rows], sink.canonical[sink_rows]
    has_delta = sink_keys[:, 0] > 0  # without the sink's last delta, only the content is compared
    same = (log_keys == sink_keys).all(axis=1) | ~has_delta
    same &= _has_same_content(log, sink, log_rows, sink_rows)
    is_different: NDArray[np.bool_] = (log.alive[log_rows] | sink.alive[sink_rows]) & ~same
    return is_different


def _has_same_content(
    log: _StateColumns, sink: _StateColumns, log_rows: NDArray[np.intp], sink_rows: NDArray[np.intp]
) -> NDArray[np.bool_]:
    """Return a mask of the vectors with the same kind, numbers, bytes and metadata in both tables."""
    same: NDArray[np.bool_] = log.kinds[log_rows] == sink.kinds[sink_rows]
    same &= log.values.sizes[log_rows] == sink.values.sizes[sink_rows]
    comparable = same.nonzero()[0]
    log_values, sink_values = log.values.take(log_rows[comparable]), sink.values.take(sink_rows[comparable])
    differing_before = np.concatenate(
        [[0], np.cumsum(log_values.flat.view(np.uint32) != sink_values.flat.view(np.uint32))]
    )
    same[comparable] &= np.diff(differing_before[log_values.bounds]) == 0
    left, right = pa.array(log_rows), pa.array(sink_rows)
    same &= pc.equal(log.data.take(left), sink.data.take(right)).to_numpy(zero_copy_only=False)
    patches = log.patches.take(left), sink.patches.take(right)
    equal = pc.fill_null(pc.equal(*patches), False).to_numpy(zero_copy_only=False)
    equal |= pc.and_(*(one.is_null() for one in patches)).to_numpy(zero_copy_only=False)
    equal |= pc.fill_null(pc.equal(patches[1], UNKNOWN_METADATA), False).to_numpy(zero_copy_only=False)
    for pair in (same & ~equal).nonzero()[0].tolist():  # members may have another order
        same[pair] = _to_canonical(patches[0][pair].as_py()) == _to_canonical(patches[1][pair].as_py())
    return same


def _to_canonical(packed: bytes | None) -> str | None:
    """Return metadata as JSON with sorted keys; None if they cannot be read."""
    metadata = _unpack(packed)
    return None if metadata is None else json.dumps(metadata, sort_keys=True)


def _unpack(packed: bytes | None) -> dict[str, Any] | None:
    if packed is None:
        return {}
    try:
        return dict(msgpack.unpackb(packed, strict_map_key=True))
    except ValueError:
        return None


def _to_batch(
    row_differences: list[_RowDifference], present: dict[str, dict[str, Any]], quarantined: Container[str]
) -> pa.RecordBatch:
    rows = []
    for one in row_differences:
        namespace, _, vector_id = one.key.partition("\0")
        present_row = present.get(one.key)
        state = None if present_row is None else state_of_row(present_row)
        difference = make_difference(
            (namespace, vector_id), one.verdict, one.sink_row, state, is_quarantined=one.key in quarantined
        )
        rows.append(difference._asdict())
    return pa.RecordBatch.from_pylist(rows, schema=DIFFERENCES)
