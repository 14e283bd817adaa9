"""A quick check of speed in every test run: a publish far slower than usual is a defect on any machine.

Costs are measured in turns of an empty loop at the same moment; the bound is three times the usual cost.
"""

from __future__ import annotations

import anyio
import pytest

from benchmarks import mix
from benchmarks._measure import calibration_ns
from benchmarks.mix import BY_ROW, ONE_KIND, Traffic

GATE = 3


@pytest.mark.parametrize(("traffic", "usual_turns"), [(ONE_KIND[0], 50), (ONE_KIND[3], 50), (BY_ROW, 300)])
def test_embedded_publish_cost_stays_below_gate(traffic: Traffic, usual_turns: int) -> None:
    def cost_in_turns() -> float:
        turn_ns = calibration_ns()
        return 1e9 / anyio.run(mix.measure_embedded, traffic, 6_000) / turn_ns

    assert min(cost_in_turns() for _ in range(2)) < GATE * usual_turns
