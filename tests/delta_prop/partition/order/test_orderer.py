"""The orderer's guarantees: order, release, refusals that name the blocking dot, limits."""

from __future__ import annotations

import random

import pytest

from delta_prop.partition.order.orderer import Verdict
from delta_prop_wire.delta import Dot
from delta_prop_wire.errors import Refused
from delta_prop_wire.spec import ErrorCode

A, B, C, D = 1, 2, 3, 4
ID = bytes(range(16))


# --- order


def test_entries_in_order_do_not_wait(new_pipeline, new_entry):
    pipeline = new_pipeline()
    pipeline.offer(new_entry(A, 1, 10), new_entry(A, 11), new_entry(B, 1), new_entry(A, 12, 20))
    assert pipeline.dots() == [(A, 1), (A, 11), (B, 1), (A, 12)]
    assert pipeline.orderer.watermarks == {A: 20, B: 1}
    assert pipeline.is_empty()


def test_entry_waits_for_its_predecessor(new_pipeline, new_entry):
    pipeline = new_pipeline()
    pipeline.offer(new_entry(A, 3), new_entry(A, 2))
    assert pipeline.log == []
    pipeline.offer(new_entry(A, 1))
    assert pipeline.dots() == [(A, 1), (A, 2), (A, 3)]
    assert pipeline.is_empty()


def test_entry_waits_for_every_clock_entry(new_pipeline, new_entry):
    pipeline = new_pipeline()
    pipeline.offer(new_entry(A, 1, clock={B: 2, C: 1}), new_entry(B, 1), new_entry(C, 1))
    assert pipeline.dots() == [(B, 1), (C, 1)]
    pipeline.offer(new_entry(B, 2))
    assert pipeline.dots()[-2:] == [(B, 2), (A, 1)]
    assert pipeline.is_empty()


def test_clock_entry_of_own_origin_is_ignored(new_pipeline, new_entry):
    pipeline = new_pipeline()
    pipeline.offer(new_entry(A, 1, clock={A: 7}))
    assert pipeline.dots() == [(A, 1)]


def test_entry_waits_for_parents_by_dot_and_by_id(new_pipeline, new_entry):
    pipeline = new_pipeline()
    pipeline.offer(new_entry(A, 1, parents=(Dot(B, 1), ID)), new_entry(B, 1))
    assert pipeline.dots() == [(B, 1)]
    pipeline.offer(new_entry(C, 1, ids=(ID,)))
    assert pipeline.dots() == [(B, 1), (C, 1), (A, 1)]
    assert pipeline.is_empty()


def test_parents_within_own_run_are_ignored(new_pipeline, new_entry):
    pipeline = new_pipeline()
    pipeline.offer(new_entry(A, 1, 3, ids=(ID, b"x" * 16, b"y" * 16), parents=(ID, Dot(A, 2))))
    assert pipeline.dots() == [(A, 1)]


def test_dependency_named_twice_counts_once(new_pipeline, new_entry):
    pipeline = new_pipeline()
    pipeline.offer(new_entry(A, 1, clock={B: 1}, parents=(Dot(B, 2), Dot(B, 1), ID, ID)))
    pipeline.offer(new_entry(B, 1), new_entry(B, 2), new_entry(C, 1, ids=(ID,)))
    assert pipeline.dots()[-1] == (A, 1)
    assert pipeline.is_empty()


def test_dependents_are_released_in_order_of_arrival(new_pipeline, new_entry):
    pipeline = new_pipeline()
    waiting = [new_entry(origin, 1, clock={A: 1}) for origin in (D, B, C)]
    pipeline.offer(new_entry(A, 2), *waiting, new_entry(A, 1))
    assert pipeline.dots() == [(A, 1), (A, 2), (D, 1), (B, 1), (C, 1)]


