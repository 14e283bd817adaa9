"""The queue before the chain: its bounds and marks, who goes first, and who must wait for whom."""

from __future__ import annotations

import time
from itertools import count as naturals
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, precondition, rule

from delta_prop.ingest.fair_queue import AGEING_DOUBLINGS_MAX, RETRY_AFTER_MS_MAX, FairQueue, Item
from delta_prop_wire.delta import Priority
from delta_prop_wire.errors import Refused, UsageError
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

CRITICAL, HIGH, NORMAL, LOW = Priority


def an_item(lane: int, *keys: str, count: int = 1, size: int = 100, after: Sequence[Item] = ()) -> Item:
    return Item(lane, count, size, keys=[("docs", key) for key in keys], after=after)


def offered(lanes: FairQueue, *items: Item, now: float = 0.0) -> None:
    for item in items:
        lanes.offer(item, now)


def drained(lanes: FairQueue, now: float = 0.0) -> list[Item]:
    return list(iter(lambda: lanes.next(now), None))


# --- bounds


def test_the_delta_above_the_capacity_is_refused_with_the_facts() -> None:
    lanes = FairQueue()
    for row in range(100_000):
        lanes.offer(Item(NORMAL, 1, 10, keys=(row,)), 0.0)
    with pytest.raises(Refused) as refused:
        lanes.offer(an_item(CRITICAL, "one more"), 0.0)
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
    lanes.next(0.0)
    lanes.offer(an_item(CRITICAL, "one more"), 0.0)
    assert (lanes.depth, lanes.statistics().refused_full) == (100_000, 1)


def test_bytes_are_a_bound_of_their_own() -> None:
    lanes = FairQueue(capacity_deltas=10, capacity_bytes=1_000)
    lanes.offer(an_item(NORMAL, size=999), 0.0)
    with pytest.raises(Refused, match=r"999 of 1000 bytes") as refused:
        lanes.offer(an_item(NORMAL, size=2), 0.0)
    assert refused.value.code is ErrorCode.QUEUE_FULL
    lanes.offer(an_item(NORMAL, size=1), 0.0)


@pytest.mark.parametrize(("count", "size"), [(11, 1), (1, 1_001)])
def test_what_can_never_fit_is_told_so(count: int, size: int) -> None:
    lanes = FairQueue(capacity_deltas=10, capacity_bytes=1_000)
    with pytest.raises(Refused, match="smaller batches") as refused:
        lanes.offer(an_item(NORMAL, count=count, size=size), 0.0)
    assert refused.value.code is ErrorCode.TOO_LARGE
    assert refused.value.retry_after_ms is None
    assert (lanes.depth, lanes.statistics().refused_too_large) == (0, count)


def test_a_refusal_changes_nothing() -> None:
    lanes = FairQueue(capacity_deltas=2)
    first, second = an_item(LOW, "a"), an_item(NORMAL, "b")
    offered(lanes, first, second)
    refused = an_item(CRITICAL, "a", "b")
    with pytest.raises(Refused):
        lanes.offer(refused, 0.0)
    assert not refused.is_queued
    assert drained(lanes) == [second, first]


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
def test_settings_that_make_no_sense_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(UsageError, match="give"):
        FairQueue(**settings)  # type: ignore[arg-type]


# --- marks


def test_the_high_mark_is_told_once_and_cleared_below_the_low_mark() -> None:
    lanes = FairQueue(capacity_deltas=100, high=0.8, low=0.5)
    levels = []
    for _ in range(85):
        lanes.offer(an_item(NORMAL), 0.0)
        levels.append(lanes.level)
    assert levels == [0] * 79 + [1] * 6
    for depth in range(84, -1, -1):
        lanes.next(0.0)
        assert lanes.level == (1 if depth >= 50 else 0)
    assert lanes.statistics().times_above_high == 1
    offered(lanes, *(an_item(NORMAL) for _ in range(80)))
    assert lanes.statistics().times_above_high == 2


