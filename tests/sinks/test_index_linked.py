"""The linked index: what was applied is found at once, rows wait within the bound, graphs outlive a restart.

Small graphs (the bound on their size lowered); background work is done by hand or beside, in virtual time.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from delta_prop.testing import run_virtual
from delta_prop_sinks import IndexSink, Linked, Resident, StopSink, StorageSink, TryAgain, check_sink
from delta_prop_sinks.hnsw import GraphFailed
from delta_prop_wire.delta import Delta, create, delete, dense, opaque, scale, sparse_add
from delta_prop_wire.encode import encode_vectors
from delta_prop_wire.errors import UsageError
from tests.sinks.support import HERE, FakeLog, vectors

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable
    from pathlib import Path

    from numpy.typing import NDArray

DIMENSION = 16
SMALL = Linked(graph_rows_min=50, unlinked_rows_max=400, room_s_max=1.0)


def clustered(count: int, seed: int = 1, dimension: int = DIMENSION) -> NDArray[np.float32]:
    """Vectors around a few dozen centres, as embeddings are, not pure noise."""
    random = np.random.default_rng(seed)
    centres = np.random.default_rng(0).standard_normal((40, dimension))
    found = centres[random.integers(0, len(centres), count)] + 0.4 * random.standard_normal(
        (count, dimension)
    )
    return found.astype(np.float32)


class Log(FakeLog):
    def write(self, keys: Iterable[str], rows: NDArray[np.float32], namespace: str = "default") -> None:
        keys = list(keys)
        base = self.counters.get(HERE, 0) + 1
        self.counters[HERE] = base + len(keys) - 1
        self.append_batch(encode_vectors(keys, rows, namespace=namespace, origin=HERE, base=base))


@asynccontextmanager
async def linking(index: IndexSink) -> AsyncIterator[None]:
    """Beside what is done in here, the index links."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(index.background)
        try:
            yield
        finally:
            tasks.cancel_scope.cancel()


async def all_linked(index: IndexSink) -> None:
    with anyio.fail_after(100):
        while index.backlog().rows:
            await anyio.sleep(0.01)


def numbers(index: IndexSink) -> Any:
    linked = index.statistics().linked
    assert linked is not None
    return linked


def recall(index: IndexSink, queries: NDArray[np.float32], k: int = 10, metric: Any = "cosine") -> float:
    found = [{hit.vector_id for hit in index.search(query, k, metric=metric)} for query in queries]
    linker, index._linker = index._linker, None
    exact = [{hit.vector_id for hit in index.search(query, k, metric=metric)} for query in queries]
    index._linker = linker
    return float(np.mean([len(some & all_) / len(all_) for some, all_ in zip(found, exact, strict=True)]))


def names(count: int) -> list[str]:
    return [f"v{number}" for number in range(count)]


async def filled(count: int, settings: Linked = SMALL, **arguments: Any) -> tuple[Log, IndexSink]:
    log, index = Log(), IndexSink(linked=settings, **arguments)
    await index.open(log)
    async with linking(index):
        log.write(names(count), clustered(count))
        await index.apply(log.deliveries())
        await all_linked(index)
    return log, index


async def apply_new(log: Log, index: IndexSink, *deltas: Delta) -> None:
    log.append(*deltas)
    await index.apply([log.deliveries()[-1]])


def test_the_linked_index_keeps_the_contract() -> None:
    run_virtual(check_sink, lambda: IndexSink(linked=Linked(graph_rows_min=1)))


@pytest.mark.parametrize("metric", ["cosine", "l2"])
def test_recall_of_linked_rows_and_exact_scores(metric: Any) -> None:
    async def main() -> None:
        _, index = await filled(2000, replace(SMALL, metric=metric))
        queries = clustered(50, seed=5)
        before = numbers(index)
        assert before.linked_rows == 2000
        assert recall(index, queries, metric=metric) >= 0.95
        assert numbers(index).searches_linked - before.searches_linked == 50
        exact = IndexSink(resident=index.resident)
        for query in queries[:10]:
            found = {hit.vector_id: hit.score for hit in index.search(query, 10, metric=metric)}
            scores = {hit.vector_id: hit.score for hit in exact.search(query, 10, metric=metric)}
            assert all(scores.get(key, score) == score for key, score in found.items())
        after = numbers(index)
        other = "dot" if metric == "cosine" else "cosine"
        assert recall(index, queries, metric=other) == 1.0
        assert numbers(index).searches_linked == after.searches_linked, "other metrics are searched exactly"

    run_virtual(main)


changes = st.tuples(
    st.integers(0, 79),
    st.one_of(
        st.integers(1, 10_000).map(lambda seed: ("dense", seed)),
        st.integers(1, 10_000).map(lambda seed: ("nudge", seed)),
        st.just(("delete", 0)),
        st.just(("opaque", 0)),
        st.just(("link", 0)),
    ),
)


@given(st.lists(changes, max_size=40), st.sampled_from(["cosine", "l2"]))
def test_what_was_just_applied_is_found_first(
    content: list[tuple[int, tuple[str, int]]], metric: Any
) -> None:
    """Exact tier and graph together: whatever was linked when, a row is the nearest to its own vector."""

    async def main() -> None:
        settings = Linked(metric=metric, graph_rows_min=20, unlinked_rows_max=200, tombstone_ratio_max=0.2)
        log, index = await filled(60, settings)
        linker = index._linker
        assert linker is not None
        for at, (number, (kind, seed)) in enumerate(content):
            key = f"v{number}"
            row = clustered(1, 100 * seed + at)[0]  # no two alike
            if kind == "link":
                await linker._step(log.threads)
                continue
            state = index.resident.state("default", key)
            if kind == "nudge" and (state is None or state.vector is None):
                kind = "dense"
            operation = {
                "dense": dense(row),
                "nudge": sparse_add([1, 3], row[:2] * np.float32(0.05)),
                "delete": delete(),
                "opaque": opaque(b"no vector"),
            }[kind]
            await apply_new(log, index, Delta(key, operation))
            state = index.resident.state("default", key)
            assert state is not None
            if state.vector is None:
                assert key not in {hit.vector_id for hit in index.search(row, 100, metric=metric)}
            else:
                assert index.search(state.vector, 1, metric=metric)[0].vector_id == key
        alive = {vector_id for _, vector_id, state in index.rows() if state.vector is not None}
        links = linker.links["default"]
        await linker._step(log.threads)
        assert links.linked_rows + links.unlinked_rows == len(alive)
        assert {hit.vector_id for hit in index.search(clustered(1)[0], 100, metric=metric)} == alive

    run_virtual(main)
