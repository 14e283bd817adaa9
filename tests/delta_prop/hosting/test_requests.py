"""Operators' requests for any partition of a data directory: one worker opens what they need."""

from __future__ import annotations

import errno
import json
from typing import TYPE_CHECKING

import anyio

from delta_prop import Propagator
from delta_prop.delivery.operator_requests import (
    DIRECTORY,
    OperatorRequest,
    Verb,
    put_request,
    read_requests,
    take_refusal,
)
from delta_prop.testing import run_virtual, virtual_world
from delta_prop_broker.segments.paths import STREAMS
from delta_prop_broker.segments.small_file import Checksum, replace_checked
from delta_prop_simulations.disk import Call, SimDisk
from delta_prop_sinks import CallbackSink
from tests.delta_prop.hosting.hosts import NO_RESERVE, hosting, publish

if TYPE_CHECKING:
    from delta_prop.hosting.streams import Streams


class Orders:
    """A stream of partitions, each with a sink `audit` that has seen what is published."""

    def __init__(self, disk: SimDisk) -> None:
        self.disk = disk
        self.log_ids: dict[int, str] = {}
        self.seen: list[tuple[int, int]] = []

    async def create(self, streams: Streams, partitions: int) -> None:
        await streams.create("orders", partitions)
        for number in range(partitions):
            p = await streams.open("orders", number)
            self.log_ids[number] = p.internals().partition.log.log_id.hex()
            await self.attach(p, number)
            await publish(p, "a", "b")
            await p.wait_visible(2)

    async def attach(self, p: Propagator, number: int) -> None:
        await p.attach(
            CallbackSink(lambda offset, _: self.seen.append((number, offset)), name="audit", nonblocking=True)
        )

    def request(self, verb: Verb, partition: int, *offsets: int, sink: str = "audit", at: int = 1) -> str:
        request = OperatorRequest(verb, sink, self.log_ids[partition], offsets, "orders", partition)
        return put_request(self.disk, request, at)


def count_calls(disk: SimDisk, path: str) -> list[str]:
    """Return a list to which each later call of the disk for a path that begins so is added."""
    calls: list[str] = []

    def note(call: Call) -> bool:
        if call.path.startswith(path):
            calls.append(call.path)
        return False

    disk.fail(note, errno.EIO)
    return calls


def test_request_reaches_only_its_partition() -> None:
    disk = SimDisk(1)
    orders = Orders(disk)

    async def main() -> None:
        async with hosting(disk) as streams:
            await orders.create(streams, 2)
            await anyio.sleep(2)
            orders.request("reset", 1, 0)
            await anyio.sleep(2)
            assert orders.seen == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 0), (1, 1)]
            orders.request("pause", 0)
            await anyio.sleep(2)
            states = [
                (await streams.open("orders", number)).statistics().sinks["audit"].state
                for number in range(2)
            ]
            assert states == ["paused", "idle"]
            assert not disk.list(DIRECTORY)

    run_virtual(main)


def test_request_opens_its_idle_partition_and_lets_it_close() -> None:
    disk = SimDisk(1)
    orders = Orders(disk)

    async def main() -> None:
        async with hosting(disk) as streams:
            await orders.create(streams, 3)
        async with hosting(disk, 2) as streams:
            calls = count_calls(disk, f"{STREAMS}/orders-1/0/")
            orders.request("pause", 2)
            orders.request("reset", 1, 1, at=2)
            await anyio.sleep(3)
            assert not disk.list(DIRECTORY)
            assert [*streams.open_partitions()] == [(0, 0)]
            assert not calls, "a partition without a request was opened"
            for number in range(3):
                await orders.attach(await streams.open("orders", number), number)
                await publish(await streams.open("orders", number), "c")
            await anyio.sleep(2)
            assert orders.seen[6:] == [(0, 2), (1, 1), (1, 2)]

    run_virtual(main)


def test_earlier_request_is_carried_out_before_the_partition_has_sinks() -> None:
    disk = SimDisk(1)
    orders = Orders(disk)

    async def main() -> None:
        async with hosting(disk) as streams:
            await orders.create(streams, 2)
        orders.request("reset", 1, 0)
        orders.request("pause", 0, at=2)
        async with hosting(disk, 2) as streams:
            for number in range(2):
                await orders.attach(await streams.open("orders", number), number)
                await publish(await streams.open("orders", number), "c")
            await anyio.sleep(0.5)
            assert orders.seen[4:] == [(1, 0), (1, 1), (1, 2)]
            assert not disk.list(DIRECTORY)

    run_virtual(main)


