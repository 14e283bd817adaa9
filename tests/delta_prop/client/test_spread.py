"""A client of several services: each vector is at one service, and a stopped service delays only its own."""

from __future__ import annotations

from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Literal

import anyio
import pytest

from delta_prop.client.errors import Unreachable
from delta_prop.client.settings import ClientSettings
from delta_prop.client.spread_producer import SpreadProducer
from delta_prop.client.spread_subscriber import SpreadDelivered, SpreadSubscriber
from delta_prop.client.spreading import SpreadRefused, check_distinct_logs, parse_services
from delta_prop.server.settings import ServerSettings
from delta_prop.testing import VirtualNetwork, run_virtual, virtual_world
from delta_prop_wire.delta import Delta, Dot, Priority, create, opaque
from delta_prop_wire.errors import Refused, UsageError
from delta_prop_wire.murmur import partition_of
from delta_prop_wire.spec import ErrorCode
from tests.delta_prop.client.virtual_service import Site

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from delta_prop.platform.ports import World

HOSTS = ("one", "two", "three")


class Member(Site):
    """One of several services on a network."""

    def __init__(self, seed: int, network: VirtualNetwork, host: str) -> None:
        self.network = network
        self.server_world = virtual_world(seed, network=network.at(host))
        self.server_settings = ServerSettings(host=host, allow_anonymous=True)
        self._propagator_settings = None
        self._tokens = None


class Services:
    """Several services on one network, and the host of their client."""

    def __init__(self) -> None:
        self.network = VirtualNetwork(1, host="client")
        self.world: World = virtual_world(1, network=self.network)
        self.members = [Member(number + 2, self.network, host) for number, host in enumerate(HOSTS)]

    def producer(self, hosts: tuple[str, ...] = HOSTS, **more: Any) -> SpreadProducer:
        return SpreadProducer(hosts, name="orders", world=self.world, **more)

    def subscriber(self, *topics: str, hosts: tuple[str, ...] = HOSTS, **more: Any) -> SpreadSubscriber:
        return SpreadSubscriber(hosts, *(topics or ("*",)), world=self.world, **more)

    def logged_keys(self) -> list[list[str]]:
        return [one.keys() for one in self.members]


def with_services(
    scenario: Callable[[Services], Awaitable[None]], backend: Literal["asyncio", "trio"] = "asyncio"
) -> None:
    async def run() -> None:
        services = Services()
        async with anyio.create_task_group() as tasks:
            for member in services.members:
                await tasks.start(member.run)
            with anyio.fail_after(3_600):
                await scenario(services)
            tasks.cancel_scope.cancel()

    run_virtual(run, backend=backend)


def make_delta(key: str, **more: Any) -> Delta:
    return Delta(key, opaque(key.encode()), **more)


def keys_at(index: int, count: int = 1, namespace: str = "default") -> list[str]:
    """Return `count` vector ids that belong to the service at `index` of the list of services."""
    names = (f"k{number}" for number in range(10_000))
    return list(islice((name for name in names if partition_of(namespace, name, 3) == index), count))


async def read(s: SpreadSubscriber, count: int) -> list[SpreadDelivered]:
    return [await anext(s) for _ in range(count)]


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_each_vector_is_at_one_service_and_read_in_order(
    backend: Literal["asyncio", "trio"],
) -> None:
    async def scenario(services: Services) -> None:
        names = [f"k{number % 20}" for number in range(60)]
        async with services.producer() as p, services.subscriber() as s:
            acks = [await p.publish(make_delta(name)) for name in names[:30]]
            joint_ack = await p.publish(*(make_delta(name) for name in names[30:]))
            delivered = await read(s, 60)
            assert s.log_ids == p.log_ids
            assert [one.deltas for one in p.statistics()] == [len(one) for one in services.logged_keys()]
        keys = services.logged_keys()
        assert all(keys)
        assert sorted(chain(*keys)) == sorted(names)
        for index, own_keys in enumerate(keys):
            assert own_keys == [name for name in names if partition_of("default", name, 3) == index]
            assert [one.delta.vector_id for one in delivered if one.service_index == index] == own_keys
            assert [one.offset for one in delivered if one.service_index == index] == list(
                range(len(own_keys))
            )
        for name, one in zip(names, acks, strict=False):
            (part,) = one.parts
            assert part.ack.offset is not None
            assert keys[part.service_index][part.ack.offset] == name
        assert joint_ack.count == 30
        for part in joint_ack.parts:
            first = part.ack.offset
            assert first is not None
            assert keys[part.service_index][first : first + len(part.rows)] == [
                names[30 + row] for row in part.rows
            ]

    with_services(scenario, backend)


