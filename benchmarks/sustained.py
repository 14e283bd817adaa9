"""Runs a minute at 70 % of the peak, and compares its memory and latencies with those of short runs.

Measured from publish to receive, against `delta-prop serve`, with one consumer and 100 deltas per call. The
peak is measured first; then short runs at 70 % of the peak, then the long one, while the server's memory is
sampled. The result is the ratio of the long run to the short ones.
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from benchmarks._arguments import bounded_float
from benchmarks._measure import format_number, table
from benchmarks._peers_contract import Peer
from benchmarks._peers_ours import Ours
from benchmarks._peers_scenes import Measurement, Scene, measure
from benchmarks._results import Goal, Results, options_of

PEAK_SHARE = 0.7
BATCH = 100
SHORT_S = 3.0
WARM_SHARE = 1 / 3
"""The share of the long run that warms up, until bounded buffers are full."""
SAMPLE_S = 0.5


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, write; return the exit status."""
    parser = options_of("sustained", __doc__, rounds=3)
    parser.option("--seconds", bounded_float(3, 86_400), 60.0, "duration of the long run")
    given = parser.parse_args(arguments)
    seconds = min(given.seconds, 15.0) if given.quick else given.seconds
    with Ours().running() as server:
        peaks = [measure(server, Scene("peak", 1), f"peak{turn}") for turn in range(given.rounds)]
        peak = statistics.median(one.deltas_a_second for one in peaks)
        print(f"peak: {peak:,.0f}/s", file=sys.stderr)
        short_runs = [publish_steadily(server, SHORT_S, peak, f"short{turn}") for turn in range(given.rounds)]
        with sampled_memory(server) as memory:
            long = publish_steadily(server, seconds, peak, "long")
    return report(peaks, short_runs, long, memory, seconds).finish(given.json)


def publish_steadily(peer: Peer, seconds: float, peak: float, topic: str) -> Measurement:
    """Publish at `PEAK_SHARE` of the peak, regardless of acknowledgements."""
    rate = PEAK_SHARE * peak / BATCH
    scene = Scene("steady", 1, batch=BATCH, rate=rate, seconds_max=seconds, sampled=BATCH)
    measured = measure(peer, scene, topic)
    print(
        f"{seconds:.0f} s at {measured.deltas_a_second:,.0f}/s: p50 {measured.latency_p50_us:,.0f} "
        f"p99 {measured.latency_p99_us:,.0f} µs",
        file=sys.stderr,
    )
    return measured


@contextmanager
def sampled_memory(peer: Peer) -> Iterator[list[tuple[float, float]]]:
    """Sample the memory of a server's processes during a run: seconds since its start, MB."""
    samples: list[tuple[float, float]] = []
    began, stopped = time.monotonic(), threading.Event()

    def sample() -> None:
        while not stopped.wait(SAMPLE_S):
            memory_mb = sum(private_mb(process.pid) for process in peer.processes)
            samples.append((time.monotonic() - began, memory_mb))

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        stopped.set()
        thread.join()


def private_mb(process_id: int) -> float:
    """Return the anonymous memory of a process, MB."""
    lines = Path(f"/proc/{process_id}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:")) / 1024


def growth(samples: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return, after the warm-up: the last quarter over the first; MB per minute by a linear fit."""
    warm = samples[int(len(samples) * WARM_SHARE) :]
    memory_mb = [mb for _, mb in warm]
    quarter = max(len(memory_mb) // 4, 1)
    slope = float(np.polyfit([at for at, _ in warm], memory_mb, 1)[0])
    return statistics.fmean(memory_mb[-quarter:]) / statistics.fmean(memory_mb[:quarter]), slope * 60


def report(
    peaks: Sequence[Measurement],
    short_runs: Sequence[Measurement],
    long: Measurement,
    samples: Sequence[tuple[float, float]],
    seconds: float,
) -> Results:
    """Return table, figures, goals."""
    results = Results("sustained")
    rows = []
    for name, runs in (("peak", peaks), (f"{SHORT_S:.0f} s", short_runs), (f"{seconds:.0f} s", [long])):
        figures = [
            results.add_figure(
                f"{name}: {what}", [getattr(one, field) for one in runs], unit, less=unit != "deltas/s"
            )
            for what, field, unit in (
                ("rate", "deltas_a_second", "deltas/s"),
                ("p50", "latency_p50_us", "µs"),
                ("p99", "latency_p99_us", "µs"),
                ("server CPU", "server_cpu_us", "µs a delta"),
            )
        ]
        rows.append((name, *(format_number(figure.median) for figure in figures)))
    header = ("", "deltas/s", "received p50 µs", "p99", "server CPU µs a delta")
    results.tables.append(
        table(f"at {PEAK_SHARE:.0%} of the peak, {BATCH} a call, one consumer", header, rows)
    )
    ratio, per_minute = growth(samples)
    results.add_figure("memory: last quarter / first, once warm", [ratio], "×", less=True)
    results.add_figure("memory: growth", [per_minute], "MB a minute", less=True)
    results.notes.append(
        f"server memory: {samples[0][1]:.0f} MB at the start, {samples[-1][1]:.0f} MB at the end; "
        f"{per_minute:+.1f} MB a minute once warm"
    )
    results.more["memory"] = list(samples)
    results.add_goal(Goal("", "memory, last quarter / first, once warm", 1.05, less=True), [ratio])
    p99_ratios = [long.latency_p99_us / one.latency_p99_us for one in short_runs]
    results.add_goal(Goal("", f"p99: {seconds:.0f} s / {SHORT_S:.0f} s", 3.0, 1.5, less=True), p99_ratios)
    lost = sum(one.lost + one.twice for one in (*peaks, *short_runs, long))
    if lost:
        results.failures.append(f"{lost} deltas were lost, or came twice")
    return results


if __name__ == "__main__":
    sys.exit(main())
