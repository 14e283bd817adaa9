"""The image beside a storage file: a start loads every row from it, or reads the rows and reports why."""

from __future__ import annotations

import shutil
import sqlite3
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel
import pytest

from delta_prop_sinks import Delivery, ResidentVectors, StorageSink, storage_image
from delta_prop_wire.delta import Delta, create, delete, opaque, scale, sparse, sparse_add
from delta_prop_wire.encode import encode_batch
from delta_prop_wire.state_rows import StateRow
from tests.sinks.support import FakeLog, abandon, check_state, oracle

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

NEVER = 10**9


def images(path: Path) -> list[Path]:
    return list(path.parent.glob(f"{path.name}-image-*"))


def image_of(path: Path) -> Path:
    (image,) = images(path)
    return image


def append_sample_deltas(log: FakeLog) -> None:
    log.append(*[Delta(f"row-{number}", create([number, 1, 2])) for number in range(20)])
    log.append(
        Delta("a", create([1, 2, 3]), metadata={"title": "A", "tags": ["x", None]}),
        Delta("line\nbreak é", create([4, 5, 6])),
        Delta("c", opaque(b"row\0"), namespace="rows", metadata={"n": 1}),
        Delta("empty", opaque(b""), namespace="rows"),
    )
    log.append(Delta("row-3", delete()), Delta("nobody", sparse([0], [1])), Delta("a", sparse([9], [1])))


async def write_with_image(path: Path, log: FakeLog) -> None:
    """Write a storage file with an image."""
    append_sample_deltas(log)
    sink = StorageSink(path, image_rows_min=1)
    await sink.open(log)
    await sink.apply(log.deliveries())
    await sink.aclose()
    assert sink.statistics().image == "written"
    assert image_of(path).stat().st_size > 100


async def check_opened(
    path: Path, log: FakeLog, image: str, current_log: FakeLog | None = None
) -> StorageSink:
    """Open a sink that writes no image; check that its rows equal the log's fold."""
    sink = StorageSink(path, image_rows_min=NEVER)
    await sink.open(current_log or log)
    assert sink.statistics().image.startswith(image)
    expected = oracle(log.batches)
    actual = {(namespace, vector_id): state for namespace, vector_id, state in sink.resident.rows()}
    assert actual.keys() == expected.keys()
    for ref, state in expected.items():
        check_state(actual[ref], state, context=ref)
    return sink


def test_start_from_image_restores_every_row(tmp_path: Path) -> None:
    async def main() -> None:
        log, path = FakeLog(), tmp_path / "v.db"
        await write_with_image(path, log)
        sink = await check_opened(path, log, "loaded, with 0 rows")
        lamport = sink.resident.lamport
        assert lamport == log.lamport
        await sink.apply(log.deliveries())  # duplicates of every row, by the offsets in the image
        assert sink.resident.statistics().folded == 0
        log.append(
            Delta("a", sparse_add([0], [1])), Delta("new", create([7, 7, 7])), Delta("b", create([1] * 3))
        )
        await sink.apply(log.deliveries())
        await sink.aclose()
        await (await check_opened(path, log, "loaded, with 3 rows")).aclose()

    anyio.run(main)


def test_rows_written_later_override_the_image(tmp_path: Path) -> None:
    async def main() -> None:
        log, path = FakeLog(), tmp_path / "v.db"
        await write_with_image(path, log)
        sink = StorageSink(path, image_rows_min=NEVER)
        await sink.open(log)
        applied_offset = log.next_offset
        log.append(Delta("row-5", sparse_add([0], [1])), Delta("row-6", delete()), Delta("z", opaque(b"z")))
        await sink.apply(log.deliveries(applied_offset))
        await sink.flush()
        # Then a forwarded row that sorts before stored ones: its vector is refolded.
        other = encode_batch([Delta("row-7", scale(2.0))], origin=99, base=1)
        applied_offset = log.next_offset
        log.forward(other, lamport=2)
        await sink.apply(log.deliveries(applied_offset))
        await sink.flush()
        abandon(sink)
        await (await check_opened(path, log, "loaded, with 4 rows")).aclose()

    anyio.run(main)


class InterruptedThread:
    """A thread that runs `after_call` after each call, for example a change of the rows."""

    def __init__(self) -> None:
        self.after_call: Callable[[], Any] = lambda: None

    async def run(self, function: Callable[[], Any]) -> Any:
        result = function()
        await self.after_call()
        return result


