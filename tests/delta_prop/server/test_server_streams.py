"""A server of several streams: each connection works with the partition that its hello names."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from delta_prop.client.producer import Producer
from delta_prop.client.subscriber import Subscriber
from delta_prop.hosting.streams import Streams
from delta_prop.server.access import Access
from delta_prop.server.service import Service
from delta_prop.server.settings import ServerSettings
from delta_prop.testing import VirtualNetwork, run_virtual, virtual_world
from delta_prop_simulations.disk import SimDisk
from delta_prop_wire.cursor import Cursor
from delta_prop_wire.delta import Delta, Priority, make_origin, opaque, producer_id_of
from delta_prop_wire.errors import Refused, UsageError
from delta_prop_wire.frames import (
    Ack,
    BatchFrame,
    Credit,
    Describe,
    Description,
    FindOffsets,
    FoundOffsets,
    Hello,
    Nack,
    OriginClaim,
    PartitionRange,
    PartitionStart,
    Request,
    Start,
    StartAt,
    Subscribe,
    Subscription,
)
from delta_prop_wire.requests import join_pages
from delta_prop_wire.spec import ErrorCode
from delta_prop_wire.stamp import LogName, Stamp
from delta_prop_wire.stream_requests import AlterStream, CreateStream, DeleteStream
from delta_prop_wire.topics import ALL
from tests.delta_prop.hosting.hosts import NO_RESERVE, keys_in
from tests.delta_prop.server.raw import FrameClient, opaque_batch
from tests.delta_prop.server.stored_logs import write_log
from tests.delta_prop.server.tokens import TokenFile, table

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from delta_prop.platform.ports import World

ORDERS = LogName(1, 2)
ORIGIN = make_origin(producer_id_of("p", 1), Priority.NORMAL, 2)
CLAIM = OriginClaim(ORIGIN, 0, 1)
IN_ORDERS = {"stream": 1, "partition": 2}


class Host:
    """A server of streams on a simulated disk, and the host of its clients."""

    def __init__(self, streams: Streams, service: Service, network: VirtualNetwork) -> None:
        self.streams = streams
        self.service = service
        self.network = network.at("client")
        self.world: World = virtual_world(5, network=self.network)

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[FrameClient]:
        assert self.service.address is not None
        stream = await self.network.connect("server", self.service.address.port)
        try:
            yield FrameClient(stream)
        finally:
            await stream.aclose()


@asynccontextmanager
async def serving(disk: SimDisk, tokens: TokenFile | None = None, seed: int = 1) -> AsyncIterator[Host]:
    network = VirtualNetwork(seed, host="server")
    world = virtual_world(seed, thread_delay_s_max=0.002, network=network, disk=disk)
    async with (
        Streams(data="data", log=NO_RESERVE, world=world) as streams,
        anyio.create_task_group() as tasks,
    ):
        access = None if tokens is None else Access(world, tokens)
        service = Service(streams, ServerSettings(host="server", allow_anonymous=True), access=access)
        await tasks.start(service.run)
        try:
            yield Host(streams, service, network)
        finally:
            service.stop()


async def ask(raw: FrameClient, request: Request, number: int = 2) -> Ack | Nack:
    """Return the answer to a request, its pages joined."""
    await raw.send(Subscribe(number, request))
    pages = []
    while True:
        frame = await raw.next()
        assert frame is not None
        if isinstance(frame, Nack):
            return frame
        if isinstance(frame, Ack) and frame.correlation_id == number:
            assert frame.response is not None
            pages.append(frame.response)
            if not frame.more:
                return replace(frame, response=join_pages(pages))


def orders_batch(base: int, count: int = 1) -> BatchFrame:
    frame = opaque_batch(base, count, origin=ORIGIN)
    return replace(frame, stamp=Stamp(stream=1, partition=2))


def test_frames_wait_until_the_partition_of_the_hello_is_open() -> None:
    disk = SimDisk(1)

    async def main() -> None:
        async with serving(disk) as host:
            await host.streams.create("orders", 3)
            async with host.connected() as raw:
                hello = Hello(origins=(CLAIM,), **IN_ORDERS)
                await raw.send(Subscribe(1, hello), orders_batch(1, 3))
                welcome = await raw.until(Ack)
                assert welcome.welcome.origins[0][0] == ORIGIN
                await raw.until_acked(3)
            p = await host.streams.open("orders", 2)
            assert welcome.welcome.log.log_id == p.internals().partition.log.log_id
            assert keys_in(p) == ["v1", "v2", "v3"]
            assert keys_in(await host.streams.open()) == []

    run_virtual(main)


def test_logged_batches_name_their_stream_and_partition() -> None:
    async def main() -> None:
        async with serving(SimDisk(1)) as host:
            await host.streams.create("orders", 3)
            async with host.connected() as producer, host.connected() as reader:
                await producer.send(Subscribe(1, Hello(origins=(CLAIM,), **IN_ORDERS)), orders_batch(1))
                await producer.until_acked(1)
                await reader.hello(**IN_ORDERS)
                partitions = (PartitionStart(2),)
                await reader.subscribe(credit=Credit(100, 1 << 20), stream=1, partitions=partitions)
                frame = await reader.until(BatchFrame)
            assert (frame.stamp.stream, frame.stamp.partition) == ORDERS

    run_virtual(main)


@pytest.mark.parametrize(
    ("hello", "code"),
    [
        (Hello(stream=7), ErrorCode.UNKNOWN_STREAM),
        (Hello(stream=1, partition=3), ErrorCode.WRONG_PARTITION),
        (Hello(partition=1), ErrorCode.WRONG_PARTITION),
        (Hello(stream=1, partition=1, origins=(CLAIM,)), ErrorCode.WRONG_PARTITION),
        (Hello(origins=(CLAIM,)), ErrorCode.WRONG_PARTITION),
        (Hello(stream=1, partition=2, origins=(OriginClaim(ORIGIN),)), ErrorCode.WRONG_PARTITION),
    ],
)
def test_hello_for_a_wrong_partition_is_refused(hello: Hello, code: ErrorCode) -> None:
    async def main() -> None:
        async with serving(SimDisk(1)) as host:
            await host.streams.create("orders", 3)
            async with host.connected() as raw:
                answer = await ask(raw, hello, 1)
                assert isinstance(answer, Nack)
                assert (answer.code, answer.correlation_id) == (code, 1)

    run_virtual(main)


def test_connection_changes_its_partition_only_while_it_is_unused() -> None:
    async def main() -> None:
        async with serving(SimDisk(1)) as host:
            await host.streams.create("orders", 3)
            async with host.connected() as raw:
                await raw.hello()
                first = await ask(raw, Hello(**IN_ORDERS), 2)
                second = await ask(raw, Hello(), 3)
                assert isinstance(first, Ack)
                assert isinstance(second, Ack)
                assert first.welcome is not None
                assert second.welcome is not None
                assert first.welcome.log != second.welcome.log
                third = await ask(raw, Hello(origins=(CLAIM,), **IN_ORDERS), 4)
                assert isinstance(third, Ack)
                refused = await ask(raw, Hello(), 5)
                assert isinstance(refused, Nack)
                assert refused.code is ErrorCode.WRONG_PARTITION
                await raw.send(orders_batch(1))
                await raw.until_acked(1)

    run_virtual(main)


def test_frame_or_subscription_for_another_partition_is_refused() -> None:
    async def main() -> None:
        async with serving(SimDisk(1)) as host:
            await host.streams.create("orders", 3)
            async with host.connected() as raw:
                await raw.send(Subscribe(1, Hello(origins=(CLAIM,), **IN_ORDERS)))
                await raw.until(Ack)
                for number, stamp in enumerate((None, Stamp(), Stamp(stream=1, partition=1)), 1):
                    await raw.send(replace(orders_batch(1), sequence=number, stamp=stamp))
                    nack = await raw.until(Nack)
                    assert (nack.code, nack.sequence) == (ErrorCode.WRONG_PARTITION, number)
                earliest = Start(StartAt.EARLIEST)
                for number, (request, code) in enumerate(
                    [
                        (Subscription(1, (ALL,), earliest, stream=7), ErrorCode.UNKNOWN_STREAM),
                        (Subscription(1, (ALL,), earliest, stream=1), ErrorCode.WRONG_PARTITION),
                        (
                            Subscription(1, (ALL,), earliest, stream=1, partitions=(PartitionStart(1),)),
                            ErrorCode.WRONG_PARTITION,
                        ),
                        (
                            Subscription(1, (ALL,), earliest, stream=1, partitions=(PartitionStart(9),)),
                            ErrorCode.WRONG_PARTITION,
                        ),
                    ],
                    10,
                ):
                    answer = await ask(raw, request, number)
                    assert isinstance(answer, Nack)
                    assert answer.code is code
                partitions = (PartitionStart(2, start=earliest, credit=Credit(5, 1000)),)
                granted = await ask(raw, Subscription(1, (ALL,), stream=1, partitions=partitions), 20)
                assert isinstance(granted, Ack)
            assert keys_in(await host.streams.open("orders", 2)) == []

    run_virtual(main)


def test_requests_change_streams_and_describe_them() -> None:
    disk = SimDisk(1)

    async def main() -> None:
        async with serving(disk) as host, host.connected() as raw:
            await raw.hello()

            async def change(number: int, request: Request) -> tuple[str, int, int, dict[str, Any]]:
                answer = await ask(raw, request, number)
                assert isinstance(answer, Ack)
                assert isinstance(answer.response, Description)
                (found,) = answer.response.streams
                return found.name, found.stream, found.count, dict(found.settings)

            settings = {"retention_s": 60.0}
            assert await change(2, CreateStream("rows", 2, settings)) == ("rows", 1, 2, settings)
            assert await change(3, CreateStream("rows", 2, if_not_exists=True)) == ("rows", 1, 2, settings)
            assert await change(4, AlterStream("rows", {"retention_s": None})) == ("rows", 1, 2, {})
            assert await change(5, CreateStream("more", dry_run=True)) == ("more", 2, 1, {})
            for number, request in enumerate(
                [
                    CreateStream("rows", 2),
                    CreateStream("rows", 3, if_not_exists=True),
                    CreateStream("a/b"),
                    AlterStream("rows", {"nonsense": 1}),
                    DeleteStream("default"),
                ],
                10,
            ):
                nack = await ask(raw, request, number)
                assert isinstance(nack, Nack)
                assert (nack.code, nack.correlation_id) == (ErrorCode.BAD_REQUEST, number)
            for number, request in enumerate(
                [AlterStream("nosuch", {}), DeleteStream("nosuch"), Describe("nosuch")], 20
            ):
                nack = await ask(raw, request, number)
                assert isinstance(nack, Nack)
                assert nack.code is ErrorCode.UNKNOWN_STREAM
            everything = await ask(raw, Describe(), 30)
            assert isinstance(everything.response, Description)  # type: ignore[union-attr]
            assert [(one.name, len(one.partitions)) for one in everything.response.streams] == [  # type: ignore[union-attr]
                ("default", 1),
                ("rows", 0),
            ]
            found = await ask(raw, FindOffsets((Start(StartAt.LATEST),), 1, 1), 31)
            assert isinstance(found.response, FoundOffsets)  # type: ignore[union-attr]
            one = await ask(raw, Describe("rows", ranges=True), 32)
            assert [each.partition for each in one.response.streams[0].partitions] == [1]  # type: ignore[union-attr]
            assert await change(33, DeleteStream("rows")) == ("rows", 1, 2, {})
            assert [*host.streams.catalogue.streams] == ["default"]

    run_virtual(main)


def test_description_of_many_partitions_comes_in_pages() -> None:
    disk = SimDisk(1)

    async def main() -> None:
        async with serving(disk) as host, host.connected() as raw:
            await raw.hello()
            for number in range(30):
                await host.streams.create("n" * 240 + str(number), 2)
            await host.streams.create("wide", 1_000)
            for number in range(1_000):
                write_log(disk, f"streams/wide-31/{number}", end=number)
            wide = await ask(raw, Describe("wide", ranges=True), 2)
            assert isinstance(wide, Ack)
            assert isinstance(wide.response, Description)
            assert [each.partition for each in wide.response.streams[0].partitions] == [*range(1_000)]
            everything = await ask(raw, Describe(), 3)
            assert isinstance(everything, Ack)
            assert isinstance(everything.response, Description)
            assert len(everything.response.streams) == 32

    run_virtual(main)


async def describe_ranges(host: Host, stream: str) -> tuple[PartitionRange, ...]:
    async with host.connected() as raw:
        await raw.hello()
        answer = await ask(raw, Describe(stream, ranges=True))
        assert isinstance(answer, Ack)
        assert isinstance(answer.response, Description)
        return answer.response.streams[0].partitions


async def ranges_of(host: Host, stream: str) -> dict[int, tuple[int, int]]:
    """Return the start and the end of each partition that a description with ranges has."""
    ranges = await describe_ranges(host, stream)
    numbers = [each.partition for each in ranges]
    assert numbers == sorted(numbers)
    return {each.partition: (each.start_offset, each.log.next_offset) for each in ranges}


async def publish_in(host: Host, partition: int, count: int) -> None:
    propagator = await host.streams.open("orders", partition)
    await propagator.publish(*(Delta(f"v{number}", opaque(b"x")) for number in range(count)))


def open_numbers(host: Host) -> list[int]:
    return [name.partition for name in host.streams.open_partitions() if name.stream == 1]


def test_description_of_ranges_neither_creates_nor_opens_a_partition() -> None:
    disk = SimDisk(1)

    async def first() -> None:
        async with serving(disk) as host:
            await host.streams.create("orders", 65_535)
            assert await ranges_of(host, "orders") == {}
            assert open_numbers(host) == []
            assert disk.list("streams/orders-1") == []
            await publish_in(host, 7, 3)
            await publish_in(host, 65_534, 2)
            assert await ranges_of(host, "orders") == {7: (0, 3), 65_534: (0, 2)}

    async def second() -> None:
        async with serving(disk) as host:
            assert await ranges_of(host, "orders") == {7: (0, 3), 65_534: (0, 2)}, "they are closed"
            assert open_numbers(host) == []
            described = (await describe_ranges(host, "orders"))[0].log
            log = (await host.streams.open("orders", 7)).internals().partition.log
            assert described == Cursor(log.log_id, log.epoch, log.high_watermark)
            await publish_in(host, 7, 4)
            assert await ranges_of(host, "orders") == {7: (0, 7), 65_534: (0, 2)}

    run_virtual(first)
    run_virtual(second)


def test_description_of_ranges_recovers_partitions_that_were_not_closed() -> None:
    disks = [SimDisk(1)]

    async def first() -> None:
        async with serving(disks[0]) as host:
            await host.streams.create("orders", 3)
            await publish_in(host, 1, 5)
            disks.append(disks[0].kill())

    async def second() -> None:
        async with serving(disks[1]) as host:
            assert await ranges_of(host, "orders") == {1: (0, 5)}
            assert open_numbers(host) == [1]

    run_virtual(first)
    run_virtual(second)


def test_streams_are_changed_only_with_the_right_to_manage() -> None:
    tokens = TokenFile(
        table("reader", "r", subscribe=True, admin=True, namespaces='["*"]') + table("boss", "b", manage=True)
    )

    async def main() -> None:
        async with serving(SimDisk(1), tokens) as host:
            for request in (CreateStream("rows"), AlterStream("rows", {}), DeleteStream("rows")):
                async with host.connected() as raw:
                    await raw.hello(token="r")
                    nack = await ask(raw, request)
                    assert isinstance(nack, Nack)
                    assert nack.code is ErrorCode.UNAUTHORIZED
                    assert await raw.next() is None
            assert [*host.streams.catalogue.streams] == ["default"]
            async with host.connected() as raw:
                await raw.hello(token="b")
                assert isinstance(await ask(raw, CreateStream("rows")), Ack)

    run_virtual(main)


def test_deletion_ends_only_the_connections_of_the_stream() -> None:
    async def main() -> None:
        async with serving(SimDisk(1)) as host:
            await host.streams.create("orders", 3)
            await host.streams.create("rows", 1)
            async with host.connected() as orders, host.connected() as rows, host.connected() as own:
                await orders.hello(**IN_ORDERS)
                await rows.hello(stream=2)
                await own.hello()
                await host.streams.delete("orders")
                nack = await orders.until(Nack)
                assert nack.code is ErrorCode.SHUTTING_DOWN
                assert await orders.next() is None
                for raw in (rows, own):
                    assert isinstance(await ask(raw, Describe()), Ack)

    run_virtual(main)


def test_producer_and_reader_survive_a_change_that_reopens_the_partition() -> None:
    async def main() -> None:
        async with serving(SimDisk(1)) as host:
            await host.streams.create("orders", 2)
            received: list[str] = []
            more: dict[str, Any] = {"stream": "orders", "partition": 1, "world": host.world}

            async def read() -> None:
                async with Subscriber("server", "*", start="earliest", **more) as s:
                    async for _, _, delta in s:
                        received.append(delta.vector_id)

            async with anyio.create_task_group() as tasks:
                async with Producer("server", name="p", **more) as p:
                    tasks.start_soon(read)
                    for number in range(60):
                        await p.publish(Delta(f"v{number}", opaque(b"x")))
                        if number % 20 == 10:
                            compress = "lz4" if number < 30 else "none"
                            await host.streams.alter("orders", {"compress": compress})
                with anyio.fail_after(100):
                    while len(received) < 60:  # noqa: ASYNC110 - received by another task
                        await anyio.sleep(0.1)
                tasks.cancel_scope.cancel()
            expected = [f"v{number}" for number in range(60)]
            assert keys_in(await host.streams.open("orders", 1)) == expected
            assert received == expected

    run_virtual(main)


def test_client_of_a_deleted_stream_fails_and_does_not_write_to_its_successor() -> None:
    async def main() -> None:
        async with serving(SimDisk(1)) as host:
            await host.streams.create("orders", 1)
            async with Producer("server", name="p", stream="orders", world=host.world) as p:
                await p.publish(Delta("a", opaque(b"x")))
                await host.streams.delete("orders")
                await host.streams.create("orders", 1)
                with pytest.raises(Refused) as refused:
                    await p.publish(Delta("b", opaque(b"x")))
                assert refused.value.code is ErrorCode.UNKNOWN_STREAM
            assert keys_in(await host.streams.open("orders")) == []
            async with Producer("server", name="p", stream="orders", world=host.world) as p:
                ack = await p.publish(Delta("c", opaque(b"x")))
                assert ack.dot is not None
                assert ack.dot.counter == 1

    run_virtual(main)


@pytest.mark.parametrize(
    ("stream", "partition", "expected"),
    [
        ("orders", None, "name one with partition="),
        ("orders", 2, "give 0 to 1"),
        ("nosuch", None, "UNKNOWN_STREAM"),
    ],
)
def test_client_of_a_wrong_partition_fails_at_once(stream: str, partition: int | None, expected: str) -> None:
    async def main() -> None:
        async with serving(SimDisk(1)) as host:
            await host.streams.create("orders", 2)
            more: dict[str, Any] = {"stream": stream, "partition": partition, "world": host.world}
            for client in (Producer("server", name="p", **more), Subscriber("server", "*", **more)):
                with pytest.raises((UsageError, Refused), match=expected):
                    async with client:
                        pass
            assert anyio.current_time() < 5

    run_virtual(main)


def test_groups_of_partitions_have_cursors_of_their_own() -> None:
    async def main() -> None:
        async with serving(SimDisk(1)) as host:
            await host.streams.create("orders", 2)
            for number in range(2):
                more: dict[str, Any] = {"stream": "orders", "partition": number, "world": host.world}
                async with Producer("server", name="p", **more) as p:
                    for row in range(3):
                        await p.publish(Delta(f"{number}/{row}", opaque(b"x")))
            more = {"stream": "orders", "group": "g", "world": host.world}
            async with Subscriber("server", "*", partition=0, **more) as s:
                assert [(await anext(s)).delta.vector_id for _ in range(3)] == ["0/0", "0/1", "0/2"]
                s.ack(1)
            async with Subscriber("server", "*", partition=1, **more) as s:
                assert (await anext(s)).delta.vector_id == "1/0"
            groups = {(one["stream"], one["partition"], one["name"]) for one in host.service.groups()}
            assert groups == {("orders", 0, "g"), ("orders", 1, "g")}

    run_virtual(main)


def test_unused_partition_closes_until_its_next_use() -> None:
    async def main() -> None:
        async with serving(SimDisk(1)) as host:
            await host.streams.create("orders", 1)
            more: dict[str, Any] = {"stream": "orders", "world": host.world}
            async with Producer("server", name="p", **more) as p:
                for number in range(3):
                    await p.publish(Delta(f"v{number}", opaque(b"x")))
                await anyio.sleep(200)
                assert (1, 0) in host.streams.open_partitions(), "a connection uses it"
            async with Subscriber("server", "*", group="g", **more) as s:
                assert (await anext(s)).delta.vector_id == "v0"
                assert (await anext(s)).delta.vector_id == "v1"
            await anyio.sleep(70)
            assert [*host.streams.open_partitions()] == [(0, 0)]
            async with Subscriber("server", "*", group="g", **more) as s:
                assert (await anext(s)).delta.vector_id == "v1", "the last one was not acknowledged"
            async with Producer("server", name="p", **more) as p:
                ack = await p.publish(Delta("v3", opaque(b"x")))
                assert ack.offset == 3

    run_virtual(main)
