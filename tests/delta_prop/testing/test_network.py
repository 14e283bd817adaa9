"""`VirtualNetwork` delays, limits and breaks connections by its conditions; a seed determines the run."""

from __future__ import annotations

from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import anyio
import pytest

from delta_prop.platform.connection_faults import Misconfigured
from delta_prop.platform.ports import Tls
from delta_prop.testing import NetworkConditions, VirtualNetwork, run_virtual, virtual_world
from delta_prop_wire.errors import UsageError
from tests.delta_prop.platform.networks import receive, receive_all

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from delta_prop.platform.ports import Stream

A, B = "10.0.0.1", "10.0.0.2"
ONE_SECOND_LATENCY = NetworkConditions(latency_s=1.0)


def in_virtual_time(main: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    """Return a test that runs `main` in virtual time."""

    def test() -> None:
        run_virtual(main, horizon_s=10_000)

    test.__name__ = main.__name__
    return test


@asynccontextmanager
async def connect_pair(network: VirtualNetwork) -> AsyncIterator[tuple[Stream, Stream]]:
    """Connect A to B; yield the stream at A and the stream at B."""
    listener = await network.at(B).listen("", 700)
    client = await network.at(A).connect(B, 700)
    yield client, await listener.accept()


@in_virtual_time
async def test_bytes_arrive_after_the_latency() -> None:
    network = VirtualNetwork(conditions=ONE_SECOND_LATENCY)
    started = anyio.current_time()
    async with connect_pair(network) as (client, server):
        assert anyio.current_time() - started == 2
        assert (client.peer, server.peer_host) == (f"{B}:700", A)
        await client.send([b"x"])
        assert anyio.current_time() - started == 2
        await receive(server, 1)
        assert anyio.current_time() - started == 3


@in_virtual_time
async def test_low_bandwidth_delays_large_sends() -> None:
    network = VirtualNetwork()
    network.set_path(A, B, NetworkConditions(latency_s=1.0, bytes_per_s=1000, buffer_bytes=500))
    async with connect_pair(network) as (client, server), anyio.create_task_group() as tasks:
        started = anyio.current_time()
        assert client.send_now([bytes(2000)]) == 500
        assert client.send_now([b"x"]) == 0
        tasks.start_soon(client.send, [bytes(1500)])
        await receive(server, 2000)
        assert anyio.current_time() - started == pytest.approx(4 * 1.5)  # one buffer per round trip
        await server.send([bytes(60_000)])  # the other direction is unlimited
        started = anyio.current_time()
        await receive(client, 60_000)
        assert anyio.current_time() - started < 0.001


def test_jitter_keeps_the_order_and_depends_on_the_seed() -> None:
    async def main(seed: int) -> list[float]:
        conditions = NetworkConditions(jitter_s_max=1.0, chunk_bytes_max=5)
        network = VirtualNetwork(seed, conditions)
        async with connect_pair(network) as (client, server):
            body, received, times = bytes(range(200)), b"", []
            await client.send([body[:150]])
            await anyio.sleep(0.7)
            network.cut(A, B)  # part of the body has arrived
            await client.send([body[150:]])
            network.heal(A, B)
            while len(received) < len(body):
                received += await receive(server, 1)
                times.append(anyio.current_time())
            assert received == body
            return times

    assert run_virtual(main, 1) == run_virtual(main, 1) != run_virtual(main, 2)


@in_virtual_time
async def test_chunk_sizes_are_drawn() -> None:
    async with connect_pair(VirtualNetwork(conditions=NetworkConditions(chunk_bytes_max=4))) as (
        client,
        server,
    ):
        assert {client.send_now([bytes(100)]) for _ in range(50)} == {1, 2, 3, 4}
        await anyio.sleep(1)
        buffer = memoryview(bytearray(100))
        assert {await server.receive_into(buffer) for _ in range(30)} == {1, 2, 3, 4}


@in_virtual_time
async def test_cut_stops_one_direction_until_healed() -> None:
    network = VirtualNetwork(conditions=ONE_SECOND_LATENCY)
    async with connect_pair(network) as (client, server):
        await client.send([b"under way "])
        network.cut(A, B)
        await client.send([b"behind"])
        await server.send([b"other way"])
        assert await receive(client, 9) == b"other way"
        with anyio.move_on_after(100):
            await receive(server, 1)
            raise AssertionError("a byte passed the cut")
        with pytest.raises(TimeoutError, match="did not answer within 5 s"):
            await network.at(A).connect(B, 700, timeout_s=5)
        network.heal(A, B)
        started = anyio.current_time()
        assert await receive(server, 16) == b"under way behind"
        assert anyio.current_time() - started == 1
        assert (network.fault_counts["cut"], network.fault_counts["held up"]) == (1, 2)


@in_virtual_time
async def test_connecting_waits_for_a_cut_to_heal() -> None:
    network = VirtualNetwork(conditions=ONE_SECOND_LATENCY)
    await network.at(B).listen(B, 700)
    network.cut(B, A)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(network.at(A).connect, B, 700)
        await anyio.sleep(5)
        network.heal(B, A)
    assert anyio.current_time() == 5


@in_virtual_time
async def test_reset_fails_both_ends_and_loses_bytes_in_flight() -> None:
    network = VirtualNetwork(conditions=ONE_SECOND_LATENCY)
    async with connect_pair(network) as (client, server):
        await client.send([b"lost"])
        network.reset(B)
        assert client.send_now([b"nobody knows yet"]) == 16
        with pytest.raises(ConnectionError, match=f"{A}:[0-9]+ broke: it was reset"):
            await server.receive_into(memoryview(bytearray(9)))
        with pytest.raises(ConnectionError, match="reset"):
            client.send_now([b"x"])
        assert network.connections == []
        assert network.fault_counts["bytes lost by a reset"] == 4


@in_virtual_time
async def test_killed_process_resets_its_peers() -> None:
    network = VirtualNetwork()
    async with connect_pair(network) as (client, server):
        network.kill(B)
        with pytest.raises(ConnectionError, match="ended with its process"):
            await server.send([b"x"])
        with pytest.raises(ConnectionError, match="reset"):
            await client.receive_into(memoryview(bytearray(9)))
        with pytest.raises(ConnectionRefusedError):
            await network.at(A).connect(B, 700)
        listener = await network.at(B).listen(B, 700)  # the listener of a restarted process
        await network.at(A).connect(B, 700)
        await listener.accept()


@in_virtual_time
async def test_crashed_host_leaves_peers_half_open_until_restored() -> None:
    network = VirtualNetwork(conditions=NetworkConditions(latency_s=1.0, buffer_bytes=100))
    async with connect_pair(network) as (client, _):
        network.crash(B)
        with anyio.move_on_after(1000):
            await client.receive_into(memoryview(bytearray(9)))
            raise AssertionError("a crashed host answered")
        with anyio.move_on_after(1000):
            await client.send([bytes(101)])
            raise AssertionError("more was sent to a crashed host than the buffer holds")
        with pytest.raises(TimeoutError):
            await network.at(A).connect(B, 700)
        network.restore(B)
        started = anyio.current_time()
        with pytest.raises(ConnectionError, match="reset"):
            await client.receive_into(memoryview(bytearray(9)))
        assert anyio.current_time() - started == 2


@in_virtual_time
async def test_connections_reset_after_a_drawn_byte_count() -> None:
    network = VirtualNetwork(3, NetworkConditions(reset_bytes_mean=5000))
    sent_bytes: list[int] = []

    async def use(client: Stream, server: Stream) -> None:
        while True:
            sent_bytes[-1] += client.send_now([bytes(250)])
            await receive(server, 250)

    for _ in range(60):
        sent_bytes.append(0)
        async with connect_pair(network) as (client, server):
            with pytest.raises(ConnectionError):
                await use(client, server)
        network.kill(B)
    assert 4000 < sum(sent_bytes) / 60 < 6000
    assert min(sent_bytes) < 1000
    assert max(sent_bytes) > 10_000
    assert network.fault_counts["reset"] == 60


@in_virtual_time
async def test_close_waits_up_to_a_second_for_the_peer() -> None:
    network = VirtualNetwork()
    async with connect_pair(network) as (client, server):
        started = anyio.current_time()
        await client.aclose()
        assert anyio.current_time() - started == pytest.approx(1)
        assert len(network.connections) == 1
        assert await receive_all(server) == b""
        await server.aclose()
        assert anyio.current_time() - started == pytest.approx(1)
        assert network.connections == []


@in_virtual_time
async def test_closing_stream_accepts_a_bounded_number_of_bytes() -> None:
    async with connect_pair(VirtualNetwork()) as (client, server), anyio.create_task_group() as tasks:
        tasks.start_soon(server.aclose)
        started = anyio.current_time()
        await client.send([bytes(1_000_000)])
        assert anyio.current_time() - started < 0.1
        with pytest.raises(ConnectionError):
            await client.send([bytes(10_000_000)])
        assert anyio.current_time() - started < 0.1


@in_virtual_time
async def test_cut_during_connect_stops_the_data() -> None:
    network = VirtualNetwork(conditions=ONE_SECOND_LATENCY)
    async with anyio.create_task_group() as tasks:

        async def cut() -> None:
            await anyio.sleep(1.5)  # the request has arrived, the answer is in flight
            network.cut(A, B)

        tasks.start_soon(cut)
        async with connect_pair(network) as (client, server):
            await client.send([b"x"])
            with anyio.move_on_after(100):
                await receive(server, 1)
                raise AssertionError("a byte passed the cut")


@in_virtual_time
async def test_closed_listener_resets_unaccepted_connections() -> None:
    network = VirtualNetwork()
    listener = await network.listen("", 0)
    client = await network.connect(*listener.address)
    await listener.aclose()
    with pytest.raises(ConnectionError):
        await client.receive_into(memoryview(bytearray(9)))


@in_virtual_time
async def test_tls_is_required_on_both_sides() -> None:
    network = virtual_world(network=VirtualNetwork()).network
    assert network is not None
    with pytest.raises(UsageError, match="certificate"):
        await network.listen("", 0, tls=Tls())
    listener = await network.listen("", 0, tls=Tls("server.pem", "key.pem"))
    with pytest.raises(Misconfigured, match="speaks TLS"):
        await network.connect(*listener.address)
    await network.connect(*listener.address, tls=Tls())
    for call in (network.listen, network.connect):
        with pytest.raises(UsageError, match="port 70000"):
            await call("", 70_000)


@pytest.mark.parametrize(
    "invalid",
    [
        {"latency_s": 0.0},
        {"jitter_s_max": -1.0},
        {"bytes_per_s": 0.0},
        {"buffer_bytes": 0},
        {"chunk_bytes_max": 0},
        {"reset_bytes_mean": 0.0},
    ],
)
def test_invalid_conditions_are_refused(invalid: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=next(iter(invalid))):
        partial(NetworkConditions, **invalid)()
