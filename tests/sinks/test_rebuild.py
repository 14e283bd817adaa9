"""Sinks that are rebuilt from states hold exactly the fold; earlier rows are removed."""

from __future__ import annotations

import gc
import sqlite3
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from delta_prop.testing import run_virtual
from delta_prop_sinks import (
    CacheSink,
    Hnsw,
    IndexSink,
    Rebuildable,
    ResidentVectors,
    StopSink,
    StorageSink,
    TryAgain,
)
from delta_prop_sinks.callback import CallbackSink
from delta_prop_sinks.jsonlines import JsonLinesSink
from delta_prop_wire.delta import Delta, create, delete, offset, opaque, scale, sparse_add
from tests.sinks.support import FakeLog, check_state, oracle, states_at

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

OTHER_LOG = bytes(16)


def fill_log(log: FakeLog, rounds: int = 3) -> FakeLog:
    """Append vectors with additive changes, bytes, metadata and tombstones; one batch per round."""
    for number in range(rounds):
        log.append(
            *(Delta(f"v{i}", create([i, number, 2, 3]), metadata={"n": number}) for i in range(number, 6)),
            *(Delta(f"v{i}", sparse_add([0], [1.5])) for i in range(4)),
            Delta("v1", scale(2)),
            Delta("v2", offset(0.25), metadata={"more": number}),
            Delta("bytes", opaque(b"b" * (number + 1))),
            Delta(f"gone-{number}", create([1, 1, 1, 1])),
            Delta(f"gone-{number}", delete()),
            Delta("never", scale(3)),
        )
    return log


async def rebuild(sink: Any, log: FakeLog, end: int, *, rows_per_call: int = 4) -> None:
    assert isinstance(sink, Rebuildable)
    states = states_at(log, end)
    await sink.begin_rebuild(end)
    for start in range(0, len(states), rows_per_call):
        await sink.load_states(states[start : start + rows_per_call])
        await sink.load_states(states[start : start + rows_per_call])  # a failed call is retried
    lamport = max((row.state.key[0] for row in states if row.state.key), default=0)
    await sink.end_rebuild(end, lamport)


async def check(get: Callable[[str, str], Any], log: FakeLog, end: int | None = None) -> None:
    batches = [logged for logged in log.batches if end is None or logged.next_offset <= end]
    for ref, expected in oracle(batches).items():
        check_state(await get(*ref), expected, context=ref)


@pytest.mark.parametrize("bytes_max", [1 << 30, 6_000])
def test_rebuilt_storage_continues_after_the_snapshot(tmp_path: Path, bytes_max: int) -> None:
    async def main() -> None:
        path, old = tmp_path / "v.db", FakeLog(OTHER_LOG, lamport=500)
        sink = StorageSink(path)
        await sink.open(old)
        old.append(Delta("of another log", create([1, 2, 3, 4, 5, 6, 7])), Delta("v1", create([9] * 7)))
        await sink.apply(old.deliveries())
        await sink.aclose()

        log = fill_log(FakeLog())
        middle = log.batches[1].next_offset
        sink = StorageSink(path, resident=ResidentVectors(resident_bytes_max=bytes_max))
        point = await sink.open(log)
        assert point.lamport > 500
        await rebuild(sink, log, middle)
        assert log.commits[-1] == middle
        assert await sink.get("default", "of another log") is None
        await check(sink.get, log, middle)
        await sink.apply(log.deliveries(middle))
        await check(sink.get, log)
        await sink.aclose()
        sink = StorageSink(path)
        point = await sink.open(log)
        assert (point.cursor.next_offset, point.rebuilding) == (log.next_offset, False)
        assert point.lamport == log.lamport
        await check(sink.get, log)
        assert len([row async for row in sink.rows()]) == len(oracle(log.batches))
        await sink.aclose()

    run_virtual(main)


@pytest.mark.parametrize("steps_done", range(4))
def test_unfinished_storage_rebuild_is_reported_and_redone(tmp_path: Path, steps_done: int) -> None:
    async def main() -> None:
        path, log = tmp_path / "v.db", fill_log(FakeLog())
        sink = StorageSink(path)
        await sink.open(log)
        await sink.apply(log.deliveries())
        await sink.flush()
        states, middle = states_at(log, log.batches[1].next_offset), log.batches[1].next_offset
        if steps_done:
            await sink.begin_rebuild(middle)
            await check(sink.get, log)  # readers still see the old rows
        if steps_done > 1:
            await sink.load_states(states[:5])
        if steps_done > 2:
            await sink.load_states(states[5:])
        del sink  # the process crashes
        gc.collect()
        with sqlite3.connect(path) as reader:  # another reader still has the old rows
            count = reader.execute("SELECT count(*) FROM vectors").fetchone()[0]
        reader.close()
        assert count == len(oracle(log.batches))

        sink = StorageSink(path)
        point = await sink.open(log)
        assert point.rebuilding is (steps_done > 0)
        await sink.aclose()  # writes nothing and finishes nothing
        sink = StorageSink(path)
        assert (await sink.open(log)).rebuilding is (steps_done > 0)
        log.commits.clear()
        await sink.flush()
        assert not log.commits
        await rebuild(sink, log, middle)
        await sink.apply(log.deliveries(middle))
        await check(sink.get, log)
        await sink.aclose()
        sink = StorageSink(path)
        assert not (await sink.open(log)).rebuilding
        await sink.aclose()

    run_virtual(main)


