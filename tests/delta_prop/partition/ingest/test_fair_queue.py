"""The fair queue before the pipeline: bounds, marks, shares by weight, and order by causal dependency."""

from __future__ import annotations

import time
from itertools import count as naturals
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, precondition, rule

from delta_prop.partition.ingest.fair_queue import AGEING_DOUBLINGS_MAX, RETRY_AFTER_MS_MAX, FairQueue, Item
from delta_prop_wire.delta import Priority
from delta_prop_wire.errors import Refused, UsageError
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

CRITICAL, HIGH, NORMAL, LOW = Priority


def make_item(lane: int, *keys: str, count: int = 1, size: int = 100, after: Sequence[Item] = ()) -> Item:
    return Item(lane, count, size, keys=[("docs", key) for key in keys], after=after)


def offer_all(queue: FairQueue, *items: Item, now: float = 0.0) -> None:
    for item in items:
        queue.offer(item, now)


def drain(queue: FairQueue, now: float = 0.0) -> list[Item]:
    return list(iter(lambda: queue.next(now), None))


# --- bounds


def test_delta_above_the_capacity_is_refused_with_details() -> None:
    queue = FairQueue()
    for row in range(100_000):
        queue.offer(Item(NORMAL, 1, 10, keys=(row,)), 0.0)
    with pytest.raises(Refused) as refused:
        queue.offer(make_item(CRITICAL, "one more"), 0.0)
    assert refused.value.code is ErrorCode.QUEUE_FULL
    assert refused.value.retryable
    assert refused.value.details == {
        "depth": 100_000,
        "capacity": 100_000,
        "depth_bytes": 1_000_000,
        "capacity_bytes": 256 * 1024 * 1024,
        "full": "queue",
    }
    assert "100000 of 100000 deltas" in refused.value.message
    queue.next(0.0)
    queue.offer(make_item(CRITICAL, "one more"), 0.0)
    assert (queue.depth, queue.statistics().refused_full) == (100_000, 1)


def test_bytes_are_bounded_separately() -> None:
    queue = FairQueue(capacity_deltas=10, capacity_bytes=1_000)
    queue.offer(make_item(NORMAL, size=999), 0.0)
    with pytest.raises(Refused, match=r"999 of 1000 bytes") as refused:
        queue.offer(make_item(NORMAL, size=2), 0.0)
    assert refused.value.code is ErrorCode.QUEUE_FULL
    queue.offer(make_item(NORMAL, size=1), 0.0)


@pytest.mark.parametrize(("count", "size"), [(11, 1), (1, 1_001)])
def test_item_larger_than_the_queue_is_too_large(count: int, size: int) -> None:
    queue = FairQueue(capacity_deltas=10, capacity_bytes=1_000)
    with pytest.raises(Refused, match="smaller batches") as refused:
        queue.offer(make_item(NORMAL, count=count, size=size), 0.0)
    assert refused.value.code is ErrorCode.TOO_LARGE
    assert refused.value.retry_after_ms is None
    assert (queue.depth, queue.statistics().refused_too_large) == (0, count)


def test_refused_offer_changes_nothing() -> None:
    queue = FairQueue(capacity_deltas=2)
    first, second = make_item(LOW, "a"), make_item(NORMAL, "b")
    offer_all(queue, first, second)
    refused = make_item(CRITICAL, "a", "b")
    with pytest.raises(Refused):
        queue.offer(refused, 0.0)
    assert not refused.is_queued
    assert drain(queue) == [second, first]


@pytest.mark.parametrize(
    "settings",
    [
        {"capacity_deltas": 0},
        {"capacity_bytes": 0},
        {"high": 1.1},
        {"low": 0.9},
        {"low": 0.0},
        {"weights": (8, 4, 2)},
        {"weights": (8, 4, 2, 0)},
        {"ageing_s": 0.0},
    ],
)
def test_invalid_settings_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(UsageError, match="give"):
        FairQueue(**settings)  # type: ignore[arg-type]


# --- marks


