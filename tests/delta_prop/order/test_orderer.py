"""The orderer's promises, one by one: order, release, refusal with what holds a delta, bounds."""

from __future__ import annotations

import random

import pytest

from delta_prop.order import Verdict
from delta_prop_wire.delta import Dot
from delta_prop_wire.errors import Refused
from delta_prop_wire.spec import ErrorCode

A, B, C, D = 1, 2, 3, 4
ID = bytes(range(16))


# --- order


def test_in_order_nothing_waits(new_chain, run_of):
    chain = new_chain()
    chain.offer(run_of(A, 1, 10), run_of(A, 11), run_of(B, 1), run_of(A, 12, 20))
    assert chain.dots() == [(A, 1), (A, 11), (B, 1), (A, 12)]
    assert chain.orderer.watermarks == {A: 20, B: 1}
    assert chain.is_empty()


def test_waits_for_its_own_predecessor(new_chain, run_of):
    chain = new_chain()
    chain.offer(run_of(A, 3), run_of(A, 2))
    assert chain.log == []
    chain.offer(run_of(A, 1))
    assert chain.dots() == [(A, 1), (A, 2), (A, 3)]
    assert chain.is_empty()


def test_waits_for_every_entry_of_its_clock(new_chain, run_of):
    chain = new_chain()
    chain.offer(run_of(A, 1, clock={B: 2, C: 1}), run_of(B, 1), run_of(C, 1))
    assert chain.dots() == [(B, 1), (C, 1)]
    chain.offer(run_of(B, 2))
    assert chain.dots()[-2:] == [(B, 2), (A, 1)]
    assert chain.is_empty()


def test_clock_entry_of_its_own_origin_asks_for_nothing(new_chain, run_of):
    chain = new_chain()
    chain.offer(run_of(A, 1, clock={A: 7}))
    assert chain.dots() == [(A, 1)]


def test_parents_by_dot_and_by_id(new_chain, run_of):
    chain = new_chain()
    chain.offer(run_of(A, 1, parents=(Dot(B, 1), ID)), run_of(B, 1))
    assert chain.dots() == [(B, 1)]
    chain.offer(run_of(C, 1, ids=(ID,)))
    assert chain.dots() == [(B, 1), (C, 1), (A, 1)]
    assert chain.is_empty()


def test_parents_within_the_run_itself_ask_for_nothing(new_chain, run_of):
    chain = new_chain()
    chain.offer(run_of(A, 1, 3, ids=(ID, b"x" * 16, b"y" * 16), parents=(ID, Dot(A, 2))))
    assert chain.dots() == [(A, 1)]


def test_the_same_cause_named_twice_counts_once(new_chain, run_of):
    chain = new_chain()
    chain.offer(run_of(A, 1, clock={B: 1}, parents=(Dot(B, 2), Dot(B, 1), ID, ID)))
    chain.offer(run_of(B, 1), run_of(B, 2), run_of(C, 1, ids=(ID,)))
    assert chain.dots()[-1] == (A, 1)
    assert chain.is_empty()


def test_released_together_in_order_of_arrival(new_chain, run_of):
    chain = new_chain()
    waiting = [run_of(origin, 1, clock={A: 1}) for origin in (D, B, C)]
    chain.offer(run_of(A, 2), *waiting, run_of(A, 1))
    assert chain.dots() == [(A, 1), (A, 2), (D, 1), (B, 1), (C, 1)]


def test_released_by_one_run_in_order_of_arrival_not_of_counters(new_chain, run_of):
    chain = new_chain()
    chain.offer(run_of(D, 1, clock={A: 3}), run_of(B, 1, clock={A: 1}), run_of(C, 1, parents=(ID,)))
    chain.offer(run_of(A, 1, 4, ids=(ID,)))
    assert chain.dots() == [(A, 1), (D, 1), (B, 1), (C, 1)]


def test_counters_that_leap_go_by_the_counter_before(new_chain, run_of):
    chain = new_chain()
    second = run_of(A, 40, 45, previous=17, count=3)
    chain.offer(second)
    assert chain.log == []
    chain.offer(run_of(A, 10, 17, previous=0, count=2))
    assert chain.dots() == [(A, 10), (A, 40)]
    assert chain.orderer.watermarks == {A: 45}
    assert chain.is_empty()


