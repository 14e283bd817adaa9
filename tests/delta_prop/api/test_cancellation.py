"""Many publishers that wait or are cancelled: the reported outcomes match the deliveries, each delta once."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import TYPE_CHECKING

import anyio
from hypothesis import given
from hypothesis import strategies as st

from delta_prop.api.settings import Settings
from delta_prop.calls.receipt import OfferState, Receipt
from delta_prop.testing import RecordedPropagator, run_propagator
from delta_prop_sinks import CallbackSink, TryAgain
from delta_prop_wire.errors import Refused
from tests.delta_prop.support import make_delta

if TYPE_CHECKING:
    from delta_prop.api.producer import Producer
    from delta_prop_wire.delta import Delta

PUBLISHERS = 40
SETTINGS = Settings(log_deltas_max=5, mailbox_deltas_max=3, pending_deltas_max=40, pending_timeout_s=3.0)


class Publishers:
    """Publishers that make one call each and record the reported outcome."""

    def __init__(self, p: RecordedPropagator, random: Random) -> None:
        self.p = p
        self.random = random
        self.producer: Producer = p.producer("shared")
        self.reported: dict[str, str] = {}
        self.offered: dict[str, Receipt] = {}

    async def publish_one(self, number: int) -> None:
        await anyio.sleep(self.random.random())
        key, parents = f"v{number}", ()
        if self.random.random() < 0.4:  # the parent is published later, or never
            parents = (self.random.randrange(2 * PUBLISHERS).to_bytes(16, "big"),)
        delta = make_delta(key, parents=parents, id=(PUBLISHERS + number).to_bytes(16, "big"))
        self.reported[key] = "cancelled"
        with anyio.move_on_after(self.random.choice((0.0, 0.01, 0.5, 1.0, 4.0, 100.0))):
            try:
                self.reported[key] = await self.publish_in_a_random_way(key, delta)
            except Refused:
                self.reported[key] = "refused"

    async def publish_in_a_random_way(self, key: str, delta: Delta) -> str:
        choice = self.random.randrange(4)
        timeout_s = self.random.choice((0.1, 1.0, 5.0))
        if choice == 0:
            await self.producer.publish(make_delta(key, parents=delta.parents), timeout_s=timeout_s)
        elif choice == 1:
            self.offered[key] = self.p.offer(delta)
            await self.offered[key]
        else:
            await self.p.publish(delta, timeout_s=timeout_s)
        return "acknowledged"


def test_reported_outcomes_match_delivered_deltas() -> None:
    outcomes: Counter[str] = Counter()

    @given(seed=st.integers(0, 2**32 - 1))
    def check(seed: int) -> None:
        _check(seed, outcomes)

    check()
    print(dict(outcomes))
    assert min(outcomes[outcome] for outcome in ("acknowledged", "refused", "cancelled", "withdrawn")) > 0


def _check(seed: int, outcomes: Counter[str]) -> None:
    random = Random(seed)

    async def main(p: RecordedPropagator) -> tuple[dict[str, str], dict[str, Receipt], list[str]]:
        async def slow(_offset: int, _delta: Delta) -> None:
            await anyio.sleep(random.random() * 0.05)
            if random.random() < 0.1:
                raise TryAgain("now and then")

        await p.attach(CallbackSink(slow))
        publishers = Publishers(p, random)
        async with anyio.create_task_group() as tasks:
            for number in range(PUBLISHERS):
                tasks.start_soon(publishers.publish_one, number)
        await p.settle()
        publishers.producer.resend()
        await p.settle()
        await anyio.sleep(4)  # pending deltas time out
        assert p.statistics().pending.pending_deltas == 0
        assert (p.statistics().queue.depth, publishers.producer.in_flight_batches) == (0, 0)
        return publishers.reported, publishers.offered, p.recorder.vector_ids

    reported, offered, delivered = run_propagator(main, SETTINGS, seed=seed)
    assert max(Counter(delivered).values(), default=1) == 1
    for key, outcome in reported.items():
        assert (key in delivered) == (outcome == "acknowledged"), (key, outcome)
    for key, receipt in offered.items():
        assert (key in delivered) == (receipt.state is OfferState.ACKNOWLEDGED), key
    assert set(delivered) <= set(reported)
    outcomes.update(reported.values())
    outcomes.update(receipt.state.value for receipt in offered.values())
