"""A flush of several transactions that is killed between two of them: each delta has one effect.

The *reach* of a file is the offset up to which its rows may include deltas; it may be beyond the cursor.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import anyio
import pytest

from delta_prop import LogSettings, Propagator
from delta_prop.testing import run_virtual, virtual_world
from delta_prop_simulations.disk import SimDisk
from delta_prop_sinks import ResumePoint, StorageSink, TryAgain, storage_rows
from delta_prop_wire.cursor import Cursor
from delta_prop_wire.delta import AckLevel, Delta, create, sparse_add
from delta_prop_wire.errors import Refused
from tests.delta_prop.delivery.rebuilding import FakeStorage, FakeStorageSink
from tests.sinks.support import FakeLog
from tests.sinks.test_storage import check_rows, crash

VECTORS = 4


def make_log() -> FakeLog:
    log = FakeLog()
    log.append(*(Delta(f"v{i}", create([i, i])) for i in range(VECTORS)))
    log.append(*(Delta(f"v{i}", sparse_add([0], [1])) for i in range(VECTORS)))
    return log


async def kill_during_flush(
    sink: StorageSink, log: FakeLog, transactions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kill the sink in a flush after `transactions` transactions of one row each."""
    monkeypatch.setattr(storage_rows, "ROWS_MAX", 1)
    original, transactions_left = sink._file._transact, transactions

    def fail_after_limit(*arguments: Any) -> int:
        nonlocal transactions_left
        if not transactions_left:
            raise sqlite3.OperationalError("the process is gone")
        transactions_left -= 1
        return original(*arguments)

    monkeypatch.setattr(sink._file, "_transact", fail_after_limit)
    with pytest.raises(TryAgain):
        await sink.flush()
    crash(sink)
    monkeypatch.undo()


@pytest.mark.parametrize("flushed_before", [False, True])
@pytest.mark.parametrize("transactions", range(1, VECTORS))
def test_flush_killed_between_transactions_duplicates_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transactions: int, flushed_before: bool
) -> None:
    async def main() -> None:
        log, cursor = make_log(), 0
        sink = StorageSink(tmp_path / "v.db")
        await sink.open(log)
        await sink.apply(log.deliveries())
        if flushed_before:
            await sink.flush()
            cursor = log.next_offset
            log.append(*(Delta(f"v{i}", sparse_add([1], [1])) for i in range(VECTORS)))
            await sink.apply(log.deliveries(cursor))
        end = log.next_offset
        await kill_during_flush(sink, log, transactions, monkeypatch)

        reopened = StorageSink(tmp_path / "v.db")
        point = await reopened.open(log)
        assert (point.cursor.next_offset, point.reach) == (cursor, end)
        assert point.lamport == log.lamport, (
            "the highest Lamport number must be that of all rows, those beyond the cursor included"
        )
        log.append(Delta("v0", sparse_add([0], [5])))
        await reopened.apply(log.deliveries(cursor))
        await check_rows(reopened, log)
        await reopened.aclose()

    anyio.run(main)


def test_reach_of_rows_is_stored_until_cursor_gets_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        log = make_log()
        sink = StorageSink(tmp_path / "v.db")
        await sink.open(log)
        await sink.apply(log.deliveries())
        await kill_during_flush(sink, log, 2, monkeypatch)

        second = StorageSink(tmp_path / "v.db")
        await second.open(log)
        await second.apply(log.deliveries()[:1])  # some of the deltas that the rows already contain
        await second.flush()
        crash(second)
        third = StorageSink(tmp_path / "v.db")
        point = await third.open(log)
        assert (point.cursor.next_offset, point.reach) == (VECTORS, 2 * VECTORS)
        await third.aclose()

    anyio.run(main)


def test_file_without_reach_column_is_usable(tmp_path: Path) -> None:
    async def main() -> None:
        log = make_log()
        sink = StorageSink(tmp_path / "v.db")
        await sink.open(log)
        await sink.apply(log.deliveries())
        await sink.aclose()
        with sqlite3.connect(tmp_path / "v.db") as connection:
            connection.execute("ALTER TABLE commits DROP COLUMN reach")
        connection.close()
        reopened = StorageSink(tmp_path / "v.db")
        assert (await reopened.open(log)).cursor.next_offset == log.next_offset
        log.append(Delta("v0", sparse_add([0], [5])))
        await reopened.apply(log.deliveries(2 * VECTORS))
        await check_rows(reopened, log)
        await reopened.aclose()

    anyio.run(main)


class SinkAheadOfCursor(FakeStorageSink):
    """A sink whose rows may include deltas up to `reach`, although its cursor is 0."""

    reach = 0

    async def open(self, context: Any) -> ResumePoint:
        await super().open(context)
        return ResumePoint(Cursor(context.log_id, context.epoch, 0), 0, reach=self.reach)


@pytest.mark.parametrize("reach", [2, 3])
def test_sink_with_rows_beyond_the_log_is_refused(reach: int) -> None:
    async def main() -> None:
        log = LogSettings(read_level=AckLevel.LOGGED)
        async with Propagator(data="x", log=log, world=virtual_world(1, disk=SimDisk(1))) as p:
            await p.publish(Delta("a", create([1.0])), Delta("b", create([1.0])))
            sink = SinkAheadOfCursor(FakeStorage())
            sink.reach = reach
            if reach == 2:
                await p.attach(sink)
            else:
                with pytest.raises(Refused, match=r"is ahead: it holds epoch 1 up to offset 3, .* up to 2"):
                    await p.attach(sink)

    run_virtual(main)
