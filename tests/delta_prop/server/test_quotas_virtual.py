"""Quotas of a server in virtual time: their rates hold, and nobody else is affected."""

from __future__ import annotations

from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from delta_prop.client.connector import Connector
from delta_prop.client.producer import Producer
from delta_prop.client.settings import ClientSettings
from delta_prop.client.stream_lookup import describe_stream
from delta_prop.client.stream_producer import StreamProducer
from delta_prop.client.subscriber import Subscriber
from delta_prop.hosting.streams import Streams
from delta_prop.server.access import Access
from delta_prop.server.quotas import REQUESTS_BURST_MIN
from delta_prop.server.service import Service
from delta_prop.server.settings import ServerSettings
from delta_prop.testing import VirtualNetwork, run_virtual, virtual_world
from delta_prop_simulations.disk import SimDisk
from delta_prop_wire.delta import Delta, opaque
from delta_prop_wire.frames import Ack, Describe, Heartbeat, Hello, Nack, Subscribe
from delta_prop_wire.spec import ErrorCode
from delta_prop_wire.stream_requests import CreateStream
from tests.delta_prop.hosting.hosts import NO_RESERVE, keys_in
from tests.delta_prop.server.raw import ORIGIN, FrameClient, opaque_batch
from tests.delta_prop.server.test_server_streams import ask
from tests.delta_prop.server.tokens import TokenFile, table

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

MB = 1_000_000
SECONDS = 10.0
RATE, ROW_RATE = 1.0 * MB, 1_000.0
FREE = {"publish": True, "subscribe": True, "manage": True, "namespaces": '["*"]', "rate": "inf"}
LONG = ClientSettings(publish_timeout_s=600.0)


class QuotaHost:
    """A server of the streams default and orders, without any random delay, and a host of its clients."""

    def __init__(self, streams: Streams, service: Service, network: VirtualNetwork) -> None:
        self.streams = streams
        self.service = service
        self.network = network.at("client")
        self.world = virtual_world(5, network=self.network)

    def client(self, token: str, stream: str = "default") -> dict[str, Any]:
        """Return the arguments of a client."""
        return {"token": token, "stream": stream, "world": self.world, "settings": LONG}

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[FrameClient]:
        assert self.service.address is not None
        stream = await self.network.connect("server", self.service.address.port)
        try:
            yield FrameClient(stream)
        finally:
            await stream.aclose()

    def refused(self) -> dict[str, int]:
        assert self.service.counters is not None
        return self.service.counters.nacks


def run_hosted(main: Callable[[QuotaHost], Awaitable[None]], tokens: str = "", **settings: Any) -> None:
    tokens += table("free", "free", **FREE)

    async def serve() -> None:
        network = VirtualNetwork(1, host="server")
        world = virtual_world(1, network=network, disk=SimDisk(1))
        async with (
            Streams(data="data", log=NO_RESERVE, world=world) as streams,
            anyio.create_task_group() as tasks,
        ):
            await streams.create("orders", 2)
            access = Access(world, TokenFile(tokens))
            service = Service(streams, ServerSettings(host="server", **settings), access=access)
            await tasks.start(service.run)
            try:
                await main(QuotaHost(streams, service, network))
            finally:
                service.stop()

    run_virtual(serve)


async def publish_for(
    seconds: float, more: dict[str, Any], size: int, rows: int = 10, name: str = "p"
) -> int:
    """Publish as fast as possible by several calls at a time; return the rows acknowledged in time."""
    end = anyio.current_time() + seconds
    acked = 0

    async def publish(p: Producer, number: int) -> None:
        nonlocal acked
        deltas = [Delta(f"{name}-{number}-{row}", opaque(b"x" * size)) for row in range(rows)]
        while anyio.current_time() < end:
            await p.publish(*deltas)
            if anyio.current_time() <= end:
                acked += rows

    async with Producer("server", name=name, **more) as p, anyio.create_task_group() as tasks:
        for number in range(30):
            tasks.start_soon(publish, p, number)
    return acked


INBOUND = ["token", "client", "stream"]


def limited(scope: str, **limits: float) -> tuple[str, dict[str, Any], dict[str, float]]:
    """Return the token file, the server's settings and those of the stream with these limits."""
    in_token = limits if scope == "token" else {}
    tokens = table("limited", "limited", **FREE, **in_token)
    settings = {f"client_{name}": value for name, value in limits.items()} if scope == "client" else {}
    return tokens, settings, limits if scope == "stream" else {}


