"""Quarantined deltas survive a kill of the process, and an interrupted replay has one effect."""

from __future__ import annotations

import signal
import subprocess
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Literal

import anyio
import pytest

from delta_prop import Delta, Propagator, create, sparse_add
from delta_prop.delivery.quarantine_file import read_stored
from delta_prop.testing import run_virtual
from delta_prop_simulations.disk import SimDisk
from delta_prop_simulations.disk_faults import SimCrash
from delta_prop_sinks import StorageSink
from delta_prop_sinks.sink import RejectDelta
from delta_prop_wire.delta import Source
from delta_prop_wire.encode import encode_batch
from tests.delta_prop.delivery.rebuilding import FakeStorage, FakeStorageSink, History, assert_same_states
from tests.delta_prop.durable.quarantined import (
    RejectingSink,
    Store,
    make_addition,
    make_delta,
    quarantined_rows,
    rows_of,
    service,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from delta_prop_sinks.sink import Delivery

KILLED_SCRIPT = """
import os, signal, sys, anyio
from delta_prop import Delta, Propagator, create, sparse_add
from delta_prop.sinks import StorageSink
from delta_prop_wire.delta import Operation

async def main():
    async with Propagator(data=sys.argv[1] + "/log") as p:
        await p.attach(StorageSink(sys.argv[1] + "/facts.db"))
        await p.publish(Delta("v", create([1.0])), Delta("w", create([1.0])))
        await p.publish(Delta("v", Operation(40, data=b"of another version")))
        await p.publish(Delta("v", sparse_add([0], [10.0])))
        last = await p.publish(Delta("w", sparse_add([0], [100.0])))
        await p.wait_visible(last, sinks=["storage"], committed=True)
        os.kill(os.getpid(), signal.SIGKILL)

anyio.run(main)
"""


def test_deltas_rejected_by_storage_survive_a_kill(tmp_path: Path) -> None:
    finished = subprocess.run([sys.executable, "-c", KILLED_SCRIPT, str(tmp_path)], check=False, timeout=60)
    assert finished.returncode == -signal.SIGKILL

    async def run_service(drops: bool) -> tuple[list[int], float, float]:
        async with Propagator(data=tmp_path / "log") as p:
            storage = await p.attach(StorageSink(tmp_path / "facts.db"))
            quarantined_offsets = [record.offset for record in p.quarantine("storage")]
            if drops:
                assert (await p.drop("storage", 2)).applied == 1
            v, w = await storage.get("default", "v"), await storage.get("default", "w")
            assert v is not None
            assert w is not None
            assert v.vector is not None
            assert w.vector is not None
            await p.publish(Delta("w", sparse_add([0], [1000.0])))
            return quarantined_offsets, float(v.vector[0]), float(w.vector[0])

    assert anyio.run(run_service, False) == ([2, 3], 1.0, 101.0)
    assert anyio.run(run_service, True) == ([2, 3], 11.0, 1101.0)
    assert anyio.run(run_service, False) == ([], 11.0, 2101.0)


class CrashingSink(RejectingSink):
    """A sink that crashes when a replay delivers rows to it: before it applies them, or just after."""

    def __init__(self, store: Store, bad: set[float], when: Literal["before", "after"]) -> None:
        super().__init__(store, bad)
        self.when = when

    async def apply(self, deliveries: Sequence[Delivery]) -> None:
        has_redelivery = any(delivery.redelivered for delivery in deliveries)
        if has_redelivery and self.when == "before":
            raise SimCrash("the machine went off")
        await super().apply(deliveries)
        if has_redelivery:
            raise SimCrash("the machine went off")


@pytest.mark.parametrize("keeps_cursor", [True, False])
@pytest.mark.parametrize("when", ["before", "after"])
def test_interrupted_replay_has_one_effect(when: Literal["before", "after"], keeps_cursor: bool) -> None:
    disk, store, bad = SimDisk(1), Store(keeps_cursor), {7.0}

    async def replay_and_crash() -> None:
        async with service(disk, 1) as p:
            await p.attach(CrashingSink(store, bad, when))
            await p.publish(make_delta("a"), make_delta("b"))
            await p.publish(make_addition("a", 7), make_addition("a", 10))
            await p.internals().sinks.feed("totals").wait(4)
            assert [offset for offset, _, _ in quarantined_rows(p)] == [2, 3]
            await anyio.sleep(2)
            bad.clear()
            await p.replay("totals")

    with pytest.raises(BaseExceptionGroup) as caught:
        run_virtual(replay_and_crash)
    assert caught.group_contains(SimCrash)
    assert store.sums["a"] == (1 if when == "before" else 18)

    async def reopen() -> None:
        async with service(disk.crash(1), 2) as p:
            await p.attach(RejectingSink(store, bad))
            assert [offset for offset, _, _ in quarantined_rows(p)] == [2, 3]
            await p.replay("totals")
            assert quarantined_rows(p) == []

    run_virtual(reopen)
    assert store.sums == {"a": 18, "b": 1}
    assert store.applied_offsets == [0, 1, 2, 3]


class RejectingStorageSink(FakeStorageSink):
    """A sink that rejects the delta at offset 2, which comes in a call of its own."""

    async def apply(self, deliveries: Sequence[Delivery]) -> None:
        if deliveries[0].first_offset == 2:
            raise RejectDelta(2, "not 2")
        await super().apply(deliveries)


def test_rebuild_clears_the_quarantine() -> None:
    storage, disks = FakeStorage(), [SimDisk(1)]

    async def first() -> None:
        async with service(disks[0], 1) as p:
            history = History(p)
            await p.attach(RejectingStorageSink(storage))
            for number in range(5):
                await p.publish(make_addition("v", number) if number else make_delta("v"))
                await anyio.sleep(0.1)
            assert [offset for offset, _, _ in quarantined_rows(p, "fake")] == [2, 3, 4]
            history.take_snapshot()
            p.rebuild("fake")
            await p.wait_visible(5)
            assert_same_states(storage.states, history.states())
            disks.append(disks[0].crash(1))

    async def second() -> None:
        stored = read_stored(disks[1], "fake", lambda _: None)
        assert stored is not None
        assert stored.held == {}
        async with service(disks[1], 2) as p:
            await p.attach(RejectingStorageSink(storage))
            assert quarantined_rows(p, "fake") == []
            await p.publish(make_addition("v", 100))
            await p.wait_visible(6)

    with suppress(SimCrash):
        run_virtual(first)
    run_virtual(second)


def test_quarantined_rows_are_withheld_from_history_at_open() -> None:
    async def main() -> None:
        disk, store, bad, seen = SimDisk(1), Store(keeps_cursor=True), {7.0}, []

        class HistorySink(RejectingSink):
            async def open(self, context):  # type: ignore[no-untyped-def]
                history = context.history([("default", "a")])
                seen.append([logged.offset + row async for logged, row in history])
                return await super().open(context)

        async with service(disk, 1) as p:
            await p.attach(HistorySink(store, bad))
            await p.publish(make_delta("a"), make_delta("b"))
            await p.publish(make_addition("a", 7), make_addition("a", 10))
            await p.internals().sinks.feed("totals").wait(4)
            await p.publish(make_delta("c"))
            await anyio.sleep(2)
        disk = disk.crash(1)
        async with service(disk, 2) as p:
            await p.attach(HistorySink(store, bad))
            await p.drop("totals", 2)
        async with service(disk.crash(2), 3) as p:
            await p.attach(HistorySink(store, bad))
        assert seen == [[], [0], [0, 3]]

    run_virtual(main)


def test_replayed_delta_is_folded_in_canonical_order(tmp_path: Path) -> None:
    class Picky(StorageSink):
        bad = True

        async def apply(self, deliveries: Sequence[Delivery]) -> None:
            for delivery in deliveries if self.bad else ():
                for offset, row in rows_of(delivery):
                    if delivery.batch.metadata(row):
                        raise RejectDelta(offset, "metadata are not wanted now")
            await super().apply(deliveries)

    async def main() -> None:
        async with service(SimDisk(1), 1) as p:
            sink, remote = await p.attach(Picky(tmp_path / "v.db")), p.producer("far", source=Source.REPLICA)
            await p.publish(make_delta("a", 1.0))
            await p.publish(make_delta("b", 1.0))
            await p.publish(Delta("a", create([7.0]), metadata={"n": 1}))
            early_batch = encode_batch([Delta("a", sparse_add([0], [10.0]))], origin=0x7770, base=1)
            await remote.send_frame(early_batch, 2).wait()
            await p.internals().sinks.feed(sink.name).wait(4)
            assert quarantined_rows(p, sink.name) == [(2, 2, "metadata are not wanted now"), (3, 2, None)]
            sink.bad = False
            assert (await p.replay(sink.name)).applied == 2
            state = await sink.get("default", "a")
            assert state is not None
            assert state.vector is not None
            assert (state.vector.tolist(), state.metadata) == ([7.0], {"n": 1}), (
                "the replayed delta must sort before the create"
            )

    run_virtual(main)
