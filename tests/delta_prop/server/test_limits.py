"""Token buckets stay within rate and burst and report the exact wait; open connections are counted."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delta_prop.server.limits import BucketCache, ConnectionLimiter, RateLimiter, TokenBucket, address_of
from delta_prop.server.permissions import Permissions
from delta_prop_wire.delta import Delta, create
from delta_prop_wire.encode import encode_batch
from delta_prop_wire.errors import Refused
from delta_prop_wire.spec import ErrorCode

STEPS = st.lists(st.tuples(st.floats(0, 3), st.integers(1, 300)), min_size=1, max_size=40)


@given(st.floats(0.1, 1000), st.integers(1, 200), STEPS)
def test_bucket_never_exceeds_rate_and_burst_or_one_batch(
    rate: float, burst: int, steps: list[tuple[float, int]]
) -> None:
    bucket, now = TokenBucket(rate, burst, 0.0), 0.0
    taken: list[tuple[float, int]] = []
    for pause, count in steps:
        now += pause
        if bucket.wait_s(count, now) == 0:
            bucket.take(count, now)
            taken.append((now, count))
    for first in range(len(taken)):
        total = 0
        for end_s, count in taken[first:]:
            total += count
            largest = max(burst, *(size for time_s, size in taken[first:] if time_s <= end_s))
            assert total <= rate * (end_s - taken[first][0]) + largest + 0.01


@given(st.floats(0.1, 1000), st.integers(1, 200), st.lists(st.integers(1, 300), min_size=1, max_size=10))
def test_batch_passes_after_the_reported_wait(rate: float, burst: int, counts: list[int]) -> None:
    bucket, now = TokenBucket(rate, burst, 0.0), 0.0
    for count in counts:
        now += bucket.wait_s(count, now)
        assert bucket.wait_s(count, now) == 0
        bucket.take(count, now)


def test_clock_that_steps_back_fills_nothing() -> None:
    bucket = TokenBucket(10.0, 5, now=100.0)
    bucket.take(5, 100.0)
    assert bucket.wait_s(5, 99.0) == bucket.wait_s(5, 100.0) == pytest.approx(0.5)
    assert bucket.wait_s(5, 100.5) == 0


def test_batch_above_the_burst_needs_a_full_bucket() -> None:
    bucket = TokenBucket(100.0, 10, now=0.0)
    assert bucket.wait_s(500, 0.0) == 0
    bucket.take(500, 0.0)
    assert bucket.wait_s(1, 0.0) == pytest.approx(4.91)
    assert bucket.wait_s(500, 4.95) == pytest.approx(0.05)
    assert bucket.wait_s(500, 5.0) == 0


def test_least_recently_used_bucket_is_evicted() -> None:
    buckets = BucketCache(2)
    first = buckets.get("a", 1.0, 1, 0.0)
    buckets.get("b", 1.0, 1, 0.0)
    assert buckets.get("a", 1.0, 1, 0.0) is first
    buckets.get("c", 1.0, 1, 0.0)
    assert len(buckets) == 2
    assert buckets.get("a", 1.0, 1, 0.0) is first
    assert buckets.get("a", 2.0, 1, 0.0) is not first


# --- rates


def refusal_of(
    rates: RateLimiter, permissions: Permissions, keys: list[str], now: float = 0.0
) -> Refused | None:
    batch = encode_batch([Delta(key, create([1.0]), "docs") for key in keys], origin=16, base=1)
    try:
        rates.take(permissions, batch, now)
    except Refused as refusal:
        return refusal
    return None


def test_token_rate_limits_all_its_batches_with_retry_after() -> None:
    rates, permissions, other = (
        RateLimiter(),
        Permissions("a", rate=1000.0, burst=100),
        Permissions("b", rate=1000.0, burst=100),
    )
    assert refusal_of(rates, permissions, ["x"] * 60) is None
    refusal = refusal_of(rates, permissions, ["x"] * 60)
    assert refusal is not None
    assert refusal.code is ErrorCode.RATE_LIMITED
    assert refusal.retry_after_ms == 20
    assert "'a' may send 1000 deltas/s, 100 at once" in refusal.message
    assert refusal_of(rates, permissions, ["x"] * 40) is None, "a refusal should take no tokens"
    assert refusal_of(rates, other, ["x"] * 100) is None
    assert refusal_of(rates, permissions, ["x"] * 20, now=0.02) is None


def test_infinite_rate_refuses_nothing() -> None:
    rates, permissions = RateLimiter(), Permissions("anonymous", rate=inf)
    assert all(refusal_of(rates, permissions, ["x"] * 1000) is None for _ in range(10))


def test_vector_rate_is_shared_or_set_by_the_token() -> None:
    rates = RateLimiter(vector_rate=2.0)
    first, second, own = Permissions("a"), Permissions("b"), Permissions("c", vector_rate=1.0)
    assert refusal_of(rates, first, ["x", "y"]) is None
    assert refusal_of(rates, second, ["x", "y"]) is None
    refusal = refusal_of(rates, first, ["z", "z", "x"])
    assert refusal is not None
    assert refusal.retry_after_ms == 500
    assert refusal.row == 2
    assert "vector 'x' of namespace 'docs' may change 2 times/s" in refusal.message
    assert refusal_of(rates, first, ["z", "z"]) is None, "a refusal should take no tokens of any vector"
    assert refusal_of(rates, own, ["x"]) is None
    assert refusal_of(rates, own, ["x"]) is not None
    assert refusal_of(rates, first, ["x"], now=0.5) is None
    free = Permissions("d", vector_rate=0.0)
    assert all(refusal_of(rates, free, ["x"] * 9) is None for _ in range(3))


def test_token_is_not_charged_for_a_vector_refusal() -> None:
    rates, permissions = RateLimiter(vector_rate=1.0), Permissions("a", rate=10.0, burst=3)
    assert refusal_of(rates, permissions, ["x"]) is None
    assert refusal_of(rates, permissions, ["x"]) is not None
    assert refusal_of(rates, permissions, ["y", "z"]) is None
    assert refusal_of(rates, permissions, ["q"]) is not None


def test_single_delta_counts_as_one() -> None:
    rates, permissions, delta = (
        RateLimiter(vector_rate=1.0),
        Permissions("a", rate=10.0, burst=2),
        Delta("x", create([1.0])),
    )
    rates.take_delta(permissions, delta, 0.0)
    with pytest.raises(Refused, match="vector 'x' of namespace 'default'"):
        rates.take_delta(permissions, delta, 0.0)
    rates.take_delta(permissions, Delta("y", create([1.0])), 0.0)
    with pytest.raises(Refused, match="token 'a' may send"):
        rates.take_delta(permissions, Delta("z", create([1.0])), 0.0)


def test_retry_after_is_at_most_an_hour() -> None:
    rates, permissions = RateLimiter(), Permissions("a", rate=0.001, burst=1)
    assert refusal_of(rates, permissions, ["x"] * 100) is None
    refusal = refusal_of(rates, permissions, ["x"])
    assert refusal is not None
    assert refusal.retry_after_ms == 3_600_000


# --- connections


@given(st.lists(st.tuples(st.booleans(), st.sampled_from(["10.0.0.1", "10.0.0.2", "10.0.0.3"])), max_size=60))
def test_connection_limiter_matches_a_list(steps: list[tuple[bool, str]]) -> None:
    connections, open_hosts = ConnectionLimiter(5, 2), list[str]()
    for is_entry, host in steps:
        if is_entry:
            fits = len(open_hosts) < 5 and open_hosts.count(host) < 2
            if fits:
                connections.enter(host)
                open_hosts.append(host)
            else:
                with pytest.raises(Refused) as caught:
                    connections.enter(host)
                assert caught.value.code is ErrorCode.RATE_LIMITED
                assert caught.value.retry_after_ms == 1000
        elif host in open_hosts:
            connections.leave(host)
            open_hosts.remove(host)
        assert connections.open_count == len(open_hosts)
        assert len(connections._by_host) == len(set(open_hosts)), "a closed connection should leave no entry"


def test_refused_connections_are_counted_and_name_the_bound() -> None:
    connections = ConnectionLimiter(2, 1)
    connections.enter("10.0.0.1")
    with pytest.raises(Refused, match=r"1 connections from 10\.0\.0\.1 are open; the maximum is 1"):
        connections.enter("::ffff:10.0.0.1")
    connections.enter("10.0.0.2")
    with pytest.raises(Refused, match="2 connections are open; the maximum is 2"):
        connections.enter("10.0.0.3")
    assert (connections.open_count, connections.refused_count) == (2, 2)


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("::ffff:127.0.0.1", "127.0.0.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("somewhere", "somewhere"),
    ],
)
def test_address_of_normalizes_hosts(host: str, address: str) -> None:
    assert address_of(host) == address
