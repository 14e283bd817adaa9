"""Subscriber at other positions: `seek`, `pause`, and the offsets of the log's end and of a time."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Literal

import anyio
import pytest

from delta_prop.client.subscriber import Subscriber
from delta_prop.testing import virtual_world
from delta_prop.testing.network_path import NetworkConditions
from delta_prop_wire.cursor import Cursor
from delta_prop_wire.delta import Delta, opaque
from delta_prop_wire.errors import Refused, UsageError
from delta_prop_wire.spec import ErrorCode
from tests.delta_prop.client.virtual_service import ADDRESS, Site, with_service
from tests.delta_prop.client.virtual_streams import StreamSite, with_streams

if TYPE_CHECKING:
    from collections.abc import Callable


def subscriber(site: Site, *topics: str, **more: Any) -> Subscriber:
    return Subscriber(ADDRESS, *(topics or ("*",)), world=site.world, **more)


async def publish(site: Site, count: int, first: int = 0, namespace: str = "default", size: int = 8) -> None:
    for number in range(first, first + count):
        await site.propagator.publish(Delta(f"k{number}", opaque(bytes(size)), namespace))


async def read(s: Subscriber, count: int) -> list[int]:
    return [(await anext(s)).offset for _ in range(count)]


async def is_idle(s: Subscriber, seconds: float = 5) -> bool:
    """True if no delta comes for some time."""
    with anyio.move_on_after(seconds):
        await anext(s)
        return False
    return True


# --- seek


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_reader_continues_at_the_offset_that_it_seeks(backend: Literal["asyncio", "trio"]) -> None:
    async def scenario(site: Site) -> None:
        await publish(site, 9)
        async with subscriber(site, start="earliest") as s:
            assert await read(s, 3) == [0, 1, 2]
            s.seek(7)
            assert await read(s, 2) == [7, 8]
            s.seek(1)
            assert await read(s, 4) == [1, 2, 3, 4], "a seek goes back, too"
            assert s.cursor is not None
            assert s.cursor.next_offset == 4
            s.seek(0)
            s.seek(5)
            assert await read(s, 2) == [5, 6], "the last one counts"
            await publish(site, 1, first=9)
            assert await read(s, 3) == [7, 8, 9]
            assert s.reconnects == 0, "a seek is not a lost connection"

    with_service(scenario, backend=backend)


def test_seek_in_the_middle_of_a_batch_drops_its_rest() -> None:
    async def scenario(site: Site) -> None:
        await site.propagator.publish(*(Delta(f"k{number}", opaque(b"x")) for number in range(9)))
        async with subscriber(site, start="earliest") as s:
            assert await read(s, 3) == [0, 1, 2]
            s.seek(6)
            batch = await s.next_batch()
            assert (batch.offset, len(batch)) == (6, 3)
            s.seek(4)
            assert await read(s, 5) == [4, 5, 6, 7, 8]

    with_service(scenario)


def test_seek_takes_ends_cursors_and_times() -> None:
    async def scenario(site: StreamSite) -> None:
        async with site.producer(stream="default") as p:
            await p.publish(*(Delta(f"k{number}", opaque(b"x")) for number in range(4)))
            await anyio.sleep(100)
            now = datetime.fromtimestamp(site.world.clock.wall_us() / 1e6, UTC)
            await p.publish(*(Delta(f"l{number}", opaque(b"x")) for number in range(4)))
            async with Subscriber(ADDRESS, "*", world=site.world) as s:
                s.seek("earliest")
                assert await read(s, 3) == [0, 1, 2]
                cursor = s.cursor
                assert cursor is not None
                for position in (now - timedelta(seconds=50), "50s"):
                    s.seek(position)
                    assert await read(s, 2) == [4, 5]
                s.seek(cursor)
                assert await read(s, 1) == [2]
                s.seek("latest")
                assert await is_idle(s)
                await p.publish(Delta("m", opaque(b"x")))
                assert await read(s, 1) == [8]
                with pytest.raises(UsageError, match=f"the cursor is of log {bytes(16).hex()}"):
                    s.seek(Cursor(bytes(16), 1, 0))
                with pytest.raises(UsageError, match="in the future"):
                    s.seek(now + timedelta(days=1))
                s.seek(cursor)
                assert await read(s, 1) == [2], "a refused position changes nothing"

    with_streams(scenario)


@pytest.mark.parametrize("wrong", ["somewhere", -1, True, None, 1.5, datetime(2026, 1, 1)])
def test_wrong_position_is_refused(wrong: Any) -> None:
    async def scenario(site: Site) -> None:
        async with subscriber(site) as s:
            with pytest.raises(UsageError, match="position"):
                s.seek(wrong)

    with_service(scenario)


@pytest.mark.parametrize("group", [None, "g"])
@pytest.mark.parametrize(
    ("offset", "code"), [(1, ErrorCode.CURSOR_TOO_OLD), (500, ErrorCode.BAD_REQUEST)], ids=["old", "ahead"]
)
def test_offset_outside_the_log_ends_the_reader(group: str | None, offset: int, code: ErrorCode) -> None:
    async def scenario(site: Site) -> None:
        await publish(site, 30)
        async with subscriber(site, group=group) as s:
            s.seek(offset)
            with pytest.raises(Refused) as refused:
                await anext(s)
            assert refused.value.code is code
        if group is not None:
            async with subscriber(site, group=group) as s:
                await read(s, 1)  # the group's cursor is still in the log

    with_service(scenario, log_deltas_max=20)


def test_only_an_open_reader_seeks() -> None:
    async def scenario(site: Site) -> None:
        s = subscriber(site)
        calls: list[Callable[[], Any]] = [lambda: s.seek(0)]
        async with s:
            s.seek("earliest")
        for call in calls:
            with pytest.raises(UsageError, match="is closed: use it inside its `async with`"):
                call()
        with pytest.raises(UsageError, match="is closed"):
            await s.end_offset()

    with_service(scenario)


@pytest.mark.parametrize("group", [None, "g"])
@pytest.mark.parametrize("seed", range(2))
def test_seek_holds_over_broken_connections(seed: int, group: str | None) -> None:
    conditions = NetworkConditions(
        latency_s=0.002, jitter_s_max=0.003, chunk_bytes_max=900, reset_bytes_mean=4_000
    )

    async def scenario(site: Site) -> None:
        await publish(site, 200)
        async with subscriber(site, start=0, group=group, credit=(20, 4_000)) as s:
            for first in (0, 150, 30, 100, 2, 170, 171):
                s.seek(first)
                assert await read(s, 25) == list(range(first, first + 25))
            assert s.reconnects

    with_service(scenario, seed=seed, conditions=conditions)


def test_seek_without_a_connection_counts_for_the_next_one() -> None:
    async def scenario(site: Site) -> None:
        await publish(site, 9)
        async with subscriber(site, start=5) as s:
            assert await read(s, 2) == [5, 6]
            site.network.cut("client", "server")
            s.seek(1)
            await anyio.sleep(60)
            assert await is_idle(s)
            site.network.heal("client", "server")
            assert await read(s, 3) == [1, 2, 3]

    with_service(scenario)


def test_added_topics_stay_after_a_seek() -> None:
    async def scenario(site: Site) -> None:
        for number in range(3):
            for namespace in ("docs", "mail", "other"):
                await publish(site, 1, number, namespace)
        async with subscriber(site, "ns:docs") as s:
            await s.add("ns:mail")
            s.seek(0)
            assert await read(s, 6) == [0, 1, 3, 4, 6, 7]

    with_service(scenario)


# --- seek in a group


def test_seek_forward_in_a_group_moves_its_cursor_with_the_next_acknowledgement() -> None:
    async def scenario(site: Site) -> None:
        await publish(site, 12)
        async with subscriber(site, group="g", ack="manual") as s:
            assert await read(s, 2) == [0, 1]
            s.ack(0)
            s.seek(8)
            assert await read(s, 2) == [8, 9]
        async with subscriber(site, group="g", ack="manual") as s:
            assert await read(s, 1) == [1], "nothing was acknowledged after the seek"
            s.seek(8)
            assert await read(s, 2) == [8, 9]
            s.ack(8)
        async with subscriber(site, group="g") as s:
            assert await read(s, 1) == [9]
            s.seek("latest")
            assert await is_idle(s)
            await anyio.sleep(6)  # a heartbeat
        async with subscriber(site, group="g") as s:
            assert await is_idle(s), "to request the next delta acknowledges what was skipped"

    with_service(scenario)


def test_seek_back_in_a_group_moves_its_cursor_at_once() -> None:
    async def scenario(site: Site) -> None:
        await publish(site, 12)
        async with subscriber(site, group="g", ack="manual") as s:
            assert await read(s, 10) == list(range(10))
            s.ack(8)
            s.seek(3)
            assert await read(s, 3) == [3, 4, 5]
            with pytest.raises(UsageError, match="not delivered yet"):
                s.ack(8)
        async with subscriber(site, group="g", ack="manual") as s:
            assert await read(s, 3) == [3, 4, 5]
            s.ack(4)
            assert s.cursor is not None
            assert s.cursor.next_offset == 5
        async with subscriber(site, group="g") as s:
            assert await read(s, 1) == [5]
            s.seek("earliest")
            assert await read(s, 13 - 1) == list(range(12))

    with_service(scenario)


def test_member_that_seeks_forward_keeps_its_place() -> None:
    async def scenario(site: Site) -> None:
        await publish(site, 12)
        other = virtual_world(9, network=site.network.at("other"))
        async with (
            subscriber(site, group="g") as first,
            Subscriber(ADDRESS, "*", group="g", world=other) as second,
        ):
            assert await read(first, 2) == [0, 1]
            with pytest.raises(UsageError, match="another member reads for group 'g'"):
                second.seek(5)
            first.seek(9)
            assert await read(first, 2) == [9, 10]
            assert second.standing_by
            first.seek(4)
            assert await read(second, 3) == [4, 5, 6], "the member that stood by continues there"
            await anyio.sleep(1)
            assert first.standing_by

    with_service(scenario)


# --- pause


def test_paused_reader_gets_nothing_and_holds_no_more_than_its_credit() -> None:
    async def scenario(site: Site) -> None:
        async with subscriber(site, credit=(10, 1 << 20)) as s:
            s.pause()
            await publish(site, 40)
            assert await is_idle(s)
            assert s.received == 10, "the service sends no more than the credit"
            got: list[int] = []
            async with anyio.create_task_group() as tasks:

                async def resume() -> None:
                    await anyio.sleep(1)
                    s.resume()

                tasks.start_soon(resume)
                with anyio.fail_after(1.1):
                    got += await read(s, 5)
            s.pause()  # in the middle of what is here
            assert await is_idle(s)
            s.seek(2)
            assert await is_idle(s), "a seek does not resume"
            s.resume()
            assert await read(s, 38) == list(range(2, 40))
            assert got == [0, 1, 2, 3, 4]

    with_service(scenario)


def test_paused_reader_may_seek_and_close() -> None:
    async def scenario(site: Site) -> None:
        await publish(site, 5)
        async with subscriber(site, group="g") as s:
            assert await read(s, 2) == [0, 1]
            s.pause()
            assert s.take_batch() is None
            await anyio.sleep(1)
        async with subscriber(site, group="g") as s:
            assert await read(s, 1) == [2], "what was returned before the pause is processed"

    with_service(scenario)


def test_failure_of_a_paused_reader_is_raised() -> None:
    async def scenario(site: Site) -> None:
        async with subscriber(site) as s:
            s.pause()
            s.seek(500)
            with pytest.raises(Refused):
                await anext(s)

    with_service(scenario)


# --- offsets


def test_end_offset_and_offset_for_a_time_are_asked_over_the_connection() -> None:
    async def scenario(site: StreamSite) -> None:
        async with site.producer(stream="default") as p, Subscriber(ADDRESS, "*", world=site.world) as s:
            assert await s.end_offset() == 0
            await p.publish(*(Delta(f"k{number}", opaque(b"x")) for number in range(4)))
            await anyio.sleep(100)
            now = datetime.fromtimestamp(site.world.clock.wall_us() / 1e6, UTC)
            await p.publish(*(Delta(f"l{number}", opaque(b"x")) for number in range(4)))
            assert await s.end_offset() == 8
            assert await s.offset_for_time(now - timedelta(seconds=50)) == 4
            assert await s.offset_for_time(now - timedelta(days=50)) == 0
            assert await s.offset_for_time(now + timedelta(days=50)) == 8
            for wrong in ("1h", 5, None, datetime(2026, 1, 1)):
                with pytest.raises(UsageError, match="time"):
                    await s.offset_for_time(wrong)  # type: ignore[arg-type]
            ends: list[int] = []
            async with anyio.create_task_group() as tasks:

                async def ask() -> None:
                    ends.append(await s.end_offset())

                for _ in range(100):
                    tasks.start_soon(ask)
            assert ends == [8] * 100
            assert s.reconnects == 0

    with_streams(scenario)


def test_refused_query_ends_only_its_call() -> None:
    async def scenario(site: Site) -> None:
        async with subscriber(site) as s:
            with pytest.raises(Refused) as refused:
                await s.offset_for_time(datetime(2026, 1, 1, tzinfo=UTC))  # the log is in memory
            assert refused.value.code is ErrorCode.BAD_REQUEST
            await publish(site, 1)
            assert await read(s, 1) == [0]

    with_service(scenario)


def test_query_is_resent_after_a_break() -> None:
    async def scenario(site: Site) -> None:
        await publish(site, 3)
        async with subscriber(site) as s:
            site.network.cut("client", "server")
            with anyio.move_on_after(2) as waiting:
                await s.end_offset()
            assert waiting.cancelled_caught
            ends: list[int] = []
            async with anyio.create_task_group() as tasks:

                async def ask() -> None:
                    ends.append(await s.end_offset())

                tasks.start_soon(ask)
                await anyio.sleep(60)
                assert not ends
                site.network.heal("client", "server")
            assert ends == [3]

    with_service(scenario)