def test_high_mark_counts_once_and_clears_below_the_low_mark() -> None:
    queue = FairQueue(capacity_deltas=100, high=0.8, low=0.5)
    levels = []
    for _ in range(85):
        queue.offer(make_item(NORMAL), 0.0)
        levels.append(queue.level)
    assert levels == [0] * 79 + [1] * 6
    for depth in range(84, -1, -1):
        queue.next(0.0)
        assert queue.level == (1 if depth >= 50 else 0)
    assert queue.statistics().times_above_high == 1
    offer_all(queue, *(make_item(NORMAL) for _ in range(80)))
    assert queue.statistics().times_above_high == 2


def test_high_mark_is_crossed_by_one_batch_or_by_bytes() -> None:
    queue = FairQueue(capacity_deltas=100, capacity_bytes=1_000)
    big = make_item(NORMAL, count=80, size=0)
    queue.offer(big, 0.0)
    assert queue.level == 1
    queue.withdraw(big)
    assert queue.level == 0
    queue.offer(make_item(NORMAL, size=800), 0.0)
    assert queue.level == 1


def test_retry_after_follows_the_measured_rate() -> None:
    queue = FairQueue(capacity_deltas=1_000, low=0.5)
    offer_all(queue, *(make_item(NORMAL, size=1) for _ in range(1_000)))
    assert retry_after(queue, 0.0) == 100, "the default should apply before the first measurement"
    now = 0.0
    for _ in range(500):  # 1,000 deltas per second, in and out
        now += 0.001
        queue.next(now)
        queue.offer(make_item(NORMAL, size=1), now)
    assert retry_after(queue, now) == pytest.approx(500, rel=0.05)
    assert retry_after(queue, now + 5) > 900, "the wait should grow while nothing leaves the queue"
    assert retry_after(queue, now + 5_000) <= RETRY_AFTER_MS_MAX


def retry_after(queue: FairQueue, now: float) -> int:
    with pytest.raises(Refused) as refused:
        queue.offer(make_item(NORMAL, count=999), now)
    assert refused.value.retry_after_ms is not None
    assert f"{refused.value.retry_after_ms} ms" in refused.value.message
    return refused.value.retry_after_ms


# --- scheduling


def test_lanes_share_by_weight() -> None:
    queue = FairQueue()
    for _ in range(1_500):
        offer_all(queue, *map(make_item, Priority))
    served = [0] * 4
    for _ in range(1_500):
        served[queue.next(0.0).lane] += 1  # type: ignore[union-attr]
    assert served == [800, 400, 200, 100]


def test_batch_costs_its_row_count() -> None:
    queue = FairQueue()
    for _ in range(100):
        queue.offer(make_item(CRITICAL, count=100), 0.0)
    for _ in range(5_000):
        queue.offer(make_item(LOW), 0.0)
    served = [0] * 4
    for _ in range(1_000):
        item = queue.next(0.0)
        assert item is not None
        served[item.lane] += item.count
    assert served[CRITICAL] / served[LOW] == pytest.approx(8, rel=0.12)


def test_independent_critical_delta_overtakes_low_backlog() -> None:
    queue = FairQueue()
    for row in range(10_000):
        queue.offer(make_item(LOW, f"low-{row}"), 0.0)
    for _ in range(100):
        queue.next(0.0)
    urgent = make_item(CRITICAL, "other")
    queue.offer(urgent, 60.0)
    assert queue.next(60.0) is urgent


def test_low_deltas_progress_under_endless_critical_load() -> None:
    for backlog in (1, 50):  # backlog 1 is the harder case: the lane sleeps and wakes for each item
        queue = FairQueue()
        offer_all(queue, *(make_item(LOW, f"low-{row}") for row in range(10)))
        taken = 0
        for turn in range(100):
            while queue.statistics().lanes[CRITICAL].depth < backlog:
                queue.offer(make_item(CRITICAL), turn * 1e-4)
            item = queue.next(turn * 1e-4)
            assert item is not None
            taken += item.lane == LOW
        assert taken == pytest.approx(10, abs=2), f"backlog {backlog}"


def test_idle_lane_saves_no_credit() -> None:
    queue = FairQueue()
    offer_all(queue, *(make_item(LOW) for _ in range(3_000)))
    offer_all(queue, *(make_item(NORMAL) for _ in range(2_000)))
    for _ in range(2_000):
        queue.next(0.0)
    offer_all(queue, *(make_item(CRITICAL) for _ in range(2_000)))
    first = [queue.next(0.0).lane for _ in range(110)]  # type: ignore[union-attr]
    assert first.count(CRITICAL) == pytest.approx(80, abs=3)
    assert first.count(LOW) == pytest.approx(10, abs=2)


