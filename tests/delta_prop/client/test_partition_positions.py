"""Positions and assignment of a subscriber of all partitions."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Literal

import anyio
import pytest

from delta_prop_wire.delta import Delta, opaque
from delta_prop_wire.errors import Refused, UsageError
from delta_prop_wire.spec import ErrorCode
from tests.delta_prop.client.test_stream_clients import keys_at, make_delta
from tests.delta_prop.client.virtual_streams import StreamSite, with_streams

if TYPE_CHECKING:
    from delta_prop.client.stream_subscriber import StreamSubscriber

PARTITIONS = 3


async def publish(site: StreamSite, count: int = 4) -> None:
    """Publish `count` deltas to each partition."""
    async with site.producer() as p:
        for partition in range(PARTITIONS):
            await p.publish(*(make_delta(key) for key in keys_at(partition, count)))


async def read(s: StreamSubscriber, count: int) -> list[tuple[int, int]]:
    """Read `count` deltas; return their partitions and offsets, in order."""
    return sorted([(await anext(s))[:2] for _ in range(count)])


async def read_available(s: StreamSubscriber) -> list[tuple[int, int]]:
    found = []
    with anyio.move_on_after(5):
        while True:
            found.append((await anext(s))[:2])
    return sorted(found)


def rows(*partitions: int, first: int = 0, end: int = 4) -> list[tuple[int, int]]:
    return [(partition, offset) for partition in partitions for offset in range(first, end)]


# --- seek


def test_one_partition_is_read_at_another_position() -> None:
    async def scenario(site: StreamSite) -> None:
        await publish(site)
        async with site.subscriber(start="earliest") as s:
            assert await read(s, 12) == rows(0, 1, 2)
            s.seek(1, 2)
            s.seek(2, "earliest")
            assert await read_available(s) == [*rows(1, first=2), *rows(2)]
            assert [one and one.next_offset for one in s.cursors] == [4, 4, 4]
            s.seek(0, "latest")
            assert await read_available(s) == []
            cursor = s.cursors[0]
            assert cursor is not None
            with pytest.raises(UsageError, match="this subscriber reads another one"):
                s.seek(1, cursor)
            for wrong in (3, -1, True, None):
                with pytest.raises(UsageError, match=r"partition .*: give one from 0 to 2"):
                    s.seek(wrong, 0)  # type: ignore[arg-type]

    with_streams(scenario)


def test_partition_outside_whose_log_is_sought_ends_the_subscriber() -> None:
    async def scenario(site: StreamSite) -> None:
        await publish(site)
        async with site.subscriber(start="earliest") as s:
            s.seek(1, 50)
            with pytest.raises(Refused) as refused:
                await read(s, 13)
            assert refused.value.code is ErrorCode.BAD_REQUEST

    with_streams(scenario)


def test_seek_of_a_partition_that_does_not_answer_counts_once_it_does() -> None:
    async def scenario(site: StreamSite) -> None:
        await publish(site)
        async with site.subscriber(start="earliest") as s:
            assert await read(s, 12) == rows(0, 1, 2)
            await site.streams.hold("orders", 2)
            await anyio.sleep(1)
            s.seek(2, 3)
            assert await read_available(s) == []
            site.streams.release_held()
            assert await read(s, 1) == [(2, 3)]

    with_streams(scenario)


# --- offsets


def test_offsets_of_all_partitions_are_asked() -> None:
    async def scenario(site: StreamSite) -> None:
        async with site.subscriber(partitions=[1]) as s:
            assert await s.end_offsets() == [0, 0, 0]
            await publish(site)
            await anyio.sleep(100)
            time = datetime.fromtimestamp(site.world.clock.wall_us() / 1e6, UTC)
            async with site.producer() as p:
                await p.publish(make_delta(*keys_at(0)))
                await p.publish(make_delta(*keys_at(1)))
            assert await s.end_offsets() == [5, 5, 4]
            assert await s.offsets_for_time(time - timedelta(seconds=50)) == [4, 4, 4]
            assert await s.offsets_for_time(time - timedelta(days=50)) == [0, 0, 0]
            s.assign()
            assert await s.end_offsets() == [5, 5, 4]
            with pytest.raises(UsageError, match="time"):
                await s.offsets_for_time("1h")  # type: ignore[arg-type]
            await site.streams.delete("orders")
            with pytest.raises(Refused):
                await s.end_offsets()

    with_streams(scenario)


# --- assignment


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_only_assigned_partitions_are_read(backend: Literal["asyncio", "trio"]) -> None:
    async def scenario(site: StreamSite) -> None:
        await publish(site)
        async with site.subscriber(start="earliest", partitions=(0, 2)) as s:
            assert (s.partitions, s.assigned) == (3, [0, 2])
            assert await read_available(s) == rows(0, 2)
            s.assign(1)
            assert s.assigned == [1]
            assert await read(s, 2) == rows(1, end=2)
            await publish(site)
            s.assign(0, 2)
            s.assign()
            assert s.assigned == [0, 1, 2]
            assert await read_available(s) == [
                *rows(0, first=4, end=8),
                *rows(1, first=1, end=8),
                *rows(2, first=4, end=8),
            ], "each continues at its cursor: after the delta that the reader held, all are read once"

    with_streams(scenario, backend=backend)


def test_cursors_include_partitions_that_are_not_assigned() -> None:
    async def scenario(site: StreamSite) -> None:
        await publish(site)
        async with site.subscriber(start="earliest", partitions=[0, 1]) as s:
            assert await read_available(s) == rows(0, 1)
            s.assign(1)
            cursors = s.cursors
            assert [one and one.next_offset for one in cursors] == [4, 4, None]
        async with site.subscriber(start=cursors, partitions=[1]) as s:
            assert [one and one.next_offset for one in s.cursors] == [4, 4, None]
            s.assign()
            assert await read_available(s) == rows(2)

    with_streams(scenario)


def test_calls_for_partitions_that_are_not_assigned_are_refused() -> None:
    async def scenario(site: StreamSite) -> None:
        await publish(site)
        async with site.subscriber(start="earliest", partitions=[0]) as s:
            assert await read(s, 4) == rows(0)
            for call in (lambda: s.seek(1, 0), lambda: s.ack(1, 0)):
                with pytest.raises(UsageError, match="partition 1: not assigned: assign it first"):
                    call()
            for wrong in (3, -1, True, None):
                with pytest.raises(UsageError, match=r"partition .*: give one from 0 to 2"):
                    s.assign(1, wrong)  # type: ignore[arg-type]
            assert s.assigned == [0], "a call with a wrong partition changes nothing"
            s.pause(1)
            s.assign(0, 1)
            assert await read_available(s) == []
            s.resume(1)
            assert await read_available(s) == rows(1)
        for wrong in ([3], ["0"]):
            with pytest.raises(UsageError, match="give one from 0 to 2"):
                async with site.subscriber(partitions=wrong):
                    pass
        unopened = site.subscriber()
        for call in (lambda: unopened.assign(0), lambda: unopened.seek(0, 0), lambda: unopened.assigned):
            with pytest.raises(UsageError, match="is not open yet"):
                call()

    with_streams(scenario)


def test_members_of_a_group_share_the_partitions_by_assignment() -> None:
    async def scenario(site: StreamSite) -> None:
        await publish(site)
        async with (
            site.subscriber(group="g", partitions=[0]) as first,
            site.subscriber(group="g", partitions=[1, 2]) as second,
        ):
            assert await read_available(first) == rows(0)
            assert await read_available(second) == rows(1, 2)
            second.assign(1)
            first.assign(0, 2)
            await publish(site, 1)
            assert await read_available(first) == [(0, 4), (2, 4)]
            assert await read_available(second) == [(1, 4)]

    with_streams(scenario)


def test_released_partition_drops_its_unread_deltas_and_its_failure() -> None:
    async def scenario(site: StreamSite) -> None:
        await publish(site)
        async with site.subscriber(start="earliest") as s:
            first = await anext(s)
            others = [one for one in range(PARTITIONS) if one != first.partition]
            s.seek(first.partition, 50)
            s.assign(*others)
            assert await read_available(s) == rows(*others), "no error, and nothing of the first"
            async with site.producer() as p:
                await p.publish(Delta(*keys_at(others[0]), opaque(b"x")))
            assert await read(s, 1) == [(others[0], 4)]

    with_streams(scenario)
