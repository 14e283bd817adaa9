"""Real sockets in rare cases: addresses, descriptor exhaustion, timeouts, fairness to other tasks."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import socket
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from delta_prop.platform import sockets
from delta_prop.platform.connection_faults import Misconfigured
from delta_prop.platform.sockets import CoopBudget, SocketNetwork, SocketStream
from delta_prop.platform.world import real_world
from delta_prop_broker.disk import FileRange
from delta_prop_broker.local_disk import LocalDisk
from delta_prop_wire.errors import UsageError
from tests.delta_prop.platform.networks import HOST, LOOPS, plain_setup, receive, receive_all

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from delta_prop.platform.ports import Network, Stream
    from tests.delta_prop.platform.networks import NetworkSetup

SEND_FILE = os.sendfile
ON_LOOPS = pytest.mark.parametrize("loop", LOOPS)


def test_real_world_network_can_listen() -> None:
    async def main() -> None:
        network = real_world().network
        assert network is not None
        await (await network.listen(HOST, 0)).aclose()

    anyio.run(main)


@pytest.mark.parametrize(
    ("listen_at", "connect_to", "peer_host"),
    [
        ("127.0.0.1", "127.0.0.1", "127.0.0.1"),
        ("localhost", "127.0.0.1", "127.0.0.1"),
        ("localhost", "localhost", "127.0.0.1"),
        ("::1", "::1", "::1"),
        ("::", "::1", "::1"),
        ("::", "127.0.0.1", "127.0.0.1"),  # the peer is ::ffff:127.0.0.1
        ("0.0.0.0", "127.0.0.1", "127.0.0.1"),
    ],
)
def test_peer_host_is_the_ip_address_for_any_listen_address(
    listen_at: str, connect_to: str, peer_host: str
) -> None:
    async def main() -> None:
        network = SocketNetwork()
        listener = await network.listen(listen_at, 0)
        client = await network.connect(connect_to, listener.address[1])
        server = await listener.accept()
        assert server.peer_host == peer_host
        assert server.peer.startswith("[::1]:" if ":" in peer_host else f"{peer_host}:")
        assert client.peer_host == connect_to
        await close_all(client, server)
        await listener.aclose()

    anyio.run(main)


def test_ipv6_listener_refuses_ipv4() -> None:
    async def main() -> None:
        listener = await SocketNetwork().listen("::1", 0)
        with pytest.raises(ConnectionRefusedError, match=r"cannot connect to 127\.0\.0\.1:"):
            await SocketNetwork().connect("127.0.0.1", listener.address[1])
        await listener.aclose()

    anyio.run(main)


def test_bad_port_host_or_address_is_named_in_the_error() -> None:
    async def main() -> None:
        network = SocketNetwork()
        for call in (network.listen, network.connect):
            with pytest.raises(UsageError, match="port 65536: give one"):
                await call(HOST, 65_536)
            with pytest.raises(Misconfigured, match="host 'no host' is not known here"):
                await call("no host", 7)
        with pytest.raises(OSError, match=r"cannot listen on 192\.0\.2\.1:0: "):
            await network.listen("192.0.2.1", 0)

    anyio.run(main)


@ON_LOOPS
def test_connect_tries_the_next_address_while_one_is_silent(
    loop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main(_: NetworkSetup, network: Network) -> None:
        listener = await network.listen(HOST, 0)
        with unresponsive_address() as silent:
            targets = [(socket.AF_INET, silent), (socket.AF_INET, (HOST, listener.address[1]))]
            monkeypatch.setattr(sockets, "_resolve", resolve_to(targets))
            stream = await network.connect("several", 7)
            server = await listener.accept()
            assert (stream.peer, stream.peer_host) == ("several:7", "several")
            await close_all(stream, server)
            monkeypatch.setattr(sockets, "_resolve", resolve_to([(socket.AF_INET, silent)]))
            start_s = time.monotonic()
            with pytest.raises(TimeoutError, match=r"several:7 did not answer within 0\.05 s"):
                await network.connect("several", 7, timeout_s=0.05)
            assert time.monotonic() - start_s < 30
        await listener.aclose()

    monkeypatch.setattr(sockets, "HEAD_START_S", 0.02)
    plain_setup(loop).run(main)


def resolve_to(targets: list[tuple[int, Any]]) -> Any:
    async def resolve(host: str, port: int, flags: int = 0) -> list[tuple[int, Any]]:
        await anyio.lowlevel.checkpoint()
        return targets

    return resolve


@contextmanager
def unresponsive_address() -> Iterator[tuple[str, int]]:
    """Yield an address whose connects time out: its backlog is full and nothing accepts."""
    with socket.socket() as server:
        server.bind((HOST, 0))
        server.listen(0)
        waiting = []
        for _ in range(4):
            socket_ = socket.socket()
            socket_.setblocking(False)
            socket_.connect_ex(server.getsockname())
            waiting.append(socket_)
        yield server.getsockname()
        for socket_ in waiting:
            socket_.close()


def test_connect_never_connects_a_socket_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that retries a free local port may get it as its own port and connect to itself."""

    async def main() -> None:
        listener = await SocketNetwork().listen(HOST, 0)
        await listener.aclose()
        prepare = sockets._prepare

        def prepare_on_that_port(socket_: socket.socket) -> None:
            prepare(socket_)
            socket_.bind(listener.address)

        monkeypatch.setattr(sockets, "_prepare", prepare_on_that_port)
        with pytest.raises(ConnectionRefusedError):
            await SocketNetwork().connect(*listener.address)

    anyio.run(main)


