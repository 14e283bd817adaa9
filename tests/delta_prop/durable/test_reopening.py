"""A service can be read while its disk fails, and continues without loss when the disk recovers."""

from __future__ import annotations

import errno
from contextlib import suppress
from typing import TYPE_CHECKING

import anyio
import pytest

from delta_prop import LogSettings, Propagator, Settings
from delta_prop.testing import run_virtual, virtual_world
from delta_prop_broker.log.durable import DurableLog
from delta_prop_simulations.disk import SimDisk
from delta_prop_sinks import CallbackSink
from delta_prop_wire.delta import AckLevel, Delta, create
from delta_prop_wire.errors import Refused
from delta_prop_wire.spec import ErrorCode
from tests.broker.durable import Clock, FixedRandomness

if TYPE_CHECKING:
    from collections.abc import Callable

    from delta_prop_simulations.disk import Call

NO_RESERVE = LogSettings(free_bytes_min=0, reserve_bytes=0)


def service(disk: SimDisk, seed: int = 0, log: LogSettings = NO_RESERVE) -> Propagator:
    world = virtual_world(seed, thread_delay_s_max=0.01, disk=disk)
    return Propagator(Settings(close_timeout_s=5), data="x", log=log, world=world)


def make_delta(key: str) -> Delta:
    return Delta(key, create([1.0, 2.0]))


def test_service_recovers_by_itself_when_the_disk_recovers() -> None:
    async def main() -> None:
        disk, seen, offsets = SimDisk(1), [], []
        async with service(disk) as p, anyio.create_task_group() as tasks:
            await p.attach(CallbackSink(lambda offset, delta: seen.append((offset, delta.vector_id))))
            producer = p.producer("me")
            await p.publish(make_delta("a"))
            await producer.publish(make_delta("b"))

            async def publish_draft() -> None:
                offsets.append((await p.publish(make_delta("c"))).offset)

            async def publish_with_dot() -> None:
                offsets.append((await producer.publish(make_delta("d"), timeout_s=100)).offset)

            disk.fail(lambda call: call.name in ("sync", "sync_directory"), times=None)
            tasks.start_soon(publish_draft)
            tasks.start_soon(publish_with_dot)
            await anyio.sleep(20)
            reopening = p.statistics().reopening
            assert reopening is not None
            assert (reopening.failed, reopening.reopened) == (True, 0)
            assert reopening.tries > 5
            assert reopening.last_error is not None
            assert "Input/output" in reopening.last_error
            assert 0 <= (reopening.next_try_s or 0) <= 30
            assert offsets == []
            with pytest.raises(Refused) as caught:
                await p.offer(make_delta("e")).wait()
            assert caught.value.code is ErrorCode.LOG_FAILED
            late: list[int] = []
            await p.attach(CallbackSink(lambda offset, _: late.append(offset), name="late"), start="earliest")
            await p.wait_visible(2, sinks=["late"])
            assert late == [0, 1], "the log must be readable while its disk fails"
            disk.heal()
            await anyio.sleep(31)
            assert sorted(offset for offset in offsets if offset is not None) == [2, 3]
            reopening = p.statistics().reopening
            assert reopening is not None
            assert (reopening.failed, reopening.reopened, reopening.tries) == (False, 1, 0)
            assert p.recovery is not None
            assert p.recovery.epoch == 2
            await producer.publish(make_delta("f"))
            await p.wait_visible(5)
            assert [offset for offset, _ in seen] == [0, 1, 2, 3, 4]
            assert sorted(key for _, key in seen) == ["a", "b", "c", "d", "f"]
            assert late == [0, 1, 2, 3, 4]

    run_virtual(main)


# --- every call of the disk, every kind of fault

OUTAGE_S = 3.0
SMALL = LogSettings(
    segment_bytes_max=700,
    bytes_max=40_000,
    retention_bytes=40_000,
    tail_bytes_max=1,
    free_bytes_min=0,
    reserve_bytes=0,
)


