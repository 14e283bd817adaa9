"""Ids after a restart: the unsealed ids of a checkpoint are sealed while they are restored."""

from __future__ import annotations

from delta_prop import Propagator, Settings
from delta_prop.testing import run_virtual, virtual_world
from delta_prop_simulations.disk import SimDisk
from delta_prop_wire.delta import Delta, opaque
from tests.delta_prop.durable.histories import NO_CHECKPOINTS


def test_ids_sealed_during_a_restore_are_counted_once_after_the_next_start() -> None:
    """When the checkpoint is written, the table of ids is full and not yet sealed."""
    disk, count = SimDisk(1), 20_000

    def open_service() -> Propagator:
        world = virtual_world(1, thread_delay_s_max=0.01, disk=disk)
        return Propagator(Settings(ids_per_generation=count), data="x", log=NO_CHECKPOINTS, world=world)

    async def run_service(ids: range) -> tuple[int, int]:
        async with open_service() as p:
            partition = p.internals().partition
            runs_at_start = partition.pipeline.appender.ids.statistics().runs
            for first in range(ids.start, ids.stop, 500):
                batch_ids = [b"%016d" % number for number in range(first, min(first + 500, ids.stop))]
                await p.publish(*[Delta("v", opaque(b""), id=id_) for id_ in batch_ids])
            known = await p.publish(Delta("v", opaque(b""), id=b"%016d" % 7))
            assert known.duplicates == {0: 7}
            checkpointer = partition.storage.checkpointer
            assert checkpointer is not None
            await checkpointer.write()
        return runs_at_start, partition.pipeline.appender.ids.statistics().ids

    assert run_virtual(run_service, range(count)) == (0, count)
    assert run_virtual(run_service, range(count, count + 500)) == (1, count + 500)
    assert run_virtual(run_service, range(count + 500, count + 1000)) == (1, count + 1000)
