"""Clients of all partitions of a stream: each vector is in one partition, and one delays only its own."""

from __future__ import annotations

from datetime import datetime, timedelta
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Literal

import anyio
import pytest

from delta_prop.client import stream_producer, stream_subscriber
from delta_prop.client.errors import Unreachable
from delta_prop.client.partitioning import PartitionMap, StreamRefused
from delta_prop.client.settings import ClientSettings
from delta_prop_wire.cursor import Cursor
from delta_prop_wire.delta import AckLevel, Delta, Dot, Priority, create, opaque, origin_partition
from delta_prop_wire.errors import Refused, UsageError
from delta_prop_wire.murmur import partition_of
from delta_prop_wire.spec import ErrorCode
from tests.delta_prop.client.virtual_streams import ADDRESS, STREAM, StreamSite, with_streams

if TYPE_CHECKING:
    from delta_prop.client.stream_subscriber import StreamDelivered, StreamSubscriber


def make_delta(key: str, **more: Any) -> Delta:
    return Delta(key, opaque(key.encode()), **more)


def keys_at(partition: int, count: int = 1, namespace: str = "default") -> list[str]:
    """Return `count` vector ids that belong to a partition of three."""
    names = (f"k{number}" for number in range(10_000))
    return list(islice((name for name in names if partition_of(namespace, name, 3) == partition), count))


async def read(s: StreamSubscriber, count: int) -> list[StreamDelivered]:
    return [await anext(s) for _ in range(count)]


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_each_vector_is_in_one_partition_and_read_in_order(
    backend: Literal["asyncio", "trio"],
) -> None:
    async def scenario(site: StreamSite) -> None:
        names = [f"k{number % 20}" for number in range(60)]
        async with site.producer() as p, site.subscriber() as s:
            assert p.partitions == s.partitions == 3
            acks = [await p.publish(make_delta(name)) for name in names[:30]]
            joint_ack = await p.publish(*(make_delta(name) for name in names[30:]))
            delivered = await read(s, 60)
            assert [one.deltas for one in p.statistics()] == [len(one) for one in site.logged_keys()]
        keys = site.logged_keys()
        assert all(keys)
        for partition, own_keys in enumerate(keys):
            assert own_keys == [name for name in names if partition_of("default", name, 3) == partition]
            own = [one for one in delivered if one.partition == partition]
            assert [one.delta.vector_id for one in own] == own_keys
            assert [one.offset for one in own] == list(range(len(own_keys)))
        for name, one in zip(names, acks, strict=False):
            (part,) = one.parts
            assert part.ack.offset is not None
            assert keys[part.partition][part.ack.offset] == name
            assert isinstance(part.ack.dot, Dot)
            assert origin_partition(part.ack.dot.origin) == part.partition
        assert joint_ack.count == 30
        for part in joint_ack.parts:
            first = part.ack.offset
            assert first is not None
            assert keys[part.partition][first : first + len(part.rows)] == [
                names[30 + row] for row in part.rows
            ]

    with_streams(scenario, backend=backend)


def test_columns_are_split_into_one_call_per_partition() -> None:
    async def scenario(site: StreamSite) -> None:
        ids = [f"k{number}" for number in range(100)]
        async with site.producer() as p:
            ack = await p.publish_many(ids, [[float(n), 1.0] for n in range(100)])
            assert [p.partition_of(one) for one in ids] == [partition_of("default", one, 3) for one in ids]
            assert p.partition_of("k1", "other") == partition_of("other", "k1", 3)
            assert sorted(row for part in ack.parts for row in part.rows) == list(range(100))
            assert (ack.ack_of(0), ack.ack_of(9)) == (ack.parts[0].ack, None)
        assert site.logged_keys() == [[ids[row] for row in part.rows] for part in ack.parts]

    with_streams(scenario)


def test_clients_of_a_single_partition_publish_and_read() -> None:
    async def scenario(site: StreamSite) -> None:
        async with site.producer() as p, site.subscriber(start="earliest") as s:
            assert p.partitions == s.partitions == 1
            await p.publish(make_delta("a"), make_delta("b"))
            assert (await p.publish(make_delta("c"))).parts[0].partition == 0
            delivered = await read(s, 3)
            assert [(*one[:2], one.delta.vector_id) for one in delivered] == [
                (0, 0, "a"),
                (0, 1, "b"),
                (0, 2, "c"),
            ]
        async with site.producer(stream="default") as p:
            await p.publish(make_delta("d"))
        assert (site.logged_keys(), site.logged_keys("default")) == ([["a", "b", "c"]], [["d"]])

    with_streams(scenario, partitions=1)