def test_rebuild_step_is_retried_after_disk_failure(tmp_path: Path) -> None:
    async def main() -> None:
        log = fill_log(FakeLog())
        sink = StorageSink(tmp_path / "v.db")
        await sink.open(log)
        states = states_at(log, log.next_offset)

        async def fail_then_retry(call: Callable[[], Any]) -> None:
            log.threads.failure = OSError(5, "Input/output error")
            with pytest.raises(TryAgain):
                await call()
            log.threads.failure = None
            await call()

        await fail_then_retry(lambda: sink.begin_rebuild(log.next_offset))
        await fail_then_retry(lambda: sink.load_states(states))
        await fail_then_retry(lambda: sink.end_rebuild(log.next_offset, log.lamport))
        await check(sink.get, log)
        await sink.aclose()

    run_virtual(main)


@pytest.mark.parametrize("hnsw", [False, Hnsw(graph_rows_min=4, unindexed_rows_max=64)])
def test_index_with_own_vectors_is_rebuilt(hnsw: Any) -> None:
    async def main() -> None:
        log, fresh = fill_log(FakeLog()), IndexSink(hnsw=hnsw)
        index = IndexSink(hnsw=hnsw)
        for sink in (index, fresh):
            await sink.open(log)
        middle = log.batches[1].next_offset
        await index.apply(log.deliveries())
        await rebuild(index, log, middle)
        await fresh.apply([delivery for delivery in log.deliveries() if delivery.next_offset <= middle])
        check_same_hits(index, fresh)
        for sink in (index, fresh):
            await sink.apply(log.deliveries(middle))
        check_same_hits(index, fresh)
        await index.begin_rebuild(middle)
        await index.aclose()
        assert (await index.open(log)).rebuilding
        index.resident.resident_bytes_max = 100
        await index.begin_rebuild(middle)
        with pytest.raises(StopSink, match="resident_bytes_max"):
            await index.load_states(states_at(log, middle))
        for sink in (index, fresh):
            await sink.aclose()

    run_virtual(main)


def check_same_hits(index: IndexSink, fresh: IndexSink) -> None:
    for metric in ("cosine", "l2"):
        query = [1.0, 2.0, 3.0, 4.0]
        assert index.search(query, 10, metric=metric) == fresh.search(query, 10, metric=metric)  # type: ignore[arg-type]


def test_index_sharing_vectors_waits_for_storage(tmp_path: Path) -> None:
    async def main() -> None:
        log = fill_log(FakeLog())
        middle = log.batches[1].next_offset
        resident = ResidentVectors()
        storage = StorageSink(tmp_path / "v.db", resident=resident)
        hnsw = Hnsw(graph_rows_min=4, unindexed_rows_max=64)
        index = IndexSink(resident=resident, hnsw=hnsw)
        storage_context, index_context = Context(log), Context(log)
        await storage.open(storage_context)
        await index.open(index_context)
        await storage.apply(log.deliveries())
        await index.apply(log.deliveries())
        before = index.search([1, 2, 3, 4], 10)
        await storage.begin_rebuild(middle)
        await storage.load_states(states_at(log, middle))
        log.append(Delta("v1", sparse_add([0], [100])))
        newest = log.deliveries(log.batches[-2].next_offset)
        delivered: list[str] = []

        async def deliver() -> None:
            await index.apply(newest)
            delivered.append("index")

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(deliver)
            await anyio.sleep(1)
            assert index.search([1, 2, 3, 4], 10) == before  # the old hits, until the rebuild is complete
            await storage.end_rebuild(middle, 20)
            await anyio.sleep(1)
            assert not delivered  # the rows in between were not redelivered yet
            await storage.apply(log.deliveries(middle))
        assert delivered
        await check(storage.get, log)
        fresh = IndexSink()
        await fresh.open(log)
        await fresh.apply(log.deliveries())
        check_same_hits(index, fresh)
        assert index.statistics().hnsw.unindexed_rows >= 6  # type: ignore[union-attr]

        await index.begin_rebuild(middle)  # an index with shared vectors only rebuilds its graph
        await index.load_states(states_at(log, middle))
        await index.end_rebuild(middle, 20)
        await check(storage.get, log)
        await index.aclose()
        await storage.aclose()

    run_virtual(main)


