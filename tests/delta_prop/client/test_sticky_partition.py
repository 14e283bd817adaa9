"""The partition that a caller names: a number, or a sticky one for messages that need none of their own."""

from __future__ import annotations

from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from delta_prop.client.sticky_partition import STICKY_MESSAGES_MAX, StickyPartition, partition_of_counter
from delta_prop.testing.world import SeededRandomness
from delta_prop_wire.delta import Delta, Dot, Operation, create, opaque, origin_partition
from delta_prop_wire.errors import InvalidDelta, UsageError
from delta_prop_wire.murmur import partition_of
from tests.delta_prop.client.virtual_streams import STREAM, StreamSite, with_streams

if TYPE_CHECKING:
    from delta_prop.calls.receipt import Receipt
    from delta_prop.client.stream_producer import StreamProducer


class Sticky:
    """A sticky partition, and the partitions that are blocked."""

    def __init__(self, count: int, seed: int = 1) -> None:
        self._choice = StickyPartition(count, SeededRandomness(f"sticky {seed}"))
        self.blocked: list[int] = []

    def choose(self, message_count: int, now: float) -> int:
        if self._choice.has_ended(now):
            self._choice.move(now, self.blocked)
        return self._choice.take(message_count)

    def turns(self, count: int) -> list[int]:
        """Return the partition of each of `count` turns, which end by their time."""
        return [self.choose(1, float(now)) for now in range(count)]


def message(number: int) -> Delta:
    return Delta(f"event-{number}", opaque(b"%d" % number))


# --- turns


def test_partition_changes_after_16384_messages() -> None:
    choice = Sticky(8)
    partitions = [choice.choose(1, 0.0) for _ in range(40_000)]
    moves = [index for index, (last, this) in enumerate(pairwise(partitions), 1) if last != this]
    assert moves == [16_384, 32_768]


def test_partition_changes_100_ms_after_its_turn_began() -> None:
    choice = Sticky(8)
    first = choice.choose(1, 5.0)
    assert [choice.choose(1, now) for now in (5.05, 5.099)] == [first, first]
    second = choice.choose(1, 5.101)
    assert second != first
    assert choice.choose(1, 5.19) == second, "the turn begins anew at the move"
    assert choice.choose(1, 5.21) != second


def test_both_bounds_of_a_turn_begin_anew_at_each_move() -> None:
    choice = Sticky(8)
    choice.choose(STICKY_MESSAGES_MAX - 1, 0.0)
    second = choice.choose(1, 0.1)
    assert choice.choose(STICKY_MESSAGES_MAX - 2, 0.15) == second, "messages of the last turn count no more"
    assert choice.choose(1, 0.199) == second
    assert choice.choose(1, 0.199) != second


def test_call_is_not_split_at_the_end_of_a_turn() -> None:
    choice = Sticky(8)
    first, second, third = (choice.choose(10_000, 0.0) for _ in range(3))
    assert first == second != third


@pytest.mark.parametrize("count", [1, 2, 3, 8, 100])
def test_each_partition_has_one_turn_per_round_and_never_two_in_a_row(count: int) -> None:
    for seed in range(20):
        chosen = Sticky(count, seed).turns(5 * count)
        for start in range(0, len(chosen), count):
            assert sorted(chosen[start : start + count]) == list(range(count))
        assert count == 1 or all(last != this for last, this in pairwise(chosen))


def test_producers_begin_at_different_partitions() -> None:
    firsts = [Sticky(4, seed).choose(1, 0.0) for seed in range(400)]
    assert all(60 < firsts.count(partition) < 140 for partition in range(4))


def test_blocked_partition_has_no_turn_unless_all_are_blocked() -> None:
    choice = Sticky(4)
    choice.blocked = [1, 2]
    assert set(choice.turns(40)) == {0, 3}
    choice.blocked = []
    assert {choice.choose(1, 100.0 + now) for now in range(8)} == {0, 1, 2, 3}
    choice.blocked = [0, 1, 2, 3]
    assert {choice.choose(1, 200.0 + now) for now in range(8)} == {0, 1, 2, 3}


# --- a partition by a message's number