def test_stream_is_found_by_its_id_and_an_unknown_one_is_refused() -> None:
    async def scenario(site: StreamSite) -> None:
        stream_id = site.streams.catalogue.require(STREAM).stream_id
        async with site.producer(stream=stream_id) as p, site.subscriber(stream=stream_id) as s:
            await p.publish(make_delta("a"))
            assert (await anext(s)).delta.vector_id == "a"
        assert list(chain(*site.logged_keys())) == ["a"]
        for make_client in (site.producer, site.subscriber):
            with pytest.raises(Refused) as refused:
                async with make_client(stream="missing"):
                    pass
            assert refused.value.code is ErrorCode.UNKNOWN_STREAM
            with pytest.raises(UsageError, match="stream 99: the service has none with this id"):
                async with make_client(stream=99):
                    pass

    with_streams(scenario)


def test_producers_of_two_streams_have_their_own_origins() -> None:
    async def scenario(site: StreamSite) -> None:
        await site.streams.create("other", 3)
        async with site.producer() as p, site.producer(stream="other") as q:
            ack, other_ack = await p.publish(make_delta("a")), await q.publish(make_delta("a"))
            dot, other_dot = ack.parts[0].ack.dot, other_ack.parts[0].ack.dot
            assert isinstance(dot, Dot)
            assert isinstance(other_dot, Dot)
            assert dot.origin != other_dot.origin
            await p.publish(make_delta("b"))  # a producer of the same name elsewhere fences nobody
        assert sorted(chain(*site.logged_keys())) == ["a", "b"]
        assert list(chain(*site.logged_keys("other"))) == ["a"]

    with_streams(scenario)


# --- cursors


def test_reader_resumes_from_one_cursor_per_partition() -> None:
    async def scenario(site: StreamSite) -> None:
        async with site.producer() as p:
            await p.publish(*(make_delta(f"k{number}") for number in range(30)))
            async with site.subscriber(start="earliest") as s:
                first = await read(s, 30)
                with anyio.move_on_after(1):
                    await anext(s)
                cursors = s.cursors
            await p.publish(*(make_delta(f"l{number}") for number in range(30)))
            async with site.subscriber(start=tuple(cursors)) as s:
                second = await read(s, 30)
                assert {one.delta.vector_id[0] for one in second} == {"l"}
                assert len({(one.partition, one.offset) for one in [*first, *second]}) == 60
            reordered = [cursors[1], cursors[0], cursors[2]]
            with pytest.raises(UsageError, match=r"partition [01]: its log is .* in the order of its part"):
                async with site.subscriber(start=reordered):
                    pass
            with pytest.raises(UsageError, match="2 cursors for 3 partitions of stream 'orders'"):
                async with site.subscriber(start=cursors[:2]):
                    pass
            async with site.subscriber(start=[None, *cursors[1:]]) as s:
                redelivered = await read(s, 60 - sum(one.partition != 0 for one in first))
                assert [one.delta.vector_id for one in redelivered if one.partition == 0] == (
                    site.logged_keys()[0]
                )

    with_streams(scenario)


def test_cursors_follow_each_returned_delta() -> None:
    async def scenario(site: StreamSite) -> None:
        async with site.producer() as p:
            await p.publish(*(make_delta(f"k{number}") for number in range(30)))
            async with site.subscriber(start="earliest") as s:
                counts = [0, 0, 0]
                for _ in range(30):
                    before = list(counts)
                    counts[(await anext(s)).partition] += 1
                    assert [one and one.next_offset for one in s.cursors] == before, (
                        "a delta is processed once the next one is requested, and not before"
                    )

    with_streams(scenario)


@pytest.mark.parametrize(
    "start", [5, Cursor(bytes(16), 1, 0), ["earliest"], [5], b"latest", {"partition": 0}]
)
def test_wrong_start_is_refused(start: Any) -> None:
    with pytest.raises(UsageError, match=r"start .*: give earliest, latest, a time, or a cursor for each"):
        stream_subscriber.StreamSubscriber(ADDRESS, "*", stream=STREAM, start=start)


