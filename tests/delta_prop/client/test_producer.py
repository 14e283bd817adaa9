"""Producer over a virtual network against the real server: one effect per delta, whatever fails."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import anyio
import pytest

from delta_prop.calls.outcomes import OfferState, PublishAck
from delta_prop.client.errors import Unreachable
from delta_prop.client.producer import Producer
from delta_prop.client.settings import ClientSettings
from delta_prop.testing import VirtualNetwork, run_virtual, virtual_world
from delta_prop.testing.network_path import NetworkConditions
from delta_prop_wire.credit_window import CreditWindow
from delta_prop_wire.delta import AckLevel, Delta, Priority, Source, create, opaque
from delta_prop_wire.errors import InvalidDelta, Refused, UsageError
from delta_prop_wire.frames import Credit
from delta_prop_wire.spec import ErrorCode
from tests.delta_prop.client.virtual_service import ADDRESS, Site, with_service
from tests.delta_prop.server.tokens import TokenFile, table


def make_delta(key: str, **more: object) -> Delta:
    return Delta(key, opaque(key.encode()), **more)  # type: ignore[arg-type]


def producer(site: Site, name: str = "orders", **more: object) -> Producer:
    return Producer(ADDRESS, name=name, world=site.world, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_published_deltas_are_logged_once_and_acked_with_offsets(
    backend: Literal["asyncio", "trio"],
) -> None:
    async def scenario(site: Site) -> None:
        async with producer(site) as p:
            first = await p.publish(make_delta("a"), make_delta("b"))
            receipt = p.offer(make_delta("c"))
            second = await receipt
            assert (first.offset, first.count, second.offset) == (0, 2, 2)
            assert first.dot is not None
            assert second.dot == first.dot._replace(counter=3)
            assert second.level is AckLevel.MEMORY
            matrix = await p.publish_many(["d", "e"], [[1, 2], [3, 4]], namespace="vectors")
            assert (matrix.offset, matrix.count) == (3, 2)
        assert site.keys() == ["a", "b", "c", "d", "e"]

    with_service(scenario, backend=backend)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_concurrent_calls_share_a_batch_and_get_acks_of_their_own(
    backend: Literal["asyncio", "trio"],
) -> None:
    async def scenario(site: Site) -> None:
        acks: dict[str, PublishAck] = {}

        async def publish(p: Producer, key: str) -> None:
            acks[key] = await p.publish(make_delta(key))

        async with producer(site) as p:
            async with anyio.create_task_group() as tasks:
                for index in range(20):
                    tasks.start_soon(publish, p, f"k{index}")
            assert p.statistics().batches < 20
        assert site.keys() == [key for key, _ in sorted(acks.items(), key=lambda item: item[1].offset or 0)]
        for offset, ack in enumerate(sorted(acks.values(), key=lambda one: one.offset or 0)):
            assert ack.dot is not None
            assert (ack.offset, ack.dot.counter, ack.count) == (offset, offset + 1, 1)
            assert not ack.duplicate

    with_service(scenario, backend=backend)


def test_offers_of_one_tick_share_a_batch_per_priority() -> None:
    async def scenario(site: Site) -> None:
        async with producer(site) as p:
            await p.publish(make_delta("first"))
            for index in range(50):
                p.offer(make_delta(f"n{index}"))
                p.offer(make_delta(f"h{index}", priority=Priority.HIGH))
            await p.flush()
            assert p.statistics().batches == 3
            assert p.statistics().acknowledged == 101

    with_service(scenario)


@pytest.mark.parametrize("seed", range(2))
def test_broken_connections_lose_and_duplicate_nothing(seed: int) -> None:
    conditions = NetworkConditions(
        latency_s=0.002, jitter_s_max=0.003, chunk_bytes_max=700, reset_bytes_mean=4_000
    )

    async def scenario(site: Site) -> None:
        async with producer(site) as p:
            receipts = []
            for index in range(150):
                receipts.append(p.offer(make_delta(f"k{index % 7}-{index}", priority=Priority(index % 4))))
                if index % 3 == 0:
                    await anyio.sleep(0.002)
            acks = [await one for one in receipts]
            assert p.reconnects
            assert not any(one.duplicates for one in acks), (
                "a resend by the client must not be reported as a duplicate"
            )
        keys = site.keys()
        assert len(keys) == len(set(keys)) == 150
        assert [keys[one.offset] for one in acks if one.offset is not None] == [
            f"k{index % 7}-{index}" for index in range(150)
        ]

    with_service(scenario, seed=seed, conditions=conditions)


def test_connection_lost_after_progress_is_reopened_soon() -> None:
    async def scenario(site: Site) -> None:
        async with producer(site) as p:
            for index in range(12):
                await p.publish(make_delta(f"k{index}"))
                site.network.reset()
        assert anyio.current_time() < 2

    with_service(scenario)


def test_producer_waits_until_a_network_cut_heals() -> None:
    async def scenario(site: Site) -> None:
        async with producer(site) as p:
            await p.publish(make_delta("a"))
            site.network.cut("client", "server")
            receipt = p.offer(make_delta("b"))
            await anyio.sleep(40)
            assert not receipt.done
            site.network.heal("client", "server")
            assert (await receipt).offset == 1

    with_service(scenario)


def test_producer_reconnects_after_a_service_restart() -> None:
    async def scenario(site: Site) -> None:
        async with producer(site) as p, anyio.create_task_group() as tasks:
            await p.publish(make_delta("a"))
            await site.stop()
            receipt = p.offer(make_delta("b"))
            await anyio.sleep(3)
            await tasks.start(site.run)
            assert (await receipt).offset == 0, "a log in memory must restart at offset 0"
            assert (await p.publish(make_delta("c"))).offset == 1
            assert p.statistics().lost == 1
            tasks.cancel_scope.cancel()

    with_service(scenario)


def test_offers_beyond_the_credit_wait_and_are_all_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    credit, in_flight, frames = 10, 0, []
    spend, grant = CreditWindow.spend, CreditWindow.grant
    sender: CreditWindow | None = None

    def note_spend(window: CreditWindow, deltas: int, size: int) -> None:
        nonlocal in_flight, sender
        sender = sender or window  # the producer charges a frame before the service does
        if window is sender:
            frames.append((in_flight, deltas))
            in_flight += deltas
        spend(window, deltas, size)

    def note_grant(window: CreditWindow, more: Credit) -> None:
        nonlocal in_flight
        if window is sender:
            in_flight -= more.deltas
        grant(window, more)

    monkeypatch.setattr(CreditWindow, "spend", note_spend)
    monkeypatch.setattr(CreditWindow, "grant", note_grant)

    async def scenario(site: Site) -> None:
        async with producer(site) as p:
            for index in range(400):
                p.offer(make_delta(f"k{index}"), make_delta(f"l{index}"))
                await anyio.sleep(0.0001)
            await p.flush()
            assert p.statistics().lost == 0
        assert len(site.keys()) == 800

    with_service(scenario, conditions=NetworkConditions(latency_s=0.002), producer_deltas_credit=credit)
    assert sum(deltas for _, deltas in frames) == 800
    assert frames[:5] == [(before, 2) for before in range(0, credit, 2)], (
        "frames that the credit allows must be sent at once"
    )
    assert max(before for before, _ in frames) < credit, "a frame must wait until some credit is left"
    assert in_flight == 0


def test_refused_offer_reports_why_and_others_continue() -> None:
    async def scenario(site: Site) -> None:
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
                p.offer(make_delta("a"), make_delta("b", priority=Priority.HIGH))
        assert site.keys() == ["v", "x"]

    with_service(scenario)


def test_second_producer_of_a_name_fences_the_first() -> None:
    async def scenario(site: Site) -> None:
        async with producer(site) as first:
            await first.publish(make_delta("a"))
            async with producer(site) as second:
                await second.publish(make_delta("b"))
                with pytest.raises(Refused, match="FENCED"):
                    await first.publish(make_delta("c"))
                with pytest.raises(Refused, match="FENCED"):
                    first.offer(make_delta("d"))
        assert site.keys() == ["a", "b"]

    with_service(scenario)


def test_numbered_lines_of_a_second_import_are_duplicates() -> None:
    async def import_lines(site: Site, lines: int) -> list[PublishAck]:
        acks: dict[int, PublishAck] = {}
        async with producer(site, "import") as p:
            for number in range(1, lines + 1):
                p.offer_numbered(
                    number,
                    make_delta(f"line {number}"),
                    lambda receipt, number=number: acks.update({number: receipt.result()}),
                )
            await p.flush()
        return [acks[number] for number in range(1, lines + 1)]

    async def scenario(site: Site) -> None:
        first = await import_lines(site, 100)
        second = await import_lines(site, 120)
        assert [one.offset for one in first] == list(range(100))
        assert [one.duplicates for one in second[:100]] == [{0: index} for index in range(100)]
        assert [one.offset for one in second[100:]] == list(range(100, 120))
        assert len(site.keys()) == 120

    with_service(scenario)


def test_named_causes_precede_effects_across_priorities() -> None:
    async def scenario(site: Site) -> None:
        async with producer(site) as p:
            cause = p.offer(make_delta("cause", priority=Priority.LOW))
            effect = p.offer(make_delta("effect", priority=Priority.CRITICAL), after=[cause])
            await effect
            later = await p.publish(make_delta("later"), after=[effect, await cause])
            assert later.offset == 2
        assert site.keys() == ["cause", "effect", "later"]

    with_service(scenario)


# --- tokens


TOKENS = table("writer", "secret", publish=True, namespaces='["docs"]', rate=100_000, burst=100_000)


def test_only_the_offer_that_a_token_forbids_is_refused() -> None:
    async def scenario(site: Site) -> None:
        async with producer(site, token="secret") as p:
            good = [p.offer(make_delta(f"k{index}", namespace="docs")) for index in range(5)]
            bad = p.offer(make_delta("x", namespace="mail"))
            good += [p.offer(make_delta(f"k{index}", namespace="docs")) for index in range(5, 10)]
            with pytest.raises(Refused, match="UNAUTHORIZED"):
                await bad
            for receipt in good:
                await receipt
            assert p.statistics().lost == 0
        assert site.keys() == [f"k{index}" for index in range(10)]

    with_service(scenario, tokens=TokenFile(TOKENS))


@pytest.mark.parametrize("token", [None, "other"])
def test_wrong_token_is_refused_when_opening(token: str | None) -> None:
    async def scenario(site: Site) -> None:
        with pytest.raises(Refused, match="UNAUTHORIZED"):
            async with producer(site, token=token):
                pass

    with_service(scenario, tokens=TokenFile(TOKENS))


def test_revoked_token_ends_the_producer() -> None:
    file = TokenFile(TOKENS)

    async def scenario(site: Site) -> None:
        async with producer(site, token="secret") as p:
            await p.publish(make_delta("a", namespace="docs"))
            file.content = table("another", "else", publish=True, namespaces='["*"]')
            await anyio.sleep(5)
            with pytest.raises(Refused, match="UNAUTHORIZED"):
                await p.publish(make_delta("b", namespace="docs"))

    with_service(scenario, tokens=file)


def test_producer_keeps_to_the_rate_of_its_token() -> None:
    async def scenario(site: Site) -> None:
        async with producer(site, token="secret") as p:
            for index in range(60):
                p.offer(make_delta(f"k{index}", namespace="docs"))
                await anyio.sleep(0.001)
            await p.flush()
            assert 1 < anyio.current_time() < 20
        assert site.keys() == [f"k{index}" for index in range(60)]

    slow = table("writer", "secret", publish=True, namespaces='["*"]', rate=10, burst=10)
    with_service(scenario, tokens=TokenFile(slow))


# --- timeouts and close


def test_publish_timeout_says_if_it_may_have_happened() -> None:
    async def scenario(site: Site) -> None:
        async with producer(site) as p:
            await p.publish(make_delta("a"))
            site.network.cut("server", "client")
            with pytest.raises(Refused, match="may have happened"):
                await p.publish(make_delta("b"), timeout_s=2)
            await anyio.sleep(60)
            with pytest.raises(Refused, match="has not happened"):
                await p.publish(make_delta("c"), timeout_s=2)
            site.network.heal("server", "client")
            assert (await p.publish(make_delta("d"))).offset == 2
        assert site.keys() == ["a", "b", "d"]

    with_service(scenario)


def test_cancelled_publish_is_withdrawn_if_it_was_not_sent() -> None:
    async def scenario(site: Site) -> None:
        async with producer(site) as p:
            site.network.cut("client", "server")
            await anyio.sleep(60)
            with anyio.move_on_after(1):
                await p.publish(make_delta("a"))
            site.network.heal("client", "server")
            await p.publish(make_delta("b"))
        assert site.keys() == ["b"]

    with_service(scenario)


def test_unanswered_offer_is_refused_at_the_delivery_timeout() -> None:
    async def scenario(site: Site) -> None:
        async with producer(site, settings=ClientSettings(delivery_timeout_s=20, close_timeout_s=1)) as p:
            site.network.cut("client", "server")
            receipt = p.offer(make_delta("a"))
            began = anyio.current_time()
            with pytest.raises(Refused):
                await receipt
            assert 20 <= anyio.current_time() - began <= 22
            assert p.in_flight_offers == 0

    with_service(scenario)


def test_absent_services_are_reported_at_the_open_timeout() -> None:
    async def main() -> None:
        world = virtual_world(network=VirtualNetwork())
        with pytest.raises(Unreachable, match=r"none of nowhere:1, nowhere:2 has answered for 7 s .*correct"):
            async with Producer(
                ["nowhere:1", "nowhere:2"], name="p", world=world, settings=ClientSettings(open_timeout_s=7)
            ):
                pass
        assert 7 <= anyio.current_time() < 13

    run_virtual(main)


def test_service_that_stays_away_ends_the_producer() -> None:
    async def scenario(site: Site) -> None:
        async with producer(site, settings=ClientSettings(reconnect_timeout_s=30)) as p:
            await p.publish(make_delta("a"))
            await site.stop()
            receipt = p.offer(make_delta("b"))
            with pytest.raises(Unreachable):
                await receipt
            with pytest.raises(Unreachable):
                await p.publish(make_delta("c"))

    with_service(scenario)


def test_close_waits_for_in_flight_offers() -> None:
    async def scenario(site: Site) -> None:
        async with producer(site) as p:
            receipts = [p.offer(make_delta(f"k{index}")) for index in range(10)]
        assert all(one.state is OfferState.ACKNOWLEDGED for one in receipts)
        with pytest.raises(UsageError, match="closed"):
            p.offer(make_delta("late"))
        with pytest.raises(UsageError, match="closed"):
            async with p:
                pass

    with_service(scenario)


def test_close_is_bounded_and_reports_unacked_offers() -> None:
    async def scenario(site: Site) -> None:
        p = await producer(site).__aenter__()
        site.network.cut("client", "server")
        receipt = p.offer(make_delta("a"))
        began = anyio.current_time()
        with pytest.raises(Refused, match="1 calls were not acknowledged"):
            await p.__aexit__(None, None, None)
        assert 10 <= anyio.current_time() - began < 15
        assert receipt.refusal() is not None

    with_service(scenario)


def test_error_of_the_program_is_raised_unchanged() -> None:
    async def scenario(site: Site) -> None:
        with pytest.raises(KeyError):
            async with producer(site):
                raise KeyError("x")

    with_service(scenario)


# --- several addresses


def test_addresses_of_one_service_are_tried_in_turn() -> None:
    async def scenario(site: Site) -> None:
        addresses = ["elsewhere:7373", ADDRESS]
        async with Producer(addresses, name="p", world=site.world) as p:
            await p.publish(make_delta("a"))
            site.network.reset()
            await p.publish(make_delta("b"))
        assert site.keys() == ["a", "b"]

    with_service(scenario)


def test_address_of_another_service_is_refused() -> None:
    async def scenario(site: Site) -> None:
        other = Site(7, None, {})
        other.network = site.network.at("other")
        other.server_world = virtual_world(8, network=other.network)
        other.server_settings = replace(other.server_settings, host="other")
        async with anyio.create_task_group() as tasks:
            await tasks.start(other.run)
            async with Producer([ADDRESS, "other:7373"], name="p", world=site.world) as p:
                await p.publish(make_delta("a"))
                receipt = p.offer(make_delta("b"))
                await site.stop()
                with pytest.raises(Refused, match="one client cannot go on in another log"):
                    await receipt
                with pytest.raises(UsageError, match="addresses of one service"):
                    await p.publish(make_delta("c"))
            assert other.keys() == []
            tasks.cancel_scope.cancel()

    with_service(scenario)


# --- arguments


def test_wrong_arguments_are_refused_at_once() -> None:
    with pytest.raises(UsageError, match="host:port"):
        Producer("localhost:port", name="p")
    with pytest.raises(InvalidDelta, match="producer"):
        Producer("localhost", name="")
    with pytest.raises(UsageError, match="replica"):
        Producer("localhost", name="p", source=Source.REPLICA)
    with pytest.raises(UsageError, match="heartbeat_interval_s"):
        ClientSettings(heartbeat_interval_s=20)
    with pytest.raises(UsageError, match="not open yet"):
        Producer("localhost", name="p").offer(make_delta("a"))


def test_unavailable_ack_level_is_refused_when_opening() -> None:
    async def scenario(site: Site) -> None:
        with pytest.raises(Refused, match="LEVEL_UNAVAILABLE"):
            async with producer(site, ack_level=AckLevel.DURABLE):
                pass

    with_service(scenario)


def test_unreachable_has_a_code_and_a_plain_message() -> None:
    assert Unreachable("x").code is ErrorCode.SHUTTING_DOWN
    assert str(Unreachable("nobody")) == "nobody"
