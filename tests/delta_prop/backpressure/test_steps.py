"""A sink whose capacity steps 10 -> 20 -> 5 -> 50 thousand a second: the source follows within 15 %."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from delta_prop.backpressure.controller import DepthLaw, DrainLaw
from tests.delta_prop.backpressure.simulated import HOLD_S, STEPS, noisy_steps, run, windows

if TYPE_CHECKING:
    from collections.abc import Callable

    from delta_prop.backpressure.controller import Law

MAILBOXES = (5_000, 20_000, 100_000)
TOLERANCE = 0.15


def stepped(law: Callable[[], Law], mailbox: int, seeds: int, *, lumpy: bool) -> tuple[float, float, float]:
    """The worst deviation from capacity, from what was drawn, and the share of windows outside."""
    deviations: list[tuple[float, float]] = []
    for seed in range(seeds):
        told = run(
            law(), capacity=noisy_steps(seed), seconds=HOLD_S * len(STEPS), mailbox=mailbox, lumpy=lumpy
        )
        assert not told.credit_exceeded
        deviations += [(abs(of_true - 1), abs(of_drawn - 1)) for of_true, of_drawn in windows(told)]
    outside = sum(of_true > TOLERANCE for of_true, _ in deviations) / len(deviations)
    worst_true, worst_drawn = (max(column) for column in zip(*deviations, strict=True))
    return worst_true, worst_drawn, outside


@pytest.mark.parametrize("lumpy", [False, True], ids=["smooth", "lumpy"])
def test_the_source_follows_the_capacity_of_a_pacing_sink(lumpy: bool, full: bool) -> None:
    seeds = 10 if full or not lumpy else 3
    print(f"\n{'lumpy' if lumpy else 'smooth'} sink, {seeds} seeds; windows of 1 s, 5 s after each step")
    print(f"{'law':>14} {'mailbox':>8} {'worst of true':>14} {'worst of drawn':>15} {'outside 15 %':>13}")
    for mailbox in MAILBOXES:
        ours, drawn, outside = stepped(DrainLaw, mailbox, seeds, lumpy=lumpy)
        print(f"{'drain':>14} {mailbox:8} {ours:14.1%} {drawn:15.1%} {outside:13.1%}")
        theirs, their_drawn, their_outside = stepped(DepthLaw, mailbox, seeds if full else 1, lumpy=lumpy)
        print(f"{'specification':>14} {mailbox:8} {theirs:14.1%} {their_drawn:15.1%} {their_outside:13.1%}")
        assert ours <= TOLERANCE
        assert outside == 0
        assert their_outside > 0.2  # the comparison that the choice of the law rests on