def test_start_at_a_time_holds_for_all_partitions() -> None:
    async def scenario(site: StreamSite) -> None:
        async with site.producer() as p:
            await p.publish(*(make_delta(f"k{number}") for number in range(30)))
            await anyio.sleep(100)
            await p.publish(*(make_delta(f"l{number}") for number in range(30)))
            now_s = site.world.clock.wall_us() / 1e6
            for start in ("50s", datetime.fromtimestamp(now_s).astimezone() - timedelta(seconds=50)):
                async with site.subscriber(start=start) as s:
                    delivered = await read(s, 30)
                assert {one.delta.vector_id[0] for one in delivered} == {"l"}
                assert {one.partition for one in delivered} == {0, 1, 2}

    with_streams(scenario)


def test_each_partition_stores_the_cursor_of_a_group() -> None:
    async def scenario(site: StreamSite) -> None:
        async with site.producer() as p:
            async with site.subscriber(group="readers", ack="manual") as s:
                await p.publish(*(make_delta(f"k{number}") for number in range(20)))
                for row in await read(s, 20):
                    if row.partition != 1:
                        s.ack(row.partition, row.offset)
                with pytest.raises(UsageError, match="give one from 0 to 2"):
                    s.ack(3, 0)
            async with site.subscriber(group="readers") as s:
                redelivered = await read(s, len(site.logged_keys()[1]))
                assert {row.partition for row in redelivered} == {1}, (
                    "rows without an acknowledgement must be redelivered"
                )

    with_streams(scenario)


# --- pausing


def test_paused_partition_returns_nothing_until_resumed() -> None:
    async def scenario(site: StreamSite) -> None:
        async with site.producer() as p, site.subscriber(start="earliest") as s:
            own = [make_delta(key) for key in keys_at(1, 9)]
            await p.publish(*own)
            await p.publish(*(make_delta(key) for key in [*keys_at(0, 2), *keys_at(2, 2)]))
            delivered = [await anext(s)]
            while delivered[-1].partition != 1:
                delivered.append(await anext(s))
            s.pause(1, 1)  # in the middle of a batch
            delivered += await read(s, 4 - sum(one.partition != 1 for one in delivered))
            with anyio.move_on_after(10) as waiting:
                await anext(s)
            assert waiting.cancelled_caught
            assert [one.partition for one in delivered].count(1) == 1
            cursor = s.cursors[1]
            assert cursor is not None
            assert cursor.next_offset == 1, "the row before the pause is processed, the others are not"
            resumed_at: list[float] = []
            async with anyio.create_task_group() as tasks:

                async def resume() -> None:
                    await anyio.sleep(1)
                    s.resume(0, 1)
                    resumed_at.append(anyio.current_time())

                tasks.start_soon(resume)
                rest = await read(s, 1)
                assert anyio.current_time() == resumed_at[0], "resuming wakes the reader at once"
                rest += await read(s, 7)
            assert [one.offset for one in rest] == list(range(1, 9))
            assert {one.partition for one in rest} == {1}

    with_streams(scenario)


def test_paused_partition_holds_no_more_than_its_credit() -> None:
    async def scenario(site: StreamSite) -> None:
        async with (
            site.producer() as p,
            site.subscriber(start="earliest", credit=(20, 1_000_000)) as s,
        ):
            s.pause(0)
            for key in keys_at(0, 100):
                await p.publish(make_delta(key))
            await p.publish(make_delta(*keys_at(2)))
            partition, batch = await s.next_batch()
            assert (partition, [one.delta.vector_id for one in batch]) == (2, keys_at(2))
            assert s._readers is not None
            assert s._readers.get(0).received == 20
            s.resume(0)
            assert [one.delta.vector_id for one in await read(s, 100)] == keys_at(0, 100)

    with_streams(scenario)


