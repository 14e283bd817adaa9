"""Effects of each refusal on dots, on offers in the same batch, and on later batches."""

from __future__ import annotations

from dataclasses import replace

import pytest

from delta_prop.calls.outcomes import PublishAck
from delta_prop.client.errors import Reconnect
from delta_prop_wire.cursor import Cursor
from delta_prop_wire.delta import AckLevel, Dot, Priority, create, opaque
from delta_prop_wire.errors import Refused, UsageError
from delta_prop_wire.frames import Ack, AckRange, Backpressure, Nack, PressureLevel, Welcome
from delta_prop_wire.spec import ErrorCode
from tests.delta_prop.client.test_producer_state import Wire, check_outcomes, make_delta, queue_full


def refusal_of(wire: Wire, number: int) -> Refused:
    outcome = wire.outcomes[number]
    assert isinstance(outcome, Refused), outcome
    return outcome


def ack_of(wire: Wire, number: int) -> PublishAck:
    outcome = wire.outcomes[number]
    assert isinstance(outcome, PublishAck), outcome
    return outcome


def test_offers_of_one_tick_share_a_batch_but_not_their_acks() -> None:
    wire = Wire()
    wire.offer(make_delta("a"), make_delta("b"))
    wire.offer(make_delta("c"))
    wire.send()
    assert [frame.batch.count for frame in wire.in_transit] == [3]
    wire.settle()
    assert ack_of(wire, 0) == PublishAck(0, Dot(ack_of(wire, 0).dot.origin, 1), 2, AckLevel.MEMORY)  # type: ignore[union-attr]
    assert ack_of(wire, 1).offset == 2
    assert ack_of(wire, 1).dot.counter == 3  # type: ignore[union-attr]


def test_bad_row_fails_only_its_call_and_others_get_new_dots() -> None:
    wire = Wire()
    wire.offer(make_delta("a"))
    wire.settle()  # from here on the namespace has dimension 2
    for delta in (
        make_delta("b"),
        replace(make_delta("c"), operation=create([1.0, 2.0, 3.0])),
        make_delta("d"),
    ):
        wire.offer(delta)
    wire.offer(make_delta("e"), replace(make_delta("f"), operation=create([1.0])))
    wire.settle()
    assert refusal_of(wire, 2).code is ErrorCode.INVALID_DELTA
    assert refusal_of(wire, 2).row == 0, "the row must be counted within the call's own deltas"
    assert refusal_of(wire, 4).row == 1
    check_outcomes(wire)
    assert [key for key, _ in wire.logged().values()] == ["a", "b", "d"]
    assert ack_of(wire, 3).dot.counter > ack_of(wire, 1).dot.counter > 5  # type: ignore[union-attr]


def test_call_with_expect_has_a_batch_of_its_own() -> None:
    wire = Wire()
    wire.offer(make_delta("a"))
    wire.offer(make_delta("b", expect=Dot(1, 1)))
    wire.offer(make_delta("c"))
    wire.send()
    assert [frame.batch.keys for frame in wire.in_transit] == [["a"], ["b"], ["c"]]
    wire.settle()
    assert refusal_of(wire, 1).code is ErrorCode.CONFLICT
    check_outcomes(wire)


def test_batch_refused_without_a_row_is_retried_call_by_call() -> None:
    wire = Wire()
    for key in "abc":
        wire.offer(make_delta(key))
    wire.send()
    wire.producer_state.on_nack(Nack(1, ErrorCode.UNAUTHORIZED, "no"), 0.0)
    wire.in_transit.clear()
    wire.send()
    assert [frame.batch.keys for frame in wire.in_transit] == [["a"], ["b"], ["c"]]
    assert [frame.batch.base for frame in wire.in_transit] == [4, 5, 6]
    wire.producer_state.on_nack(Nack(5, ErrorCode.UNAUTHORIZED, "no"), 0.0)
    assert refusal_of(wire, 1).code is ErrorCode.UNAUTHORIZED
    assert set(wire.outcomes) == {1}


