"""A service with a data directory: after a restart it and its sinks continue where they stopped."""

from __future__ import annotations

import errno
from dataclasses import replace
from typing import TYPE_CHECKING

import anyio
import pytest

from delta_prop import LogSettings, Propagator, Settings
from delta_prop.testing import run_virtual, virtual_world
from delta_prop_broker.corruption import LogBusy
from delta_prop_simulations.disk import SimDisk
from delta_prop_sinks import CallbackSink, StorageSink
from delta_prop_wire.delta import AckLevel, Delta, create, sparse_add
from delta_prop_wire.errors import Refused, UsageError
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from pathlib import Path

SMALL = LogSettings(segment_bytes_max=4096, bytes_max=1 << 20, retention_bytes=16_384, retention_s=3600.0)


def service(disk: SimDisk, seed: int = 0, log: LogSettings | None = None) -> Propagator:
    return Propagator(Settings(close_timeout_s=5), data="x", log=log, world=virtual_world(seed, disk=disk))


def make_delta(key: str) -> Delta:
    return Delta(key, create([1.0, 2.0]))


def test_absent_sink_resumes_at_its_cursor_and_holds_the_log() -> None:
    async def main() -> None:
        disk, seen = SimDisk(1), []
        async with service(disk, 1, SMALL) as p:
            await p.attach(CallbackSink(lambda offset, _: seen.append(offset), name="away"))
            await p.publish(make_delta("a"), make_delta("b"))
            await p.wait_visible(2)
        async with service(disk, 2, SMALL) as p:  # the sink stays absent
            for number in range(400):
                await p.publish(make_delta(f"v{number}"))
            await anyio.sleep(10)
            log = p.statistics().log
            assert log.start_offset == 0
            assert log.held_by == "away"
        async with service(disk, 3, SMALL) as p:
            assert p.statistics().log.held_by == "away"
            await p.attach(CallbackSink(lambda offset, _: seen.append(offset), name="away"))
            await p.wait_visible(402)
            assert seen == list(range(402))
            with pytest.raises(UsageError, match="detach it first"):
                p.forget("away")
            await p.detach("away")
            p.forget("away")
            await p.publish(make_delta("more"))
            await anyio.sleep(10)
            assert p.statistics().log.start_offset > 0  # no sink needs the oldest rows any more
            with pytest.raises(UsageError, match="no sink named 'away' is stored"):
                p.forget("away")

    run_virtual(main)


@pytest.mark.parametrize("pause_s", [0.0, 1.0])
def test_duplicate_at_a_higher_ack_level_is_acknowledged(pause_s: float) -> None:
    async def main() -> None:
        async with service(SimDisk(1), 1, replace(SMALL, read_level=AckLevel.LOGGED)) as p:
            delta = replace(make_delta("a"), id=b"i" * 16)
            receipt = p.offer(delta, ack_level=AckLevel.LOGGED)
            await anyio.sleep(pause_s)  # then the first copy is written, or not yet
            with anyio.fail_after(10):
                duplicate = await p.publish(delta, ack_level=AckLevel.DURABLE)
            assert (duplicate.duplicate, duplicate.duplicates) == (True, {0: 0})
            assert p.statistics().log.synced == 1  # type: ignore[union-attr]
            assert (await receipt).offset == 0

    run_virtual(main)


def test_additive_deltas_are_applied_once_over_many_starts(tmp_path: Path) -> None:
    async def run_service(number: int) -> float:
        async with Propagator(data=tmp_path / "log") as p:
            storage = await p.attach(StorageSink(tmp_path / "facts.db"))
            producer = p.producer("me")
            if number == 0:
                await producer.publish(make_delta("v"))
            await producer.publish(Delta("v", sparse_add([0], [1.0])))
            published = await p.publish(Delta("v", sparse_add([1], [1.0])))
            assert published.level is AckLevel.DURABLE
            await p.wait_visible(published)
            assert producer.watermark() == number + 2
            state = await storage.get("default", "v")
            assert state is not None
            assert state.vector is not None
            return float(state.vector[0] + state.vector[1])

    assert [anyio.run(run_service, number) for number in range(3)] == [5.0, 7.0, 9.0]


def test_acknowledgement_names_the_requested_level() -> None:
    async def main() -> None:
        async with service(SimDisk(1)) as p:
            for level in (AckLevel.MEMORY, AckLevel.LOGGED, AckLevel.DURABLE):
                published = await p.publish(make_delta(level.name), ack_level=level)
                assert published.level is level
            await p.wait_visible(3)

    run_virtual(main)


