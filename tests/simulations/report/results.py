"""A sample result with every feature: names to escape, empty series, verdicts of each kind."""

from __future__ import annotations

from math import nan

from delta_prop_simulations.scenarios.result import Alternative, Latency, Result, Series, SinkResult, Verdict

NASTY = "<b>&\"'"


def latency(scale_s: float) -> Latency:
    buckets = [(scale_s * 2**power, 100 // (power + 1)) for power in range(6)]
    quantiles = {"p50": scale_s, "p90": scale_s * 8, "p99": scale_s * 16, "max": scale_s * 32}
    return Latency(sum(count for _, count in buckets), quantiles, buckets)


def sink(name: str, number: int) -> SinkResult:
    times = [float(second) for second in range(1, 61)]
    lag = Series("lag", "s", times, [0.01 * (number + 1) * (1 + second % 7) for second in range(60)])
    return SinkResult(name, 60_000, number, 990.5, latency(0.01 * (number + 1)), [lag])


def alternative(number: int, sink_count: int) -> Alternative:
    times = [float(second) for second in range(1, 61)]
    values = [nan if second in (7, 8) else 1_000.0 + second for second in range(60)]
    return Alternative(
        name=f"{NASTY} {number}",
        what="as it is" if number else NASTY,
        sinks=[sink(f"sink-{index} {NASTY}", index) for index in range(sink_count)],
        series=[
            Series("throughput", "deltas/s", times, values),
            Series("memory", "bytes", times, [1e6 * (second + 1) for second in range(60)]),
            Series("nothing yet", "deltas", [], []),
        ],
        totals={
            "offered": 60_000.0,
            "refused": 0.0,
            "refused QUEUE_FULL": 3.0 * number,
            "queue_peak_deltas": 9.0,
        },
        verdicts=[
            Verdict("P1", True, "all came"),
            Verdict("P3", number != 1, f"seen {NASTY}"),
            Verdict("P7", None, "nothing was corrupted"),
        ],
        trace="0" * 32,
        virtual_s=60.0,
        cpu_s=1.5,
        acks=latency(0.002) if number else Latency(),
    )


def result(alternative_count: int = 3, sink_count: int = 2) -> Result:
    alternatives = [alternative(number, sink_count) for number in range(alternative_count)]
    return Result(f"{NASTY} scenario", f"About {NASTY}.", 7, 60.0, alternatives)