def test_one_run_releases_in_arrival_order_not_counter_order(new_pipeline, new_entry):
    pipeline = new_pipeline()
    pipeline.offer(
        new_entry(D, 1, clock={A: 3}), new_entry(B, 1, clock={A: 1}), new_entry(C, 1, parents=(ID,))
    )
    pipeline.offer(new_entry(A, 1, 4, ids=(ID,)))
    assert pipeline.dots() == [(A, 1), (D, 1), (B, 1), (C, 1)]


def test_counter_gap_is_ordered_by_previous_counter(new_pipeline, new_entry):
    pipeline = new_pipeline()
    second = new_entry(A, 40, 45, previous=17, count=3)
    pipeline.offer(second)
    assert pipeline.log == []
    pipeline.offer(new_entry(A, 10, 17, previous=0, count=2))
    assert pipeline.dots() == [(A, 10), (A, 40)]
    assert pipeline.orderer.watermarks == {A: 45}
    assert pipeline.is_empty()


def test_orderer_starts_from_given_watermarks(new_pipeline, new_entry):
    pipeline = new_pipeline(watermarks={A: 5, B: 2})
    pipeline.offer(new_entry(A, 6, clock={B: 2}))
    assert pipeline.dots() == [(A, 6)]


def test_forgotten_origin_has_no_watermark(new_pipeline, new_entry):
    pipeline = new_pipeline()
    pipeline.offer(new_entry(-1, 1))
    pipeline.orderer.forget(-1)
    assert pipeline.orderer.watermarks == {}


# --- overlapping runs


def test_find_pending_returns_entry_that_waits_for_predecessor(new_pipeline, new_entry):
    pipeline = new_pipeline()
    first = new_entry(A, 2)
    pipeline.offer(first)
    assert pipeline.orderer.find_pending(new_entry(A, 2)) is first
    assert pipeline.orderer.find_pending(new_entry(A, 2, 9)) is first
    assert pipeline.orderer.find_pending(new_entry(A, 3)) is None


def test_find_pending_returns_entry_that_waits_for_clock(new_pipeline, new_entry):
    pipeline = new_pipeline()
    first = new_entry(A, 1, clock={B: 1})
    pipeline.offer(first)
    assert pipeline.orderer.find_pending(new_entry(A, 1, clock={B: 1})) is first


@pytest.mark.parametrize("rows", [1, 5])
def test_pending_run_fully_overtaken_is_duplicate(new_pipeline, new_entry, rows):
    pipeline = new_pipeline()
    overtaken = new_entry(A, 2, 2 if rows == 1 else 3, clock={B: 1}, parents=(ID,))
    pipeline.offer(overtaken)
    pipeline.offer(*(new_entry(A, first, first + rows - 1) for first in range(1, 6, rows)))
    assert pipeline.duplicates == [overtaken]
    assert overtaken.verdict is Verdict.DUPLICATE
    assert pipeline.is_empty()


@pytest.mark.parametrize("rows", [1, 4])
def test_pending_run_partly_overtaken_is_refused_with_watermark(new_pipeline, new_entry, rows):
    pipeline = new_pipeline()
    overtaken, successor = new_entry(A, 3, 6), new_entry(A, 7)
    pipeline.offer(overtaken, successor)
    for first in range(1, 5, rows):
        # Unlike `offer`, this does not append a released run.
        pipeline.orderer.note_delivered(A, first + rows - 1)
    pipeline.drain()
    error = pipeline.refusals[overtaken]
    assert error.code is ErrorCode.OVERLAP
    assert error.details["watermark"] == 4
    pipeline.offer(new_entry(A, 5, 6))
    assert pipeline.log[-1] is successor
    assert pipeline.is_empty()


def test_run_withdrawn_twice_and_overtaken_is_released_once(new_pipeline, new_entry):
    pipeline = new_pipeline()
    withdrawn = new_entry(A, 2, clock={B: 1})
    pipeline.offer(withdrawn, new_entry(A, 5))
    for now in (1.0, 2.0):
        pipeline.orderer.withdraw(withdrawn, now)
    pipeline.offer(new_entry(A, 1, 4))
    assert pipeline.duplicates == [withdrawn]
    assert len(pipeline.log) == 2
    assert pipeline.is_empty()