def test_starts_from_given_watermarks(new_chain, run_of):
    chain = new_chain(watermarks={A: 5, B: 2})
    chain.offer(run_of(A, 6, clock={B: 2}))
    assert chain.dots() == [(A, 6)]


def test_forgotten_watermark_is_zero(new_chain, run_of):
    chain = new_chain()
    chain.offer(run_of(-1, 1))
    chain.orderer.forget(-1)
    assert chain.orderer.watermarks == {}


# --- runs under other cuts


def test_parked_twice_is_told(new_chain, run_of):
    chain = new_chain()
    first = run_of(A, 2)
    chain.offer(first)
    assert chain.orderer.find_parked(run_of(A, 2)) is first
    assert chain.orderer.find_parked(run_of(A, 2, 9)) is first
    assert chain.orderer.find_parked(run_of(A, 3)) is None


def test_also_told_when_only_its_clock_is_missing(new_chain, run_of):
    chain = new_chain()
    first = run_of(A, 1, clock={B: 1})
    chain.offer(first)
    assert chain.orderer.find_parked(run_of(A, 1, clock={B: 1})) is first


@pytest.mark.parametrize("rows", [1, 5])
def test_overtaken_wholly_is_a_repeat(new_chain, run_of, rows):
    chain = new_chain()
    parked = run_of(A, 2, 2 if rows == 1 else 3, clock={B: 1}, parents=(ID,))
    chain.offer(parked)
    chain.offer(*(run_of(A, first, first + rows - 1) for first in range(1, 6, rows)))
    assert chain.repeats == [parked]
    assert parked.verdict is Verdict.DUPLICATE
    assert chain.is_empty()


@pytest.mark.parametrize("rows", [1, 4])
def test_overtaken_in_part_is_refused_with_the_watermark(new_chain, run_of, rows):
    chain = new_chain()
    parked, next_one = run_of(A, 3, 6), run_of(A, 7)
    chain.offer(parked, next_one)
    for first in range(1, 5, rows):
        chain.orderer.note_delivered(A, first + rows - 1)  # without asking whether the parked run could go
    chain.drain()
    error = chain.refused[parked]
    assert error.code is ErrorCode.OVERLAP
    assert error.details["watermark"] == 4
    chain.offer(run_of(A, 5, 6))
    assert chain.log[-1] is next_one
    assert chain.is_empty()


def test_overtaken_after_it_was_withdrawn_leaves_once(new_chain, run_of):
    chain = new_chain()
    given_up = run_of(A, 2, clock={B: 1})
    chain.offer(given_up, run_of(A, 5))
    for now in (1.0, 2.0):
        chain.orderer.withdraw(given_up, now)
    chain.offer(run_of(A, 1, 4))
    assert chain.repeats == [given_up]
    assert len(chain.log) == 2
    assert chain.is_empty()


def test_a_leap_from_below_the_watermark_is_refused(new_chain, run_of):
    chain = new_chain(watermarks={A: 5})
    entry = run_of(A, 10, previous=3, count=1)
    (answer,) = chain.orderer.park(entry, 0.0)
    assert answer.error.code is ErrorCode.OVERLAP
    assert chain.is_empty()


def test_another_cut_of_what_is_parked_is_named(new_chain, run_of):
    chain = new_chain()
    chain.offer(run_of(A, 2, 9))
    error = chain.orderer.overlap(run_of(A, 2, 4))
    assert error.code is ErrorCode.OVERLAP
    assert error.details == {"watermark": 0, "current": "2-9"}


@pytest.mark.parametrize("parents", [(Dot(A, 4),), (ID,), (Dot(A, 4), ID)])
def test_overtaken_run_that_names_what_overtakes_it_leaves_once(new_chain, run_of, parents):
    chain = new_chain()
    odd = run_of(A, 1, 2, parents=parents)
    chain.offer(odd)
    chain.offer(run_of(A, 1, 4, ids=(ID,)))
    assert chain.repeats == [odd]
    assert chain.is_empty()


# --- time


