"""Coalesced calls have the outcomes of separate offers, with any refusals and cancellations."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delta_prop.calls.outcomes import PublishAck
from delta_prop.calls.receipt import Receipt
from delta_prop.client.coalesced_calls import CALLS_BYTES_MAX, CALLS_MAX, CALLS_WINDOW_S, CoalescedCalls
from delta_prop.client.offer import Offer
from delta_prop.partition.ingest.work import Sender, SequencedBatch
from delta_prop_wire.delta import Delta, Kind, Priority, opaque
from delta_prop_wire.errors import Refused
from delta_prop_wire.spec import ErrorCode
from delta_prop_wire.validate import is_opaque_only
from tests.delta_prop.client.test_producer_state import Wire, queue_full


class RecordingWaker:
    """A waker that records its outcome; no caller waits for it."""

    def __init__(self) -> None:
        self.outcome: PublishAck | Refused | None = None
        self.is_cancelled = False

    def done(self) -> bool:
        return self.is_cancelled or self.outcome is not None

    def cancelled(self) -> bool:
        return self.is_cancelled

    def set_result(self, result: Any) -> None:
        assert not self.done(), "a call must be settled only once"
        self.outcome = result

    def on_outcome(self, outcome: PublishAck | Refused) -> None:
        if not self.done():
            self.set_result(outcome)

    def result(self) -> Any:
        return self.outcome

    def __await__(self) -> Any:
        raise AssertionError("no caller awaits the waker here")


class Caller(Wire):
    """A producer's side: if `coalesces`, it coalesces calls where possible; else each call is an offer."""

    def __init__(self, *, coalesces: bool) -> None:
        super().__init__()
        self.coalesces = coalesces
        self.wakers: list[RecordingWaker] = []
        self.offers_made: list[tuple[CoalescedCalls, int] | Offer] = []
        self.outcome_count = 0  # of offers of coalesced calls

    def call(self, delta: Delta) -> None:
        waker, now = RecordingWaker(), self.service.bench.now
        self.wakers.append(waker)
        assert is_opaque_only(delta)
        calls = None
        if self.coalesces:
            calls = self.producer_state.offer_call(delta, waker, now, self)
        if calls is not None:
            self.offers_made.append((calls, calls.count - 1))
            return
        offer = Offer(delta.priority, [delta], waker)
        offer.is_awaited = True
        self.producer_state.offer(offer, now)
        self.offers_made.append(offer)

    def cancel_call(self, number: int) -> bool:
        call, waker = self.offers_made[number], self.wakers[number]
        if waker.done():
            return False
        waker.is_cancelled = True
        return (
            self.producer_state.drop_call(*call)
            if isinstance(call, tuple)
            else self.producer_state.drop(call)
        )

    def refuse_row(self, row: int) -> None:
        """Give the next batch a final refusal for one row: its dots become no-ops."""
        frame = self.in_transit.pop(0)
        batch = frame.batch
        refusal = Refused(ErrorCode.INVALID_DELTA, "bad", row=min(row, batch.count - 1))
        receipt = Receipt()
        receipt.add_done_callback(lambda done: self.service.answer(frame, None, done.refusal()))
        work = SequencedBatch(batch, Sender("owner"), receipt, final_refusal=refusal)
        self.service.bench.pipeline.offer(work, self.service.bench.now)

    def on_outcome(self, outcome: PublishAck | Refused) -> None:
        self.outcome_count += 1

    def results(self) -> list[Any]:
        """Return the outcome of each call; of a call without one, True if it was cancelled."""
        results: list[Any] = []
        for waker, offer in zip(self.wakers, self.offers_made, strict=True):
            outcome = waker.outcome
            if isinstance(outcome, PublishAck) and isinstance(offer, tuple):
                outcome = outcome.of_row(offer[1])
            results.append(waker.is_cancelled if outcome is None else _comparable(outcome))
        return results


def _comparable(outcome: PublishAck | Refused) -> Any:
    if isinstance(outcome, Refused):
        return outcome.code, outcome.row, outcome.message
    return outcome


def _comparable_outcomes(caller: Caller) -> dict[int, Any]:
    return {number: _comparable(outcome) for number, outcome in caller.outcomes.items()}


def make_opaque(key: str, priority: Priority = Priority.NORMAL, data: bytes = b"x") -> Delta:
    return Delta(key, opaque(data), priority=priority)


STEPS = st.one_of(
    st.tuples(
        st.just("call"),
        st.sampled_from([Priority.NORMAL, Priority.NORMAL, Priority.NORMAL, Priority.HIGH]),
        st.integers(1, 4),
    ),
    st.tuples(st.just("offer"), st.sampled_from(list(Priority)), st.integers(1, 3)),
    st.tuples(st.just("cancel"), st.integers(0, 40)),
    st.tuples(st.just("send"), st.integers(1, 2)),
    st.sampled_from([("arrive",), ("arrive",), ("answer",), ("answer",)]),
    st.just(("round",)),
    st.tuples(st.just("bad"), st.integers(0, 3)),
    st.sampled_from([("full",), ("cut",), ("later",), ("expire",)]),
)