def test_request_for_a_deleted_stream_is_refused_with_the_reason() -> None:
    disk = SimDisk(1)
    orders = Orders(disk)

    async def main() -> None:
        async with hosting(disk) as streams:
            await orders.create(streams, 1)
            await streams.delete("orders")
            path = orders.request("pause", 0)
            await anyio.sleep(2)
            assert "orders" in (refusal := take_refusal(disk, path) or "")
            assert "unknown" in refusal
            await streams.create("orders", 1)
            path = orders.request("pause", 0, at=2)
            await anyio.sleep(2)
            assert "the stream was deleted" in (take_refusal(disk, path) or "")
            assert not disk.list(DIRECTORY)
            assert not disk.list(f"{STREAMS}/orders-2"), "a request created a log"
            await publish(await streams.open("orders"), "new")
            path = orders.request("pause", 0, at=3)
            await anyio.sleep(2)
            assert "the stream was deleted" in (take_refusal(disk, path) or "")

    run_virtual(main)


def test_request_that_waits_for_a_sink_opens_its_partition_once() -> None:
    disk = SimDisk(1)
    orders = Orders(disk)

    async def main() -> None:
        async with hosting(disk) as streams:
            await orders.create(streams, 1)
        async with hosting(disk, 2) as streams:
            path = orders.request("replay", 0)
            await anyio.sleep(3)
            calls = count_calls(disk, f"{STREAMS}/orders-1/0")
            await anyio.sleep(100)
            assert [*read_requests(disk)] == [path]
            assert not calls, "the partition was opened again"
            assert [*streams.open_partitions()] == [(0, 0)]
            await orders.attach(await streams.open("orders"), 0)
            await anyio.sleep(2)
            assert not disk.list(DIRECTORY)

    run_virtual(main)


def test_partition_that_cannot_be_opened_delays_no_other_request() -> None:
    disk = SimDisk(1)
    orders = Orders(disk)

    async def main() -> None:
        async with hosting(disk) as streams:
            await orders.create(streams, 2)
        async with hosting(disk, 2) as streams:
            disk.fail(lambda call: call.path.startswith(f"{STREAMS}/orders-1/0"), errno.EIO)
            first, second = orders.request("pause", 0), orders.request("pause", 1, at=2)
            await anyio.sleep(5)
            assert [*read_requests(disk)] == [first], second
            disk.heal()
            await anyio.sleep(5)
            assert [*read_requests(disk)] == [first], "the partition was opened again too soon"
            await anyio.sleep(30)
            assert not disk.list(DIRECTORY)
            assert [*streams.open_partitions()] == [(0, 0)]

    run_virtual(main)


def test_file_without_a_partition_is_for_the_default_one() -> None:
    disk = SimDisk(1)
    orders = Orders(disk)

    async def main() -> None:
        async with hosting(disk) as streams:
            await orders.create(streams, 1)
            p = await streams.open()
            await orders.attach(p, 9)
            log_id = p.internals().partition.log.log_id.hex()
            fields = {"verb": "pause", "sink": "audit", "log_id": log_id, "offsets": []}
            disk.make_directory(DIRECTORY)
            replace_checked(disk, f"{DIRECTORY}/1.json", json.dumps(fields).encode(), Checksum.FIRST_LINE)
            await anyio.sleep(2)
            assert p.statistics().sinks["audit"].state == "paused"
            assert (await streams.open("orders")).statistics().sinks["audit"].state == "idle"

    run_virtual(main)


def test_program_with_one_partition_leaves_requests_for_others() -> None:
    disk = SimDisk(1)
    orders = Orders(disk)

    async def main() -> None:
        async with hosting(disk) as streams:
            await orders.create(streams, 1)
        path = orders.request("pause", 0)
        async with Propagator(data="data", log=NO_RESERVE, world=virtual_world(2, disk=disk)):
            await anyio.sleep(3)
            assert [*read_requests(disk)] == [path]
        async with hosting(disk, 3):
            await anyio.sleep(2)
            assert not disk.list(DIRECTORY)

    run_virtual(main)


def test_forgotten_sink_takes_only_its_own_requests_along() -> None:
    disk = SimDisk(1)
    orders = Orders(disk)

    async def main() -> None:
        async with hosting(disk) as streams:
            await orders.create(streams, 2)
            for number in range(2):
                await (await streams.open("orders", number)).detach("audit")
            paths = [orders.request("replay", number, at=number) for number in range(2)]
            await anyio.sleep(2)
            assert [*read_requests(disk)] == paths
            (await streams.open("orders", 1)).forget("audit")
            await anyio.sleep(2)
            assert [*read_requests(disk)] == paths[:1]

    run_virtual(main)


def test_open_partitions_share_one_poll_per_second() -> None:
    disk = SimDisk(1)
    orders = Orders(disk)

    async def main() -> None:
        async with hosting(disk) as streams:
            await orders.create(streams, 20)
            await anyio.sleep(1)
            calls = count_calls(disk, DIRECTORY)
            await anyio.sleep(10)
            assert 9 <= len(calls) <= 11

    run_virtual(main)
