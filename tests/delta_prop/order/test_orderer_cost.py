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


def processor_s(counters, rounds=3):
    """The least processor time in which these counters of one origin go through, each parked or not."""
    times = []
    for _ in range(rounds):
        entries, order, through = list(map(single, counters)), orderer(len(counters)), 0
        gc.collect()
        gc.disable()
        try:
            began = time.process_time()
            for entry in entries:
                if not order.check(entry):
                    assert not order.park(entry, 0.0)
                    continue
                order.delivered(1, entry.last)
                through += 1
                while (released := order.next_ready()) is not None:
                    order.delivered(1, released.last)
                    through += 1
            times.append(time.process_time() - began)
        finally:
            gc.enable()
        assert through == len(counters)
        assert order.statistics().index_length == 0
    return min(times)


def test_reversed_chain_takes_linear_time():
    for _ in range(3):  # the machine may be busy with something else
        short = processor_s(range(10_000, 0, -1), rounds=5)
        long = processor_s(range(100_000, 0, -1), rounds=2)
        print(f"reversed chain: 10,000 {short:.3f} s, 100,000 {long:.3f} s, {long / short:.1f} times")
        if long / short <= 12:
            return
    pytest.fail(f"three times above 12: {long / short:.1f}")


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