def test_columns_are_split_into_one_call_per_service() -> None:
    async def scenario(services: Services) -> None:
        ids = [f"k{number}" for number in range(100)]
        async with services.producer() as p:
            ack = await p.publish_many(ids, [[float(n), 1.0] for n in range(100)])
            assert [p.service_index_of(one) for one in ids] == [
                partition_of("default", one, 3) for one in ids
            ]
            assert sorted(row for part in ack.parts for row in part.rows) == list(range(100))
            assert (ack.ack_of(0), ack.ack_of(9)) == (ack.parts[0].ack, None)
        assert services.logged_keys() == [[ids[row] for row in part.rows] for part in ack.parts]

    with_services(scenario)


def test_reader_resumes_from_one_cursor_per_service() -> None:
    async def scenario(services: Services) -> None:
        async with services.producer() as p:
            await p.publish(*(make_delta(f"k{number}") for number in range(30)))
            async with services.subscriber(start="earliest") as s:
                first = await read(s, 30)
                with anyio.move_on_after(1):
                    await anext(s)
                cursors = s.cursors
            await p.publish(*(make_delta(f"l{number}") for number in range(30)))
            async with services.subscriber(start=cursors) as s:
                second = await read(s, 30)
                assert {one.delta.vector_id[0] for one in second} == {"l"}
                assert len({(one.service_index, one.offset) for one in [*first, *second]}) == 60
            log_ids = [one.log_id for one in cursors if one is not None]
            with pytest.raises(
                UsageError, match=r"service 0: it has log .*, which belongs to service 1: .* order"
            ):
                async with services.subscriber(hosts=("two", "one", "three"), start=cursors):
                    pass
            with pytest.raises(UsageError, match="2 cursors for 3 services"):
                services.subscriber(start=cursors[:2])
            assert log_ids == p.log_ids

    with_services(scenario)


def test_each_service_stores_the_cursor_of_a_group() -> None:
    async def scenario(services: Services) -> None:
        async with services.producer() as p:
            async with services.subscriber(group="readers", ack="manual") as s:
                await p.publish(*(make_delta(f"k{number}") for number in range(20)))
                for row in await read(s, 20):
                    if row.service_index != 1:
                        s.ack(row.service_index, row.offset)
                with pytest.raises(UsageError, match="give one from 0 to 2"):
                    s.ack(3, 0)
            async with services.subscriber(group="readers") as s:
                redelivered = await read(s, len(services.logged_keys()[1]))
                assert {row.service_index for row in redelivered} == {1}, (
                    "rows without an acknowledgement must be redelivered"
                )

    with_services(scenario)


def test_absent_service_delays_only_its_own_vectors() -> None:
    async def scenario(services: Services) -> None:
        async with services.producer() as p, services.subscriber() as s:
            services.network.cut("client", "two")
            done: list[str] = []

            async def publish(name: str) -> None:
                await p.publish(make_delta(name), timeout_s=100)
                done.append(name)

            async with anyio.create_task_group() as tasks:
                for name in (*keys_at(1, 2), *keys_at(0, 2), *keys_at(2, 2)):
                    tasks.start_soon(publish, name)
                delivered = await read(s, 4)
                await anyio.sleep(20)
                assert {one.service_index for one in delivered} == {0, 2}
                assert sorted(done) == sorted([*keys_at(0, 2), *keys_at(2, 2)])
                services.network.heal("client", "two")
            assert sorted(done) == sorted([*keys_at(0, 2), *keys_at(1, 2), *keys_at(2, 2)])
            assert [one.service_index for one in await read(s, 2)] == [1, 1]

    with_services(scenario)


def test_clients_open_unless_all_services_are_unreachable() -> None:
    async def scenario(services: Services) -> None:
        services.network.cut("client", "three")
        async with services.producer() as p, services.subscriber(start="earliest") as s:
            assert anyio.current_time() < 10
            assert p.log_ids[2] is s.log_ids[2] is s.cursors[2] is None
            await p.publish(make_delta(*keys_at(0)))
            assert (await anext(s)).service_index == 0
            receipt = p.offer(make_delta(*keys_at(2)))
            services.network.heal("client", "three")
            assert (await receipt).parts[0].service_index == 2
            assert (await anext(s)).service_index == 2
        for host in HOSTS:
            services.network.cut("client", host)
        short_timeout = ClientSettings(open_timeout_s=5)
        for client in (
            services.producer(settings=short_timeout),
            services.subscriber(settings=short_timeout),
        ):
            with pytest.raises(Unreachable, match="none of 3 services"):
                async with client:
                    pass

    with_services(scenario)