def test_dependent_names_the_new_dot_of_a_retried_call() -> None:
    wire = Wire()
    wire.offer(make_delta("first", priority=Priority.CRITICAL))  # registers this lane before the others
    wire.settle()
    cause = wire.offer(make_delta("cause", priority=Priority.LOW))
    wire.offer(make_delta("bad", priority=Priority.LOW))
    wire.send()
    wire.in_transit.clear()
    wire.producer_state.on_nack(Nack(2, ErrorCode.INVALID_DELTA, "no", row=1), 0.0)
    wire.offer(make_delta("effect", priority=Priority.CRITICAL), after=[cause.pending_dot])
    wire.send()
    assert [frame.batch.keys for frame in wire.in_transit] == [["cause"], ["effect"]]
    assert wire.in_transit[1].batch.parents == ((0, Dot(cause.pending_dot.origin, 3)),)


def test_retryable_batches_are_resent_unchanged_in_order() -> None:
    wire = Wire()
    wire.offer(make_delta("a"))
    wire.send()
    wire.offer(make_delta("b"))
    wire.send()
    first, second = wire.in_transit
    wire.producer_state.on_nack(Nack(2, ErrorCode.RATE_LIMITED, "too fast", 50), 1.0)
    wire.producer_state.on_nack(Nack(1, ErrorCode.RATE_LIMITED, "too fast", 20), 1.0)
    wire.offer(make_delta("c"))
    assert wire.producer_state.next_frame(1.0) is None, "no later batch may overtake the refused one"
    assert wire.producer_state.wait_s(1.0) == pytest.approx(0.05)
    resent = [wire.producer_state.next_frame(1.05) for _ in range(3)]
    assert [frame.sequence for frame in resent if frame] == [3, 4, 5]
    assert [bytes(frame.batch.body) for frame in resent[:2] if frame] == [
        bytes(first.batch.body),
        bytes(second.batch.body),
    ]
    assert resent[2] is not None
    assert resent[2].batch.keys == ["c"]


def test_batch_across_the_watermark_is_sliced_and_resent() -> None:
    wire = Wire()
    wire.offer(make_delta("a"))
    wire.offer(make_delta("b"), make_delta("c"), make_delta("d"))
    wire.send()
    original = wire.in_transit.pop()
    wire.producer_state.on_nack(Nack(1, ErrorCode.OVERLAP, "cut", 0, details={"watermark": 2}), 0.0)
    parts = [wire.producer_state.next_frame(0.0), wire.producer_state.next_frame(0.0)]
    assert [(one.batch.base, one.batch.keys) for one in parts if one] == [(1, ["a", "b"]), (3, ["c", "d"])]
    assert parts[1] is not None
    assert parts[1].batch.dot(0) == original.batch.dot(2)
    wire.producer_state.on_ack(Ack(6, ranges=(AckRange(5, 6, 20, duplicate=True),)))
    assert (ack_of(wire, 0).offset, ack_of(wire, 0).duplicates) == (20, {})
    assert 1 not in wire.outcomes, "the other rows must not have an outcome yet"
    wire.producer_state.on_ack(Ack(8, ranges=(AckRange(7, 8, 77),)))
    ack = ack_of(wire, 1)
    assert (ack.offset, ack.dot, ack.count, ack.duplicates) == (21, original.batch.dot(1), 3, {})


def test_part_of_unknown_outcome_is_refused_and_the_rest_acked() -> None:
    wire = Wire()
    for key in "abc":
        wire.offer(make_delta(key))
    wire.send()
    original = wire.in_transit.pop()
    wire.producer_state.on_nack(Nack(1, ErrorCode.OVERLAP, "cut", 0, details={"watermark": 2}), 0.0)
    assert wire.producer_state.next_frame(0.0) is not None
    assert wire.producer_state.next_frame(0.0) is not None
    wire.producer_state.on_nack(Nack(4, ErrorCode.OUTCOME_UNKNOWN, "gone"), 0.0)
    for number in range(2):
        refusal = refusal_of(wire, number)
        assert (refusal.code, refusal.details) == (
            ErrorCode.OUTCOME_UNKNOWN,
            {"dot": original.batch.dot(number)},
        )
    wire.producer_state.on_ack(Ack(6, ranges=(AckRange(6, 6, 77),)))
    assert ack_of(wire, 2).offset == 77


@pytest.mark.parametrize("ranges", [(), (AckRange(1, 2, (1 << 63) - 1, duplicate=True),)])
def test_duplicate_at_an_unknown_offset_is_outcome_unknown(ranges: tuple[AckRange, ...]) -> None:
    wire = Wire()
    wire.offer(make_delta("a"))
    wire.offer(make_delta("b"))
    wire.send()
    original = wire.in_transit.pop()
    wire.producer_state.on_ack(Ack(2, ranges=ranges))
    for number in range(2):
        refusal = refusal_of(wire, number)
        assert (refusal.code, refusal.details) == (
            ErrorCode.OUTCOME_UNKNOWN,
            {"dot": original.batch.dot(number)},
        )


