"""What a sink holds beside what the log makes of the same vectors: each difference, why, and what mends it.

Needs pyarrow, not Spark. A bucket at a time: the states that the sink holds, and the log's changes. A sink is
held to what it has come to; what the log has behind that is not missing.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

import msgpack
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from delta_prop.auditing.differences import Held, Known, Verdict, difference, judge
from delta_prop.spark.states.buckets import HELD, UNORDERED, Gathering, pieces
from delta_prop.spark.states.changes import CHANGES, STATE
from delta_prop.spark.states.folding import column_of, fold
from delta_prop.spark.states.folding_numbers import Lists
from delta_prop.spark.states.folding_rows import state_in
from delta_prop.spark.states.stored import UNTOLD
from delta_prop_wire.delta import Kind

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator

    from numpy.typing import NDArray

DIFFERENCES = pa.schema(
    [
        pa.field("namespace", pa.string(), nullable=False),
        pa.field("vector_id", pa.string(), nullable=False),
        pa.field("difference", pa.string(), nullable=False),
        pa.field("reason", pa.string(), nullable=False),
        pa.field("op", pa.string()),
        pa.field("vector", pa.list_(pa.float32())),
        pa.field("data", pa.binary()),
        pa.field("metadata", pa.string()),
        pa.field("origin", pa.string()),
        pa.field("counter", pa.int64()),
    ]
)
"""`op`, `vector`, `data`, `metadata`: the delta that mends it. `origin`, `counter`: the last delta that the
log has of the vector, which that one goes behind; null where it has none. A vector of which the sink has set
deltas aside has no delta that mends it: it would line up behind them.
"""
DIFFERENCES_DDL = (
    "namespace string not null, vector_id string not null, difference string not null, "
    "reason string not null, op string, vector array<float>, data binary, metadata string, "
    "origin string, counter long"
)


def differences(
    blobs: Iterable[pa.RecordBatch], come: int, aside: Container[str] = ()
) -> Iterator[pa.RecordBatch]:
    """Tell where the sink's states of a bucket are not what the log makes of their vectors.

    Up to offset `come`; rows of the sink may be ahead of that: each is held to what the log has up to its own
    last delta. The blobs come sorted by `first`. `aside`: vectors of which the sink has set deltas aside.
    """
    before, held, behind = Gathering(), [], []
    for first, changes in pieces(blobs):
        before.in_order = before.in_order and first != UNORDERED
        if first == HELD:
            held.append(changes)
            continue
        late = changes.column("offset").to_numpy() >= come
        late &= changes.column("kind").to_numpy() < STATE
        if late.any():
            behind.append(changes.filter(pa.array(late)))
        if not late.all():
            before.add(changes.filter(pa.array(~late)))
    sink, rest = (pa.Table.from_batches(some, CHANGES).combine_chunks() for some in (held, behind))
    log = fold(pa.concat_tables([before.table(), _applied(rest, sink)]))
    found = list(_compared(_Rows(log), _Rows(sink)))
    if found:
        keys = pa.array([one.key for one in found], pa.string())
        now = pa.concat_tables([before.table(), rest])
        present = fold(now.filter(pc.is_in(now.column("key"), keys)))
        yield _rows(found, {row["key"]: row for row in present.to_pylist()}, aside)


def _applied(changes: pa.Table, sink: pa.Table) -> pa.Table:
    """Of changes behind the cursor those that the sink's rows have."""
    if not changes.num_rows or not sink.num_rows:
        return changes.slice(0, 0)
    at = pc.index_in(changes.column("key"), value_set=sink.column("key"))
    reach = sink.column("offset").take(pc.fill_null(at, 0))
    return changes.filter(pc.and_(at.is_valid(), pc.less_equal(changes.column("offset"), reach)))


class _Found(NamedTuple):
    """A difference: of which vector, what, and the sink's row."""

    key: str
    verdict: Verdict
    held: Held | None


class _Rows:
    """States by column."""

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

    def known(self, row: int) -> Known:
        """One of them, as what the log makes of a vector."""
        return Known(state_in(self._told(row)), int(self.offsets[row]))

    def held(self, row: int) -> Held:
        """One of them, as a sink's row."""
        told = self._told(row)
        kind = Kind(told["kind"] & ~STATE)
        vector = np.array(told["values"], np.float32) if kind is Kind.CREATE else None
        tells = told["patch"] != UNTOLD
        metadata = _unpacked(told["patch"]) if tells else {}
        key = (told["lamport"], told["origin"], told["counter"]) if told["lamport"] else None
        return Held(kind, vector, told["data"] or b"", metadata, key, told["offset"], tells)

    def _told(self, row: int) -> dict[str, Any]:
        found: dict[str, Any] = self.table.slice(row, 1).to_pylist()[0]
        return found