def test_counter_gap_from_below_watermark_is_refused(new_pipeline, new_entry):
    pipeline = new_pipeline(watermarks={A: 5})
    entry = new_entry(A, 10, previous=3, count=1)
    (refused_entry,) = pipeline.orderer.hold_pending(entry, 0.0)
    assert refused_entry.error.code is ErrorCode.OVERLAP
    assert pipeline.is_empty()


def test_overlap_with_pending_run_names_its_counters(new_pipeline, new_entry):
    pipeline = new_pipeline()
    pipeline.offer(new_entry(A, 2, 9))
    error = pipeline.orderer.overlap(new_entry(A, 2, 4))
    assert error.code is ErrorCode.OVERLAP
    assert error.details == {"watermark": 0, "current": "2-9"}


@pytest.mark.parametrize("parents", [(Dot(A, 4),), (ID,), (Dot(A, 4), ID)])
def test_run_overtaken_by_its_own_parent_is_released_once(new_pipeline, new_entry, parents):
    pipeline = new_pipeline()
    overtaken = new_entry(A, 1, 2, parents=parents)
    pipeline.offer(overtaken)
    pipeline.offer(new_entry(A, 1, 4, ids=(ID,)))
    assert pipeline.duplicates == [overtaken]
    assert pipeline.is_empty()


# --- time


def test_timeout_names_missing_dots_and_refuses_dependents(new_pipeline, new_entry):
    pipeline = new_pipeline(pending_timeout_s=30.0)
    root = new_entry(A, 5, clock={B: 2})
    same_origin, by_clock, by_parent = (
        new_entry(A, 6),
        new_entry(C, 1, clock={A: 5}),
        new_entry(D, 1, parents=(Dot(C, 1),)),
    )
    independent = new_entry(9, 2)
    pipeline.offer(new_entry(B, 1), root, now=0.0)
    pipeline.offer(same_origin, by_clock, by_parent, independent, now=20.0)
    assert pipeline.orderer.next_deadline() == 30.0
    pipeline.expire(29.9)
    assert pipeline.refusals == {}
    pipeline.expire(30.0)
    assert list(pipeline.refusals) == [root, same_origin, by_clock, by_parent]
    error = pipeline.refusals[root]
    assert error.code is ErrorCode.DEP_TIMEOUT
    assert error.retry_after_ms is not None
    assert error.details["missing"] == [f"{A:016x}:1-4", f"{B:016x}:2"]
    assert error.details["blocked_by"] == f"{A:016x}:1"
    for entry in (same_origin, by_clock, by_parent):
        error = pipeline.refusals[entry]
        assert error.code is ErrorCode.DEP_TIMEOUT
        assert error.details["blocked_by"] == f"{A:016x}:5"
    assert pipeline.refusals[by_parent].details["missing"] == [f"{C:016x}:1"]
    assert pipeline.orderer.next_deadline() == 50.0
    pipeline.expire(50.0)
    assert pipeline.is_empty()


def test_timeout_for_unknown_id_names_offset_from_which_ids_are_known(new_pipeline, new_entry):
    pipeline = new_pipeline()
    pipeline.ids.kept_since = 4711
    entry = new_entry(A, 1, parents=(ID,))
    pipeline.offer(entry)
    pipeline.expire(30.0)
    error = pipeline.refusals[entry]
    assert "since offset 4711" in error.message
    assert error.details["missing"] == [ID.hex()]
    assert error.details["ids_kept_since"] == "offset 4711"


def test_refused_dots_can_be_resent(new_pipeline, new_entry):
    pipeline = new_pipeline()
    entries = [new_entry(A, 2), new_entry(A, 3), new_entry(B, 1, clock={A: 3})]
    pipeline.offer(*entries)
    pipeline.expire(30.0)
    assert set(pipeline.refusals) == set(entries)
    assert pipeline.orderer.watermarks == {}
    pipeline.offer(*reversed(entries), now=31.0)
    pipeline.offer(new_entry(A, 1), now=32.0)
    assert pipeline.dots() == [(A, 1), (A, 2), (A, 3), (B, 1)]
    assert pipeline.refusals == {}
    assert pipeline.is_empty()