def test_ageing_reduces_the_debt_of_a_large_batch() -> None:
    def turns_until_low(elapsed_s: float) -> int:
        queue = FairQueue(ageing_s=1.0)
        offer_all(queue, make_item(LOW, count=800), make_item(LOW, count=800))
        queue.next(0.0)
        for turn in naturals():
            queue.offer(make_item(CRITICAL), elapsed_s)
            if queue.next(elapsed_s).lane == LOW:  # type: ignore[union-attr]
                return turn
        raise AssertionError

    turns = [turns_until_low(elapsed_s) for elapsed_s in range(4)]
    assert turns == pytest.approx([6_400, 3_200, 1_600, 800], rel=0.01)


def test_ageing_is_bounded_after_a_long_standstill() -> None:
    queue = FairQueue()
    offer_all(queue, *(make_item(LOW) for _ in range(3_000)))
    queue.next(0.0)
    served = [0] * 4
    now = 3_600.0
    for _ in range(1_000):
        queue.offer(make_item(CRITICAL), now)
        served[queue.next(now).lane] += 1  # type: ignore[union-attr]
    assert served[CRITICAL] >= 1_000 * 8 // (8 + 2**AGEING_DOUBLINGS_MAX) - 1


def test_aged_debt_never_becomes_credit() -> None:
    queue = FairQueue()
    offer_all(queue, make_item(LOW, count=5_000), *(make_item(LOW) for _ in range(3_000)))
    offer_all(queue, *(make_item(CRITICAL, count=100) for _ in range(320)), make_item(CRITICAL))
    for _ in range(322):
        queue.next(0.0)
    now, served = 100.0, [0] * 4
    for _ in range(1_000):
        queue.offer(make_item(CRITICAL), now)
        served[queue.next(now).lane] += 1  # type: ignore[union-attr]
    assert served[LOW] > served[CRITICAL] > 100


def test_lanes_that_wake_together_start_with_equal_debt() -> None:
    queue = FairQueue()
    offer_all(
        queue,
        *(make_item(CRITICAL) for _ in range(100)),
        *(make_item(NORMAL) for _ in range(500)),
        make_item(LOW),
    )
    for _ in range(500):
        queue.next(0.0)
    low, critical = make_item(LOW), make_item(CRITICAL)
    offer_all(queue, low, critical)
    assert queue.next(0.0) is critical


# --- dependencies


def test_critical_child_never_overtakes_its_low_parent() -> None:
    queue = FairQueue()
    ahead = [make_item(LOW, f"low-{row}") for row in range(1_000)]
    parent = make_item(LOW, "parent")
    child = make_item(CRITICAL, "child", after=[parent])
    unrelated = make_item(CRITICAL, "unrelated")
    offer_all(queue, *ahead, parent, child, unrelated)
    assert drain(queue) == [*ahead, parent, child, unrelated], "the child's lane should donate its turns"
    assert queue.statistics().items_donated > 850
    assert child.after == (), "a dequeued item should hold no references"


def test_critical_delta_waits_for_queued_deltas_of_its_vector() -> None:
    queue = FairQueue()
    earlier, later = make_item(LOW, "a"), make_item(CRITICAL, "a", "b")
    other, last = make_item(NORMAL, "b"), make_item(HIGH, "a")
    offer_all(queue, earlier, other, later, last)
    order = drain(queue)
    assert order.index(earlier) < order.index(later) < order.index(last)
    assert order.index(other) < order.index(later)


def test_vectors_queued_while_one_lane_was_used_are_indexed_later() -> None:
    queue = FairQueue()
    waiting = [make_item(LOW, f"v{row % 7}") for row in range(100)]
    offer_all(queue, *waiting)
    urgent = make_item(CRITICAL, "v3")
    queue.offer(urgent, 0.0)
    last_of_its_vector = waiting[94]
    order = drain(queue)
    assert order.index(urgent) == order.index(last_of_its_vector) + 1