def test_rows_changed_during_image_write_survive_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage_image, "_BLOCK_ROWS", 4)

    async def main() -> None:
        log, path, changes = FakeLog(), tmp_path / "v.db", 0
        sink = StorageSink(path, image_rows_min=1)
        await sink.open(log)
        append_sample_deltas(log)
        await sink.apply(log.deliveries())
        await sink.flush()
        thread = InterruptedThread()

        async def change() -> None:
            nonlocal changes
            changes += 1
            applied_offset = log.next_offset
            log.append(
                Delta(f"row-{changes % 20}", sparse_add([1], [changes])),
                Delta(f"row-{19 - changes % 20}", sparse_add([2], [changes])),
                *[Delta(f"more-{changes}-{number}", create([1, 2, changes])) for number in range(20)],
            )
            await sink.apply(log.deliveries(applied_offset))

        thread.after_call = change
        await sink._image_manager.write(thread, log.log_id)
        assert changes > 5
        assert sink.statistics().image == "none"  # written only after every changed row is in the file
        await sink.flush()
        assert sink.statistics().image == "written"
        abandon(sink)
        await (await check_opened(path, log, "loaded, with")).aclose()

    anyio.run(main)


def test_rebuild_discards_an_older_image(tmp_path: Path) -> None:
    async def main() -> None:
        log, path = FakeLog(), tmp_path / "v.db"
        await write_with_image(path, log)
        sink = StorageSink(path, image_rows_min=1)
        await sink.open(log)
        # This write precedes the rebuild; a flush after the rebuild would name its image.
        await sink._image_manager.write(log.threads, log.log_id)
        await sink.begin_rebuild(log.next_offset)
        state = oracle(log.batches)["default", "a"]
        await sink.load_states([StateRow("default", "a", state, log.next_offset - 1)])
        await sink.end_rebuild(log.next_offset, log.lamport)
        await sink.flush()
        abandon(sink)
        reopened = StorageSink(path, image_rows_min=NEVER)
        await reopened.open(log)
        assert [row[:2] for row in reopened.resident.rows()] == [("default", "a")]
        await reopened.aclose()

    anyio.run(main)


def test_image_that_no_flush_has_named_is_removed(tmp_path: Path) -> None:
    async def main() -> None:
        log, path = FakeLog(), tmp_path / "v.db"
        await write_with_image(path, log)
        before = image_of(path)
        sink = StorageSink(path, image_rows_min=1)
        await sink.open(log)
        await sink._image_manager.write(log.threads, log.log_id)
        assert len(images(path)) == 2
        abandon(sink)
        await (await check_opened(path, log, "loaded")).aclose()
        assert image_of(path) == before

    anyio.run(main)


def test_reused_slot_aborts_the_image(tmp_path: Path) -> None:
    async def main() -> None:
        log, path = FakeLog(), tmp_path / "v.db"
        sink = StorageSink(path, image_rows_min=1)
        await sink.open(log)
        append_sample_deltas(log)
        await sink.apply(log.deliveries())
        thread = InterruptedThread()

        async def release_slot() -> None:
            rows = sink.resident.tables["rows"]
            if "passing" not in rows.slots:
                rows.release(rows.slot_of("passing"))

        thread.after_call = release_slot
        await sink._image_manager.write(thread, log.log_id)
        assert "was evicted or removed meanwhile" in sink.statistics().image
        assert not images(path)
        await sink.aclose()

    anyio.run(main)


@pytest.mark.parametrize("position", [3, 20, 200, 700, -400, -30, -1])
def test_corrupted_image_is_reported_and_not_used(tmp_path: Path, position: int) -> None:
    async def main() -> None:
        log, path = FakeLog(), tmp_path / "v.db"
        await write_with_image(path, log)
        image = image_of(path)
        content = bytearray(image.read_bytes())
        content[position] ^= 0x10
        image.write_bytes(content)
        await (await check_opened(path, log, "not used; all rows were read one by one")).aclose()

    anyio.run(main)