def test_timeout_names_what_is_missing_and_takes_along_what_stands_behind(new_chain, run_of):
    chain = new_chain(pending_timeout_s=30.0)
    root = run_of(A, 5, clock={B: 2})
    same_origin, by_clock, by_parent = (
        run_of(A, 6),
        run_of(C, 1, clock={A: 5}),
        run_of(D, 1, parents=(Dot(C, 1),)),
    )
    apart = run_of(9, 2)
    chain.offer(run_of(B, 1), root, now=0.0)
    chain.offer(same_origin, by_clock, by_parent, apart, now=20.0)
    assert chain.orderer.next_deadline() == 30.0
    chain.expire(29.9)
    assert chain.refused == {}
    chain.expire(30.0)
    assert list(chain.refused) == [root, same_origin, by_clock, by_parent]
    error = chain.refused[root]
    assert error.code is ErrorCode.DEP_TIMEOUT
    assert error.retry_after_ms is not None
    assert error.details["missing"] == [f"{A:016x}:1-4", f"{B:016x}:2"]
    assert error.details["blocked_by"] == f"{A:016x}:1"
    for entry in (same_origin, by_clock, by_parent):
        error = chain.refused[entry]
        assert error.code is ErrorCode.DEP_TIMEOUT
        assert error.details["blocked_by"] == f"{A:016x}:5"
    assert chain.refused[by_parent].details["missing"] == [f"{C:016x}:1"]
    assert chain.orderer.next_deadline() == 50.0
    chain.expire(50.0)
    assert chain.is_empty()


def test_unknown_id_is_told_with_the_age_of_ids(new_chain, run_of):
    chain = new_chain(ids_kept_since=lambda: "2026-11-14")
    entry = run_of(A, 1, parents=(ID,))
    chain.offer(entry)
    chain.expire(30.0)
    error = chain.refused[entry]
    assert "2026-11-14" in error.message
    assert error.details["missing"] == [ID.hex()]
    assert error.details["ids_kept_since"] == "2026-11-14"


def test_refused_dots_stay_open(new_chain, run_of):
    chain = new_chain()
    entries = [run_of(A, 2), run_of(A, 3), run_of(B, 1, clock={A: 3})]
    chain.offer(*entries)
    chain.expire(30.0)
    assert set(chain.refused) == set(entries)
    assert chain.orderer.watermarks == {}
    chain.offer(*reversed(entries), now=31.0)
    chain.offer(run_of(A, 1), now=32.0)
    assert chain.dots() == [(A, 1), (A, 2), (A, 3), (B, 1)]
    assert chain.refused == {}
    assert chain.is_empty()


def test_causes_in_a_circle_end_by_time(new_chain, run_of):
    chain = new_chain()
    entries = [run_of(A, 1, clock={B: 1}), run_of(B, 1, clock={A: 1}), run_of(C, 1, parents=(Dot(C, 9),))]
    chain.offer(*entries)
    chain.expire(30.0)
    assert set(chain.refused) == set(entries)
    assert chain.is_empty()


# --- room


def test_newest_is_refused_when_full_with_facts_and_what_stands_behind_it(new_chain, run_of):
    chain = new_chain(pending_deltas_max=10, owner_share=1.0, reserve_share=0.0)
    held = [run_of(A, counter) for counter in range(2, 9)]
    behind = run_of(B, 5, clock={C: 4})
    chain.offer(*held, behind)
    newest = run_of(C, 2, 4)
    chain.offer(newest)
    error = chain.refused[newest]
    assert error.code is ErrorCode.PENDING_FULL
    assert error.retryable
    assert error.retry_after_ms is not None
    assert error.details["depth"] == 8
    assert error.details["capacity"] == 10
    assert error.details["missing"] == [f"{C:016x}:1"]
    assert chain.refused[behind].code is ErrorCode.PENDING_FULL
    assert chain.refused[behind].details["blocked_by"] == f"{C:016x}:2"
    assert chain.orderer.statistics().pending_deltas == 7


def test_bytes_are_bounded_too(new_chain, run_of):
    chain = new_chain(pending_bytes_max=1_000, owner_share=1.0, reserve_share=0.0)
    chain.offer(run_of(A, 2, size=900))
    entry = run_of(B, 2, size=101)
    chain.offer(entry)
    assert chain.refused[entry].details["depth"] == 900
    assert "bytes" in chain.refused[entry].message


