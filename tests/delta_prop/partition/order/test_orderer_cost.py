"""The orderer's processor time: linear in a reversed chain, and without recursion."""

from __future__ import annotations

import gc
import random
import sys
import time
from statistics import median

import pytest

from delta_prop.partition.ingest.seen_ids import SeenIds
from delta_prop.partition.order.orderer import Entry, Orderer

ROUNDS_MIN, ROUNDS_MAX = 5, 25


def new_orderer(deltas_max):
    return Orderer(
        SeenIds(),
        pending_deltas_max=deltas_max,
        pending_bytes_max=1 << 40,
        owner_share=1.0,
        reserve_share=0.0,
    )


def entry_at(counter):
    return Entry(1, counter, counter, counter - 1, 1, 100, "producer", None)


def feed_entries(entries, orderer):
    """Offer entries to the orderer and drain it; return how many were delivered."""
    delivered = 0
    for entry in entries:
        if not orderer.check(entry):
            assert not orderer.hold_pending(entry, 0.0)
            continue
        orderer.note_delivered(1, entry.last)
        delivered += 1
        while (released := orderer.next_ready()) is not None:
            orderer.note_delivered(1, released.last)
            delivered += 1
    return delivered


def cpu_s(counters):
    """Return the processor time to deliver these counters of one origin."""
    entries, orderer = list(map(entry_at, counters)), new_orderer(len(counters))
    seconds, delivered = measure_cpu_s(lambda: feed_entries(entries, orderer))
    assert delivered == len(counters)
    assert orderer.statistics().index_length == 0
    return seconds


def measure_cpu_s(work):
    """Return the processor time of a call without garbage collection, and its result."""
    gc.collect()
    gc.disable()
    try:
        start_s = time.process_time()
        result = work()
        return time.process_time() - start_s, result
    finally:
        gc.enable()


def calls_per_delta(count):
    """Return the function calls per delta for a reversed chain of `count` deltas."""
    entries, orderer, call_count = list(map(entry_at, range(count, 0, -1))), new_orderer(count), 0

    def note(_frame, event, _arg):
        nonlocal call_count
        call_count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        feed_entries(entries, orderer)
    finally:
        sys.setprofile(None)
    return call_count / count


def dict_chain_cpu_s(count):
    """Return the processor time of a reversed chain in two dicts: the cost of memory access alone."""
    entries = list(map(entry_at, range(count, 0, -1)))

    def chain():
        pending, waiting, last = {}, {}, 0
        for entry in entries:
            pending[entry.first] = entry
            waiting[entry.previous] = (-entry.previous, entry.first)
        while (waiter := waiting.pop(last, None)) is not None:
            entry = pending.pop(waiter[1])
            last = entry.last
        return last

    seconds, last = measure_cpu_s(chain)
    assert last == count
    return seconds


def test_reversed_chain_call_count_is_linear():
    assert calls_per_delta(20_000) <= 1.01 * calls_per_delta(2_000)


@pytest.mark.alone
def test_reversed_chain_cpu_time_is_linear():
    """Ten times the deltas take up to twelve times as long, corrected for the cost of memory."""
    rounds = []
    while len(rounds) < ROUNDS_MIN or (median(rounds) > 12 and len(rounds) < ROUNDS_MAX):
        growth, dict_growth = (
            work(30_000) / work(3_000) for work in (reversed_chain_cpu_s, dict_chain_cpu_s)
        )
        rounds.append(growth / max(1.0, dict_growth / 10))
    print(
        f"growth, {len(rounds)} rounds: median {median(rounds):.1f}, {min(rounds):.1f} to {max(rounds):.1f}"
    )
    assert median(rounds) <= 12


def reversed_chain_cpu_s(count):
    return cpu_s(range(count, 0, -1))


def test_reversed_chain_needs_no_recursion():
    limit = sys.getrecursionlimit()
    depth = len(__import__("inspect").stack())
    sys.setrecursionlimit(depth + 60)
    try:
        assert cpu_s(range(5_000, 0, -1)) > 0
        orderer = new_orderer(10_000)
        for counter in range(5_000, 1, -1):
            orderer.hold_pending(entry_at(counter), 0.0)
        assert len(orderer.expire(1_000.0)) == 4_999
    finally:
        sys.setrecursionlimit(limit)


@pytest.mark.alone
def test_cpu_time_per_delta_in_order_and_shuffled():
    rng, shuffled = random.Random(1), []
    for start in range(1, 20_001, 1_000):
        block = list(range(start, start + 1_000))
        rng.shuffle(block)
        shuffled += block
    in_order_s, shuffled_s = (
        min(cpu_s(counters) for _ in range(3)) / 20_000 for counters in (range(1, 20_001), shuffled)
    )
    print(
        f"in order {in_order_s * 1e6:.2f} µs per delta, shuffled within each 1,000 {shuffled_s * 1e6:.2f} µs"
    )
    assert in_order_s < 5e-6  # ten times the usual cost: only a change of magnitude fails
    assert shuffled_s < 25e-6
