"""The demo's `SlowSink` and `CrashingSink` pass on every delta despite delays and a simulated kill."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import anyio
import numpy as np
import pytest

from delta_prop import Delta, Propagator, create, sparse_add
from delta_prop.demo.faulty_sinks import CrashingSink, SlowSink
from delta_prop.demo.system import Workspace
from delta_prop.testing import run_virtual, virtual_world
from delta_prop.testing.world import VirtualClock
from delta_prop_sinks.callback import CallbackSink
from delta_prop_sinks.storage import StorageSink
from delta_prop_wire.errors import Refused

IDS = [f"v{number}" for number in range(10)]


def test_slow_sink_multiplies_its_time_and_loses_nothing() -> None:
    applied_offsets: list[int] = []

    async def main() -> tuple[float, float, float, float]:
        async def take(offset: int, _: Delta) -> None:
            await anyio.sleep(0.01)
            applied_offsets.append(offset)

        slow_sink = SlowSink(CallbackSink(take, name="audit"), VirtualClock())
        async with Propagator(world=virtual_world()) as propagator:
            await propagator.attach(slow_sink)

            async def publish_and_wait(name: str) -> float:
                started = anyio.current_time()
                published = await propagator.publish(Delta(name, create([1.0])))
                await propagator.wait_visible(published)
                return anyio.current_time() - started

            usual_s = await publish_and_wait("a")
            reported_s = slow_sink.slow_down(100)
            slow_s = await publish_and_wait("b")
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(publish_and_wait, "c")
                await anyio.sleep(0.2)
                started = anyio.current_time()
                slow_sink.release()
            return usual_s, reported_s, slow_s, anyio.current_time() - started

    usual_s, reported_s, slow_s, released_s = run_virtual(main)
    assert usual_s == pytest.approx(reported_s) == pytest.approx(0.01)
    assert slow_s == pytest.approx(1.0)
    assert released_s == pytest.approx(0.01)
    assert applied_offsets == [0, 1, 2]


async def run_crash(
    tmp_path: Path, rows: int, *, flushed: bool
) -> tuple[CrashingSink, CrashingSink, list[float]]:
    """Kill a sink `rows` rows after its first 20; return it, its successor, and the values in the store.

    `flushed`: the killed sink wrote its rows to the file.
    """
    workspace = Workspace(tmp_path)
    path = workspace.replica
    async with Propagator() as propagator:
        dead_sink = CrashingSink(
            StorageSink(path, name="replica", flush_s=0.001 if flushed else 3600), workspace
        )
        await propagator.attach(dead_sink)
        published = await propagator.publish_many(IDS, np.zeros((10, 1), np.float32))
        await propagator.wait_visible(published, committed=flushed)
        dead_sink.kill_after(10 + rows)
        for _ in range(2):
            await propagator.publish(*[Delta(vector_id, sparse_add([0], [1])) for vector_id in IDS])
        with pytest.raises(Refused, match="killed within a batch"):
            await propagator.wait_visible(30, timeout_s=10)
        await propagator.detach("replica")
        shutil.copyfile(path, tmp_path / "after.db")
        await propagator.publish(*[Delta(vector_id, sparse_add([0], [1])) for vector_id in IDS])
        store = StorageSink(workspace.crashed_replica, name="replica")
        next_sink = CrashingSink(store, workspace)
        await propagator.attach(next_sink)
        await propagator.wait_visible(40, timeout_s=10)
        await store.flush()
        values = [state.vector[0].item() async for _, _, state in store.rows() if state.vector is not None]
    return dead_sink, next_sink, values


@pytest.mark.parametrize("rows", [0, 1, 9])
@pytest.mark.parametrize("flushed", [False, True])
def test_killed_store_is_resumed_exactly_once(tmp_path: Path, rows: int, flushed: bool) -> None:
    dead_sink, next_sink, values = anyio.run(lambda: run_crash(tmp_path, rows, flushed=flushed))
    assert dead_sink.is_dead
    assert dead_sink.applied_end == 20 + rows
    assert next_sink.resume_offset in ((10, 20) if flushed else (0,))
    # the killed store wrote nothing after the kill
    with closing(sqlite3.connect(tmp_path / "after.db")) as connection:
        stored_cursor = connection.execute("SELECT next_offset FROM cursor").fetchall()
    assert stored_cursor == ([(next_sink.resume_offset,)] if flushed else [])
    assert (
        next_sink.count_redelivered(dead_sink.applied_end) == dead_sink.applied_end - next_sink.resume_offset
    )
    assert next_sink.applied_end == 40
    assert values == [3.0] * 10


def test_redelivered_rows_are_those_below_an_offset() -> None:
    crashing_sink = CrashingSink(StorageSink("nowhere.db"), Workspace(Path("nowhere")))
    crashing_sink.offset_ranges = [(5, 8), (8, 12), (12, 20)]
    assert [crashing_sink.count_redelivered(offset) for offset in (0, 6, 8, 10, 30)] == [0, 1, 3, 5, 15]