def test_room_is_kept_for_what_something_waits_for(new_chain, run_of):
    chain = new_chain(pending_deltas_max=20, owner_share=1.0, reserve_share=0.1)
    held = [run_of(A, counter) for counter in range(20, 2, -1)]
    chain.offer(*held)
    assert chain.orderer.statistics().pending_deltas == 18
    unwanted, wanted = run_of(B, 2), run_of(A, 2, clock={C: 1})
    chain.offer(unwanted, wanted)
    assert list(chain.refused) == [unwanted]
    assert chain.orderer.statistics().pending_deltas == 19
    chain.offer(run_of(A, 1), run_of(C, 1))
    assert len(chain.log) == 21
    assert chain.is_empty()


def test_room_is_kept_for_a_parent_by_id_and_for_what_comes_before_a_parent(new_chain, run_of):
    chain = new_chain(pending_deltas_max=20, owner_share=1.0, reserve_share=0.2)
    chain.offer(run_of(A, 1, parents=(ID,)), run_of(B, 1, clock={C: 7}), run_of(A, 2, 15))
    by_id, before = run_of(D, 2, ids=(ID,)), run_of(C, 3)
    chain.offer(by_id, before)
    assert chain.refused == {}
    assert chain.orderer.statistics().pending_deltas == 18


def test_room_is_kept_for_exactly_what_is_waited_for(new_chain, run_of):
    chain = new_chain(pending_deltas_max=20, owner_share=1.0, reserve_share=0.2)
    gone, child = run_of(C, 9, clock={B: 9}), run_of(A, 1, clock={B: 2})
    chain.offer(gone, child, run_of(D, 2, 15))
    chain.orderer.take_origin(C)
    chain.offer(run_of(9, 2))
    after, parent = run_of(B, 3, 4), run_of(B, 2)
    chain.offer(after)
    assert chain.refused[after].details["capacity"] == 16  # what waited for it has gone
    chain.offer(parent)
    assert list(chain.refused) == [after]
    assert chain.orderer.statistics().pending_deltas == 17


def test_one_owner_may_fill_a_quarter(new_chain, run_of):
    chain = new_chain(pending_deltas_max=40)
    greedy = [run_of(origin, 2, owner="one connection") for origin in range(1, 12)]
    chain.offer(*greedy)
    assert list(chain.refused) == greedy[10:]
    assert chain.refused[greedy[10]].details["capacity"] == 10
    modest = run_of(50, 2, owner="another")
    chain.offer(modest)
    assert modest not in chain.refused


def test_one_owner_may_fill_a_quarter_of_the_bytes(new_chain, run_of):
    chain = new_chain(pending_bytes_max=4_000)
    fits, too_much = run_of(A, 2, size=1_000), run_of(A, 3, size=1)
    chain.offer(fits, too_much)
    assert list(chain.refused) == [too_much]


# --- a delta that cannot be appended, or is given up


def test_failed_append_refuses_what_stands_behind(new_chain, run_of):
    chain = new_chain()
    failing, behind, apart = run_of(A, 2), run_of(B, 1, clock={A: 2}), run_of(C, 1, clock={A: 1})
    chain.broken[A, 2] = Refused(ErrorCode.LOG_FULL, "full", retry_after_ms=70)
    chain.offer(failing, behind, apart, run_of(A, 1))
    assert list(chain.refused) == [failing, behind]
    assert chain.refused[behind].code is ErrorCode.LOG_FULL
    assert chain.refused[behind].retry_after_ms == 70
    assert chain.dots() == [(A, 1), (C, 1)]
    chain.broken.clear()
    chain.offer(behind, failing)
    assert chain.dots()[2:] == [(A, 2), (B, 1)]


def test_what_stands_behind_a_refusal_for_good_may_be_sent_again(new_chain, run_of):
    chain = new_chain()
    behind = run_of(B, 1, clock={A: 1})
    chain.broken[A, 1] = Refused(ErrorCode.FENCED, "another holds the name")
    chain.offer(behind, run_of(A, 1))
    assert chain.refused[behind].code is ErrorCode.DEP_TIMEOUT