def test_cyclic_dependencies_time_out(new_pipeline, new_entry):
    pipeline = new_pipeline()
    entries = [
        new_entry(A, 1, clock={B: 1}),
        new_entry(B, 1, clock={A: 1}),
        new_entry(C, 1, parents=(Dot(C, 9),)),
    ]
    pipeline.offer(*entries)
    pipeline.expire(30.0)
    assert set(pipeline.refusals) == set(entries)
    assert pipeline.is_empty()


# --- capacity


def test_full_pending_refuses_newest_and_its_dependents(new_pipeline, new_entry):
    pipeline = new_pipeline(pending_deltas_max=10, owner_share=1.0, reserve_share=0.0)
    waiting = [new_entry(A, counter) for counter in range(2, 9)]
    dependent = new_entry(B, 5, clock={C: 4})
    pipeline.offer(*waiting, dependent)
    newest = new_entry(C, 2, 4)
    pipeline.offer(newest)
    error = pipeline.refusals[newest]
    assert error.code is ErrorCode.PENDING_FULL
    assert error.retryable
    assert error.retry_after_ms is not None
    assert error.details["depth"] == 8
    assert error.details["capacity"] == 10
    assert error.details["missing"] == [f"{C:016x}:1"]
    assert pipeline.refusals[dependent].code is ErrorCode.PENDING_FULL
    assert pipeline.refusals[dependent].details["blocked_by"] == f"{C:016x}:2"
    assert pipeline.orderer.statistics().pending_deltas == 7


def test_pending_bytes_are_limited(new_pipeline, new_entry):
    pipeline = new_pipeline(pending_bytes_max=1_000, owner_share=1.0, reserve_share=0.0)
    pipeline.offer(new_entry(A, 2, size=900))
    entry = new_entry(B, 2, size=101)
    pipeline.offer(entry)
    assert pipeline.refusals[entry].details["depth"] == 900
    assert "bytes" in pipeline.refusals[entry].message


def test_reserve_admits_awaited_predecessor_when_full(new_pipeline, new_entry):
    pipeline = new_pipeline(pending_deltas_max=20, owner_share=1.0, reserve_share=0.1)
    pipeline.offer(*(new_entry(A, counter) for counter in range(20, 2, -1)))
    assert pipeline.orderer.statistics().pending_deltas == 18
    not_awaited, awaited = new_entry(B, 2), new_entry(A, 2, clock={C: 1})
    pipeline.offer(not_awaited, awaited)
    assert list(pipeline.refusals) == [not_awaited]
    assert pipeline.orderer.statistics().pending_deltas == 19
    pipeline.offer(new_entry(A, 1), new_entry(C, 1))
    assert len(pipeline.log) == 21
    assert pipeline.is_empty()


def test_reserve_admits_parent_by_id_and_predecessor_of_parent(new_pipeline, new_entry):
    pipeline = new_pipeline(pending_deltas_max=20, owner_share=1.0, reserve_share=0.2)
    pipeline.offer(new_entry(A, 1, parents=(ID,)), new_entry(B, 1, clock={C: 7}), new_entry(A, 2, 15))
    by_id, predecessor = new_entry(D, 2, ids=(ID,)), new_entry(C, 3)
    pipeline.offer(by_id, predecessor)
    assert pipeline.refusals == {}
    assert pipeline.orderer.statistics().pending_deltas == 18


def test_reserve_admits_only_dots_still_awaited(new_pipeline, new_entry):
    pipeline = new_pipeline(pending_deltas_max=20, owner_share=1.0, reserve_share=0.2)
    fenced, child = new_entry(C, 9, clock={B: 9}), new_entry(A, 1, clock={B: 2})
    pipeline.offer(fenced, child, new_entry(D, 2, 15))
    pipeline.orderer.take_origin(C)
    pipeline.offer(new_entry(9, 2))
    successor, parent = new_entry(B, 3, 4), new_entry(B, 2)
    pipeline.offer(successor)
    assert pipeline.refusals[successor].details["capacity"] == 16  # no entry waits for it any longer
    pipeline.offer(parent)
    assert list(pipeline.refusals) == [successor]
    assert pipeline.orderer.statistics().pending_deltas == 17


