"""One machine drives the native table of heads and its twin with the same calls, and compares them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from delta_prop.partition.ingest.heads import ALIVE, DEAD, SavedHeads, pack_heads
from delta_prop.partition.ingest.vector_heads import VectorHeads
from delta_prop_wire.algebra import VectorState
from delta_prop_wire.delta import (
    ABSENT,
    Delta,
    Dot,
    Head,
    Kind,
    Operation,
    Source,
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
from delta_prop_wire.errors import DeltaPropError, Refused
from delta_prop_wire.state_rows import StateRow, encode_states
from tests.delta_prop.partition.pipeline_bench import batch_of
from tests.native_core import NativeCore, needs_native_core

if TYPE_CHECKING:
    from collections.abc import Callable

    from delta_prop_wire.batch import Batch

if NativeCore is not None:
    from delta_prop.partition.core.native_heads import NativeVectorHeads

pytestmark = needs_native_core

ORIGINS = (16, 7, (1 << 64) - 16)
NAMESPACES = ("default", "other", "é")
KEYS = ("a", "b", "c", "näme", "x" * 512)
OPERATIONS = (
    create([1.0, 2.0]),
    create([1.0]),
    dense([3.0, 4.0]),
    sparse([1], [1.0]),
    sparse([], []),
    sparse_add([2], [1.0]),
    scale(2.0),
    offset(1.0),
    metadata_only(),
    opaque(b"x"),
    delete(),
    Operation(40, data=b"?"),
    Operation(Kind.TRANSFORM, data=b"t"),
)
ROWS = st.lists(
    st.builds(
        Delta,
        st.sampled_from(KEYS),
        st.sampled_from(OPERATIONS),
        st.sampled_from(NAMESPACES),
        expect=st.sampled_from([None] * 8 + [ABSENT, Dot(7, 1), Dot(16, 2)]),
        metadata=st.sampled_from([None, None, None, {"a": 1}]),
        parents=st.sampled_from([(), (), (Dot(7, 1),), (Dot(16, 1), Dot(7, 2))]),
    ).filter(lambda delta: delta.operation.kind != Kind.METADATA or delta.metadata is not None),
    min_size=1,
    max_size=6,
)
LOADED = Head(Dot(16, 2), True)


def seen_up_to(counter: int) -> Callable[[int], int]:
    return lambda _: counter


def load(_namespace: str, vector_id: str) -> Head | None:
    """Return the head of a vector that was dropped."""
    return LOADED if vector_id == "a" else None


def outcome(call: Callable[[], Any]) -> object:
    """Return what a call returns, or all that its error says."""
    try:
        return call()
    except Refused as refusal:
        return refusal.code, refusal.message, refusal.row, refusal.field, refusal.details
    except DeltaPropError as error:
        return type(error), str(error)


class HeadsMachine(RuleBasedStateMachine):
    """Both tables; each rule is one call of both."""

    @initialize(heads_max=st.sampled_from([1, 4, 9, 1_000]))
    def start(self, heads_max: int) -> None:
        self.heads_max = heads_max
        self.tables: tuple[VectorHeads, VectorHeads] = (
            NativeVectorHeads(heads_max=heads_max),
            VectorHeads(heads_max=heads_max),
        )
        self.next = dict.fromkeys(ORIGINS, 1)

    def both(self, call: Callable[[VectorHeads], Any]) -> Any:
        native, python = (outcome(lambda table=table: call(table)) for table in self.tables)  # type: ignore[misc]
        assert native == python
        return native

    def batch(self, origin: int, rows: list[Delta]) -> Batch:
        batch = batch_of(origin, self.next[origin], *rows)
        self.next[origin] = batch.last + 1
        return batch

    @rule(origin=st.sampled_from(ORIGINS), rows=ROWS, counter=st.integers(0, 9), is_checked=st.booleans())
    def append(self, origin: int, rows: list[Delta], counter: int, is_checked: bool) -> None:
        batch = self.batch(origin, rows)
        if is_checked and self.both(lambda table: table.check(batch, load)) is not None:
            return
        self.both(lambda table: table.count_concurrent(batch, seen_up_to(counter)))
        source = Source.LOCAL if is_checked else Source.REPLICA
        self.both(lambda table: table.note_appended(batch, source))

    @rule(
        origin=st.sampled_from(ORIGINS),
        runs=st.lists(
            st.lists(
                st.builds(
                    Delta,
                    st.sampled_from(KEYS),
                    st.sampled_from([one for one in OPERATIONS if one.kind != Kind.METADATA]),
                    st.sampled_from(NAMESPACES),
                ),
                min_size=1,
                max_size=4,
            ),
            min_size=1,
            max_size=4,
        ),
        counter=st.integers(0, 9),
    )
    def append_run(self, origin: int, runs: list[list[Delta]], counter: int) -> None:
        batches = [self.batch(origin, rows) for rows in runs]
        self.both(lambda table: table.append_run(batches, Source.LOCAL, seen_up_to(counter)))

    @rule(origin=st.sampled_from((*ORIGINS, 99)))
    def find_heads(self, origin: int) -> None:
        rows = [(namespace, key) for namespace in (*NAMESPACES, "?") for key in KEYS]
        self.both(lambda table: list(table.other_heads(origin, iter(rows))))
        self.both(lambda table: [table.stored_head(*row) for row in rows])
        self.both(lambda table: [table.is_incomplete(namespace) for namespace in (*NAMESPACES, "?")])

    @rule(namespace=st.sampled_from((*NAMESPACES, "?")), key=st.sampled_from(KEYS))
    def forget(self, namespace: str, key: str) -> None:
        head = self.both(lambda table: table.stored_head(namespace, key))
        assert self.both(lambda table: table.forget(namespace, key)) == (head is not None and not head.alive)
        if head is not None and not head.alive:
            assert self.both(lambda table: table.stored_head(namespace, key)) is None

    @rule(dimensions=st.dictionaries(st.sampled_from(NAMESPACES), st.integers(1, 3), max_size=2))
    def note_foreign_vectors(self, dimensions: dict[str, int]) -> None:
        self.both(lambda table: table.note_foreign_vectors(dimensions))

    @rule(
        rows=st.lists(
            st.tuples(
                st.sampled_from(NAMESPACES),
                st.sampled_from(KEYS),
                st.sampled_from(ORIGINS),
                st.integers(1, 9),
                st.sampled_from([None, 0, 1, 2, 3]),
            ),
            min_size=1,
            max_size=5,
        )
    )
    def load_states(self, rows: list[Any]) -> None:
        states = [
            StateRow(
                namespace,
                key,
                VectorState(
                    width is not None,
                    np.ones(width, np.float32) if width else None,
                    b"x" if width == 0 else None,
                    {},
                    0,
                    (number + 1, origin, counter),
                ),
                number,
            )
            for number, (namespace, key, origin, counter, width) in enumerate(rows)
        ]
        batch = encode_states(states)
        self.both(lambda table: table.load_states(batch))

    @rule()
    def save_and_restore(self) -> None:
        restored = (NativeVectorHeads(heads_max=self.heads_max), VectorHeads(heads_max=self.heads_max))
        for old, new in zip(self.tables, restored, strict=True):
            saved, heads = old.save(), []
            for name in saved.namespaces:
                for keys, chunk, flags in old.copy_heads(name, 2):
                    rows = [
                        (key, code, DEAD if flag else ALIVE)
                        for key, code, flag in zip(keys, chunk, flags, strict=True)
                        if code is not None
                    ]
                    packed = (
                        pack_heads(name, *zip(*rows, strict=True)) if rows else pack_heads(name, [], [], [])
                    )
                    heads.append(SavedHeads.read(packed, range(len(saved.writers))))
            new.restore(saved, heads)
            new.concurrent_updates = old.concurrent_updates
        self.tables = restored

    @invariant()
    def tables_are_equal(self) -> None:
        def held(table: VectorHeads) -> list[object]:
            saved = table.save()
            copied = {name: [*table.copy_heads(name, 3)] for name in saved.namespaces}
            return [saved, copied, table.head_count, table.writer_count, table.concurrent_updates]

        self.both(held)
        assert self.tables[0].head_count <= self.heads_max


TestHeadsMachine = HeadsMachine.TestCase
# Fresh histories each time: few of the same would miss a fault.
TestHeadsMachine.settings = settings(
    max_examples=max(settings().max_examples, 150),
    stateful_step_count=20,
    deadline=None,
    derandomize=False,
    print_blob=True,
)
