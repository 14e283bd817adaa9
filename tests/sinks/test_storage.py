"""StorageSink against the algebra's fold, across crashes, redelivery, failures and eviction."""

from __future__ import annotations

import asyncio
import sqlite3
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import anyio
import pytest
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from delta_prop_sinks import Delivery, ResidentVectors, StorageSink, TryAgain
from delta_prop_sinks.storage_file import StorageFile
from delta_prop_wire.delta import Delta, Dot, create, delete, opaque, sparse, sparse_add
from delta_prop_wire.errors import UsageError
from tests.sinks.strategies import logs
from tests.sinks.support import FakeLog, abandon, check_state, oracle

ROOT = Path(__file__).parents[2]


def append_sample_deltas(log: FakeLog) -> None:
    log.append(
        Delta("a", create([1, 2, 3]), metadata={"title": "A", "tags": ["x"]}),
        Delta("b", create([4, 5, 6])),
        Delta("c", opaque(b"row"), namespace="rows", metadata={"n": 1}),
    )
    log.append(Delta("a", sparse([0], [9.5])), Delta("b", sparse_add([1, 1], [1, 2])))
    log.append(Delta("b", delete()), Delta("nobody", sparse([0], [1])))


async def check_rows(sink: StorageSink, log: FakeLog) -> None:
    expected = oracle(log.batches)
    for (namespace, vector_id), state in expected.items():
        check_state(await sink.get(namespace, vector_id), state, context=vector_id)
    await sink.flush()
    stored = {(namespace, vector_id): state async for namespace, vector_id, state in sink.rows()}
    assert stored.keys() == expected.keys()
    for ref, state in expected.items():
        check_state(stored[ref], state, context=ref)


@pytest.mark.parametrize("mode", ["behind", "through"])
def test_rows_equal_the_fold_and_survive_restart(tmp_path: Path, mode: str) -> None:
    async def main() -> None:
        log = FakeLog()
        append_sample_deltas(log)
        sink = StorageSink(tmp_path / "vectors.db", mode=mode)  # type: ignore[arg-type]
        point = await sink.open(log)
        assert point.cursor == (log.log_id, 1, 0)
        await sink.apply(log.deliveries())
        assert log.commits == ([] if mode == "behind" else [log.next_offset])
        await check_rows(sink, log)
        await sink.aclose()
        await sink.aclose()

        reopened = StorageSink(tmp_path / "vectors.db")
        point = await reopened.open(log)
        assert (point.cursor.next_offset, point.lamport) == (log.next_offset, log.lamport)
        log.append(Delta("a", sparse_add([2], [1])))
        await reopened.apply(log.deliveries())  # every earlier delivery, and a new one
        await check_rows(reopened, log)
        await reopened.aclose()

    anyio.run(main)


def crash(sink: StorageSink) -> None:
    """Close connections without a flush, as kill -9 does."""
    abandon(sink)


def test_crash_between_commits_resumes_exactly(tmp_path: Path) -> None:
    async def main() -> None:
        log = FakeLog()
        log.append(Delta("a", create([1, 1])), Delta("b", create([0, 0])))
        resumed_offset = 0
        for round_number in range(12):
            sink = StorageSink(tmp_path / "vectors.db")
            point = await sink.open(log)
            assert point.cursor.next_offset == resumed_offset
            log.append(
                Delta("a", sparse_add([0, 1], [1, round_number])), Delta("b", sparse_add([0], [round_number]))
            )
            await sink.apply(log.deliveries(resumed_offset))
            if round_number % 3 != 2:
                await sink.flush()
                resumed_offset = log.next_offset
                log.append(Delta("b", sparse_add([1], [0.5])))
                await sink.apply(log.deliveries(resumed_offset))
            await check_rows(sink, log) if round_number == 11 else crash(sink)
        await sink.aclose()

    anyio.run(main)


def make_log(count: int) -> FakeLog:
    log = FakeLog()
    log.append(*(Delta(f"v{i}", create([i, i])) for i in range(7)))
    for number in range(count):
        log.append(Delta(f"v{number % 7}", sparse_add([number % 2], [number])))
    return log


async def write_until_killed(path: str) -> None:
    """Apply deliveries, regularly flush and print the durable offset, until killed."""
    log = make_log(3_000)
    sink = StorageSink(path)
    await sink.open(log)
    for number, delivery in enumerate(log.deliveries()):
        await sink.apply([delivery])
        if number % 3 == 0:
            await sink.flush()
            print(sink.statistics().committed_offset, flush=True)