def test_one_owner_may_fill_a_quarter_of_pending(new_pipeline, new_entry):
    pipeline = new_pipeline(pending_deltas_max=40)
    greedy = [new_entry(origin, 2, owner="one connection") for origin in range(1, 12)]
    pipeline.offer(*greedy)
    assert list(pipeline.refusals) == greedy[10:]
    assert pipeline.refusals[greedy[10]].details["capacity"] == 10
    modest = new_entry(50, 2, owner="another")
    pipeline.offer(modest)
    assert modest not in pipeline.refusals


def test_one_owner_may_fill_a_quarter_of_pending_bytes(new_pipeline, new_entry):
    pipeline = new_pipeline(pending_bytes_max=4_000)
    fits, over_limit = new_entry(A, 2, size=1_000), new_entry(A, 3, size=1)
    pipeline.offer(fits, over_limit)
    assert list(pipeline.refusals) == [over_limit]


# --- a delta that cannot be appended, or is withdrawn


def test_failed_append_refuses_dependents(new_pipeline, new_entry):
    pipeline = new_pipeline()
    failing, dependent, independent = (
        new_entry(A, 2),
        new_entry(B, 1, clock={A: 2}),
        new_entry(C, 1, clock={A: 1}),
    )
    pipeline.append_errors[A, 2] = Refused(ErrorCode.LOG_FULL, "full", retry_after_ms=70)
    pipeline.offer(failing, dependent, independent, new_entry(A, 1))
    assert list(pipeline.refusals) == [failing, dependent]
    assert pipeline.refusals[dependent].code is ErrorCode.LOG_FULL
    assert pipeline.refusals[dependent].retry_after_ms == 70
    assert pipeline.dots() == [(A, 1), (C, 1)]
    pipeline.append_errors.clear()
    pipeline.offer(dependent, failing)
    assert pipeline.dots()[2:] == [(A, 2), (B, 1)]


def test_dependent_of_final_refusal_gets_retryable_refusal(new_pipeline, new_entry):
    pipeline = new_pipeline()
    dependent = new_entry(B, 1, clock={A: 1})
    pipeline.append_errors[A, 1] = Refused(ErrorCode.FENCED, "another holds the name")
    pipeline.offer(dependent, new_entry(A, 1))
    assert pipeline.refusals[dependent].code is ErrorCode.DEP_TIMEOUT


def test_withdrawn_entry_still_waits_for_clock_but_not_parents(new_pipeline, new_entry):
    pipeline = new_pipeline()
    withdrawn = new_entry(A, 2, clock={B: 1}, parents=(ID, Dot(C, 5)))
    successor = new_entry(A, 3)
    pipeline.offer(withdrawn, successor)
    assert pipeline.orderer.withdraw(withdrawn, 1.0)
    pipeline.offer(new_entry(A, 1))
    assert pipeline.dots() == [(A, 1)]
    pipeline.offer(new_entry(B, 1))
    assert pipeline.dots() == [(A, 1), (B, 1), (A, 2), (A, 3)]
    assert withdrawn.is_withdrawn
    assert not successor.is_withdrawn
    assert pipeline.is_empty()
    assert not pipeline.orderer.withdraw(withdrawn, 2.0)


def test_withdrawn_entry_that_waits_only_for_parents_is_released_at_once(new_pipeline, new_entry):
    pipeline = new_pipeline()
    withdrawn, child = new_entry(-1, 1, parents=(ID,)), new_entry(A, 1, parents=(Dot(-1, 1),))
    pipeline.offer(withdrawn, child)
    assert "no dot yet" in str(pipeline.orderer.missing(child))
    pipeline.orderer.withdraw(withdrawn, 1.0)
    pipeline.drain()
    assert pipeline.log == [withdrawn, child]
    assert withdrawn.is_withdrawn
    assert pipeline.is_empty()