def test_overlap_without_a_slice_point_is_retried_later() -> None:
    wire = Wire()
    wire.offer(make_delta("a"), make_delta("b"))
    wire.send()
    wire.producer_state.on_nack(
        Nack(1, ErrorCode.OVERLAP, "pending otherwise", 100, details={"watermark": 0}), 0.0
    )
    assert wire.producer_state.next_frame(0.05) is None
    frame = wire.producer_state.next_frame(0.1)
    assert frame is not None
    assert frame.batch.count == 2


@pytest.mark.parametrize("code", [ErrorCode.FENCED, ErrorCode.DOT_REUSED, ErrorCode.BAD_REQUEST])
def test_final_refusal_stops_the_producer(code: ErrorCode) -> None:
    wire = Wire()
    wire.offer(make_delta("a"))
    wire.send()
    with pytest.raises(Refused) as caught:
        wire.producer_state.on_nack(Nack(1, code, "no"), 0.0)
    wire.producer_state.fail(caught.value)
    assert refusal_of(wire, 0).code is code
    with pytest.raises(Refused, match=code.name):
        wire.offer(make_delta("b"))


def test_refused_hello_is_final_and_a_shutdown_reconnects() -> None:
    wire = Wire()
    with pytest.raises(Refused, match="UNAUTHORIZED"):
        wire.producer_state.on_nack(Nack(0, ErrorCode.UNAUTHORIZED, "no", correlation_id=1), 0.0)
    with pytest.raises(Reconnect) as caught:
        wire.producer_state.on_nack(Nack(0, ErrorCode.SHUTTING_DOWN, "bye", 1500), 0.0)
    assert caught.value.after_s == 1.5


def test_checksum_mismatch_is_retried_a_few_times() -> None:
    wire = Wire()
    for _ in range(4):
        with pytest.raises(Reconnect):
            wire.producer_state.on_nack(Nack(0, ErrorCode.CHECKSUM, "differs"), 0.0)
    with pytest.raises(Refused, match="CHECKSUM"):
        wire.producer_state.on_nack(Nack(0, ErrorCode.CHECKSUM, "differs"), 0.0)


def test_unknown_origin_reconnects_only_once() -> None:
    wire = Wire()
    wire.offer(make_delta("a"))
    wire.send()
    unknown = Nack(1, ErrorCode.UNKNOWN_ORIGIN, "say hello")
    with pytest.raises(Reconnect):
        wire.producer_state.on_nack(unknown, 0.0)
    wire.arrive()
    wire.connect()
    wire.send()
    with pytest.raises(Refused, match="UNKNOWN_ORIGIN"):
        wire.producer_state.on_nack(unknown, 0.0)


def test_duplicate_ids_do_not_affect_the_other_rows() -> None:
    wire = Wire()
    known = make_delta("a", id=bytes(15) + b"k")
    wire.offer(known)
    wire.settle()
    wire.offer(make_delta("b", id=bytes(15) + b"1"))
    wire.offer(known)
    wire.offer(make_delta("d", id=bytes(15) + b"2"), known, make_delta("f", id=bytes(15) + b"3"))
    wire.settle()
    assert ack_of(wire, 2).duplicates == {0: 0}
    assert ack_of(wire, 3).duplicates == {1: 0}
    logged = wire.logged()
    assert sorted(key for key, _ in logged.values()) == ["a", "b", "d", "f"]
    for offer, keys in ((1, ["b"]), (2, ["a"]), (3, ["d", "a", "f"])):
        acks = ack_of(wire, offer).row_acks()
        assert [logged[ack.offset][0] for ack in acks if ack.offset is not None] == keys
        dots = [ack.dot for ack in acks if ack.dot is not None]
        assert dots == [logged[ack.offset][1] for ack in acks if ack.dot is not None and ack.offset]
    assert ack_of(wire, 1).duplicates == {}


