"""ProducerState against the real pipeline: each delta has one outcome, in order, whatever is lost."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from delta_prop.calls.outcomes import PublishAck
from delta_prop.client.errors import Reconnect
from delta_prop.client.offer import Offer
from delta_prop.client.producer_state import ProducerState
from delta_prop_wire.delta import Delta, Priority, create
from delta_prop_wire.errors import Refused
from delta_prop_wire.frames import Ack, BatchFrame
from delta_prop_wire.spec import ErrorCode
from tests.delta_prop.client.pipeline_service import PipelineService


class Recorder:
    """Listener that records the outcome of the offer with a number."""

    def __init__(self, outcomes: dict[int, PublishAck | Refused], number: int) -> None:
        self.outcomes = outcomes
        self.number = number

    def on_outcome(self, outcome: PublishAck | Refused) -> None:
        assert self.number not in self.outcomes, "an offer must have only one outcome"
        self.outcomes[self.number] = outcome


class Wire:
    """A producer's state, a service, the frames between them, and a record of all outcomes."""

    def __init__(self, name: str = "p", service: PipelineService | None = None) -> None:
        self.producer_state = ProducerState(name)
        self.service = service or PipelineService()
        self.in_transit: list[BatchFrame] = []
        self.outcomes: dict[int, PublishAck | Refused] = {}
        self.offers: list[Offer] = []
        self.offered_deltas: list[list[Delta]] = []  # of each offer
        self.connect()

    def connect(self) -> None:
        self.producer_state.on_disconnect()
        self.in_transit.clear()
        self.service.connect()
        self.producer_state.on_welcome(
            self.service.hello(self.producer_state.claim_origins()), same_address=True
        )

    def offer(self, *deltas: Delta, **more: Any) -> Offer:
        number = len(self.offers)

        offer = Offer(deltas[0].priority, list(deltas), Recorder(self.outcomes, number), **more)
        self.producer_state.offer(offer, self.service.bench.now)
        self.offers.append(offer)
        self.offered_deltas.append(list(deltas))
        return offer

    def send(self, frames_max: int = 1_000) -> None:
        claims = self.producer_state.claim_new_origins()
        if claims:
            self.producer_state.on_welcome(self.service.hello(claims), same_address=True)
        for _ in range(frames_max):
            frame = self.producer_state.next_frame(self.service.bench.now)
            if frame is None:
                return
            self.in_transit.append(frame)

    def arrive(self, refuse: Refused | None = None) -> None:
        if self.in_transit:
            self.service.receive(self.in_transit.pop(0), refuse)

    def answer(self) -> None:
        if not self.service.answers:
            return
        answer = self.service.answers.popleft()
        try:
            if isinstance(answer, Ack):
                self.producer_state.on_ack(answer)
            else:
                self.producer_state.on_nack(answer, self.service.bench.now)
        except Reconnect:
            self.connect()

    def settle(self) -> None:
        """Deliver frames and answers until all offers have outcomes."""
        for _ in range(300):
            self.service.bench.now += 1.0
            self.send()
            while self.in_transit:
                self.arrive()
            self.service.bench.pipeline.tick(self.service.bench.now)
            while self.service.answers:
                self.answer()
            if not self.producer_state.in_flight_offers:
                return
        raise AssertionError(f"{self.producer_state.in_flight_offers} offers have no outcome")

    def logged(self) -> dict[int, tuple[str, tuple[int, int]]]:
        """Return vector id and dot of each logged row, by offset."""
        return {
            logged_batch.offset + row: (logged_batch.batch.keys[row], tuple(logged_batch.batch.dot(row)))
            for logged_batch in self.service.bench.routed
            if not logged_batch.batch.is_control
            for row in range(logged_batch.count)
        }


def make_delta(key: str, **more: Any) -> Delta:
    return Delta(key, create([1.0, 2.0]), **more)


def queue_full() -> Refused:
    return Refused(ErrorCode.QUEUE_FULL, "full", retry_after_ms=5)


def check_outcomes(wire: Wire) -> None:
    """Check that every offer has an outcome, and that the log has each acknowledged row exactly once."""
    logged = wire.logged()
    acknowledged: dict[int, str] = {}
    assert set(wire.outcomes) == set(range(len(wire.offers)))
    for number, outcome in wire.outcomes.items():
        if isinstance(outcome, Refused):
            continue
        assert outcome.offset is not None
        assert outcome.dot is not None
        assert not outcome.duplicates
        for row, delta in enumerate(wire.offered_deltas[number]):
            assert logged[outcome.offset + row] == (
                delta.vector_id,
                (outcome.dot.origin, outcome.dot.counter + row),
            )
            assert outcome.offset + row not in acknowledged
            acknowledged[outcome.offset + row] = delta.vector_id
    assert set(acknowledged) == set(logged), "the log must have exactly the acknowledged rows"


STEPS = st.one_of(
    st.tuples(
        st.just("offer"),
        st.sampled_from(list(Priority)),
        st.lists(st.sampled_from("abcd"), min_size=1, max_size=3),
    ),
    st.tuples(st.just("send"), st.integers(1, 3)),
    st.sampled_from(
        [("arrive",), ("arrive",), ("arrive",), ("full",), ("answer",), ("answer",), ("cut",), ("later",)]
    ),
)


@given(st.lists(STEPS, max_size=60))
def test_every_delta_has_one_outcome_and_one_offset_in_order(steps: list[tuple[Any, ...]]) -> None:
    wire = Wire()
    for step in steps:
        match step:
            case ("offer", priority, keys):
                wire.offer(*(make_delta(key, priority=priority) for key in keys))
            case ("send", frames):
                wire.send(frames)
            case ("arrive",):
                wire.arrive()
            case ("full",):
                wire.arrive(queue_full())
            case ("answer",):
                wire.answer()
            case ("cut",):
                wire.connect()
            case ("later",):
                wire.service.bench.now += 0.01
    wire.settle()
    check_outcomes(wire)
    offsets_by_key = {}
    for number, deltas in enumerate(wire.offered_deltas):
        for row, delta in enumerate(deltas):
            outcome = wire.outcomes[number]
            assert isinstance(outcome, PublishAck)
            assert outcome.offset is not None
            offsets_by_key.setdefault(delta.vector_id, []).append(outcome.offset + row)
    for key, offsets in offsets_by_key.items():
        assert offsets == sorted(offsets), f"{key}: a vector's deltas must keep the order of the calls"