def test_withdrawn_keeps_its_place_and_its_clock_but_not_its_parents(new_chain, run_of):
    chain = new_chain()
    given_up = run_of(A, 2, clock={B: 1}, parents=(ID, Dot(C, 5)))
    after = run_of(A, 3)
    chain.offer(given_up, after)
    assert chain.orderer.withdraw(given_up, 1.0)
    chain.offer(run_of(A, 1))
    assert chain.dots() == [(A, 1)]
    chain.offer(run_of(B, 1))
    assert chain.dots() == [(A, 1), (B, 1), (A, 2), (A, 3)]
    assert given_up.is_withdrawn
    assert not after.is_withdrawn
    assert chain.is_empty()
    assert not chain.orderer.withdraw(given_up, 2.0)


def test_withdrawn_that_waits_for_parents_alone_goes_at_once(new_chain, run_of):
    chain = new_chain()
    given_up, after = run_of(-1, 1, parents=(ID,)), run_of(A, 1, parents=(Dot(-1, 1),))
    chain.offer(given_up, after)
    assert "no dot yet" in str(chain.orderer.missing(after))
    chain.orderer.withdraw(given_up, 1.0)
    chain.drain()
    assert chain.log == [given_up, after]
    assert given_up.is_withdrawn
    assert chain.is_empty()


def test_origin_taken_out_leaves_what_waits_for_it(new_chain, run_of):
    chain = new_chain()
    fenced, other = [run_of(A, 3), run_of(A, 2, clock={B: 1})], run_of(C, 1, clock={A: 2})
    chain.offer(*fenced, other)
    assert chain.orderer.take_origin(A) == fenced[::-1]
    assert chain.orderer.take_origin(77) == []
    chain.offer(run_of(A, 1, 2))
    assert chain.log[-1] is other
    assert chain.is_empty()


def test_drained_in_order_of_arrival(new_chain, run_of):
    chain = new_chain()
    entries = [run_of(A, 3), run_of(B, 1, parents=(ID,)), run_of(A, 2)]
    chain.offer(*entries)
    assert chain.orderer.drain() == entries
    assert chain.is_empty()


def test_parking_what_is_next_is_a_mistake(new_chain, run_of):
    with pytest.raises(AssertionError, match="nothing would release"):
        new_chain().orderer.park(run_of(A, 1), 0.0)


# --- full, with the cause coming last


def test_full_then_the_missing_parent_comes_last(new_chain, run_of):
    chain = new_chain(pending_deltas_max=100, owner_share=1.0)
    missing = run_of(A, 1)
    waiting = [run_of(A, counter) for counter in range(2, 301)]
    random.Random(1).shuffle(waiting)
    chain.offer(*waiting)
    refused = list(chain.refused)
    assert refused
    assert chain.orderer.statistics().pending_deltas <= 100
    chain.offer(missing)
    _send_again_until_done(chain)
    assert [counter for _, counter in chain.dots()] == list(range(1, 301))
    assert chain.is_empty()


def test_full_with_dependents_of_three_other_producers(new_chain, run_of):
    chain = new_chain(pending_deltas_max=100, owner_share=0.25)
    parent = run_of(A, 1)
    dependents = [
        run_of(origin, counter, clock={A: 1} if counter == 1 else {other: counter - 1})
        for counter in range(1, 101)
        for origin, other in ((B, C), (C, D), (D, B))
    ]
    random.Random(2).shuffle(dependents)
    chain.offer(*dependents)
    now = chain.orderer.statistics()
    assert now.pending_deltas <= 75  # three owners, a quarter each
    assert now.pending_runs + len(chain.refused) == 300
    assert all(error.details["blocked_by"] for error in chain.refused.values())
    chain.offer(parent)
    _send_again_until_done(chain)
    assert len(chain.log) == 301
    assert chain.is_empty()


