"""What order costs, in processor time: linear in a reversed chain, and no recursion."""

from __future__ import annotations

import gc
import random
import sys
import time

import pytest

from delta_prop.order import Entry, Orderer


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
        order.delivered(1, entry.last)
        through += 1
        while (released := order.next_ready()) is not None:
            order.delivered(1, released.last)
            through += 1
    return through


def processor_s(counters, rounds=3):
    """The least processor time in which these counters of one origin go through, each parked or not."""
    times = []
    for _ in range(rounds):
        entries, order = list(map(single, counters)), orderer(len(counters))
        gc.collect()
        gc.disable()
        try:
            began = time.process_time()
            through = go_through(entries, order)
            times.append(time.process_time() - began)
        finally:
            gc.enable()
        assert through == len(counters)
        assert order.statistics().index_length == 0
    return min(times)


def calls(count):
    """How many functions are called for one delta of a reversed chain of so many."""
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


def memory_s(count, rounds=5):
    """The least processor time of a reversed chain in bare dicts: what memory of this extent costs here."""
    times = []
    for _ in range(rounds):
        entries, held, waiting, through = list(map(single, range(count, 0, -1))), {}, {}, 0
        gc.collect()
        gc.disable()
        try:
            began = time.process_time()
            for entry in entries:
                held[entry.first] = entry
                waiting[entry.previous] = (-entry.previous, entry.first)
            while (place := waiting.pop(through, None)) is not None:
                entry = held.pop(place[1])
                through = entry.last
            times.append(time.process_time() - began)
        finally:
            gc.enable()
        assert through == count
    return min(times)


def test_reversed_chain_takes_linear_work():
    assert calls(20_000) <= 1.01 * calls(2_000)


@pytest.mark.alone
def test_reversed_chain_takes_linear_time():
    """Ten times the deltas take twelve times as long, where ten times the memory costs ten times as much."""
    for _ in range(3):  # the machine may be busy with something else
        short, long = (processor_s(range(count, 0, -1), rounds=5) for count in (10_000, 100_000))
        memory = max(1.0, memory_s(100_000) / memory_s(10_000) / 10)
        print(f"10,000 {short:.3f} s, 100,000 {long:.3f} s, {long / short:.1f} times, memory x {memory:.2f}")
        if long / short <= 12 * memory:
            return
    pytest.fail(f"three times above 12: {long / short:.1f}, where memory grows by {memory:.2f}")


def test_reversed_chain_needs_no_recursion():
    limit = sys.getrecursionlimit()
    depth = len(__import__("inspect").stack())
    sys.setrecursionlimit(depth + 60)
    try:
        assert processor_s(range(5_000, 0, -1), rounds=1) > 0
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
    in_order, mixed = processor_s(range(1, 20_001)) / 20_000, processor_s(shuffled) / 20_000
    print(f"in order {in_order * 1e6:.2f} µs a delta, fully shuffled in 1,000 {mixed * 1e6:.2f} µs")
    assert in_order < 5e-6  # ten times what it takes: only a change of its order of magnitude fails
    assert mixed < 25e-6