@pytest.mark.parametrize("scope", INBOUND)
@pytest.mark.parametrize(("quota", "size"), [("bytes_in_s", 10_000), ("rows_in_s", 100)])
def test_inbound_rate_holds(scope: str, quota: str, size: int) -> None:
    rate = RATE if quota == "bytes_in_s" else ROW_RATE
    tokens, settings, of_stream = limited(scope, **{quota: rate})

    async def main(host: QuotaHost) -> None:
        if of_stream:
            await host.streams.alter("default", of_stream)
            await anyio.sleep(1)
        token = "free" if of_stream else "limited"
        rows = await publish_for(SECONDS, host.client(token), size)
        amount = rows * (size if quota == "bytes_in_s" else 1)
        assert 0.95 * rate * SECONDS <= amount <= 1.05 * rate * SECONDS
        assert host.refused() == {}, "deltas wait, and none are refused"
        keys = keys_in(await host.streams.open())
        assert len(keys) >= rows

    run_hosted(main, tokens, **settings)


async def fill(host: QuotaHost, calls: int, size: int, rows: int = 10, stream: str = "default") -> None:
    """Publish without a quota of a token."""
    more = host.client("free", stream) | ({} if stream == "default" else {"partition": 0})
    async with Producer("server", name="filler", **more) as p:
        for number in range(calls):
            deltas = [Delta(f"f{number}-{row}", opaque(b"x" * size)) for row in range(rows)]
            await p.publish(*deltas)


async def read_for(seconds: float, more: dict[str, Any], *, deltas: bool = False) -> tuple[int, int]:
    """Read as fast as possible; return the rows and the bytes of their content."""
    rows = size = 0
    with anyio.move_on_after(seconds):
        async with Subscriber("server", "*", start="earliest", **more) as s:
            async for _, _, delta in s:
                rows += 1
                size += len(delta.operation.data)
    return rows, size


@pytest.mark.parametrize("is_pushed", [False, True])
@pytest.mark.parametrize("scope", INBOUND)
@pytest.mark.parametrize(("quota", "size"), [("bytes_out_s", 10_000), ("rows_out_s", 100)])
def test_outbound_rate_holds(scope: str, quota: str, size: int, is_pushed: bool) -> None:
    rate = RATE if quota == "bytes_out_s" else ROW_RATE
    tokens, settings, of_stream = limited(scope, **{quota: rate})

    async def main(host: QuotaHost) -> None:
        if of_stream:
            await host.streams.alter("default", of_stream)
            await anyio.sleep(1)
        token = "free" if of_stream else "limited"
        if not is_pushed:
            await fill(host, 150, size)
        async with anyio.create_task_group() as tasks:
            if is_pushed:
                tasks.start_soon(fill, host, 150, size)
            rows, read_bytes = await read_for(SECONDS, host.client(token))
        amount = read_bytes if quota == "bytes_out_s" else rows
        assert 0.95 * rate * SECONDS <= amount <= 1.05 * rate * SECONDS
        assert host.refused() == {}

    if quota == "rows_out_s":
        rate /= 10
        tokens, settings, of_stream = limited(scope, **{quota: rate})
    run_hosted(main, tokens, **settings)


@pytest.mark.parametrize("scope", ["token", "client"])
def test_rate_of_requests_holds(scope: str) -> None:
    tokens, settings, _ = limited(scope, requests_s=100)

    async def main(host: QuotaHost) -> None:
        async with host.connected() as raw:
            await raw.hello(token="limited", client="c")
            answered, number, end = 0, 1, anyio.current_time() + SECONDS
            while anyio.current_time() < end:
                number += 1
                answer = await ask(raw, Describe(), number)
                if isinstance(answer, Ack):
                    answered += 1
                else:
                    assert answer.code is ErrorCode.QUOTA_EXCEEDED
                    assert answer.retry_after_ms is not None
                    await anyio.sleep(answer.retry_after_ms / 1_000)
            assert 950 <= answered <= 1_050
            refused = host.refused()["QUOTA_EXCEEDED"]
            assert refused > 100
            counts = host.service.quota_counts
            assert {(name.scope, name.owner, name.quota) for name in counts} == {
                (scope, "limited", "requests_s")
            }
            (found,) = counts.values()
            assert (found.limit, found.passed, found.refused) == (100.0, answered, refused), "no hello counts"

    run_hosted(main, tokens, **settings)


