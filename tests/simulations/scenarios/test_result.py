"""A result is unchanged by a round trip through JSON."""

from __future__ import annotations

import json

from delta_prop_simulations.scenarios.result import (
    Alternative,
    Latency,
    Result,
    Series,
    SinkResult,
    Verdict,
    result_from_json,
)


def test_result_round_trips_through_json() -> None:
    lag = Latency(3, {"p50": 0.1, "max": 2.0}, [(0.1, 2), (2.0, 1)])
    series = Series("lag", "s", [0.0, 1.0], [0.1, 2.0])
    alternative = Alternative(
        name="as it is",
        what="nothing changed",
        sinks=[SinkResult("index", 3, 1, 2.5, lag, [series])],
        series=[series],
        totals={"offered": 3},
        verdicts=[Verdict("P1", True, "all came"), Verdict("P7", None, "no corruption")],
        trace="abc",
        virtual_s=2.0,
        cpu_s=0.1,
    )
    result = Result("slow sink", "who notices?", 7, 2.0, [alternative])
    assert result_from_json(json.loads(json.dumps(result.to_json()))) == result
