"""A sink's capacity steps 10 -> 20 -> 5 -> 50 thousand deltas per second: the source follows within 15 %."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from delta_prop.delivery.backpressure.controller import DepthLaw, DrainLaw
from tests.delta_prop.delivery.backpressure.simulated_sinks import (
    CAPACITIES,
    HOLD_S,
    noisy_steps,
    simulate,
    window_ratios,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from delta_prop.delivery.backpressure.controller import Law

MAILBOX_SIZES = (5_000, 20_000, 100_000)
TOLERANCE = 0.15


def simulate_steps(
    make_law: Callable[[], Law], mailbox_deltas: int, seed_count: int, *, bursty: bool
) -> tuple[float, float, float]:
    """Return the worst deviations from nominal and actual (noisy) capacity, and the share outside 15 %."""
    deviations: list[tuple[float, float]] = []
    for seed in range(seed_count):
        record = simulate(
            make_law(),
            capacity=noisy_steps(seed),
            seconds=HOLD_S * len(CAPACITIES),
            mailbox_deltas=mailbox_deltas,
            bursty=bursty,
        )
        assert not record.credit_exceeded
        deviations += [
            (abs(of_nominal - 1), abs(of_actual - 1)) for of_nominal, of_actual in window_ratios(record)
        ]
    outside_share = sum(of_nominal > TOLERANCE for of_nominal, _ in deviations) / len(deviations)
    worst_of_nominal, worst_of_actual = (max(column) for column in zip(*deviations, strict=True))
    return worst_of_nominal, worst_of_actual, outside_share


@pytest.mark.parametrize("bursty", [False, True], ids=["smooth", "bursty"])
def test_source_follows_stepped_capacity_of_pacing_sink(bursty: bool, full: bool) -> None:
    seed_count = 10 if full or not bursty else 3
    print(f"\n{'bursty' if bursty else 'smooth'} sink, {seed_count} seeds; 1 s windows from 5 s after a step")
    print(f"{'law':>14} {'mailbox':>8} {'worst, nominal':>14} {'worst, actual':>15} {'outside 15 %':>13}")
    for mailbox in MAILBOX_SIZES:
        drain_worst, drain_of_actual, outside_share = simulate_steps(
            DrainLaw, mailbox, seed_count, bursty=bursty
        )
        print(f"{'drain':>14} {mailbox:8} {drain_worst:14.1%} {drain_of_actual:15.1%} {outside_share:13.1%}")
        depth_worst, depth_of_actual, depth_outside = simulate_steps(
            DepthLaw, mailbox, seed_count if full else 1, bursty=bursty
        )
        print(f"{'depth':>14} {mailbox:8} {depth_worst:14.1%} {depth_of_actual:15.1%} {depth_outside:13.1%}")
        assert drain_worst <= TOLERANCE
        assert outside_share == 0
        assert depth_outside > 0.2  # the depth law often misses the capacity, so it is not the default