def test_one_batch_may_cross_the_mark_and_bytes_cross_it_too() -> None:
    lanes = FairQueue(capacity_deltas=100, capacity_bytes=1_000)
    big = an_item(NORMAL, count=80, size=0)
    lanes.offer(big, 0.0)
    assert lanes.level == 1
    lanes.withdraw(big)
    assert lanes.level == 0
    lanes.offer(an_item(NORMAL, size=800), 0.0)
    assert lanes.level == 1


def test_the_time_to_try_again_follows_the_measured_rate() -> None:
    lanes = FairQueue(capacity_deltas=1_000, low=0.5)
    offered(lanes, *(an_item(NORMAL, size=1) for _ in range(1_000)))
    assert retry_after(lanes, 0.0) == 100, "a guess, before anything was measured"
    now = 0.0
    for _ in range(500):  # 1,000 deltas a second, in and out
        now += 0.001
        lanes.next(now)
        lanes.offer(an_item(NORMAL, size=1), now)
    assert retry_after(lanes, now) == pytest.approx(500, rel=0.05)
    assert retry_after(lanes, now + 5) > 900, "a standstill makes it longer"
    assert retry_after(lanes, now + 5_000) <= RETRY_AFTER_MS_MAX


def retry_after(lanes: FairQueue, now: float) -> int:
    with pytest.raises(Refused) as refused:
        lanes.offer(an_item(NORMAL, count=999), now)
    assert refused.value.retry_after_ms is not None
    assert f"{refused.value.retry_after_ms} ms" in refused.value.message
    return refused.value.retry_after_ms


# --- turns


def test_the_lanes_share_as_their_weights_say() -> None:
    lanes = FairQueue()
    for _ in range(1_500):
        offered(lanes, *map(an_item, Priority))
    served = [0] * 4
    for _ in range(1_500):
        served[lanes.next(0.0).lane] += 1  # type: ignore[union-attr]
    assert served == [800, 400, 200, 100]


def test_a_batch_costs_what_it_counts() -> None:
    lanes = FairQueue()
    for _ in range(100):
        lanes.offer(an_item(CRITICAL, count=100), 0.0)
    for _ in range(5_000):
        lanes.offer(an_item(LOW), 0.0)
    served = [0] * 4
    for _ in range(1_000):
        item = lanes.next(0.0)
        assert item is not None
        served[item.lane] += item.count
    assert served[CRITICAL] / served[LOW] == pytest.approx(8, rel=0.12)


def test_an_independent_critical_delta_overtakes_ten_thousand_low_ones() -> None:
    lanes = FairQueue()
    for row in range(10_000):
        lanes.offer(an_item(LOW, f"low-{row}"), 0.0)
    for _ in range(100):
        lanes.next(0.0)
    urgent = an_item(CRITICAL, "other")
    lanes.offer(urgent, 60.0)
    assert lanes.next(60.0) is urgent


def test_low_deltas_move_on_under_endless_critical_load() -> None:
    for backlog in (1, 50):  # one at a time is the harder case: the lane sleeps and wakes each time
        lanes = FairQueue()
        offered(lanes, *(an_item(LOW, f"low-{row}") for row in range(10)))
        taken = 0
        for turn in range(100):
            while lanes.statistics().lanes[CRITICAL].depth < backlog:
                lanes.offer(an_item(CRITICAL), turn * 1e-4)
            item = lanes.next(turn * 1e-4)
            assert item is not None
            taken += item.lane == LOW
        assert taken == pytest.approx(10, abs=2), f"backlog {backlog}"


def test_a_lane_that_was_idle_has_saved_up_no_credit() -> None:
    lanes = FairQueue()
    offered(lanes, *(an_item(LOW) for _ in range(3_000)))
    offered(lanes, *(an_item(NORMAL) for _ in range(2_000)))
    for _ in range(2_000):
        lanes.next(0.0)
    offered(lanes, *(an_item(CRITICAL) for _ in range(2_000)))
    first = [lanes.next(0.0).lane for _ in range(110)]  # type: ignore[union-attr]
    assert first.count(CRITICAL) == pytest.approx(80, abs=3)
    assert first.count(LOW) == pytest.approx(10, abs=2)


