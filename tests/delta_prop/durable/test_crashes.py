"""The service on a simulated disk that crashes: each acknowledged row is in the log once, in order."""

from __future__ import annotations

import errno
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import anyio
import pytest

from delta_prop.api.propagator import Propagator
from delta_prop.testing import run_virtual, virtual_world
from delta_prop_simulations.disk import SimCrash, SimDisk
from delta_prop_sinks import CallbackSink
from delta_prop_wire.delta import AckLevel, Delta, create
from delta_prop_wire.errors import Refused
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from delta_prop.api.producer import Producer

PRODUCERS = 3
DELTAS_PER_PRODUCER = 12


@dataclass
class CrashRun:
    """Acknowledgements and counts, over all processes of one service."""

    acknowledged: dict[str, int] = field(default_factory=dict)
    processes: int = 0
    skipped: int = 0
    crashes: int = 0


async def run_service(disk: SimDisk, seed: int, crash_run: CrashRun) -> list[tuple[int, str]]:
    """Run one process; each producer continues where it stopped. Return the rows of the log."""
    crash_run.processes += 1
    seen: list[tuple[int, str]] = []
    world = virtual_world(seed + 1000 * crash_run.processes, thread_delay_s_max=0.01, disk=disk)
    async with Propagator(data="x", world=world) as p:
        sink = CallbackSink(lambda offset, delta: seen.append((offset, delta.vector_id)))
        await p.attach(sink, start="earliest")
        async with anyio.create_task_group() as tasks:
            for number in range(PRODUCERS):
                tasks.start_soon(produce, p.producer(f"p{number}"), number, crash_run)
        await p.wait_visible(p.statistics().log.next_offset)
    return seen


async def produce(producer: Producer, number: int, crash_run: CrashRun) -> None:
    """Send all deltas that the service does not have yet, under the same dots in each process."""
    for position in range(DELTAS_PER_PRODUCER):
        key = f"{number}-{position}"
        if position < producer.watermark():
            crash_run.skipped += 1
            continue
        published = await producer.publish(make_delta(key))
        assert published.level is AckLevel.DURABLE
        assert published.offset is not None
        if key in crash_run.acknowledged:
            assert crash_run.acknowledged[key] == published.offset
        crash_run.acknowledged[key] = published.offset


def make_delta(key: str) -> Delta:
    return Delta(key, create([1.0]))


def is_crash(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return any(is_crash(inner) for inner in error.exceptions)
    return isinstance(error, SimCrash)


def run_process(disk: SimDisk, seed: int, crash_run: CrashRun) -> list[tuple[int, str]] | None:
    """Run one process; return the rows of the log, or None if the disk crashed."""
    try:
        return run_virtual(run_service, disk, seed, crash_run)
    except BaseException as error:
        if not is_crash(error):
            raise
        crash_run.crashes += 1
        return None


@pytest.mark.parametrize("power_cut", [True, False])
def test_acknowledged_rows_survive_a_crash_at_any_call(power_cut: bool) -> None:
    crash_run = CrashRun()
    probe = SimDisk(0)
    assert run_process(probe, 0, crash_run) is not None
    calls = probe.calls
    assert calls > 60
    step = 3
    crashes = 0
    for n in range(1, calls, step):
        crash_run = CrashRun()
        disk = SimDisk(n)
        disk.crash_at(n, None)
        seen = run_process(disk, n, crash_run)
        assert seen is None
        acknowledged_before = dict(crash_run.acknowledged)
        disk = disk.crash(n) if power_cut else disk.kill()
        seen = run_process(disk, n, crash_run)
        assert seen is not None
        crashes += crash_run.crashes
        offsets = [offset for offset, _ in seen]
        assert offsets == sorted(set(offsets))
        assert sorted(key for _, key in seen) == sorted(
            f"{number}-{position}" for number in range(PRODUCERS) for position in range(DELTAS_PER_PRODUCER)
        )
        offset_of = {key: offset for offset, key in seen}
        assert all(offset_of[key] == offset for key, offset in acknowledged_before.items())
        for number in range(PRODUCERS):
            keys = [key for _, key in seen if key.startswith(f"{number}-")]
            assert keys == [f"{number}-{position}" for position in range(DELTAS_PER_PRODUCER)]
    print(f"{crashes} crashes over {calls} disk calls")
    assert crashes >= 20


def test_append_that_the_disk_refuses_is_not_acknowledged() -> None:
    async def main() -> None:
        disk = SimDisk(1)
        async with Propagator(data="x", world=virtual_world(1, disk=disk)) as p:
            await p.publish(make_delta("a"))
            disk.fail(disk.calls + 1, errno.EIO)
            disk.fail(lambda call: call.name in ("write", "sync"), errno.EIO, times=None)
            for key, code in (("b", ErrorCode.OUTCOME_UNKNOWN), ("c", ErrorCode.LOG_FAILED)):
                with pytest.raises(Refused) as caught:
                    await p.publish(make_delta(key), timeout_s=5)
                assert caught.value.code is code
            disk.heal()

    run_virtual(main)


def test_crash_during_close_leaves_no_task_or_scope() -> None:
    async def run_service(disk: SimDisk) -> None:
        async with Propagator(data="x", world=virtual_world(1, disk=disk)) as p:
            await p.attach(CallbackSink(lambda _offset, _delta: None))
            await p.publish(make_delta("a"))
            await p.wait_visible(1)
            disk.crash_at(lambda call: "cursors" in call.path)

    async def main() -> None:
        with pytest.raises(BaseException) as caught:
            await run_service(SimDisk(1))
        assert is_crash(caught.value)

    run_virtual(main)