def test_take_origin_leaves_its_dependents_waiting(new_pipeline, new_entry):
    pipeline = new_pipeline()
    fenced, other = [new_entry(A, 3), new_entry(A, 2, clock={B: 1})], new_entry(C, 1, clock={A: 2})
    pipeline.offer(*fenced, other)
    assert pipeline.orderer.take_origin(A) == fenced[::-1]
    assert pipeline.orderer.take_origin(77) == []
    pipeline.offer(new_entry(A, 1, 2))
    assert pipeline.log[-1] is other
    assert pipeline.is_empty()


def test_drain_returns_entries_in_order_of_arrival(new_pipeline, new_entry):
    pipeline = new_pipeline()
    entries = [new_entry(A, 3), new_entry(B, 1, parents=(ID,)), new_entry(A, 2)]
    pipeline.offer(*entries)
    assert pipeline.orderer.drain() == entries
    assert pipeline.is_empty()


def test_hold_pending_of_ready_entry_raises(new_pipeline, new_entry):
    with pytest.raises(AssertionError, match="nothing would release"):
        new_pipeline().orderer.hold_pending(new_entry(A, 1), 0.0)


# --- full, while the dependency arrives last


def test_full_pending_drains_when_first_counter_comes_last(new_pipeline, new_entry):
    pipeline = new_pipeline(pending_deltas_max=100, owner_share=1.0)
    missing = new_entry(A, 1)
    waiting = [new_entry(A, counter) for counter in range(2, 301)]
    random.Random(1).shuffle(waiting)
    pipeline.offer(*waiting)
    refusals = list(pipeline.refusals)
    assert refusals
    assert pipeline.orderer.statistics().pending_deltas <= 100
    pipeline.offer(missing)
    _retry_until_accepted(pipeline)
    assert [counter for _, counter in pipeline.dots()] == list(range(1, 301))
    assert pipeline.is_empty()


def test_full_pending_drains_dependents_of_three_producers(new_pipeline, new_entry):
    pipeline = new_pipeline(pending_deltas_max=100, owner_share=0.25)
    parent = new_entry(A, 1)
    dependents = [
        new_entry(origin, counter, clock={A: 1} if counter == 1 else {other: counter - 1})
        for counter in range(1, 101)
        for origin, other in ((B, C), (C, D), (D, B))
    ]
    random.Random(2).shuffle(dependents)
    pipeline.offer(*dependents)
    statistics = pipeline.orderer.statistics()
    assert statistics.pending_deltas <= 75  # three owners, a quarter each
    assert statistics.pending_runs + len(pipeline.refusals) == 300
    assert all(error.details["blocked_by"] for error in pipeline.refusals.values())
    pipeline.offer(parent)
    _retry_until_accepted(pipeline)
    assert len(pipeline.log) == 301
    assert pipeline.is_empty()


def test_missing_parent_times_out_without_blocking_others(new_pipeline, new_entry):
    pipeline = new_pipeline(pending_deltas_max=100, owner_share=0.25)
    dependents = [
        new_entry(origin, counter, clock={A: 1}) for counter in range(1, 101) for origin in (B, C, D)
    ]
    random.Random(3).shuffle(dependents)
    for position, entry in enumerate(dependents):
        pipeline.offer(entry, now=position * 0.01)
    free = [new_entry(9, counter) for counter in range(1, 50)]
    pipeline.offer(*free, now=4.0)
    assert pipeline.log == free  # other producers are not blocked
    pipeline.expire(40.0)
    assert set(pipeline.refusals) == set(dependents)  # each dependent has a refusal
    assert all(error.retryable for error in pipeline.refusals.values())
    assert pipeline.is_empty()
    pipeline.offer(new_entry(A, 1), now=41.0)
    _retry_until_accepted(pipeline)
    assert len(pipeline.log) == 350


