"""The effect of each refusal on dots, on offers that share the batch, and on batches sent after it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from delta_prop.client.errors import Reconnect
from delta_prop.outcomes import PublishAck
from delta_prop_wire.cursor import Cursor
from delta_prop_wire.delta import AckLevel, Dot, Priority, create, opaque
from delta_prop_wire.errors import Refused, UsageError
from delta_prop_wire.frames import Ack, AckRange, Backpressure, Nack, PressureLevel, Welcome
from delta_prop_wire.spec import ErrorCode
from tests.delta_prop.client.test_producer_state import Wire, check, full, made


def refused(wire: Wire, number: int) -> Refused:
    outcome = wire.outcomes[number]
    assert isinstance(outcome, Refused), outcome
    return outcome


def published(wire: Wire, number: int) -> PublishAck:
    outcome = wire.outcomes[number]
    assert isinstance(outcome, PublishAck), outcome
    return outcome


def test_one_turns_offers_share_a_batch_and_each_is_told_its_own_rows() -> None:
    wire = Wire()
    wire.offer(made("a"), made("b"))
    wire.offer(made("c"))
    wire.send()
    assert [frame.batch.count for frame in wire.between] == [3]
    wire.settle()
    assert published(wire, 0) == PublishAck(0, Dot(published(wire, 0).dot.origin, 1), 2, AckLevel.MEMORY)  # type: ignore[union-attr]
    assert published(wire, 1).offset == 2
    assert published(wire, 1).dot.counter == 3  # type: ignore[union-attr]


def test_a_bad_row_costs_its_own_call_alone_and_the_others_get_new_dots() -> None:
    wire = Wire()
    wire.offer(made("a"))
    wire.settle()  # the namespace has dimension 2 from here on
    for delta in (made("b"), replace(made("c"), operation=create([1.0, 2.0, 3.0])), made("d")):
        wire.offer(delta)
    wire.offer(made("e"), replace(made("f"), operation=create([1.0])))
    wire.settle()
    assert refused(wire, 2).code is ErrorCode.INVALID_DELTA
    assert refused(wire, 2).row == 0, "counted within the call's own deltas"
    assert refused(wire, 4).row == 1
    check(wire)
    assert [key for key, _ in wire.logged().values()] == ["a", "b", "d"]
    assert published(wire, 3).dot.counter > published(wire, 1).dot.counter > 5  # type: ignore[union-attr]


def test_a_call_that_expects_shares_its_batch_with_nobody() -> None:
    wire = Wire()
    wire.offer(made("a"))
    wire.offer(made("b", expect=Dot(1, 1)))
    wire.offer(made("c"))
    wire.send()
    assert [frame.batch.keys for frame in wire.between] == [["a"], ["b"], ["c"]]
    wire.settle()
    assert refused(wire, 1).code is ErrorCode.CONFLICT
    check(wire)


def test_a_refusal_that_names_no_row_is_tried_call_by_call() -> None:
    wire = Wire()
    for key in "abc":
        wire.offer(made(key))
    wire.send()
    wire.out.on_nack(Nack(1, ErrorCode.UNAUTHORIZED, "no"), 0.0)
    wire.between.clear()
    wire.send()
    assert [frame.batch.keys for frame in wire.between] == [["a"], ["b"], ["c"]]
    assert [frame.batch.base for frame in wire.between] == [4, 5, 6]
    wire.out.on_nack(Nack(5, ErrorCode.UNAUTHORIZED, "no"), 0.0)
    assert refused(wire, 1).code is ErrorCode.UNAUTHORIZED
    assert set(wire.outcomes) == {1}


def test_what_names_a_call_whose_dots_became_void_waits_for_its_new_ones() -> None:
    wire = Wire()
    wire.offer(made("first", priority=Priority.CRITICAL))  # so that its lane is asked first
    wire.settle()
    cause = wire.offer(made("cause", priority=Priority.LOW))
    wire.offer(made("bad", priority=Priority.LOW))
    wire.send()
    wire.between.clear()
    wire.out.on_nack(Nack(2, ErrorCode.INVALID_DELTA, "no", row=1), 0.0)
    wire.offer(made("effect", priority=Priority.CRITICAL), after=[cause.pending_dot])
    wire.send()
    assert [frame.batch.keys for frame in wire.between] == [["cause"], ["effect"]]
    assert wire.between[1].batch.parents == ((0, Dot(cause.pending_dot.origin, 3)),)


def test_what_is_refused_for_now_comes_again_in_order_as_the_same_bytes_after_its_time() -> None:
    wire = Wire()
    wire.offer(made("a"))
    wire.send()
    wire.offer(made("b"))
    wire.send()
    first, second = wire.between
    wire.out.on_nack(Nack(2, ErrorCode.RATE_LIMITED, "too fast", 50), 1.0)
    wire.out.on_nack(Nack(1, ErrorCode.RATE_LIMITED, "too fast", 20), 1.0)
    wire.offer(made("c"))
    assert wire.out.next_frame(1.0) is None, "nothing overtakes"
    assert wire.out.wait_s(1.0) == pytest.approx(0.05)
    again = [wire.out.next_frame(1.05) for _ in range(3)]
    assert [frame.sequence for frame in again if frame] == [3, 4, 5]
    assert [bytes(frame.batch.body) for frame in again[:2] if frame] == [
        bytes(first.batch.body),
        bytes(second.batch.body),
    ]
    assert again[2] is not None
    assert again[2].batch.keys == ["c"]


def test_a_batch_partly_below_the_watermark_is_cut_there_and_both_parts_are_asked_for() -> None:
    wire = Wire()
    wire.offer(made("a"))
    wire.offer(made("b"), made("c"), made("d"))
    wire.send()
    whole = wire.between.pop()
    wire.out.on_nack(Nack(1, ErrorCode.OVERLAP, "cut", 0, details={"watermark": 2}), 0.0)
    parts = [wire.out.next_frame(0.0), wire.out.next_frame(0.0)]
    assert [(one.batch.base, one.batch.keys) for one in parts if one] == [(1, ["a", "b"]), (3, ["c", "d"])]
    assert parts[1] is not None
    assert parts[1].batch.dot(0) == whole.batch.dot(2)
    wire.out.on_ack(Ack(6, ranges=(AckRange(5, 6, 20, duplicate=True),)))
    assert (published(wire, 0).offset, published(wire, 0).duplicates) == (20, {})
    assert 1 not in wire.outcomes, "the rest of it has no outcome yet"
    wire.out.on_ack(Ack(8, ranges=(AckRange(7, 8, 77),)))
    told = published(wire, 1)
    assert (told.offset, told.dot, told.count, told.duplicates) == (21, whole.batch.dot(1), 3, {})


def test_a_part_that_the_service_cannot_tell_of_is_in_doubt_and_the_rest_goes_on() -> None:
    wire = Wire()
    for key in "abc":
        wire.offer(made(key))
    wire.send()
    whole = wire.between.pop()
    wire.out.on_nack(Nack(1, ErrorCode.OVERLAP, "cut", 0, details={"watermark": 2}), 0.0)
    assert wire.out.next_frame(0.0) is not None
    assert wire.out.next_frame(0.0) is not None
    wire.out.on_nack(Nack(4, ErrorCode.OUTCOME_UNKNOWN, "gone"), 0.0)
    for number in range(2):
        doubt = refused(wire, number)
        assert (doubt.code, doubt.details) == (ErrorCode.OUTCOME_UNKNOWN, {"dot": whole.batch.dot(number)})
    wire.out.on_ack(Ack(6, ranges=(AckRange(6, 6, 77),)))
    assert published(wire, 2).offset == 77


@pytest.mark.parametrize("ranges", [(), (AckRange(1, 2, (1 << 63) - 1, duplicate=True),)])
def test_a_repeat_at_an_unknown_offset_is_no_acknowledgement(ranges: tuple[AckRange, ...]) -> None:
    wire = Wire()
    wire.offer(made("a"))
    wire.offer(made("b"))
    wire.send()
    whole = wire.between.pop()
    wire.out.on_ack(Ack(2, ranges=ranges))
    for number in range(2):
        doubt = refused(wire, number)
        assert (doubt.code, doubt.details) == (ErrorCode.OUTCOME_UNKNOWN, {"dot": whole.batch.dot(number)})


def test_an_overlap_that_names_nothing_to_cut_is_waited_out() -> None:
    wire = Wire()
    wire.offer(made("a"), made("b"))
    wire.send()
    wire.out.on_nack(Nack(1, ErrorCode.OVERLAP, "pending otherwise", 100, details={"watermark": 0}), 0.0)
    assert wire.out.next_frame(0.05) is None
    frame = wire.out.next_frame(0.1)
    assert frame is not None
    assert frame.batch.count == 2


@pytest.mark.parametrize("code", [ErrorCode.FENCED, ErrorCode.DOT_REUSED, ErrorCode.BAD_REQUEST])
def test_refusals_after_which_nothing_goes(code: ErrorCode) -> None:
    wire = Wire()
    wire.offer(made("a"))
    wire.send()
    with pytest.raises(Refused) as caught:
        wire.out.on_nack(Nack(1, code, "no"), 0.0)
    wire.out.fail(caught.value)
    assert refused(wire, 0).code is code
    with pytest.raises(Refused, match=code.name):
        wire.offer(made("b"))


def test_a_hello_that_is_refused_ends_it_and_one_refused_for_now_is_said_again() -> None:
    wire = Wire()
    with pytest.raises(Refused, match="UNAUTHORIZED"):
        wire.out.on_nack(Nack(0, ErrorCode.UNAUTHORIZED, "no", correlation_id=1), 0.0)
    with pytest.raises(Reconnect) as caught:
        wire.out.on_nack(Nack(0, ErrorCode.SHUTTING_DOWN, "bye", 1500), 0.0)
    assert caught.value.after_s == 1.5


def test_checksums_that_do_not_fit_are_sent_again_a_few_times() -> None:
    wire = Wire()
    for _ in range(4):
        with pytest.raises(Reconnect):
            wire.out.on_nack(Nack(0, ErrorCode.CHECKSUM, "differs"), 0.0)
    with pytest.raises(Refused, match="CHECKSUM"):
        wire.out.on_nack(Nack(0, ErrorCode.CHECKSUM, "differs"), 0.0)


def test_an_origin_that_is_not_known_is_asked_for_once() -> None:
    wire = Wire()
    wire.offer(made("a"))
    wire.send()
    unknown = Nack(1, ErrorCode.UNKNOWN_ORIGIN, "say hello")
    with pytest.raises(Reconnect):
        wire.out.on_nack(unknown, 0.0)
    wire.arrive()
    wire.connect()
    wire.send()
    with pytest.raises(Refused, match="UNKNOWN_ORIGIN"):
        wire.out.on_nack(unknown, 0.0)


def test_ids_that_were_accepted_before_are_duplicates_and_cost_the_others_nothing() -> None:
    wire = Wire()
    known = made("a", id=bytes(15) + b"k")
    wire.offer(known)
    wire.settle()
    wire.offer(made("b", id=bytes(15) + b"1"))
    wire.offer(known)
    wire.offer(made("d", id=bytes(15) + b"2"), known, made("f", id=bytes(15) + b"3"))
    wire.settle()
    assert published(wire, 2).duplicates == {0: 0}
    assert published(wire, 3).duplicates == {1: 0}
    logged = wire.logged()
    assert sorted(key for key, _ in logged.values()) == ["a", "b", "d", "f"]
    for offer, keys in ((1, ["b"]), (2, ["a"]), (3, ["d", "a", "f"])):
        places = published(wire, offer).places()
        assert [logged[place.offset][0] for place in places if place.offset is not None] == keys
        dots = [place.dot for place in places if place.dot is not None]
        assert dots == [logged[place.offset][1] for place in places if place.dot is not None and place.offset]
    assert published(wire, 1).duplicates == {}


def test_id_that_was_accepted_for_other_content_is_refused_and_the_others_go_on() -> None:
    wire = Wire()
    known = made("a", id=bytes(15) + b"k")
    wire.offer(known)
    wire.settle()
    wire.offer(made("b", id=bytes(15) + b"1"))
    wire.offer(made("c", id=bytes(15) + b"2"), made("other", id=known.id))
    wire.offer(made("d", id=bytes(15) + b"2"), known)
    wire.settle()
    assert (refused(wire, 2).code, refused(wire, 2).row) == (ErrorCode.ID_REUSED, 1)
    assert published(wire, 3).duplicates == {1: 0}
    assert sorted(key for key, _ in wire.logged().values()) == ["a", "b", "d"]


def test_a_frame_beyond_the_bound_is_refused_without_a_dot() -> None:
    wire = Wire()
    big = [replace(made(f"k{at}"), operation=opaque(bytes(1_000_000))) for at in range(17)]
    wire.offer(*big)
    wire.offer(made("b"))
    wire.settle()
    assert refused(wire, 0).code is ErrorCode.TOO_LARGE
    assert published(wire, 1).dot.counter == 1  # type: ignore[union-attr]


# --- given up


def test_what_waits_is_taken_back_without_a_trace() -> None:
    wire = Wire()
    offer = wire.offer(made("a"))
    wire.offer(made("b"))
    assert wire.out.drop(offer)
    wire.settle()
    assert set(wire.outcomes) == {1}
    assert published(wire, 1).dot.counter == 1  # type: ignore[union-attr]


def test_what_was_refused_for_now_is_taken_back_and_its_dot_becomes_void() -> None:
    wire = Wire()
    offer = wire.offer(made("a"))
    wire.offer(made("b"))
    wire.send()
    wire.offer(made("c"))
    wire.send()
    wire.arrive(full())
    wire.arrive()  # c waits at the service for the two before it
    wire.answer()
    assert wire.out.drop(offer)
    wire.settle()
    assert set(wire.outcomes) == {1, 2}
    assert [key for key, _ in wire.logged().values()] == ["c", "b"]
    assert published(wire, 1).dot.counter == 4  # type: ignore[union-attr]


def test_what_is_under_way_may_still_happen() -> None:
    wire = Wire()
    offer = wire.offer(made("a"))
    wire.send()
    assert not wire.out.drop(offer)
    wire.settle()
    assert published(wire, 0).offset == 0


@pytest.mark.parametrize("arrived", [True, False])
def test_what_was_under_way_when_the_connection_broke_is_not_sent_again_once_given_up(arrived: bool) -> None:
    wire = Wire()
    offer = wire.offer(made("a"))
    wire.offer(made("b"))
    wire.send()
    if arrived:
        wire.arrive()
    wire.out.on_disconnect()
    assert not wire.out.drop(offer), "nobody knows"
    wire.connect()
    wire.settle()
    keys = [key for key, _ in wire.logged().values()]
    assert keys == (["a", "b"] if arrived else ["b"])
    assert isinstance(wire.outcomes[0], PublishAck if arrived else Refused)


def test_what_has_its_place_cannot_be_taken_back() -> None:
    wire = Wire()
    offer = wire.offer(made("a"))
    wire.send()
    wire.arrive()
    wire.connect()
    assert not wire.out.drop(offer)
    wire.settle()
    check(wire)


def test_offers_have_a_time_and_are_told_whether_they_may_have_happened() -> None:
    wire = Wire()
    wire.offer(made("a"))
    wire.send()
    wire.service.bench.now = 5.0
    wire.offer(made("b"))
    assert wire.out.oldest_at() == 0.0
    wire.out.expire(29.9, 30.0)
    assert wire.outcomes == {}
    wire.out.expire(30.0, 30.0)
    assert "may have happened" in refused(wire, 0).message
    wire.out.expire(35.0, 30.0)
    assert "has not happened" in refused(wire, 1).message
    wire.arrive()
    wire.answer()  # too late for anybody, and no harm
    assert wire.out.in_flight_offers == 0


# --- another service, another log


def test_what_the_service_lost_is_leapt_over_and_the_rest_follows() -> None:
    wire = Wire()
    wire.service.forgiving = True
    for key in "abcd":
        wire.offer(made(key))
        wire.send()
        wire.arrive()
    for _ in "abc":
        wire.answer()  # acknowledged in memory
    wire.service.lose_tail(1)
    wire.connect()
    wire.settle()
    assert [key for key, _ in wire.logged().values()] == ["a", "d"]
    assert wire.out.counts.lost == 2
    wire.offer(made("e"))
    wire.settle()
    assert published(wire, 4).dot.counter == 5  # type: ignore[union-attr]


def test_what_was_lost_holds_nobody_up_who_had_named_it() -> None:
    wire = Wire()
    wire.service.forgiving = True
    wire.offer(made("a"))
    wire.settle()
    wire.offer(made("x", priority=Priority.LOW))
    wire.settle()
    wire.offer(made("x"))  # names the one of the low lane
    wire.send()
    wire.service.lose_tail(1)
    wire.connect()
    wire.settle()
    assert [key for key, _ in wire.logged().values()] == ["a", "x"]
    wire.offer(made("x", priority=Priority.LOW))
    wire.offer(made("x", priority=Priority.HIGH))
    wire.settle()
    assert len(wire.logged()) == 4


def test_what_the_lost_ones_had_said_of_other_lanes_is_said_wire() -> None:
    wire = Wire()
    wire.service.forgiving = True
    low = wire.offer(made("x", priority=Priority.LOW))
    wire.offer(made("x"))
    wire.settle()
    kept = wire.service.bench.log.next_offset - 1
    wire.offer(made("z"))
    wire.send()
    wire.service.lose_tail(kept)
    wire.connect()
    wire.send()
    assert wire.between[0].batch.clock == (Dot(low.pending_dot.origin, 1),)


def test_another_log_at_another_address_is_another_service() -> None:
    wire = Wire()
    welcome = Welcome(log=Cursor(bytes(16), 0, 0), level=AckLevel.MEMORY)
    with pytest.raises(UsageError, match="one client cannot go on in another log"):
        wire.out.on_welcome(welcome, same_address=False)
    durable = replace(welcome, level=AckLevel.DURABLE)
    with pytest.raises(UsageError):
        wire.out.on_welcome(durable, same_address=True)


def test_a_service_whose_log_is_in_memory_may_begin_anew_at_its_address() -> None:
    wire = Wire()
    wire.service.forgiving = True
    wire.offer(made("a"))
    wire.settle()
    wire.offer(made("b"))
    wire.send()
    wire.service.lose_tail(0)
    wire.service.log_id = bytes(16)
    wire.connect()
    wire.settle()
    assert [key for key, _ in wire.logged().values()] == ["b"]


def test_a_level_that_the_service_does_not_grant_is_refused_at_the_hello() -> None:
    from delta_prop.client.producer_state import ProducerState

    out = ProducerState("p", ack_level=AckLevel.DURABLE)
    with pytest.raises(Refused, match="LEVEL_UNAVAILABLE"):
        out.on_welcome(Welcome(level=AckLevel.LOGGED), same_address=True)


# --- order, bounds, advice


def test_one_vectors_deltas_keep_their_order_across_priorities() -> None:
    wire = Wire()
    wire.offer(made("a", priority=Priority.LOW))
    wire.offer(made("a", priority=Priority.CRITICAL))
    wire.offer(made("b", priority=Priority.CRITICAL))
    wire.send()
    wire.between.reverse()  # whatever the service takes first
    wire.settle()
    order = [dot[0] & 15 for key, dot in wire.logged().values() if key == "a"]
    assert order == [Priority.LOW, Priority.CRITICAL]


def test_what_must_come_first_is_named() -> None:
    wire = Wire()
    cause = wire.offer(made("a", priority=Priority.LOW))
    wire.offer(made("b", priority=Priority.CRITICAL), after=[cause.pending_dot])
    wire.send()
    frame = next(frame for frame in wire.between if frame.batch.keys == ["b"])
    assert frame.batch.parents == ((0, Dot(cause.pending_dot.origin, 1)),)
    wire.settle()
    assert [key for key, _ in wire.logged().values()] == ["a", "b"]


def test_lanes_share_what_may_be_sent() -> None:
    wire = Wire()
    for priority in (Priority.LOW, Priority.CRITICAL):
        for at in range(40):
            wire.offer(made(f"{priority}-{at}", priority=priority, expect=None))
            wire.offers[-1].is_single = True
    wire.send(18)
    lanes = [frame.batch.priority for frame in wire.between]
    assert lanes.count(Priority.CRITICAL) == 16
    assert lanes.count(Priority.LOW) == 2


def test_a_lane_that_rested_takes_no_more_than_its_share() -> None:
    wire = Wire()
    for at in range(50):
        wire.offer(made(f"low-{at}", priority=Priority.LOW))
        wire.offers[-1].is_single = True
    wire.send(40)
    for at in range(40):
        wire.offer(made(f"critical-{at}", priority=Priority.CRITICAL))
        wire.offers[-1].is_single = True
    wire.between.clear()
    wire.send(18)
    assert [frame.batch.priority for frame in wire.between].count(Priority.LOW) == 2


def test_what_may_be_open_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("delta_prop.client.producer_state.IN_FLIGHT_OFFERS_MAX", 2)
    wire = Wire()
    wire.offer(made("a"))
    wire.offer(made("b"))
    with pytest.raises(Refused, match="QUEUE_FULL"):
        wire.offer(made("c"))
    wire.settle()
    assert wire.out._unacked.bytes == 0
    wire.offer(made("c"))


def test_advice_slows_and_stops() -> None:
    wire = Wire()
    wire.out.on_backpressure(Backpressure(1, PressureLevel.THROTTLE, rate=10.0), 0.0)
    for at in range(3):
        wire.offer(made(f"k{at}"))
        wire.offers[-1].is_single = True
    assert wire.out.next_frame(0.0) is not None
    assert wire.out.next_frame(0.05) is None
    assert wire.out.wait_s(0.05) == pytest.approx(0.05)
    assert wire.out.next_frame(0.11) is not None
    wire.out.on_backpressure(Backpressure(2, PressureLevel.STOP, retry_after_ms=2_000), 1.0)
    assert wire.out.next_frame(2.9) is None
    assert wire.out.next_frame(3.0) is not None


def test_stop_without_a_time_holds_until_another_level() -> None:
    wire = Wire()
    wire.offer(made("k"))
    wire.out.on_backpressure(Backpressure(1, PressureLevel.STOP), 1.0)
    assert wire.out.next_frame(50.0) is None
    assert wire.out.wait_s(50.0) == pytest.approx(11.0)
    wire.out.on_backpressure(Backpressure(2, PressureLevel.WARN), 50.0)
    assert wire.out.next_frame(50.0) is not None


# --- numbered by the caller


def test_numbered_deltas_of_a_former_life_are_answered_with_what_became_of_them() -> None:
    wire = Wire()
    for counter, key in ((1, "a"), (3, "b"), (4, "c")):
        wire.offer(made(key), counter=counter)
    wire.settle()
    again = Wire(service=wire.service)
    bad = replace(made("x"), operation=create([1.0, 2.0, 3.0]))
    for counter, key in ((1, "a"), (3, "b"), (4, "c")):
        again.offer(made(key), counter=counter)
    again.offer(made("d"), counter=7)
    again.offer(bad, counter=8)
    again.offer(made("e"), counter=9)
    again.settle()
    assert [published(again, number).duplicates for number in range(3)] == [{0: 0}, {0: 1}, {0: 2}]
    assert published(again, 3).duplicates == {}
    assert published(again, 3).dot.counter == 7  # type: ignore[union-attr]
    assert refused(again, 4).code is ErrorCode.INVALID_DELTA
    third = Wire(service=wire.service)
    for counter, delta in ((1, made("a")), (3, made("b")), (4, made("c")), (7, made("d")), (8, bad)):
        third.offer(delta, counter=counter)
    third.settle()
    assert refused(third, 4).code is ErrorCode.INVALID_DELTA, "refused for good in the life before"
    assert published(third, 3).duplicates == {0: 3}


def test_counters_rise_and_are_given_for_all_or_none() -> None:
    wire = Wire()
    wire.offer(made("a"), counter=5)
    with pytest.raises(UsageError, match="rising"):
        wire.offer(made("b"), counter=5)
    with pytest.raises(UsageError, match="or none"):
        wire.offer(made("b"))
