"""Erased vectors, and tombstones after their time, leave the files of attached sinks."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import anyio
import numpy as np
import pytest

from delta_prop import Propagator
from delta_prop.sinks import IndexSink, JsonLinesSink, ResidentVectors, StorageSink
from delta_prop_broker.log.settings import LogSettings
from delta_prop_wire.delta import Delta, create, delete

if TYPE_CHECKING:
    from pathlib import Path

LOG = LogSettings(
    segment_bytes_max=20_000, bytes_max=100_000, retention_bytes=50_000, reserve_bytes=0, free_bytes_min=0
)
NUMBERS = [7.25, -3.5, 0.125, 9.0]
TRACES = (b"ada-lovelace", b"born in 1815", np.float32(NUMBERS).tobytes())


def files_with_traces(folder: Path) -> set[str]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.name for path in files if any(trace in path.read_bytes() for trace in TRACES)}


async def attach(p: Propagator, folder: Path) -> StorageSink:
    resident = ResidentVectors()
    storage = await p.attach(StorageSink(folder / "store.db", resident=resident), start="earliest")
    await p.attach(IndexSink(resident=resident), start="earliest")
    return storage


def test_erased_vector_is_in_no_file_of_log_and_store(tmp_path: Path) -> None:
    async def main() -> None:
        async with Propagator(data=tmp_path / "data", log=LOG) as p:
            storage = await attach(p, tmp_path)
            for number in range(20):
                await p.publish(
                    Delta("ada-lovelace", create(NUMBERS), metadata={"note": "born in 1815"}),
                    Delta(f"other-{number}", create([float(number)] * 4)),
                )
            await p.wait_visible(40, committed=True)
            assert "store.db" in files_with_traces(tmp_path) or "store.db-wal" in files_with_traces(tmp_path)
            await p.erase("ada-lovelace")
            assert files_with_traces(tmp_path) == set()
            assert await storage.get("default", "ada-lovelace") is None
            state = await storage.get("default", "other-7")
            assert state is not None
        assert files_with_traces(tmp_path) == set()
        async with Propagator(data=tmp_path / "data", log=LOG) as p:
            storage = await attach(p, tmp_path)
            assert await storage.get("default", "ada-lovelace") is None
            await p.publish(Delta("ada-lovelace", create(NUMBERS)))
            await p.wait_visible(42)
            state = await storage.get("default", "ada-lovelace")
            assert state is not None

    anyio.run(main)


def test_sinks_drop_tombstones_that_snapshots_have_dropped(tmp_path: Path) -> None:
    log = replace(LOG, tombstone_retention_s=0)

    async def main() -> None:
        async with Propagator(data=tmp_path / "data", log=log) as p:
            storage = await attach(p, tmp_path)
            await p.publish(Delta("v", create(NUMBERS)), Delta("w", create(NUMBERS)))
            await p.publish(Delta("v", delete()))
            with anyio.fail_after(60):
                number = 0
                while await storage.get("default", "v") is not None:
                    number += 1
                    await p.publish(*(Delta(f"x-{key}", create([float(number)] * 4)) for key in range(50)))
                    await anyio.sleep(0.01)
            assert p.statistics().log.start_offset > 0
            assert await storage.get("default", "w") is not None

    anyio.run(main)


def test_sink_that_cannot_erase_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with Propagator(data=tmp_path / "data", log=LOG) as p:
            await p.attach(JsonLinesSink(tmp_path / "lines", name="audit"))
            await p.publish(Delta("ada-lovelace", create(NUMBERS)))
            await p.erase("ada-lovelace")
        assert files_with_traces(tmp_path) == {"lines"}

    anyio.run(main)
    (warning,) = [record.message for record in caplog.records if "cannot erase" in record.message]
    assert "'audit'" in warning
    assert "ada-lovelace" not in warning