def test_waiting_melts_the_debt_of_a_large_batch() -> None:
    def turns_until_low(elapsed_s: float) -> int:
        lanes = FairQueue(ageing_s=1.0)
        offered(lanes, an_item(LOW, count=800), an_item(LOW, count=800))
        lanes.next(0.0)
        for turn in naturals():
            lanes.offer(an_item(CRITICAL), elapsed_s)
            if lanes.next(elapsed_s).lane == LOW:  # type: ignore[union-attr]
                return turn
        raise AssertionError

    turns = [turns_until_low(elapsed_s) for elapsed_s in range(4)]
    assert turns == pytest.approx([6_400, 3_200, 1_600, 800], rel=0.01)


def test_a_long_standstill_does_not_hand_everything_to_old_low_deltas() -> None:
    lanes = FairQueue()
    offered(lanes, *(an_item(LOW) for _ in range(3_000)))
    lanes.next(0.0)
    served = [0] * 4
    now = 3_600.0
    for _ in range(1_000):
        lanes.offer(an_item(CRITICAL), now)
        served[lanes.next(now).lane] += 1  # type: ignore[union-attr]
    assert served[CRITICAL] >= 1_000 * 8 // (8 + 2**AGEING_DOUBLINGS_MAX) - 1


def test_a_melted_debt_is_no_credit_either() -> None:
    lanes = FairQueue()
    offered(lanes, an_item(LOW, count=5_000), *(an_item(LOW) for _ in range(3_000)))
    offered(lanes, *(an_item(CRITICAL, count=100) for _ in range(320)), an_item(CRITICAL))
    for _ in range(322):
        lanes.next(0.0)
    now, served = 100.0, [0] * 4
    for _ in range(1_000):
        lanes.offer(an_item(CRITICAL), now)
        served[lanes.next(now).lane] += 1  # type: ignore[union-attr]
    assert served[LOW] > served[CRITICAL] > 100


def test_lanes_that_wake_together_start_even() -> None:
    lanes = FairQueue()
    offered(
        lanes, *(an_item(CRITICAL) for _ in range(100)), *(an_item(NORMAL) for _ in range(500)), an_item(LOW)
    )
    for _ in range(500):
        lanes.next(0.0)
    low, critical = an_item(LOW), an_item(CRITICAL)
    offered(lanes, low, critical)
    assert lanes.next(0.0) is critical


# --- who waits for whom


def test_a_critical_child_never_overtakes_the_low_parent_it_names() -> None:
    lanes = FairQueue()
    ahead = [an_item(LOW, f"low-{row}") for row in range(1_000)]
    parent = an_item(LOW, "parent")
    child = an_item(CRITICAL, "child", after=[parent])
    unrelated = an_item(CRITICAL, "unrelated")
    offered(lanes, *ahead, parent, child, unrelated)
    assert drained(lanes) == [*ahead, parent, child, unrelated], "the child's lane lends its turns"
    assert lanes.statistics().items_donated > 850
    assert child.after == (), "what has left holds on to nothing"


def test_a_critical_delta_waits_for_what_is_queued_of_its_vector() -> None:
    lanes = FairQueue()
    earlier, later = an_item(LOW, "a"), an_item(CRITICAL, "a", "b")
    other, last = an_item(NORMAL, "b"), an_item(HIGH, "a")
    offered(lanes, earlier, other, later, last)
    order = drained(lanes)
    assert order.index(earlier) < order.index(later) < order.index(last)
    assert order.index(other) < order.index(later)


def test_a_vector_queued_before_a_second_lane_was_used_is_known() -> None:
    lanes = FairQueue()
    waiting = [an_item(LOW, f"v{row % 7}") for row in range(100)]
    offered(lanes, *waiting)
    urgent = an_item(CRITICAL, "v3")
    lanes.offer(urgent, 0.0)
    last_of_its_vector = waiting[94]
    order = drained(lanes)
    assert order.index(urgent) == order.index(last_of_its_vector) + 1


def test_a_chain_through_every_lane_is_followed() -> None:
    lanes = FairQueue()
    low = an_item(LOW, "a")
    normal = an_item(NORMAL, "a", "b")
    high = an_item(HIGH, "b", "c")
    critical = an_item(CRITICAL, "c")
    offered(lanes, low, normal, high, critical)
    assert drained(lanes) == [low, normal, high, critical]


