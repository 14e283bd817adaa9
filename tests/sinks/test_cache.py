"""CacheSink against the algebra's fold, with redelivered, late, evicted and concurrently loaded rows.

A late row is a forwarded one that sorts before a row of its vector that is applied already.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from delta_prop_sinks import CacheSink, Delivery
from delta_prop_wire.algebra import VectorState, fold
from delta_prop_wire.delta import Delta, Kind, KnownIds, Source, create, delete, dense, sparse, sparse_add
from delta_prop_wire.encode import encode_batch
from delta_prop_wire.errors import UsageError
from tests.sinks.strategies import logs
from tests.sinks.support import FakeLog, check_state, oracle

if TYPE_CHECKING:
    from delta_prop_wire.batch import LoggedBatch


@given(log=logs(), data=st.data(), mode=st.sampled_from(["refresh", "invalidate"]))
def test_every_hit_equals_the_fold(log: FakeLog, data: st.DataObject, mode: Any) -> None:
    """The loader returns states of the complete log from the start, so it is ahead of the cache."""
    final_states = oracle(log.batches)

    async def loader(namespace: str, vector_id: str) -> VectorState | None:
        return final_states.get((namespace, vector_id))

    async def main() -> None:
        cache = CacheSink(mode=mode, loader=loader, entries_max=data.draw(st.integers(1, 6)))
        await cache.open(log)
        position = 0
        while position < len(log.batches):
            for vector_id in data.draw(st.sets(st.sampled_from("abc"))):
                await cache.get("default", vector_id)
            start = data.draw(st.integers(0, position))
            position = data.draw(st.integers(position + 1, len(log.batches)))
            await cache.apply([Delivery(logged) for logged in log.batches[start:position]])
        for ref, state in final_states.items():
            cached = cache.peek(*ref)
            if cached is not None:
                check_state(cached, state, compare_ignored=False, context=ref)
            check_state(await cache.get(*ref), state, compare_ignored=False, context=ref)

    anyio.run(main)


def defined_by(logged: LoggedBatch) -> set[tuple[str, str]]:
    """Return the vectors whose last local delta in this batch is a create or delete that has an effect."""
    batch = logged.batch
    if logged.source is Source.REPLICA or logged.known_ids is not KnownIds.NONE:
        return set()
    last = {ref: batch.kinds[row] for row, ref in enumerate(zip(batch.namespaces, batch.keys, strict=True))}
    return {ref for ref, kind in last.items() if kind in (Kind.CREATE, Kind.DELETE)}


@given(log=logs())
def test_cached_state_without_loader_equals_the_fold(log: FakeLog) -> None:
    async def main() -> None:
        cache = CacheSink()
        await cache.open(log)
        for position, logged in enumerate(log.batches):
            await cache.apply([Delivery(logged)])
            defined = defined_by(logged)
            for ref, state in oracle(log.batches[: position + 1]).items():
                cached = cache.peek(*ref)
                assert cached is not None or ref not in defined, (
                    "a state that a create or delete defines is not cached"
                )
                if cached is not None:
                    assert cached.content == state.content

    anyio.run(main)


def test_redelivered_batches_have_one_effect() -> None:
    async def main() -> None:
        log = FakeLog()
        names = [f"v{i}" for i in range(12)]
        log.append(*(Delta(name, create([1, 1])) for name in names))
        log.append(*(Delta(name, sparse_add([0], [1])) for name in names))
        cache = CacheSink()
        await cache.open(log)
        await cache.apply(log.deliveries())
        await cache.apply(log.deliveries())
        log.append(*(Delta(name, sparse_add([0], [1])) for name in names[:6] * 2))
        await cache.apply(log.deliveries()[1:])
        for ref, state in oracle(log.batches).items():
            check_state(cache.peek(*ref), state, context=ref)
        assert cache.statistics().refreshed == 36

    anyio.run(main)


def next_change(log: FakeLog, number: float) -> list[Delivery]:
    """Append a row that the cache buffers, as it only sets a number; return its delivery."""
    return [Delivery(log.append(Delta("a", sparse([0], [number]))))]


def test_redelivered_buffered_rows_have_one_effect() -> None:
    async def main() -> None:
        log, cache = FakeLog(), CacheSink()
        await cache.open(log)
        await cache.apply([Delivery(log.append(Delta("a", create([1, 2]))))])
        first, second = next_change(log, 5.0), next_change(log, 6.0)
        for deliveries in (first, second, first):
            await cache.apply(deliveries)
        check_state(cache.peek("default", "a"), oracle(log.batches)["default", "a"], context="a")
        await cache.apply(next_change(log, 7.0))
        check_state(cache.peek("default", "a"), oracle(log.batches)["default", "a"], context="a")
        assert cache.statistics().refreshed == 4

    anyio.run(main)


def test_row_contained_in_loaded_state_is_not_refolded() -> None:
    async def main() -> None:
        log = FakeLog()
        log.append(Delta("a", create([1, 2])))
        earlier = next_change(log, 5.0)
        next_change(log, 6.0)

        async def loader(namespace: str, vector_id: str) -> VectorState | None:
            return oracle(log.batches)[namespace, vector_id]

        cache = CacheSink(loader=loader)
        await cache.open(log)
        await cache.get("default", "a")
        await cache.apply(earlier)
        check_state(cache.peek("default", "a"), oracle(log.batches)["default", "a"], context="a")

    anyio.run(main)


def test_buffered_row_applied_during_a_load_is_not_lost() -> None:
    async def main() -> None:
        log = FakeLog()
        log.append(Delta("a", create([1, 2])))
        log.append(Delta("b", create([1, 2])))
        loads = 0

        async def loader(namespace: str, vector_id: str) -> VectorState | None:
            nonlocal loads
            state = oracle(log.batches)[namespace, vector_id]
            if not loads:
                await cache.apply(next_change(log, 5.0))
            loads += 1
            return state

        cache = CacheSink(loader=loader)
        await cache.open(log)
        await cache.apply(log.deliveries()[1:])  # the namespace must have a cached entry
        check_state(await cache.get("default", "a"), oracle(log.batches)["default", "a"], context="a")
        assert loads == 2

    anyio.run(main)


def test_closing_drops_all_entries() -> None:
    async def main() -> None:
        log, cache = FakeLog(), CacheSink()
        await cache.open(log)
        await cache.apply([Delivery(log.append(Delta("a", create([1, 2]))))])
        await cache.apply(next_change(log, 5.0))
        await cache.aclose()
        statistics = cache.statistics()
        assert (statistics.entries, statistics.bytes, statistics.refreshed) == (0, 0, 2)

    anyio.run(main)


def test_block_applied_during_a_load_is_not_lost() -> None:
    async def main() -> None:
        log = FakeLog()
        names = [f"v{i}" for i in range(12)]
        log.append(*(Delta(name, dense([1])) for name in names))
        cache = CacheSink()

        async def loader(namespace: str, vector_id: str) -> VectorState | None:
            state = oracle(log.batches)[namespace, vector_id]
            if len(log.batches) == 1:
                log.append(*(Delta(name, sparse_add([0], [1])) for name in names))
                await cache.apply(log.deliveries(12))
            return state

        cache._loader = loader
        await cache.open(log)
        await cache.apply(log.deliveries())
        for _ in range(2):
            check_state(await cache.get("default", "v3"), oracle(log.batches)["default", "v3"])

    anyio.run(main)


def test_load_overtaken_by_a_delta_is_retried() -> None:
    async def main() -> None:
        log = FakeLog()
        log.append(Delta("a", dense([1])))
        load_begun, release = anyio.Event(), anyio.Event()
        loaded_states = []

        async def loader(namespace: str, vector_id: str) -> VectorState | None:
            state = oracle(log.batches)[namespace, vector_id]
            loaded_states.append(state)
            if len(loaded_states) == 1:
                load_begun.set()
                await release.wait()
            return state

        cache = CacheSink(loader=loader)
        await cache.open(log)
        await cache.apply(log.deliveries())
        results: list[VectorState | None] = []

        async def read() -> None:
            results.append(await cache.get("default", "a"))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read)
            tasks.start_soon(read)
            await load_begun.wait()
            log.append(Delta("a", sparse_add([0], [5])))
            await cache.apply(log.deliveries(1))
            release.set()
        assert len(loaded_states) == 2  # retried once; the second caller waited for the result
        for state in [*results, cache.peek("default", "a")]:
            check_state(state, oracle(log.batches)["default", "a"])

    anyio.run(main)


def test_state_of_lagging_source_is_not_cached() -> None:
    async def main() -> None:
        log = FakeLog()
        log.append(Delta("a", dense([1])))
        log.append(Delta("a", dense([2])))
        loader_offset = 1

        async def loader(*ref: str) -> VectorState | None:
            return oracle(log.batches[:loader_offset])[ref[0], ref[1]]

        cache = CacheSink(loader=loader, loader_offset=lambda: loader_offset)
        await cache.open(log)
        await cache.apply(log.deliveries())
        lagging = await cache.get("default", "a")
        assert lagging is not None
        assert lagging.content == fold([((1, 0, 0), dense([1]), None)]).content
        assert cache.peek("default", "a") is None
        loader_offset = 2
        check_state(await cache.get("default", "a"), oracle(log.batches)["default", "a"])
        assert cache.peek("default", "a") is not None

    anyio.run(main)


def test_late_delta_drops_the_entry() -> None:
    async def main() -> None:
        log = FakeLog()
        log.append(Delta("a", create([1])), Delta("a", sparse_add([0], [1])))
        cache = CacheSink()
        await cache.open(log)
        await cache.apply(log.deliveries())
        assert cache.peek("default", "a") is not None
        log.forward(encode_batch([Delta("a", dense([9]))], origin=0x30, base=1), 1)
        await cache.apply(log.deliveries(2))
        assert cache.peek("default", "a") is None
        assert cache.statistics().out_of_order == 1

    anyio.run(main)


def test_least_recently_used_entries_are_evicted() -> None:
    async def main() -> None:
        log = FakeLog()
        log.append(*(Delta(f"v{i}", create([i])) for i in range(3)))
        cache = CacheSink(entries_max=3)
        await cache.open(log)
        await cache.apply(log.deliveries())
        assert cache.peek("default", "v0") is not None
        log.append(Delta("v3", create([3])))
        await cache.apply(log.deliveries(3))
        assert [cache.peek("default", f"v{i}") is not None for i in range(4)] == [True, False, True, True]
        statistics = cache.statistics()
        assert (statistics.entries, statistics.evicted, statistics.hits, statistics.misses) == (3, 1, 4, 1)

        large = CacheSink(bytes_max=100_000)
        await large.open(log)
        log.append(*(Delta(f"w{i}", create([i] * 1000), namespace="w") for i in range(60)))
        await large.apply(log.deliveries())
        assert large.statistics().bytes <= 100_000
        assert 15 <= large.statistics().entries <= 25
        await large.aclose()
        assert (large.statistics().entries, large.statistics().bytes) == (0, 0)

    anyio.run(main)


def test_cached_tombstone_is_returned() -> None:
    async def main() -> None:
        log = FakeLog()
        log.append(Delta("a", create([1])), Delta("a", delete()))
        cache = CacheSink()
        await cache.open(log)
        await cache.apply(log.deliveries())
        state = await cache.get("default", "a")
        assert state is not None
        assert not state.alive

    anyio.run(main)


def test_invalid_arguments_are_refused() -> None:
    with pytest.raises(UsageError, match="entries_max 0"):
        CacheSink(entries_max=0)
    with pytest.raises(UsageError, match="mode 'writeback'"):
        CacheSink(mode="writeback")  # type: ignore[arg-type]
