"""Subscriber over a virtual network against the real server: each delta once and in order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import anyio
import pytest

from delta_prop.client.settings import ClientSettings
from delta_prop.client.subscriber import Subscriber
from delta_prop.testing import virtual_world
from delta_prop.testing.network_path import NetworkConditions
from delta_prop_wire.cursor import Cursor
from delta_prop_wire.delta import Delta, Priority, opaque
from delta_prop_wire.errors import Refused, UsageError
from tests.delta_prop.client.virtual_service import ADDRESS, Site, with_service

if TYPE_CHECKING:
    from anyio.abc import TaskStatus


def subscriber(site: Site, *topics: str, **more: Any) -> Subscriber:
    return Subscriber(ADDRESS, *(topics or ("*",)), world=site.world, **more)


async def publish(site: Site, count: int, first: int = 0, namespace: str = "default", size: int = 8) -> None:
    for number in range(first, first + count):
        await site.propagator.publish(Delta(f"k{number}", opaque(bytes(size)), namespace))


async def read(s: Subscriber, count: int) -> list[tuple[int, str]]:
    return [(one.offset, one.delta.vector_id) for one in [await anext(s) for _ in range(count)]]


def expected_rows(count: int, first: int = 0) -> list[tuple[int, str]]:
    return [(number, f"k{number}") for number in range(first, first + count)]


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_published_deltas_are_read_in_order(backend: Literal["asyncio", "trio"]) -> None:
    async def scenario(site: Site) -> None:
        await publish(site, 3)
        async with subscriber(site, start="earliest") as early, subscriber(site) as late:
            await publish(site, 3, first=3)
            assert await read(early, 6) == expected_rows(6)
            assert await read(late, 3) == expected_rows(3, first=3)
            cursor = early.cursor
        assert cursor is not None
        assert cursor.next_offset == 5, "the delta that the reader holds must not count as processed"

    with_service(scenario, backend=backend)


def test_batches_arrive_as_they_were_published() -> None:
    async def scenario(site: Site) -> None:
        await site.propagator.publish(*(Delta(f"k{number}", opaque(b"x")) for number in range(5)))
        await publish(site, 1, first=5)
        async with subscriber(site, start="earliest") as s:
            assert (await anext(s)).offset == 0
            rest = await s.next_batch()
            assert (rest.offset, rest.next_offset, len(rest)) == (1, 5, 4)
            assert [one.offset for one in rest] == [1, 2, 3, 4]
            assert rest.batch is not None
            assert rest.batch.count == 5
            async for batch in s.batches():
                assert [one.delta.vector_id for one in batch] == ["k5"]
                assert batch.row(0).lamport == 6
                break

    with_service(scenario)


@pytest.mark.parametrize("seed", range(2))
def test_broken_connections_lose_and_duplicate_nothing(seed: int) -> None:
    conditions = NetworkConditions(
        latency_s=0.002, jitter_s_max=0.003, chunk_bytes_max=900, reset_bytes_mean=5_000
    )

    async def scenario(site: Site) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(publish, site, 200)
            # Bytes in flight are lost when a connection breaks: with a larger credit no batch might arrive.
            async with subscriber(site, start=0, credit=(20, 4_000)) as s:
                assert await read(s, 200) == expected_rows(200)
                assert s.reconnects

    with_service(scenario, seed=seed, conditions=conditions)


def test_idle_reader_buffers_no_more_than_its_credit() -> None:
    async def scenario(site: Site) -> None:
        await publish(site, 400, size=1_000)
        async with subscriber(site, start="earliest", credit=(50, 1 << 20)) as s:
            await anyio.sleep(30)
            assert 40 <= s._consumer_state.buffered_deltas <= 50
            assert await read(s, 400) == expected_rows(400)
        async with subscriber(site, start="earliest", credit=(1_000_000, 20_000)) as s:
            await anyio.sleep(30)
            assert 10 <= s._consumer_state.buffered_deltas <= 20
            assert await read(s, 400) == expected_rows(400)
        async with subscriber(site, start="earliest", credit=(1, 1)) as s:
            assert await read(s, 20) == expected_rows(20)

    with_service(scenario)


def test_service_restarted_with_another_log_is_refused() -> None:
    async def scenario(site: Site) -> None:
        await publish(site, 3)
        async with anyio.create_task_group() as tasks, subscriber(site, start="earliest") as s:
            assert await read(s, 2) == expected_rows(2)
            await site.stop()
            await tasks.start(site.run)
            assert await read(s, 1) == expected_rows(1, first=2)
            with pytest.raises(UsageError, match="another log"):
                await anext(s)
            tasks.cancel_scope.cancel()

    with_service(scenario)


def test_cursor_resumes_where_it_stopped_but_not_in_another_log() -> None:
    async def scenario(site: Site) -> None:
        await publish(site, 5)
        async with subscriber(site, start="earliest") as s:
            await read(s, 3)
            s.ack(2)
            cursor = s.cursor
        assert cursor is not None
        async with subscriber(site, start=cursor) as s:
            assert await read(s, 2) == expected_rows(2, first=3)
        with pytest.raises(Refused):
            async with subscriber(site, start=Cursor(bytes(16), 0, 3)):
                pass

    with_service(scenario)


def test_group_resumes_where_its_reader_stopped() -> None:
    async def scenario(site: Site) -> None:
        await publish(site, 6)
        async with subscriber(site, group="g") as s:
            assert await read(s, 3) == expected_rows(3), "a new group must start at the earliest offset"
        async with subscriber(site, group="g", ack="manual") as s:
            assert await read(s, 3) == expected_rows(3, first=2), (
                "the delta that the reader held must be redelivered"
            )
            s.ack(3)
        async with subscriber(site, group="g") as s:
            assert await read(s, 2) == expected_rows(2, first=4)

    with_service(scenario)


def test_second_reader_of_a_group_stands_by_until_the_first_ends() -> None:
    async def scenario(site: Site) -> None:
        await publish(site, 4)

        async def read_for_a_minute(*, task_status: TaskStatus[None]) -> None:
            async with subscriber(site, group="g") as first:
                assert await read(first, 2) == expected_rows(2)
                task_status.started()
                await anyio.sleep(60)
                assert await read(first, 1) == expected_rows(1, first=2)

        async with anyio.create_task_group() as tasks:
            await tasks.start(read_for_a_minute)
            async with subscriber(site, group="g") as second:
                assert second.standing_by
                await anyio.sleep(59)
                assert second.standing_by
                assert not second._consumer_state.buffered_deltas
                assert await read(second, 2) == expected_rows(2, first=2), (
                    "the delta that the reader held must be redelivered"
                )
                assert not second.standing_by

    with_service(scenario)


def test_half_open_reader_is_replaced_within_the_peer_timeout() -> None:
    async def scenario(site: Site) -> None:
        await publish(site, 4)
        async with subscriber(site, group="g") as first:
            assert await read(first, 3) == expected_rows(3)
            await anyio.sleep(1)
            site.network.cut("client", "server")
            other = virtual_world(9, network=site.network.at("other"))
            async with Subscriber(ADDRESS, "*", group="g", world=other) as second:
                assert second.standing_by
                with anyio.fail_after(16.1):
                    assert await read(second, 2) == expected_rows(2, first=2)
                await anyio.sleep(60)
                site.network.heal("client", "server")
                await anyio.sleep(10)
                assert first.standing_by
                await publish(site, 1, first=4)
                assert await read(second, 1) == expected_rows(1, first=4)
                assert first._consumer_state.take_row() is None

    with_service(scenario)


def test_reader_that_reconnects_regains_its_group_at_once() -> None:
    async def scenario(site: Site) -> None:
        await publish(site, 4)
        async with subscriber(site, group="g") as s:
            assert await read(s, 2) == expected_rows(2)
            site.network.cut("client", "server")
            await anyio.sleep(12)
            site.network.heal("client", "server")
            await publish(site, 2, first=4)
            with anyio.fail_after(8):
                assert await read(s, 4) == expected_rows(4, first=2), "each delta must be delivered once"
            assert not s.standing_by

    with_service(scenario)


def test_start_applies_only_to_a_new_group() -> None:
    async def scenario(site: Site) -> None:
        await publish(site, 6)
        async with subscriber(site, group="g", start=2) as s:
            assert await read(s, 2) == expected_rows(2, first=2)
        for start in (0, "earliest", "latest"):
            async with subscriber(site, group="g", start=start) as s:
                assert await read(s, 1) == expected_rows(1, first=3), (
                    "the delta that the reader held must be redelivered"
                )
        async with subscriber(site, group="new", start="latest") as s:
            await publish(site, 1, first=6)
            assert await read(s, 1) == expected_rows(1, first=6)
        async with subscriber(site, group="new", start="latest") as s:
            assert await read(s, 1) == expected_rows(1, first=6)

    with_service(scenario)


def test_topic_that_matches_nothing_still_advances_the_group() -> None:
    async def scenario(site: Site) -> None:
        async with subscriber(site, "ns:none", group="g") as s:
            await publish(site, 10)
            await anyio.sleep(5)
            assert s.received == 10
        async with subscriber(site, group="g") as s:
            await publish(site, 1, first=10)
            assert await read(s, 1) == expected_rows(1, first=10)

    with_service(scenario)


def test_topics_priorities_and_single_deltas_select_rows() -> None:
    async def scenario(site: Site) -> None:
        p = site.propagator
        await p.publish(Delta("a", opaque(b"1"), "docs"), Delta("b", opaque(b"2"), "mail"))
        await p.publish(Delta("c", opaque(b"3"), "docs", priority=Priority.HIGH))
        async with (
            subscriber(site, "ns:docs", start="earliest") as docs,
            subscriber(site, start="earliest", priorities=[Priority.HIGH]) as urgent,
            subscriber(site, "ns:docs", start="earliest", deltas=True) as single,
        ):
            assert await read(docs, 2) == [(0, "a"), (2, "c")]
            assert await read(urgent, 1) == [(2, "c")]
            batch = await single.next_batch()
            assert batch.batch is None
            assert [(one.offset, one.lamport, one.delta.vector_id) for one in batch] == [(0, 1, "a")]
            number = await docs.add("ns:mail")
            await p.publish(Delta("d", opaque(b"4"), "mail"))
            assert await read(docs, 1) == [(3, "d")]
            await docs.remove(number)
            await p.publish(Delta("e", opaque(b"5"), "mail"))
            await p.publish(Delta("f", opaque(b"6"), "docs"))
            assert await read(docs, 1) == [(5, "f")]
            with pytest.raises(UsageError, match="one must stay"):
                await docs.remove(1)

    with_service(scenario)


def test_removed_start_offset_is_refused() -> None:
    async def scenario(site: Site) -> None:
        await publish(site, 30)
        with pytest.raises(Refused, match="CURSOR_TOO_OLD"):
            async with subscriber(site, start=1):
                pass

    with_service(scenario, log_deltas_max=20)


def test_only_delivered_offsets_can_be_acknowledged() -> None:
    async def scenario(site: Site) -> None:
        await publish(site, 2)
        async with subscriber(site, start="earliest", ack="manual") as s:
            await read(s, 1)
            with pytest.raises(UsageError, match="not delivered yet"):
                s.ack(1)
            for wrong in ("x", -1, True, None):
                with pytest.raises(UsageError, match=rf"offset '?{wrong}'?: give the offset of a delta"):
                    s.ack(wrong)  # type: ignore[arg-type]
            with pytest.raises(UsageError, match="topic 5 is of type int: give text"):
                await s.add(5)  # type: ignore[arg-type]
            s.ack(0)
            await read(s, 1)
            assert s.cursor is not None
            assert s.cursor.next_offset == 1, "no delta may be acknowledged automatically"

    with_service(scenario)


def test_heartbeats_keep_an_idle_connection() -> None:
    async def scenario(site: Site) -> None:
        async with subscriber(site) as s:
            await anyio.sleep(300)
            assert s.reconnects == 0
            await publish(site, 1)
            assert await read(s, 1) == expected_rows(1)

    with_service(scenario)


def test_reader_reconnects_after_a_silent_service() -> None:
    async def scenario(site: Site) -> None:
        async with subscriber(site) as s:
            site.network.cut("server", "client")
            site.network.cut("client", "server")
            await anyio.sleep(60)
            site.network.heal("server", "client")
            site.network.heal("client", "server")
            await publish(site, 1)
            assert await read(s, 1) == expected_rows(1)
            assert s.reconnects >= 1

    with_service(scenario)


def test_cancelled_reader_can_continue_until_closed() -> None:
    async def scenario(site: Site) -> None:
        async with subscriber(site) as s:
            with anyio.move_on_after(5):
                await anext(s)
            await publish(site, 1)
            assert await read(s, 1) == expected_rows(1)
        with pytest.raises(UsageError, match="closed"):
            await anext(s)

    with_service(scenario)


def test_wrong_arguments_are_refused_at_once() -> None:
    for wrong in ({"ack": "later"}, {"start": "somewhere"}, {"start": -1}, {"credit": (0, 1)}):
        with pytest.raises(UsageError):
            Subscriber("localhost", "*", **wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="no topics"):
        Subscriber("localhost")
    with pytest.raises(Refused, match="group"):
        Subscriber("localhost", "*", group="")
    assert ClientSettings().heartbeat_interval_s == 5
