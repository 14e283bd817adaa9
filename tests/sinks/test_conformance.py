"""Every bundled sink keeps the contract of sinks."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Literal

import anyio
import pytest

from delta_prop.testing import run_virtual
from delta_prop_sinks import (
    CacheSink,
    CallbackSink,
    Delivery,
    IndexSink,
    JsonLinesSink,
    RejectDelta,
    ResidentVectors,
    StorageSink,
    check_sink,
)
from delta_prop_sinks.conformance import Applied
from delta_prop_sinks.hnsw_builder import Hnsw
from delta_prop_wire.algebra import fold
from tests.sinks.correct_sinks import Plain, Store, Target

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from delta_prop_sinks import ResumePoint, SinkContext
    from delta_prop_wire.algebra import VectorState
    from delta_prop_wire.delta import Delta
    from delta_prop_wire.state_rows import StateRow

Backend = Literal["asyncio", "trio"]


def check_conforms(
    make: Callable[[], Any], probe: Any = None, *, backend: Backend = "asyncio", **more: Any
) -> None:
    async def main() -> None:
        await check_sink(make, probe, pause_s=5.0, **more)

    run_virtual(main, backend=backend)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize a sink's test with its main variants; `--full` adds those that share most code."""
    names, main, others = VARIANTS.get(metafunc.function.__name__, ("", [], []))
    if names:
        metafunc.parametrize(names.split(), main + others * metafunc.config.getoption("--full"))


VARIANTS: dict[str, tuple[str, list[tuple[Any, ...]], list[tuple[Any, ...]]]] = {
    "test_storage_conforms": (
        "mode bytes_max backend",
        [("behind", 3_000, "asyncio")],
        [("through", 1 << 30, "asyncio"), ("behind", 1 << 30, "trio")],
    ),
    "test_storage_and_index_that_share_vectors_conform": ("with_graph", [(True,)], [(False,)]),
    "test_index_conforms": ("with_graph", [(False,), (True,)], []),
    "test_cache_conforms": (
        "mode entries_max",
        [("refresh", 8), ("invalidate", 100_000)],
        [("refresh", 100_000)],
    ),
    "test_jsonlines_conforms": ("fsync", [(False,)], [(True,)]),
    "test_sink_conforms_in_real_time": ("kind backend", [(Plain, "trio")], [(Store, "asyncio")]),
}
"""Per test: its arguments, their values in each run, and further values with `--full`."""


def test_storage_conforms(tmp_path: Path, mode: Any, bytes_max: int, backend: Backend) -> None:
    def make() -> StorageSink:
        resident = ResidentVectors(resident_bytes_max=bytes_max)
        return StorageSink(tmp_path / "v.db", mode=mode, resident=resident, rows_unflushed_max=5)

    check_conforms(make, backend=backend)


class Pair:
    """A storage sink and the index that shares its vectors, as one sink: both get every call."""

    name = "pair"

    def __init__(self, stored: Path, **options: Any) -> None:
        resident = ResidentVectors()
        self.storage = StorageSink(stored, resident=resident)
        self.index = IndexSink(resident=resident, **options)
        self.get, self.backlog = self.storage.get, self.index.backlog
        self.head, self.dimensions = self.index.head, self.index.dimensions

    async def background(self) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.storage.background)
            tasks.start_soon(self.index.background)

    async def open(self, context: SinkContext) -> ResumePoint:
        point = await self.storage.open(context)
        try:
            await self.index.open(_WithoutCommits(context))
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self.storage.aclose()
            raise
        return point

    async def apply(self, deliveries: Sequence[Delivery]) -> None:
        await self.index.apply(deliveries)
        await self.storage.apply(deliveries)

    async def forget(self, erased: Sequence[tuple[str, str]], before: int) -> None:
        await self.index.forget(erased, before)
        await self.storage.forget(erased, before)

    async def aclose(self) -> None:
        try:
            await self.index.aclose()
        finally:
            await self.storage.aclose()

    def statistics(self) -> object:
        return self.storage.statistics()


class _WithoutCommits:
    """A context for a sink that saves no cursor."""

    def __init__(self, context: SinkContext) -> None:
        self._context = context

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def committed(self, next_offset: int) -> None:
        pass


async def index_content(sink: Any) -> object:
    """Return the rows that an index finds."""
    index = sink.index if isinstance(sink, Pair) else sink
    return {(namespace, vector_id): state.content for namespace, vector_id, state in index.rows()}


