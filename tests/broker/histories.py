"""Random histories of a log, and the fold of all their rows."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st

from delta_prop_wire import delta as d
from delta_prop_wire.algebra import VectorState, apply, with_ignored
from delta_prop_wire.delta import Delta, KnownIds, Operation, Source
from delta_prop_wire.encode import encode_batch, encode_noop
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from collections.abc import Iterator

    from delta_prop_broker.log.durable import DurableLog
    from delta_prop_wire.batch import Batch, LoggedBatch

Name = tuple[str, str]
numbers = st.floats(-8, 8, width=32)
vectors = st.lists(numbers, min_size=2, max_size=2)
full_writes = st.one_of(
    st.builds(d.create, vectors), st.builds(d.dense, vectors), st.builds(d.opaque, st.binary(max_size=5))
)
operations = st.one_of(
    full_writes,
    st.builds(d.create, st.lists(numbers, min_size=3, max_size=3)),
    st.just(d.delete()),
    st.builds(d.scale, numbers),
    st.builds(d.offset, numbers),
    st.builds(lambda index, value: d.sparse_add([index], [value]), st.integers(0, 3), numbers),
    st.builds(lambda index, value: d.sparse([index], [value]), st.integers(0, 3), numbers),
    st.just(d.metadata_only()),
    st.just(Operation(33, data=b"later")),
)
patches = st.none() | st.dictionaries(
    st.sampled_from(["a", "b"]),
    st.none() | st.integers(0, 300) | st.just({"c": None, "d": [None]}),
    max_size=2,
)
names = st.tuples(st.sampled_from(["n", "né"]), st.sampled_from(["a", "b", "c", "ü", "zz"]))


@st.composite
def deltas(draw: st.DrawFn) -> Delta:
    namespace, vector_id = draw(names)
    return Delta(vector_id, draw(operations), namespace, metadata=draw(patches))


@st.composite
def uniform_deltas(draw: st.DrawFn, kind: str) -> list[Delta]:
    """Draw full writes of one kind, which compaction copies without decoding."""
    rows = []
    for namespace, vector_id in draw(st.lists(names, min_size=1, max_size=6)):
        operation = {"create": d.create, "dense": d.dense}.get(kind, d.create)(draw(vectors))
        if kind == "delete" and draw(st.booleans()):
            operation = d.delete()
        rows.append(Delta(vector_id, operation, namespace))
    return rows


@dataclass
class Step:
    """One append: its rows and its origin. `lamport_lag`: how far its Lamport number is below the
    next one.

    `ids`: the ids of the rows; some may equal earlier ones.
    """

    rows: list[Delta] | None  # None: a no-op batch
    origin: int
    lamport_lag: int
    ids: tuple[int, ...] | None = None


steps = st.builds(
    Step,
    st.none()
    | st.lists(deltas(), min_size=1, max_size=5)
    | st.sampled_from(["create", "dense", "delete"]).flatmap(uniform_deltas),
    st.integers(1, 3),
    st.just(0) | st.just(0) | st.just(0) | st.integers(0, 6),
)
steps_with_ids = st.builds(replace, steps, ids=st.none() | st.permutations(range(6)).map(tuple))


@dataclass
class Writer:
    """Appends steps, and records the appended batches in log order."""

    log: DurableLog
    lamport: int = 0
    counters: dict[int, int] = field(default_factory=dict)
    batches: list[LoggedBatch] = field(default_factory=list)
    ids: set[bytes] = field(default_factory=set)

    def append(self, step: Step) -> None:
        counter = self.counters.get(step.origin, 0)
        batch = self._batch(step, counter + 1)
        lamport = max(self.lamport + 1 - step.lamport_lag, 1)
        known_count = sum(id_ in self.ids for id_ in batch.ids or ())
        self.ids.update(batch.ids or ())
        if known_count:
            known_ids = KnownIds.ALL if known_count == batch.count else KnownIds.SOME
        else:
            known_ids = KnownIds.NONE
        self.batches.append(self.log.append(batch, lamport=lamport, source=Source.LOCAL, known_ids=known_ids))
        self.counters[step.origin] = counter + batch.count
        self.lamport = max(self.lamport, lamport + batch.count - 1)

    def _batch(self, step: Step, base: int) -> Batch:
        clock = [
            d.Dot(origin, counter)
            for origin, counter in sorted(self.counters.items())
            if origin != step.origin
        ]
        if step.rows is None:
            return encode_noop(
                origin=step.origin, base=base, count=2, code=ErrorCode.CONFLICT, clock=clock[:1]
            )
        ids = None if step.ids is None else [bytes([number]) * 16 for number in step.ids]
        rows = step.rows
        if ids is not None:
            rows = [replace(row, id=id_) for row, id_ in zip(rows, ids, strict=False)]
        return encode_batch(rows, origin=step.origin, base=base, clock=clock[:1])


@dataclass
class Rows:
    """The changes of each vector, in log order: canonical key, offset, operation, metadata."""

    changes: dict[Name, list[tuple[tuple[int, int, int], int, Operation, Any]]] = field(default_factory=dict)
    ids: dict[int, bytes] = field(default_factory=dict)  # by offset

    @classmethod
    def below(cls, batches: list[LoggedBatch], end: int, start: int = 0) -> Rows:
        """Return the rows with offsets from `start` to `end` (exclusive)."""
        rows = cls()
        for name, change in changes(batches):
            if start <= change[1] < end:
                rows.changes.setdefault(name, []).append(change)
        for logged in batches:
            for row, id_ in enumerate(logged.batch.ids or ()):
                rows.ids[logged.offset + row] = id_
        return rows

    def fold(self) -> dict[Name, VectorState]:
        """Return each vector's state, folded in canonical order."""
        states = {}
        for name, rows in self.changes.items():
            state, seen_ids = VectorState(), set()
            for key, offset, operation, patch in sorted(rows, key=lambda row: row[0]):
                id_ = self.ids.get(offset)
                is_duplicate = id_ in seen_ids
                state = with_ignored(state, 1, key) if is_duplicate else apply(state, operation, patch, key)
                if id_ is not None:
                    seen_ids.add(id_)
            states[name] = state
        return states


def changes(batches: list[LoggedBatch]) -> Iterator[tuple[Name, Any]]:
    for logged in batches:
        batch = logged.batch
        for row in () if batch.is_control else range(batch.count):
            name = (batch.namespaces[row], batch.keys[row])
            yield name, (logged.key(row), logged.offset + row, batch.operation(row), batch.metadata(row))


def comparable(state: VectorState) -> tuple[Any, ...]:
    """Return a state in comparable form."""
    return (*state.content, state.ignored, state.key)