@ON_LOOPS
def test_listener_survives_descriptor_exhaustion(loop: str, caplog: pytest.LogCaptureFixture) -> None:
    async def main(_: NetworkSetup, network: Network) -> None:
        listener = await network.listen(HOST, 0)
        client = await network.connect(*listener.address)
        accepted: list[Stream] = []

        async def accept() -> None:
            accepted.append(await listener.accept())

        async with anyio.create_task_group() as tasks:
            with exhausted_descriptors():
                tasks.start_soon(accept)
                await anyio.sleep(0.03)
                assert not accepted
                assert 1 <= len(caplog.records) <= 6  # the listener must not spin
        assert "Too many open files" in caplog.text
        await close_all(client, accepted[0])
        await listener.aclose()

    with pytest.MonkeyPatch.context() as patch, caplog.at_level(logging.WARNING, "delta_prop"):
        patch.setattr(sockets, "EXHAUSTED_S", 0.01)
        plain_setup(loop).run(main)


@contextmanager
def exhausted_descriptors() -> Iterator[None]:
    """Prevent the process from opening descriptors until the block ends."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    next_descriptor = os.open(os.devnull, os.O_RDONLY)
    os.close(next_descriptor)
    resource.setrlimit(resource.RLIMIT_NOFILE, (next_descriptor, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@ON_LOOPS
def test_partial_sends_arrive_complete(loop: str) -> None:
    async def main(net_setup: NetworkSetup, network: Network) -> None:
        body = bytes(range(256)) * 4000
        parts = [body[position : position + 777] for position in range(0, len(body), 777)]
        async with net_setup.pair(network) as (client, server), anyio.create_task_group() as tasks:
            client._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 10_000)  # type: ignore[attr-defined]
            tasks.start_soon(client.send, parts)
            await anyio.sleep(0.01)  # a receiver that is always ready would take all bytes at once
            assert await receive(server, len(body)) == body

    plain_setup(loop).run(main)


def test_reset_found_by_send_is_also_raised_by_receive() -> None:
    async def main() -> None:
        with socket.create_server((HOST, 0)) as server:
            client = await SocketNetwork().connect(*server.getsockname())
            accepted, _ = server.accept()
            accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            accepted.close()  # the system reports a reset only to the first call
        with pytest.raises(ConnectionError, match="Connection reset by peer"):
            await client.send([b"x"])
        with pytest.raises(ConnectionError, match="Connection reset by peer"):
            await client.receive_into(memoryview(bytearray(1)))
        await client.aclose()

    anyio.run(main)


def test_second_of_two_connected_sockets_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        sockets_made: list[socket.socket] = []
        all_tried = anyio.Event()

        async def connect_both(family: int, address: Any) -> socket.socket:
            sockets_made.append(socket.socket())
            if len(sockets_made) == 2:
                all_tried.set()
            with anyio.CancelScope(shield=True):
                await all_tried.wait()
                return sockets_made[address]

        monkeypatch.setattr(sockets, "_connect", connect_both)
        monkeypatch.setattr(sockets, "_resolve", resolve_to([(socket.AF_INET, 0), (socket.AF_INET, 1)]))
        monkeypatch.setattr(sockets, "HEAD_START_S", 0.001)
        stream = await SocketNetwork().connect("several", 7)
        assert sorted(socket_.fileno() >= 0 for socket_ in sockets_made) == [False, True]
        await stream.aclose()

    anyio.run(main)


@ON_LOOPS
def test_aclose_waits_for_the_peer_up_to_linger_s_max(loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(net_setup: NetworkSetup, network: Network) -> None:
        async with net_setup.pair(network) as (client, server):
            start_s = time.monotonic()
            await client.aclose()
            assert 0.08 < time.monotonic() - start_s < 30
            assert await receive_all(server) == b""
            monkeypatch.setattr(sockets, "LINGER_S_MAX", 60)
            start_s = time.monotonic()
            await server.aclose()
            assert time.monotonic() - start_s < 30

    monkeypatch.setattr(sockets, "LINGER_S_MAX", 0.1)
    plain_setup(loop).run(main)


@ON_LOOPS
def test_aclose_discards_up_to_linger_bytes_max(loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(net_setup: NetworkSetup, network: Network) -> None:
        async with net_setup.pair(network) as (client, server), anyio.create_task_group() as tasks:
            tasks.start_soon(server.aclose)
            sent = 0
            with suppress(ConnectionError):
                while sent < 100_000_000:
                    await client.send([bytes(65_536)])
                    sent += 65_536
            assert 1_000_000 < sent < 100_000_000

    monkeypatch.setattr(sockets, "LINGER_BYTES_MAX", 1_000_000)
    monkeypatch.setattr(sockets, "LINGER_S_MAX", 20)  # the deadline of the test is earlier
    plain_setup(loop).run(main)


@pytest.mark.alone
@ON_LOOPS
def test_busy_connection_yields_to_other_tasks(loop: str) -> None:
    async def main(net_setup: NetworkSetup, network: Network) -> None:
        async with net_setup.pair(network) as (client, server), anyio.create_task_group() as tasks:
            await client.send([bytes(25_000)])
            start_s = time.monotonic()
            turns: list[float] = []

            async def other_task() -> None:
                while True:
                    turns.append(time.monotonic())
                    await anyio.lowlevel.checkpoint()

            tasks.start_soon(other_task)
            buffer = memoryview(bytearray(1))
            calls = 0
            while calls < 25_000:  # each call finds a byte at once
                calls += await server.receive_into(buffer)
            spent_s = time.monotonic() - start_s
            tasks.cancel_scope.cancel()
            print(f"{loop}: {len(turns)} turns in {spent_s * 1e3:.1f} ms")
            assert spent_s / 0.02 < len(turns)  # one turn per 0.5 ms, with slack for a busy machine
            assert len(turns) < calls / 20  # fewer turns than calls

    plain_setup(loop).run(main)


@ON_LOOPS
def test_receive_each_with_constant_arrivals_yields(loop: str) -> None:
    async def main(net_setup: NetworkSetup, network: Network) -> None:
        async with net_setup.pair(network) as (client, server), anyio.create_task_group() as tasks:
            await client.send([bytes(500)])
            turns = calls = 0

            async def other_task() -> None:
                nonlocal turns
                while True:
                    turns += 1
                    await anyio.lowlevel.checkpoint()

            def take(count: int) -> bool:
                nonlocal calls
                calls += count
                return calls < 500

            tasks.start_soon(other_task)
            buffer = memoryview(bytearray(1))
            assert await server.receive_each(lambda: buffer, take)
            tasks.cancel_scope.cancel()
            assert turns >= 250

    plain_setup(loop).run(main)


@ON_LOOPS
def test_cancelled_receive_each_leaves_no_reader(loop: str) -> None:
    """The loop has no reader even if all bytes were read, and after a cancelled receive."""

    async def main(net_setup: NetworkSetup, network: Network) -> None:
        async with net_setup.pair(network) as (client, server):
            buffer_requests = 0
            buffer = memoryview(bytearray(8))

            def get_buffer() -> memoryview:
                nonlocal buffer_requests
                buffer_requests += 1
                return buffer

            for _ in range(2):
                await client.send([b"x"])
                with anyio.move_on_after(0.05):
                    await server.receive_each(get_buffer, lambda count: True)
            await client.send([b"y"])
            await anyio.sleep(0.02)  # no receive is waiting
            assert buffer_requests == 2
            if loop != "trio":
                number = server._socket.fileno()  # type: ignore[attr-defined]
                assert not asyncio.get_running_loop().remove_reader(number), (
                    "the loop must have no reader, or it would spin"
                )
            assert await server.receive_into(buffer) == 1

    plain_setup(loop).run(main)


@ON_LOOPS
def test_no_task_waits_on_a_closed_descriptor(loop: str) -> None:
    """The next connection gets the same descriptor before the last waiter has woken up."""

    async def main(net_setup: NetworkSetup, network: Network) -> None:
        for _ in range(25):
            async with net_setup.pair(network) as (client, server), anyio.create_task_group() as tasks:

                async def wait(stream: Stream) -> None:
                    with pytest.raises(ConnectionError):
                        await stream.receive_into(memoryview(bytearray(1)))

                tasks.start_soon(wait, client)
                await anyio.lowlevel.checkpoint()
                tasks.start_soon(client.aclose)
                tasks.start_soon(server.aclose)

    plain_setup(loop).run(main)


def test_send_file_reads_file_where_sendfile_is_unsupported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main(net_setup: NetworkSetup, network: Network) -> None:
        file = LocalDisk(tmp_path).open("a", create=True)
        file.write(0, [bytes(range(256)) * 2000])
        async with net_setup.pair(network) as (client, server), anyio.create_task_group() as tasks:
            tasks.start_soon(client.send_file, FileRange(file, 1, 500_000))
            assert await receive(server, 500_000) == (bytes(range(256)) * 2000)[1:500_001]
            monkeypatch.setattr(os, "sendfile", failing_sendfile(22, bytes_before=1000))
            tasks.start_soon(client.send_file, FileRange(file, 1, 5000))
            assert await receive(server, 5000) == (bytes(range(256)) * 2000)[1:5001]
            monkeypatch.setattr(os, "sendfile", failing_sendfile(5))
            with pytest.raises(OSError, match="Errno 5") as caught:
                await client.send_file(FileRange(file, 0, 5))
            assert not isinstance(caught.value, ConnectionError)
        file.close()

    monkeypatch.setattr(os, "sendfile", failing_sendfile(22))
    plain_setup("asyncio").run(main)


def failing_sendfile(code: int, bytes_before: int = 0) -> Any:
    """Return a sendfile that fails, the first time only after `bytes_before` bytes."""
    bytes_to_send = [bytes_before] if bytes_before else []

    def sendfile(connected: int, file: int, position: int, count: int) -> int:
        if bytes_to_send:
            return SEND_FILE(connected, file, position, min(count, bytes_to_send.pop()))
        raise OSError(code, os.strerror(code))

    return sendfile


def test_send_now_stops_after_a_partly_sent_buffer() -> None:
    """The system may take a part of the first buffers, and have capacity for more directly after."""
    taken: list[bytes] = []

    class ShortSocket:
        def sendmsg(self, parts: list[bytes]) -> int:
            taken.append(b"".join(parts)[:10])
            return 10

    stream = SocketStream(ShortSocket(), CoopBudget(), "host:1", "host")  # type: ignore[arg-type]
    assert stream.send_now([b"%05d" % number for number in range(3000)]) == 10
    assert taken == [b"0000000001"]


async def close_all(*streams: Stream) -> None:
    """Close both ends at once."""
    async with anyio.create_task_group() as tasks:
        for stream in streams:
            tasks.start_soon(stream.aclose)