def test_committed_rows_survive_kill_9(tmp_path: Path) -> None:
    path = str(tmp_path / "vectors.db")
    program = (
        f"import anyio; from tests.sinks import test_storage as t; anyio.run(t.write_until_killed, {path!r})"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, cwd=ROOT) as child:
        assert child.stdout is not None
        printed_offset = [int(child.stdout.readline()) for _ in range(25)][-1]
        child.kill()

    async def main() -> None:
        sink = StorageSink(path)
        log = make_log(3_000)
        cursor = (await sink.open(log)).cursor.next_offset
        assert cursor >= printed_offset
        log.batches = [logged for logged in log.batches if logged.next_offset <= cursor]
        await check_rows(sink, log)
        assert sink._file._writer.execute("PRAGMA synchronous").fetchone() == (2,)  # FULL
        await sink.aclose()

    anyio.run(main)


def test_write_ahead_log_is_bounded(tmp_path: Path) -> None:
    async def main() -> None:
        log = FakeLog()
        sink = StorageSink(tmp_path / "vectors.db", wal_bytes_max=200_000)
        await sink.open(log)
        for number in range(40):
            log.append(*(Delta(f"v{number}-{i}", create([number] * 1000)) for i in range(10)))
            await sink.apply(log.deliveries()[-1:])
            await sink.flush()
            assert sink.statistics().wal_bytes < 300_000
        await sink.aclose()

    anyio.run(main)


def test_failed_commit_loses_nothing_and_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        log = FakeLog()
        sink = StorageSink(tmp_path / "vectors.db")
        await sink.open(log)
        log.append(Delta("a", create([1, 2])))
        await sink.apply(log.deliveries())
        original = sink._file._transact

        def full(*_: object) -> None:
            raise sqlite3.OperationalError("database or disk is full")

        monkeypatch.setattr(sink._file, "_transact", full)
        with pytest.raises(TryAgain, match=r"vectors\.db cannot be written: .*disk is full"):
            await sink.flush()
        assert (sink.statistics().dirty_rows, sink.statistics().committed_offset, log.commits) == (1, 0, [])
        with pytest.raises(TryAgain):
            await sink.apply(log.deliveries())
        monkeypatch.setattr(sink._file, "_transact", original)
        await sink.flush()
        assert (sink.statistics().dirty_rows, log.commits) == (0, [log.next_offset])
        await sink.apply(log.deliveries())
        await check_rows(sink, log)
        assert sink.statistics().failure is None
        await sink.aclose()

    anyio.run(main)


def test_commit_failing_halfway_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "vectors.db"

    async def main() -> None:
        log = FakeLog()
        sink = StorageSink(path)
        await sink.open(log)
        # FAIL keeps the rows that the statement wrote before it failed.
        with sqlite3.connect(path) as connection:
            connection.execute(
                "CREATE TRIGGER broken BEFORE INSERT ON vectors WHEN NEW.vector_id = 'b' "
                "BEGIN SELECT RAISE(FAIL, 'disk I/O error'); END"
            )
        connection.close()
        log.append(Delta("a", create([1])), Delta("b", create([1])))
        await sink.apply(log.deliveries())
        with pytest.raises(TryAgain, match="disk I/O error"):
            await sink.flush()
        assert [row async for row in sink.rows()] == []
        crash(sink)
        reopened = StorageSink(path)
        assert (await reopened.open(log)).cursor.next_offset == 0
        assert [row async for row in reopened.rows()] == []
        crash(reopened)

    anyio.run(main)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_background_flushes_by_itself(tmp_path: Path, backend: str) -> None:
    async def main() -> None:
        log = FakeLog()
        append_sample_deltas(log)
        committed = anyio.Event()
        log.committed = lambda next_offset: committed.set()  # type: ignore[method-assign]
        sink = StorageSink(tmp_path / "vectors.db", flush_s=0.001)
        await sink.open(log)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(sink.background)
            await sink.apply(log.deliveries())
            with anyio.fail_after(60):
                await committed.wait()
            tasks.cancel_scope.cancel()
        assert sink.statistics().dirty_rows == 0
        await sink.aclose()

    anyio.run(main, backend=backend)


