"""The HNSW index: applied rows are found at once, unindexed rows are bounded, graphs survive a restart.

Graphs are small, as the tests lower their minimum. Work runs in virtual time, in a task or step by step."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
import anyio.lowlevel
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from delta_prop.testing import run_virtual
from delta_prop_sinks import Hnsw, IndexSink, ResidentVectors, StorageSink, TryAgain
from delta_prop_sinks.hnsw import GraphError
from delta_prop_sinks.sink import Backlog
from delta_prop_wire.delta import Delta, create, delete, dense, opaque, scale, sparse_add
from delta_prop_wire.encode import encode_vectors
from delta_prop_wire.errors import UsageError
from tests.sinks.support import LOCAL_ORIGIN, FakeLog

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable
    from pathlib import Path

    from numpy.typing import NDArray

    from delta_prop_sinks.hnsw_builder import HnswBuilder

T = TypeVar("T")

DIMENSION = 16
SMALL = Hnsw(graph_rows_min=50, unindexed_rows_max=400, capacity_timeout_s=1.0)


def clustered(count: int, seed: int = 1, dimension: int = DIMENSION) -> NDArray[np.float32]:
    """Return vectors around a few dozen centres, like embeddings, unlike pure noise."""
    random = np.random.default_rng(seed)
    centres = np.random.default_rng(0).standard_normal((40, dimension))
    rows = centres[random.integers(0, len(centres), count)] + 0.4 * random.standard_normal((count, dimension))
    return rows.astype(np.float32)


class Log(FakeLog):
    def write(self, keys: Iterable[str], rows: NDArray[np.float32], namespace: str = "default") -> None:
        keys = list(keys)
        base = self.counters.get(LOCAL_ORIGIN, 0) + 1
        self.counters[LOCAL_ORIGIN] = base + len(keys) - 1
        self.append_batch(encode_vectors(keys, rows, namespace=namespace, origin=LOCAL_ORIGIN, base=base))


@asynccontextmanager
async def indexing_in_background(index: IndexSink) -> AsyncIterator[None]:
    """Run the background task of the index within this context."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(index.background)
        try:
            yield
        finally:
            tasks.cancel_scope.cancel()


async def wait_until_indexed(index: IndexSink) -> None:
    with anyio.fail_after(100):
        while index.backlog().rows:  # noqa: ASYNC110 - no event signals this
            await anyio.sleep(0.01)


def graph_statistics(index: IndexSink) -> Any:
    statistics = index.statistics().hnsw
    assert statistics is not None
    return statistics


def builder_of(index: IndexSink) -> HnswBuilder:
    """Return the builder of the graphs; no public name lets a test take one step, or look at the graphs."""
    return index._builder  # type: ignore[return-value]


def recall(index: IndexSink, queries: NDArray[np.float32], k: int = 10, metric: Any = "cosine") -> float:
    """Return the share of the exact hits that searches with the graph find."""
    found_ids = [{hit.vector_id for hit in index.search(query, k, metric=metric)} for query in queries]
    builder, index._builder = index._builder, None
    exact_ids = [{hit.vector_id for hit in index.search(query, k, metric=metric)} for query in queries]
    index._builder = builder
    pairs = zip(found_ids, exact_ids, strict=True)
    return float(np.mean([len(ids & best) / len(best) for ids, best in pairs]))


def names(count: int) -> list[str]:
    return [f"v{number}" for number in range(count)]


async def make_index(count: int, settings: Hnsw = SMALL, **arguments: Any) -> tuple[Log, IndexSink]:
    log, index = Log(), IndexSink(hnsw=settings, **arguments)
    await index.open(log)
    async with indexing_in_background(index):
        log.write(names(count), clustered(count))
        await index.apply(log.deliveries())
        await wait_until_indexed(index)
    return log, index


async def apply_new(log: Log, index: IndexSink, *deltas: Delta) -> None:
    log.append(*deltas)
    await index.apply([log.deliveries()[-1]])


