"""A start that is cut off, and an end on a disk that fails, leave nothing half done behind."""

from __future__ import annotations

import errno
import random

import anyio
import anyio.lowlevel
import pytest

from delta_prop import Propagator, service_log
from delta_prop.testing import run_virtual
from delta_prop_broker.log.corruption import LogBusy
from delta_prop_simulations.disk import SimDisk
from delta_prop_sinks import CallbackSink
from delta_prop_wire.delta import Delta, create
from tests.delta_prop.durable.histories import History, answers, service, step


def _history(disk: SimDisk) -> History:
    """Return the history of a service; remove its checkpoints."""
    history = History(random.Random(1))

    async def live() -> None:
        async with service(disk, 1) as p:
            history.begin(p)
            for _ in range(60):
                await step(p, history)
            await anyio.sleep(1)

    run_virtual(live)
    for path in disk.paths():
        if path.endswith((".checkpoint", ".part")):
            disk.remove(path)
    return history


@pytest.mark.parametrize("cut_at_s", [0.0, 0.01])
def test_a_start_that_is_cancelled_saves_no_half_of_what_it_read(
    cut_at_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_log, "_RESTORE_ROWS", 5)
    disk = SimDisk(1)
    history = _history(disk)

    async def cut_off(disk: SimDisk) -> None:
        with anyio.move_on_after(cut_at_s):
            async with service(disk, 2):
                await anyio.lowlevel.checkpoint()

    async def asked(disk: SimDisk) -> object:
        async with service(disk, 3) as p:
            return await answers(p, history.frames)

    whole = run_virtual(asked, disk.kill())
    run_virtual(cut_off, disk)
    assert run_virtual(asked, disk) == whole


def test_a_start_that_cannot_read_the_cursors_lets_go_of_the_directory() -> None:
    disk = SimDisk(1)

    async def main() -> None:
        async with service(disk, 1) as p:
            await p.attach(CallbackSink(lambda offset, delta: None))
            await p.publish(Delta("a", create([1.0])))
        disk.fail(lambda call: call.name == "read" and call.path == "cursors", errno.EIO)
        with pytest.raises(OSError, match="Input/output"):
            await service(disk, 2).__aenter__()
        disk.heal()
        async with service(disk, 3) as p:
            assert p.statistics().log.next_offset == 1

    run_virtual(main)


def test_an_end_that_cannot_write_the_cursors_ends_all_the_same() -> None:
    disk = SimDisk(1)

    async def fails_at_its_end() -> None:
        async with service(disk, 1) as p:
            await p.attach(CallbackSink(lambda offset, delta: None))
            await p.publish(Delta("a", create([1.0])))
            disk.fail(lambda call: call.path.startswith("cursors"), errno.EIO)

    async def main() -> None:
        with pytest.raises(OSError, match="Input/output"):
            await fails_at_its_end()
        disk.heal()
        try:
            async with service(disk, 2) as p:
                assert p.statistics().log.next_offset == 1
        except LogBusy:
            pytest.fail("the directory is held by a service that has ended")

    run_virtual(main)


def test_a_service_that_is_cancelled_ends_at_once_and_keeps_what_it_had_placed() -> None:
    disk = SimDisk(1)

    async def main() -> None:
        with anyio.CancelScope() as scope:
            async with service(disk, 1) as p:
                began = anyio.current_time()
                await p.publish(Delta("a", create([1.0])))
                scope.cancel()
                p.offer(Delta("b", create([1.0])))
                await anyio.sleep(1)
        assert anyio.current_time() - began < 1
        async with service(disk, 2) as p:
            assert p.statistics().log.next_offset == 2

    run_virtual(main)


def test_who_publishes_to_a_service_that_is_being_cancelled_is_told_what_the_log_keeps() -> None:
    disk, told = SimDisk(1), []

    async def main() -> None:
        async def publish(p: Propagator) -> None:
            told.append((await p.publish(Delta("a", create([1.0])))).offset)

        async with anyio.create_task_group() as tasks:
            with anyio.CancelScope() as scope:
                async with service(disk, 1) as p:
                    scope.cancel()
                    with anyio.CancelScope(shield=True):
                        await anyio.sleep(0.1)  # nobody commits any more
                        tasks.start_soon(publish, p)
                        await anyio.sleep(0.1)
        async with service(disk, 2) as p:
            assert p.statistics().log.next_offset == 1
        assert told == [0]

    run_virtual(main)
