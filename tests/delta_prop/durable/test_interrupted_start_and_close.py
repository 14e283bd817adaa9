"""An interrupted start, or a close on a failing disk, leaves no partial state and no held directory."""

from __future__ import annotations

import errno
import random

import anyio
import anyio.lowlevel
import pytest

from delta_prop import Propagator
from delta_prop.partition.storage import storage
from delta_prop.testing import run_virtual
from delta_prop_broker.corruption import LogBusy
from delta_prop_simulations.disk import SimDisk
from delta_prop_sinks import CallbackSink
from delta_prop_wire.delta import Delta, create
from tests.delta_prop.durable.histories import History, answers, service, step


def make_history(disk: SimDisk) -> History:
    """Run a service, and remove its checkpoints; return its history."""
    history = History(random.Random(1))

    async def run_service() -> None:
        async with service(disk, 1) as p:
            history.note_restart(p)
            for _ in range(60):
                await step(p, history)
            await anyio.sleep(1)

    run_virtual(run_service)
    for path in disk.paths():
        if path.endswith((".checkpoint", ".part")):
            disk.remove(path)
    return history


@pytest.mark.parametrize("cancel_after_s", [0.0, 0.01])
def test_cancelled_start_saves_no_partial_state(
    cancel_after_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "_RESTORE_ROWS", 5)
    disk = SimDisk(1)
    history = make_history(disk)

    async def cancel_start(disk: SimDisk) -> None:
        with anyio.move_on_after(cancel_after_s):
            async with service(disk, 2):
                await anyio.lowlevel.checkpoint()

    async def query_outcomes(disk: SimDisk) -> object:
        async with service(disk, 3) as p:
            return await answers(p, history.frames)

    expected = run_virtual(query_outcomes, disk.kill())
    run_virtual(cancel_start, disk)
    assert run_virtual(query_outcomes, disk) == expected


def test_failed_start_releases_the_directory() -> None:
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


def test_close_that_cannot_write_cursors_releases_the_directory() -> None:
    disk = SimDisk(1)

    async def fail_at_close() -> None:
        async with service(disk, 1) as p:
            await p.attach(CallbackSink(lambda offset, delta: None))
            await p.publish(Delta("a", create([1.0])))
            disk.fail(lambda call: call.path.startswith("cursors"), errno.EIO)

    async def main() -> None:
        with pytest.raises(OSError, match="Input/output"):
            await fail_at_close()
        disk.heal()
        try:
            async with service(disk, 2) as p:
                assert p.statistics().log.next_offset == 1
        except LogBusy:
            pytest.fail("the closed service must have released the directory")

    run_virtual(main)


def test_cancelled_service_ends_at_once_and_keeps_appended_rows() -> None:
    disk = SimDisk(1)

    async def main() -> None:
        with anyio.CancelScope() as scope:
            async with service(disk, 1) as p:
                start_s = anyio.current_time()
                await p.publish(Delta("a", create([1.0])))
                scope.cancel()
                p.offer(Delta("b", create([1.0])))
                await anyio.sleep(1)
        assert anyio.current_time() - start_s < 1
        async with service(disk, 2) as p:
            assert p.statistics().log.next_offset == 2

    run_virtual(main)


def test_publish_during_cancellation_returns_the_logs_offset() -> None:
    disk, offsets = SimDisk(1), []

    async def main() -> None:
        async def publish(p: Propagator) -> None:
            offsets.append((await p.publish(Delta("a", create([1.0])))).offset)

        async with anyio.create_task_group() as tasks:
            with anyio.CancelScope() as scope:
                async with service(disk, 1) as p:
                    scope.cancel()
                    with anyio.CancelScope(shield=True):
                        await anyio.sleep(0.1)  # the committer has ended
                        tasks.start_soon(publish, p)
                        await anyio.sleep(0.1)
        async with service(disk, 2) as p:
            assert p.statistics().log.next_offset == 1
        assert offsets == [0]

    run_virtual(main)
