"""The producer over a false network, against the real server: one effect each, whatever breaks."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import anyio
import pytest

from delta_prop.client.errors import Unreachable
from delta_prop.client.producer import Producer
from delta_prop.client.settings import ClientSettings
from delta_prop.outcomes import OfferState, PublishAck
from delta_prop.receipt import Receipt
from delta_prop.testing import VirtualNetwork, run_virtual, virtual_world
from delta_prop.testing.network_path import NetworkConditions
from delta_prop_wire.delta import AckLevel, Delta, Priority, Source, create, opaque
from delta_prop_wire.errors import InvalidDelta, Refused, UsageError
from delta_prop_wire.spec import ErrorCode
from tests.delta_prop.client.serving import ADDRESS, Site, with_service
from tests.delta_prop.server.tokens import File, table


def made(key: str, **more: object) -> Delta:
    return Delta(key, opaque(key.encode()), **more)  # type: ignore[arg-type]


def producer(site: Site, name: str = "orders", **more: object) -> Producer:
    return Producer(ADDRESS, name=name, world=site.world, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_published_is_logged_once_and_acknowledged_with_its_offset(
    backend: Literal["asyncio", "trio"],
) -> None:
    async def story(site: Site) -> None:
        async with producer(site) as p:
            first = await p.publish(made("a"), made("b"))
            receipt = p.offer(made("c"))
            second = await receipt
            assert (first.offset, first.count, second.offset) == (0, 2, 2)
            assert first.dot is not None
            assert second.dot == first.dot._replace(counter=3)
            assert second.level is AckLevel.MEMORY
            matrix = await p.publish_many(["d", "e"], [[1, 2], [3, 4]], namespace="vectors")
            assert (matrix.offset, matrix.count) == (3, 2)
        assert site.keys() == ["a", "b", "c", "d", "e"]

    with_service(story, backend=backend)


def test_what_one_turn_offers_goes_as_one_batch_a_priority() -> None:
    async def story(site: Site) -> None:
        async with producer(site) as p:
            await p.publish(made("first"))
            for at in range(50):
                p.offer(made(f"n{at}"))
                p.offer(made(f"h{at}", priority=Priority.HIGH))
            await p.flush()
            assert p.statistics().batches == 3
            assert p.statistics().acknowledged == 101

    with_service(story)


@pytest.mark.parametrize("seed", range(2))
def test_connections_that_break_lose_and_double_nothing(seed: int) -> None:
    conditions = NetworkConditions(
        latency_s=0.002, jitter_s_max=0.003, chunk_bytes_max=700, reset_bytes_mean=4_000
    )

    async def story(site: Site) -> None:
        async with producer(site) as p:
            receipts = []
            for at in range(150):
                receipts.append(p.offer(made(f"k{at % 7}-{at}", priority=Priority(at % 4))))
                if at % 3 == 0:
                    await anyio.sleep(0.002)
            told = [await one for one in receipts]
            assert p.reconnects
            assert not any(one.duplicates for one in told), "sent twice by itself is new to its caller"
        keys = site.keys()
        assert len(keys) == len(set(keys)) == 150
        assert [keys[one.offset] for one in told if one.offset is not None] == [
            f"k{at % 7}-{at}" for at in range(150)
        ]

    with_service(story, seed=seed, conditions=conditions)


def test_a_connection_that_got_on_is_made_anew_soon() -> None:
    async def story(site: Site) -> None:
        async with producer(site) as p:
            for at in range(12):
                await p.publish(made(f"k{at}"))
                site.network.reset()
        assert anyio.current_time() < 2

    with_service(story)


def test_a_cut_that_heals_is_waited_out() -> None:
    async def story(site: Site) -> None:
        async with producer(site) as p:
            await p.publish(made("a"))
            site.network.cut("client", "server")
            receipt = p.offer(made("b"))
            await anyio.sleep(40)
            assert not receipt.done
            site.network.heal("client", "server")
            assert (await receipt).offset == 1

    with_service(story)


def test_a_service_that_ends_says_so_and_its_clients_come_back() -> None:
    async def story(site: Site) -> None:
        async with producer(site) as p, anyio.create_task_group() as tasks:
            await p.publish(made("a"))
            await site.stop()
            receipt = p.offer(made("b"))
            await anyio.sleep(3)
            await tasks.start(site.run)
            assert (await receipt).offset == 0, "a log in memory begins anew"
            assert (await p.publish(made("c"))).offset == 1
            assert p.statistics().lost == 1
            tasks.cancel_scope.cancel()

    with_service(story)


def test_credits_bound_what_is_under_way() -> None:
    async def story(site: Site) -> None:
        most = 0
        async with producer(site) as p, anyio.create_task_group() as tasks:

            async def watch() -> None:
                nonlocal most
                while True:
                    most = max(
                        most,
                        sum(peer.produce_handler.pending_frames for peer in site.service._handlers.values()),
                    )
                    await anyio.sleep(0.0001)

            tasks.start_soon(watch)
            for at in range(400):
                p.offer(made(f"k{at}"), made(f"l{at}"))
            await p.flush()
            tasks.cancel_scope.cancel()
        assert len(site.keys()) == 800

    with_service(story, producer_deltas_credit=10)


def test_what_is_refused_says_why_and_the_rest_goes_on() -> None:
    async def story(site: Site) -> None:
        async with producer(site) as p:
            await p.publish(Delta("v", create([1.0, 2.0]), "vectors"))
            bad = p.offer(Delta("w", create([1.0]), "vectors"))
            good = p.offer(Delta("x", create([1.0, 3.0]), "vectors"))
            with pytest.raises(Refused, match="INVALID_DELTA"):
                await bad
            await good
            with pytest.raises(InvalidDelta):
                p.offer(Delta("", create([1.0])))
            with pytest.raises(UsageError, match="send each in a call"):
                p.offer(made("a"), made("b", priority=Priority.HIGH))
        assert site.keys() == ["v", "x"]

    with_service(story)


def test_a_second_producer_of_the_name_fences_the_first() -> None:
    async def story(site: Site) -> None:
        async with producer(site) as first:
            await first.publish(made("a"))
            async with producer(site) as second:
                await second.publish(made("b"))
                with pytest.raises(Refused, match="FENCED"):
                    await first.publish(made("c"))
                with pytest.raises(Refused, match="FENCED"):
                    first.offer(made("d"))
        assert site.keys() == ["a", "b"]

    with_service(story)


def test_numbered_lines_are_published_once_however_often_the_import_is_repeated() -> None:
    def note(told: dict[int, PublishAck], number: int, receipt: Receipt) -> None:
        told[number] = receipt.result()

    async def import_(site: Site, lines: int) -> list[PublishAck]:
        told: dict[int, PublishAck] = {}
        async with producer(site, "import") as p:
            for number in range(1, lines + 1):
                p.offer_numbered(
                    number,
                    made(f"line {number}"),
                    lambda one, number=number: told.update({number: one.result()}),
                )
            await p.flush()
        return [told[number] for number in range(1, lines + 1)]

    async def story(site: Site) -> None:
        first = await import_(site, 100)
        again = await import_(site, 120)
        assert [one.offset for one in first] == list(range(100))
        assert [one.duplicates for one in again[:100]] == [{0: at} for at in range(100)]
        assert [one.offset for one in again[100:]] == list(range(100, 120))
        assert len(site.keys()) == 120

    with_service(story)


def test_named_causes_come_first_across_priorities() -> None:
    async def story(site: Site) -> None:
        async with producer(site) as p:
            cause = p.offer(made("cause", priority=Priority.LOW))
            effect = p.offer(made("effect", priority=Priority.CRITICAL), after=[cause])
            await effect
            later = await p.publish(made("later"), after=[effect, await cause])
            assert later.offset == 2
        assert site.keys() == ["cause", "effect", "later"]

    with_service(story)


# --- tokens


TOKENS = table("writer", "secret", publish=True, namespaces='["docs"]', rate=100_000, burst=100_000)


def test_what_a_token_does_not_allow_is_refused_alone() -> None:
    async def story(site: Site) -> None:
        async with producer(site, token="secret") as p:
            good = [p.offer(made(f"k{at}", namespace="docs")) for at in range(5)]
            bad = p.offer(made("x", namespace="mail"))
            good += [p.offer(made(f"k{at}", namespace="docs")) for at in range(5, 10)]
            with pytest.raises(Refused, match="UNAUTHORIZED"):
                await bad
            for one in good:
                await one
            assert p.statistics().lost == 0
        assert site.keys() == [f"k{at}" for at in range(10)]

    with_service(story, tokens=File(TOKENS))


@pytest.mark.parametrize("token", [None, "other"])
def test_a_wrong_token_is_told_at_the_opening(token: str | None) -> None:
    async def story(site: Site) -> None:
        with pytest.raises(Refused, match="UNAUTHORIZED"):
            async with producer(site, token=token):
                pass

    with_service(story, tokens=File(TOKENS))


def test_a_token_that_is_taken_back_ends_the_producer() -> None:
    file = File(TOKENS)

    async def story(site: Site) -> None:
        async with producer(site, token="secret") as p:
            await p.publish(made("a", namespace="docs"))
            file.holds = table("another", "else", publish=True, namespaces='["*"]')
            await anyio.sleep(5)
            with pytest.raises(Refused, match="UNAUTHORIZED"):
                await p.publish(made("b", namespace="docs"))

    with_service(story, tokens=file)


def test_a_rate_that_a_token_bounds_is_kept_to() -> None:
    async def story(site: Site) -> None:
        async with producer(site, token="secret") as p:
            for at in range(60):
                p.offer(made(f"k{at}", namespace="docs"))
                await anyio.sleep(0.001)
            await p.flush()
            assert 1 < anyio.current_time() < 20
        assert site.keys() == [f"k{at}" for at in range(60)]

    slow = table("writer", "secret", publish=True, namespaces='["*"]', rate=10, burst=10)
    with_service(story, tokens=File(slow))


# --- times and ends


def test_publish_gives_up_in_time_and_says_whether_it_may_have_happened() -> None:
    async def story(site: Site) -> None:
        async with producer(site) as p:
            await p.publish(made("a"))
            site.network.cut("server", "client")
            with pytest.raises(Refused, match="may have happened"):
                await p.publish(made("b"), timeout_s=2)
            await anyio.sleep(60)
            with pytest.raises(Refused, match="has not happened"):
                await p.publish(made("c"), timeout_s=2)
            site.network.heal("server", "client")
            assert (await p.publish(made("d"))).offset == 2
        assert site.keys() == ["a", "b", "d"]

    with_service(story)


def test_a_cancelled_publish_is_taken_back_where_it_was_not_under_way() -> None:
    async def story(site: Site) -> None:
        async with producer(site) as p:
            site.network.cut("client", "server")
            await anyio.sleep(60)
            with anyio.move_on_after(1):
                await p.publish(made("a"))
            site.network.heal("client", "server")
            await p.publish(made("b"))
        assert site.keys() == ["b"]

    with_service(story)


def test_offers_are_told_in_time_though_nobody_answers() -> None:
    async def story(site: Site) -> None:
        async with producer(site, settings=ClientSettings(delivery_timeout_s=20, close_timeout_s=1)) as p:
            site.network.cut("client", "server")
            receipt = p.offer(made("a"))
            began = anyio.current_time()
            with pytest.raises(Refused):
                await receipt
            assert 20 <= anyio.current_time() - began <= 22
            assert p.in_flight_offers == 0

    with_service(story)


def test_nobody_there_is_told_in_time() -> None:
    async def main() -> None:
        world = virtual_world(network=VirtualNetwork())
        with pytest.raises(Unreachable, match=r"none of nowhere:1, nowhere:2 has answered for 7 s .*correct"):
            async with Producer(
                ["nowhere:1", "nowhere:2"], name="p", world=world, settings=ClientSettings(open_timeout_s=7)
            ):
                pass
        assert 7 <= anyio.current_time() < 13

    run_virtual(main)


def test_a_service_that_stays_away_ends_the_producer() -> None:
    async def story(site: Site) -> None:
        async with producer(site, settings=ClientSettings(reconnect_timeout_s=30)) as p:
            await p.publish(made("a"))
            await site.stop()
            receipt = p.offer(made("b"))
            with pytest.raises(Unreachable):
                await receipt
            with pytest.raises(Unreachable):
                await p.publish(made("c"))

    with_service(story)


def test_the_end_of_the_block_waits_for_what_is_open() -> None:
    async def story(site: Site) -> None:
        async with producer(site) as p:
            receipts = [p.offer(made(f"k{at}")) for at in range(10)]
        assert all(one.state is OfferState.ACKNOWLEDGED for one in receipts)
        with pytest.raises(UsageError, match="closed"):
            p.offer(made("late"))
        with pytest.raises(UsageError, match="closed"):
            async with p:
                pass

    with_service(story)


def test_the_end_of_the_block_is_bounded_and_tells_what_is_left() -> None:
    async def story(site: Site) -> None:
        p = await producer(site).__aenter__()
        site.network.cut("client", "server")
        receipt = p.offer(made("a"))
        began = anyio.current_time()
        with pytest.raises(Refused, match="1 calls were not acknowledged"):
            await p.__aexit__(None, None, None)
        assert 10 <= anyio.current_time() - began < 15
        assert receipt.refusal() is not None

    with_service(story)


def test_the_programs_own_error_comes_out_as_it_is() -> None:
    async def story(site: Site) -> None:
        with pytest.raises(KeyError):
            async with producer(site):
                raise KeyError("x")

    with_service(story)


# --- several addresses


def test_addresses_of_one_service_are_tried_in_turn() -> None:
    async def story(site: Site) -> None:
        addresses = ["elsewhere:7373", ADDRESS]
        async with Producer(addresses, name="p", world=site.world) as p:
            await p.publish(made("a"))
            site.network.reset()
            await p.publish(made("b"))
        assert site.keys() == ["a", "b"]

    with_service(story)


def test_two_services_are_told_apart() -> None:
    async def story(site: Site) -> None:
        other = Site(7, None, {})
        other.network = site.network.at("other")
        other._own_world = virtual_world(8, network=other.network)
        other._settings = replace(other._settings, host="other")
        async with anyio.create_task_group() as tasks:
            await tasks.start(other.run)
            async with Producer([ADDRESS, "other:7373"], name="p", world=site.world) as p:
                await p.publish(made("a"))
                receipt = p.offer(made("b"))
                await site.stop()
                with pytest.raises(Refused, match="one client cannot go on in another log"):
                    await receipt
                with pytest.raises(UsageError, match="addresses of one service"):
                    await p.publish(made("c"))
            assert other.keys() == []
            tasks.cancel_scope.cancel()

    with_service(story)


# --- what is given


def test_what_is_given_wrongly_is_told_at_once() -> None:
    with pytest.raises(UsageError, match="host:port"):
        Producer("localhost:port", name="p")
    with pytest.raises(InvalidDelta, match="producer"):
        Producer("localhost", name="")
    with pytest.raises(UsageError, match="replica"):
        Producer("localhost", name="p", source=Source.REPLICA)
    with pytest.raises(UsageError, match="heartbeat_interval_s"):
        ClientSettings(heartbeat_interval_s=20)
    with pytest.raises(UsageError, match="not open yet"):
        Producer("localhost", name="p").offer(made("a"))


def test_an_ack_level_that_is_not_granted_is_told_at_the_opening() -> None:
    async def story(site: Site) -> None:
        with pytest.raises(Refused, match="LEVEL_UNAVAILABLE"):
            async with producer(site, ack_level=AckLevel.DURABLE):
                pass

    with_service(story)


def test_only_the_code_matters() -> None:
    assert Unreachable("x").code is ErrorCode.SHUTTING_DOWN
    assert str(Unreachable("nobody")) == "nobody"
