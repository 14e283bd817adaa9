"""A start without a usable checkpoint and without the log's oldest rows restores from the snapshot."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import anyio
import pytest

from delta_prop import (
    ABSENT,
    Delta,
    Dot,
    InvalidDelta,
    LogSettings,
    Propagator,
    Refused,
    create,
    delete,
    sparse_add,
)
from delta_prop.testing import run_virtual, virtual_world
from delta_prop_simulations.disk import SimDisk

if TYPE_CHECKING:
    from collections.abc import Callable

SETTINGS = LogSettings(
    segment_bytes_max=2_048, bytes_max=1 << 20, retention_bytes=1 << 19, min_compaction_lag_s=50.0
)


def service(disk: SimDisk, settings: LogSettings = SETTINGS) -> Propagator:
    return Propagator(data="x", log=settings, world=virtual_world(1, disk=disk))


async def publish_early(disk: SimDisk) -> Dot:
    """Publish vectors that finally only the snapshot holds; return the last dot of `kept`."""
    async with service(disk) as p:
        importer = p.producer("importer")
        await importer.publish(Delta("kept", create([1.0, 2.0, 3.0])))
        ack = await importer.publish(Delta("kept", sparse_add([0], [1.0])))
        await importer.publish(Delta("gone", create([1.0, 2.0, 3.0])))
        await importer.publish(Delta("gone", delete()))
        for number in range(30):
            await p.publish(Delta(f"v{number}", create([float(number)] * 3)))
        await anyio.sleep(100)
        await p.publish(Delta("late", create([1.0] * 3)))
        await anyio.sleep(10)
        assert p.statistics().log.start_offset > 4
        assert ack.dot is not None
        return ack.dot


def remove_checkpoints(disk: SimDisk) -> None:
    for path in disk.paths():
        if path.endswith((".checkpoint", ".part")):
            disk.remove(path)


def corrupt_checkpoints(disk: SimDisk) -> None:
    for path in disk.paths():
        if path.endswith(".checkpoint"):
            disk.flip(path, 3)


@pytest.mark.parametrize("spoil_checkpoints", [remove_checkpoints, corrupt_checkpoints])
def test_start_without_a_checkpoint_restores_from_the_snapshot(
    spoil_checkpoints: Callable[[SimDisk], None], caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        disk = SimDisk(1)
        last = await publish_early(disk)
        spoil_checkpoints(disk)
        async with service(disk, replace(SETTINGS, compact=False)) as p:
            importer = p.producer("importer")
            assert importer.watermark() == 4
            assert p.head("kept") == last
            ack = await importer.publish(Delta("kept", sparse_add([2], [1.0]), expect=last))
            assert ack.dot is not None
            assert ack.dot.counter == 5
            for wrong in (
                Delta("gone", sparse_add([0], [1.0])),
                Delta("nobody", sparse_add([0], [1.0])),
                Delta("other", create([1.0])),
            ):
                with pytest.raises(InvalidDelta):
                    await p.publish(wrong)
            with pytest.raises(Refused, match="read the vector again"):
                await p.publish(Delta("kept", sparse_add([0], [1.0]), expect=last))
            with pytest.raises(Refused, match="expects no vector"):
                await p.publish(Delta("kept", create([1.0] * 3), expect=ABSENT))
            for absent in ("gone", "nobody"):
                await p.publish(Delta(absent, create([1.0] * 3), expect=ABSENT))

    with caplog.at_level(logging.WARNING, "delta_prop"):
        run_virtual(main)
    assert any("starts from the snapshot at offset" in record.message for record in caplog.records)
