"""When a log is recovered in place, its subscribers, producers and forwarders reconnect, in virtual time."""

from __future__ import annotations

import anyio

from delta_prop import Delta, LogSettings, opaque
from delta_prop.api.propagator import Propagator
from delta_prop.client import ForwardLink, Producer
from delta_prop.sinks import ForwardSink
from delta_prop.testing import VirtualNetwork, run_virtual, virtual_world
from delta_prop_simulations.disk import SimDisk
from delta_prop_wire.delta import AckLevel
from delta_prop_wire.frames import BatchFrame, Nack, Start, StartAt
from delta_prop_wire.spec import ErrorCode
from tests.delta_prop.server.raw import connected, serving


def test_cursor_continues_in_the_new_epoch() -> None:
    async def run() -> None:
        network, disk = VirtualNetwork(1), SimDisk(1)
        world = virtual_world(1, network=network, disk=disk)
        async with (
            Propagator(data="x", log=LogSettings(compact=False), world=world) as p,
            serving(p) as (_, address),
            connected(address, network) as client,
        ):
            await client.hello()
            granted = (await client.subscribe()).subscribed
            assert granted is not None
            await p.publish(Delta("a", opaque(b"1")))
            assert (await client.until(BatchFrame)).sequence == 0
            disk.fail(lambda call: call.name == "sync" and call.path.endswith(".log"))
            await p.publish(Delta("a", opaque(b"2")))  # the publish is retried once the log is recovered
            nack = await client.until(Nack)
            assert (nack.code, nack.retry_after_ms) == (ErrorCode.SHUTTING_DOWN, 50)
            assert p.internals().partition.log.epoch == granted.start.epoch + 1
            cursor = Start(StartAt.CURSOR, granted.start._replace(next_offset=1))
            second = (await client.subscribe(start=cursor)).subscribed
            assert second is not None
            assert second.start == (granted.start.log_id, granted.start.epoch + 1, 1)
            frame = await client.until(BatchFrame)
            assert (frame.sequence, frame.batch.blob(0)) == (1, b"2")

    run_virtual(run)


def test_producer_reconnects_once_after_a_log_recovery() -> None:
    async def run() -> None:
        network, disk = VirtualNetwork(1), SimDisk(1)
        log = LogSettings(compact=False, read_level=AckLevel.LOGGED)
        async with (
            Propagator(data="x", log=log, world=virtual_world(1, network=network, disk=disk)) as p,
            serving(p) as (service, _),
        ):
            assert service.address is not None
            host, port = service.address
            client = virtual_world(2, network=network)
            async with Producer(f"{host}:{port}", name="me", world=client) as producer:
                await producer.publish(Delta("a", opaque(b"1")))
                disk.fail(lambda call: call.name == "write" and call.path.endswith(".log"))
                await p.publish(Delta("b", opaque(b"2")))  # the publish is retried once the log is recovered
                before = producer.reconnects
                await producer.publish(Delta("a", opaque(b"3")))
                assert producer.reconnects == before + 1
                await producer.publish(Delta("a", opaque(b"4")))
                assert producer.reconnects == before + 1

    run_virtual(run)


def test_idle_forwarder_reconnects_after_a_log_recovery() -> None:
    async def run() -> None:
        network, disk = VirtualNetwork(1), SimDisk(1)
        async with (
            Propagator(data="x", world=virtual_world(1, network=network, disk=disk)) as p,
            serving(p) as (service, _),
            Propagator(world=virtual_world(2, network=network)) as other,
        ):
            assert service.address is not None
            link = ForwardLink("{}:{}".format(*service.address), world=virtual_world(3, network=network))
            await other.attach(ForwardSink(link, name="forward"))
            await other.publish(Delta("a", opaque(b"1")))
            await other.wait_visible(1)
            disk.fail(lambda call: call.name == "sync" and call.path.endswith(".log"))
            await p.publish(Delta("b", opaque(b"2")))
            await anyio.sleep(3)
            assert link.statistics().reconnects == 1

    run_virtual(run)
