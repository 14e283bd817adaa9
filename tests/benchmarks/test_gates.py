"""A quick check of speed in every test run: a publish far slower than usual is a defect on any machine.

Costs are measured in turns of an empty loop at the same moment; the bound is three times the usual cost.
"""

from __future__ import annotations

import anyio
import pytest

from benchmarks import mix
from benchmarks._measure import calibration_ns
from benchmarks._mixes import BY_ROW, ONE, Traffic

GATE = 3


@pytest.mark.parametrize(("traffic", "turns"), [(ONE[0], 50), (ONE[3], 50), (BY_ROW, 300)])
def test_embedded_publish_cost_stays_below_gate(traffic: Traffic, turns: int) -> None:
    def cost() -> float:
        turn_ns = calibration_ns()
        return 1e9 / anyio.run(mix.measure_embedded, traffic, 6_000) / turn_ns

    assert min(cost() for _ in range(2)) < GATE * turns