def test_only_partitions_of_an_open_subscriber_are_paused() -> None:
    async def scenario(site: StreamSite) -> None:
        s = site.subscriber()
        for call in (lambda: s.pause(0), lambda: s.resume(0), lambda: s.partitions, lambda: s.cursors):
            with pytest.raises(UsageError, match="is not open yet: use it inside its `async with`"):
                call()
        with pytest.raises(UsageError, match="is not open yet"):
            await anext(s)
        async with s:
            for wrong in (3, -1, True, "0", None):
                for change in (s.pause, s.resume):
                    with pytest.raises(UsageError, match=r"partition .*: give one from 0 to 2"):
                        change(0, wrong)  # type: ignore[arg-type]
            assert not s._paused, "a call with a wrong partition changes nothing"
        with pytest.raises(UsageError, match="was opened before: create another one"):
            async with s:
                pass

    with_streams(scenario)


def test_failure_of_a_paused_partition_is_raised() -> None:
    async def scenario(site: StreamSite) -> None:
        async with site.subscriber() as s:
            s.pause(0, 1, 2)
            await anyio.sleep(1)
            await site.streams.delete(STREAM)
            with pytest.raises(Refused) as refused:
                await anext(s)
            assert refused.value.code is ErrorCode.UNKNOWN_STREAM

    with_streams(scenario)


# --- streams of very many partitions


def test_clients_open_only_so_many_partitions() -> None:
    async def scenario(site: StreamSite) -> None:
        before = len(site.streams.open_partitions())
        for client, fix in ((site.producer(), "use Producer"), (site.subscriber(), "read fewer")):
            with pytest.raises(UsageError, match=f"1001 partitions are too many for one client.*: {fix}"):
                async with client:
                    pass
        assert len(site.streams.open_partitions()) == before
        async with site.subscriber(partitions=[1_000]) as s:
            with pytest.raises(UsageError, match="1001 partitions are too many"):
                s.assign()
            assert s.assigned == [1_000]
            assert s.unconnected == []

    with_streams(scenario, partitions=1_001)


# --- partitions that do not answer


def test_absent_partition_delays_only_its_own_vectors() -> None:
    async def scenario(site: StreamSite) -> None:
        async with site.producer() as p, site.subscriber() as s:
            await site.streams.hold(STREAM, 1)
            done: list[str] = []

            async def publish(name: str) -> None:
                await p.publish(make_delta(name), timeout_s=100)
                done.append(name)

            async with anyio.create_task_group() as tasks:
                for name in (*keys_at(1, 2), *keys_at(0, 2), *keys_at(2, 2)):
                    tasks.start_soon(publish, name)
                delivered = await read(s, 4)
                await anyio.sleep(20)
                assert {one.partition for one in delivered} == {0, 2}
                assert sorted(done) == sorted([*keys_at(0, 2), *keys_at(2, 2)])
                site.streams.release_held()
            assert sorted(done) == sorted([*keys_at(0, 2), *keys_at(1, 2), *keys_at(2, 2)])
            assert [one.partition for one in await read(s, 2)] == [1, 1]

    with_streams(scenario)


def hold_after_lookup(site: StreamSite, monkeypatch: pytest.MonkeyPatch, *partitions: int) -> None:
    """Hold partitions as soon as a client has found the stream, before it says hello to them."""

    async def describe_stream(*arguments: Any) -> Any:
        found = await lookup(*arguments)
        await site.streams.hold(STREAM, *partitions)
        return found

    lookup = stream_producer.describe_stream
    for module in (stream_producer, stream_subscriber):
        monkeypatch.setattr(module, "describe_stream", describe_stream)


