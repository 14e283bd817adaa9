"""Bounds: buckets let no more go than they say, and let go again; connections are counted exactly."""

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
def test_over_any_time_no_more_goes_than_rate_and_burst_or_one_batch(
    rate: float, burst: int, steps: list[tuple[float, int]]
) -> None:
    bucket, now = TokenBucket(rate, burst, 0.0), 0.0
    gone: list[tuple[float, int]] = []
    for pause, count in steps:
        now += pause
        if bucket.wait_s(count, now) == 0:
            bucket.take(count, now)
            gone.append((now, count))
    for first in range(len(gone)):
        total = 0
        for at, count in gone[first:]:
            total += count
            most = max(burst, *(one for when, one in gone[first:] if when <= at))
            assert total <= rate * (at - gone[first][0]) + most + 0.01


@given(st.floats(0.1, 1000), st.integers(1, 200), st.lists(st.integers(1, 300), min_size=1, max_size=10))
def test_who_waits_as_long_as_told_goes(rate: float, burst: int, counts: list[int]) -> None:
    bucket, now = TokenBucket(rate, burst, 0.0), 0.0
    for count in counts:
        now += bucket.wait_s(count, now)
        assert bucket.wait_s(count, now) == 0
        bucket.take(count, now)


def test_a_clock_that_stands_or_steps_back_fills_nothing() -> None:
    bucket = TokenBucket(10.0, 5, now=100.0)
    bucket.take(5, 100.0)
    assert bucket.wait_s(5, 99.0) == bucket.wait_s(5, 100.0) == pytest.approx(0.5)
    assert bucket.wait_s(5, 100.5) == 0


def test_more_than_the_burst_goes_when_the_bucket_is_full_and_is_paid_for_after() -> None:
    bucket = TokenBucket(100.0, 10, now=0.0)
    assert bucket.wait_s(500, 0.0) == 0
    bucket.take(500, 0.0)
    assert bucket.wait_s(1, 0.0) == pytest.approx(4.91)
    assert bucket.wait_s(500, 4.95) == pytest.approx(0.05)
    assert bucket.wait_s(500, 5.0) == 0


def test_the_bucket_longest_unused_goes_first() -> None:
    buckets = BucketCache(2)
    first = buckets.get("a", 1.0, 1, 0.0)
    buckets.get("b", 1.0, 1, 0.0)
    assert buckets.get("a", 1.0, 1, 0.0) is first
    buckets.get("c", 1.0, 1, 0.0)
    assert len(buckets) == 2
    assert buckets.get("a", 1.0, 1, 0.0) is first
    assert buckets.get("a", 2.0, 1, 0.0) is not first


# --- rates


def refused(rates: RateLimiter, grant: Permissions, keys: list[str], now: float = 0.0) -> Refused | None:
    batch = encode_batch([Delta(key, create([1.0]), "docs") for key in keys], origin=16, base=1)
    try:
        rates.take(grant, batch, now)
    except Refused as refusal:
        return refusal
    return None


def test_a_tokens_rate_holds_over_all_its_batches_and_says_when_to_come_again() -> None:
    rates, grant, other = (
        RateLimiter(),
        Permissions("a", rate=1000.0, burst=100),
        Permissions("b", rate=1000.0, burst=100),
    )
    assert refused(rates, grant, ["x"] * 60) is None
    refusal = refused(rates, grant, ["x"] * 60)
    assert refusal is not None
    assert refusal.code is ErrorCode.RATE_LIMITED
    assert refusal.retry_after_ms == 20
    assert "'a' may send 1000 deltas/s, 100 at once" in refusal.message
    assert refused(rates, grant, ["x"] * 40) is None, "what was refused has taken nothing"
    assert refused(rates, other, ["x"] * 100) is None
    assert refused(rates, grant, ["x"] * 20, now=0.02) is None


def test_without_a_rate_nothing_is_looked_at() -> None:
    rates, grant = RateLimiter(), Permissions("anonymous", rate=inf)
    assert all(refused(rates, grant, ["x"] * 1000) is None for _ in range(10))


