"""The orderer's processor time: linear in a reversed chain, and without recursion."""

from __future__ import annotations

import gc
import random
import sys
import time
from statistics import median

import pytest

from delta_prop.order import Entry, Orderer

ROUNDS_MIN, ROUNDS_MAX = 5, 25


def orderer(deltas_max):
    return Orderer(
        knows_id=lambda _: False,
        pending_deltas_max=deltas_max,
        pending_bytes_max=1 << 40,
        owner_share=1.0,
        reserve_share=0.0,
    )


def single(counter):
    return Entry(1, counter, counter, counter - 1, 1, 100, "producer", None)


def go_through(entries, order):
    """Give these entries to the orderer, and take what it releases; how many went through."""
    through = 0
    for entry in entries:
        if not order.check(entry):
            assert not order.park(entry, 0.0)
            continue
        order.note_delivered(1, entry.last)
        through += 1
        while (released := order.next_ready()) is not None:
            order.note_delivered(1, released.last)
            through += 1
    return through


def processor_s(counters):
    """The processor time in which these counters of one origin go through, each parked or not."""
    entries, order = list(map(single, counters)), orderer(len(counters))
    seconds, through = timed(lambda: go_through(entries, order))
    assert through == len(counters)
    assert order.statistics().index_length == 0
    return seconds


def timed(work):
    """The processor time of some work without collections of garbage, and what it gives."""
    gc.collect()
    gc.disable()
    try:
        began = time.process_time()
        result = work()
        return time.process_time() - began, result
    finally:
        gc.enable()


def calls(count):
    """Return the function calls per delta for a reversed chain of `count` deltas."""
    entries, order, called = list(map(single, range(count, 0, -1))), orderer(count), 0

    def note(_frame, event, _arg):
        nonlocal called
        called += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        go_through(entries, order)
    finally:
        sys.setprofile(None)
    return called / count


def memory_s(count):
    """The processor time of a reversed chain in bare dicts: what memory of this extent costs here."""
    entries = list(map(single, range(count, 0, -1)))

    def chain():
        held, waiting, through = {}, {}, 0
        for entry in entries:
            held[entry.first] = entry
            waiting[entry.previous] = (-entry.previous, entry.first)
        while (place := waiting.pop(through, None)) is not None:
            entry = held.pop(place[1])
            through = entry.last
        return through

    seconds, through = timed(chain)
    assert through == count
    return seconds


def test_reversed_chain_takes_linear_work():
    assert calls(20_000) <= 1.01 * calls(2_000)


@pytest.mark.alone
def test_reversed_chain_takes_linear_time():
    """Ten times the deltas take twelve times as long, where ten times the memory costs ten times as much."""
    rounds = []
    while len(rounds) < ROUNDS_MIN or (median(rounds) > 12 and len(rounds) < ROUNDS_MAX):
        grown, memory = (work(100_000) / work(10_000) for work in (reversed_s, memory_s))
        rounds.append(grown / max(1.0, memory / 10))
    print(f"of {len(rounds)} rounds {median(rounds):.1f} times, {min(rounds):.1f} to {max(rounds):.1f}")
    assert median(rounds) <= 12


def reversed_s(count):
    return processor_s(range(count, 0, -1))


def test_reversed_chain_needs_no_recursion():
    limit = sys.getrecursionlimit()
    depth = len(__import__("inspect").stack())
    sys.setrecursionlimit(depth + 60)
    try:
        assert processor_s(range(5_000, 0, -1)) > 0
        order = orderer(10_000)
        for counter in range(5_000, 1, -1):
            order.park(single(counter), 0.0)
        assert len(order.expire(1_000.0)) == 4_999
    finally:
        sys.setrecursionlimit(limit)


@pytest.mark.alone
def test_cost_of_one_delta():
    draw, shuffled = random.Random(1), []
    for start in range(1, 20_001, 1_000):
        block = list(range(start, start + 1_000))
        draw.shuffle(block)
        shuffled += block
    in_order, mixed = (
        min(processor_s(counters) for _ in range(3)) / 20_000 for counters in (range(1, 20_001), shuffled)
    )
    print(f"in order {in_order * 1e6:.2f} µs a delta, fully shuffled in 1,000 {mixed * 1e6:.2f} µs")
    assert in_order < 5e-6  # ten times what it takes: only a change of its order of magnitude fails
    assert mixed < 25e-6