def test_background_retries_and_truncates_wal_when_idle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = 3

    async def main() -> None:
        log = FakeLog()
        sink = StorageSink(tmp_path / "vectors.db", flush_s=0.01)
        await sink.open(log)
        original = sink._file._transact

        def flaky(*arguments: Any) -> int:
            nonlocal failures
            failures -= 1
            if failures >= 0:
                raise sqlite3.OperationalError("database or disk is full")
            return original(*arguments)

        monkeypatch.setattr(sink._file, "_transact", flaky)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(sink.background)
            await anyio.wait_all_tasks_blocked()
            for _ in range(2):
                append_sample_deltas(log)
                await sink.apply(log.deliveries(sink.statistics().applied_offset))
                await anyio.sleep(0.5)  # virtual: three failures, a commit
                assert sink.statistics().committed_offset == log.next_offset
                assert sink.statistics().wal_bytes > 0
                await anyio.sleep(5)
                assert sink.statistics().wal_bytes == 0
            tasks.cancel_scope.cancel()
        await check_rows(sink, log)
        await sink.aclose()

    clock = trio.testing.MockClock(autojump_threshold=0)
    anyio.run(main, backend="trio", backend_options={"clock": clock})


def test_many_namespaces_share_a_transaction(tmp_path: Path) -> None:
    async def main() -> None:
        log = FakeLog()
        log.append(*(Delta("a", create([i]), namespace=f"n{i}") for i in range(500)))
        for start in (0, 50):
            large = (Delta(f"b{start + i}", create([i] * 60_000), namespace="large") for i in range(50))
            log.append(*large)
        sink = StorageSink(tmp_path / "vectors.db")
        await sink.open(log)
        await sink.apply(log.deliveries()[:1])
        await sink.flush()
        assert sink.statistics().commits == 1
        await sink.apply(log.deliveries()[1:])  # 24 MB
        await sink.flush()
        assert sink.statistics().commits == 3
        await check_rows(sink, log)
        await sink.aclose()

    anyio.run(main)


def test_rows_that_do_not_fit_are_evicted_and_read_back(tmp_path: Path) -> None:
    async def main() -> None:
        log = FakeLog()
        resident = ResidentVectors(resident_bytes_max=20_000)
        sink = StorageSink(tmp_path / "vectors.db", resident=resident)
        await sink.open(log)
        for round_number in range(6):
            start = log.next_offset
            for first in range(0, 200, 20):
                names = [f"v{(first + i) * 7 % 200}" for i in range(20)]
                log.append(*(_change(name, round_number) for name in names))
            for delivery in log.deliveries(start):
                await sink.apply([delivery])
                assert resident.size <= 20_000
        await check_rows(sink, log)
        statistics = sink.statistics()
        assert statistics.rows_read_back > 500
        assert resident.statistics().evicted > 500
        await sink.aclose()
        reopened = StorageSink(tmp_path / "vectors.db", resident=ResidentVectors(resident_bytes_max=20_000))
        await reopened.open(log)
        await reopened.apply(log.deliveries())
        await check_rows(reopened, log)
        await reopened.aclose()

    anyio.run(main)


def test_closing_past_deadline_reports_unwritten_rows(tmp_path: Path) -> None:
    async def main() -> None:
        log = FakeLog()
        for first in (0, 50):
            log.append(*(Delta(f"v{first + i}", create([i] * 60_000)) for i in range(50)))
        sink = StorageSink(tmp_path / "vectors.db", close_s=0.05)
        await sink.open(log)
        await sink.apply(log.deliveries())
        original = log.threads.run

        async def slow(function: Any) -> Any:
            await anyio.sleep(0.1)
            return await original(function)

        log.threads.run = slow  # type: ignore[method-assign]
        with pytest.raises(TryAgain, match=r"closed after 0\.05 s, at offset 0 of 100"):
            await sink.aclose()
        log.threads.run = original  # type: ignore[method-assign]
        reopened = StorageSink(tmp_path / "vectors.db")
        assert (await reopened.open(log)).cursor.next_offset == 0
        await reopened.apply(log.deliveries())
        await check_rows(reopened, log)
        await reopened.aclose()

    anyio.run(main)


def test_row_stays_in_memory_until_its_commit_has_returned(tmp_path: Path) -> None:
    async def main() -> None:
        log = FakeLog()
        resident = ResidentVectors(resident_bytes_max=6_000)
        sink = StorageSink(tmp_path / "vectors.db", resident=resident)
        await sink.open(log)
        log.append(*(Delta(f"v{i}", create([1, 2, 3, 4])) for i in range(15)))
        log.append(*(Delta(f"w{i}", create([1, 2, 3, 4])) for i in range(15)))
        first, second = log.deliveries()
        await sink.apply([first])
        writing, release = anyio.Event(), anyio.Event()
        original = log.threads.run

        async def slow(function: Any) -> Any:
            log.threads.run = original  # type: ignore[method-assign]
            writing.set()
            await release.wait()
            return function()

        async with anyio.create_task_group() as tasks:
            log.threads.run = slow  # type: ignore[method-assign]
            tasks.start_soon(sink.flush)
            await writing.wait()
            await resident.apply([second], log)
            size, evicted = resident.size, resident.evict()
            release.set()
        assert size > 6_000
        assert evicted == 0  # all rows are dirty or being written
        assert resident.evict() > 0
        await check_rows(sink, log)
        await sink.aclose()

    anyio.run(main)


