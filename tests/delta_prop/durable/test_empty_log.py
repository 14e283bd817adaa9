"""A service whose log has become empty through retention still knows ids and watermarks."""

from __future__ import annotations

import anyio
import pytest

from delta_prop import LogSettings, Propagator, Settings
from delta_prop.testing import run_virtual, virtual_world
from delta_prop_simulations.disk import SimDisk
from delta_prop_wire.delta import Delta, create
from delta_prop_wire.errors import Refused
from delta_prop_wire.spec import ErrorCode


def service(disk: SimDisk, seed: int, *, compact: bool) -> Propagator:
    log = LogSettings(
        segment_bytes_max=4096, bytes_max=1 << 20, retention_bytes=1 << 20, retention_s=5.0,
        segment_s_max=5.0,
        free_bytes_min=0, reserve_bytes=0, compact=compact,
    )  # fmt: skip
    return Propagator(Settings(close_timeout_s=5), data="x", log=log, world=virtual_world(seed, disk=disk))


def make_delta(number: int) -> Delta:
    return Delta(f"v{number}", create([float(number)]), id=number.to_bytes(16, "big"))


@pytest.mark.parametrize("compact", [True, False])
@pytest.mark.parametrize("ending", ["closed", "killed", "crashed"])
def test_ids_and_watermarks_survive_an_empty_log(ending: str, compact: bool) -> None:
    async def main() -> None:
        disk = SimDisk(1)
        for run in range(4):
            async with service(disk, run, compact=compact) as p:
                for number in range(run * 10):  # the log no longer has the first copy to compare with
                    with pytest.raises(Refused, match="no longer holds") as caught:
                        await p.publish(make_delta(number))
                    assert caught.value.code is ErrorCode.OUTCOME_UNKNOWN
                producer = p.producer("me")
                assert producer.watermark() == run
                for number in range(run * 10, run * 10 + 10):
                    assert not (await p.publish(make_delta(number))).duplicates
                await producer.publish(Delta("mine", create([1.0])))
                await anyio.sleep(100)
                log = p.statistics().log
                assert log.start_offset == log.next_offset == (run + 1) * 11
                if compact:
                    assert (log.snapshot_offset, log.snapshot_rows) == (log.next_offset, (run + 1) * 10 + 1)
                image = disk.kill() if ending == "killed" else disk.crash(run)
            disk = disk if ending == "closed" else image

    run_virtual(main)