def test_full_with_a_parent_that_never_comes(new_chain, run_of):
    chain = new_chain(pending_deltas_max=100, owner_share=0.25)
    dependents = [run_of(origin, counter, clock={A: 1}) for counter in range(1, 101) for origin in (B, C, D)]
    random.Random(3).shuffle(dependents)
    for at, entry in enumerate(dependents):
        chain.offer(entry, now=at * 0.01)
    free = [run_of(9, counter) for counter in range(1, 50)]
    chain.offer(*free, now=4.0)
    assert chain.log == free  # nobody else is kept from working
    chain.expire(40.0)
    assert set(chain.refused) == set(dependents)  # every one has an answer
    assert all(error.retryable for error in chain.refused.values())
    assert chain.is_empty()
    chain.offer(run_of(A, 1), now=41.0)
    _send_again_until_done(chain)
    assert len(chain.log) == 350


def _send_again_until_done(chain):
    """As producers do: what was refused is sent again, each origin's in order."""
    for _ in range(1_000):
        again = sorted(chain.refused, key=lambda entry: (entry.first, entry.origin))
        if not again:
            return
        chain.offer(*again)
    pytest.fail(f"{len(chain.refused)} deltas are refused for ever")


# --- random graphs


@pytest.mark.parametrize("seed", range(20))
def test_random_graphs_come_out_as_a_linear_extension(new_chain, run_of, seed):
    draw = random.Random(seed)
    entries, ids = _random_graph(draw, run_of, rows=400)
    chain = new_chain(owner_share=1.0)
    chain.offer(*_as_arriving(draw, entries))
    assert chain.refused == {}
    assert sorted(chain.dots()) == sorted((entry.origin, entry.first) for entry in entries)
    _check_linear_extension(chain.log, ids)
    assert chain.is_empty()


@pytest.mark.parametrize("seed", range(10))
def test_random_graphs_through_a_narrow_room(new_chain, run_of, seed):
    draw = random.Random(seed)
    entries, ids = _random_graph(draw, run_of, rows=300)
    chain = new_chain(pending_deltas_max=12, owner_share=0.5)
    chain.offer(*_as_arriving(draw, entries))
    assert chain.orderer.statistics().refused_full > 0
    _send_again_until_done(chain)
    assert len(chain.log) == len(entries)
    _check_linear_extension(chain.log, ids)
    assert chain.is_empty()


def _random_graph(draw, run_of, *, rows):
    """Runs of four origins; each has seen some of what was made before it, and may name parents."""
    made: list = []
    last, seen, ids = dict.fromkeys((A, B, C, D), 0), {o: {} for o in (A, B, C, D)}, {}
    while len(made) < rows:
        origin = draw.choice((A, B, C, D))
        count = draw.choice((1, 1, 1, 3))
        clock = {}
        for other in last:
            if other != origin and draw.random() < 0.3 and last[other] > seen[origin].get(other, 0):
                clock[other] = seen[origin][other] = draw.randint(seen[origin].get(other, 0) + 1, last[other])
        parents = ()
        if made and draw.random() < 0.2:
            parent = draw.choice(made)
            parents = (parent.ids[0] if parent.ids else parent.dot,)
        own_ids = (draw.randbytes(16),) * (draw.random() < 0.2)
        run = run_of(
            origin, last[origin] + 1, last[origin] + count, clock=clock, parents=parents, ids=own_ids
        )
        last[origin] += count
        ids.update(dict.fromkeys(own_ids, run))
        made.append(run)
    return made, ids


def _as_arriving(draw, entries):
    """30 % reordered by up to 100 places, 5 % repeated, 1 % late to the very end."""
    places = []
    for at, entry in enumerate(entries):
        late = len(entries) if draw.random() < 0.01 else 0
        moved = draw.uniform(0, 100) if draw.random() < 0.3 else 0
        places.append((at + moved + late, at, entry))
        if draw.random() < 0.05:
            places.append((at + draw.uniform(0, 200), len(entries) + at, entry))
    return [entry for _, _, entry in sorted(places, key=lambda place: place[:2])]


def _check_linear_extension(log, ids):
    have: dict[int, int] = {}
    logged: set[bytes] = set()
    for entry in log:
        assert have.get(entry.origin, 0) == entry.previous
        for origin, counter in entry.clock:
            assert have.get(origin, 0) >= counter
        for parent in entry.parents:
            if isinstance(parent, bytes):
                assert parent in logged
            else:
                assert have.get(parent.origin, 0) >= parent.counter
        have[entry.origin] = entry.last
        logged.update(entry.ids)
    assert logged == set(ids)