class OutageRun:
    """Producers, callers without producers, and two sinks; records acknowledged and delivered rows."""

    def __init__(self, disk: SimDisk, level: AckLevel = AckLevel.DURABLE) -> None:
        self.disk = disk
        self.level = level
        self.acknowledged: dict[str, int] = {}
        self.checked_rows = 0
        self.seen: dict[str, list[tuple[int, str]]] = {"one": [], "two": []}
        self.recoveries = 0

    async def run(self, seed: int, fault: Callable[[int], None] | None = None) -> None:
        """Run all callers through a fault of the disk; check their outcomes, deliveries and the log."""
        async with service(self.disk, seed, SMALL) as p:
            await p.attach(CallbackSink(lambda offset, delta: self.note("one", offset, delta), name="one"))
            if fault is not None:
                fault(self.disk.calls)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self.heal, p)
                for number in range(2):
                    tasks.start_soon(self.produce, p, number)
                    tasks.start_soon(self.publish, p, number)
                tasks.start_soon(self.attach_late, p)
            await p.wait_visible(p.statistics().log.next_offset, timeout_s=200)
            reopening = p.statistics().reopening
            assert reopening is not None
            assert not reopening.failed
            self.recoveries = reopening.reopened
            await self.check_against_fresh(p, seed)

    async def heal(self, p: Propagator) -> None:
        await anyio.sleep(OUTAGE_S)
        acknowledged_before = dict(self.acknowledged)
        image = self.disk.crash(self.disk.calls)
        self.disk.heal()
        assert acknowledged_before.items() <= (await contents(image)).items(), (
            "acknowledged rows must be on stable storage"
        )
        self.checked_rows += len(acknowledged_before)

    async def attach_late(self, p: Propagator) -> None:
        sink = CallbackSink(lambda offset, delta: self.note("two", offset, delta), name="two")
        while "two" not in p.statistics().sinks:
            await anyio.sleep(0.2)
            with suppress(OSError):  # its quarantine must be read first
                await p.attach(sink, start="earliest")

    async def produce(self, p: Propagator, number: int) -> None:
        producer = p.producer(f"p{number}", ack_level=self.level)
        for index in range(6):
            key = f"p{number}-{index}"
            published = await producer.publish(make_delta(key), timeout_s=150)
            assert published.offset is not None
            self.record(key, published.offset)
            await anyio.sleep(0.05 * index)

    async def publish(self, p: Propagator, number: int) -> None:
        for index in range(4):
            key = f"d{number}-{index}"
            delta = (
                make_delta(key)
                if number
                else Delta(key, create([1.0]), namespace="ids", id=key.encode().ljust(16))
            )
            published = await p.publish(delta, ack_level=self.level, timeout_s=150)
            offset = published.offset if published.offset is not None else published.duplicates[0]
            assert offset is not None
            self.record(key, offset)
            await anyio.sleep(0.1)

    def record(self, key: str, offset: int) -> None:
        assert key not in self.acknowledged
        self.acknowledged[key] = offset

    def note(self, sink: str, offset: int, delta: Delta) -> None:
        self.seen[sink].append((offset, delta.vector_id))

    async def check_against_fresh(self, p: Propagator, seed: int) -> None:
        image = self.disk.kill()
        assert await contents(image) == self.acknowledged, (
            "every acknowledged delta must be stored once, at its offset"
        )
        for sink, seen in self.seen.items():
            assert seen == sorted({(offset, key) for key, offset in self.acknowledged.items()}), sink
        async with service(image, seed + 1, SMALL) as fresh:
            assert log_position(fresh) == log_position(p)
            for key in self.acknowledged:
                assert fresh.head(key) == p.head(key)
            ids = [key.encode().ljust(16) for key in self.acknowledged if key.startswith("d0")]
            recovered_ids, reopened_ids = (
                p.internals().partition.pipeline.appender.ids.find(ids),
                fresh.internals().partition.pipeline.appender.ids.find(ids),
            )
            assert recovered_ids == reopened_ids == [self.acknowledged[id_.decode().rstrip()] for id_ in ids]
            for number in range(2):
                producer = fresh.producer(f"p{number}")
                for index in range(6):
                    assert await producer.outcome(index + 1) == self.acknowledged[f"p{number}-{index}"]


def log_position(p: Propagator) -> tuple[int, int, int, dict[int, int]]:
    log = p.statistics().log
    watermarks = {
        origin: watermark
        for origin, watermark in p.internals().partition.pipeline.orderer.watermarks.items()
        if watermark
    }
    return log.start_offset, log.next_offset, log.high_watermark, watermarks


async def contents(disk: SimDisk) -> dict[str, int]:
    """Reopen the log; return offsets by key, each key once."""
    log, _ = DurableLog.open(disk.kill(), settings=SMALL, randomness=FixedRandomness(), clock=Clock())
    offsets: dict[str, int] = {}
    offset = log.start_offset
    while batches := log.read(offset, rows_max=1000, bytes_max=1 << 20):
        for logged in batches:
            if not logged.batch.is_control:
                for row, key in enumerate(logged.batch.keys):
                    assert key not in offsets, f"{key} is stored twice"
                    offsets[key] = logged.offset + row
            offset = logged.next_offset
    log.close()
    return offsets


def fault_from(disk: SimDisk, kind: str, n: int) -> Callable[[int], None]:
    """Return a function that makes the disk fail from its n-th call on until it is healed."""

    def set_up(calls: int) -> None:
        def fails(call: Call) -> bool:
            names_by_kind = {"read": ("read",), "sync": ("sync", "sync_directory"), "write": ("write",)}
            call_names = names_by_kind.get(
                kind, ("write", "truncate", "allocate") if kind == "ENOSPC" else None
            )
            return call.number >= calls + n and (call_names is None or call.name in call_names)

        if kind == "short":
            disk.shorten(fails, 1, times=None)
        else:
            disk.fail(fails, errno.ENOSPC if kind == "ENOSPC" else errno.EIO, times=None)

    return set_up


@pytest.mark.parametrize("kind", ["ENOSPC", "write", "read", "sync", "everything", "short"])
def test_failure_at_any_call_loses_or_doubles_nothing(kind: str, full: bool) -> None:
    probe = SimDisk(0)
    run_virtual(OutageRun(probe).run, 0)
    calls = probe.calls
    recoveries = faults = checked_rows = 0
    for n in range(1, calls, 1 if full else 41):
        disk = SimDisk(n)
        outage = OutageRun(disk)
        run_virtual(outage.run, n, fault_from(disk, kind, n))
        recoveries += outage.recoveries
        checked_rows += outage.checked_rows
        faults += sum(
            count for name, count in disk.fault_counts.items() if name.endswith(("failed", "writes"))
        )
    print(f"{kind}: {calls} calls, {faults} faults, {recoveries} recoveries, {checked_rows} rows checked")
    assert faults > 5
    assert checked_rows > 5
    assert recoveries > 2 or kind in ("read", "short")
