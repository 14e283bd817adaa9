"""A producer whose service has no room waits as it is told, asks with one batch, keeps the others back."""

from __future__ import annotations

import pytest

from delta_prop.client.capacity_probe import PROBE_TIMEOUT_S
from delta_prop_wire.delta import Priority
from delta_prop_wire.errors import Refused
from delta_prop_wire.spec import ErrorCode
from tests.delta_prop.client.test_producer_state import Wire, check, made

BATCHES = 52
NO_ROOM = (ErrorCode.LOG_FULL, ErrorCode.QUEUE_FULL, ErrorCode.LOG_FAILED)


def no_room(code: ErrorCode = ErrorCode.LOG_FULL, after_s: float = 1.0) -> Refused:
    return Refused(code, "the disk is full", retry_after_ms=round(1000 * after_s))


def sent_apart(wire: Wire, count: int = BATCHES) -> None:
    """So many batches under way."""
    for number in range(count):
        wire.offer(made(str(number)))
        wire.send()


def refuse_all(wire: Wire, refusal: Refused) -> int:
    """Everything that is under way is refused; how many batches that were."""
    count = len(wire.between)
    while wire.between:
        wire.arrive(refusal)
    while wire.service.answers:
        wire.answer()
    return count


def after(wire: Wire, seconds: float) -> list[int]:
    """Send what may go then; the first counter of each batch that is under way."""
    wire.service.bench.now += seconds
    wire.send()
    return [frame.batch.base for frame in wire.between]


@pytest.mark.parametrize("code", NO_ROOM)
def test_each_try_is_one_batch_until_it_is_acknowledged(code: ErrorCode) -> None:
    wire = Wire()
    sent_apart(wire)
    assert refuse_all(wire, no_room(code)) == BATCHES
    for _ in range(57):
        assert after(wire, 0.9) == [], "it waits as it was told"
        assert after(wire, 0.1) == [1]
        assert wire.out.waits_for is not None
        assert wire.out.waits_for.message == "the disk is full"
        assert refuse_all(wire, no_room(code)) == 1
    assert after(wire, 1.0) == [1]
    wire.arrive()
    while wire.service.answers:
        wire.answer()
    assert wire.out.waits_for is None
    assert after(wire, 0.0) == [*range(2, BATCHES + 1)]
    wire.settle()
    check(wire)


@pytest.mark.parametrize("after_s", [0.02, 7.0])
def test_it_waits_as_long_as_it_was_told(after_s: float) -> None:
    wire = Wire()
    sent_apart(wire, 3)
    for told_s in (after_s, 2 * after_s, after_s / 2):
        refuse_all(wire, no_room(after_s=told_s))
        assert after(wire, 0.9 * told_s) == []
        assert after(wire, 0.1 * told_s + 0.001) == [1]
    wire.settle()
    check(wire)


def test_what_was_sent_before_and_is_acknowledged_lets_nothing_go() -> None:
    wire = Wire()
    sent_apart(wire, 4)
    wire.arrive()
    refuse_all(wire, no_room())
    assert after(wire, 1.0) == [2]
    wire.settle()
    check(wire)


def test_of_several_lanes_the_batch_that_was_sent_first_asks() -> None:
    wire = Wire()
    wire.offer(made("a", priority=Priority.LOW))
    wire.send()
    wire.offer(made("a", priority=Priority.CRITICAL))  # names the one before, so it cannot go without it
    wire.send()
    refuse_all(wire, no_room())
    wire.service.bench.now += 1.0
    wire.send()
    assert [frame.batch.priority for frame in wire.between] == [Priority.LOW]
    wire.settle()
    check(wire)


def test_a_batch_that_has_no_answer_holds_the_others_for_a_while_only() -> None:
    wire = Wire()
    sent_apart(wire, 3)
    refuse_all(wire, no_room())
    assert after(wire, 1.0) == [1]
    assert after(wire, PROBE_TIMEOUT_S - 0.1) == [1]
    assert 0 < (wire.out.wait_s(wire.service.bench.now) or 0) <= 0.2
    assert after(wire, 0.2) == [1, 2, 3]
    wire.settle()
    check(wire)


def test_a_new_connection_asks_with_one_batch_as_well() -> None:
    wire = Wire()
    sent_apart(wire, 5)
    refuse_all(wire, no_room())
    assert after(wire, 1.0) == [1]
    wire.connect()
    assert after(wire, 0.0) == [1]
    wire.settle()
    check(wire)


def test_what_is_refused_for_its_own_sake_does_not_hold_others_back() -> None:
    wire = Wire()
    sent_apart(wire, 3)
    refuse_all(wire, Refused(ErrorCode.RATE_LIMITED, "too fast", retry_after_ms=1000))
    assert after(wire, 1.0) == [1, 2, 3]
    assert wire.out.waits_for is not None
    wire.settle()
    check(wire)
    assert wire.out.waits_for is None