def test_partition_of_a_counter_is_fixed_for_ever() -> None:
    assert [partition_of_counter(counter, 8) for counter in range(1, 13)] == [
        7,
        7,
        7,
        2,
        4,
        1,
        7,
        7,
        4,
        6,
        5,
        4,
    ]
    assert partition_of_counter((1 << 63) - 1, 1_000) == 635


def test_counters_are_divided_evenly() -> None:
    partitions = [partition_of_counter(counter, 4) for counter in range(1, 10_001)]
    assert all(2_300 < partitions.count(partition) < 2_700 for partition in range(4))


@pytest.mark.parametrize("counter", [-1, 1 << 64, 1.5, True, "7"])
def test_partition_of_a_wrong_counter_is_refused(counter: Any) -> None:
    with pytest.raises(InvalidDelta, match="counter"):
        partition_of_counter(counter, 8)


# --- a producer of all partitions


def test_sticky_messages_share_a_partition_then_move_on() -> None:
    async def scenario(site: StreamSite) -> None:
        async with site.producer() as p:
            receipts = []
            for number in range(90):  # one each 10 ms
                receipts.append(p.offer(message(number), partition="sticky"))
                await anyio.sleep(0.01)
            chosen = [part.partition for receipt in receipts for part in (await receipt).parts]
        # Rounding decides on which side of 100 ms the tenth message is.
        assert 8 <= sum(last != this for last, this in pairwise(chosen)) <= 9
        counts = [chosen.count(partition) for partition in range(3)]
        assert min(counts) >= 27, "each partition must get its share"
        assert [len(keys) for keys in site.logged_keys()] == counts

    with_streams(scenario)


def test_sticky_call_of_many_messages_is_one_part() -> None:
    async def scenario(site: StreamSite) -> None:
        async with site.producer() as p, site.subscriber() as s:
            one = await p.publish(message(0), partition="sticky")
            many = await p.publish(*map(message, range(1, 100)), partition="sticky")
            (part,) = many.parts
            assert (part.partition, list(part.rows)) == (one.parts[0].partition, list(range(99)))
            delivered = [await anext(s) for _ in range(100)]
        assert [row.delta.vector_id for row in delivered] == [f"event-{number}" for number in range(100)]
        assert {row.partition for row in delivered} == {part.partition}

    with_streams(scenario)


def test_all_messages_of_a_call_count_for_its_turn() -> None:
    async def scenario(site: StreamSite) -> None:
        async with site.producer() as p:
            calls = (STICKY_MESSAGES_MAX - 1, 1, 1)
            receipts = [p.offer(*[message(0)] * count, partition="sticky") for count in calls]
            first, second, third = (receipt.parts[0][0] for receipt in receipts)
            assert first == second != third

    with_streams(scenario)


def test_named_partition_is_used_instead_of_the_hash() -> None:
    async def scenario(site: StreamSite) -> None:
        async with site.producer() as p:
            own = partition_of("default", "v", 3)
            other = (own + 1) % 3
            single = await p.publish(Delta("v", opaque(b"1")), partition=other)
            vector = await p.publish(Delta("w", create([1.0])), partition=other)
            offered = await p.offer(message(1), message(2), partition=other)
            assert [part.partition for ack in (single, vector, offered) for part in ack.parts] == [other] * 3
            assert (await p.publish(Delta("v", opaque(b"1")))).parts[0].partition == own
            after = await p.publish(message(3), partition=own, after=[single, offered])
            assert after.parts[0].partition == own

    with_streams(scenario)


@pytest.mark.parametrize("partition", [3, -1, "stick", True, 1.0, b"sticky"])
def test_unknown_partition_is_refused_and_nothing_sent(partition: Any) -> None:
    async def scenario(site: StreamSite) -> None:
        async with site.producer() as p:
            for call in (p.offer, p.publish):
                with pytest.raises(UsageError, match="give 'sticky', or a number from 0 to 2"):
                    await call(message(1), partition=partition)
            with pytest.raises(UsageError, match="give 'sticky', or a number from 0 to 2"):
                p.offer_numbered(1, message(1), lambda _: None, partition=partition)
        assert site.logged_keys() == [[], [], []]

    with_streams(scenario)


