"""Real sockets at their edges: addresses, exhaustion, bounds of time, turns of the loop."""

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

from delta_prop import sockets
from delta_prop.connection_faults import Misconfigured
from delta_prop.sockets import CoopBudget, SocketNetwork, SocketStream
from delta_prop.world import real_world
from delta_prop_broker.disk import FileRange
from delta_prop_broker.local_disk import LocalDisk
from delta_prop_wire.errors import UsageError
from tests.delta_prop.networks import HOST, LOOPS, plain, receive, receive_all

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from delta_prop.ports import Network, Stream
    from tests.delta_prop.networks import Place

SEND_FILE = os.sendfile
ON_LOOPS = pytest.mark.parametrize("loop", LOOPS)


def test_the_real_world_has_it() -> None:
    async def main() -> None:
        network = real_world().network
        assert network is not None
        await (await network.listen(HOST, 0)).aclose()

    anyio.run(main)


@pytest.mark.parametrize(
    ("listen_at", "connect_to", "seen_as"),
    [
        ("127.0.0.1", "127.0.0.1", "127.0.0.1"),
        ("localhost", "127.0.0.1", "127.0.0.1"),
        ("localhost", "localhost", "127.0.0.1"),
        ("::1", "::1", "::1"),
        ("::", "::1", "::1"),
        ("::", "127.0.0.1", "127.0.0.1"),  # it comes in as ::ffff:127.0.0.1
        ("0.0.0.0", "127.0.0.1", "127.0.0.1"),
    ],
)
def test_addresses(listen_at: str, connect_to: str, seen_as: str) -> None:
    async def main() -> None:
        network = SocketNetwork()
        listener = await network.listen(listen_at, 0)
        client = await network.connect(connect_to, listener.address[1])
        server = await listener.accept()
        assert server.peer_host == seen_as
        assert server.peer.startswith("[::1]:" if ":" in seen_as else f"{seen_as}:")
        assert client.peer_host == connect_to
        await end(client, server)
        await listener.aclose()

    anyio.run(main)


def test_ipv6_alone_is_not_ipv4() -> None:
    async def main() -> None:
        listener = await SocketNetwork().listen("::1", 0)
        with pytest.raises(ConnectionRefusedError, match=r"cannot connect to 127\.0\.0\.1:"):
            await SocketNetwork().connect("127.0.0.1", listener.address[1])
        await listener.aclose()

    anyio.run(main)


def test_what_cannot_be_reached_is_named() -> None:
    async def main() -> None:
        network = SocketNetwork()
        for ask in (network.listen, network.connect):
            with pytest.raises(UsageError, match="port 65536: give one"):
                await ask(HOST, 65_536)
            with pytest.raises(Misconfigured, match="host 'no host' is not known here"):
                await ask("no host", 7)
        with pytest.raises(OSError, match=r"cannot listen on 192\.0\.2\.1:0: "):
            await network.listen("192.0.2.1", 0)

    anyio.run(main)


@ON_LOOPS
def test_another_address_is_tried_beside_one_that_does_not_answer(
    loop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main(_: Place, network: Network) -> None:
        listener = await network.listen(HOST, 0)
        with deaf() as mute:
            targets = [(socket.AF_INET, mute), (socket.AF_INET, (HOST, listener.address[1]))]
            monkeypatch.setattr(sockets, "_resolve", answered(targets))
            stream = await network.connect("several", 7)
            server = await listener.accept()
            assert (stream.peer, stream.peer_host) == ("several:7", "several")
            await end(stream, server)
            monkeypatch.setattr(sockets, "_resolve", answered([(socket.AF_INET, mute)]))
            begin = time.monotonic()
            with pytest.raises(TimeoutError, match=r"several:7 did not answer within 0\.05 s"):
                await network.connect("several", 7, timeout_s=0.05)
            assert time.monotonic() - begin < 30
        await listener.aclose()

    monkeypatch.setattr(sockets, "HEAD_START_S", 0.02)
    plain(loop).run(main)


def answered(targets: list[tuple[int, Any]]) -> Any:
    async def look_up(host: str, port: int, flags: int = 0) -> list[tuple[int, Any]]:
        await anyio.lowlevel.checkpoint()
        return targets

    return look_up


@contextmanager
def deaf() -> Iterator[tuple[str, int]]:
    """An address where connecting waits: nobody accepts, and the backlog is full."""
    with socket.socket() as server:
        server.bind((HOST, 0))
        server.listen(0)
        waiting = []
        for _ in range(4):
            one = socket.socket()
            one.setblocking(False)
            one.connect_ex(server.getsockname())
            waiting.append(one)
        yield server.getsockname()
        for one in waiting:
            one.close()


def test_a_socket_is_never_joined_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that retries a free local port may get that port as its own and connect to itself."""

    async def main() -> None:
        listener = await SocketNetwork().listen(HOST, 0)
        await listener.aclose()
        prepare = sockets._prepare

        def given_that_port(one: socket.socket) -> None:
            prepare(one)
            one.bind(listener.address)

        monkeypatch.setattr(sockets, "_prepare", given_that_port)
        with pytest.raises(ConnectionRefusedError):
            await SocketNetwork().connect(*listener.address)

    anyio.run(main)


@ON_LOOPS
def test_a_listener_outlives_want_of_descriptors(loop: str, caplog: pytest.LogCaptureFixture) -> None:
    async def main(_: Place, network: Network) -> None:
        listener = await network.listen(HOST, 0)
        client = await network.connect(*listener.address)
        accepted: list[Stream] = []

        async def accept() -> None:
            accepted.append(await listener.accept())

        async with anyio.create_task_group() as tasks:
            with no_descriptors():
                tasks.start_soon(accept)
                await anyio.sleep(0.03)
                assert not accepted
                assert 1 <= len(caplog.records) <= 6  # it does not spin
        assert "Too many open files" in caplog.text
        await end(client, accepted[0])
        await listener.aclose()

    with pytest.MonkeyPatch.context() as patch, caplog.at_level(logging.WARNING, "delta_prop"):
        patch.setattr(sockets, "EXHAUSTED_S", 0.01)
        plain(loop).run(main)


@contextmanager
def no_descriptors() -> Iterator[None]:
    """The process can open nothing meanwhile."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.open(os.devnull, os.O_RDONLY)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@ON_LOOPS
def test_what_the_system_takes_bit_by_bit_arrives(loop: str) -> None:
    async def main(place: Place, network: Network) -> None:
        body = bytes(range(256)) * 4000
        parts = [body[at : at + 777] for at in range(0, len(body), 777)]
        async with place.pair(network) as (client, server), anyio.create_task_group() as tasks:
            client._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 10_000)  # type: ignore[attr-defined]
            tasks.start_soon(client.send, parts)
            await anyio.sleep(0.01)  # a receiver that is always ready would let all through at once
            assert await receive(server, len(body)) == body

    plain(loop).run(main)


