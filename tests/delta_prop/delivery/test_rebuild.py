"""A sink with an invalidated cursor is rebuilt from a snapshot and the tail; it then equals the full fold."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel
import pytest

from delta_prop import LogSettings, Propagator, Settings
from delta_prop.testing import run_virtual, virtual_world
from delta_prop_simulations.disk import SimCrash, SimDisk
from delta_prop_sinks import CacheSink, CallbackSink, IndexSink, ResidentVectors, StorageSink
from delta_prop_wire.delta import Delta, create, delete, offset, scale, sparse_add
from delta_prop_wire.errors import Refused, UsageError
from delta_prop_wire.spec import ErrorCode
from delta_prop_wire.state_rows import state_of
from tests.delta_prop.delivery.rebuilding import (
    FAILURES,
    FakeStorage,
    FakeStorageSink,
    History,
    assert_same_states,
)
from tests.delta_prop.support import catch_refusal, expect_refusal

if TYPE_CHECKING:
    from pathlib import Path

    from delta_prop_wire.algebra import VectorState

SMALL = Settings(log_deltas_max=60, merge_deltas_max=100, retries=2, breaker_failures=100)


async def publish_round(p: Propagator, number: int, count: int = 10) -> None:
    """Publish creates in round 0, then additive changes and some tombstones."""
    for row in range(count):
        key = f"v{row}"
        if number == 0:
            await p.publish(Delta(key, create([row, 1.0, 2.0]), metadata={"row": row}))
        elif (number + row) % 7 == 0:
            await p.publish(Delta(f"gone{number}", create([1.0, 1.0, 1.0])), Delta(f"gone{number}", delete()))
        else:
            change = (sparse_add([0], [1.25]), scale(1.5), offset(0.5))[(number + row) % 3]
            await p.publish(Delta(key, change, metadata={"at": number}))


async def publish_rounds(p: Propagator, history: History, rounds: range) -> None:
    for number in rounds:
        await publish_round(p, number)
        await anyio.sleep(0.01)
        history.read()


def test_sink_absent_since_start_is_rebuilt_and_catches_up() -> None:
    async def main() -> None:
        async with Propagator(SMALL, world=virtual_world()) as p:
            offsets: list[int] = []
            await p.attach(CallbackSink(lambda row_offset, _: offsets.append(row_offset), name="other"))
            history = History(p)
            await publish_rounds(p, history, range(8))
            snapshot = history.take_snapshot()
            await publish_rounds(p, history, range(8, 11))
            assert p.statistics().log.start_offset > 0
            storage = FakeStorage()
            await p.attach(FakeStorageSink(storage))
            await publish_rounds(p, history, range(11, 13))
            end = p.statistics().log.next_offset
            await p.wait_visible(end)
            assert_same_states(storage.states, history.states())
            statistics = p.statistics().sinks["fake"]
            assert (statistics.state, statistics.rebuild, statistics.rebuilds, statistics.lag) == (
                "idle",
                None,
                1,
                0,
            )
            assert statistics.applied_deltas + statistics.skipped == end - snapshot.offset
            assert storage.calls[0] == "begin"
            assert storage.calls.index("end") == 1 + -(-snapshot.rows // 5)
            assert (snapshot.opened, snapshot.closed) == (1, 2)  # one look-up reads no frames
            assert offsets == list(range(end))

    run_virtual(main)


@pytest.mark.parametrize("keeps_cursor", [True, False])
@pytest.mark.parametrize("failing_call", range(1, 8))
def test_rebuild_survives_every_failure_of_its_sink(failing_call: int, keeps_cursor: bool) -> None:
    async def main() -> None:
        for failure in FAILURES:
            async with Propagator(SMALL, world=virtual_world()) as p:
                history = History(p)
                await publish_rounds(p, history, range(8))
                history.take_snapshot()
                await publish_rounds(p, history, range(8, 10))
                storage = FakeStorage()
                storage.failures[failing_call] = failure
                await p.attach(FakeStorageSink(storage, has_cursor=keeps_cursor))
                await anyio.sleep(1)
                if p.statistics().sinks["fake"].state == "stopped":
                    assert "no more" in (p.statistics().sinks["fake"].reason or "")
                    assert p.statistics().sinks["fake"].rebuild is not None or "end" in storage.calls
                    p.restart("fake")
                await p.wait_visible(p.statistics().log.next_offset)
                assert_same_states(storage.states, history.states())
                assert storage.calls.count("end") <= 2
                assert not storage.failures

    run_virtual(main)


def test_overdue_call_restarts_the_rebuild() -> None:
    async def main() -> None:
        settings = replace(SMALL, apply_timeout_s=2.0)
        async with Propagator(settings, world=virtual_world()) as p:
            history = History(p)
            await publish_rounds(p, history, range(9))
            snapshot = history.take_snapshot()
            storage = FakeStorage()
            storage.hanging_calls.add(2)
            await p.attach(FakeStorageSink(storage))
            await anyio.sleep(1)
            statistics = p.statistics().sinks["fake"]
            assert statistics.state == "rebuilding"
            assert statistics.rebuild is not None
            assert (statistics.rebuild.offset, statistics.rebuild.rows_total) == (
                snapshot.offset,
                snapshot.rows,
            )
            assert "log starts at" in statistics.rebuild.why
            with pytest.raises(TimeoutError, match="'fake' is rebuilding"):
                await p.wait_visible(snapshot.offset, sinks=["fake"], timeout_s=0.1)
            await p.wait_visible(p.statistics().log.next_offset)
            assert_same_states(storage.states, history.states())
            assert storage.calls.count("begin") == 2
            assert snapshot.opened == 2

    run_virtual(main)


def test_unreadable_snapshot_restarts_the_rebuild() -> None:
    async def main() -> None:
        async with Propagator(SMALL, world=virtual_world()) as p:
            history = History(p)
            await publish_rounds(p, history, range(9))
            history.take_snapshot().read_failures = 2
            storage = FakeStorage()
            await p.attach(FakeStorageSink(storage))
            await p.wait_visible(p.statistics().log.next_offset)
            assert_same_states(storage.states, history.states())
            assert storage.calls.count("begin") == 3

    run_virtual(main)


def test_sink_with_invalidated_cursor_is_rebuilt_at_once() -> None:
    async def main() -> None:
        async with Propagator(SMALL, world=virtual_world()) as p:
            history, storage = History(p), FakeStorage()
            await p.attach(FakeStorageSink(storage), on_log_full="invalidate_cursor")
            await publish_rounds(p, history, range(1))
            storage.hanging_calls.add(len(storage.calls) + 1)
            await publish_rounds(p, history, range(1, 8))
            history.take_snapshot()
            await publish_rounds(p, history, range(8, 12))
            assert p.statistics().log.start_offset > 20
            storage.release.set()
            await p.wait_visible(p.statistics().log.next_offset)
            assert_same_states(storage.states, history.states())
            assert p.statistics().sinks["fake"].rebuilds == 1

    run_virtual(main)


def test_rebuild_holds_the_tail_or_uses_a_newer_snapshot() -> None:
    async def main(required: bool) -> None:
        async with Propagator(SMALL, world=virtual_world()) as p:
            history, storage = History(p), FakeStorage()
            await publish_rounds(p, history, range(8))
            snapshot = history.take_snapshot()
            storage.hanging_calls.add(2)
            await p.attach(FakeStorageSink(storage), required=required)
            await anyio.sleep(0.1)
            await publish_rounds(p, history, range(8, 13))
            assert p.statistics().log.start_offset <= snapshot.offset
            if required:  # the sink holds the log, as a required sink does
                more_deltas = [Delta(f"more{n}", create([1.0, 2.0, 3.0])) for n in range(20)]
                assert (await catch_refusal(p.publish(*more_deltas, timeout_s=1))).code is ErrorCode.LOG_FULL
            else:
                newer = history.take_snapshot()
                await publish_rounds(p, history, range(13, 16))
                assert p.statistics().log.start_offset > snapshot.offset
            storage.release.set()
            await p.wait_visible(p.statistics().log.next_offset)
            history.read()
            assert_same_states(storage.states, history.states())
            assert storage.calls.count("begin") == (1 if required else 2)
            assert required or newer.closed
            await publish_rounds(p, history, range(16, 30))  # nothing holds the log afterwards
            await p.wait_visible(p.statistics().log.next_offset)
            assert_same_states(storage.states, history.states())

    run_virtual(main, True)
    run_virtual(main, False)


def test_operator_can_rebuild_a_sink() -> None:
    async def main() -> None:
        async with Propagator(SMALL, world=virtual_world()) as p:
            history, storage = History(p), FakeStorage()
            await p.attach(FakeStorageSink(storage))
            await publish_rounds(p, history, range(2))
            storage.states.clear()  # the sink's states drift
            p.rebuild("fake")  # the log is complete, so the sink rereads it
            await p.wait_visible(p.statistics().log.next_offset)
            assert_same_states(storage.states, history.states())
            assert storage.calls.count("load") == 0
            await publish_rounds(p, history, range(2, 6))
            history.take_snapshot()
            p.rebuild("fake")
            p.rebuild("fake")
            await p.wait_visible(p.statistics().log.next_offset)
            assert_same_states(storage.states, history.states())
            assert p.statistics().sinks["fake"].rebuilds == 2
            await p.attach(CallbackSink(print, name="lines"), start="latest")
            with pytest.raises(UsageError, match=r"cannot be rebuilt: it stores deltas"):
                p.rebuild("lines")
            with pytest.raises(UsageError, match="no sink named"):
                p.rebuild("nobody")

    run_virtual(main)


def test_refused_rebuild_names_the_fix() -> None:
    async def main() -> None:
        async with Propagator(SMALL, world=virtual_world()) as p:
            history = History(p)
            await publish_rounds(p, history, range(9))
            await expect_refusal(lambda: p.attach(FakeStorageSink(FakeStorage())), "let the log compact")
            await expect_refusal(
                lambda: p.attach(FakeStorageSink(FakeStorage()), rebuild=True), "has no snapshot"
            )
            await expect_refusal(
                lambda: p.attach(CallbackSink(print)), 'start="earliest" to take what is left'
            )
            storage = FakeStorage()
            await p.attach(
                FakeStorageSink(storage), start="earliest"
            )  # no rebuild: the sink gets only what the log still has
            await p.wait_visible(p.statistics().log.next_offset)
            assert "begin" not in storage.calls
            with pytest.raises(Refused, match=r"cannot be rebuilt: .*let it compact") as refusal:
                p.rebuild("fake")
            assert refusal.value.code is ErrorCode.CURSOR_TOO_OLD
            await publish_rounds(p, history, range(9, 10))
            await p.wait_visible(p.statistics().log.next_offset)
            statistics = p.statistics().sinks["fake"]
            assert (statistics.state, statistics.rebuilds) == ("idle", 0)  # the sink continues unchanged
            assert "begin" not in storage.calls  # the sink's data are not cleared without a snapshot
            history.take_snapshot()
            p.rebuild("fake")
            await p.wait_visible(p.statistics().log.next_offset)
            assert_same_states(storage.states, history.states())
            await expect_refusal(
                lambda: p.attach(FakeStorageSink(FakeStorage(), "topics"), topics=["*", "op:create"]),
                "needs offset 0",
            )
            with pytest.raises(UsageError, match="do not match complete vectors"):
                await p.attach(FakeStorageSink(FakeStorage(), "topics"), topics="op:create", rebuild=True)
            topic_storage = FakeStorage()
            await p.attach(FakeStorageSink(topic_storage, "by topic"), topics=["v:v1", "v:v2"])
            await p.wait_visible(p.statistics().log.next_offset)
            expected = history.states()
            assert_same_states(
                topic_storage.states, {ref: expected[ref] for ref in (("default", "v1"), ("default", "v2"))}
            )

    run_virtual(main)


@pytest.mark.parametrize("keeps_cursor", [True, False])
@pytest.mark.parametrize("is_crash", [True, False], ids=["crash", "close"])
def test_interrupted_rebuild_is_restarted_by_next_service(keeps_cursor: bool, is_crash: bool) -> None:
    disk = SimDisk(1)
    log = LogSettings(segment_bytes_max=4096, bytes_max=1 << 20, retention_bytes=1 << 19)
    storage = FakeStorage()

    def service(seed: int, disk: SimDisk) -> Propagator:
        return Propagator(
            Settings(close_timeout_s=1), data="x", log=log, world=virtual_world(seed, disk=disk)
        )

    disks: list[SimDisk] = []

    async def run_interrupted() -> None:
        async with service(1, disk) as p:
            history = History(p)
            await p.attach(FakeStorageSink(storage, has_cursor=keeps_cursor))
            await publish_rounds(p, history, range(3))
            history.take_snapshot()
            storage.hanging_calls.add(len(storage.calls) + 3)
            p.rebuild("fake")
            await anyio.sleep(0.3)
            assert p.statistics().sinks["fake"].state == "rebuilding"
            disks.append(disk.crash(3) if is_crash else disk)

    async def run_to_end() -> None:
        storage.hanging_calls.clear()
        calls = len(storage.calls)
        if keeps_cursor:
            storage.rebuilding = False  # as if the sink did not know of the rebuild
        async with service(2, disks[0]) as p:
            history = History(p)
            history.take_snapshot()
            await p.attach(FakeStorageSink(storage, has_cursor=keeps_cursor), start="latest")
            await publish_rounds(p, history, range(3, 5))
            await p.wait_visible(p.statistics().log.next_offset)
            assert_same_states(storage.states, history.states())
            assert storage.calls[calls] == "begin"
        async with service(3, disks[0]) as p:
            calls = len(storage.calls)
            await p.attach(FakeStorageSink(storage, has_cursor=keeps_cursor))
            await p.wait_visible(p.statistics().log.next_offset)
            assert storage.calls[calls:] == []

    with suppress(SimCrash) if is_crash else nullcontext():
        run_virtual(run_interrupted)
    run_virtual(run_to_end)


def test_data_of_another_log_are_replaced_only_with_rebuild_true(tmp_path: Path) -> None:
    async def fill_storage(seed: int, rounds: range) -> None:
        async with Propagator(data="x", world=virtual_world(seed, disk=SimDisk(seed))) as p:
            storage = await p.attach(StorageSink(tmp_path / "v.db"), rebuild=seed > 1)
            for number in rounds:
                await publish_round(p, number)
            await p.wait_visible(p.statistics().log.next_offset)
            history = History(p)
            history.read()
            await storage.flush()
            stored = {(namespace, key): state async for namespace, key, state in storage.rows()}
            if seed > 1:
                assert_same_states(stored, history.states())

    run_virtual(fill_storage, 1, range(4))

    async def attach_without_rebuild() -> None:
        async with Propagator(data="x", world=virtual_world(5, disk=SimDisk(5))) as p:
            await publish_round(p, 0)
            refusal = await catch_refusal(p.attach(StorageSink(tmp_path / "v.db")))
            assert refusal.code is ErrorCode.CURSOR_TOO_OLD
            assert "or with rebuild=True" in refusal.message

    run_virtual(attach_without_rebuild)
    run_virtual(fill_storage, 2, range(2))


def test_rebuilt_storage_index_and_cache_give_equal_answers(tmp_path: Path) -> None:
    async def main() -> None:
        async with Propagator(SMALL, world=virtual_world()) as p:
            history = History(p)
            full_index = await p.attach(IndexSink(name="whole"))
            await publish_rounds(p, history, range(8))
            history.take_snapshot()
            await publish_rounds(p, history, range(8, 11))
            resident = ResidentVectors()
            storage = await p.attach(StorageSink(tmp_path / "v.db", resident=resident))
            shared_index = await p.attach(IndexSink(name="shared", resident=resident))
            own_index = await p.attach(IndexSink(name="own"))
            cache = await p.attach(CacheSink())
            await publish_rounds(p, history, range(11, 13))
            await p.wait_visible(p.statistics().log.next_offset)
            states = history.states()
            await storage.flush()
            assert_same_states(
                {(namespace, key): state async for namespace, key, state in storage.rows()}, states
            )
            query: Any = [1.0, 2.0, 3.0]
            for index in (shared_index, own_index):
                assert index.search(query, 20, metric="l2") == full_index.search(query, 20, metric="l2")
                assert_same_states(
                    {(namespace, key): state for namespace, key, state in index.rows()}, states
                )
            for ref, state in states.items():
                cached = await cache.get(*ref)
                assert cached is not None
                assert (cached.content, cached.key) == (state.content, state.key)
            for name in ("shared", "own", "cache", "storage"):
                assert p.statistics().sinks[name].rebuilds == 1, name
            p.rebuild("storage")  # the index that shares its vectors is rebuilt too
            await publish_rounds(p, history, range(13, 15))
            await p.wait_visible(p.statistics().log.next_offset)
            await storage.flush()
            assert_same_states(
                {row[:2]: row[2] for row in [row async for row in storage.rows()]}, history.states()
            )
            assert shared_index.search(query, 20, metric="l2") == full_index.search(query, 20, metric="l2")

    run_virtual(main)


def test_states_of_a_large_frame_are_built_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.delta_prop.delivery.rebuilding.FRAME_ROWS", 1000)
    built_counts: list[int] = [0]
    monkeypatch.setattr(
        "delta_prop.delivery.rebuild.state_of",
        lambda *arguments: (built_counts.append(built_counts.pop() + 1), state_of(*arguments))[1],
    )

    async def count_per_tick() -> None:
        while True:
            built_counts.append(0)
            await anyio.lowlevel.checkpoint()

    async def main() -> None:
        settings = replace(SMALL, batch_deltas=3, merge_deltas_max=3)
        async with Propagator(settings, world=virtual_world()) as p, anyio.create_task_group() as tasks:
            history = History(p)
            await publish_rounds(p, history, range(8))
            assert history.take_snapshot().rows > 9
            await p.attach(FakeStorageSink(storage := FakeStorage()))
            tasks.start_soon(count_per_tick)
            await p.wait_visible(p.statistics().log.next_offset)
            assert_same_states(storage.states, history.states())
            assert sum(built_counts) > 9
            assert max(built_counts) <= 3
            tasks.cancel_scope.cancel()

    run_virtual(main)


def test_pause_between_parts_of_a_rebuild_lasts_until_resume(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with Propagator(SMALL, world=virtual_world()) as p:
            history = History(p)
            await publish_rounds(p, history, range(8))
            history.take_snapshot()

            def pause_once(*arguments: Any) -> VectorState:
                monkeypatch.undo()
                p.pause("fake")
                return state_of(*arguments)

            await p.attach(FakeStorageSink(storage := FakeStorage()))
            monkeypatch.setattr("delta_prop.delivery.rebuild.state_of", pause_once)
            await anyio.sleep(60)
            assert (p.statistics().sinks["fake"].state, storage.calls) == ("paused", ["begin"])
            p.resume("fake")
            await p.wait_visible(p.statistics().log.next_offset)
            assert_same_states(storage.states, history.states())
            assert p.statistics().sinks["fake"].rebuilds == 1

    run_virtual(main)
