"""One contract, several networks: streams keep bytes in order, end as agreed, and tell what is gone."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import anyio
import pytest

from delta_prop_broker.disk import FileRange
from delta_prop_broker.local_disk import LocalDisk
from delta_prop_simulations.disk import SimDisk
from tests.delta_prop.networks import HOST, Place, place, receive, receive_all

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from delta_prop.ports import Network, Stream

__all__ = ["place"]
BODY = random.Random(1).randbytes(700_000)


def test_bytes_arrive_in_order_both_ways_at_once(place: Place) -> None:
    async def main(place: Place, network: Network) -> None:
        small = [BODY[at : at + 7] for at in range(0, 21_000, 7)]  # more than one call of the system takes
        parts = [*small, b"", BODY[21_000:300_000], memoryview(bytearray(BODY[300_000:]))]
        async with place.pair(network) as (client, server), anyio.create_task_group() as tasks:
            tasks.start_soon(client.send, parts)
            tasks.start_soon(server.send, [BODY])
            tasks.start_soon(expect, server, BODY)
            tasks.start_soon(expect, client, BODY)

    place.run(main)


def test_an_end_is_told_behind_the_last_byte_and_stays_told(place: Place) -> None:
    async def main(place: Place, network: Network) -> None:
        async with place.pair(network) as (client, server), anyio.create_task_group() as tasks:
            await server.send([b"last words"])
            tasks.start_soon(server.aclose)
            assert await receive_all(client) == b"last words"
            assert await client.receive_into(memoryview(bytearray(1))) == 0
            await client.aclose()

    place.run(main)


def test_last_words_arrive_though_much_was_not_read(place: Place) -> None:
    async def main(place: Place, network: Network) -> None:
        async with place.pair(network) as (client, server):
            client.send_now([BODY])  # nobody reads it; a bare close would reset the connection
            await server.send([b"shutting down"])

            async def hear() -> None:
                await anyio.sleep(0.05)
                assert await receive_all(client) == b"shutting down"
                await client.aclose()

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(server.aclose)
                tasks.start_soon(hear)

    place.run(main)


def test_after_aclose_everything_says_that_the_connection_is_gone(place: Place) -> None:
    async def main(place: Place, network: Network) -> None:
        async with place.pair(network) as (client, server):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(client.aclose)
                tasks.start_soon(server.aclose)
            await client.aclose()
            with pytest.raises(ConnectionError):
                await client.receive_into(memoryview(bytearray(1)))
            with pytest.raises(ConnectionError):
                await client.receive_each(Taken().room, Taken().take)
            with pytest.raises(ConnectionError):
                client.send_now([b"x"])
            with pytest.raises(ConnectionError):
                await client.send([b"x"])
            with pytest.raises(ConnectionError):
                await client.send_file(a_file(BODY))

    place.run(main)


@pytest.mark.parametrize("waits", ["receive", "receive each", "send"])
def test_closing_wakes_who_waits(place: Place, waits: str) -> None:
    async def main(place: Place, network: Network) -> None:
        taken = Taken()
        waiting: dict[str, Callable[[Stream], Awaitable[object]]] = {
            "receive": lambda stream: stream.receive_into(memoryview(bytearray(1))),
            "receive each": lambda stream: stream.receive_each(taken.room, taken.take),
            "send": send_on,
        }

        async def wait(stream: Stream) -> None:
            with pytest.raises(ConnectionError):
                await waiting[waits](stream)

        async with place.pair(network) as (client, server), anyio.create_task_group() as tasks:
            tasks.start_soon(wait, client)
            await anyio.sleep(0.02)
            tasks.start_soon(client.aclose)
            await anyio.sleep(0.02)
            await server.aclose()

    place.run(main)


def test_sending_to_who_has_gone_fails(place: Place) -> None:
    async def main(place: Place, network: Network) -> None:
        async with place.pair(network) as (client, server), anyio.create_task_group() as tasks:
            tasks.start_soon(server.aclose)
            with pytest.raises(ConnectionError):
                await send_on(client)

    place.run(main)


def test_what_is_sent_without_waiting_is_counted(place: Place) -> None:
    async def main(place: Place, network: Network) -> None:
        async with place.pair(network) as (client, server), anyio.create_task_group() as tasks:
            sent = 0
            while now := client.send_now([circle(sent, 70_000), circle(sent + 70_000, 80_000)]):
                sent += now
            assert sent > 0
            tasks.start_soon(expect, server, circle(0, sent + 100_000))
            await client.send([circle(sent, 100_000)])

    place.run(main)


def test_a_receive_that_is_given_up_loses_nothing(place: Place) -> None:
    async def main(place: Place, network: Network) -> None:
        async with place.pair(network) as (client, server), anyio.create_task_group() as tasks:

            async def dribble() -> None:
                for at in range(0, 400, 4):
                    await server.send([BODY[at : at + 4]])
                    await anyio.sleep(0.0003)

            tasks.start_soon(dribble)
            found, buffer = b"", memoryview(bytearray(3))
            while len(found) < 400:
                with anyio.move_on_after(0.0002):
                    count = await client.receive_into(buffer)
                    found += buffer[:count]
            assert found == BODY[:400]

    place.run(main)


def test_each_arrival_is_handed_on_until_who_takes_it_has_enough(place: Place) -> None:
    async def main(place: Place, network: Network) -> None:
        taken = Taken()
        async with place.pair(network) as (client, server), anyio.create_task_group() as tasks:
            tasks.start_soon(server.send, [BODY])
            taken.enough = 1000
            assert await client.receive_each(taken.room, taken.take)
            assert 1000 <= len(taken.bytes) < 1000 + len(taken.room())
            taken.enough = len(BODY)
            assert await client.receive_each(taken.room, taken.take)
            assert taken.bytes == BODY
            tasks.start_soon(server.aclose)
            assert not await client.receive_each(taken.room, taken.take)
            assert not await client.receive_each(taken.room, taken.take)

    place.run(main)


def test_what_taking_raises_is_passed_on_and_receiving_may_go_on(place: Place) -> None:
    async def main(place: Place, network: Network) -> None:
        def fail(count: int) -> bool:
            raise KeyError(count)

        taken = Taken(enough=3)
        async with place.pair(network) as (client, server):
            await server.send([b"x"])
            with pytest.raises(KeyError, match="1"):
                await client.receive_each(taken.room, fail)
            await server.send([b"abc"])
            assert await client.receive_each(taken.room, taken.take)
            assert taken.bytes == b"abc"

    place.run(main)


def test_arrivals_that_are_given_up_lose_nothing(place: Place) -> None:
    async def main(place: Place, network: Network) -> None:
        async with place.pair(network) as (client, server), anyio.create_task_group() as tasks:

            async def dribble() -> None:
                for at in range(0, 400, 4):
                    await server.send([BODY[at : at + 4]])
                    await anyio.sleep(0.0003)

            tasks.start_soon(dribble)
            taken = Taken(enough=400, room_bytes=3)
            while len(taken.bytes) < 400:
                with anyio.move_on_after(0.0002):
                    await client.receive_each(taken.room, taken.take)
            assert taken.bytes == BODY[:400]

    place.run(main)


class Taken:
    """Arrivals, until there are enough bytes of them."""

    def __init__(self, *, enough: int = 0, room_bytes: int = 5000) -> None:
        self.bytes = bytearray()
        self.enough = enough
        self._buffer = memoryview(bytearray(room_bytes))

    def room(self) -> memoryview:
        return self._buffer

    def take(self, count: int) -> bool:
        self.bytes += self._buffer[:count]
        return len(self.bytes) < self.enough


@pytest.mark.parametrize("kind", ["local", "false"])
def test_bytes_of_a_file_are_sent_as_they_stand(place: Place, kind: str, tmp_path: Path) -> None:
    async def main(place: Place, network: Network) -> None:
        disk = LocalDisk(tmp_path) if kind == "local" else SimDisk()
        file = disk.open("a", create=True)
        file.write(0, [BODY])
        async with place.pair(network) as (client, server), anyio.create_task_group() as tasks:
            tasks.start_soon(expect, server, b"before" + BODY[1000:600_000] + b"behind")
            await client.send([b"before"])
            await client.send_file(FileRange(file, 1000, 599_000))
            await client.send_file(FileRange(file, 1000, 0))
            await client.send([b"behind"])
            with pytest.raises(OSError, match="100 bytes before the range does") as told:
                await client.send_file(FileRange(file, len(BODY) - 10, 110))
            assert not isinstance(told.value, ConnectionError)
        file.close()

    place.run(main)


def test_a_closed_listener_takes_no_more_and_leaves_the_others(place: Place) -> None:
    async def main(place: Place, network: Network) -> None:
        async with place.pair(network) as (client, server):
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

    place.run(main)


def test_who_is_there_is_told(place: Place) -> None:
    async def main(place: Place, network: Network) -> None:
        async with place.pair(network) as (client, server):
            assert client.peer_host == server.peer_host == HOST
            assert client.peer.startswith(f"{HOST}:")
            assert server.peer.startswith(f"{HOST}:")
            assert client.peer != server.peer
        listener = await network.listen(HOST, 0)
        with pytest.raises(OSError, match=f"listen on {HOST}:{listener.address[1]}: Address already in use"):
            await network.listen(*listener.address)
        await listener.aclose()

    place.run(main)


async def expect(stream: Stream, body: bytes) -> None:
    """These bytes, received in odd pieces."""
    assert await receive(stream, len(body), room=10_007) == body


def circle(begin: int, count: int) -> bytes:
    """So many bytes of the body, which begins anew where it ends."""
    begin %= len(BODY)
    return (BODY[begin:] + BODY * (count // len(BODY) + 1))[:count]


async def send_on(stream: Stream) -> None:
    """Send without end."""
    while True:
        await stream.send([BODY])


def a_file(body: bytes) -> FileRange:
    file = SimDisk().open("a", create=True)
    file.write(0, [body])
    return FileRange(file, 0, len(body))
