"""The two sinks of the hard scenes: they hand on every delta, slow or dead as they are."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING

import anyio
import numpy as np
import pytest

from delta_prop import Delta, Propagator, create, sparse_add
from delta_prop.demo.faulty_sinks import CrashingSink, SlowSink
from delta_prop.testing import run_virtual, virtual_world
from delta_prop_sinks.callback import CallbackSink
from delta_prop_sinks.storage import StorageSink
from delta_prop_wire.errors import Refused

if TYPE_CHECKING:
    from pathlib import Path

IDS = [f"v{number}" for number in range(10)]


def test_a_slowed_sink_takes_so_many_times_its_usual_time_and_loses_nothing() -> None:
    got: list[int] = []

    async def main() -> tuple[float, float, float, float]:
        async def take(offset: int, _: Delta) -> None:
            await anyio.sleep(0.01)
            got.append(offset)

        slowed = SlowSink(CallbackSink(take, name="audit"), anyio.current_time)
        async with Propagator(world=virtual_world()) as propagator:
            await propagator.attach(slowed)

            async def one(name: str) -> float:
                started = anyio.current_time()
                published = await propagator.publish(Delta(name, create([1.0])))
                await propagator.wait_visible(published)
                return anyio.current_time() - started

            usual = await one("a")
            said = slowed.slow_down(100)
            slow = await one("b")
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(one, "c")
                await anyio.sleep(0.2)
                started = anyio.current_time()
                slowed.release()
            return usual, said, slow, anyio.current_time() - started

    usual, said, slow, let_go = run_virtual(main)
    assert usual == pytest.approx(said) == pytest.approx(0.01)
    assert slow == pytest.approx(1.0)
    assert let_go == pytest.approx(0.01)
    assert got == [0, 1, 2]


async def crash(
    tmp_path: Path, rows: int, *, flushed: bool
) -> tuple[CrashingSink, CrashingSink, list[float]]:
    """Two batches of ten, death after so many rows more; then what a new store makes of what was left."""
    path, left = tmp_path / "store.db", tmp_path / "left.db"

    def leave() -> None:
        for suffix in ("", "-wal"):
            shutil.copyfile(f"{path}{suffix}", f"{left}{suffix}")

    async with Propagator() as propagator:
        doomed = CrashingSink(StorageSink(path, name="replica", flush_s=0.001 if flushed else 3600), leave)
        await propagator.attach(doomed)
        published = await propagator.publish_many(IDS, np.zeros((10, 1), np.float32))
        await propagator.wait_visible(published, committed=flushed)
        doomed.kill_after(10 + rows)
        for _ in range(2):
            await propagator.publish(*[Delta(one, sparse_add([0], [1])) for one in IDS])
        with pytest.raises(Refused, match="killed within a batch"):
            await propagator.wait_visible(30, timeout_s=10)
        await propagator.detach("replica")
        shutil.copyfile(path, tmp_path / "after.db")
        await propagator.publish(*[Delta(one, sparse_add([0], [1])) for one in IDS])
        store = StorageSink(left, name="replica")
        heir = CrashingSink(store)
        await propagator.attach(heir)
        await propagator.wait_visible(40, timeout_s=10)
        await store.flush()
        values = [state.vector[0].item() async for _, _, state in store.rows() if state.vector is not None]
    return doomed, heir, values


@pytest.mark.parametrize("rows", [0, 1, 9])
@pytest.mark.parametrize("flushed", [False, True])
def test_a_killed_store_leaves_its_file_and_the_next_one_counts_nothing_twice(
    tmp_path: Path, rows: int, flushed: bool
) -> None:
    doomed, heir, values = anyio.run(lambda: crash(tmp_path, rows, flushed=flushed))
    assert doomed.is_dead
    assert doomed.applied_offset == 20 + rows
    assert heir.resumed_at in ((10, 20) if flushed else (0,))
    with closing(sqlite3.connect(tmp_path / "after.db")) as connection:  # the dead one wrote nothing more
        found = connection.execute("SELECT next_offset FROM cursor").fetchall()
    assert found == ([(heir.resumed_at,)] if flushed else [])
    assert heir.count_redelivered(doomed.applied_offset) == doomed.applied_offset - heir.resumed_at
    assert heir.applied_offset == 40
    assert values == [3.0] * 10


def test_rows_that_come_again_are_those_below_an_offset() -> None:
    mortal = CrashingSink(StorageSink("nowhere.db"))
    mortal.offset_ranges = [(5, 8), (8, 12), (12, 20)]
    assert [mortal.count_redelivered(offset) for offset in (0, 6, 8, 10, 30)] == [0, 1, 3, 5, 15]
