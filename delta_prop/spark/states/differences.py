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

from delta_prop.spark.jobs.comparing import patch_between
from delta_prop.spark.states.buckets import HELD, UNORDERED, Gathering, pieces
from delta_prop.spark.states.changes import CHANGES, STATE
from delta_prop.spark.states.folding import column_of, fold
from delta_prop.spark.states.folding_numbers import Lists
from delta_prop.spark.states.folding_rows import state_in
from delta_prop.spark.states.stored import UNTOLD
from delta_prop_wire.algebra import State
from delta_prop_wire.delta import Kind
from delta_prop_wire.topics import kind_name

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator

    from numpy.typing import NDArray

MISSING, STALE, EXTRA, CORRUPTED = "missing", "stale", "extra", "corrupted"
SET_ASIDE = "set aside"
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
        yield _told(found, {row["key"]: row for row in present.to_pylist()}, _Rows(sink), aside)


def _applied(changes: pa.Table, sink: pa.Table) -> pa.Table:
    """Of changes behind the cursor those that the sink's rows have."""
    if not changes.num_rows or not sink.num_rows:
        return changes.slice(0, 0)
    at = pc.index_in(changes.column("key"), value_set=sink.column("key"))
    reach = sink.column("offset").take(pc.fill_null(at, 0))
    return changes.filter(pc.and_(at.is_valid(), pc.less_equal(changes.column("offset"), reach)))


class _Found(NamedTuple):
    """A difference: of which vector, the sink's row or -1, what, why."""

    key: str
    row: int
    difference: str
    reason: str


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

    def state(self, row: int) -> State:
        """One of them."""
        return state_in(self.table.slice(row, 1).to_pylist()[0])


def _compared(log: _Rows, sink: _Rows) -> Iterator[_Found]:
    at = pc.index_in(log.keys, value_set=sink.keys)
    there = at.is_valid().to_numpy(zero_copy_only=False)
    rows = pc.fill_null(at, -1).to_numpy()
    for one in (~there & log.alive).nonzero()[0].tolist():
        yield _Found(
            log.keys[one].as_py(),
            -1,
            MISSING,
            f"the log has it since offset {log.offsets[one]}, the sink has no row",
        )
    known = np.zeros(len(sink.alive), bool)
    known[rows[there]] = True
    for row in (~known & sink.alive).nonzero()[0].tolist():
        yield _Found(sink.keys[row].as_py(), row, EXTRA, "the log tells of no such vector")
    pairs = there.nonzero()[0]
    yield from _of_pairs(log, sink, pairs, rows[pairs])


def _of_pairs(log: _Rows, sink: _Rows, ours: NDArray[np.intp], theirs: NDArray[np.intp]) -> Iterator[_Found]:
    """Vectors that both have a row of: `ours` in the log, `theirs` in the sink."""
    alive, held = log.alive[ours], sink.alive[theirs]
    mine, other = log.canonical[ours], sink.canonical[theirs]
    told = other[:, 0] > 0  # where the sink tells no delta, the content alone is compared
    same_delta = (mine == other).all(axis=1) | ~told
    same = _same_content(log, sink, ours, theirs)
    for at in ((alive | held) & ~(same & same_delta)).nonzero()[0].tolist():
        row, offset = int(theirs[at]), int(log.offsets[ours[at]])
        older = bool(told[at]) and tuple(other[at].tolist()) < tuple(mine[at].tolist())
        key = log.keys[int(ours[at])].as_py()
        if not alive[at]:
            yield _Found(key, row, EXTRA, f"the log has it deleted since offset {offset}")
        elif not held[at] and not same_delta[at]:
            yield _Found(key, row, MISSING, f"the log has it since offset {offset}, the sink has it deleted")
        else:
            what = "its content is right" if same[at] else _detail(log.state(int(ours[at])), sink, row)
            if older:
                kind, why = STALE, f"it lacks the delta at offset {offset}"
            elif same_delta[at]:
                kind, why = CORRUPTED, f"it has the delta at offset {offset}"
            else:
                kind, why = CORRUPTED, "its last delta is none of the log's"
            yield _Found(key, row, kind, f"{what}; {why}")


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


def _detail(wanted: State, sink: _Rows, row: int) -> str:
    """What is wrong with a row of the sink, at its first place."""
    vector = sink.values.flat[sink.values.bounds[row] : sink.values.bounds[row + 1]]
    kinds = {Kind.CREATE: "a vector", Kind.OPAQUE: "bytes", Kind.DELETE: "deleted"}
    kind, held = Kind.OPAQUE if wanted.vector is None else Kind.CREATE, sink.kinds[row]
    if held != kind:
        return f"it is {kinds[held]}, not {kinds[kind]}"
    if wanted.vector is not None and len(vector) != len(wanted.vector):
        return f"it has {len(vector)} numbers, not {len(wanted.vector)}"
    if wanted.vector is not None and vector.tobytes() != wanted.vector.tobytes():
        places = (vector.view(np.uint32) != wanted.vector.view(np.uint32)).nonzero()[0]
        at = int(places[0])
        more = f", and {len(places) - 1} more" if len(places) > 1 else ""
        return f"number {at} is {vector[at]:.9g}, not {wanted.vector[at]:.9g}{more}"
    if wanted.data is not None and sink.data[row].as_py() != wanted.data:
        return f"its {len(sink.data[row].as_py())} bytes are not the {len(wanted.data)} of the log"
    metadata = _unpacked(sink.patches[row].as_py())
    if metadata is None:
        return "its metadata cannot be read"
    patch = patch_between(metadata, dict(wanted.metadata))
    return f"its metadata differ in {', '.join(map(repr, sorted(patch)[:3]))}"


def _told(
    found: list[_Found], present: dict[str, dict[str, Any]], sink: _Rows, aside: Container[str]
) -> pa.RecordBatch:
    rows = []
    for one in found:
        namespace, _, vector_id = one.key.partition("\0")
        row = {
            "namespace": namespace,
            "vector_id": vector_id,
            "difference": one.difference,
            "reason": one.reason,
        }
        now = present.get(one.key)
        held = None if one.row < 0 else _unpacked(sink.patches[one.row].as_py())
        if one.key in aside:
            row |= {"difference": SET_ASIDE, "reason": f"{one.reason}; deltas of it wait in the quarantine"}
        else:
            row |= {"op": kind_name(Kind.DELETE)} if now is None else _mending(state_in(now), held or {})
        if now is not None:
            row |= {"origin": f"{now['origin']:016x}", "counter": now["counter"]}
        rows.append(row)
    return pa.RecordBatch.from_pylist(rows, schema=DIFFERENCES)


def _mending(state: State, held: dict[str, Any]) -> dict[str, Any]:
    """The delta that sets a vector to its state, whatever a sink has in its place.

    A create clears metadata; bytes keep them, so that those which are too many are removed one by one.
    """
    if not state.alive:
        return {"op": kind_name(Kind.DELETE)}
    metadata = dict(state.metadata)
    if state.vector is not None:
        told: dict[str, Any] = {"op": kind_name(Kind.CREATE), "vector": state.vector}
    else:
        told = {"op": kind_name(Kind.OPAQUE), "data": state.data}
        metadata |= {name: None for name in held if name not in metadata}
    return told | ({"metadata": json.dumps(metadata, ensure_ascii=False)} if metadata else {})
