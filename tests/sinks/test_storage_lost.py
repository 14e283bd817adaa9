"""A storage file that is deleted, replaced or damaged stops its sink, with the cure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio
import pytest

from delta_prop.testing import run_virtual
from delta_prop_sinks import RejectDelta, ResidentVectors, StopSink, StorageSink, TryAgain
from delta_prop_wire.delta import Delta, Operation, create, sparse_add
from tests.sinks.support import FakeLog, vectors

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

CURE = "detach the sink, replace the file by a copy or delete it and its -wal file, and attach the sink"


def delete(path: Path) -> None:
    path.unlink()


def replace(path: Path) -> None:
    path.rename(path.with_name("moved.db"))
    path.write_bytes(b"")


@pytest.mark.parametrize(
    ("lose", "how"),
    [(delete, r"was deleted \(No such file or directory\)"), (replace, "was replaced while in use")],
)
def test_a_file_that_is_lost_in_use_stops_the_sink(
    tmp_path: Path, lose: Callable[[Path], None], how: str
) -> None:
    path = tmp_path / "v.db"

    async def main() -> None:
        log = FakeLog()
        log.append(Delta("a", create([1])))
        sink = StorageSink(path, mode="through")
        await sink.open(log)
        await sink.apply(log.deliveries())
        lose(path)
        reached = log.next_offset
        log.append(Delta("b", create([1])))
        for _ in range(2):
            with pytest.raises(StopSink, match=f"v.db {how}: {CURE}"):
                await sink.apply(log.deliveries(reached))
        assert log.commits == [reached]
        with pytest.raises(TryAgain, match=how):
            await sink.aclose()
        path.unlink(missing_ok=True)
        again = StorageSink(path)
        assert (await again.open(log)).cursor.next_offset == 0
        await again.aclose()

    anyio.run(main)


def test_the_background_tells_the_loss_by_the_next_apply(tmp_path: Path) -> None:
    path = tmp_path / "v.db"

    async def main() -> None:
        log = FakeLog()
        log.append(Delta("a", create([1])))
        sink = StorageSink(path)
        await sink.open(log)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(sink.background)
            await anyio.sleep(1)
            path.unlink()
            await sink.apply(log.deliveries())
            await anyio.sleep(1)
            assert "was deleted" in (sink.statistics().failure or "")
            log.append(Delta("b", create([1])))
            with pytest.raises(StopSink, match="was deleted"):
                await sink.apply(log.deliveries(1))
            tasks.cancel_scope.cancel()
        with pytest.raises(TryAgain, match="was deleted"):
            await sink.aclose()

    run_virtual(main)


def filled(path: Path, log: FakeLog, **options: Any) -> StorageSink:
    log.append(*(Delta(f"row-{at:03}", create(row)) for at, row in enumerate(vectors(400, 64))))
    return StorageSink(path, **options)


def damage(path: Path) -> None:
    """Everything but the first pages, where the file says what it is and how far."""
    whole = path.read_bytes()
    assert len(whole) > 60_000
    path.write_bytes(whole[:20_480] + b"\x99" * (len(whole) - 20_480))


def test_damage_behind_a_sound_header_is_told_when_opened(tmp_path: Path) -> None:
    path = tmp_path / "v.db"

    async def main() -> None:
        log = FakeLog()
        sink = filled(path, log)
        await sink.open(log)
        await sink.apply(log.deliveries())
        await sink.aclose()
        damage(path)
        for _ in range(2):  # the file is let go of
            with pytest.raises(
                StopSink, match=rf"v.db is corrupted \(database disk image is malformed\): {CURE}"
            ):
                await StorageSink(path).open(log)

    anyio.run(main)


def test_damage_that_is_met_when_rows_are_read_back_stops_the_sink(tmp_path: Path) -> None:
    path = tmp_path / "v.db"

    async def main() -> None:
        log = FakeLog()
        sink = filled(path, log, mode="through", resident=ResidentVectors(resident_bytes_max=20_000))
        await sink.open(log)
        await sink.apply(log.deliveries())
        assert sink.resident.statistics().evicted > 100
        with path.open("r+b") as file:  # SQLite keeps the file open, so its bytes change in their place
            sink._file.checkpoint(idle=True)
            file.seek(20_480)
            file.write(b"\x99" * (path.stat().st_size - 20_480))
        sink._file._reader.execute("PRAGMA shrink_memory")  # it must read the pages again
        reached = log.next_offset
        log.append(Delta("row-000", sparse_add([0], [1])))
        with pytest.raises(StopSink, match="is corrupted"):
            await sink.apply(log.deliveries(reached))
        with pytest.raises(StopSink, match="is corrupted"):
            await sink.get("default", "row-001")
        await sink.aclose()

    anyio.run(main)


@pytest.mark.parametrize("mode", ["behind", "through"])
def test_what_stands_before_a_rejected_delta_is_written(tmp_path: Path, mode: Any) -> None:
    async def main() -> None:
        log, unknown = FakeLog(), Operation(40, data=b"new")
        log.append(Delta("a", create([1, 2])), Delta("b", create([3, 4])), Delta("new", unknown))
        sink = StorageSink(tmp_path / "v.db", mode=mode)
        await sink.open(log)
        async with anyio.create_task_group() as tasks:
            if mode == "behind":
                tasks.start_soon(sink.background)
            with pytest.raises(RejectDelta, match="kind 40") as caught:
                await sink.apply(log.deliveries())
            assert caught.value.offset == 2
            await anyio.sleep(1)
            tasks.cancel_scope.cancel()
        assert log.commits == [2]
        sink._file.close()
        again = StorageSink(tmp_path / "v.db")
        assert (await again.open(log)).cursor.next_offset == 2
        assert await again.get("default", "b") is not None
        assert await again.get("default", "new") is None
        await again.aclose()

    run_virtual(main)