def test_dependency_chain_through_every_lane_is_followed() -> None:
    queue = FairQueue()
    low = make_item(LOW, "a")
    normal = make_item(NORMAL, "a", "b")
    high = make_item(HIGH, "b", "c")
    critical = make_item(CRITICAL, "c")
    offer_all(queue, low, normal, high, critical)
    assert drain(queue) == [low, normal, high, critical]


def test_peeked_item_stays_until_taken() -> None:
    queue = FairQueue()
    low, critical = make_item(LOW, "a"), make_item(CRITICAL, "a")
    offer_all(queue, low, critical)
    before = queue.statistics()
    assert queue.peek(0.0) is low
    assert queue.peek(1.0) is low
    assert queue.statistics() == before
    queue.offer(other := make_item(HIGH, "b"), 1.0)
    queue.take(low)
    assert drain(queue, 1.0) == [other, critical], "the critical lane should have donated its turn"


def test_only_the_peeked_item_can_be_taken() -> None:
    queue = FairQueue()
    first, second = make_item(NORMAL), make_item(NORMAL)
    offer_all(queue, first, second)
    queue.peek(0.0)
    with pytest.raises(AssertionError):
        queue.take(second)
    queue.withdraw(first)
    with pytest.raises(AssertionError):
        queue.take(first)


def test_withdrawn_item_leaves_no_trace() -> None:
    queue = FairQueue()
    parent = make_item(LOW, "a")
    between = make_item(HIGH, "a", after=[parent])
    child = make_item(CRITICAL, "a")
    dependent = make_item(CRITICAL, "b", after=[between])
    offer_all(queue, parent, between, child, dependent)
    assert queue.withdraw(between)
    assert not queue.withdraw(between)
    assert (queue.depth, queue.depth_bytes, queue.statistics().withdrawn) == (3, 300, 1)
    assert drain(queue) == [parent, child, dependent], "the child should still wait for the parent"
    assert not queue.withdraw(parent)


def test_withdrawn_item_may_be_requeued_after_later_items() -> None:
    queue = FairQueue()
    blocked, retried = make_item(LOW, "a"), make_item(CRITICAL, "b", "a")
    offer_all(queue, blocked, retried)
    assert queue.peek(0.0) is blocked
    queue.withdraw(retried)
    meanwhile = make_item(LOW, "b")
    offer_all(queue, meanwhile, retried)
    queue.withdraw(blocked)
    assert drain(queue) == [meanwhile, retried]


@pytest.mark.alone
def test_withdrawing_from_a_long_chain_is_quick() -> None:
    queue = FairQueue()
    offer_all(queue, make_item(CRITICAL, "other"))
    chain = [make_item(LOW, "hot") for _ in range(50_000)]
    offer_all(queue, *chain)
    began = time.process_time()
    for item in reversed(chain[1_000:]):
        assert queue.withdraw(item)
    for item in chain[:1_000]:
        queue.withdraw(item)
    assert time.process_time() - began < 2.0, (
        "withdrawing should not scan the chain, which would take minutes"
    )
    assert queue.depth == 1


def test_waits_are_measured_per_lane() -> None:
    queue = FairQueue()
    offer_all(queue, make_item(LOW, count=5), now=1.0)
    offer_all(queue, make_item(CRITICAL), now=2.0)
    queue.next(4.0)
    queue.next(4.0)
    critical, *_, low = queue.statistics().lanes
    assert (critical.taken, critical.items_taken, critical.wait_s_total) == (1, 1, 2.0)
    assert (low.taken, low.items_taken, low.wait_s_max) == (5, 1, 3.0)


def test_dependency_index_is_empty_after_draining() -> None:
    queue = FairQueue()
    for _ in range(3):
        offer_all(queue, *(make_item(row % 4, f"v{row % 10}", f"v{row % 3}") for row in range(100)))
        drain(queue)
        assert not queue._index
        assert not queue._is_indexed


def test_offer_and_next_cost_a_few_microseconds() -> None:
    queue = FairQueue()
    items = [make_item(row % 4, f"v{row}") for row in range(21_000)]
    offer_all(queue, *items[:1_000])
    best = min(time_per_item(queue, items[1_000 + 5_000 * part :][:5_000]) for part in range(4))
    print(f"offer + next: {best * 1e6:.1f} us per item (bound 4 on a quiet machine, 20 here)")
    assert best < 20e-6


