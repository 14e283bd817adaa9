"""Counters are totals over all streams, closed partitions too; each open partition has its own numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio

from delta_prop.client import Producer, Subscriber
from delta_prop.server.count_totals import JobTotals
from delta_prop.server.metrics import Metrics
from delta_prop.server.server_context import JobCounts
from delta_prop.server.server_status import ServerStatus
from delta_prop.testing import run_virtual
from delta_prop_simulations.disk import SimDisk
from delta_prop_wire.delta import Delta, opaque
from tests.delta_prop.server.test_server_streams import serving

if TYPE_CHECKING:
    from tests.delta_prop.server.test_server_streams import Host

LONG_S = 1_000.0
"""Far more than the time after which an unused partition closes."""


async def status_of(host: Host) -> ServerStatus:
    server_status = ServerStatus(version="1")
    server_status.propagator, server_status.service = await host.streams.open(), host.service
    server_status.streams_open = host.streams
    return server_status


def scrape(server_status: ServerStatus, name: str) -> dict[str, float]:
    lines = Metrics(server_status).scrape().text("")[0].decode().splitlines()
    found = (line.removeprefix(f"delta_prop_{name}") for line in lines)
    rows = (line.rpartition(" ") for line in found if line[:1] in ("{", " "))
    return {labels: float(value) for labels, _, value in rows}


async def publish(host: Host, *names: str, stream: str = "orders", partition: int = 1) -> None:
    more: dict[str, Any] = {"stream": stream, "partition": partition, "world": host.world}
    async with Producer("server", name="p", **more) as p:
        for name in names:
            await p.publish(Delta(name, opaque(b"x")))


def open_numbers(server_status: ServerStatus, stream: str) -> list[tuple[int, int, int]]:
    (found,) = [one for one in server_status.status()["streams"] if one["name"] == stream]
    return [(one["partition"], one["accepted"], one["next_offset"]) for one in found["open"]]


def test_totals_have_all_streams_and_do_not_fall_as_partitions_close() -> None:
    async def main() -> None:
        async with serving(SimDisk(1)) as host:
            server_status = await status_of(host)
            await host.streams.create("orders", 3)
            await publish(host, "a", "b", "c")
            await publish(host, "d", stream="default", partition=0)
            assert server_status.status()["accepted"] == 4
            assert scrape(server_status, "accepted_deltas_total") == {"": 4}
            assert open_numbers(server_status, "orders") == [(1, 3, 3)]
            labels = '{partition="1",stream="orders"}'
            assert scrape(server_status, "partition_accepted_deltas_total")[labels] == 3
            assert scrape(server_status, "partition_log_next_offset")[labels] == 3
            assert scrape(server_status, "partition_log_start_offset")[labels] == 0
            assert scrape(server_status, "partition_log_bytes")[labels] > 0
            await anyio.sleep(LONG_S)
            assert open_numbers(server_status, "orders") == []
            assert labels not in scrape(server_status, "partition_log_bytes")
            assert scrape(server_status, "accepted_deltas_total") == {"": 4}
            await publish(host, "e")
            assert open_numbers(server_status, "orders") == [(1, 1, 4)]
            assert server_status.status()["accepted"] == 5
            await host.streams.create("brief")
            await publish(host, "f", stream="brief", partition=0)
            await host.streams.delete("brief")  # before a periodic check has seen its partition
            assert server_status.status()["accepted"] == 6
            await host.streams.delete("orders")
            await anyio.sleep(LONG_S)
            assert server_status.status()["accepted"] == 6

    run_virtual(main)


def test_group_of_several_partitions_has_a_lag_in_each() -> None:
    async def main() -> None:
        async with serving(SimDisk(1)) as host:
            server_status = await status_of(host)
            await host.streams.create("orders", 2)
            for partition, names in enumerate(("ab", "cde")):
                more: dict[str, Any] = {"stream": "orders", "partition": partition, "world": host.world}
                await publish(host, *names, partition=partition)
                async with Subscriber("server", "*", group="g", start="earliest", **more) as s:
                    assert await s.next_batch() is not None
            await anyio.sleep(1)
            await server_status.refresh()
            assert scrape(server_status, "group_lag_deltas").keys() == {
                f'{{group="g",partition="{number}",stream="orders"}}' for number in range(2)
            }

    run_virtual(main)


def test_total_includes_final_counts_of_closed_sources() -> None:
    sources, totals = [JobCounts(staged=1), JobCounts(staged=10)], JobTotals(JobCounts())
    assert totals.total(sources).staged == 11
    leaving = sources.pop()
    totals.settle(sources)
    leaving.staged += 5  # as it finishes its work
    assert totals.total(sources).staged == 16
    totals.settle(sources)
    leaving.staged += 100
    for _ in range(3):
        assert totals.total(sources).staged == 16
        totals.settle(sources)
    totals.note([JobCounts(staged=1_000)])
    assert totals.total([]).staged == 1_016
