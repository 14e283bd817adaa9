"""The source follows a pacing sink's capacity (10, 20, 5, 50 thousand per second) within 15 %.

The complete service in virtual time: the gate, the queue, the feed with merged calls of up to 1,000 deltas.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import anyio

from delta_prop import Propagator, Settings
from delta_prop.delivery.backpressure.pacer import Pacer
from delta_prop.delivery.pacing import PacingGate
from delta_prop.testing import run_virtual, virtual_world
from delta_prop_wire.frames import PressureLevel
from tests.delta_prop.pressure.pacing import AdmittedRates, WorkingSink, noisy_steps, publish_until
from tests.delta_prop.support import make_delta

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

    from delta_prop.api.settings import RateLaw

STEPS = (10_000, 20_000, 5_000, 50_000)
"""Capacities of the sink, one after the other, in deltas per second."""
SETTLE_S = 5
"""Time after each step in which the rate is not checked."""
TOLERANCE = 0.15
MAILBOXES = (5_000, 20_000, 100_000)
"""Bounds of the mailbox, in deltas."""


class PacingResult(NamedTuple):
    """Deviations of the admitted rate from the capacity, every 100 ms once settled, and maxima of the run."""

    deviations: list[float]
    in_flight_max: int
    pushed_lag_max: int

    @property
    def worst(self) -> float:
        return max(self.deviations)

    @property
    def outside_share(self) -> float:
        return sum(deviation > TOLERANCE for deviation in self.deviations) / len(self.deviations)


def run_paced(mailbox: int, seed: int, *, law: RateLaw = "drain", hold_s: float, batch: int) -> PacingResult:
    """Run once, with a demand that always exceeds the capacity."""
    settings = Settings(mailbox_deltas_max=mailbox, rate_law=law)

    async def main() -> PacingResult:
        admitted, sink = AdmittedRates(), WorkingSink("slow", noisy_steps(seed, STEPS, hold_s))
        async with Propagator(settings, world=virtual_world(seed)) as p:
            sink.observe(p)
            await p.attach(sink, pacing=True)
            await publish_until(p, admitted, until_s=hold_s * len(STEPS), batch=batch)
        deviations = [
            abs(rate / step - 1)
            for number, step in enumerate(STEPS)
            for rate in admitted.rates(number * hold_s + SETTLE_S, (number + 1) * hold_s)
        ]
        return PacingResult(deviations, sink.in_flight_max, sink.pushed_lag_max)

    return run_virtual(main)


def test_source_follows_a_sink_whose_capacity_changes(full: bool) -> None:
    # A run costs time per row; larger batches and shorter steps allow a run for each mailbox size.
    seeds, hold_s, batch = (10, 10.0, 100) if full else (1, 8.0, 500)
    print(f"\n{seeds} seeds, steps of {hold_s:g} s, batches of {batch}; windows of 1 s, 5 s after each step")
    print(f"{'law':>14} {'mailbox':>8} {'worst':>7} {'outside 15 %':>13} {'most in flight':>15}")
    for mailbox in MAILBOXES:
        laws: tuple[RateLaw, ...] = ("drain", "depth") if full or mailbox == 5_000 else ("drain",)
        for law in laws:
            runs = [run_paced(mailbox, seed, law=law, hold_s=hold_s, batch=batch) for seed in range(seeds)]
            worst, in_flight_max = max(run.worst for run in runs), max(run.in_flight_max for run in runs)
            outside_share = sum(run.outside_share for run in runs) / seeds
            print(f"{law:>14} {mailbox:8} {worst:7.1%} {outside_share:13.1%} {in_flight_max:15}")
            # The credit limit applies at any rate.
            assert 0 < in_flight_max <= mailbox
            assert max(run.pushed_lag_max for run in runs) <= mailbox
            if law == "drain":
                assert worst <= TOLERANCE
            else:
                assert outside_share > 0.2  # this comparison justifies the default law


# --- the gate without a pacing sink


def test_gate_without_a_pacing_sink_limits_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A slow sink that is not pacing does not limit the source: no credit and no token is counted."""
    counts: dict[str, int] = {}

    def count_calls(owner: type, name: str) -> None:
        function: Callable[..., object] = getattr(owner, name)

        def call(*arguments: object, **options: object) -> object:
            counts[name] = counts.get(name, 0) + 1
            return function(*arguments, **options)

        monkeypatch.setattr(owner, name, call)

    for owner, name in (
        (PacingGate, "admits"),
        (PacingGate, "note"),
        (Pacer, "admits"),
        (Pacer, "_find_holder"),
        (Pacer, "_refill"),
        (PacingGate, "_poll_log"),
    ):
        count_calls(owner, name)

    async def main() -> None:
        async with Propagator(world=virtual_world()) as p:
            await p.attach(WorkingSink("slow", [10.0]))
            counts.clear()
            for number in range(900):
                assert p.offer(make_delta(f"v{number}"), make_delta(f"w{number}")).acknowledged
            assert counts.pop("admits") == counts.pop("note") == 900
            # 900 small batches are 1.7 % of the log's bytes, so the log is polled once.
            assert counts == {"_poll_log": 1}
            counts.clear()
            receipts = [p.offer(make_delta(f"x{number}")) for number in range(1_000)]
            assert p.statistics().queue.depth == 0
            assert all(receipt.acknowledged for receipt in receipts)
            # The first offer of a tick is sent at once, the rest as one batch, so each function is called
            # twice; the deltas are less than 0.2 % of the log, so the log is not polled.
            assert counts == {"admits": 2, "note": 2}
            assert p.pressure().rate_limit is None
            assert p.pressure().level is PressureLevel.OK
            assert anyio.current_time() == 0
            await anyio.sleep(0.5)
            assert p.pressure().rate_limit is None

    run_virtual(main)
