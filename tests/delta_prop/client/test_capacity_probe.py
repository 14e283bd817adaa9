"""A producer whose service has no capacity waits for the retry time, then probes with a single batch."""

from __future__ import annotations

import pytest

from delta_prop.client.capacity_probe import PROBE_TIMEOUT_S
from delta_prop_wire.delta import Priority
from delta_prop_wire.errors import Refused
from delta_prop_wire.spec import ErrorCode
from tests.delta_prop.client.test_producer_state import Wire, check_outcomes, make_delta

BATCH_COUNT = 52
NO_CAPACITY_CODES = (ErrorCode.LOG_FULL, ErrorCode.QUEUE_FULL, ErrorCode.LOG_FAILED)


def no_capacity_refusal(code: ErrorCode = ErrorCode.LOG_FULL, after_s: float = 1.0) -> Refused:
    return Refused(code, "the disk is full", retry_after_ms=round(1000 * after_s))


def send_batches(wire: Wire, count: int = BATCH_COUNT) -> None:
    """Offer and send `count` batches."""
    for number in range(count):
        wire.offer(make_delta(str(number)))
        wire.send()


def refuse_all(wire: Wire, refusal: Refused) -> int:
    """Refuse all batches in transit; return their number."""
    count = len(wire.in_transit)
    while wire.in_transit:
        wire.arrive(refusal)
    while wire.service.answers:
        wire.answer()
    return count


def bases_after(wire: Wire, seconds: float) -> list[int]:
    """Let `seconds` pass, then send what is allowed; return the first counter of each batch in transit."""
    wire.service.bench.now += seconds
    wire.send()
    return [frame.batch.base for frame in wire.in_transit]


@pytest.mark.parametrize("code", NO_CAPACITY_CODES)
def test_each_probe_is_one_batch_until_it_is_acknowledged(code: ErrorCode) -> None:
    wire = Wire()
    send_batches(wire)
    assert refuse_all(wire, no_capacity_refusal(code)) == BATCH_COUNT
    for _ in range(57):
        assert bases_after(wire, 0.9) == [], "the producer must wait for the retry time"
        assert bases_after(wire, 0.1) == [1]
        assert wire.producer_state.waits_for is not None
        assert wire.producer_state.waits_for.message == "the disk is full"
        assert refuse_all(wire, no_capacity_refusal(code)) == 1
    assert bases_after(wire, 1.0) == [1]
    wire.arrive()
    while wire.service.answers:
        wire.answer()
    assert wire.producer_state.waits_for is None
    assert bases_after(wire, 0.0) == [*range(2, BATCH_COUNT + 1)]
    wire.settle()
    check_outcomes(wire)


@pytest.mark.parametrize("after_s", [0.02, 7.0])
def test_producer_waits_for_the_retry_time_of_the_refusal(after_s: float) -> None:
    wire = Wire()
    send_batches(wire, 3)
    for retry_s in (after_s, 2 * after_s, after_s / 2):
        refuse_all(wire, no_capacity_refusal(after_s=retry_s))
        assert bases_after(wire, 0.9 * retry_s) == []
        assert bases_after(wire, 0.1 * retry_s + 0.001) == [1]
    wire.settle()
    check_outcomes(wire)


def test_ack_of_an_earlier_batch_does_not_end_the_probe() -> None:
    wire = Wire()
    send_batches(wire, 4)
    wire.arrive()
    refuse_all(wire, no_capacity_refusal())
    assert bases_after(wire, 1.0) == [2]
    wire.settle()
    check_outcomes(wire)


def test_first_sent_batch_of_several_lanes_is_the_probe() -> None:
    wire = Wire()
    wire.offer(make_delta("a", priority=Priority.LOW))
    wire.send()
    # The second delta depends on the first, so it cannot be sent before it.
    wire.offer(make_delta("a", priority=Priority.CRITICAL))
    wire.send()
    refuse_all(wire, no_capacity_refusal())
    wire.service.bench.now += 1.0
    wire.send()
    assert [frame.batch.priority for frame in wire.in_transit] == [Priority.LOW]
    wire.settle()
    check_outcomes(wire)


def test_unanswered_probe_delays_others_until_its_timeout() -> None:
    wire = Wire()
    send_batches(wire, 3)
    refuse_all(wire, no_capacity_refusal())
    assert bases_after(wire, 1.0) == [1]
    assert bases_after(wire, PROBE_TIMEOUT_S - 0.1) == [1]
    assert 0 < (wire.producer_state.wait_s(wire.service.bench.now) or 0) <= 0.2
    assert bases_after(wire, 0.2) == [1, 2, 3]
    wire.settle()
    check_outcomes(wire)


def test_new_connection_probes_with_one_batch_too() -> None:
    wire = Wire()
    send_batches(wire, 5)
    refuse_all(wire, no_capacity_refusal())
    assert bases_after(wire, 1.0) == [1]
    wire.connect()
    assert bases_after(wire, 0.0) == [1]
    wire.settle()
    check_outcomes(wire)


def test_rate_limited_batches_are_all_retried_at_once() -> None:
    wire = Wire()
    send_batches(wire, 3)
    refuse_all(wire, Refused(ErrorCode.RATE_LIMITED, "too fast", retry_after_ms=1000))
    assert bases_after(wire, 1.0) == [1, 2, 3]
    assert wire.producer_state.waits_for is not None
    wire.settle()
    check_outcomes(wire)
    assert wire.producer_state.waits_for is None
