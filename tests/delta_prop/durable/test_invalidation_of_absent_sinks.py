"""A full log invalidates the cursor of an absent sink only if the sink was attached with that option."""

from __future__ import annotations

import pytest

from delta_prop import LogSettings, Propagator
from delta_prop.testing import run_virtual
from delta_prop_simulations.disk import SimDisk
from delta_prop_wire.delta import Delta, create
from delta_prop_wire.errors import Refused
from tests.delta_prop.delivery.rebuilding import FakeStorage, FakeStorageSink
from tests.delta_prop.durable.quarantined import service

TIGHT = LogSettings(
    segment_bytes_max=1500,
    bytes_max=20_000,
    retention_bytes=6000,
    retention_s=3600.0,
    checkpoint_frames=10,
    free_bytes_min=0,
    reserve_bytes=0,
)


@pytest.mark.parametrize("invalidates", [True, False])
def test_absent_sink_is_invalidated_on_a_full_log_if_allowed(invalidates: bool) -> None:
    storage = FakeStorage()

    async def main() -> None:
        disk = SimDisk(1)
        async with service(disk, 1, TIGHT) as p:
            sink = FakeStorageSink(storage)
            await p.attach(sink, on_log_full="invalidate_cursor" if invalidates else "refuse")
            await p.publish(Delta("first", create([1.0])))

        async def publish(p: Propagator) -> None:
            for number in range(300):
                await p.publish(Delta(f"v{number % 7}", create([float(number)])), timeout_s=20)

        async with service(disk.kill(), 2, TIGHT) as p:
            if not invalidates:
                with pytest.raises(Refused, match="'fake' still needs the oldest"):
                    await publish(p)
                return
            await publish(p)
            await p.attach(FakeStorageSink(storage))
            await p.wait_visible(301)
            assert p.statistics().sinks["fake"].rebuilds == 1
        assert {key: state.vector[0] for (_, key), state in storage.states.items()} == {  # type: ignore[index]
            "first": 1.0,
            **{f"v{number % 7}": float(number) for number in range(293, 300)},
        }

    run_virtual(main)
