"""The proxy of the tests does what it says."""

from __future__ import annotations

import random
import time
from functools import partial
from typing import TYPE_CHECKING

import anyio
import pytest

from delta_prop.sockets import SocketNetwork
from tests.delta_prop.networks import HOST, LOOPS, receive, receive_all
from tests.net.proxy import Fate, proxy_to, rough, smooth

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from delta_prop.ports import Stream
    from tests.net.proxy import Fates, Proxy

BODY = random.Random(4).randbytes(300_000)


def through(
    fates: Callable[[int], Fates],
    main: Callable[[Proxy, Stream, Stream], Awaitable[None]],
    loop: str = "asyncio",
) -> None:
    """Run a test with both ends of a connection through a proxy."""

    async def joined() -> None:
        network = SocketNetwork()
        listener = await network.listen(HOST, 0)
        with anyio.fail_after(60):
            async with proxy_to(listener.address, fates=fates) as proxy:
                client = await network.connect(*proxy.address)
                server = await listener.accept()
                await main(proxy, client, server)
                proxy.cut()
                await client.aclose()
                await server.aclose()
        await listener.aclose()

    anyio.run(joined, **LOOPS[loop])


@pytest.mark.parametrize("loop", LOOPS)
def test_bytes_and_ends_go_both_ways(loop: str) -> None:
    async def main(proxy: Proxy, client: Stream, server: Stream) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(client.send, [BODY])
            tasks.start_soon(server.send, [BODY])
            assert await receive(server, len(BODY)) == BODY
            assert await receive(client, len(BODY)) == BODY
            tasks.start_soon(client.aclose)
            assert await receive_all(server) == b""
            await server.aclose()
        for _ in range(100):
            await anyio.sleep(0.001 if proxy.connections else 0)
        assert proxy.bytes == {"there": len(BODY), "back": len(BODY)}
        assert (proxy.struck["connection"], proxy.struck["reset"], proxy.connections) == (1, 0, 0)

    through(smooth, main, loop)


@pytest.mark.parametrize("loop", LOOPS)
def test_a_connection_is_cut_behind_a_byte(loop: str) -> None:
    async def main(proxy: Proxy, client: Stream, server: Stream) -> None:
        await client.send([BODY[:150]])
        assert await receive(server, 100) == BODY[:100]
        for stream in (server, client):
            with pytest.raises(ConnectionError):
                await receive_all(stream)
        assert (proxy.struck["cut at a byte"], proxy.struck["reset"]) == (1, 1)

    through(lambda _: (Fate(cut_at=100), Fate()), main, loop)


@pytest.mark.parametrize("loop", LOOPS)
def test_cutting_tells_both_ends(loop: str) -> None:
    async def main(proxy: Proxy, client: Stream, server: Stream) -> None:
        await client.send([b"x"])
        await receive(server, 1)
        proxy.cut()
        for stream in (client, server):
            with pytest.raises(ConnectionError):
                await receive_all(stream)

    through(smooth, main, loop)


def test_one_side_that_breaks_it_breaks_the_other_one() -> None:
    async def main(proxy: Proxy, client: Stream, server: Stream) -> None:
        proxy.refusing = True
        other = await SocketNetwork().connect(*proxy.address)
        with pytest.raises(ConnectionError):
            await receive_all(other)
        await other.aclose()
        proxy.refusing = False
        proxy.target = (HOST, 1)  # nobody
        other = await SocketNetwork().connect(*proxy.address)
        with pytest.raises(ConnectionError):
            await receive_all(other)
        await other.aclose()

    through(smooth, main)


def test_pieces_are_small_and_late() -> None:
    async def main(proxy: Proxy, client: Stream, server: Stream) -> None:
        begin = time.monotonic()
        await client.send([b"abc"])
        assert await receive(server, 3) == b"abc"
        assert time.monotonic() - begin > 0.02
        assert proxy.struck["piece"] == 3

    through(lambda _: (Fate(delay_s=0.02, piece_bytes_max=1), Fate()), main)


def test_one_direction_stalls_until_it_is_resumed() -> None:
    async def main(proxy: Proxy, client: Stream, server: Stream) -> None:
        proxy.stall("there")
        await client.send([b"held"])
        await server.send([b"other way"])
        assert await receive(client, 9) == b"other way"
        with anyio.move_on_after(0.02):
            await receive(server, 1)
            raise AssertionError("it came through")
        proxy.resume("there")
        assert await receive(server, 4) == b"held"

    through(smooth, main)


def test_fates_are_drawn_from_the_seed() -> None:
    draw = partial(rough, cut_bytes_mean=1000, delay_s_max=0.1, piece_bytes_max=7)
    drawn = [draw(1)(number) for number in range(50)]
    assert drawn == [draw(1)(number) for number in range(50)] != [draw(2)(number) for number in range(50)]
    fates = [fate for pair in drawn for fate in pair]
    assert {fate.piece_bytes_max for fate in fates} == {1, 2, 3, 4, 5, 6, 7}
    assert 500 < sum(fate.cut_at for fate in fates) / 100 < 2000
    assert max(fate.delay_s for fate in fates) < 0.1
    assert rough(1)(5)[0].cut_at == float("inf")