@pytest.mark.parametrize("client", ["producer", "subscriber"])
def test_clients_open_without_a_partition_that_does_not_answer(
    client: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(site: StreamSite) -> None:
        hold_after_lookup(site, monkeypatch, 2)
        began = anyio.current_time()
        if client == "producer":
            async with site.producer() as p:
                assert 2 <= anyio.current_time() - began < 4
                await p.publish(make_delta(*keys_at(0)))
                receipt = p.offer(make_delta(*keys_at(2)))
                await anyio.sleep(10)
                assert (p.in_flight_offers, receipt.done) == (1, False)
                site.streams.release_held()
                assert (await receipt).parts[0].partition == 2
        else:
            async with site.subscriber(start="earliest") as s:
                assert 2 <= anyio.current_time() - began < 4
                assert [one is None for one in s.cursors] == [False, False, True]
                site.streams.release_held()
                monkeypatch.undo()
                async with site.producer() as p:
                    await p.publish(make_delta(*keys_at(2)))
                assert (await anext(s)).partition == 2

    with_streams(scenario)


@pytest.mark.parametrize("client", ["producer", "subscriber"])
def test_clients_do_not_open_if_no_partition_answers(client: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(site: StreamSite) -> None:
        hold_after_lookup(site, monkeypatch, 0, 1, 2)
        with pytest.raises(Unreachable, match="none of the 3 partitions of stream 'orders' has answered"):
            async with getattr(site, client)(settings=ClientSettings(open_timeout_s=5)):
                pass
        monkeypatch.undo()
        site.streams.release_held()
        site.network.cut("client", "server")
        with pytest.raises(Unreachable, match=f"none of {ADDRESS} has answered for 5 s"):
            async with getattr(site, client)(settings=ClientSettings(open_timeout_s=5)):
                pass

    with_streams(scenario)


def test_deleted_stream_ends_its_clients() -> None:
    async def scenario(site: StreamSite) -> None:
        async with site.producer() as p, site.subscriber() as s:
            await site.streams.delete(STREAM)
            for call in (lambda: p.publish(make_delta("a")), lambda: anext(s)):
                with pytest.raises(Refused) as refused:
                    await call()  # type: ignore[no-untyped-call]
                assert refused.value.code is ErrorCode.UNKNOWN_STREAM

    with_streams(scenario)


# --- calls for several partitions


def test_cause_in_another_partition_is_acked_before_its_effect() -> None:
    async def scenario(site: StreamSite) -> None:
        (parent,), (child,), (sibling,) = keys_at(0), keys_at(1), keys_at(0, 2)[1:]
        async with site.producer() as p:
            await site.streams.hold(STREAM, 0)
            await p.publish(make_delta(*keys_at(2)))
            cause = p.offer(make_delta(parent))
            sibling_receipt = p.offer(make_delta(sibling), after=[cause])
            with pytest.raises(UsageError, match="use publish"):
                p.offer(make_delta(child), after=[cause])
            with pytest.raises(Refused) as refused:
                await p.publish(make_delta(child), after=[cause], timeout_s=5)
            assert refused.value.code is ErrorCode.DEP_TIMEOUT
            assert not cause.done, "a call that waits for a cause must not withdraw it"
            assert site.logged_keys()[1] == []

            async def release() -> None:
                await anyio.sleep(5)
                assert site.logged_keys()[1] == []
                site.streams.release_held()

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(release)
                ack = await p.publish(make_delta(child), after=[cause])
            assert cause.done
            assert (await sibling_receipt).parts[0].ack.offset == 1
            assert site.logged_keys() == [[parent, sibling], [child], keys_at(2)]
            dot = ack.parts[0].ack.dot
            assert isinstance(dot, Dot)
            for named in (ack, ack.parts[0].ack, dot, cause):
                await p.publish(make_delta(parent, parents=(dot,)), make_delta(child), after=[named])
            with pytest.raises(UsageError, match="an id does not show which partition"):
                await p.publish(make_delta(child), after=[bytes(16)])

    with_streams(scenario)


def test_effect_of_a_cause_that_failed_in_another_partition_is_not_sent() -> None:
    async def scenario(site: StreamSite) -> None:
        (key,), (effect,) = keys_at(0), keys_at(1)
        async with site.producer() as p:
            await p.publish(Delta(key, create([1.0, 2.0])))
            refused = p.offer(Delta(key, create([1.0])))
            await site.streams.hold(STREAM, 0)
            withdrawn = p.offer(make_delta(key))
            with anyio.move_on_after(1):
                await withdrawn
            site.streams.release_held()
            await refused.wait_done()
            for cause, error in ((refused, Refused), (withdrawn, UsageError)):
                with pytest.raises(error):
                    await p.publish(make_delta(effect), after=[cause])
                with pytest.raises(error):
                    p.offer(make_delta(effect), after=[cause])
        assert [len(keys) for keys in site.logged_keys()] == [1, 0, 0]

    with_streams(scenario)


def test_each_part_has_its_own_outcome_with_the_callers_rows() -> None:
    async def scenario(site: StreamSite) -> None:
        async with site.producer() as p:
            await p.publish(Delta(keys_at(0)[0], create([1.0, 2.0])))
            wrong = Delta(keys_at(0)[0], create([1.0]))
            with pytest.raises(StreamRefused, match=r"partition 0: .*; 1 rows were ack") as refused:
                await p.publish(Delta(keys_at(1)[0], create([1.0])), wrong)
            assert (refused.value.code, refused.value.row) == (ErrorCode.INVALID_DELTA, 1)
            assert refused.value.details["partition"] == 0
            assert [(part.partition, part.rows) for part in refused.value.acknowledged] == [(1, [0])]
            with pytest.raises(Refused) as single:
                await p.publish(wrong)
            assert not isinstance(single.value, StreamRefused)
            receipt = p.offer(wrong)
            with pytest.raises(Refused):
                await receipt

    with_streams(scenario)


def test_cancelled_call_is_withdrawn_from_each_partition() -> None:
    async def scenario(site: StreamSite) -> None:
        async with site.producer() as p:
            site.network.cut("client", "server")
            await anyio.sleep(60)
            with anyio.move_on_after(1):
                await p.publish(*(make_delta(f"k{number}") for number in range(9)))
            receipt = p.offer(*(make_delta(f"l{number}") for number in range(9)))
            assert p.in_flight_offers == 3
            with anyio.move_on_after(1):
                await receipt
            assert p.in_flight_offers == 0
            site.network.heal("client", "server")
            await p.publish(*(make_delta(f"m{number}", priority=Priority.HIGH) for number in range(9)))
            await p.flush()
            assert all(site.logged_keys())
            assert {key[0] for key in chain(*site.logged_keys())} == {"m"}

    with_streams(scenario)


def test_producer_works_only_while_it_is_open() -> None:
    async def scenario(site: StreamSite) -> None:
        p = site.producer()
        for call in (lambda: p.offer(make_delta("a")), lambda: p.partition_of("a"), lambda: p.partitions):
            with pytest.raises(UsageError, match="'shop' is not open yet: use it inside its `async with`"):
                call()
        for wait in (lambda: p.publish(make_delta("a")), p.flush):
            with pytest.raises(UsageError, match="'shop' is not open yet"):
                await wait()
        async with p:
            receipts = [p.offer(make_delta(f"k{number}")) for number in range(9)]
        assert all(receipt.done for receipt in receipts), "closing waits for all outcomes"
        assert sum(map(len, site.logged_keys())) == 9
        with pytest.raises(UsageError, match="'shop' is closed"):
            await p.publish(make_delta("a"))
        with pytest.raises(UsageError, match="was opened before: create another one"):
            async with p:
                pass

    with_streams(scenario)


# --- the map of partitions


@pytest.mark.parametrize("count", [1, 2, 3, 1_000])
def test_map_groups_rows_and_columns_by_the_same_partitions(count: int) -> None:
    ids = [f"k{number % 70}" for number in range(100)]
    partition_map = PartitionMap(count)
    by_row = partition_map.group_rows([make_delta(one, namespace="n") for one in ids])
    assert by_row == partition_map.group_columns("n", ids)
    assert {partition: {ids[row] for row in rows} for partition, rows in by_row} == {
        partition: {one for one in ids if partition_of("n", one, count) == partition}
        for partition in {partition_of("n", one, count) for one in ids}
    }


def test_ack_level_of_the_stream_is_that_of_producers_that_request_none() -> None:
    async def scenario(site: StreamSite) -> None:
        async def levels() -> list[AckLevel]:
            found = []
            for requested in (None, "memory", "durable", "highest"):
                async with site.producer(name=f"{requested} {given}", ack_level=requested) as p:
                    (part,) = (await p.publish(make_delta("a"))).parts
                    found.append(part.ack.level)
            own = await (await site.streams.open(STREAM)).publish(make_delta("b"))
            return [*found, own.level]

        memory, logged, durable = AckLevel.MEMORY, AckLevel.LOGGED, AckLevel.DURABLE
        for given, default in ((None, durable), ("logged", logged), ("memory", memory), (None, durable)):
            await site.streams.alter(STREAM, {"ack_level": given})
            assert await levels() == [default, memory, durable, durable, default]

    with_streams(scenario, partitions=1)
