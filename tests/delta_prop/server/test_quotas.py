"""Quotas: what passes in any time is bounded, what waits takes turns, and nothing is remembered for ever."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delta_prop.server.permissions import Permissions
from delta_prop.server.quotas import (
    BURST_S,
    METERS_MAX,
    NO_LIMITS,
    NO_QUOTA,
    ConnectionQuota,
    Inbound,
    Limits,
    Outbound,
    QuotaName,
    Quotas,
)
from delta_prop.server.send_queue import SendChunk
from delta_prop_broker.catalogue.stream import Stream, StreamSettings
from delta_prop_wire.errors import Refused
from delta_prop_wire.frames import Credit
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from collections.abc import Sequence

RATE = 1_000.0
PLAIN = Stream("default", 0)
TOKEN = Permissions("ci", limits=Limits(bytes_in_s=RATE, bytes_out_s=RATE))
FREE = Permissions("free")


def inbound_of(quota: ConnectionQuota) -> Inbound:
    assert quota.inbound is not None
    return quota.inbound


def outbound_of(quota: ConnectionQuota) -> Outbound:
    assert quota.outbound is not None
    return quota.outbound


def check_bound(passed: Sequence[tuple[float, int]], at_once: float) -> None:
    """Check the amount in each time from one passage to another. `at_once`: that above the rate."""
    for first, (start, _) in enumerate(passed):
        amount = 0
        for time_s, size in passed[first:]:
            amount += size
            assert amount <= RATE * (time_s - start) + at_once + 0.01


@given(st.lists(st.tuples(st.floats(0, 0.5), st.integers(1, 400), st.integers(0, 2)), max_size=60))
def test_inbound_rate_is_never_exceeded_and_frames_pass_in_their_order(
    frames: list[tuple[float, int, int]],
) -> None:
    quotas = Quotas()
    connections = [inbound_of(quotas.open(TOKEN, None, PLAIN, 0.0)) for _ in range(3)]
    now, passed = 0.0, []
    for pause_s, size, connection in frames:
        now += pause_s
        passed.append((now + connections[connection].charge(1, size, now), size))
    assert passed == sorted(passed, key=lambda one: one[0])
    check_bound(passed, max([RATE * BURST_S, *[size for _, size in passed]]))


def test_busy_connection_gets_the_full_rate() -> None:
    inbound, now, total = inbound_of(Quotas().open(TOKEN, None, PLAIN, 0.0)), 0.0, 0
    while now < 10:
        now += inbound.charge(1, 70, now)
        total += 70
    assert total == pytest.approx(10 * RATE, rel=0.05)


@given(st.lists(st.integers(1, 300), min_size=1, max_size=30), st.integers(1, 4))
def test_outbound_rate_holds_and_connections_take_turns(sizes: list[int], count: int) -> None:
    quotas = Quotas()
    connections = [outbound_of(quotas.open(TOKEN, None, PLAIN, 0.0)) for _ in range(count)]
    wakes_at = [0.0] * count
    turns = [0] * count
    passed: list[tuple[float, int]] = []
    while sum(turns) < 60:
        index = min(range(count), key=wakes_at.__getitem__)
        now, outbound = wakes_at[index], connections[index]
        budget = outbound.budget(now)
        if budget is not None:
            size = sizes[len(passed) % len(sizes)]  # a frame of any size may go while the budget is open
            assert budget.bytes >= 1
            outbound.settle(SendChunk([], 1, size, 0), now)
            passed.append((now, size))
            turns[index] += 1
            assert outbound.budget(now) is None or size < RATE * BURST_S
        wakes_at[index] = now + max(outbound.wait_s(now), 1e-6)
    assert max(turns) - min(turns) <= 12
    check_bound(passed, RATE * BURST_S + count * max(sizes))  # each connection may exceed its turn


def test_turn_without_a_delivery_costs_nothing() -> None:
    quotas = Quotas()
    idle, busy = (outbound_of(quotas.open(TOKEN, None, PLAIN, 0.0)) for _ in range(2))
    for _ in range(100):
        assert idle.budget(0.0) is not None
        idle.settle(None, 0.0)
    assert busy.budget(0.0) == Credit(1 << 62, int(RATE * BURST_S))
    busy.settle(SendChunk([], 1, 1_000, 0), 0.0)
    assert idle.budget(0.0) is None
    assert idle.wait_s(0.0) == pytest.approx(0.92)
    idle.close(0.0)
    assert idle.wait_s(0.0) == 0
    assert busy.budget(0.0) is None
    assert busy.wait_s(0.0) == pytest.approx(0.92), "the turn that was given up delays nobody"


def test_smallest_of_several_quotas_holds() -> None:
    quotas = Quotas(Limits(bytes_in_s=100.0))
    stream = Stream("orders", 1, settings=StreamSettings(rows_in_s=10.0))
    inbound = inbound_of(quotas.open(TOKEN, "c", stream, 0.0))
    assert inbound.charge(1, 10, 0.0) == 0
    assert inbound.charge(1, 50, 0.0) == pytest.approx(0.1), "a large frame passes when nothing was used"
    assert inbound.charge(1, 1, 0.0) == pytest.approx(0.51), "and is paid for afterwards"
    assert inbound.charge(100, 1, 100.0) == 0
    assert inbound.charge(1, 1, 100.0) == pytest.approx(10.0), "100 rows are paid for"
    assert inbound.bound_credit(Credit(1_000, 1_000)) == Credit(5, 50)


def test_clients_have_a_quota_each_and_share_those_of_token_and_stream() -> None:
    quotas = Quotas(Limits(rows_in_s=100.0))
    first = inbound_of(quotas.open(FREE, "a", PLAIN, 0.0))
    assert first.charge(1_000, 1, 0.0) == 0
    assert inbound_of(quotas.open(FREE, "a", PLAIN, 0.0)).charge(1, 1, 0.0) > 0
    for client, rights in (("b", FREE), (None, FREE), ("a", Permissions("other"))):
        assert inbound_of(quotas.open(rights, client, PLAIN, 0.0)).charge(1, 1, 0.0) == 0
    counts = quotas.counts[QuotaName("client", "free", "rows_in_s")]
    assert (counts.limit, counts.passed) == (100.0, 1_003)


def test_connection_without_quotas_has_nothing_to_check() -> None:
    assert Quotas().open(FREE, "c", PLAIN, 0.0) is NO_QUOTA
    only_out = Quotas().open(Permissions("a", limits=Limits(rows_out_s=1.0)), None, PLAIN, 0.0)
    assert (only_out.inbound, only_out.requests) == (None, None)
    assert Limits.of({"bytes_in_s": 0, "rows_in_s": None}) == NO_LIMITS


def test_only_a_changed_limit_starts_unused() -> None:
    quotas = Quotas()
    for rate, expects_wait in ((10.0, False), (10.0, True), (20.0, False), (20.0, True)):
        rights = Permissions("ci", limits=Limits(rows_in_s=rate))
        wait_s = inbound_of(quotas.open(rights, None, PLAIN, 0.0)).charge(100, 1, 0.0)
        assert (wait_s > 0) is expects_wait
    assert quotas.counts[QuotaName("token", "ci", "rows_in_s")].limit == 20.0


def test_use_is_remembered_while_connected_and_for_a_bounded_number_of_others() -> None:
    quotas = Quotas(Limits(rows_in_s=1.0))
    open_one = inbound_of(quotas.open(FREE, "open", PLAIN, 0.0))
    for connection in (open_one, inbound_of(quotas.open(FREE, "closed", PLAIN, 0.0))):
        connection.charge(50, 1, 0.0)
    del connection
    for number in range(METERS_MAX):
        quotas.open(FREE, str(number), PLAIN, 0.0)
    assert inbound_of(quotas.open(FREE, "open", PLAIN, 0.0)).charge(1, 1, 0.0) > 0
    assert inbound_of(quotas.open(FREE, "closed", PLAIN, 0.0)).charge(1, 1, 0.0) == 0
    assert inbound_of(quotas.open(FREE, str(METERS_MAX - 1), PLAIN, 0.0)).charge(1, 1, 0.0) == 0
    assert len(quotas.counts) == 1, "clients choose their ids, so they are counted by token"


def test_connections_are_counted_by_token() -> None:
    quotas, rights = Quotas(), Permissions("ci", connections=2)
    for _ in range(3):
        quotas.enter(rights)
        quotas.enter(Permissions("ci", connections=2))
        quotas.enter(FREE)
        with pytest.raises(Refused, match="token 'ci' has 2 connections; the maximum is 2") as refused:
            quotas.enter(rights)
        assert refused.value.code is ErrorCode.QUOTA_EXCEEDED
        for _ in range(2):
            quotas.leave(rights)
        quotas.leave(FREE)
    counts = quotas.counts[QuotaName("token", "ci", "connections")]
    assert (counts.limit, counts.passed, counts.refused) == (2, 6, 3)


def test_quotas_that_were_removed_are_forgotten() -> None:
    quotas = Quotas(Limits(rows_in_s=1.0))
    rights = Permissions("ci", connections=2, limits=Limits(rows_in_s=1.0, requests_s=1.0))
    orders = Stream("orders", 1, settings=StreamSettings(rows_in_s=1.0, bytes_in_s=1.0))
    quotas.enter(rights)
    inbound_of(quotas.open(rights, "c", orders, 0.0)).charge(100, 1, 0.0)
    assert len(quotas.counts) == 6
    altered = Stream("orders", 1, settings=StreamSettings(bytes_in_s=1.0))
    quotas.drop_removed({"orders": altered})
    quotas.enter(Permissions("ci", limits=Limits(requests_s=1.0)))
    assert sorted(quotas.counts) == [
        ("client", "ci", "rows_in_s"),
        ("stream", "orders", "bytes_in_s"),
        ("token", "ci", "requests_s"),
    ]
    quotas.drop_removed({})
    assert [name.scope for name in quotas.counts if name.scope == "stream"] == []
    restored = inbound_of(quotas.open(FREE, None, Stream("orders", 1, settings=orders.settings), 0.0))
    assert restored.charge(1, 1, 0.0) == 0, "it starts unused"
    assert quotas.counts[QuotaName("stream", "orders", "rows_in_s")].passed == 1


def test_frame_that_waits_is_charged_to_new_quotas_and_given_back_to_former_ones() -> None:
    quotas, rights = Quotas(), Permissions("ci", limits=Limits(rows_in_s=50.0))
    slow, fast, none = (
        Stream("orders", 1, settings=StreamSettings(rows_in_s=rate)) for rate in (10.0, 100.0, None)
    )
    other = inbound_of(quotas.open(FREE, None, slow, 0.0))
    assert other.charge(100, 1, 0.0) == 0
    held = quotas.open(rights, None, slow, 0.0)
    assert inbound_of(held).charge(100, 1, 0.0) == pytest.approx(10.0)
    assert other.charge(1, 1, 0.0) == pytest.approx(20.0), "it comes after the frame"
    for now, stream, wait_s in ((0.5, slow, 9.5), (1.0, none, 0.0)):
        former, held = held, quotas.open(rights, None, stream, now)
        held.follow(former, now)
        assert inbound_of(held).wait_s(now) == pytest.approx(wait_s)
    assert other.charge(1, 1, 1.0) == pytest.approx(9.1), "the frame no longer delays others"
    assert inbound_of(held).charge(150, 1, 1.0) == pytest.approx(1.0), "it still counts for the token"
    former, held = held, quotas.open(rights, None, fast, 1.0)
    held.follow(former, 1.0)
    assert inbound_of(held).wait_s(1.0) == pytest.approx(1.0)
    assert inbound_of(quotas.open(FREE, None, fast, 1.0)).charge(1, 1, 1.0) == pytest.approx(1.41)


def test_turn_of_a_delivery_follows_changed_quotas() -> None:
    quotas, rights = Quotas(), Permissions("ci", limits=Limits(rows_out_s=50.0))
    slow, fast, none = (
        Stream("orders", 1, settings=StreamSettings(rows_out_s=rate)) for rate in (10.0, 100.0, None)
    )
    waiting = quotas.open(rights, None, slow, 0.0)
    assert outbound_of(waiting).budget(0.0) is not None
    outbound_of(waiting).settle(SendChunk([], 100, 1, 0), 0.0)
    assert outbound_of(waiting).budget(0.0) is None
    for stream, wait_s in ((slow, 10.0), (fast, 1.92), (none, 1.92), (slow, 1.92)):
        former, waiting = waiting, quotas.open(rights, None, stream, 0.0)
        waiting.follow(former, 0.0)
        assert outbound_of(waiting).budget(0.0) is None
        assert outbound_of(waiting).wait_s(0.0) == pytest.approx(wait_s)
    waiting = quotas.open(FREE, None, none, 0.0)
    waiting.follow(former, 0.0)
    assert waiting is NO_QUOTA


def test_infinite_limit_is_none() -> None:
    assert Quotas().open(Permissions("a", limits=Limits(rows_in_s=inf)), None, PLAIN, 0.0) is NO_QUOTA
