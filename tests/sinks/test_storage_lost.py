"""A storage file that is deleted, replaced or corrupted stops its sink with an error that says what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio
import pytest

from delta_prop.testing import run_virtual
from delta_prop_sinks import RejectDelta, ResidentVectors, StopSink, StorageSink, TryAgain
from delta_prop_wire.delta import Delta, Operation, create, sparse_add
from tests.sinks.support import FakeLog, abandon, vectors

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

FIX = "detach the sink, replace the file by a copy or delete it and its -wal file, and attach the sink"


def delete(path: Path) -> None:
    path.unlink()


def replace(path: Path) -> None:
    path.rename(path.with_name("moved.db"))
    path.write_bytes(b"")


@pytest.mark.parametrize(
    ("make_file_lost", "reason"),
    [(delete, r"was deleted \(No such file or directory\)"), (replace, "was replaced while in use")],
)
def test_file_lost_while_in_use_stops_the_sink(
    tmp_path: Path, make_file_lost: Callable[[Path], None], reason: str
) -> None:
    path = tmp_path / "v.db"

    async def main() -> None:
        log = FakeLog()
        log.append(Delta("a", create([1])))
        sink = StorageSink(path, mode="through")
        await sink.open(log)
        await sink.apply(log.deliveries())
        make_file_lost(path)
        applied_offset = log.next_offset
        log.append(Delta("b", create([1])))
        for _ in range(2):
            with pytest.raises(StopSink, match=f"v.db {reason}: {FIX}"):
                await sink.apply(log.deliveries(applied_offset))
        assert log.commits == [applied_offset]
        with pytest.raises(TryAgain, match=reason):
            await sink.aclose()
        path.unlink(missing_ok=True)
        reopened = StorageSink(path)
        assert (await reopened.open(log)).cursor.next_offset == 0
        await reopened.aclose()

    anyio.run(main)


def test_loss_found_in_background_is_raised_by_apply(tmp_path: Path) -> None:
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


def make_sink(path: Path, log: FakeLog, **options: Any) -> StorageSink:
    log.append(*(Delta(f"row-{number:03}", create(row)) for number, row in enumerate(vectors(400, 64))))
    return StorageSink(path, **options)


def corrupt(path: Path) -> None:
    """Overwrite everything but the first pages, which hold the file's identity and cursor."""
    content = path.read_bytes()
    assert len(content) > 60_000
    path.write_bytes(content[:20_480] + b"\x99" * (len(content) - 20_480))


def test_corruption_after_valid_header_is_reported_at_open(tmp_path: Path) -> None:
    path = tmp_path / "v.db"

    async def main() -> None:
        log = FakeLog()
        sink = make_sink(path, log)
        await sink.open(log)
        await sink.apply(log.deliveries())
        await sink.aclose()
        corrupt(path)
        for _ in range(2):  # a failed open releases the file
            with pytest.raises(
                StopSink, match=rf"v.db is corrupted \(database disk image is malformed\): {FIX}"
            ):
                await StorageSink(path).open(log)

    anyio.run(main)


def test_corruption_found_reading_rows_back_stops_sink(tmp_path: Path) -> None:
    path = tmp_path / "v.db"

    async def main() -> None:
        log = FakeLog()
        sink = make_sink(path, log, mode="through", resident=ResidentVectors(resident_bytes_max=20_000))
        await sink.open(log)
        await sink.apply(log.deliveries())
        assert sink.resident.statistics().evicted > 100
        with path.open("r+b") as file:  # SQLite keeps the file open, so the test overwrites bytes in place
            sink._file.checkpoint(idle=True)
            file.seek(20_480)
            file.write(b"\x99" * (path.stat().st_size - 20_480))
        sink._file._reader.execute("PRAGMA shrink_memory")  # makes the reader fetch the pages from the file
        applied_offset = log.next_offset
        log.append(Delta("row-000", sparse_add([0], [1])))
        with pytest.raises(StopSink, match="is corrupted"):
            await sink.apply(log.deliveries(applied_offset))
        with pytest.raises(StopSink, match="is corrupted"):
            await sink.get("default", "row-001")
        await sink.aclose()

    anyio.run(main)


@pytest.mark.parametrize("mode", ["behind", "through"])
def test_rows_before_a_rejected_delta_are_written(tmp_path: Path, mode: Any) -> None:
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
        abandon(sink)
        reopened = StorageSink(tmp_path / "v.db")
        assert (await reopened.open(log)).cursor.next_offset == 2
        assert await reopened.get("default", "b") is not None
        assert await reopened.get("default", "new") is None
        await reopened.aclose()

    run_virtual(main)