class FoldedVectors:
    """A model of the vectors that uses only the algebra; it refolds only the vectors that have new rows."""

    def __init__(self) -> None:
        self.folded: dict[tuple[str, str], tuple[int, object]] = {}

    def __call__(self, rows: Sequence[Applied]) -> object:
        vectors: dict[tuple[str, str], list[Applied]] = {}
        for row in rows:
            vectors.setdefault((row.delta.namespace, row.delta.vector_id), []).append(row)
        return {ref: self._content(ref, rows_of_vector) for ref, rows_of_vector in vectors.items()}

    def _content(self, ref: tuple[str, str], rows: list[Applied]) -> object:
        last = self.folded.get(ref)
        if last is None or last[0] != len(rows):
            ids, duplicates = dict[bytes, Any](), set()
            for row in sorted(rows, key=lambda row: row.key):
                if row.delta.id is not None and ids.setdefault(row.delta.id, row.key) != row.key:
                    duplicates.add(row.key)
            changes = ((row.key, row.delta.operation, row.delta.metadata) for row in rows)
            last = self.folded[ref] = len(rows), fold(changes, without_effect=duplicates).content
        return last[1]


def test_storage_and_index_that_share_vectors_conform(tmp_path: Path, with_graph: bool) -> None:
    more: dict[str, Any] = {}
    if with_graph:
        pytest.importorskip("usearch")
        more["hnsw"] = Hnsw(graph_rows_min=4, unindexed_rows_max=300, save_s=1.0)
        more["path"] = tmp_path / "v.graph"
    check_conforms(lambda: Pair(tmp_path / "v.db", **more), index_content, expected=FoldedVectors())


def test_index_conforms(with_graph: bool) -> None:
    if with_graph:
        pytest.importorskip("usearch")
    graph = Hnsw(graph_rows_min=4, unindexed_rows_max=64) if with_graph else False
    check_conforms(lambda: IndexSink(hnsw=graph), index_content, expected=FoldedVectors())


def test_cache_conforms(mode: Any, entries_max: int) -> None:
    check_conforms(lambda: CacheSink(entries_max=entries_max, mode=mode), forgets=True)


def test_cache_that_loads_from_a_source_conforms() -> None:
    plain, last_offsets = Plain(), dict[tuple[str, str], int]()

    class Cache(CacheSink):
        """A cache whose loader's source gets every delivery first."""

        async def open(self, context: SinkContext) -> ResumePoint:
            plain.context = context
            return await super().open(context)

        async def apply(self, deliveries: Sequence[Delivery]) -> None:
            await plain.apply(deliveries)
            for delivery in deliveries:
                for row in plain.rows(delivery):
                    ref = (delivery.batch.namespaces[row], delivery.batch.keys[row])
                    last_offsets[ref] = delivery.first_offset + row
            await super().apply(deliveries)

        async def forget(self, erased: Sequence[tuple[str, str]], before: int) -> None:
            for ref, state in list(plain.states.items()):
                if not state.alive and (ref in erased or last_offsets[ref] < before):
                    del plain.states[ref]
            await super().forget(erased, before)

        async def begin_rebuild(self, offset: int) -> None:
            plain.states.clear()
            await super().begin_rebuild(offset)

        async def load_states(self, rows: Sequence[StateRow]) -> None:
            plain.states.update({row[:2]: row.state for row in rows})
            await super().load_states(rows)

    async def load(namespace: str, vector_id: str) -> VectorState | None:
        return plain.get(namespace, vector_id)

    check_conforms(lambda: Cache(entries_max=8, loader=load))


async def read_offsets(sink: JsonLinesSink) -> object:
    return [json.loads(line)["offset"] for line in sink.path.read_text(encoding="utf-8").splitlines()]


def test_jsonlines_conforms(tmp_path: Path, fsync: bool) -> None:
    def each_offset_once(rows: Sequence[Applied]) -> object:
        return [row.offset for row in rows]

    check_conforms(
        lambda: JsonLinesSink(tmp_path / "out.jsonl", fsync=fsync), read_offsets, expected=each_offset_once
    )


@pytest.mark.parametrize("per", ["delta", "delivery"])
def test_callback_conforms(per: Any) -> None:
    target = Target()

    async def probe(sink: CallbackSink) -> object:
        return dict(target.last_offsets)

    def last_offset_of_each_vector(rows: Sequence[Applied]) -> object:
        return {(row.delta.namespace, row.delta.vector_id): row.offset for row in rows}

    def take(offset: int, delta: Delta) -> None:
        if delta.operation.kind == 40:
            raise RejectDelta(offset, "of a later version")
        target.take((delta.namespace, delta.vector_id), offset)

    def take_delivery(delivery: Delivery) -> None:
        batch = delivery.batch
        for row in range(batch.count) if delivery.rows is None else delivery.rows.tolist():
            take(delivery.first_offset + row, batch.delta(row))

    check_conforms(
        lambda: CallbackSink(take if per == "delta" else take_delivery, per=per),
        probe,
        expected=last_offset_of_each_vector,
        failing=target.fail,
    )


# --- the conformance kit with correct sinks


def test_sink_conforms_in_real_time(kind: type[Plain], backend: Backend) -> None:
    target = Target()

    async def main() -> None:
        await check_sink(lambda: kind(target) if issubclass(kind, Store) else kind(), failing=target.fail)

    anyio.run(main, backend=backend)