def play(wire: Caller, steps: list[tuple[Any, ...]]) -> None:
    key = 0
    for step in steps:
        match step:
            case ("call", priority, count):
                for _ in range(count):
                    key += 1
                    wire.call(make_opaque(f"k{key % 5}", priority))
            case ("offer", priority, count):
                wire.offer(*(make_opaque(f"k{row}", priority) for row in range(count)))
            case ("cancel", number) if number < len(wire.wakers):
                wire.cancel_call(number)
            case ("send", frames):
                wire.send(frames)
            case ("arrive",):
                wire.arrive()
            case ("full",):
                wire.arrive(queue_full())
            case ("bad", row) if wire.in_transit and wire.in_transit[0].batch.kind == Kind.OPAQUE:
                wire.refuse_row(row)
            case ("answer",):
                wire.answer()
            case ("cut",):
                wire.connect()
            case ("later",):
                wire.service.bench.now += 0.02
            case ("round",):
                wire.send()
                wire.arrive()
                wire.answer()
            case ("expire",):
                wire.producer_state.expire(wire.service.bench.now, 1_000.0, 0.03)


def check_outcomes_agree(steps: list[tuple[Any, ...]]) -> Caller:
    coalescing, separate = Caller(coalesces=True), Caller(coalesces=False)
    for wire in (coalescing, separate):
        play(wire, steps)
        wire.settle()
    assert coalescing.results() == separate.results()
    assert coalescing.logged() == separate.logged()
    assert _comparable_outcomes(coalescing) == _comparable_outcomes(separate)
    assert (
        coalescing.producer_state.in_flight_offers
        == coalescing.producer_state._unacked.bytes
        == separate.producer_state._unacked.bytes
        == 0
    )
    assert (coalescing.producer_state.counts.acknowledged, coalescing.producer_state.counts.refused) == (
        separate.producer_state.counts.acknowledged,
        separate.producer_state.counts.refused,
    )
    return coalescing


@given(st.lists(STEPS, min_size=5, max_size=50))
def test_coalesced_and_separate_calls_have_the_same_outcomes(steps: list[tuple[Any, ...]]) -> None:
    check_outcomes_agree(steps)


NORMAL, HIGH = Priority.NORMAL, Priority.HIGH
CALLS, SEND, ARRIVE, ANSWER = ("call", NORMAL, 4), ("send", 1), ("arrive",), ("answer",)


@pytest.mark.parametrize(
    "steps",
    [
        [CALLS, SEND, ("bad", 2), ANSWER],
        [CALLS, SEND, ("full",), ANSWER, ("cancel", 1), CALLS],
        [CALLS, ("cancel", 2), ("call", NORMAL, 2), SEND],
        [("offer", NORMAL, 1), CALLS, ("offer", NORMAL, 1), ("cancel", 0), ("cancel", 3), SEND],
        [CALLS, ("cancel", 3), ("call", HIGH, 4), ("cancel", 1)],
        [CALLS, SEND, ("call", HIGH, 4), ("cancel", 1), ARRIVE, ANSWER],
        [CALLS, SEND, ("cancel", 1), ("cut",), SEND, ARRIVE, ANSWER],
        [CALLS, SEND, ("cancel", 1), ("full",), ANSWER, CALLS, SEND],
        [CALLS, SEND, ARRIVE, ("cut",), SEND, ARRIVE, ANSWER],
        [CALLS, ("later",), CALLS, ("later",), ("expire",), SEND, CALLS],
        [CALLS, SEND, ("later",), ("later",), ("expire",), ARRIVE, ANSWER],
    ],
)
def test_outcomes_agree_if_some_calls_are_refused_cancelled_or_expire(steps: list[tuple[Any, ...]]) -> None:
    check_outcomes_agree(steps)


def test_calls_of_one_tick_share_an_offer_up_to_the_maximum() -> None:
    wire = Caller(coalesces=True)
    for number in range(CALLS_MAX + 1):
        wire.call(make_opaque(f"k{number}"))
    offers = [one[0] for one in wire.offers_made if isinstance(one, tuple)]
    assert offers[0] is offers[CALLS_MAX - 1] is not offers[CALLS_MAX]
    wire.settle()
    assert wire.outcome_count == 2, "each offer must report its outcome once"
    assert [ack.offset for ack in wire.results()] == list(range(CALLS_MAX + 1))
    assert [ack.dot.counter for ack in wire.results()] == list(range(1, CALLS_MAX + 2))


def test_large_or_late_call_and_call_after_an_offer_are_not_coalesced() -> None:
    wire = Caller(coalesces=True)
    wire.call(make_opaque("a"))
    wire.call(make_opaque("b", data=bytes(CALLS_BYTES_MAX)))
    wire.call(make_opaque("c"))
    wire.call(make_opaque("large", data=bytes(CALLS_BYTES_MAX + 1)))
    assert isinstance(wire.offers_made[3], Offer), "a large call must be a separate offer"
    wire.call(make_opaque("d"))
    wire.service.bench.now += CALLS_WINDOW_S
    wire.call(make_opaque("e"))
    wire.offer(make_opaque("f"))
    wire.call(make_opaque("g"))
    offers = [one[0] if isinstance(one, tuple) else one for one in wire.offers_made]
    a, b, c, _, d, e, g = offers
    assert a is b
    assert len({a, c, d, e, g}) == 5
    wire.settle()
    assert [key for key, _ in wire.logged().values()] == ["a", "b", "c", "large", "d", "e", "f", "g"]


def test_failed_producer_fails_every_call() -> None:
    wire = Caller(coalesces=True)
    for key in "abc":
        wire.call(make_opaque(key))
    wire.producer_state.fail(Refused(ErrorCode.FENCED, "another one"))
    assert [one.outcome.code for one in wire.wakers if isinstance(one.outcome, Refused)] == [
        ErrorCode.FENCED
    ] * 3
    assert wire.producer_state.offer_call(make_opaque("d"), RecordingWaker(), 0.0, wire) is None
