"""`forget` and the file of graphs: after an erasure no save holds the erased vector's id or row."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio
import numpy as np
import pytest

from delta_prop.testing import run_virtual
from delta_prop_sinks import TryAgain
from delta_prop_wire.cursor import Cursor
from delta_prop_wire.delta import Delta, create, delete
from tests.sinks.test_index_hnsw import (
    Log,
    Service,
    builder_of,
    clustered,
    graph_statistics,
    indexing_in_background,
    names,
    recall,
    save_index,
    wait_until_indexed,
)

if TYPE_CHECKING:
    from pathlib import Path

SECRET = "secret-id"
NUMBERS = np.linspace(3.14159, 9.8765, 16).astype(np.float32)
UNIT_ROW = (NUMBERS / np.sqrt(np.square(NUMBERS.astype(np.float64)).sum())).astype(np.float16).tobytes()
SECRETS = [SECRET.encode(), NUMBERS.tobytes(), UNIT_ROW]


def found_in(folder: Path) -> list[tuple[str, bytes]]:
    contents = {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
    return [(name, secret) for name, content in contents.items() for secret in SECRETS if secret in content]


async def save_secret(folder: Path) -> Log:
    """Save graphs that contain the secret row; the file of vectors has it too."""
    log = await save_index(folder, 300)
    async with Service(folder, log) as service, indexing_in_background(service.index):
        log.append(Delta(SECRET, create(NUMBERS)))
        await service.apply()
        await wait_until_indexed(service.index)
    found = found_in(folder)
    assert ("vectors.graph", UNIT_ROW) in found
    assert ("vectors.graph", SECRETS[0]) in found
    return log


@pytest.mark.parametrize("first", ["storage", "index"])
def test_erased_vector_is_in_no_graph_file(tmp_path: Path, first: str) -> None:
    async def main() -> None:
        log = await save_secret(tmp_path)
        (tmp_path / "vectors.graph.new").write_bytes(SECRET.encode())  # what an interrupted save has left
        erased, path = [("default", SECRET)], tmp_path / "vectors.graph"
        async with Service(tmp_path, log) as service:
            log.append(Delta(SECRET, delete()))
            if first == "storage":
                await service.storage.apply(log.deliveries())
                await service.storage.forget(erased, 0)
                log.append(Delta("reuses the slot", create(clustered(1, 7)[0])))
                await service.apply()
                await service.index.forget(erased, 0)
            else:
                await service.apply()
                await service.index.forget(erased, 0)
                await service.storage.forget(erased, 0)
            assert found_in(tmp_path) == []
            async with indexing_in_background(service.index):
                await wait_until_indexed(service.index)
                assert recall(service.index, clustered(20, seed=5)) >= 0.95
                await anyio.sleep(700)
            assert found_in(tmp_path) == []
        assert path.exists()
        assert found_in(tmp_path) == []
        async with Service(tmp_path, log) as service:
            graphs = graph_statistics(service.index)
            assert (graphs.file, graphs.unindexed_rows) == ("loaded", 0)
            assert recall(service.index, clustered(20, seed=5)) >= 0.95

    run_virtual(main)


def test_erasure_waits_for_a_save(tmp_path: Path) -> None:
    async def main() -> None:
        log = await save_secret(tmp_path)
        async with Service(tmp_path, log) as service:
            builder: Any = builder_of(service.index)
            async with anyio.create_task_group() as tasks:
                thread = SlowThread()
                tasks.start_soon(
                    builder._save, builder._file, thread, Cursor(log.log_id, log.epoch, log.next_offset)
                )
                await thread.begun.wait()
                log.append(Delta(SECRET, delete()))
                await service.apply()
                await service.index.forget([("default", SECRET)], 0)
                await service.storage.forget([("default", SECRET)], 0)
                assert found_in(tmp_path) == []
            assert found_in(tmp_path) == []
        assert found_in(tmp_path) == []

    run_virtual(main)


class SlowThread:
    """A thread whose call takes a while before it has an effect."""

    def __init__(self) -> None:
        self.begun = anyio.Event()

    async def run(self, function: Any) -> Any:
        self.begun.set()
        await anyio.sleep(1)
        return function()


def test_removed_tombstones_leave_no_node(tmp_path: Path) -> None:
    async def main() -> None:
        log = await save_index(tmp_path, 300)
        async with Service(tmp_path, log) as service:
            log.append(*(Delta(name, delete()) for name in names(10)))
            await service.storage.apply(log.deliveries())
            await service.storage.forget([], log.next_offset)
            await service.index.apply(log.deliveries())  # it no longer finds the deleted vectors
            await service.index.forget([], log.next_offset)
            assert graph_statistics(service.index).indexed_rows == 290
            assert (tmp_path / "vectors.graph").exists()

    run_virtual(main)


def test_graph_file_that_cannot_be_removed_is_reported(tmp_path: Path) -> None:
    async def main() -> None:
        log = await save_secret(tmp_path)
        async with Service(tmp_path, log) as service:
            log.threads.failure = PermissionError(13, "Permission denied")
            with pytest.raises(TryAgain, match=r"cannot be removed: .*Permission denied"):
                await service.index.forget([("default", SECRET)], 0)
            log.threads.failure = None
            await service.index.forget([("default", SECRET)], 0)
            assert not (tmp_path / "vectors.graph").exists()

    run_virtual(main)