@pytest.mark.parametrize("rate", [5.0, 0.5])
@pytest.mark.parametrize("scope", ["token", "client"])
def test_low_rate_of_requests_lets_clients_that_connect_for_each_one_work_slowly(
    scope: str, rate: float
) -> None:
    tokens, settings, _ = limited(scope, requests_s=rate)

    async def main(host: QuotaHost) -> None:
        connector = Connector("server", token="limited", tls=None, settings=LONG, world=host.world)
        connector.open()
        start = anyio.current_time()
        for number in range(1, 13):
            assert (await describe_stream("orders", connector)).count == 2
            expected_s = max(number - REQUESTS_BURST_MIN, 0) / rate
            assert expected_s <= anyio.current_time() - start + 0.01 <= expected_s + 1 / rate + 1.0
        more = host.client("limited", "orders")
        async with StreamProducer("server", name="p", **more) as p:
            for number in range(10):
                await p.publish(Delta(f"n{number}", opaque(b"x")))
        assert anyio.current_time() - start <= 12 / rate + 1.0

    run_hosted(main, tokens, **settings)


def test_later_hello_of_a_connection_is_a_request() -> None:
    tokens, settings, _ = limited("token", requests_s=1)

    async def main(host: QuotaHost) -> None:
        async with host.connected() as raw:
            await raw.hello(token="limited")
            answers = [await ask(raw, Hello(token="limited"), number) for number in range(2, 8)]
            assert [isinstance(answer, Ack) for answer in answers] == [True] * 4 + [False] * 2

    run_hosted(main, tokens, **settings)


def test_rate_holds_over_all_connections_of_a_token_and_each_gets_its_share() -> None:
    tokens, settings, _ = limited("token", bytes_in_s=RATE)

    async def main(host: QuotaHost) -> None:
        rows: dict[str, int] = {}

        async def publish(name: str) -> None:
            rows[name] = await publish_for(SECONDS, host.client("limited"), 10_000, name=name)

        async with anyio.create_task_group() as tasks:
            for name in ("a", "b", "c", "d"):
                tasks.start_soon(publish, name)
        total = sum(rows.values()) * 10_000
        assert 0.95 * RATE * SECONDS <= total <= 1.05 * RATE * SECONDS
        assert max(rows.values()) <= 1.3 * min(rows.values())

    run_hosted(main, tokens, **settings)


def test_outbound_rate_holds_over_all_subscribers_and_each_gets_its_share() -> None:
    tokens, settings, _ = limited("token", bytes_out_s=RATE)

    async def main(host: QuotaHost) -> None:
        await fill(host, 150, 10_000)
        found: list[int] = []

        async def read() -> None:
            found.append((await read_for(SECONDS, host.client("limited")))[1])

        async with anyio.create_task_group() as tasks:
            for _ in range(4):
                tasks.start_soon(read)
        assert 0.95 * RATE * SECONDS <= sum(found) <= 1.05 * RATE * SECONDS
        assert max(found) <= 1.3 * min(found)

    run_hosted(main, tokens, **settings)


async def send_rows(raw: FrameClient, client: str, origin: int, batches: int) -> float:
    """Send batches of 100 rows one after the other; return the seconds until all are acknowledged."""
    await raw.hello(origin, token="limited", client=client)
    start = anyio.current_time()
    for number in range(batches):
        await raw.send(opaque_batch(1 + 100 * number, 100, origin=origin))
        await raw.until_acked(100 + 100 * number)
    return anyio.current_time() - start


def test_each_client_of_a_token_has_a_quota_of_its_own() -> None:
    tokens, settings, _ = limited("client", rows_in_s=1_000.0)

    async def main(host: QuotaHost) -> None:
        seconds: dict[str, float] = {}

        async def send(name: str, client: str, origin: int) -> None:
            async with host.connected() as raw:
                seconds[name] = await send_rows(raw, client, origin, 20)

        async with anyio.create_task_group() as tasks:
            for number, (name, client) in enumerate([("a", "a"), ("b1", "b"), ("b2", "b")]):
                tasks.start_soon(send, name, client, ORIGIN + (number << 20))
        assert seconds["a"] == pytest.approx(1.9, abs=0.05), "100 rows pass at once, 1,000 each second"
        assert seconds["b2"] == pytest.approx(3.9, abs=0.15), "two connections of one client share its quota"

    run_hosted(main, tokens, **settings)


# --- neighbours


async def ack_times(host: QuotaHost, more: dict[str, Any], name: str) -> list[float]:
    """Publish now and then; return the times of the acknowledgements."""
    times = []
    more |= {} if more["stream"] == "default" else {"partition": 0}
    start = anyio.current_time()
    async with Producer("server", name=name, **more) as p:
        for number in range(40):
            await p.publish(Delta(f"n{number}", opaque(b"x" * 500)))
            times.append(anyio.current_time() - start)
            await anyio.sleep(0.05)
    return times