def test_a_break_that_sending_found_out_is_no_end_for_receiving() -> None:
    async def main() -> None:
        with socket.create_server((HOST, 0)) as server:
            client = await SocketNetwork().connect(*server.getsockname())
            accepted, _ = server.accept()
            accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            accepted.close()  # by a reset, which the system tells to the first call alone
        with pytest.raises(ConnectionError, match="Connection reset by peer"):
            await client.send([b"x"])
        with pytest.raises(ConnectionError, match="Connection reset by peer"):
            await client.receive_into(memoryview(bytearray(1)))
        await client.aclose()

    anyio.run(main)


def test_of_two_addresses_that_answer_at_once_one_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        made: list[socket.socket] = []
        all_tried = anyio.Event()

        async def connected(family: int, address: Any) -> socket.socket:
            made.append(socket.socket())
            if len(made) == 2:
                all_tried.set()
            with anyio.CancelScope(shield=True):
                await all_tried.wait()
                return made[address]

        monkeypatch.setattr(sockets, "_connect", connected)
        monkeypatch.setattr(sockets, "_resolve", answered([(socket.AF_INET, 0), (socket.AF_INET, 1)]))
        monkeypatch.setattr(sockets, "HEAD_START_S", 0.001)
        stream = await SocketNetwork().connect("several", 7)
        assert sorted(one.fileno() >= 0 for one in made) == [False, True]
        await stream.aclose()

    anyio.run(main)


