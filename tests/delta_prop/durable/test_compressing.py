"""A service that compresses sealed segments: readers get the same rows, and the log takes less space."""

from __future__ import annotations

import logging
from dataclasses import replace

import anyio
import pytest

from delta_prop import LogSettings, Propagator
from delta_prop.testing import run_virtual, virtual_world
from delta_prop_simulations.disk import SimDisk
from delta_prop_sinks import CallbackSink
from delta_prop_wire.delta import Delta, create

SETTINGS = LogSettings(segment_bytes_max=16_384, bytes_max=1 << 20, retention_bytes=1 << 19, compress="lz4")


def service(disk: SimDisk, settings: LogSettings = SETTINGS) -> Propagator:
    return Propagator(data="x", log=settings, world=virtual_world(1, disk=disk))


async def publish(propagator: Propagator, first: int, count: int) -> None:
    for number in range(first, first + count):
        await propagator.publish(Delta(f"v{number % 7}", create([float(number % 3)] * 300)))


def test_sealed_segments_are_compressed_in_the_background() -> None:
    async def main() -> None:
        disk, early, late = SimDisk(1), list[int](), list[int]()
        async with service(disk) as p:
            await p.attach(CallbackSink(lambda offset, _: early.append(offset), name="early"))
            await publish(p, 0, 60)
            await anyio.sleep(5)
            await publish(p, 60, 60)
            await anyio.sleep(5)
            statistics = p.statistics().log
            assert statistics.compressed_segments == statistics.segments - 1 >= 8
            assert statistics.bytes < 60_000
            await p.attach(CallbackSink(lambda offset, _: late.append(offset), name="late"))
            await p.wait_visible(120)
        assert early == late == list(range(120))
        async with service(disk, replace(SETTINGS, compress="none")) as p:
            assert p.recovery is not None
            assert (p.recovery.clean, p.recovery.indexes_rebuilt) == (True, 0)
            await publish(p, 120, 30)
            await p.wait_visible(150)
            assert p.statistics().log.compressed_segments == statistics.compressed_segments

    run_virtual(main)


def test_close_stops_compression_and_leaves_no_partial_file() -> None:
    async def main() -> None:
        disk = SimDisk(1)
        settings = replace(SETTINGS, segment_bytes_max=1 << 20, bytes_max=1 << 24, retention_bytes=1 << 23)
        async with service(disk, settings) as p:
            await publish(p, 0, 1_000)
            for _ in range(10_000):
                if any(path.endswith(".log.new") for path in disk.paths()):
                    break
                await anyio.sleep(0.001)
            else:
                pytest.fail("no segment was ever being compressed")
        assert not [path for path in disk.paths() if path.endswith(".new")]
        assert len([path for path in disk.paths() if path.endswith(".log")]) == 2
        async with service(disk, settings) as p:
            await anyio.sleep(5)
            assert p.statistics().log.compressed_segments == 1

    run_virtual(main)


def test_full_disk_is_logged_and_compression_resumes_with_space(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        disk = SimDisk(1)
        async with service(disk) as p:
            await publish(p, 0, 60)
            disk.capacity_bytes = disk.used_bytes + SETTINGS.free_bytes_min + 8_000
            await anyio.sleep(30)
            assert p.statistics().log.compressed_segments == 0
            disk.capacity_bytes = None
            await anyio.sleep(60)
            assert p.statistics().log.compressed_segments >= 4

    with caplog.at_level(logging.WARNING, "delta_prop"):
        run_virtual(main)
    warnings = [record.message for record in caplog.records if "could not be compressed" in record.message]
    assert len(warnings) == 1
    assert "too few to write a segment" in warnings[0]