def test_only_the_id_reused_for_other_content_is_refused() -> None:
    wire = Wire()
    known = make_delta("a", id=bytes(15) + b"k")
    wire.offer(known)
    wire.settle()
    wire.offer(make_delta("b", id=bytes(15) + b"1"))
    wire.offer(make_delta("c", id=bytes(15) + b"2"), make_delta("other", id=known.id))
    wire.offer(make_delta("d", id=bytes(15) + b"2"), known)
    wire.settle()
    assert (refusal_of(wire, 2).code, refusal_of(wire, 2).row) == (ErrorCode.ID_REUSED, 1)
    assert ack_of(wire, 3).duplicates == {1: 0}
    assert sorted(key for key, _ in wire.logged().values()) == ["a", "b", "d"]


def test_frame_beyond_the_maximum_is_refused_without_a_dot() -> None:
    wire = Wire()
    large_deltas = [
        replace(make_delta(f"k{number}"), operation=opaque(bytes(1_000_000))) for number in range(17)
    ]
    wire.offer(*large_deltas)
    wire.offer(make_delta("b"))
    wire.settle()
    assert refusal_of(wire, 0).code is ErrorCode.TOO_LARGE
    assert ack_of(wire, 1).dot.counter == 1  # type: ignore[union-attr]


# --- dropped offers


def test_unsent_offer_is_dropped_without_using_a_dot() -> None:
    wire = Wire()
    offer = wire.offer(make_delta("a"))
    wire.offer(make_delta("b"))
    assert wire.producer_state.drop(offer)
    wire.settle()
    assert set(wire.outcomes) == {1}
    assert ack_of(wire, 1).dot.counter == 1  # type: ignore[union-attr]


def test_retryable_offer_is_dropped_and_its_dot_becomes_noop() -> None:
    wire = Wire()
    offer = wire.offer(make_delta("a"))
    wire.offer(make_delta("b"))
    wire.send()
    wire.offer(make_delta("c"))
    wire.send()
    wire.arrive(queue_full())
    wire.arrive()  # c waits at the service for the two earlier rows
    wire.answer()
    assert wire.producer_state.drop(offer)
    wire.settle()
    assert set(wire.outcomes) == {1, 2}
    assert [key for key, _ in wire.logged().values()] == ["c", "b"]
    assert ack_of(wire, 1).dot.counter == 4  # type: ignore[union-attr]


def test_sent_offer_cannot_be_dropped() -> None:
    wire = Wire()
    offer = wire.offer(make_delta("a"))
    wire.send()
    assert not wire.producer_state.drop(offer)
    wire.settle()
    assert ack_of(wire, 0).offset == 0


@pytest.mark.parametrize("arrived", [True, False])
def test_dropped_offer_is_not_resent_after_a_disconnect(arrived: bool) -> None:
    wire = Wire()
    offer = wire.offer(make_delta("a"))
    wire.offer(make_delta("b"))
    wire.send()
    if arrived:
        wire.arrive()
    wire.producer_state.on_disconnect()
    assert not wire.producer_state.drop(offer), "an offer that may have been stored must not be dropped"
    wire.connect()
    wire.settle()
    keys = [key for key, _ in wire.logged().values()]
    assert keys == (["a", "b"] if arrived else ["b"])
    assert isinstance(wire.outcomes[0], PublishAck if arrived else Refused)


def test_stored_offer_cannot_be_dropped() -> None:
    wire = Wire()
    offer = wire.offer(make_delta("a"))
    wire.send()
    wire.arrive()
    wire.connect()
    assert not wire.producer_state.drop(offer)
    wire.settle()
    check_outcomes(wire)


def test_expired_offers_say_if_they_may_have_happened() -> None:
    wire = Wire()
    wire.offer(make_delta("a"))
    wire.send()
    wire.service.bench.now = 5.0
    wire.offer(make_delta("b"))
    assert wire.producer_state.oldest_at() == 0.0
    wire.producer_state.expire(29.9, 30.0)
    assert wire.outcomes == {}
    wire.producer_state.expire(30.0, 30.0)
    assert "may have happened" in refusal_of(wire, 0).message
    wire.producer_state.expire(35.0, 30.0)
    assert "has not happened" in refusal_of(wire, 1).message
    wire.arrive()
    wire.answer()  # an answer after the expiry is ignored
    assert wire.producer_state.in_flight_offers == 0


# --- another service, another log


def test_deltas_lost_by_the_service_are_skipped() -> None:
    wire = Wire()
    wire.service.allows_dot_reuse = True
    for key in "abcd":
        wire.offer(make_delta(key))
        wire.send()
        wire.arrive()
    for _ in "abc":
        wire.answer()  # acknowledged in memory
    wire.service.lose_tail(1)
    wire.connect()
    wire.settle()
    assert [key for key, _ in wire.logged().values()] == ["a", "d"]
    assert wire.producer_state.counts.lost == 2
    wire.offer(make_delta("e"))
    wire.settle()
    assert ack_of(wire, 4).dot.counter == 5  # type: ignore[union-attr]


