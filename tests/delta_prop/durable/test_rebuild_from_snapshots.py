"""Sinks that were absent while the log rolled and was compacted are rebuilt to the fold of all deltas."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import anyio
import pytest

from delta_prop import LogSettings, Propagator, Settings
from delta_prop.testing import run_virtual, virtual_world
from delta_prop_simulations.disk import SimCrash, SimDisk
from delta_prop_sinks import CallbackSink, IndexSink, ResidentVectors, StorageSink
from delta_prop_wire.delta import Delta, Source, create, delete, offset, scale, sparse_add
from delta_prop_wire.encode import encode_batch
from delta_prop_wire.errors import Refused
from delta_prop_wire.spec import ErrorCode
from tests.delta_prop.delivery.rebuilding import FakeStorage, FakeStorageSink, History, assert_same_states
from tests.delta_prop.support import catch_refusal

if TYPE_CHECKING:
    from pathlib import Path

SMALL = LogSettings(segment_bytes_max=4096, retention_bytes=16_384, bytes_max=262_144, retention_s=3600.0)


def service(disk: SimDisk, seed: int, log: LogSettings = SMALL) -> Propagator:
    return Propagator(Settings(close_timeout_s=5), data="x", log=log, world=virtual_world(seed, disk=disk))


async def load(p: Propagator, history: History, rounds: range) -> None:
    """Publish creates, additive changes and deletes over some seconds, while the log is compacted."""
    if not p.head("v0-0"):
        await p.publish(
            *(Delta(f"v{group}-{row}", create([group, row, 1.0])) for group in range(5) for row in range(4))
        )
    for number in rounds:
        await p.publish(
            *(Delta(f"v{number % 5}-{row}", create([row, number, 1.0])) for row in range(4)),
            *(Delta(f"v{row}-{row % 4}", sparse_add([0], [0.75])) for row in range(5)),
            Delta(f"v{number % 5}-1", scale(1.25), metadata={"at": number}),
            Delta(f"v{(number + 1) % 5}-2", offset(0.5)),
            Delta(f"gone{number}", create([1.0, 1.0, 1.0])),
            Delta(f"gone{number}", delete()),
        )
        history.read()
        await anyio.sleep(0.1)


def alive_states(history: History) -> dict[tuple[str, str], object]:
    """Return the states of the vectors that exist; a rebuilt sink may lack old tombstones."""
    return {ref: state for ref, state in history.states().items() if state.alive}


def test_absent_sinks_catch_up_to_the_full_fold() -> None:
    async def main() -> None:
        disk = SimDisk(1)
        required, released, lines = FakeStorage(), FakeStorage(), CallbackSink(lambda *_: None, name="lines")
        delivered_offsets: list[int] = []
        async with service(disk, 1) as p:
            await p.attach(FakeStorageSink(required, "required"))
            await p.attach(FakeStorageSink(released, "released"))
            await p.attach(lines)
            history = History(p)
            await load(p, history, range(2))
            await p.wait_visible(p.statistics().log.next_offset)
            await p.detach("released")  # the log no longer waits for these two
            await p.detach("lines")
        async with service(disk, 2) as p:
            history.log = p.internals().partition.log
            await p.attach(
                CallbackSink(lambda offset, _: delivered_offsets.append(offset), name="steady"),
                start="earliest",
            )
            await load(p, history, range(2, 40))
            log = p.statistics().log
            assert log.segments >= 5
            assert (log.start_offset, log.held_by) == (0, "required")
            await p.attach(FakeStorageSink(required, "required"))
            await p.wait_visible(log.next_offset)
            assert p.statistics().sinks["required"].rebuilds == 0  # the log held every row
            assert_same_states(required.states, history.states())
            await load(p, history, range(40, 70))
            await anyio.sleep(30)
            log = p.statistics().log
            assert log.snapshots_made >= 1
            assert log.start_offset > released.cursor.next_offset  # type: ignore[union-attr]
            refusal = await catch_refusal(p.attach(lines))
            assert refusal.code is ErrorCode.CURSOR_TOO_OLD
            for name, storage in (("released", released), ("new", FakeStorage())):
                await p.attach(FakeStorageSink(storage, name))
                await load(p, history, range(70, 73))
                await p.wait_visible(p.statistics().log.next_offset)
                assert p.statistics().sinks[name].rebuilds == 1
                alive = {ref: state for ref, state in storage.states.items() if state.alive}
                assert_same_states(alive, alive_states(history))  # type: ignore[arg-type]
            end = p.statistics().log.next_offset
            assert delivered_offsets == list(range(end)), "the other sink must not be affected"
            assert p.statistics().refused == 0

    run_virtual(main)


@pytest.mark.parametrize("rebuilds", [True, False])
def test_full_log_invalidates_rebuildable_sinks_only(
    rebuilds: bool,
) -> None:
    async def main() -> None:
        log = LogSettings(
            segment_bytes_max=4096, retention_bytes=16_384, bytes_max=32_768, retention_s=3600.0
        )
        storage = FakeStorage()
        storage.hanging_calls.add(1)
        sink = FakeStorageSink(storage) if rebuilds else CallbackSink(_hang, name="fake")
        async with service(SimDisk(1), 1, log) as p:
            await p.attach(sink)
            history = History(p)
            if not rebuilds:
                refusal = await catch_refusal(load(p, history, range(60)))
                assert refusal.code is ErrorCode.LOG_FULL
                assert refusal.details["blocked_by"] == "fake"
                return
            await load(p, history, range(60))
            storage.release.set()
            await p.wait_visible(p.statistics().log.next_offset)
            assert p.statistics().sinks["fake"].rebuilds == 1
            alive = {ref: state for ref, state in storage.states.items() if state.alive}
            assert_same_states(alive, alive_states(history))  # type: ignore[arg-type]

    run_virtual(main)


async def _hang(*_: object) -> None:
    await anyio.sleep_forever()


def test_storage_and_its_index_are_rebuilt_from_a_real_snapshot(tmp_path: Path) -> None:
    async def main() -> None:
        disk = SimDisk(2)
        async with service(disk, 1) as p:
            history = History(p)
            reference = await p.attach(IndexSink(name="whole"))
            await load(p, history, range(50))
            await anyio.sleep(30)
            assert p.statistics().log.start_offset > 0
            resident = ResidentVectors()
            storage = await p.attach(StorageSink(tmp_path / "v.db", resident=resident))
            shared = await p.attach(IndexSink(name="shared", resident=resident))
            await load(p, history, range(50, 55))
            await p.wait_visible(p.statistics().log.next_offset)
            for ref, state in alive_states(history).items():
                stored = await storage.get(*ref)
                assert stored is not None
                assert stored.content == state.content  # type: ignore[attr-defined]
                assert stored.key == state.key  # type: ignore[attr-defined]
            for metric in ("l2", "cosine"):
                expected = reference.search([1.0, 2.0, 3.0], 30, metric=metric)  # type: ignore[arg-type]
                assert shared.search([1.0, 2.0, 3.0], 30, metric=metric) == expected  # type: ignore[arg-type]
            assert [p.statistics().sinks[name].rebuilds for name in ("storage", "shared", "whole")] == [
                1,
                1,
                0,
            ]

    run_virtual(main)


def test_shared_index_rebuild_ends_after_rows_of_other_namespaces(tmp_path: Path) -> None:
    async def main() -> None:
        async with service(SimDisk(3), 1) as p:
            resident = ResidentVectors()
            await p.attach(StorageSink(tmp_path / "v.db", resident=resident), topics="ns:default")
            index = await p.attach(IndexSink(resident=resident), topics="ns:default")
            await load(p, History(p), range(30))
            end = p.statistics().log.next_offset
            for number in range(200):
                await p.publish(Delta(f"v{number % 9}", create([float(number)] * 3), namespace="others"))
            await anyio.sleep(30)
            assert p.statistics().log.snapshot_offset > end  # type: ignore[union-attr]
            p.rebuild("index")
            await p.wait_visible(p.statistics().log.next_offset, sinks=["index"], timeout_s=60)
            assert p.statistics().sinks["index"].rebuilds == 1
            assert len(index.search([1.0, 2.0, 3.0], 30)) == 20

    run_virtual(main)


@pytest.mark.parametrize("seed", range(2))
def test_rebuild_from_a_real_snapshot_survives_crashes(seed: int) -> None:
    """The power fails at a call of the sink in each of three processes; each process restarts the rebuild."""
    storage, disks = FakeStorage(), [SimDisk(seed)]

    async def crash_during_rebuild(number: int) -> None:
        async with service(disks[-1], number) as p:
            await load(p, History(p), range(40 * number, 40 * number + 40))
            await anyio.sleep(20)
            assert p.statistics().log.start_offset > 0
            storage.release = anyio.Event()  # an event of this process's loop
            storage.hanging_calls.add(len(storage.calls) + 1 + (seed + number) % 3)
            await p.attach(FakeStorageSink(storage), required=False)
            await anyio.sleep(5)
            assert p.statistics().sinks["fake"].state == "rebuilding"
            disks.append(disks[-1].crash(seed + number))

    async def finish_rebuild() -> None:
        async with service(disks[-1], 9) as p:
            reference = FakeStorage()
            await p.attach(FakeStorageSink(storage))
            await p.attach(FakeStorageSink(reference, "whole"))
            await p.wait_visible(p.statistics().log.next_offset)
            assert not storage.rebuilding
            assert p.statistics().sinks["fake"].rebuilds == 1
            assert_same_states(storage.states, reference.states)

    for number in range(3):
        with suppress(SimCrash, BaseExceptionGroup):
            run_virtual(crash_during_rebuild, number)
        assert len(disks) == number + 2
        storage.hanging_calls.clear()
    run_virtual(finish_rebuild)
    assert storage.calls.count("begin") >= 2


@pytest.mark.parametrize("keeps_cursor", [True, False])
@pytest.mark.parametrize("killed", [True, False])
def test_sink_detached_before_its_rebuild_is_rebuilt_on_return(killed: bool, keeps_cursor: bool) -> None:
    storage, disks = FakeStorage(), [SimDisk(1)]

    async def detach_before_rebuild() -> None:
        async with service(disks[-1], 1) as p:
            history = History(p)
            await p.attach(FakeStorageSink(storage, has_cursor=keeps_cursor))
            await load(p, history, range(2))
            await p.wait_visible(p.statistics().log.next_offset)
            await p.detach("fake")
            p.pause("fake")
            await load(p, history, range(2, 70))
            await anyio.sleep(30)
            await p.attach(FakeStorageSink(storage, has_cursor=keeps_cursor))
            await anyio.sleep(5)  # long enough to write the cursors
            feed = p.statistics().sinks["fake"]
            assert (feed.state, feed.rebuilds, feed.rebuild is not None) == ("paused", 0, True)
            if killed:
                disks.append(disks[-1].kill())  # as a kill leaves the disk
                return
        disks.append(disks[-1].kill())  # a copy after a clean close

    async def return_and_rebuild() -> None:
        async with service(disks[1], 2) as p:
            reference = FakeStorage()
            await p.attach(FakeStorageSink(reference, "whole"))
            await p.attach(FakeStorageSink(storage, has_cursor=keeps_cursor))
            p.resume("fake")
            await p.wait_visible(p.statistics().log.next_offset)
            assert p.statistics().sinks["fake"].rebuilds == 1
            assert_same_states(storage.states, reference.states)

    run_virtual(detach_before_rebuild)
    run_virtual(return_and_rebuild)


def test_out_of_order_deltas_fold_onto_the_snapshot_or_are_counted(tmp_path: Path) -> None:
    async def main() -> None:
        async with service(SimDisk(3), 1) as p:
            history, remote = History(p), p.producer("elsewhere", source=Source.REPLICA)
            await p.publish(Delta("vector", create([1.0, 1.0, 1.0])))
            await load(p, history, range(50))
            await anyio.sleep(30)
            storage = await p.attach(StorageSink(tmp_path / "v.db"))
            await p.wait_visible(p.statistics().log.next_offset)
            assert p.statistics().sinks["storage"].rebuilds == 1
            end_before = p.statistics().log.next_offset
            await p.publish(Delta("vector", scale(2.0)))
            history.read()
            last = history.batches[-1]
            # The Lamport number lies above all rows of the snapshot and below this scale.
            late_batch = encode_batch([Delta("vector", sparse_add([0], [10.0]))], origin=0x7770, base=1)
            await remote.send_frame(late_batch, last.lamport - 1).wait()
            below_snapshot = encode_batch([Delta("vector", sparse_add([1], [10.0]))], origin=0x7770, base=2)
            await remote.send_frame(below_snapshot, 1).wait()
            await p.wait_visible(end_before + 3)
            state = await storage.get("default", "vector")
            assert state is not None
            assert state.vector is not None
            assert state.vector.tolist() == [22.0, 2.0, 2.0]
            assert (state.ignored, storage.resident.statistics().below_snapshot) == (1, 1)

    run_virtual(main)


@pytest.mark.parametrize("compacts", [True, False])
def test_rebuild_without_a_snapshot_is_refused_at_the_call(compacts: bool) -> None:
    async def main() -> None:
        disk, storage = SimDisk(5), FakeStorage()
        async with service(disk, 1, replace(SMALL, compact=compacts)) as p:
            history = History(p)
            await p.attach(FakeStorageSink(storage))
            await load(p, history, range(60))
            await anyio.sleep(30)
            assert p.statistics().log.start_offset > 0
        async with service(disk, 2, replace(SMALL, compact=False)) as p:  # an existing snapshot still counts
            history.log = p.internals().partition.log
            await p.attach(FakeStorageSink(storage))
            if compacts:
                p.rebuild("fake")
            else:
                with pytest.raises(Refused, match=r"cannot be rebuilt.*has no snapshot"):
                    p.rebuild("fake")
            await p.publish(Delta("v0-0", create([1.0, 2.0, 3.0])))
            await p.wait_visible(p.statistics().log.next_offset)
            feed = p.statistics().sinks["fake"]
            assert (feed.state, feed.rebuilds) == ("idle", int(compacts))

    run_virtual(main)