@pytest.mark.parametrize("metric", ["cosine", "l2"])
def test_indexed_rows_have_high_recall_and_exact_scores(metric: Any) -> None:
    async def main() -> None:
        _, index = await make_index(2000, replace(SMALL, metric=metric))
        queries = clustered(50, seed=5)
        before = graph_statistics(index)
        assert before.indexed_rows == 2000
        assert recall(index, queries, metric=metric) >= 0.95
        assert graph_statistics(index).searches_in_graph - before.searches_in_graph == 50
        exact = IndexSink(resident=index.resident)
        for query in queries[:10]:
            graph_scores = {hit.vector_id: hit.score for hit in index.search(query, 10, metric=metric)}
            exact_scores = {hit.vector_id: hit.score for hit in exact.search(query, 10, metric=metric)}
            assert all(exact_scores.get(key, score) == score for key, score in graph_scores.items())
        after = graph_statistics(index)
        other = "dot" if metric == "cosine" else "cosine"
        assert recall(index, queries, metric=other) == 1.0
        assert graph_statistics(index).searches_in_graph == after.searches_in_graph, (
            "a search by another metric used the graph"
        )

    run_virtual(main)


changes = st.tuples(
    st.integers(0, 79),
    st.one_of(
        st.integers(1, 10_000).map(lambda seed: ("dense", seed)),
        st.integers(1, 10_000).map(lambda seed: ("nudge", seed)),
        st.just(("delete", 0)),
        st.just(("opaque", 0)),
        st.just(("index step", 0)),
    ),
)


