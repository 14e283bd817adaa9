"""`Proxy` forwards, cuts, stalls, delays and splits bytes as its faults say; a seed determines the faults."""

from __future__ import annotations

import random
import time
from functools import partial
from typing import TYPE_CHECKING

import anyio
import pytest

from delta_prop.platform.sockets import SocketNetwork
from tests.delta_prop.platform.networks import HOST, LOOPS, receive, receive_all
from tests.net.proxy import Faults, no_faults, proxy_to, random_faults

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from delta_prop.platform.ports import Stream
    from tests.net.proxy import ConnectionFaults, Proxy

BODY = random.Random(4).randbytes(300_000)


def run_through_proxy(
    draw_faults: Callable[[int], ConnectionFaults],
    main: Callable[[Proxy, Stream, Stream], Awaitable[None]],
    loop: str = "asyncio",
) -> None:
    """Run a test with both ends of a connection through a proxy."""

    async def run_with_proxy() -> None:
        network = SocketNetwork()
        listener = await network.listen(HOST, 0)
        with anyio.fail_after(60):
            async with proxy_to(listener.address, draw_faults=draw_faults) as proxy:
                client = await network.connect(*proxy.address)
                server = await listener.accept()
                await main(proxy, client, server)
                proxy.cut()
                await client.aclose()
                await server.aclose()
        await listener.aclose()

    anyio.run(run_with_proxy, **LOOPS[loop])


@pytest.mark.parametrize("loop", LOOPS)
def test_bytes_and_closes_pass_both_ways(loop: str) -> None:
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
        assert (proxy.counts["connection"], proxy.counts["reset"], proxy.connections) == (1, 0, 0)

    run_through_proxy(no_faults, main, loop)


@pytest.mark.parametrize("loop", LOOPS)
def test_connection_is_reset_after_a_byte_count(loop: str) -> None:
    async def main(proxy: Proxy, client: Stream, server: Stream) -> None:
        await client.send([BODY[:150]])
        assert await receive(server, 100) == BODY[:100]
        for stream in (server, client):
            with pytest.raises(ConnectionError):
                await receive_all(stream)
        assert (proxy.counts["cut at a byte"], proxy.counts["reset"]) == (1, 1)

    run_through_proxy(lambda _: (Faults(cut_at=100), Faults()), main, loop)


@pytest.mark.parametrize("loop", LOOPS)
def test_cut_resets_both_ends(loop: str) -> None:
    async def main(proxy: Proxy, client: Stream, server: Stream) -> None:
        await client.send([b"x"])
        await receive(server, 1)
        proxy.cut()
        for stream in (client, server):
            with pytest.raises(ConnectionError):
                await receive_all(stream)

    run_through_proxy(no_faults, main, loop)


def test_refused_or_failed_target_resets_the_client() -> None:
    async def main(proxy: Proxy, client: Stream, server: Stream) -> None:
        proxy.refusing = True
        refused = await SocketNetwork().connect(*proxy.address)
        with pytest.raises(ConnectionError):
            await receive_all(refused)
        await refused.aclose()
        proxy.refusing = False
        proxy.target = (HOST, 1)  # nobody listens on this port
        without_target = await SocketNetwork().connect(*proxy.address)
        with pytest.raises(ConnectionError):
            await receive_all(without_target)
        await without_target.aclose()

    run_through_proxy(no_faults, main)


def test_pieces_are_small_and_delayed() -> None:
    async def main(proxy: Proxy, client: Stream, server: Stream) -> None:
        started = time.monotonic()
        await client.send([b"abc"])
        assert await receive(server, 3) == b"abc"
        assert time.monotonic() - started > 0.02
        assert proxy.counts["piece"] == 3

    run_through_proxy(lambda _: (Faults(delay_s=0.02, piece_bytes_max=1), Faults()), main)


def test_one_direction_stalls_until_it_is_resumed() -> None:
    async def main(proxy: Proxy, client: Stream, server: Stream) -> None:
        proxy.stall("there")
        await client.send([b"held"])
        await server.send([b"other way"])
        assert await receive(client, 9) == b"other way"
        with anyio.move_on_after(0.02):
            await receive(server, 1)
            raise AssertionError("a byte passed the stalled direction")
        proxy.resume("there")
        assert await receive(server, 4) == b"held"

    run_through_proxy(no_faults, main)


def test_faults_are_drawn_from_the_seed() -> None:
    draw = partial(random_faults, cut_bytes_mean=1000, delay_s_max=0.1, piece_bytes_max=7)
    drawn = [draw(1)(number) for number in range(50)]
    assert drawn == [draw(1)(number) for number in range(50)] != [draw(2)(number) for number in range(50)]
    drawn_faults = [faults for pair in drawn for faults in pair]
    assert {faults.piece_bytes_max for faults in drawn_faults} == {1, 2, 3, 4, 5, 6, 7}
    assert 500 < sum(faults.cut_at for faults in drawn_faults) / 100 < 2000
    assert max(faults.delay_s for faults in drawn_faults) < 0.1
    assert random_faults(1)(5)[0].cut_at == float("inf")