def _retry_until_accepted(pipeline):
    """Resend refused entries in the order of each origin, as producers do."""
    for _ in range(1_000):
        retries = sorted(pipeline.refusals, key=lambda entry: (entry.first, entry.origin))
        if not retries:
            return
        pipeline.offer(*retries)
    pytest.fail(f"{len(pipeline.refusals)} deltas are still refused")


# --- random graphs


@pytest.mark.parametrize("seed", range(20))
def test_random_graphs_are_logged_in_causal_order(new_pipeline, new_entry, seed):
    rng = random.Random(seed)
    entries, ids = _random_graph(rng, new_entry, rows=400)
    pipeline = new_pipeline(owner_share=1.0)
    pipeline.offer(*_arrival_order(rng, entries))
    assert pipeline.refusals == {}
    assert sorted(pipeline.dots()) == sorted((entry.origin, entry.first) for entry in entries)
    _check_linear_extension(pipeline.log, ids)
    assert pipeline.is_empty()


@pytest.mark.parametrize("seed", range(10))
def test_random_graphs_with_small_capacity_are_logged_in_causal_order(new_pipeline, new_entry, seed):
    rng = random.Random(seed)
    entries, ids = _random_graph(rng, new_entry, rows=300)
    pipeline = new_pipeline(pending_deltas_max=12, owner_share=0.5)
    pipeline.offer(*_arrival_order(rng, entries))
    assert pipeline.orderer.statistics().refused_full > 0
    _retry_until_accepted(pipeline)
    assert len(pipeline.log) == len(entries)
    _check_linear_extension(pipeline.log, ids)
    assert pipeline.is_empty()


def _random_graph(rng, new_entry, *, rows):
    """Draw runs of four origins, whose clocks and parents name some earlier runs."""
    entries: list = []
    last, known_counters, ids = dict.fromkeys((A, B, C, D), 0), {o: {} for o in (A, B, C, D)}, {}
    while len(entries) < rows:
        origin = rng.choice((A, B, C, D))
        count = rng.choice((1, 1, 1, 3))
        clock = {}
        for other in last:
            if other != origin and rng.random() < 0.3 and last[other] > known_counters[origin].get(other, 0):
                clock[other] = known_counters[origin][other] = rng.randint(
                    known_counters[origin].get(other, 0) + 1, last[other]
                )
        parents = ()
        if entries and rng.random() < 0.2:
            parent = rng.choice(entries)
            parents = (parent.ids[0] if parent.ids else parent.dot,)
        own_ids = (rng.randbytes(16),) * (rng.random() < 0.2)
        entry = new_entry(
            origin, last[origin] + 1, last[origin] + count, clock=clock, parents=parents, ids=own_ids
        )
        last[origin] += count
        ids.update(dict.fromkeys(own_ids, entry))
        entries.append(entry)
    return entries, ids


def _arrival_order(rng, entries):
    """Draw an order of arrival: 30 % moved by up to 100 positions, 5 % duplicated, 1 % at the end."""
    positions = []
    for position, entry in enumerate(entries):
        late = len(entries) if rng.random() < 0.01 else 0
        moved = rng.uniform(0, 100) if rng.random() < 0.3 else 0
        positions.append((position + moved + late, position, entry))
        if rng.random() < 0.05:
            positions.append((position + rng.uniform(0, 200), len(entries) + position, entry))
    return [entry for _, _, entry in sorted(positions, key=lambda position: position[:2])]


def _check_linear_extension(log, ids):
    """Check that each logged entry follows all that it depends on, and that all ids were logged."""
    watermarks: dict[int, int] = {}
    logged: set[bytes] = set()
    for entry in log:
        assert watermarks.get(entry.origin, 0) == entry.previous
        for origin, counter in entry.clock:
            assert watermarks.get(origin, 0) >= counter
        for parent in entry.parents:
            if isinstance(parent, bytes):
                assert parent in logged
            else:
                assert watermarks.get(parent.origin, 0) >= parent.counter
        watermarks[entry.origin] = entry.last
        logged.update(entry.ids)
    assert logged == set(ids)