def _change(name: str, round_number: int) -> Delta:
    return Delta(
        name, create([1, 2, 3, 4]) if round_number == 0 else sparse_add([round_number % 4], [round_number])
    )


@settings(max_examples=settings().max_examples // 3)  # each example opens and syncs files
@given(log=logs(), data=st.data())
def test_rows_equal_the_fold_for_any_history_crashes_and_memory_bound(
    log: FakeLog, data: st.DataObject
) -> None:
    """The history has forwarded rows that sort before applied ones; evicted vectors are refolded, too."""

    async def main(folder: str) -> None:
        bytes_max = data.draw(st.sampled_from([2_000, 1 << 30]))
        mode: Any = data.draw(st.sampled_from(["behind", "through"]))
        position, sink = 0, None
        while position < len(log.batches):
            if sink is None:
                sink = StorageSink(
                    f"{folder}/v.db", resident=ResidentVectors(resident_bytes_max=bytes_max), mode=mode
                )
                cursor = (await sink.open(log)).cursor.next_offset
                position = next(i for i, logged in enumerate(log.batches) if logged.next_offset > cursor)
            step = data.draw(st.integers(1, 3))
            await sink.apply([Delivery(logged) for logged in log.batches[position : position + step]])
            position += step
            if data.draw(st.booleans()):
                await sink.flush()
            if position < len(log.batches) and data.draw(st.booleans()):
                crash(sink)
                sink = None
        assert sink is not None
        await check_rows(sink, log)
        await sink.aclose()

    with TemporaryDirectory() as folder:
        anyio.run(main, folder)


def test_new_log_keeps_rows_and_ignores_old_offsets(tmp_path: Path) -> None:
    async def main() -> None:
        old = FakeLog()
        append_sample_deltas(old)
        sink = StorageSink(tmp_path / "vectors.db")
        await sink.open(old)
        await sink.apply(old.deliveries())
        await sink.aclose()
        second = StorageSink(tmp_path / "vectors.db")
        point = await second.open(new := FakeLog(b"n" * 16, lamport=old.lamport))
        assert point.cursor == (old.log_id, 1, old.next_offset)
        assert point.lamport == old.lamport
        new.counters = dict(old.counters)
        new.append(Delta("a", sparse_add([0], [1])))
        await second.apply(new.deliveries())
        expected = oracle([*old.batches, *new.batches])
        check_state(await second.get("default", "a"), expected["default", "a"])
        await second.aclose()
        third = StorageSink(tmp_path / "vectors.db")
        point = await third.open(new)
        assert point.cursor == (new.log_id, 1, 1)
        await third.apply(new.deliveries())
        check_state(await third.get("default", "a"), expected["default", "a"])
        await third.aclose()

    anyio.run(main)


def test_sink_object_that_is_opened_for_another_log_stores_its_cursor(tmp_path: Path) -> None:
    async def main() -> None:
        sink = StorageSink(tmp_path / "v.db", mode="through")
        old = FakeLog()
        append_sample_deltas(old)
        new = FakeLog(b"n" * 16, lamport=old.lamport)
        new.counters = dict(old.counters)
        new.append(Delta("a", sparse_add([0], [1])))
        for log in (old, new):
            await sink.open(log)
            await sink.apply(log.deliveries())
            await sink.aclose()
        reopened = StorageSink(tmp_path / "v.db")
        point = await reopened.open(new)
        assert point.cursor == (new.log_id, 1, 1)
        await reopened.aclose()

    anyio.run(main)


def test_file_stays_open_during_call_of_cancelled_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On Ctrl-C asyncio cancels the task despite its shielded scope, while a thread still uses the file."""
    entered, release, order = threading.Event(), threading.Event(), list[str]()
    check, disconnect = StorageFile._check_format, StorageFile._disconnect

    def slow_check(file: StorageFile) -> None:
        entered.set()
        release.wait(60)
        check(file)
        order.append("opened")

    def record_disconnect(file: StorageFile) -> None:
        order.append("closed")
        disconnect(file)

    monkeypatch.setattr(StorageFile, "_check_format", slow_check)
    monkeypatch.setattr(StorageFile, "_disconnect", record_disconnect)

    async def main() -> None:
        log = FakeLog()
        log.threads.run = anyio.to_thread.run_sync  # type: ignore[method-assign]
        opening = asyncio.create_task(StorageSink(tmp_path / "v.db").open(log))
        while not entered.is_set():  # noqa: ASYNC110 - a threading.Event cannot be awaited
            await asyncio.sleep(0.001)
        opening.cancel()
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(opening), 0.1)
        assert order == []
        release.set()
        with pytest.raises(asyncio.CancelledError):
            await opening
        assert order == ["opened", "closed"]

    asyncio.run(main())


def test_second_sink_on_a_file_is_refused(tmp_path: Path) -> None:
    async def main() -> None:
        log = FakeLog()
        first, second = StorageSink(tmp_path / "v.db"), StorageSink(tmp_path / "v.db")
        await first.open(log)
        with pytest.raises(UsageError, match="in use by another"):
            await second.open(log)
        await first.aclose()
        await second.open(log)
        await second.aclose()

    anyio.run(main)


def test_foreign_files_are_refused_and_unchanged(tmp_path: Path) -> None:
    text, other, newer = tmp_path / "text.db", tmp_path / "other.db", tmp_path / "newer.db"
    text.write_text("not a database, but long enough to be taken for one " * 100)
    with sqlite3.connect(other) as connection:
        connection.execute("CREATE TABLE mine (x)")
    connection.close()

    def check_refused(path: Path, match: str) -> None:
        before = path.read_bytes() if path.exists() else None
        with pytest.raises(UsageError, match=match):
            anyio.run(StorageSink(path).open, FakeLog())
        assert before is None or path.read_bytes() == before

    async def touch(path: Path) -> None:
        sink = StorageSink(path)
        await sink.open(FakeLog())
        await sink.aclose()

    check_refused(text, "not a SQLite file")
    check_refused(other, "of another program")
    corrupted = tmp_path / "corrupted.db"
    anyio.run(touch, corrupted)
    corrupted.write_bytes(corrupted.read_bytes()[:4096] + b"\x99" * 40_000)
    check_refused(corrupted, r"cannot be opened \(.*\): repair it")
    check_refused(tmp_path / "no" / "folder.db", "its folder .*no does not exist: create it")
    check_refused(text / "v.db", "text.* is not a directory: name another file")
    check_refused(Path("/proc/x.db"), "no file can be created in /proc: let this user write there")
    with pytest.raises(UsageError, match="it is a directory: name a file"):
        anyio.run(StorageSink(tmp_path).open, FakeLog())
    anyio.run(touch, newer)
    with sqlite3.connect(newer) as connection:
        connection.execute("PRAGMA user_version = 9")
    connection.close()
    check_refused(newer, "has format 9, and this program reads format 2")


def test_invalid_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="mode 'fast'"):
        StorageSink(tmp_path / "v.db", mode="fast")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="flush_s 0"):
        StorageSink(tmp_path / "v.db", flush_s=0)
    resident = ResidentVectors()
    StorageSink(tmp_path / "v.db", resident=resident)
    with pytest.raises(UsageError, match="have a storage sink already"):
        StorageSink(tmp_path / "w.db", resident=resident)
    with pytest.raises(UsageError, match="is not open"):
        anyio.run(StorageSink(tmp_path / "v.db").flush)


def test_file_can_be_read_with_sql(tmp_path: Path) -> None:
    async def main() -> None:
        log = FakeLog()
        append_sample_deltas(log)
        sink = StorageSink(tmp_path / "v.db")
        await sink.open(log)
        await sink.apply(log.deliveries())
        await sink.aclose()

    anyio.run(main)
    with sqlite3.connect(tmp_path / "v.db") as connection:
        rows = connection.execute(
            "SELECT namespace, vector_id, form, dimension, length(value), "
            "json_extract(metadata, '$.title'), ignored, offset FROM vectors"
        ).fetchall()
        assert rows == [
            ("default", "a", 1, 3, 12, "A", 0, 3),
            ("default", "b", 0, None, None, None, 0, 5),
            ("default", "nobody", 0, None, None, None, 1, 6),
            ("rows", "c", 2, None, 3, None, 0, 2),
        ]
        assert connection.execute("SELECT next_offset, lamport FROM cursor").fetchall() == [(7, 7)]
    connection.close()


def test_origins_with_the_top_bit_survive(tmp_path: Path) -> None:
    async def main() -> None:
        log = FakeLog()
        log.append(Delta("a", create([1])))
        sink = StorageSink(tmp_path / "v.db")
        await sink.open(log)
        await sink.apply(log.deliveries())
        state = await sink.get("default", "a")
        assert state is not None
        assert state.key is not None
        assert Dot(*state.key[1:]).origin >> 63 == 1
        await check_rows(sink, log)
        await sink.aclose()

    anyio.run(main)