def test_what_is_peeked_stays_until_it_is_taken() -> None:
    lanes = FairQueue()
    low, critical = an_item(LOW, "a"), an_item(CRITICAL, "a")
    offered(lanes, low, critical)
    before = lanes.statistics()
    assert lanes.peek(0.0) is low
    assert lanes.peek(1.0) is low
    assert lanes.statistics() == before
    lanes.offer(other := an_item(HIGH, "b"), 1.0)
    lanes.take(low)
    assert drained(lanes, 1.0) == [other, critical], "the critical lane has had its turn: it lent it"


def test_only_what_was_peeked_can_be_taken() -> None:
    lanes = FairQueue()
    first, second = an_item(NORMAL), an_item(NORMAL)
    offered(lanes, first, second)
    lanes.peek(0.0)
    with pytest.raises(AssertionError):
        lanes.take(second)
    lanes.withdraw(first)
    with pytest.raises(AssertionError):
        lanes.take(first)


def test_what_is_withdrawn_never_was() -> None:
    lanes = FairQueue()
    parent = an_item(LOW, "a")
    between = an_item(HIGH, "a", after=[parent])
    child = an_item(CRITICAL, "a")
    named = an_item(CRITICAL, "b", after=[between])
    offered(lanes, parent, between, child, named)
    assert lanes.withdraw(between)
    assert not lanes.withdraw(between)
    assert (lanes.depth, lanes.depth_bytes, lanes.statistics().withdrawn) == (3, 300, 1)
    assert drained(lanes) == [parent, child, named], "the child waits for the parent all the same"
    assert not lanes.withdraw(parent)


def test_what_was_withdrawn_may_be_offered_again_behind_what_came_meanwhile() -> None:
    lanes = FairQueue()
    blocked, again = an_item(LOW, "a"), an_item(CRITICAL, "b", "a")
    offered(lanes, blocked, again)
    assert lanes.peek(0.0) is blocked
    lanes.withdraw(again)
    meanwhile = an_item(LOW, "b")
    offered(lanes, meanwhile, again)
    lanes.withdraw(blocked)
    assert drained(lanes) == [meanwhile, again]


@pytest.mark.alone
def test_withdrawing_from_a_long_chain_is_quick() -> None:
    lanes = FairQueue()
    offered(lanes, an_item(CRITICAL, "other"))
    chain = [an_item(LOW, "hot") for _ in range(50_000)]
    offered(lanes, *chain)
    began = time.process_time()
    for item in reversed(chain[1_000:]):
        assert lanes.withdraw(item)
    for item in chain[:1_000]:
        lanes.withdraw(item)
    assert time.process_time() - began < 2.0, "a scan for each would take minutes"
    assert lanes.depth == 1


def test_waits_are_measured_by_lane() -> None:
    lanes = FairQueue()
    offered(lanes, an_item(LOW, count=5), now=1.0)
    offered(lanes, an_item(CRITICAL), now=2.0)
    lanes.next(4.0)
    lanes.next(4.0)
    critical, *_, low = lanes.statistics().lanes
    assert (critical.taken, critical.items_taken, critical.wait_s_total) == (1, 1, 2.0)
    assert (low.taken, low.items_taken, low.wait_s_max) == (5, 1, 3.0)


def test_memory_of_dependencies_goes_with_the_queue() -> None:
    lanes = FairQueue()
    for _ in range(3):
        offered(lanes, *(an_item(row % 4, f"v{row % 10}", f"v{row % 3}") for row in range(100)))
        drained(lanes)
        assert not lanes._index
        assert not lanes._indexed


def test_offer_and_next_cost_a_few_microseconds() -> None:
    lanes = FairQueue()
    items = [an_item(row % 4, f"v{row}") for row in range(21_000)]
    offered(lanes, *items[:1_000])
    best = min(timed(lanes, items[1_000 + 5_000 * part :][:5_000]) for part in range(4))
    print(f"offer + next: {best * 1e6:.1f} us an item (bound 4 on a quiet machine, 20 here)")
    assert best < 20e-6