def test_lost_delta_does_not_block_its_dependents() -> None:
    wire = Wire()
    wire.service.allows_dot_reuse = True
    wire.offer(make_delta("a"))
    wire.settle()
    wire.offer(make_delta("x", priority=Priority.LOW))
    wire.settle()
    wire.offer(make_delta("x"))  # this delta depends on the delta of the low lane
    wire.send()
    wire.service.lose_tail(1)
    wire.connect()
    wire.settle()
    assert [key for key, _ in wire.logged().values()] == ["a", "x"]
    wire.offer(make_delta("x", priority=Priority.LOW))
    wire.offer(make_delta("x", priority=Priority.HIGH))
    wire.settle()
    assert len(wire.logged()) == 4


def test_clock_of_lost_deltas_is_sent_with_the_next_batch() -> None:
    wire = Wire()
    wire.service.allows_dot_reuse = True
    low = wire.offer(make_delta("x", priority=Priority.LOW))
    wire.offer(make_delta("x"))
    wire.settle()
    stored_end = wire.service.bench.log.next_offset - 1
    wire.offer(make_delta("z"))
    wire.send()
    wire.service.lose_tail(stored_end)
    wire.connect()
    wire.send()
    assert wire.in_transit[0].batch.clock == (Dot(low.pending_dot.origin, 1),)


def test_another_log_at_another_address_is_refused() -> None:
    wire = Wire()
    welcome = Welcome(log=Cursor(bytes(16), 0, 0), level=AckLevel.MEMORY)
    with pytest.raises(UsageError, match="one client cannot go on in another log"):
        wire.producer_state.on_welcome(welcome, same_address=False)
    durable = replace(welcome, level=AckLevel.DURABLE)
    with pytest.raises(UsageError):
        wire.producer_state.on_welcome(durable, same_address=True)


def test_new_memory_log_at_the_same_address_is_accepted() -> None:
    wire = Wire()
    wire.service.allows_dot_reuse = True
    wire.offer(make_delta("a"))
    wire.settle()
    wire.offer(make_delta("b"))
    wire.send()
    wire.service.lose_tail(0)
    wire.service.log_id = bytes(16)
    wire.connect()
    wire.settle()
    assert [key for key, _ in wire.logged().values()] == ["b"]


def test_level_that_is_not_granted_is_refused_at_the_hello() -> None:
    from delta_prop.client.producer_state import ProducerState

    state = ProducerState("p", ack_level=AckLevel.DURABLE)
    with pytest.raises(Refused, match="LEVEL_UNAVAILABLE"):
        state.on_welcome(Welcome(level=AckLevel.LOGGED), same_address=True)


# --- order, bounds, backpressure


def test_deltas_of_one_vector_keep_order_across_priorities() -> None:
    wire = Wire()
    wire.offer(make_delta("a", priority=Priority.LOW))
    wire.offer(make_delta("a", priority=Priority.CRITICAL))
    wire.offer(make_delta("b", priority=Priority.CRITICAL))
    wire.send()
    wire.in_transit.reverse()  # batches may arrive in any order
    wire.settle()
    lanes = [dot[0] & 15 for key, dot in wire.logged().values() if key == "a"]
    assert lanes == [Priority.LOW, Priority.CRITICAL]


def test_cause_of_another_lane_is_named_as_a_parent() -> None:
    wire = Wire()
    cause = wire.offer(make_delta("a", priority=Priority.LOW))
    wire.offer(make_delta("b", priority=Priority.CRITICAL), after=[cause.pending_dot])
    wire.send()
    frame = next(frame for frame in wire.in_transit if frame.batch.keys == ["b"])
    assert frame.batch.parents == ((0, Dot(cause.pending_dot.origin, 1)),)
    wire.settle()
    assert [key for key, _ in wire.logged().values()] == ["a", "b"]


def test_lanes_share_frames_by_their_weights() -> None:
    wire = Wire()
    for priority in (Priority.LOW, Priority.CRITICAL):
        for number in range(40):
            wire.offer(make_delta(f"{priority}-{number}", priority=priority, expect=None))
            wire.offers[-1].is_single = True
    wire.send(18)
    lanes = [frame.batch.priority for frame in wire.in_transit]
    assert lanes.count(Priority.CRITICAL) == 16
    assert lanes.count(Priority.LOW) == 2


