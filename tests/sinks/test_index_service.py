"""The HNSW index in a real propagator with its real thread: freshness, bounds, recall, closing."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np
import pytest

from delta_prop import Propagator
from delta_prop.api.settings import Settings
from delta_prop_sinks import Hnsw, IndexSink
from delta_prop_wire.delta import Kind

if TYPE_CHECKING:
    from numpy.typing import NDArray

DIMENSION = 32
BATCH = 50
UPDATES_MIN = 40 * BATCH
SETTINGS = Hnsw(graph_rows_min=500, unindexed_rows_max=1500)


def clustered(count: int, random: Any) -> NDArray[np.float32]:
    centres = np.random.default_rng(0).standard_normal((100, DIMENSION))
    rows = centres[random.integers(0, len(centres), count)] + 0.4 * random.standard_normal((count, DIMENSION))
    return rows.astype(np.float32)


def names(slots: NDArray[np.intp]) -> list[str]:
    return [f"v{slot}" for slot in slots.tolist()]


def count_background_threads() -> int:
    return sum(thread.name == "delta-prop background" for thread in threading.enumerate())


def find_exactly(index: IndexSink, query: NDArray[np.float32]) -> set[str]:
    return {hit.vector_id for hit in IndexSink(resident=index.resident).search(query, 10)}


async def publish(propagator: Propagator, rows: NDArray[np.float32], slots: NDArray[np.intp]) -> Any:
    last_ack = None
    for start in range(0, len(slots), 500):
        part = slots[start : start + 500]
        last_ack = await propagator.publish_many(names(part), rows[part], kind=Kind.DENSE)
    return last_ack


@pytest.mark.alone
def test_updates_are_found_at_once_while_rows_are_indexed(full: bool) -> None:
    count, seconds = (20_000, 30.0) if full else (4_000, 2.0)

    async def main() -> None:
        random = np.random.default_rng(1)
        rows, index = clustered(count, random), IndexSink(hnsw=SETTINGS)
        checked = updates = 0
        found_counts: list[int] = []  # of the 10 exact hits, how many a search by the graph finds
        async with Propagator() as propagator:
            await propagator.attach(index)
            last_ack = await publish(propagator, rows, np.arange(count))
            await propagator.wait_visible(last_ack, timeout_s=60)

            def has_done_enough() -> bool:
                statistics = index.statistics().hnsw
                assert statistics is not None
                return updates >= UPDATES_MIN and statistics.added_rows >= count / 2

            end = time.monotonic() + seconds
            while time.monotonic() < end or not has_done_enough():  # a busy machine takes longer
                slots = random.choice(count, BATCH, replace=False)
                moved = slots[: BATCH // 2]
                rows[moved] = clustered(len(moved), random)
                rows[slots[BATCH // 2 :]] *= np.float32(1) + np.float32(0.01) * random.standard_normal(
                    (BATCH // 2, DIMENSION), np.float32
                )
                last_ack = await publish(propagator, rows, slots)
                await propagator.wait_visible(last_ack, timeout_s=60)
                for slot in slots[:: BATCH // 5].tolist():
                    hit = index.search(rows[slot], 1)[0]
                    assert (hit.vector_id, hit.dot.counter > 0) == (f"v{slot}", True)
                    checked += 1
                updates += BATCH
                if updates % (20 * BATCH) == 0:
                    query = clustered(1, random)[0]
                    found_counts.append(
                        len(find_exactly(index, query) & {hit.vector_id for hit in index.search(query, 10)})
                    )
            statistics = index.statistics().hnsw
            assert statistics is not None
        print(f"{count} vectors, {updates} updates, {checked} searches checked, {statistics}")
        assert checked > 20
        assert np.mean(found_counts) / 10 >= 0.95
        assert 0 < statistics.unindexed_rows_highest <= SETTINGS.unindexed_rows_max
        assert statistics.added_rows >= count / 2
        assert statistics.searches_in_graph > 0

    anyio.run(main)
    assert count_background_threads() == 0


@pytest.mark.parametrize("ending", ["detached", "closed", "cancelled", "failed"])
def test_no_thread_remains_however_service_ends_under_load(ending: str) -> None:
    class Failed(Exception):
        pass

    async def main() -> None:
        random = np.random.default_rng(1)
        rows = clustered(3_000, random)
        with anyio.move_on_after(60) as scope:
            async with Propagator(Settings(close_timeout_s=3.0)) as propagator:
                index = IndexSink(hnsw=SETTINGS)
                await propagator.attach(index)
                await publish(propagator, rows, np.arange(3_000))
                while index.backlog().rows == 0:  # noqa: ASYNC110 - no event signals this
                    await anyio.sleep(0.001)
                assert count_background_threads() == 1
                if ending == "detached":
                    await propagator.detach(index.name)
                    assert count_background_threads() == 0
                if ending == "cancelled":
                    scope.cancel()
                    await anyio.sleep(1)
                if ending == "failed":
                    raise Failed

    if ending == "failed":
        with pytest.raises(Failed):
            anyio.run(main)
    else:
        anyio.run(main)
    assert count_background_threads() == 0
