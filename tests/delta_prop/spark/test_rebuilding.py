"""A storage file rebuilt from the log on Spark equals the sink's own; a sink continues at its cursor."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import pytest

pytest.importorskip("pyspark")

from delta_prop import Propagator
from delta_prop.spark.jobs.rebuilding import rebuild
from delta_prop_sinks import StorageSink
from delta_prop_wire.delta import Delta, create, delete, opaque, scale, sparse
from delta_prop_wire.errors import UsageError
from tests.broker.histories import comparable

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any

    from pyspark.sql import SparkSession

Contents = dict[tuple[str, str], "Any"]


async def publish_and_read(path: Path, start: int, count: int) -> Contents:
    """Publish `count` rounds of deltas while a storage sink is attached; return its contents."""
    async with Propagator(data=path / "log") as p:
        storage = await p.attach(StorageSink(path / "first.db"))
        for number in range(start, start + count):
            name = f"v{number % 17}"
            await p.publish(Delta(name, create([number, 0.5]), metadata={"at": number, "ü": [1]}))
            await p.publish(Delta(name, sparse([1], [number])))
            await p.publish(Delta(f"r{number % 3}", opaque(bytes([number])), "rows"))
            if number % 5 == 0:
                await p.publish(Delta(name, delete()))
        return await contents(p, storage)


async def contents(p: Propagator, storage: StorageSink) -> Contents:
    await p.wait_visible(p.internals().partition.log.high_watermark - 1, committed=True)
    return {row[:2]: comparable(row[2]) async for row in storage.rows()}


async def open_and_read(path: Path, file: Path, *more: Delta) -> tuple[int, Contents]:
    """Attach a sink on a file and publish `more`; return its offset when it opened, and its contents."""
    async with Propagator(data=path / "log") as p:
        storage = await p.attach(StorageSink(file), name="second")
        committed_offset = storage.statistics().committed_offset
        if more:
            await p.publish(*more)
        return committed_offset, await contents(p, storage)


@pytest.mark.spark
def test_sink_continues_from_a_file_rebuilt_from_the_log(spark: SparkSession, tmp_path: Path) -> None:
    first = anyio.run(publish_and_read, tmp_path, 0, 40)
    rebuilt = rebuild(spark, str(tmp_path / "log"), str(tmp_path / "second.db"))
    assert rebuilt.rows == len(first)
    assert rebuilt.alive == sum(row[0] for row in first.values())
    with pytest.raises(UsageError, match="already holds vectors: name a new file"):
        rebuild(spark, str(tmp_path / "log"), str(tmp_path / "second.db"))
    progress: list[int] = []
    earlier = rebuild(
        spark, str(tmp_path / "log"), str(tmp_path / "third.db"), at=50, on_progress=progress.append
    )
    assert (earlier.next_offset, progress[-1]) == (51, earlier.rows)
    assert anyio.run(open_and_read, tmp_path, tmp_path / "second.db") == (rebuilt.next_offset, first)
    assert anyio.run(open_and_read, tmp_path, tmp_path / "third.db") == (51, first)
    now = anyio.run(publish_and_read, tmp_path, 40, 5)
    assert (
        anyio.run(open_and_read, tmp_path, tmp_path / "second.db", Delta("v2", scale(0.5)))[1].keys()
        == now.keys()
    )