def test_lane_after_an_idle_time_takes_only_its_share() -> None:
    wire = Wire()
    for number in range(50):
        wire.offer(make_delta(f"low-{number}", priority=Priority.LOW))
        wire.offers[-1].is_single = True
    wire.send(40)
    for number in range(40):
        wire.offer(make_delta(f"critical-{number}", priority=Priority.CRITICAL))
        wire.offers[-1].is_single = True
    wire.in_transit.clear()
    wire.send(18)
    assert [frame.batch.priority for frame in wire.in_transit].count(Priority.LOW) == 2


def test_in_flight_offers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("delta_prop.client.producer_state.IN_FLIGHT_OFFERS_MAX", 2)
    wire = Wire()
    wire.offer(make_delta("a"))
    wire.offer(make_delta("b"))
    with pytest.raises(Refused, match="QUEUE_FULL"):
        wire.offer(make_delta("c"))
    wire.settle()
    assert wire.producer_state._unacked.bytes == 0
    wire.offer(make_delta("c"))


def test_backpressure_slows_and_stops_sending() -> None:
    wire = Wire()
    wire.producer_state.on_backpressure(Backpressure(1, PressureLevel.THROTTLE, rate=10.0), 0.0)
    for number in range(3):
        wire.offer(make_delta(f"k{number}"))
        wire.offers[-1].is_single = True
    assert wire.producer_state.next_frame(0.0) is not None
    assert wire.producer_state.next_frame(0.05) is None
    assert wire.producer_state.wait_s(0.05) == pytest.approx(0.05)
    assert wire.producer_state.next_frame(0.11) is not None
    wire.producer_state.on_backpressure(Backpressure(2, PressureLevel.STOP, retry_after_ms=2_000), 1.0)
    assert wire.producer_state.next_frame(2.9) is None
    assert wire.producer_state.next_frame(3.0) is not None


def test_stop_without_a_time_lasts_until_another_level() -> None:
    wire = Wire()
    wire.offer(make_delta("k"))
    wire.producer_state.on_backpressure(Backpressure(1, PressureLevel.STOP), 1.0)
    assert wire.producer_state.next_frame(50.0) is None
    assert wire.producer_state.wait_s(50.0) == pytest.approx(11.0)
    wire.producer_state.on_backpressure(Backpressure(2, PressureLevel.WARN), 50.0)
    assert wire.producer_state.next_frame(50.0) is not None


# --- counters given by the caller


def test_numbered_deltas_of_a_second_run_get_their_first_outcomes() -> None:
    wire = Wire()
    for counter, key in ((1, "a"), (3, "b"), (4, "c")):
        wire.offer(make_delta(key), counter=counter)
    wire.settle()
    second = Wire(service=wire.service)
    bad = replace(make_delta("x"), operation=create([1.0, 2.0, 3.0]))
    for counter, key in ((1, "a"), (3, "b"), (4, "c")):
        second.offer(make_delta(key), counter=counter)
    second.offer(make_delta("d"), counter=7)
    second.offer(bad, counter=8)
    second.offer(make_delta("e"), counter=9)
    second.settle()
    assert [ack_of(second, number).duplicates for number in range(3)] == [{0: 0}, {0: 1}, {0: 2}]
    assert ack_of(second, 3).duplicates == {}
    assert ack_of(second, 3).dot.counter == 7  # type: ignore[union-attr]
    assert refusal_of(second, 4).code is ErrorCode.INVALID_DELTA
    third = Wire(service=wire.service)
    for counter, delta in (
        (1, make_delta("a")),
        (3, make_delta("b")),
        (4, make_delta("c")),
        (7, make_delta("d")),
        (8, bad),
    ):
        third.offer(delta, counter=counter)
    third.settle()
    assert refusal_of(third, 4).code is ErrorCode.INVALID_DELTA, (
        "the final refusal of the earlier run must be returned"
    )
    assert ack_of(third, 3).duplicates == {0: 3}


def test_counters_must_rise_and_be_given_for_all_or_none() -> None:
    wire = Wire()
    wire.offer(make_delta("a"), counter=5)
    with pytest.raises(UsageError, match="rising"):
        wire.offer(make_delta("b"), counter=5)
    with pytest.raises(UsageError, match="or none"):
        wire.offer(make_delta("b"))