def _compared(log: _Rows, sink: _Rows) -> Iterator[_Found]:
    """Columns tell which rows differ; what it is that differs is told of those alone, one by one."""
    at = pc.index_in(log.keys, value_set=sink.keys)
    there = at.is_valid().to_numpy(zero_copy_only=False)
    rows = pc.fill_null(at, -1).to_numpy()
    for one in (~there & log.alive).nonzero()[0].tolist():
        yield _found(log.keys[one].as_py(), log.known(one), None)
    known = np.zeros(len(sink.alive), bool)
    known[rows[there]] = True
    for row in (~known & sink.alive).nonzero()[0].tolist():
        yield _found(sink.keys[row].as_py(), None, sink.held(row))
    pairs = there.nonzero()[0]
    for one in pairs[_differ(log, sink, pairs, rows[pairs])].tolist():
        yield _found(log.keys[one].as_py(), log.known(one), sink.held(int(rows[one])))


def _found(key: str, known: Known | None, held: Held | None) -> _Found:
    verdict = judge(known, held)
    assert verdict is not None, key
    return _Found(key, verdict, held)


def _differ(log: _Rows, sink: _Rows, ours: NDArray[np.intp], theirs: NDArray[np.intp]) -> NDArray[np.bool_]:
    """Which vectors differ of those that both have a row of: `ours` in the log, `theirs` in the sink."""
    mine, other = log.canonical[ours], sink.canonical[theirs]
    told = other[:, 0] > 0  # where the sink tells no delta, the content alone is compared
    same = (mine == other).all(axis=1) | ~told
    same &= _same_content(log, sink, ours, theirs)
    differ: NDArray[np.bool_] = (log.alive[ours] | sink.alive[theirs]) & ~same
    return differ


def _same_content(
    log: _Rows, sink: _Rows, ours: NDArray[np.intp], theirs: NDArray[np.intp]
) -> NDArray[np.bool_]:
    same: NDArray[np.bool_] = log.kinds[ours] == sink.kinds[theirs]
    same &= log.values.sizes[ours] == sink.values.sizes[theirs]
    alike = same.nonzero()[0]
    mine, other = log.values.taken(ours[alike]), sink.values.taken(theirs[alike])
    differ = np.concatenate([[0], np.cumsum(mine.flat.view(np.uint32) != other.flat.view(np.uint32))])
    same[alike] &= np.diff(differ[mine.bounds]) == 0
    left, right = pa.array(ours), pa.array(theirs)
    same &= pc.equal(log.data.take(left), sink.data.take(right)).to_numpy(zero_copy_only=False)
    patches = log.patches.take(left), sink.patches.take(right)
    equal = pc.fill_null(pc.equal(*patches), False).to_numpy(zero_copy_only=False)
    equal |= pc.and_(*(one.is_null() for one in patches)).to_numpy(zero_copy_only=False)
    equal |= pc.fill_null(pc.equal(patches[1], UNTOLD), False).to_numpy(zero_copy_only=False)
    for at in (same & ~equal).nonzero()[0].tolist():  # the order of members does not count
        same[at] = _canonical(patches[0][at].as_py()) == _canonical(patches[1][at].as_py())
    return same


def _canonical(packed: bytes | None) -> str | None:
    """Metadata in one form; None where they cannot be read."""
    metadata = _unpacked(packed)
    return None if metadata is None else json.dumps(metadata, sort_keys=True)


def _unpacked(packed: bytes | None) -> dict[str, Any] | None:
    if packed is None:
        return {}
    try:
        return dict(msgpack.unpackb(packed, strict_map_key=True))
    except ValueError:
        return None


def _rows(found: list[_Found], present: dict[str, dict[str, Any]], aside: Container[str]) -> pa.RecordBatch:
    rows = []
    for one in found:
        namespace, _, vector_id = one.key.partition("\0")
        now = present.get(one.key)
        state = None if now is None else state_in(now)
        told = difference((namespace, vector_id), one.verdict, one.held, state, aside=one.key in aside)
        rows.append(told._asdict())
    return pa.RecordBatch.from_pylist(rows, schema=DIFFERENCES)