def test_torn_missing_or_foreign_image_is_not_used(tmp_path: Path) -> None:
    async def main() -> None:
        log, path = FakeLog(), tmp_path / "v.db"
        await write_with_image(path, log)
        image = image_of(path)
        content = image.read_bytes()
        for size in (0, 7, 30, len(content) // 2, len(content) - 1):
            image.write_bytes(content[:size])
            await (await check_opened(path, log, "not used; all rows were read one by one")).aclose()
        image.write_bytes(content + b"more")
        await (
            await check_opened(path, log, "not used; all rows were read one by one: its end says")
        ).aclose()
        image.unlink()
        await (
            await check_opened(path, log, "not used; all rows were read one by one: it does not exist")
        ).aclose()
        other = FakeLog()
        other.append(Delta("another", create([1, 2, 3])))
        await write_with_image(tmp_path / "w.db", other)
        shutil.copy(image_of(tmp_path / "w.db"), image)
        await (
            await check_opened(path, log, "not used; all rows were read one by one: it is not the image")
        ).aclose()

    anyio.run(main)


def test_newer_image_is_not_used_with_older_file(tmp_path: Path) -> None:
    async def main() -> None:
        log, path = FakeLog(), tmp_path / "v.db"
        await write_with_image(path, log)
        shutil.copy(path, tmp_path / "older")
        before = list(log.batches)
        sink = StorageSink(path, image_rows_min=1)
        await sink.open(log)
        log.append(*[Delta(f"row-{number}", sparse_add([0], [1])) for number in range(20)])
        await sink.apply(log.deliveries())
        await sink.aclose()
        await (await check_opened(path, log, "loaded, with 0 rows")).aclose()
        shutil.copy(tmp_path / "older", path)
        log.batches = before
        await (
            await check_opened(path, log, "not used; all rows were read one by one: it does not exist")
        ).aclose()

    anyio.run(main)


def test_offsets_of_image_are_ignored_for_another_log(tmp_path: Path) -> None:
    async def main() -> None:
        log, path = FakeLog(), tmp_path / "v.db"
        await write_with_image(path, log)
        other = FakeLog(bytes(16), lamport=log.lamport)
        sink = await check_opened(path, log, "loaded", current_log=other)
        other.append(Delta("a", sparse([0], [50])))  # at offset 0, below every offset in the image
        await sink.apply(other.deliveries())
        state = await sink.get("default", "a")
        assert state is not None
        assert state.vector is not None
        assert state.vector[0] == 50
        await sink.aclose()

    anyio.run(main)


def test_image_exceeding_memory_is_not_used(tmp_path: Path) -> None:
    async def main() -> None:
        log, path = FakeLog(), tmp_path / "v.db"
        await write_with_image(path, log)
        sink = StorageSink(path, resident=ResidentVectors(resident_bytes_max=6_000))
        await sink.open(log)
        assert sink.statistics().image.startswith(
            "not used; all rows were read one by one: its rows need more"
        )
        for ref, state in oracle(log.batches).items():
            check_state(await sink.get(*ref), state, context=ref)
        await sink.aclose()

    anyio.run(main)


def test_close_succeeds_if_image_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        log, path = FakeLog(), tmp_path / "v.db"
        append_sample_deltas(log)
        sink = StorageSink(path, image_rows_min=1)
        await sink.open(log)
        await sink.apply(log.deliveries())

        def fail(_: object) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr(storage_image, "_sync", fail)
            await sink.aclose()
        assert "No space left" in sink.statistics().image
        assert not images(path)
        await (await check_opened(path, log, "none")).aclose()

    anyio.run(main)


def test_image_is_written_in_background_after_changes(tmp_path: Path) -> None:
    async def main() -> None:
        log, path = FakeLog(), tmp_path / "v.db"
        append_sample_deltas(log)
        sink = StorageSink(path, image_rows_min=20, flush_s=0.001)
        await sink.open(log)
        with anyio.fail_after(60):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(sink.background)
                await anyio.lowlevel.checkpoint()
                await sink.apply(log.deliveries())
                while sink.statistics().image != "written":  # noqa: ASYNC110 - no event signals this
                    await anyio.sleep(0.005)
                tasks.cancel_scope.cancel()
        abandon(sink)
        await (await check_opened(path, log, "loaded, with")).aclose()

    anyio.run(main)


def test_file_of_previous_format_is_usable(tmp_path: Path) -> None:
    async def main() -> None:
        log, path = FakeLog(), tmp_path / "v.db"
        append_sample_deltas(log)
        sink = StorageSink(path)
        await sink.open(log)
        await sink.apply(log.deliveries())
        await sink.aclose()
        with sqlite3.connect(path) as connection:
            connection.executescript(
                "ALTER TABLE vectors DROP COLUMN written; DROP TABLE commits; PRAGMA user_version = 1;"
            )
        connection.close()
        sink = await check_opened(path, log, "none")
        applied_offset = log.next_offset
        log.append(Delta("a", sparse_add([0], [1])))
        await sink.apply(log.deliveries(applied_offset))
        await sink.aclose()
        await (await check_opened(path, log, "none")).aclose()
        sink = StorageSink(path, image_rows_min=1)
        await sink.open(log)
        log.append(*[Delta(f"row-{number}", sparse_add([0], [1])) for number in range(20)])
        await sink.apply(log.deliveries())
        await sink.aclose()
        await (await check_opened(path, log, "loaded, with 0")).aclose()

    anyio.run(main)


def test_many_rows_in_one_delivery_find_their_slots(tmp_path: Path) -> None:
    """One batch has new vectors, known vectors, and some vectors twice."""

    async def main() -> None:
        log = FakeLog()
        sink = StorageSink(tmp_path / "v.db")
        await sink.open(log)
        log.append(*[Delta(f"v-{number}", create([number, 0, 0])) for number in range(10)])
        log.append(*[Delta(f"v-{number % 15}", create([number, 1, 0])) for number in range(5, 25)])
        await sink.apply([Delivery(logged) for logged in log.batches])
        for ref, state in oracle(log.batches).items():
            check_state(await sink.get(*ref), state, context=ref)
        await sink.aclose()

    anyio.run(main)