NEIGHBOURS = {
    "another token": ("token", "limited", "default", "free", "default"),
    "another token in another stream": ("token", "limited", "orders", "free", "default"),
    "another client of the token": ("client", "limited", "default", "limited", "default"),
    "another stream": ("stream", "free", "orders", "free", "default"),
}


@pytest.mark.parametrize("case", NEIGHBOURS)
@pytest.mark.parametrize("quotas", [("bytes_in_s", "rows_in_s"), ("bytes_out_s", "rows_out_s")])
def test_limited_neighbour_changes_no_time_of_an_acknowledgement(case: str, quotas: tuple[str, ...]) -> None:
    scope, its_token, its_stream, own_token, own_stream = NEIGHBOURS[case]
    tokens, settings, of_stream = limited(scope, **dict.fromkeys(quotas, 100_000.0))
    found: list[list[float]] = []

    async def main(host: QuotaHost, *, has_neighbour: bool) -> None:
        if of_stream:
            await host.streams.alter(its_stream, of_stream)
        await host.streams.open("orders", 0)
        more = host.client(its_token, its_stream)
        if its_stream == "orders":
            more["partition"] = 0
        await fill(host, 20, 1_000, stream=its_stream)
        await anyio.sleep(5.0 - anyio.current_time() % 5.0)
        async with anyio.create_task_group() as tasks:
            if has_neighbour and quotas[0] == "bytes_in_s":
                tasks.start_soon(partial(publish_for, 100.0, more, 100, name="limited"))
            elif has_neighbour:
                tasks.start_soon(partial(read_for, 100.0, more))
            await anyio.sleep(1.0)
            found.append(await ack_times(host, host.client(own_token, own_stream), "own"))
            tasks.cancel_scope.cancel()

    for has_neighbour in (False, True):
        run_hosted(partial(main, has_neighbour=has_neighbour), tokens, **settings)
    assert len(found[0]) == 40
    assert found[0] == found[1]


# --- what waits


def test_frame_that_waits_long_costs_neither_the_connection_nor_a_dot() -> None:
    tokens, settings, _ = limited("token", bytes_in_s=10_000.0)

    async def main(host: QuotaHost) -> None:
        async with host.connected() as raw, anyio.create_task_group() as tasks:
            await raw.hello(ORIGIN, token="limited")

            async def beat() -> None:
                for number in range(1, 20):
                    await anyio.sleep(4)
                    await raw.send(Heartbeat(number))

            tasks.start_soon(beat)
            await raw.send(opaque_batch(1, 20_000))
            await raw.until_acked(20_000)
            start = anyio.current_time()
            await raw.send(opaque_batch(20_001))
            with anyio.fail_after(100):
                while not [row for row in host.service.connections() if row["held"]]:  # noqa: ASYNC110
                    await anyio.sleep(0.1)
            while anyio.current_time() < start + 100:
                frame = await raw.next()
                assert not isinstance(frame, Nack)
                if isinstance(frame, Ack) and frame.sequence == 20_001:
                    break
            assert 20 < anyio.current_time() - start < 60, "longer than a silent client is waited for"
            await raw.send(Subscribe(9, Describe()))
            await raw.until(Ack)
            tasks.cancel_scope.cancel()
        assert len(keys_in(await host.streams.open())) == 20_001

    run_hosted(main, tokens, **settings)


def test_first_credit_is_what_the_quota_gives_in_a_short_time() -> None:
    tokens, _, _ = limited("token", bytes_in_s=100_000.0)

    async def main(host: QuotaHost) -> None:
        for token, origin, credit in (
            ("limited", ORIGIN, (20_000, 50_000)),
            ("free", ORIGIN + (1 << 20), (20_000, 8 << 20)),
        ):
            async with host.connected() as raw:
                assert (await raw.hello(origin, token=token)).credit == credit

    run_hosted(main, tokens)


async def wait_held(host: QuotaHost) -> None:
    with anyio.fail_after(10):
        while not any(row["held"] for row in host.service.connections()):  # noqa: ASYNC110
            await anyio.sleep(0.01)