def test_a_vectors_rate_is_the_servers_for_all_or_a_tokens_own() -> None:
    rates = RateLimiter(vector_rate=2.0)
    one, two, own = Permissions("a"), Permissions("b"), Permissions("c", vector_rate=1.0)
    assert refused(rates, one, ["x", "y"]) is None
    assert refused(rates, two, ["x", "y"]) is None
    refusal = refused(rates, one, ["z", "z", "x"])
    assert refusal is not None
    assert refusal.retry_after_ms == 500
    assert refusal.row == 2
    assert "vector 'x' of namespace 'docs' may change 2 times/s" in refusal.message
    assert refused(rates, one, ["z", "z"]) is None, "what was refused has taken nothing, of any vector"
    assert refused(rates, own, ["x"]) is None
    assert refused(rates, own, ["x"]) is not None
    assert refused(rates, one, ["x"], now=0.5) is None
    free = Permissions("d", vector_rate=0.0)
    assert all(refused(rates, free, ["x"] * 9) is None for _ in range(3))


def test_a_token_is_not_charged_for_what_a_vector_holds_back() -> None:
    rates, grant = RateLimiter(vector_rate=1.0), Permissions("a", rate=10.0, burst=3)
    assert refused(rates, grant, ["x"]) is None
    assert refused(rates, grant, ["x"]) is not None
    assert refused(rates, grant, ["y", "z"]) is None
    assert refused(rates, grant, ["q"]) is not None


def test_a_delta_by_itself_counts_as_one() -> None:
    rates, grant, delta = (
        RateLimiter(vector_rate=1.0),
        Permissions("a", rate=10.0, burst=2),
        Delta("x", create([1.0])),
    )
    rates.take_delta(grant, delta, 0.0)
    with pytest.raises(Refused, match="vector 'x' of namespace 'default'"):
        rates.take_delta(grant, delta, 0.0)
    rates.take_delta(grant, Delta("y", create([1.0])), 0.0)
    with pytest.raises(Refused, match="token 'a' may send"):
        rates.take_delta(grant, Delta("z", create([1.0])), 0.0)


def test_a_long_debt_is_told_as_an_hour() -> None:
    rates, grant = RateLimiter(), Permissions("a", rate=0.001, burst=1)
    assert refused(rates, grant, ["x"] * 100) is None
    refusal = refused(rates, grant, ["x"])
    assert refusal is not None
    assert refusal.retry_after_ms == 3_600_000


# --- connections


@given(st.lists(st.tuples(st.booleans(), st.sampled_from(["10.0.0.1", "10.0.0.2", "10.0.0.3"])), max_size=60))
def test_connections_are_counted_as_a_list_of_them_would(moves: list[tuple[bool, str]]) -> None:
    connections, naive = ConnectionLimiter(5, 2), list[str]()
    for comes, host in moves:
        if comes:
            fits = len(naive) < 5 and naive.count(host) < 2
            if fits:
                connections.enter(host)
                naive.append(host)
            else:
                with pytest.raises(Refused) as caught:
                    connections.enter(host)
                assert caught.value.code is ErrorCode.RATE_LIMITED
                assert caught.value.retry_after_ms == 1000
        elif host in naive:
            connections.leave(host)
            naive.remove(host)
        assert connections.open == len(naive)
        assert len(connections._by_host) == len(set(naive)), "who is gone leaves nothing behind"


def test_refused_connections_are_counted_and_told_with_their_bound() -> None:
    connections = ConnectionLimiter(2, 1)
    connections.enter("10.0.0.1")
    with pytest.raises(Refused, match=r"1 connections from 10\.0\.0\.1 are open, the maximum is 1"):
        connections.enter("::ffff:10.0.0.1")
    connections.enter("10.0.0.2")
    with pytest.raises(Refused, match="2 connections are open, the maximum is 2"):
        connections.enter("10.0.0.3")
    assert (connections.open, connections.refused) == (2, 2)


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
def test_what_counts_as_one_address(host: str, address: str) -> None:
    assert address_of(host) == address
