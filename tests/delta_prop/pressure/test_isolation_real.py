"""A stalled and a failing sink next to a store, a cache and a callback, in real time, at half the peak load.

Runs with and without these two sinks alternate in slices. Other work on the machine disturbs both runs of a
pair, so the bound applies to the median of the pairs' ratios; if it is exceeded, more pairs are run, and all
pairs count.
"""

from __future__ import annotations

import gc
import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import anyio
import numpy as np
import pytest

from benchmarks._measure import table
from tests.delta_prop.pressure.open_loop import (
    MIB,
    ROWS,
    Calls,
    Load,
    Measurements,
    measure_pair,
    memory_bytes_max,
    peak_calls_per_s,
    rss_bytes,
)

if TYPE_CHECKING:
    from pathlib import Path

PAIRS, TRIES = 5, 6
"""Pairs of runs per try; tries until the ratios are within their bounds."""
P99_RATIO_MAX = 1.5
CPU_RATIO_MAX = 1.2
SAMPLES_MIN_FULL = 10_000


@dataclass(slots=True)
class RunPairs:
    """Pairs of runs: A without the disturbing sinks, B with them."""

    pairs: list[tuple[Measurements, Measurements]] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)

    def run(self, calls: Calls, path: Path, seconds: float, slices: int) -> None:
        """Run one more pair, at half of the current peak load."""
        number = len(self.pairs)
        peak_path = path / f"{number}-peak.db"
        load = Load(anyio.run(peak_calls_per_s, calls, peak_path, 0.25) / 2, seconds, slices)
        self.loads.append(load)
        self.pairs.append(measure_pair(load, calls, path, number))

    @property
    def rss_bytes_max(self) -> int:
        """Return the peak resident memory of the process."""
        return max(run.rss_bytes_max for pair in self.pairs for run in pair)

    def ratios(self) -> dict[str, list[float]]:
        """Return the ratios of B to A: p99 latency of each healthy sink, and CPU time per delta."""
        sinks = self.pairs[0][0].latencies_s
        latency_ratios = {name: [p99_ms(b, name) / p99_ms(a, name) for a, b in self.pairs] for name in sinks}
        return latency_ratios | {"cpu": [b.cpu_us_per_delta / a.cpu_us_per_delta for a, b in self.pairs]}

    def is_within_bounds(self) -> bool:
        """True if all medians are within their bounds."""
        return all(
            statistics.median(ratios) <= (CPU_RATIO_MAX if name == "cpu" else P99_RATIO_MAX)
            for name, ratios in self.ratios().items()
        )

    def table(self, title: str) -> str:
        """Return the table of pairs."""
        ratios = self.ratios()
        rows: list[list[str]] = []
        for number, (a, b) in enumerate(self.pairs):
            cells = [
                f"{p99_ms(a, name):.1f}/{p99_ms(b, name):.1f} {ratios[name][number]:.2f}"
                for name in a.latencies_s
            ]
            cpu = f"{a.cpu_us_per_delta:.0f}/{b.cpu_us_per_delta:.0f} {ratios['cpu'][number]:.2f}"
            disturbances = ", ".join(
                f"{name} lag {lag}, {failures} failures"
                for name, (lag, failures) in b.disturbing_sinks.items()
            )
            load = f"{number}: {self.loads[number].calls_per_s:.0f}/s"
            rows.append([load, *cells, cpu, disturbances])
        spread = [
            f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"
            for values in ratios.values()
        ]
        head = [
            f"pair: calls of {ROWS}",
            *(f"{name} p99 ms A/B" for name in list(ratios)[:-1]),
            "CPU us/delta A/B",
            "in B",
        ]
        return table(title, head, [*rows, ["median", *spread, ""]])


def p99_ms(run: Measurements, sink: str) -> float:
    return float(np.quantile(run.latencies_s[sink], 0.99)) * 1000


@pytest.mark.alone
def test_stalled_and_failing_sink_cost_others_little(tmp_path: Path, full: bool) -> None:
    seconds, slices = (6.0, 24) if full else (0.5, 4)
    calls = Calls.draw(0)
    pairs = RunPairs()
    gc.collect()
    gc.freeze()  # garbage collections leave out the objects of other tests
    try:
        rss_before = rss_bytes()
        for _ in range(TRIES):
            for _ in range(PAIRS):
                pairs.run(calls, tmp_path, seconds, slices)
            if pairs.is_within_bounds():
                break
    finally:
        gc.unfreeze()
    growth_bytes, growth_bytes_max = (
        pairs.rss_bytes_max - rss_before,
        max(memory_bytes_max(load) for load in pairs.loads),
    )
    samples = sum(len(latencies) for _, b in pairs.pairs for latencies in b.latencies_s.values())
    print(
        pairs.table(f"{len(pairs.pairs)} pairs of {seconds} s in {slices} slices, {samples} latencies in B")
        + f"memory: grew by {growth_bytes / MIB:.1f} MiB since before the first run, at most "
        f"{growth_bytes_max / MIB:.1f} MiB; log {pairs.pairs[-1][1].log_bytes / MIB:.1f} MiB"
    )
    assert growth_bytes <= growth_bytes_max
    assert samples >= SAMPLES_MIN_FULL or not full
    for _, b in pairs.pairs:  # both disturbing sinks kept stalling and failing
        assert b.disturbing_sinks["stalled"][0] >= b.deltas
        assert b.disturbing_sinks["failing"][1] > 3
    is_within = pairs.is_within_bounds()
    assert is_within, {name: statistics.median(ratios) for name, ratios in pairs.ratios().items()}
