"""Timeouts of a connection, in virtual time: heartbeats, silent clients, a missing hello, slow bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio
import pytest

from delta_prop import Delta, opaque
from delta_prop.api.propagator import Propagator
from delta_prop.server.settings import ServerSettings
from delta_prop.testing import VirtualNetwork, run_virtual, virtual_world
from delta_prop_wire.codec import encode
from delta_prop_wire.delta import AckLevel
from delta_prop_wire.encode import encode_batch
from delta_prop_wire.frames import (
    Ack,
    Backpressure,
    BatchFrame,
    Heartbeat,
    Hello,
    Nack,
    PressureLevel,
    Subscribe,
)
from delta_prop_wire.spec import ErrorCode
from tests.delta_prop.server.raw import ORIGIN, connected, opaque_batch, serving

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from delta_prop.server.service import Address, Service


def run_in_virtual_time(
    scenario: Callable[[Propagator, Service, Address, VirtualNetwork], Awaitable[None]], **settings: Any
) -> None:
    async def run() -> None:
        network = VirtualNetwork(1)
        async with (
            Propagator(world=virtual_world(1, network=network)) as p,
            serving(p, ServerSettings(port=0, **settings)) as (service, address),
        ):
            await scenario(p, service, address, network)

    run_virtual(run)


def test_heartbeats_keep_a_client_and_silence_ends_it() -> None:
    async def scenario(p: Propagator, service: Service, address: Address, network: VirtualNetwork) -> None:
        async with connected(address, network) as alive, connected(address, network) as silent:
            await alive.hello()
            await silent.hello()
            for number in range(12):
                await alive.send(Heartbeat(number, sent_us=number))
                await anyio.sleep(5)
                heartbeat = await alive.until(Heartbeat)
                assert heartbeat.echo_us is not None
            assert len(service.connections()) == 1
            while (frame := await silent.next()) is not None:
                assert isinstance(frame, Heartbeat)
            assert silent.ended

    run_in_virtual_time(scenario)


def test_connection_without_hello_is_ended() -> None:
    async def scenario(p: Propagator, service: Service, address: Address, network: VirtualNetwork) -> None:
        began = anyio.current_time()
        async with connected(address, network) as client:
            with anyio.fail_after(60):
                buffer = memoryview(bytearray(100))
                try:
                    count = await client.stream.receive_into(buffer)
                except ConnectionError:
                    count = 0
                assert count == 0
            assert 9 < anyio.current_time() - began < 12
        await anyio.sleep(1)
        assert service.connections() == []

    run_in_virtual_time(scenario)


@pytest.mark.parametrize("after_hello", [False, True])
def test_slow_partial_frame_ends_the_connection(after_hello: bool) -> None:
    async def scenario(p: Propagator, service: Service, address: Address, network: VirtualNetwork) -> None:
        async with connected(address, network) as client:
            raw = (
                encode(opaque_batch(1, 50)) if after_hello else encode(Subscribe(1, Hello(client="x" * 200)))
            )
            if after_hello:
                await client.hello(ORIGIN)
            began = anyio.current_time()
            try:
                for byte in raw:
                    await client.stream.send([bytes([byte])])
                    await anyio.sleep(1)
            except ConnectionError:
                pass
            assert anyio.current_time() - began < 20
        assert p.statistics().accepted == 0

    run_in_virtual_time(scenario)


def test_large_frame_over_a_slow_link_is_accepted() -> None:
    async def scenario(p: Propagator, service: Service, address: Address, network: VirtualNetwork) -> None:
        async with connected(address, network) as client:
            await client.hello(ORIGIN)
            raw = encode(opaque_batch(1, 20_000))
            for start in range(0, len(raw), 20_000):
                await client.stream.send([raw[start : start + 20_000]])
                await anyio.sleep(1)
            assert (await client.until_acked(20_000)).sequence == 20_000

    run_in_virtual_time(scenario)


def test_large_frames_share_the_receive_budget() -> None:
    async def scenario(p: Propagator, service: Service, address: Address, network: VirtualNetwork) -> None:
        async def publish(number: int) -> None:
            origin = ORIGIN + (number << 20)
            row = Delta("large", opaque(bytes(700_000)), "rows")
            batch = encode_batch([row], origin=origin, base=1, epoch=1, ack_level=AckLevel.MEMORY)
            raw = encode(BatchFrame(1, batch, ack_wanted=True))
            async with connected(address, network) as client:
                await client.hello(origin)
                for start in range(0, len(raw), 100_000):
                    await client.stream.send([raw[start : start + 100_000]])
                    await anyio.sleep(2)
                assert (await client.until_acked(1)).sequence == 1

        async with anyio.create_task_group() as tasks:
            for number in range(6):
                tasks.start_soon(publish, number)
        assert p.statistics().accepted == 6

    run_in_virtual_time(scenario, receiving_bytes_max=2_100_000, frame_bytes_max=2_000_000)


def test_frames_sent_at_once_are_all_acked() -> None:
    async def scenario(p: Propagator, service: Service, address: Address, network: VirtualNetwork) -> None:
        async with connected(address, network) as client:
            await client.hello(ORIGIN)
            await client.send(*(opaque_batch(1 + n, 1) for n in range(100)))
            assert (await client.until_acked(100)).sequence == 100

    run_in_virtual_time(scenario)


def test_stop_from_a_subscriber_pauses_delivery() -> None:
    async def scenario(p: Propagator, service: Service, address: Address, network: VirtualNetwork) -> None:
        async with connected(address, network) as client:
            await client.hello()
            await client.subscribe()
            await client.send(Backpressure(1, PressureLevel.STOP, retry_after_ms=3_000))
            await anyio.sleep(0.1)
            began = anyio.current_time()
            await p.publish(Delta("a", opaque(b"1")))
            await client.until(BatchFrame)
            assert 2.5 < anyio.current_time() - began < 3.5

    run_in_virtual_time(scenario)


def test_progress_is_reported_when_nothing_matches() -> None:
    async def scenario(p: Propagator, service: Service, address: Address, network: VirtualNetwork) -> None:
        async with connected(address, network) as client:
            await client.hello()
            await client.subscribe("ns:nobody")
            await p.publish(Delta("a", opaque(b"1")), Delta("b", opaque(b"1")))
            assert (await client.until(Ack)).processed == 2

    run_in_virtual_time(scenario)


def test_connection_above_the_maximum_is_refused() -> None:
    async def scenario(p: Propagator, service: Service, address: Address, network: VirtualNetwork) -> None:
        async with connected(address, network) as first:
            await first.hello()
            async with connected(address, network) as second:
                nack = await second.next()
                assert isinstance(nack, Nack)
                assert nack.code is ErrorCode.RATE_LIMITED
                assert await second.next() is None

    run_in_virtual_time(scenario, connections_max=1, connections_per_host_max=1)