def test_directory_has_one_writer() -> None:
    async def main() -> None:
        disk = SimDisk(1)
        async with service(disk):
            with pytest.raises(LogBusy):
                async with service(disk):
                    pass

    run_virtual(main)


def test_producer_learns_the_outcome_of_an_earlier_run() -> None:
    async def main() -> None:
        disk = SimDisk(1)
        async with service(disk) as p:
            published = await p.producer("me").publish(make_delta("a"))
            frame = p.internals().partition.log.read(0, rows_max=1, bytes_max=1 << 20)[0].batch
        async with service(disk) as p:
            producer_after_restart = p.producer("me")
            assert producer_after_restart.watermark() == 1
            assert await producer_after_restart.outcome(1) == published.offset
            ack = await producer_after_restart.send_frame(
                frame
            ).wait()  # the same frame, under the previous epoch
            assert ack.duplicates == {0: published.offset}

    run_virtual(main)


def test_failed_log_refuses_appends_but_can_be_read() -> None:
    async def main() -> None:
        disk, seen = SimDisk(1), []
        async with service(disk) as p:
            await p.attach(CallbackSink(lambda offset, _: seen.append(offset)))
            await p.publish(make_delta("a"))
            disk.fail(lambda call: call.name == "sync", errno.EIO, times=None)
            for code in (ErrorCode.OUTCOME_UNKNOWN, ErrorCode.LOG_FAILED):
                with pytest.raises(Refused) as caught:
                    await p.publish(make_delta("b"), timeout_s=2)
                assert caught.value.code is code
            await p.wait_visible(1)
            assert seen == [0]
            disk.heal()
        async with service(disk.crash(3)) as p:
            assert p.recovery is not None
            assert (await p.publish(make_delta("b"))).offset is not None

    run_virtual(main)


def test_log_retains_rows_until_cursors_are_written() -> None:
    async def main() -> None:
        disk, seen = SimDisk(1), []
        sink = CallbackSink(lambda offset, _: seen.append(offset), name="kept here")
        async with service(disk, 1, replace(SMALL, compact=False)) as p:
            await p.attach(sink)
            await p.publish(make_delta("first"))
            await anyio.sleep(2)
            disk.fail(lambda call: call.path.startswith("cursors"), times=None)
            for number in range(400):
                await p.publish(make_delta(f"v{number}"))
            await p.wait_visible(401)
            await anyio.sleep(10)
            image = disk.crash(1)
            disk.heal()
            await anyio.sleep(3)
            assert p.statistics().log.start_offset > 0
        seen.clear()
        async with service(image, 2, replace(SMALL, compact=False)) as p:
            sink_after_restart = CallbackSink(lambda offset, _: seen.append(offset), name="kept here")
            await p.attach(sink_after_restart)
            await p.wait_visible(401)
            assert seen == list(range(1, 401))

    run_virtual(main)


def test_log_keeps_rows_of_other_sinks_while_one_closes() -> None:
    async def main() -> None:
        disk, seen = SimDisk(1), []

        class Slow(CallbackSink):
            async def aclose(self) -> None:
                await anyio.sleep(4)

        async with service(disk, 1, replace(SMALL, compact=False)) as p:
            await p.attach(CallbackSink(lambda offset, _: seen.append(offset), name="paused"))
            p.pause("paused")
            await p.attach(Slow(lambda *_: None, name="slow"))
            for number in range(400):
                await p.publish(make_delta(f"v{number}"))
        async with service(disk, 2, replace(SMALL, compact=False)) as p:
            await p.attach(CallbackSink(lambda offset, _: seen.append(offset), name="paused"))
            p.resume("paused")
            await p.wait_visible(400)
            assert seen == list(range(400))

    run_virtual(main)


def test_failed_close_raises_and_releases_the_directory() -> None:
    async def run_service(disk: SimDisk, error: Exception | None) -> None:
        async with service(disk) as p:
            await p.attach(CallbackSink(lambda *_: None))
            await p.publish(make_delta("a"))
            disk.fail(lambda call: call.path == "cursors.new", times=None)
            if error is not None:
                raise error

    async def main() -> None:
        disk = SimDisk(1)
        with pytest.raises(OSError, match=r"cursors\.new"):
            await run_service(disk, None)
        with pytest.raises(ValueError, match="the program's own"):
            await run_service(disk, ValueError("the program's own"))
        disk.heal()
        async with service(disk) as p:  # the directory was released
            assert p.statistics().log.next_offset == 2

    run_virtual(main)