def test_server_that_ends_does_not_wait_for_a_quota() -> None:
    tokens, settings, _ = limited("token", bytes_in_s=1_000.0)

    async def main(host: QuotaHost) -> None:
        async with host.connected() as raw:
            await raw.hello(ORIGIN, token="limited")
            await raw.send(opaque_batch(1, 1_000))
            await raw.until_acked(1_000)
            await raw.send(opaque_batch(1_001))
            await wait_held(host)
            start = anyio.current_time()
            host.service.stop()
            nack = await raw.until(Nack)
            assert nack.code is ErrorCode.SHUTTING_DOWN
            assert anyio.current_time() - start < 2
        assert len(keys_in(await host.streams.open())) == 1_000

    run_hosted(main, tokens, **settings)


def test_disconnect_while_a_frame_waits_ends_the_connection() -> None:
    tokens, settings, _ = limited("token", bytes_in_s=1_000.0, connections=1)

    async def main(host: QuotaHost) -> None:
        async with host.connected() as raw:
            await raw.hello(ORIGIN, token="limited")
            await raw.send(opaque_batch(1, 9_000))
            await raw.until_acked(9_000)
        for _ in range(3):
            await anyio.sleep(1)
            async with host.connected() as raw:
                await raw.hello(ORIGIN, token="limited")
                await raw.send(opaque_batch(9_001))
                await wait_held(host)
            with anyio.fail_after(100):
                while host.service.connections():  # noqa: ASYNC110
                    await anyio.sleep(0.1)

    run_hosted(main, tokens, **settings)


def test_connections_of_a_token_are_bounded() -> None:
    tokens, settings, _ = limited("token", connections=2)

    async def main(host: QuotaHost) -> None:
        async with host.connected() as first, host.connected() as second:
            await first.hello(token="limited")
            await second.hello(token="limited")
            for token, is_allowed in (("limited", False), ("free", True)):
                async with host.connected() as third:
                    await third.send(Subscribe(1, Hello(token=token)))
                    answer = await third.next()
                    assert isinstance(answer, Ack) is is_allowed
                    if isinstance(answer, Nack):
                        assert (answer.code, answer.retry_after_ms) == (ErrorCode.QUOTA_EXCEEDED, 1_000)
                        assert await third.next() is None
        await anyio.sleep(1)
        async with host.connected() as raw:
            await raw.hello(token="limited")
        counts = {name.quota: count for name, count in host.service.quota_counts.items()}["connections"]
        assert (counts.limit, counts.passed, counts.refused) == (2, 3, 1)

    run_hosted(main, tokens, **settings)


def test_reconnecting_brings_no_new_quota() -> None:
    tokens, settings, _ = limited("token", rows_in_s=1_000.0)

    async def main(host: QuotaHost) -> None:
        start, sent = anyio.current_time(), 0
        while anyio.current_time() < start + SECONDS:
            async with host.connected() as raw:
                await raw.hello(ORIGIN, token="limited")
                await raw.send(opaque_batch(1 + sent, 100, epoch=1 + sent // 100))
                await raw.until_acked(100 + sent)
            sent += 100
        assert 9_500 <= sent <= 10_500

    run_hosted(main, tokens, **settings)


def test_number_of_streams_and_partitions_is_bounded() -> None:
    async def main(host: QuotaHost) -> None:
        async with host.connected() as raw:
            await raw.hello(token="free")
            for number, (request, problem) in enumerate(
                [
                    (CreateStream("a", 6), "would have 9 partitions; the maximum is 8 (partitions_max)"),
                    (CreateStream("a", 5, dry_run=True), None),
                    (CreateStream("a", 4), None),
                    (CreateStream("b", 1), "there are 3 streams; the maximum is 3 (streams_max)"),
                    (CreateStream("a", 4, if_not_exists=True), None),
                ],
                2,
            ):
                answer = await ask(raw, request, number)
                if problem is None:
                    assert isinstance(answer, Ack), answer
                else:
                    assert isinstance(answer, Nack)
                    assert answer.code is ErrorCode.BAD_REQUEST
                    assert answer.text is not None
                    assert problem in answer.text
        assert [*host.streams.catalogue.streams] == ["a", "default", "orders"]

    run_hosted(main, streams_max=3, partitions_max=8)


def test_streams_created_together_keep_the_bound() -> None:
    async def main(host: QuotaHost) -> None:
        async with host.connected() as raw:
            await raw.hello(token="free")
            await raw.send(*[Subscribe(number, CreateStream(f"s{number}")) for number in range(2, 10)])
            answers = [await raw.next() for _ in range(8)]
            assert sum(isinstance(answer, Ack) for answer in answers) == 3
        assert len(host.streams.catalogue.streams) == 5

    run_hosted(main, streams_max=5)