@given(st.lists(changes, max_size=40), st.sampled_from(["cosine", "l2"]))
def test_row_just_applied_is_found_first(content: list[tuple[int, tuple[str, int]]], metric: Any) -> None:
    """The row nearest to a vector is its own, whether it is scored exactly or found by the graph."""

    async def main() -> None:
        settings = Hnsw(
            metric=metric, graph_rows_min=20, unindexed_rows_max=200, tombstone_ratio_max=0.2, recent_rows=1
        )
        log, index = await make_index(60, settings)
        builder = builder_of(index)
        for step, (number, (kind, seed)) in enumerate(content):
            key = f"v{number}"
            row = clustered(1, 100 * seed + step)[0]  # all rows differ
            if kind == "index step":
                await builder._step(log.threads)
                continue
            state = index.resident.state("default", key)
            can_nudge = state is not None and state.vector is not None
            operation = {
                "dense": dense(row),
                "nudge": sparse_add([1, 3], row[:2] * np.float32(0.05)) if can_nudge else dense(row),
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
        hnsw_rows = builder.rows_by_namespace["default"]
        await builder._step(log.threads)
        assert hnsw_rows.indexed_rows + hnsw_rows.unindexed_rows == len(alive)
        assert {hit.vector_id for hit in index.search(clustered(1)[0], 100, metric=metric)} == alive

    run_virtual(main)


def test_apply_raises_when_indexing_does_not_keep_up() -> None:
    async def main() -> None:
        log, index = Log(), IndexSink(hnsw=SMALL)
        await index.open(log)
        log.write(names(1000), clustered(1000))
        with pytest.raises(
            TryAgain, match=r"unindexed_rows_max 400: deltas arrive faster than rows are indexed"
        ) as caught:
            await index.apply(log.deliveries())
        assert anyio.current_time() == SMALL.capacity_timeout_s
        assert caught.value.done_offset == 400
        assert index.backlog().rows == index.backlog().rows_max == 400
        assert index.search(clustered(1000)[399], 1)[0].vector_id == "v399"
        async with indexing_in_background(index):
            await index.apply(log.deliveries())
            assert len(index.search(clustered(1)[0], 1000)) == 1000
            await wait_until_indexed(index)
        assert graph_statistics(index).unindexed_rows_highest == 400
        assert graph_statistics(index).capacity_waits >= 2

    run_virtual(main)


def test_rows_unindexed_at_start_do_not_block_new_ones() -> None:
    async def main() -> None:
        log, resident = Log(), ResidentVectors()
        log.write(names(3000), clustered(3000))
        resident.enter(log)
        await resident.apply(log.deliveries(), log)
        index = IndexSink(resident=resident, hnsw=SMALL)
        await index.open(log)
        backlog = index.backlog()
        # `before`: the rows that were there when the sink was opened
        assert (backlog.rows, backlog.rows_max, backlog.before) == (3000, 3400, 3000)
        assert index.search(clustered(3000)[2999], 1)[0].vector_id == "v2999"
        assert index.statistics().hnsw.searches_exact == 1  # type: ignore[union-attr]
        builder, earlier = builder_of(index), backlog.before
        while index.backlog().rows:
            await builder._step(log.threads)
            now = index.backlog()
            assert now.before < earlier
            assert now.rows_max - now.before == 400  # the maximum of new rows stays the same
            earlier = now.before
        assert index.backlog() == Backlog(0, 400)

    run_virtual(main)


def test_cancelled_indexing_ends_after_one_chunk() -> None:
    async def main() -> None:
        log, resident = Log(), ResidentVectors()
        log.write(names(3000), clustered(3000))
        resident.enter(log)
        await resident.apply(log.deliveries(), log)
        index = IndexSink(resident=resident, hnsw=SMALL)
        await index.open(log)
        with anyio.CancelScope() as scope:
            scope.cancel()
            await builder_of(index).run(Uncancellable(), log.clock, lambda: index._cursor(log))
        assert 0 < index.backlog().rows < 3000, "none, or more than one chunk was indexed"

    run_virtual(main)


class Uncancellable:
    """A thread that cannot be cancelled: it waits for each call to end."""

    async def run(self, function: Callable[[], T]) -> T:
        with anyio.CancelScope(shield=True):
            await anyio.lowlevel.checkpoint()
        return function()


def test_waiting_for_capacity_can_be_cancelled() -> None:
    async def main() -> None:
        log, index = Log(), IndexSink(hnsw=SMALL)
        await index.open(log)
        log.write(names(1000), clustered(1000))
        with anyio.move_on_after(0.5) as scope:
            await index.apply(log.deliveries())
        assert scope.cancelled_caught
        assert anyio.current_time() == 0.5
        assert index.resident.next_offset <= 1000
        async with indexing_in_background(index):
            await index.apply(log.deliveries())
            await wait_until_indexed(index)
        assert recall(index, clustered(20, seed=3)) >= 0.95

    run_virtual(main)


def test_only_large_moves_need_reindexing() -> None:
    async def main() -> None:
        log, index = await make_index(2000, replace(SMALL, recent_rows=1, unindexed_rows_max=4000))
        hnsw_rows = builder_of(index).rows_by_namespace["default"]
        assert hnsw_rows.drift_max > 0, "the drift was not measured while rows were indexed"
        before = graph_statistics(index).added_rows
        random = np.random.default_rng(4)
        rows = clustered(2000)
        for _ in range(5):
            for start in range(0, 2000, 100):
                # Move in any direction, by about a third of the allowed drift.
                steps = random.standard_normal((100, DIMENSION)).astype(np.float32)
                lengths = np.linalg.norm(rows[start : start + 100], axis=1, keepdims=True)
                steps *= lengths * np.float32(hnsw_rows.drift_max / 3 / np.sqrt(5 * DIMENSION))
                rows[start : start + 100] += steps
                log.write(names(2000)[start : start + 100], rows[start : start + 100])
                await index.apply([log.deliveries()[-1]])
        assert graph_statistics(index).unindexed_rows <= 20
        assert recall(index, clustered(50, seed=5)) >= 0.95
        for number in range(0, 2000, 40):
            assert index.search(rows[number], 1)[0].vector_id == f"v{number}"
        log.write(names(100), clustered(100, seed=77))
        await index.apply([log.deliveries()[-1]])
        assert graph_statistics(index).unindexed_rows >= 100
        async with indexing_in_background(index):
            await wait_until_indexed(index)
        assert graph_statistics(index).added_rows - before <= 200

    run_virtual(main)


def test_many_tombstones_build_new_graph_during_searches() -> None:
    async def main() -> None:
        settings = replace(SMALL, tombstone_ratio_max=0.5, unindexed_rows_max=4000)
        log, index = await make_index(3000, settings)
        assert graph_statistics(index).rebuilds == 0
        for turn in range(2):
            rows = clustered(3000, seed=10 + turn)
            for start in range(0, 3000, 250):
                log.write(names(3000)[start : start + 250], rows[start : start + 250])
                await index.apply([log.deliveries()[-1]])
                async with indexing_in_background(index):
                    await anyio.sleep(0.01)
                    has_two_graphs = builder_of(index).rows_by_namespace["default"].young is not None
                if has_two_graphs:
                    assert index.search(rows[start], 1)[0].vector_id == f"v{start}"
                assert recall(index, clustered(10, seed=start)) >= 0.9
        async with indexing_in_background(index):
            await wait_until_indexed(index)
            log.append(*(Delta(name, delete()) for name in names(3000)[:2500]))
            await index.apply([log.deliveries()[-1]])
            assert len(index.search(rows[0], 1000)) == 500
            await anyio.sleep(1)
            log.write(["one more"], clustered(1, seed=6))
            await index.apply([log.deliveries()[-1]])
            await wait_until_indexed(index)
            await anyio.sleep(1)
        statistics = graph_statistics(index)
        assert statistics.rebuilds >= 2
        assert statistics.indexed_rows == 501
        assert statistics.tombstones <= 1000
        assert recall(index, clustered(20, seed=8)) >= 0.95

    run_virtual(main)


def test_row_changed_during_indexing_stays_unindexed() -> None:
    async def main() -> None:
        log, index = await make_index(300)
        hnsw_rows = builder_of(index).rows_by_namespace["default"]
        for is_far, unindexed in ((True, 1), (False, 0)):
            await apply_new(log, index, Delta("v7", dense(clustered(1, seed=21)[0])))
            chunk = hnsw_rows.next_chunk()
            assert chunk is not None
            row = clustered(1, seed=22)[0] if is_far else clustered(1, seed=21)[0]
            await apply_new(log, index, Delta("v7", dense(row)))
            chunk.add_nodes()
            hnsw_rows.install(chunk)
            assert hnsw_rows.unindexed_rows == unindexed
            assert index.search(row, 1)[0].vector_id == "v7"
        await apply_new(log, index, Delta("v8", dense(clustered(1, seed=23)[0])))
        chunk = hnsw_rows.next_chunk()
        assert chunk is not None
        await apply_new(log, index, Delta("v8", delete()))
        chunk.add_nodes()
        hnsw_rows.install(chunk)
        assert (hnsw_rows.indexed_rows, hnsw_rows.unindexed_rows) == (299, 0)

    run_virtual(main)


def test_recent_rows_are_found_even_if_graph_misses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        log, index = await make_index(300)
        hnsw_rows = builder_of(index).rows_by_namespace["default"]
        rows = clustered(300)
        changed = [f"v{number}" for number in range(0, 300, 7)]
        log.write(changed, rows[::7] * np.float32(1.001))  # the same direction: they stay indexed
        await index.apply([log.deliveries()[-1]])
        assert hnsw_rows.unindexed_rows == 0
        monkeypatch.setattr(hnsw_rows, "nearest_slots", lambda *_: np.zeros(0, np.intp))
        for number, key in zip(range(0, 300, 7), changed, strict=True):
            assert index.search(rows[number], 1)[0].vector_id == key
        assert builder_of(index).searches_exact == 0

    run_virtual(main)


def test_waiting_search_shortens_a_chunk_and_its_rest_follows() -> None:
    async def main() -> None:
        settings = Hnsw(graph_rows_min=50, unindexed_rows_max=4000)
        log, index = Log(), IndexSink(hnsw=settings)
        await index.open(log)
        log.write(names(2000), clustered(2000))
        await index.apply(log.deliveries())
        hnsw_rows = builder_of(index).rows_by_namespace["default"]
        chunk = hnsw_rows.next_chunk()
        assert chunk is not None
        hnsw_rows.base.has_waiting_search = True  # a waiting search sets this
        chunk.add_nodes()
        hnsw_rows.base.has_waiting_search = False
        assert chunk.done == hnsw_rows.step_rows < len(chunk.slots)
        hnsw_rows.install(chunk)
        base = hnsw_rows.base
        assert hnsw_rows.indexed_rows == base.node_count == len(base.graph) == hnsw_rows.step_rows
        assert hnsw_rows.unindexed_rows == 2000 - hnsw_rows.step_rows
        async with indexing_in_background(index):
            await wait_until_indexed(index)
        assert hnsw_rows.indexed_rows == len(hnsw_rows.base.graph) == 2000

    run_virtual(main)


def test_old_and_new_graph_are_searched_together() -> None:
    async def main() -> None:
        settings = replace(SMALL, tombstone_ratio_max=0.1, unindexed_rows_max=8000)
        log, index = await make_index(6000, settings)
        builder = builder_of(index)
        hnsw_rows = builder.rows_by_namespace["default"]
        rows = clustered(6000)
        rows[:1500] = clustered(1500, seed=31)
        log.write(names(1500), rows[:1500])
        await index.apply([log.deliveries()[-1]])
        while hnsw_rows.young is None or hnsw_rows.young.live_count < 2000:
            assert await builder._step(log.threads)
        assert hnsw_rows.base.live_count > 2000
        before = graph_statistics(index).searches_in_graph
        missed = sum(index.search(rows[row], 1)[0].vector_id != f"v{row}" for row in range(0, 6000, 20))
        assert missed <= 3
        assert graph_statistics(index).searches_in_graph > before
        assert recall(index, clustered(30, seed=3)) >= 0.95

    run_virtual(main)


def test_each_large_namespace_has_its_own_graph() -> None:
    async def main() -> None:
        log, index = await make_index(300)
        async with indexing_in_background(index):
            log.write(names(200), clustered(200, seed=2, dimension=8), namespace="other")
            log.write(names(40), clustered(40, seed=3), namespace="small")
            log.append(*(Delta(f"fact{number}", opaque(b"x"), namespace="facts") for number in range(200)))
            await index.apply(log.deliveries(300))
            await wait_until_indexed(index)
        assert graph_statistics(index).graphs == 2
        assert graph_statistics(index).indexed_rows == 500
        assert index.search(clustered(200, 2, 8)[7], 1, "other")[0].vector_id == "v7"
        assert index.search(clustered(40, 3)[7], 1, "small")[0].vector_id == "v7"
        assert index.search(np.zeros(DIMENSION), 3)[0].score == 0  # equally near to all: searched exactly

    run_virtual(main)


# --- failures


def test_failed_graph_is_reported_once_and_rebuilt(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        log, index = await make_index(300)
        hnsw_rows = builder_of(index).rows_by_namespace["default"]

        def refuse(*_: object) -> None:
            raise GraphError("usearch: out of memory")

        with monkeypatch.context() as patched:
            patched.setattr(type(hnsw_rows.base.graph), "add", refuse)
            async with indexing_in_background(index):
                log.write(names(20), clustered(20, seed=9))
                await index.apply([log.deliveries()[-1]])
                await anyio.sleep(0.1)
        assert index.search(clustered(20, seed=9)[3], 1)[0].vector_id == "v3"
        with pytest.raises(TryAgain, match="indexing rows failed: usearch: out of memory"):
            await index.apply([log.deliveries()[-1]])
        async with indexing_in_background(index):
            await index.apply([log.deliveries()[-1]])
            await wait_until_indexed(index)
        assert graph_statistics(index).indexed_rows == 300
        assert recall(index, clustered(20, seed=3)) >= 0.95

    run_virtual(main)


def test_missing_extra_error_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "usearch.index", None)
    with pytest.raises(UsageError, match=r"pip install 'delta-prop\[hnsw\]'"):
        IndexSink(hnsw=True)
    IndexSink()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"metric": "dot"}, "metric 'dot' is not one of cosine, l2"),
        ({"unindexed_rows_max": 9_000}, r"unindexed_rows_max 9000 is below twice graph_rows_min \(5000\)"),
        ({"drift_share_max": 0.5}, "drift_share_max 0.5 is not from 0 to below 0.5"),
        ({"capacity_timeout_s": 0}, "capacity_timeout_s 0 is not above 0"),
    ],
)
def test_invalid_settings_are_refused(values: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Hnsw(**values)


# --- the file


class Service:
    """A storage sink and an HNSW index over one directory, from one start to the next."""

    def __init__(self, folder: Path, log: Log, settings: Hnsw = SMALL) -> None:
        resident = ResidentVectors()
        self.log = log
        self.storage = StorageSink(folder / "vectors.db", resident=resident)
        self.index = IndexSink(resident=resident, hnsw=settings, path=folder / "vectors.graph")

    async def __aenter__(self) -> Service:
        await self.storage.open(self.log)
        await self.index.open(self.log)
        return self

    async def apply(self) -> None:
        await self.storage.apply(self.log.deliveries())
        await self.index.apply(self.log.deliveries())

    async def __aexit__(self, *_: object) -> None:
        await self.index.aclose()
        await self.storage.aclose()


async def save_index(folder: Path, count: int = 1000) -> Log:
    log = Log()
    async with Service(folder, log) as service, indexing_in_background(service.index):
        log.write(names(count), clustered(count))
        await service.apply()
        await wait_until_indexed(service.index)
    return log


def test_restart_indexes_only_changed_rows(tmp_path: Path) -> None:
    async def main() -> None:
        log = await save_index(tmp_path)
        async with Service(tmp_path, log) as service:
            graphs = graph_statistics(service.index)
            assert (graphs.file, graphs.indexed_rows, graphs.unindexed_rows) == ("loaded", 1000, 0)
            assert graphs.saved_offset == 1000
            assert recall(service.index, clustered(30, seed=5)) >= 0.95
            assert graph_statistics(service.index).searches_exact == 0

        # While the index is closed, the vectors change, under another log.
        log = Log(bytes(16), lamport=log.lamport)
        storage = StorageSink(tmp_path / "vectors.db")
        await storage.open(log)
        log.write(names(20), clustered(20, seed=8))
        log.append(
            *(Delta(f"v{row}", delete()) for row in range(20, 30)), Delta("new", create(clustered(1, 3)[0]))
        )
        log.append(*(Delta(f"v{row}", scale(2.0)) for row in range(30, 60)))  # the same direction
        await storage.apply(log.deliveries())
        await storage.aclose()
        async with Service(tmp_path, log) as service:
            graphs = graph_statistics(service.index)
            assert (graphs.file, graphs.indexed_rows, graphs.unindexed_rows) == ("loaded", 970, 21)
            assert service.index.search(clustered(20, 8)[5], 1)[0].vector_id == "v5"
            assert service.index.search(clustered(1, 3)[0], 1)[0].vector_id == "new"
            async with indexing_in_background(service.index):
                await wait_until_indexed(service.index)
            assert graph_statistics(service.index).added_rows == 21

    run_virtual(main)


@pytest.mark.parametrize(
    ("corrupt", "reason"),
    [
        (lambda content: content[:-100], "is torn"),
        (lambda content: content[:100], "is torn"),
        (lambda content: content[:5000] + bytes([content[5000] ^ 1]) + content[5001:], "is corrupted"),
        (lambda content: b"something else entirely, and long enough", "is not a graph file"),
        (lambda content: b"", "is not a graph file"),
    ],
    ids=["truncated", "short", "one bit", "foreign", "empty"],
)
def test_corrupted_file_is_reported_and_not_used(corrupt: Any, reason: str, tmp_path: Path) -> None:
    async def main() -> None:
        log = await save_index(tmp_path, 300)
        path = tmp_path / "vectors.graph"
        path.write_bytes(corrupt(path.read_bytes()))
        async with Service(tmp_path, log) as service:
            graphs = graph_statistics(service.index)
            assert graphs.file.startswith("not used; all rows are indexed from the start: ")
            assert reason in graphs.file
            assert (graphs.indexed_rows, graphs.unindexed_rows) == (0, 300)
            async with indexing_in_background(service.index):
                await wait_until_indexed(service.index)
        async with Service(tmp_path, log) as service:
            assert graph_statistics(service.index).file == "loaded"

    run_virtual(main)


def test_graph_of_another_space_is_not_used(tmp_path: Path) -> None:
    async def main() -> None:
        log = await save_index(tmp_path, 300)
        async with Service(tmp_path, log, replace(SMALL, metric="l2")) as service:
            assert (
                "its graphs are of space cosine, the index's of space l2"
                in graph_statistics(service.index).file
            )

    run_virtual(main)


def test_file_is_saved_periodically_and_partial_is_ignored(tmp_path: Path) -> None:
    async def main() -> None:
        log = Log()
        path = tmp_path / "vectors.graph"
        log.clock.now = anyio.current_time  # type: ignore[method-assign]
        service = Service(tmp_path, log, replace(SMALL, save_s=60.0))
        await service.storage.open(log)
        await service.index.open(log)
        async with indexing_in_background(service.index):
            log.write(names(300), clustered(300))
            await service.apply()
            await wait_until_indexed(service.index)
            assert not path.exists()
            await anyio.sleep(61)
            first = path.read_bytes()
            await anyio.sleep(61)
            assert graph_statistics(service.index).file == "saved"
            log.write(names(10), clustered(10, seed=4))
            await service.apply()
            await anyio.sleep(61)
            assert path.read_bytes() != first
            (tmp_path / "vectors.graph.new").write_bytes(b"half")
        await service.storage.flush()  # then the process is killed
        await service.storage.aclose()
        async with Service(tmp_path, log) as service:
            assert graph_statistics(service.index).indexed_rows == 300

    run_virtual(main)


def test_file_requires_a_storage_sink(tmp_path: Path) -> None:
    async def main() -> None:
        with pytest.raises(UsageError, match=r"needs a storage sink that shares its vectors"):
            await IndexSink(hnsw=True, path=tmp_path / "g").open(Log())
        with pytest.raises(UsageError, match="path: only an index with hnsw has a file"):
            IndexSink(path=tmp_path / "g")

    run_virtual(main)
