"""Delivery in virtual time: a log that is recovered in place sends its subscribers to connect again."""

from __future__ import annotations

from delta_prop import Delta, LogSettings, opaque
from delta_prop.embedded import Propagator
from delta_prop.testing import VirtualNetwork, run_virtual, virtual_world
from delta_prop_simulations.disk import SimDisk
from delta_prop_wire.frames import BatchFrame, Nack, Start, StartAt
from delta_prop_wire.spec import ErrorCode
from tests.delta_prop.server.raw import connected, serving


def test_the_cursor_goes_on_in_the_new_epoch() -> None:
    async def run() -> None:
        network, disk = VirtualNetwork(1), SimDisk(1)
        world = virtual_world(1, network=network, disk=disk)
        async with (
            Propagator(data="x", log=LogSettings(compact=False), world=world) as p,
            serving(p) as (_, address),
            connected(address, network) as client,
        ):
            await client.hello()
            granted = (await client.subscribe()).granted
            assert granted is not None
            await p.publish(Delta("a", opaque(b"1")))
            assert (await client.until(BatchFrame)).sequence == 0
            disk.fail(lambda call: call.name == "sync" and call.path.endswith(".log"))
            await p.publish(Delta("a", opaque(b"2")))  # tried again once the log is well
            nack = await client.until(Nack)
            assert (nack.code, nack.retry_after_ms) == (ErrorCode.SHUTTING_DOWN, 50)
            assert p.inside().log.epoch == granted.start.epoch + 1
            cursor = Start(StartAt.CURSOR, granted.start._replace(next_offset=1))
            again = (await client.subscribe(start=cursor)).granted
            assert again is not None
            assert again.start == (granted.start.log_id, granted.start.epoch + 1, 1)
            frame = await client.until(BatchFrame)
            assert (frame.sequence, frame.batch.blob(0)) == (1, b"2")

    run_virtual(run)