@pytest.mark.parametrize("rebuild_ends", [True, False])
def test_index_opened_during_storage_rebuild_waits(tmp_path: Path, rebuild_ends: bool) -> None:
    async def main() -> None:
        log, resident = fill_log(FakeLog()), ResidentVectors()
        end = log.batches[-1].next_offset
        storage, index = StorageSink(tmp_path / "v.db", resident=resident), IndexSink(resident=resident)
        storage_context, index_context, states = Context(log), Context(log), states_at(log, end)
        await storage.open(storage_context)
        await storage.apply(log.deliveries())
        await storage.begin_rebuild(end)
        await storage.load_states(states)
        file, release = storage._file, anyio.Event()
        run = storage._run_on_file

        async def slow(context: Any, function: Any) -> Any:
            if getattr(function, "func", None) == file.page_of_blocks:
                await release.wait()
            return await run(context, function)

        storage._run_on_file = slow  # type: ignore[method-assign]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(storage.end_rebuild, end, 20)
            await anyio.sleep(1)
            assert resident.rebuilding
            assert not resident.complete
            if not rebuild_ends:
                with pytest.raises(TryAgain, match="wait until that sink has finished and reached 0"):
                    await index.open(index_context)
                release.set()
                return
            tasks.start_soon(index.open, index_context)
            await anyio.sleep(1)
            release.set()
        assert resident.pinned
        fresh = IndexSink()
        await fresh.open(log)
        await fresh.apply(log.deliveries())
        check_same_hits(index, fresh)
        await index.aclose()
        await storage.aclose()

    run_virtual(main)


class Context:
    """A sink's own context of a shared log."""

    def __init__(self, log: FakeLog) -> None:
        self._log = log

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)


def test_index_stops_waiting_for_rebuild_with_an_error(tmp_path: Path) -> None:
    async def main() -> None:
        log, resident = fill_log(FakeLog()), ResidentVectors()
        storage = StorageSink(tmp_path / "v.db", resident=resident)
        index = IndexSink(resident=resident)
        await storage.open(Context(log))  # type: ignore[arg-type]
        await index.open(Context(log))  # type: ignore[arg-type]
        await storage.begin_rebuild(0)
        with pytest.raises(TryAgain, match="another sink rebuilds"):
            await index.apply(log.deliveries())
        await index.aclose()
        await storage.aclose()

    run_virtual(main)


def test_cache_is_rebuilt_in_both_modes() -> None:
    async def main() -> None:
        log = fill_log(FakeLog())
        middle = log.batches[1].next_offset
        for mode in ("refresh", "invalidate"):
            cache = CacheSink(mode=mode)  # type: ignore[arg-type]
            await cache.open(log)
            old = FakeLog(OTHER_LOG, lamport=900)
            old.append(Delta("v1", create([5, 5])), Delta("of another log", create([5, 5])))
            await cache.apply(old.deliveries())
            await rebuild(cache, log, middle)
            assert cache.peek("default", "of another log") is None
            if mode == "refresh":
                await check(cache.get, log, middle)
                await cache.apply(log.deliveries(middle))
                await check(cache.get, log)
            else:
                assert cache.statistics().entries == 0
            point = await cache.open(log)
            assert point.cursor.next_offset == (log.next_offset if mode == "refresh" else middle)

    run_virtual(main)


@pytest.mark.parametrize("bounds", [{"entries_max": 4}, {"bytes_max": 8_000}])
def test_rebuilt_cache_keeps_within_its_bounds(bounds: dict[str, int]) -> None:
    async def main() -> None:
        log = FakeLog()
        for number in range(2):
            fill_log(log, 1)
            log.append(*(Delta(f"w{i}", opaque(bytes([number]) * 1_000)) for i in range(10)))
        middle = log.batches[1].next_offset
        cache = CacheSink(**bounds)
        await cache.open(log)

        def check_cached_ids(end: int) -> set[str]:
            """Check the bounds and each cached state; return the ids of the cached vectors."""
            statistics, states = cache.statistics(), states_at(log, end)
            assert statistics.entries <= cache.entries_max
            assert statistics.bytes <= cache.bytes_max
            cached_states = [(row, cache.peek(row.namespace, row.vector_id)) for row in states]
            assert statistics.entries == sum(state is not None for _, state in cached_states) < len(states)
            for row, state in cached_states:
                assert state is None or (state.content, state.key) == (row.state.content, row.state.key)
            return {row.vector_id for row, state in cached_states if state is not None}

        await rebuild(cache, log, middle)
        assert check_cached_ids(middle) == {"w6", "w7", "w8", "w9"}, "other states than those loaded last"
        evicted = cache.statistics().evicted
        assert evicted
        await cache.apply(log.deliveries(middle))
        assert check_cached_ids(log.next_offset) >= {"v3", "v4", "v5", "gone-0"}, (
            "a vector created last is missing"
        )
        assert cache.statistics().evicted > evicted

    run_virtual(main)


def test_jsonlines_and_callback_are_not_rebuildable(tmp_path: Path) -> None:
    assert not isinstance(JsonLinesSink(tmp_path / "lines"), Rebuildable)
    assert not isinstance(CallbackSink(print), Rebuildable)
