"""The network contract: streams keep bytes in order, end as specified, and report lost connections."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import anyio
import pytest

from delta_prop_broker.disk import FileRange
from delta_prop_broker.local_disk import LocalDisk
from delta_prop_simulations.disk import SimDisk
from tests.delta_prop.platform.networks import HOST, NetworkSetup, net_setup, receive, receive_all

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from delta_prop.platform.ports import Network, Stream

__all__ = ["net_setup"]
BODY = random.Random(1).randbytes(700_000)


def test_bytes_arrive_in_order_in_both_directions(net_setup: NetworkSetup) -> None:
    async def main(net_setup: NetworkSetup, network: Network) -> None:
        small = [
            BODY[start : start + 7] for start in range(0, 21_000, 7)
        ]  # more buffers than one system call takes
        parts = [*small, b"", BODY[21_000:300_000], memoryview(bytearray(BODY[300_000:]))]
        async with net_setup.pair(network) as (client, server), anyio.create_task_group() as tasks:
            tasks.start_soon(client.send, parts)
            tasks.start_soon(server.send, [BODY])
            tasks.start_soon(expect_bytes, server, BODY)
            tasks.start_soon(expect_bytes, client, BODY)

    net_setup.run(main)


def test_end_of_stream_follows_last_byte_and_persists(net_setup: NetworkSetup) -> None:
    async def main(net_setup: NetworkSetup, network: Network) -> None:
        async with net_setup.pair(network) as (client, server), anyio.create_task_group() as tasks:
            await server.send([b"last words"])
            tasks.start_soon(server.aclose)
            assert await receive_all(client) == b"last words"
            assert await client.receive_into(memoryview(bytearray(1))) == 0
            await client.aclose()

    net_setup.run(main)


def test_last_bytes_arrive_despite_unread_input(net_setup: NetworkSetup) -> None:
    async def main(net_setup: NetworkSetup, network: Network) -> None:
        async with net_setup.pair(network) as (client, server):
            client.send_now([BODY])  # the client has unread input, so a bare close would reset the connection
            await server.send([b"shutting down"])

            async def read_end() -> None:
                await anyio.sleep(0.05)
                assert await receive_all(client) == b"shutting down"
                await client.aclose()

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(server.aclose)
                tasks.start_soon(read_end)

    net_setup.run(main)


def test_calls_after_aclose_raise_connection_error(net_setup: NetworkSetup) -> None:
    async def main(net_setup: NetworkSetup, network: Network) -> None:
        async with net_setup.pair(network) as (client, server):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(client.aclose)
                tasks.start_soon(server.aclose)
            await client.aclose()
            with pytest.raises(ConnectionError):
                await client.receive_into(memoryview(bytearray(1)))
            with pytest.raises(ConnectionError):
                await client.receive_each(ByteCollector().get_buffer, ByteCollector().collect)
            with pytest.raises(ConnectionError):
                client.send_now([b"x"])
            with pytest.raises(ConnectionError):
                await client.send([b"x"])
            with pytest.raises(ConnectionError):
                await client.send_file(new_file_range(BODY))

    net_setup.run(main)


@pytest.mark.parametrize("call", ["receive", "receive each", "send"])
def test_aclose_wakes_waiting_calls(net_setup: NetworkSetup, call: str) -> None:
    async def main(net_setup: NetworkSetup, network: Network) -> None:
        collector = ByteCollector()
        calls: dict[str, Callable[[Stream], Awaitable[object]]] = {
            "receive": lambda stream: stream.receive_into(memoryview(bytearray(1))),
            "receive each": lambda stream: stream.receive_each(collector.get_buffer, collector.collect),
            "send": send_forever,
        }

        async def wait(stream: Stream) -> None:
            with pytest.raises(ConnectionError):
                await calls[call](stream)

        async with net_setup.pair(network) as (client, server), anyio.create_task_group() as tasks:
            tasks.start_soon(wait, client)
            await anyio.sleep(0.02)
            tasks.start_soon(client.aclose)
            await anyio.sleep(0.02)
            await server.aclose()

    net_setup.run(main)


def test_send_to_closed_peer_raises(net_setup: NetworkSetup) -> None:
    async def main(net_setup: NetworkSetup, network: Network) -> None:
        async with net_setup.pair(network) as (client, server), anyio.create_task_group() as tasks:
            tasks.start_soon(server.aclose)
            with pytest.raises(ConnectionError):
                await send_forever(client)

    net_setup.run(main)


def test_send_now_returns_bytes_sent(net_setup: NetworkSetup) -> None:
    async def main(net_setup: NetworkSetup, network: Network) -> None:
        async with net_setup.pair(network) as (client, server), anyio.create_task_group() as tasks:
            sent = 0
            while count := client.send_now([body_slice(sent, 70_000), body_slice(sent + 70_000, 80_000)]):
                sent += count
            assert sent > 0
            tasks.start_soon(expect_bytes, server, body_slice(0, sent + 100_000))
            await client.send([body_slice(sent, 100_000)])

    net_setup.run(main)


def test_cancelled_receive_into_loses_no_bytes(net_setup: NetworkSetup) -> None:
    async def main(net_setup: NetworkSetup, network: Network) -> None:
        async with net_setup.pair(network) as (client, server), anyio.create_task_group() as tasks:

            async def trickle() -> None:
                for start in range(0, 400, 4):
                    await server.send([BODY[start : start + 4]])
                    await anyio.sleep(0.0003)

            tasks.start_soon(trickle)
            received, buffer = b"", memoryview(bytearray(3))
            while len(received) < 400:
                with anyio.move_on_after(0.0002):
                    count = await client.receive_into(buffer)
                    received += buffer[:count]
            assert received == BODY[:400]

    net_setup.run(main)


def test_receive_each_calls_back_until_the_callback_ends_it(net_setup: NetworkSetup) -> None:
    async def main(net_setup: NetworkSetup, network: Network) -> None:
        collector = ByteCollector()
        async with net_setup.pair(network) as (client, server), anyio.create_task_group() as tasks:
            tasks.start_soon(server.send, [BODY])
            collector.stop_bytes = 1000
            assert await client.receive_each(collector.get_buffer, collector.collect)
            assert 1000 <= len(collector.bytes) < 1000 + len(collector.get_buffer())
            collector.stop_bytes = len(BODY)
            assert await client.receive_each(collector.get_buffer, collector.collect)
            assert collector.bytes == BODY
            tasks.start_soon(server.aclose)
            assert not await client.receive_each(collector.get_buffer, collector.collect)
            assert not await client.receive_each(collector.get_buffer, collector.collect)

    net_setup.run(main)


def test_receive_each_raises_callback_error_and_can_continue(net_setup: NetworkSetup) -> None:
    async def main(net_setup: NetworkSetup, network: Network) -> None:
        def fail(count: int) -> bool:
            raise KeyError(count)

        collector = ByteCollector(stop_bytes=3)
        async with net_setup.pair(network) as (client, server):
            await server.send([b"x"])
            with pytest.raises(KeyError, match="1"):
                await client.receive_each(collector.get_buffer, fail)
            await server.send([b"abc"])
            assert await client.receive_each(collector.get_buffer, collector.collect)
            assert collector.bytes == b"abc"

    net_setup.run(main)


def test_cancelled_receive_each_loses_no_bytes(net_setup: NetworkSetup) -> None:
    async def main(net_setup: NetworkSetup, network: Network) -> None:
        async with net_setup.pair(network) as (client, server), anyio.create_task_group() as tasks:

            async def trickle() -> None:
                for start in range(0, 400, 4):
                    await server.send([BODY[start : start + 4]])
                    await anyio.sleep(0.0003)

            tasks.start_soon(trickle)
            collector = ByteCollector(stop_bytes=400, buffer_bytes=3)
            while len(collector.bytes) < 400:
                with anyio.move_on_after(0.0002):
                    await client.receive_each(collector.get_buffer, collector.collect)
            assert collector.bytes == BODY[:400]

    net_setup.run(main)


class ByteCollector:
    """Collects received bytes until it has `stop_bytes` of them."""

    def __init__(self, *, stop_bytes: int = 0, buffer_bytes: int = 5000) -> None:
        self.bytes = bytearray()
        self.stop_bytes = stop_bytes
        self._buffer = memoryview(bytearray(buffer_bytes))

    def get_buffer(self) -> memoryview:
        return self._buffer

    def collect(self, count: int) -> bool:
        self.bytes += self._buffer[:count]
        return len(self.bytes) < self.stop_bytes


@pytest.mark.parametrize("kind", ["local", "fake"])
def test_send_file_sends_the_exact_range(net_setup: NetworkSetup, kind: str, tmp_path: Path) -> None:
    async def main(net_setup: NetworkSetup, network: Network) -> None:
        disk = LocalDisk(tmp_path) if kind == "local" else SimDisk()
        file = disk.open("a", create=True)
        file.write(0, [BODY])
        async with net_setup.pair(network) as (client, server), anyio.create_task_group() as tasks:
            tasks.start_soon(expect_bytes, server, b"before" + BODY[1000:600_000] + b"after")
            await client.send([b"before"])
            await client.send_file(FileRange(file, 1000, 599_000))
            await client.send_file(FileRange(file, 1000, 0))
            await client.send([b"after"])
            with pytest.raises(OSError, match="100 bytes before the range does") as caught:
                await client.send_file(FileRange(file, len(BODY) - 10, 110))
            assert not isinstance(caught.value, ConnectionError)
        file.close()

    net_setup.run(main)


def test_closed_listener_accepts_nothing_more_and_keeps_open_connections(net_setup: NetworkSetup) -> None:
    async def main(net_setup: NetworkSetup, network: Network) -> None:
        async with net_setup.pair(network) as (client, server):
            listener = await network.listen(HOST, 0)

            async def accept() -> None:
                with pytest.raises(ConnectionError):
                    await listener.accept()

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(accept)
                await anyio.sleep(0.01)
                await listener.aclose()
            await listener.aclose()
            with pytest.raises(ConnectionError):
                await listener.accept()
            await client.send([b"still here"])
            assert await receive(server, 10) == b"still here"
            with pytest.raises(ConnectionRefusedError, match=f"{HOST}:{listener.address[1]}"):
                await network.connect(*listener.address)

    net_setup.run(main)


def test_peers_are_named_and_address_in_use_is_rejected(net_setup: NetworkSetup) -> None:
    async def main(net_setup: NetworkSetup, network: Network) -> None:
        async with net_setup.pair(network) as (client, server):
            assert client.peer_host == server.peer_host == HOST
            assert client.peer.startswith(f"{HOST}:")
            assert server.peer.startswith(f"{HOST}:")
            assert client.peer != server.peer
        listener = await network.listen(HOST, 0)
        with pytest.raises(OSError, match=f"listen on {HOST}:{listener.address[1]}: Address already in use"):
            await network.listen(*listener.address)
        await listener.aclose()

    net_setup.run(main)


async def expect_bytes(stream: Stream, body: bytes) -> None:
    """Receive these bytes in chunks of an odd size, and compare."""
    assert await receive(stream, len(body), buffer_bytes=10_007) == body


def body_slice(start: int, count: int) -> bytes:
    """Return `count` bytes of the body, which repeats without end."""
    start %= len(BODY)
    return (BODY[start:] + BODY * (count // len(BODY) + 1))[:count]


async def send_forever(stream: Stream) -> None:
    """Send until cancelled, or until an error is raised."""
    while True:
        await stream.send([BODY])


def new_file_range(body: bytes) -> FileRange:
    file = SimDisk().open("a", create=True)
    file.write(0, [body])
    return FileRange(file, 0, len(body))