def test_only_messages_may_go_to_any_partition() -> None:
    async def scenario(site: StreamSite) -> None:
        async with site.producer() as p:
            with pytest.raises(
                UsageError, match=r"row 1: partition 'sticky' takes only opaque .* not create"
            ):
                await p.publish(message(1), Delta("v", create([1.0])), partition="sticky")
            with pytest.raises(UsageError, match="row 0: `expect` depends on the partition"):
                p.offer(Delta("v", opaque(b""), expect=Dot(1, 1)), partition="sticky")
            with pytest.raises(UsageError, match="not create"):
                p.offer_numbered(1, Delta("v", create([1.0])), lambda _: None, partition="sticky")
            await p.publish(Delta("v", Operation(42, data=b"another kind")), partition="sticky")
        assert list(chain(*site.logged_keys())) == ["v"]

    with_streams(scenario)


def test_sticky_messages_avoid_a_partition_that_does_not_answer() -> None:
    async def scenario(site: StreamSite) -> None:
        async with site.producer() as p:
            await site.streams.hold(STREAM, 1)
            await anyio.sleep(1)  # the client notices, but a partition without messages may work again
            receipts = []
            for number in range(300):
                receipts.append(p.offer(message(number), partition="sticky"))
                await anyio.sleep(0.01)
            held = [receipt for receipt in receipts if receipt.parts[0][0] == 1]
            assert 0 < len(held) <= 12, "it has one turn, until its messages are overdue"
            assert not any(receipt.done for receipt in held)
            site.streams.release_held()
            for receipt in receipts:
                await receipt
            later = [await p.publish(message(n), partition="sticky") for n in range(1)]
            await anyio.sleep(1)
            while later[-1].parts[0].partition != 1:
                later.append(await p.publish(message(0), partition="sticky"))
                await anyio.sleep(0.2)
            assert len(later) <= 7
        assert sum(map(len, site.logged_keys())) == 300 + len(later)

    with_streams(scenario)


# --- numbered messages


async def import_messages(p: StreamProducer, numbers: range) -> dict[int, tuple[int, Receipt]]:
    """Offer numbered messages; return the partition and the receipt of each that has an outcome."""
    receipts: dict[int, Receipt] = {}
    partitions = {}
    for number in numbers:
        partitions[number] = p.offer_numbered(
            number,
            message(number),
            lambda receipt, at=number: receipts.update({at: receipt}),  # type: ignore[misc]
            partition="sticky",
        )
        if number % 50 == 0:
            await anyio.sleep(0.15)
    await p.flush()
    return {number: (partitions[number], receipt) for number, receipt in receipts.items()}


@pytest.mark.parametrize("numbered", [True, False])
def test_second_import_finds_each_message_in_its_partition(numbered: bool) -> None:
    async def scenario(site: StreamSite) -> None:
        with anyio.move_on_after(0.7):  # an import that is killed
            async with site.producer(name="import", numbered=numbered) as p:
                await import_messages(p, range(1, 601))
        logged_before = sum(map(len, site.logged_keys()))
        assert 150 < logged_before < 450
        for run in range(2):
            async with site.producer(name="import", numbered=numbered) as p:
                found = await import_messages(p, range(1, 601))
            assert len(found) == 600
            known = 0
            for number, (partition, receipt) in found.items():
                ack = receipt.result()
                assert partition == partition_of_counter(number, 3)
                assert isinstance(ack.dot, Dot)
                assert (origin_partition(ack.dot.origin), ack.dot.counter) == (partition, number)
                known += ack.duplicate
            assert known == (600 if run else logged_before)
        keys = site.logged_keys()
        for partition in range(3):
            assert keys[partition] == [
                f"event-{number}" for number in range(1, 601) if partition_of_counter(number, 3) == partition
            ]

    with_streams(scenario)


def test_numbered_vectors_go_to_their_own_partition() -> None:
    async def scenario(site: StreamSite) -> None:
        outcomes: list[Receipt] = []
        async with site.producer(numbered=True) as p:
            for number in range(1, 31):
                partition = p.offer_numbered(number, Delta(f"v{number}", create([1.0])), outcomes.append)
                assert partition == p.partition_of(f"v{number}")
            own = p.partition_of("w")
            assert p.offer_numbered(31, message(1), outcomes.append, partition=(own + 1) % 3) == (own + 1) % 3
            with pytest.raises(UsageError, match="numbered: use offer_numbered"):
                p.offer(message(2), partition="sticky")
        assert [receipt.acknowledged for receipt in outcomes] == [True] * 31

    with_streams(scenario)