def timed(lanes: FairQueue, items: list[Item]) -> float:
    began = time.process_time()
    for item in items:
        lanes.offer(item, 0.0)
        lanes.next(0.0)
    return (time.process_time() - began) / len(items)


# --- any arrivals


@st.composite
def arrivals(draw: st.DrawFn) -> list[Item]:
    items: list[Item] = []
    for _ in range(draw(st.integers(1, 40))):
        keys = draw(st.lists(st.sampled_from("abcdef"), max_size=3))
        named = draw(st.lists(st.integers(0, len(items) - 1), max_size=2)) if items else []
        lane, count = draw(st.integers(0, 3)), draw(st.integers(1, 50))
        items.append(an_item(lane, *keys, count=count, after=[items[at] for at in named]))
    return items


def pairs_that_must_keep_order(items: list[Item]) -> Iterator[tuple[Item, Item]]:
    for at, later in enumerate(items):
        for earlier in items[:at]:
            if earlier.lane == later.lane or set(earlier.keys) & set(later.keys) or earlier in later.after:
                yield earlier, later


@given(arrivals(), st.sampled_from([0.0, 0.3, 100.0]))
def test_any_queue_drains_and_in_causal_order(items: list[Item], step_s: float) -> None:
    lanes = FairQueue()
    must_keep = list(pairs_that_must_keep_order(items))
    now = 0.0
    for item in items:
        now += step_s
        lanes.offer(item, now)
    order = {}
    for turn in range(len(items)):
        now += step_s
        item = lanes.next(now)
        assert item is not None, "something can always be served"
        order[item] = turn
    assert all(order[earlier] < order[later] for earlier, later in must_keep)
    assert (lanes.depth, lanes.depth_bytes, lanes.peek(now)) == (0, 0, None)


class LanesBesideAList(RuleBasedStateMachine):
    """The queue beside a list of what is queued, in order of arrival, searched by hand."""

    items = Bundle("items")

    def __init__(self) -> None:
        super().__init__()
        self.lanes = FairQueue(capacity_deltas=60, capacity_bytes=3_000)
        self.model: list[Item] = []
        self.named: dict[Item, list[Item]] = {}
        self.now = 0.0

    @rule(
        target=items,
        lane=st.integers(0, 3),
        keys=st.lists(st.sampled_from("abc"), max_size=2),
        count=st.integers(1, 20),
        after=st.lists(items, max_size=2),
    )
    def offer(self, lane: int, keys: list[str], count: int, after: list[Item]) -> Item:
        item = an_item(lane, *keys, count=count, after=after)
        room = self.depth() + count <= 60 and self.depth_bytes() + item.size <= 3_000
        try:
            self.lanes.offer(item, self.now)
            assert room
            self.model.append(item)
            self.named[item] = after
        except Refused:
            assert not room
        return item

    @rule(seconds=st.floats(0, 20))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: self.model)
    @rule()
    def take(self) -> None:
        item = self.lanes.peek(self.now)
        assert item in self.model
        assert item is not None
        ahead = self.model[: self.model.index(item)]
        assert not any(other.lane == item.lane for other in ahead)
        assert not any(set(other.keys) & set(item.keys) for other in ahead)
        assert not any(other in self.named[item] for other in ahead)
        self.lanes.take(item)
        self.model.remove(item)

    @rule(item=items)
    def withdraw(self, item: Item) -> None:
        assert self.lanes.withdraw(item) == (item in self.model)
        if item in self.model:
            self.model.remove(item)

    @invariant()
    def agrees(self) -> None:
        statistics = self.lanes.statistics()
        assert (self.lanes.depth, self.lanes.depth_bytes) == (self.depth(), self.depth_bytes())
        assert [lane.depth for lane in statistics.lanes] == [
            sum(item.count for item in self.model if item.lane == lane) for lane in Priority
        ]
        assert statistics.offered - statistics.taken - statistics.withdrawn == self.depth()

    def depth(self) -> int:
        return sum(item.count for item in self.model)

    def depth_bytes(self) -> int:
        return sum(item.size for item in self.model)


TestLanesBesideAList = LanesBesideAList.TestCase