def test_cause_at_another_service_is_acked_before_its_effect() -> None:
    async def scenario(services: Services) -> None:
        (parent,), (child,), (sibling,) = keys_at(0), keys_at(1), keys_at(0, 2)[1:]
        async with services.producer() as p:
            services.network.cut("client", "one")
            cause = p.offer(make_delta(parent))
            sibling_receipt = p.offer(make_delta(sibling), after=[cause])
            with pytest.raises(UsageError, match="use publish"):
                p.offer(make_delta(child), after=[cause])
            with pytest.raises(Refused) as refused:
                await p.publish(make_delta(child), after=[cause], timeout_s=5)
            assert refused.value.code is ErrorCode.DEP_TIMEOUT
            assert services.logged_keys()[1] == []

            async def heal() -> None:
                await anyio.sleep(5)
                assert services.logged_keys()[1] == []
                services.network.heal("client", "one")

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(heal)
                ack = await p.publish(make_delta(child), after=[cause])
            assert cause.done
            assert (await sibling_receipt).parts[0].ack.offset == 1
            assert services.logged_keys() == [[parent, sibling], [child], []]
            dot = ack.parts[0].ack.dot
            assert isinstance(dot, Dot)
            for named in (ack, ack.parts[0].ack, dot, cause):
                await p.publish(make_delta(parent, parents=(dot,)), make_delta(child), after=[named])
            with pytest.raises(UsageError, match="an id does not show"):
                await p.publish(make_delta(child), after=[bytes(16)])

    with_services(scenario)


def test_each_part_has_its_own_outcome_with_the_callers_rows() -> None:
    async def scenario(services: Services) -> None:
        async with services.producer() as p:
            await p.publish(Delta(keys_at(0)[0], create([1.0, 2.0])))
            wrong = Delta(keys_at(0)[0], create([1.0]))
            with pytest.raises(SpreadRefused) as refused:
                await p.publish(Delta(keys_at(1)[0], create([1.0])), wrong)
            assert (refused.value.code, refused.value.row) == (ErrorCode.INVALID_DELTA, 1)
            assert [part.rows for part in refused.value.acknowledged] == [[0]]
            with pytest.raises(Refused) as single:
                await p.publish(wrong)
            assert not isinstance(single.value, SpreadRefused)
            receipt = p.offer(wrong)
            with pytest.raises(Refused):
                await receipt

    with_services(scenario)


def test_cancelled_call_is_withdrawn_at_each_service() -> None:
    async def scenario(services: Services) -> None:
        async with services.producer() as p:
            for host in HOSTS:
                services.network.cut("client", host)
            await anyio.sleep(60)
            with anyio.move_on_after(1):
                await p.publish(*(make_delta(f"k{number}") for number in range(9)))
            receipt = p.offer(*(make_delta(f"l{number}") for number in range(9)))
            with anyio.move_on_after(1):
                await receipt
            assert p.in_flight_offers == 0
            for host in HOSTS:
                services.network.heal("client", host)
            await p.publish(*(make_delta(f"m{number}", priority=Priority.HIGH) for number in range(9)))
            await p.flush()
            assert {key[0] for key in chain(*services.logged_keys())} == {"m"}

    with_services(scenario)


def test_services_in_another_order_or_number_are_refused() -> None:
    async def scenario(services: Services) -> None:
        async with services.producer() as p:
            log_ids = p.log_ids
        async with services.producer(log_ids=log_ids):
            pass
        for client in (services.producer, services.subscriber):
            with pytest.raises(
                UsageError, match=r"service [01]: it has log .*, which belongs to service [01]:"
            ):
                async with client(hosts=("two", "one", "three"), log_ids=log_ids):
                    pass
            with pytest.raises(
                UsageError, match=r"service 1: it has log .*, which belongs to none of these services"
            ):
                async with client(hosts=("one", "two"), log_ids=[log_ids[0], log_ids[2]]):
                    pass
            with pytest.raises(UsageError, match="3 log ids for 2 services"):
                client(hosts=("one", "two"), log_ids=log_ids)

    with_services(scenario)


@pytest.mark.parametrize(
    ("services", "expected"),
    [
        ("one:1", "give a list"),
        ([], "0 services"),
        (["one:1", "two:1", "one:1"], "one:1: given twice"),
        ([f"s{number}:1" for number in range(65)], "65 services"),
    ],
)
def test_wrong_list_of_services_is_refused(services: Any, expected: str) -> None:
    with pytest.raises(UsageError, match=expected):
        parse_services(services)


def test_one_service_under_two_addresses_is_refused() -> None:
    with pytest.raises(UsageError, match=r"services 0 and 1: .* one"):
        check_distinct_logs(1, {0: b"a", 1: b"a"})