@ON_LOOPS
def test_closing_waits_for_the_other_side_but_not_for_ever(
    loop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main(place: Place, network: Network) -> None:
        async with place.pair(network) as (client, server):
            begin = time.monotonic()
            await client.aclose()
            assert 0.08 < time.monotonic() - begin < 30
            assert await receive_all(server) == b""
            monkeypatch.setattr(sockets, "LINGER_S_MAX", 60)
            begin = time.monotonic()
            await server.aclose()
            assert time.monotonic() - begin < 30

    monkeypatch.setattr(sockets, "LINGER_S_MAX", 0.1)
    plain(loop).run(main)


@ON_LOOPS
def test_closing_discards_a_bounded_number_of_bytes(loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(place: Place, network: Network) -> None:
        async with place.pair(network) as (client, server), anyio.create_task_group() as tasks:
            tasks.start_soon(server.aclose)
            sent = 0
            with suppress(ConnectionError):
                while sent < 100_000_000:
                    await client.send([bytes(65_536)])
                    sent += 65_536
            assert 1_000_000 < sent < 100_000_000

    monkeypatch.setattr(sockets, "LINGER_BYTES_MAX", 1_000_000)
    monkeypatch.setattr(sockets, "LINGER_S_MAX", 20)  # the deadline of a test would strike first
    plain(loop).run(main)


@pytest.mark.alone
@ON_LOOPS
def test_a_busy_connection_lets_others_run(loop: str) -> None:
    async def main(place: Place, network: Network) -> None:
        async with place.pair(network) as (client, server), anyio.create_task_group() as tasks:
            await client.send([bytes(25_000)])
            begin = time.monotonic()
            turns: list[float] = []

            async def other() -> None:
                while True:
                    turns.append(time.monotonic())
                    await anyio.lowlevel.checkpoint()

            tasks.start_soon(other)
            buffer = memoryview(bytearray(1))
            calls = 0
            while calls < 25_000:  # each finds a byte at once
                calls += await server.receive_into(buffer)
            spent_s = time.monotonic() - begin
            tasks.cancel_scope.cancel()
            print(f"{loop}: {len(turns)} turns in {spent_s * 1e3:.1f} ms")
            assert spent_s / 0.02 < len(turns)  # each 0.5 ms; the machine may be busy
            assert len(turns) < calls / 20  # and not with each call

    plain(loop).run(main)


@ON_LOOPS
def test_connections_that_have_arrivals_all_the_time_let_others_run(loop: str) -> None:
    async def main(place: Place, network: Network) -> None:
        async with place.pair(network) as (client, server), anyio.create_task_group() as tasks:
            await client.send([bytes(500)])
            turns = calls = 0

            async def other() -> None:
                nonlocal turns
                while True:
                    turns += 1
                    await anyio.lowlevel.checkpoint()

            def take(count: int) -> bool:
                nonlocal calls
                calls += count
                return calls < 500

            tasks.start_soon(other)
            buffer = memoryview(bytearray(1))
            assert await server.receive_each(lambda: buffer, take)
            tasks.cancel_scope.cancel()
            assert turns >= 250

    plain(loop).run(main)


@ON_LOOPS
def test_who_waits_for_arrivals_costs_nothing_meanwhile(loop: str) -> None:
    """Also behind an arrival that was taken whole, and after a receive that was given up."""

    async def main(place: Place, network: Network) -> None:
        async with place.pair(network) as (client, server):
            asked = 0
            buffer = memoryview(bytearray(8))

            def room() -> memoryview:
                nonlocal asked
                asked += 1
                return buffer

            for _ in range(2):
                await client.send([b"x"])
                with anyio.move_on_after(0.05):
                    await server.receive_each(room, lambda count: True)
            await client.send([b"y"])
            await anyio.sleep(0.02)  # nobody wants it now
            assert asked == 2
            if loop != "trio":
                number = server._socket.fileno()  # type: ignore[attr-defined]
                assert not asyncio.get_running_loop().remove_reader(number), "the loop would spin"
            assert await server.receive_into(buffer) == 1

    plain(loop).run(main)


@ON_LOOPS
def test_nobody_waits_at_the_number_of_a_socket_that_was_closed(loop: str) -> None:
    """The next connection gets the same number, while who waited at the last one still wakes up."""

    async def main(place: Place, network: Network) -> None:
        for _ in range(25):
            async with place.pair(network) as (client, server), anyio.create_task_group() as tasks:

                async def wait(stream: Stream) -> None:
                    with pytest.raises(ConnectionError):
                        await stream.receive_into(memoryview(bytearray(1)))

                tasks.start_soon(wait, client)
                await anyio.lowlevel.checkpoint()
                tasks.start_soon(client.aclose)
                tasks.start_soon(server.aclose)

    plain(loop).run(main)


def test_a_file_that_the_system_cannot_send_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(place: Place, network: Network) -> None:
        file = LocalDisk(tmp_path).open("a", create=True)
        file.write(0, [bytes(range(256)) * 2000])
        async with place.pair(network) as (client, server), anyio.create_task_group() as tasks:
            tasks.start_soon(client.send_file, FileRange(file, 1, 500_000))
            assert await receive(server, 500_000) == (bytes(range(256)) * 2000)[1:500_001]
            monkeypatch.setattr(os, "sendfile", failing(22, behind=1000))
            tasks.start_soon(client.send_file, FileRange(file, 1, 5000))
            assert await receive(server, 5000) == (bytes(range(256)) * 2000)[1:5001]
            monkeypatch.setattr(os, "sendfile", failing(5))
            with pytest.raises(OSError, match="Errno 5") as told:
                await client.send_file(FileRange(file, 0, 5))
            assert not isinstance(told.value, ConnectionError)
        file.close()

    monkeypatch.setattr(os, "sendfile", failing(22))
    plain("asyncio").run(main)


def failing(code: int, behind: int = 0) -> Any:
    """A call that fails, the first time only behind so many bytes."""
    left = [behind] if behind else []

    def sendfile(connected: int, file: int, at: int, count: int) -> int:
        if left:
            return SEND_FILE(connected, file, at, min(count, left.pop()))
        raise OSError(code, os.strerror(code))

    return sendfile


def test_what_follows_a_buffer_waits_until_that_is_taken_whole() -> None:
    """The system can take part of the first buffers and have room again at once."""
    taken: list[bytes] = []

    class Short:
        def sendmsg(self, parts: list[bytes]) -> int:
            taken.append(b"".join(parts)[:10])
            return 10

    stream = SocketStream(Short(), CoopBudget(), "host:1", "host")  # type: ignore[arg-type]
    assert stream.send_now([b"%05d" % number for number in range(3000)]) == 10
    assert taken == [b"0000000001"]


async def end(*streams: Stream) -> None:
    """Close both ends at once."""
    async with anyio.create_task_group() as tasks:
        for stream in streams:
            tasks.start_soon(stream.aclose)
