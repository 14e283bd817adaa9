"""A subscriber that stops reading does not slow twenty others at half of the peak rate, in real time.

Runs with and without the stalled subscriber alternate. Other processes on the machine disturb both equally,
so the measure is the median of the ratios; while it is above its bound, more pairs are run, and all count.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import pytest

from delta_prop_wire.delta import AckLevel, make_origin
from delta_prop_wire.frames import BatchFrame, Start, StartAt
from tests.delta_prop.crowd.open_loop import ROWS, Client, Load, LoadResult, median_ratio
from tests.delta_prop.server.process import served

if TYPE_CHECKING:
    from pathlib import Path

    from tests.delta_prop.server.process import Served

SUBSCRIBERS = 20
PAIRS, TRIES = 5, 3
"""Pairs of runs per try; tries until the measure is within its bounds."""
P99_RATIO_MAX = 1.5
CPU_RATIO_MAX = 1.2
MEMORY_BYTES_MAX = 64 * 1024 * 1024
SAMPLES_MIN = 10_000


class Measurement(NamedTuple):
    """A run, and the server's CPU time per delta in microseconds."""

    run: LoadResult
    cpu_us: float


@pytest.mark.alone
def test_stalled_subscriber_slows_nobody_and_gets_everything(tmp_path: Path, full: bool) -> None:
    seconds = 6.0 if full else 0.7
    with served(tmp_path / "data", "--read-level", "logged") as server:
        load = Load(server.port, make_origin(41, 2), SUBSCRIBERS, AckLevel.LOGGED)
        peak = load.run(1.0, None)
        rate = peak.frames / peak.seconds / 2
        measure(server, load, seconds, rate)
        before = server.rss_bytes()
        pairs: list[tuple[Measurement, Measurement]] = []
        while len(pairs) < PAIRS * TRIES or sample_count(pairs) < SAMPLES_MIN:
            pairs += [measure_pair(server, load, seconds, rate) for _ in range(PAIRS)]
            if is_within_bounds(pairs) and sample_count(pairs) >= SAMPLES_MIN:
                break
        growth_bytes = server.rss_bytes() - before
        print(format_results(pairs, rate, growth_bytes))
        assert is_within_bounds(pairs), format_results(pairs, rate, growth_bytes)
        assert growth_bytes <= MEMORY_BYTES_MAX
        assert sample_count(pairs) >= SAMPLES_MIN
        load.close()


def measure_pair(server: Served, load: Load, seconds: float, rate: float) -> tuple[Measurement, Measurement]:
    without = measure(server, load, seconds, rate)
    stalled = Client(server.port)
    stalled.subscribe(Start(StartAt.LATEST))
    with_stalled = measure(server, load, seconds, rate)
    offsets: list[int] = []
    while len(offsets) < with_stalled.run.frames:
        frame = stalled.next()
        if isinstance(frame, BatchFrame):
            offsets.append(frame.sequence)
    assert offsets == list(range(offsets[0], offsets[0] + ROWS * with_stalled.run.frames, ROWS))
    stalled.close()
    return without, with_stalled


def measure(server: Served, load: Load, seconds: float, rate: float) -> Measurement:
    before = server.loop_cpu_s()
    run = load.run(seconds, rate)
    return Measurement(run, (server.loop_cpu_s() - before) * 1e6 / (run.frames * ROWS))


def sample_count(pairs: list[tuple[Measurement, Measurement]]) -> int:
    return sum(len(measurement.run.latencies_s) for pair in pairs for measurement in pair)


def is_within_bounds(pairs: list[tuple[Measurement, Measurement]]) -> bool:
    p99, cpu = ratios(pairs)
    return p99 <= P99_RATIO_MAX and cpu <= CPU_RATIO_MAX


def ratios(pairs: list[tuple[Measurement, Measurement]]) -> tuple[float, float]:
    p99 = median_ratio([(a.run.p99_s, b.run.p99_s) for a, b in pairs])
    return p99, median_ratio([(a.cpu_us, b.cpu_us) for a, b in pairs])


def format_results(pairs: list[tuple[Measurement, Measurement]], rate: float, growth_bytes: int) -> str:
    p99, cpu = ratios(pairs)
    rows = [
        f"p99 {a.run.p99_s * 1e3:.1f} / {b.run.p99_s * 1e3:.1f} ms, CPU {a.cpu_us:.2f} / {b.cpu_us:.2f} us"
        for a, b in pairs
    ]
    title = f"{SUBSCRIBERS} subscribers, {rate * ROWS:,.0f} deltas/s: p99 x {p99:.2f}, CPU x {cpu:.2f}"
    return "\n".join([f"{title}, memory + {growth_bytes / 2**20:.0f} MiB", *rows])