def time_per_item(queue: FairQueue, items: list[Item]) -> float:
    began = time.process_time()
    for item in items:
        queue.offer(item, 0.0)
        queue.next(0.0)
    return (time.process_time() - began) / len(items)


# --- random arrivals


@st.composite
def arrivals(draw: st.DrawFn) -> list[Item]:
    items: list[Item] = []
    for _ in range(draw(st.integers(1, 40))):
        keys = draw(st.lists(st.sampled_from("abcdef"), max_size=3))
        parents = draw(st.lists(st.integers(0, len(items) - 1), max_size=2)) if items else []
        lane, count = draw(st.integers(0, 3)), draw(st.integers(1, 50))
        items.append(make_item(lane, *keys, count=count, after=[items[index] for index in parents]))
    return items


def ordered_pairs(items: list[Item]) -> Iterator[tuple[Item, Item]]:
    """Yield the pairs of an earlier and a later item that must leave the queue in this order."""
    for index, later in enumerate(items):
        for earlier in items[:index]:
            if earlier.lane == later.lane or set(earlier.keys) & set(later.keys) or earlier in later.after:
                yield earlier, later


@given(arrivals(), st.sampled_from([0.0, 0.3, 100.0]))
def test_any_queue_drains_in_causal_order(items: list[Item], step_s: float) -> None:
    queue = FairQueue()
    must_keep_order = list(ordered_pairs(items))
    now = 0.0
    for item in items:
        now += step_s
        queue.offer(item, now)
    order = {}
    for turn in range(len(items)):
        now += step_s
        item = queue.next(now)
        assert item is not None, "a queue that is not empty should have an item to serve"
        order[item] = turn
    assert all(order[earlier] < order[later] for earlier, later in must_keep_order)
    assert (queue.depth, queue.depth_bytes, queue.peek(now)) == (0, 0, None)


class FairQueueModel(RuleBasedStateMachine):
    """The queue against a model: a list of queued items in order of arrival, searched linearly."""

    items = Bundle("items")

    def __init__(self) -> None:
        super().__init__()
        self.queue = FairQueue(capacity_deltas=60, capacity_bytes=3_000)
        self.model: list[Item] = []
        self.parents: dict[Item, list[Item]] = {}
        self.now = 0.0

    @rule(
        target=items,
        lane=st.integers(0, 3),
        keys=st.lists(st.sampled_from("abc"), max_size=2),
        count=st.integers(1, 20),
        after=st.lists(items, max_size=2),
    )
    def offer(self, lane: int, keys: list[str], count: int, after: list[Item]) -> Item:
        item = make_item(lane, *keys, count=count, after=after)
        fits = self.depth() + count <= 60 and self.depth_bytes() + item.size <= 3_000
        try:
            self.queue.offer(item, self.now)
            assert fits
            self.model.append(item)
            self.parents[item] = after
        except Refused:
            assert not fits
        return item

    @rule(seconds=st.floats(0, 20))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: self.model)
    @rule()
    def take(self) -> None:
        item = self.queue.peek(self.now)
        assert item in self.model
        assert item is not None
        ahead = self.model[: self.model.index(item)]
        assert not any(other.lane == item.lane for other in ahead)
        assert not any(set(other.keys) & set(item.keys) for other in ahead)
        assert not any(other in self.parents[item] for other in ahead)
        self.queue.take(item)
        self.model.remove(item)

    @rule(item=items)
    def withdraw(self, item: Item) -> None:
        assert self.queue.withdraw(item) == (item in self.model)
        if item in self.model:
            self.model.remove(item)

    @invariant()
    def matches_the_model(self) -> None:
        statistics = self.queue.statistics()
        assert (self.queue.depth, self.queue.depth_bytes) == (self.depth(), self.depth_bytes())
        assert [lane.depth for lane in statistics.lanes] == [
            sum(item.count for item in self.model if item.lane == lane) for lane in Priority
        ]
        assert statistics.offered - statistics.taken - statistics.withdrawn == self.depth()

    def depth(self) -> int:
        return sum(item.count for item in self.model)

    def depth_bytes(self) -> int:
        return sum(item.size for item in self.model)


TestFairQueueModel = FairQueueModel.TestCase
