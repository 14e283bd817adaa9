"""Compares the embedded service with the specification: four configurations, and a sweep of batch sizes.

Rounds are interleaved; a rate counts until every sink has applied the last delta. Figures are at ack level
`logged`, where an acknowledgement means that the page cache has the delta, and at `durable`.
"""

from __future__ import annotations

import gc
import sys
import tempfile
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TypeAlias

import anyio

from benchmarks._arguments import bounded_float
from benchmarks._embedded import DIMENSION, KEYS, NUMBERS, UNINDEXED_ROWS_MAX, Bench, CallTimings, bare_rate
from benchmarks._embedded_link import Replica
from benchmarks._measure import Figure, percentile, table
from benchmarks._results import Goal, Results, options_of
from delta_prop_sinks import IndexSink, StorageSink
from delta_prop_wire.delta import AckLevel

DELAY_MS = 40.0
"""Delay of the link to the far replica, each way."""


@dataclass(frozen=True, slots=True)
class Scene:
    """One measurement.

    `bench`: a key of `BENCHES`; `size`: deltas per call. `claimed`, `claimed_us`: the specification's deltas
    per second, and its latency. `in_flight`: the number of concurrent callers at level logged, and at level
    durable. `goals`: the target and the moonshot, as multiples of the claimed rate.
    """

    name: str
    bench: str
    size: int
    claimed: int
    claimed_us: int | None
    in_flight: tuple[int, int]
    goals: tuple[float, float] | None


BENCHES: dict[str, tuple[str, ...]] = {  # the sinks of each bench; a replica is the target of forwarding
    "single sink": ("callback",),
    "storage": ("storage",),
    "storage + index": ("storage", "index"),
    "storage + linked index": ("storage", "linked"),
    "full with replication": ("storage", "index", "cache", "replica"),
    "geo": ("storage", "far replica"),
}
SCENES = (
    Scene("single sink", "single sink", 100, 500_000, None, (8, 32), (2.6, 4.0)),
    Scene("storage + index", "storage + index", 100, 100_000, None, (4, 32), (5.0, 8.0)),
    Scene("storage + linked index", "storage + linked index", 100, 100_000, None, (4, 32), None),
    Scene("full with replication", "full with replication", 100, 50_000, None, (4, 32), (3.0, 5.0)),
    Scene("geo", "geo", 100, 10_000, None, (4, 32), None),
    Scene("batch 1", "storage", 1, 50_000, 175, (8, 64), (1.0, 1.5)),
    Scene("batch 10", "storage", 10, 200_000, 200, (4, 64), (0.75, 1.5)),
    Scene("batch 100", "storage", 100, 500_000, 500, (2, 32), (1.1, 1.5)),
    Scene("batch 1000", "storage", 1_000, 800_000, 2_000, (1, 8), (1.3, 1.5)),
)
LEVELS = (AckLevel.LOGGED, AckLevel.DURABLE)


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, write; return the exit status."""
    parser = options_of("pipeline", __doc__, rounds=5, rounds_min=5)
    parser.option("--seconds", bounded_float(0.001, 3_600), 0.25, "duration of each measurement in a round")
    parser.add_only(
        [scene.name for scene in SCENES], "the scene of this name, or all scenes whose name contains PART"
    )
    parser.add_argument("--uvloop", action="store_true", help="run on uvloop, which must be installed")
    given = parser.parse_args(arguments)
    if given.uvloop and find_spec("uvloop") is None:
        parser.error("--uvloop: uvloop is not installed: install it, or omit the option")
    seconds = min(given.seconds, 0.05) if given.quick else given.seconds
    scenes = [scene for scene in SCENES if scene.name in given.only]
    results = Results("pipeline")
    runs_by_scene = measure(results, scenes, given.rounds, seconds, uvloop=given.uvloop)
    _report(results, scenes, runs_by_scene)
    results.notes += [
        f"a delta: {NUMBERS} of {DIMENSION} float32, {KEYS:,} vectors; the log in a directory; calls of one "
        "delta by publish(), of more by publish_many() with indices; "
        f"{'uvloop' if given.uvloop else 'asyncio'}",
        "the index is exact: it has no unindexed rows, so its bound of stale rows is 0; a linked index "
        "(HNSW) paces the source at 80 % of its bound",
        "a bare loop writes the same numbers with a checksum to the page cache and sets them in memory, "
        "without dots, order, heads, callers or a store; it is the limit of this machine in this run",
        "a rate counts until every sink has applied the last delta; storage writes back, so the file lags; "
        "gc.freeze() after the start",
        f"geo: a real replica over a link of {DELAY_MS:.0f} ms each way",
    ]
    return results.finish(given.json)


RunsByLevel: TypeAlias = dict[str, dict[AckLevel, list[CallTimings]]]
"""The runs of each scene, by level."""


def measure(
    results: Results, scenes: list[Scene], rounds: int, seconds: float, *, uvloop: bool = False
) -> RunsByLevel:
    """Measure in interleaved rounds.

    Replicas are started before the event loop and stopped after it, however it ends.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="delta-prop-replica-")))
        benches = {
            name: _make_bench(name, folder, stack) for name in dict.fromkeys(scene.bench for scene in scenes)
        }
        work = partial(
            _measure_rounds, results, scenes, benches, folder=folder, rounds=rounds, seconds=seconds
        )
        return anyio.run(work, backend_options={"use_uvloop": uvloop})


async def _measure_rounds(
    results: Results,
    scenes: list[Scene],
    unopened: dict[str, Bench],
    *,
    folder: Path,
    rounds: int,
    seconds: float,
) -> RunsByLevel:
    runs_by_scene: RunsByLevel = {scene.name: {level: [] for level in LEVELS} for scene in scenes}
    bare: dict[int, list[float]] = {scene.size: [] for scene in scenes}
    async with AsyncExitStack() as stack:
        benches = {name: await stack.enter_async_context(bench) for name, bench in unopened.items()}
        for scene in scenes:  # the warm-up pays the costs that all scenes share
            await benches[scene.bench].closed_loop(
                scene.size, AckLevel.LOGGED, in_flight=1, seconds=seconds / 4
            )
        gc.collect()
        gc.freeze()
        for _ in range(rounds):
            for size, rates in bare.items():
                rates.append(bare_rate(size, seconds, folder))
            for scene in scenes:
                for level, flight in zip(LEVELS, scene.in_flight, strict=True):
                    timings = await benches[scene.bench].closed_loop(
                        scene.size, level, in_flight=flight, seconds=seconds
                    )
                    runs_by_scene[scene.name][level].append(timings)
        for name, bench in benches.items():
            _report_lag(results, name, bench)
    for size, rates in bare.items():
        results.add_figure(bare_name(size), rates, "deltas/s")
    return runs_by_scene


def bare_name(size: int) -> str:
    """Return the name of the figure of a loop without a service."""
    return f"bare loop, {size} a call"


def _make_bench(name: str, folder: Path, stack: ExitStack) -> Bench:
    sinks, replica = BENCHES[name], None
    if sinks[-1].endswith("replica"):
        delay_ms = DELAY_MS if sinks[-1].startswith("far") else 0.0
        (folder / name).mkdir()
        port = stack.enter_context(Replica(delay_ms).running(folder / name)).port
        sinks, replica = sinks[:-1], f"127.0.0.1:{port}"
    return Bench(*sinks, replica=replica)


def _report_lag(results: Results, name: str, bench: Bench) -> None:
    """Note how far the storage file, and the index graph, lag behind the applied offset."""
    for sink in bench.sinks.values():
        if isinstance(sink, StorageSink):
            state = sink.statistics()
            results.notes.append(
                f"{name}: at the end the file lagged {state.applied_offset - state.committed_offset:,} "
                f"deltas, with {state.dirty_rows:,} rows to write; a flush took "
                f"{state.last_flush_s * 1000:.0f} ms"
            )
        elif isinstance(sink, IndexSink) and (graphs := sink.statistics().hnsw) is not None:
            highest = graphs.unindexed_rows_highest
            results.notes.append(
                f"{name}: up to {highest:,} rows were unindexed at once (a search scores them exactly); the "
                f"bound is {UNINDEXED_ROWS_MAX:,}; {graphs.added_rows:,} rows were indexed"
            )
            if highest > UNINDEXED_ROWS_MAX:
                results.failures.append(f"{name}: the index broke its bound of unindexed rows")


def _report(results: Results, scenes: list[Scene], runs_by_scene: RunsByLevel) -> None:
    rows = []
    for scene in scenes:
        for level, flight in zip(LEVELS, scene.in_flight, strict=True):
            runs = runs_by_scene[scene.name][level]
            name = f"{scene.name}, {level.name.lower()}"
            rates = [one.rate for one in runs]
            rate = results.add_figure(f"{name}: rate", rates, "deltas/s")
            cpu_us = [one.cpu_s / one.deltas * 1e6 for one in runs]
            cpu = results.add_figure(f"{name}: CPU", cpu_us, "µs a delta", less=True)
            latencies = [_latency(results, name, which, runs) for which in ("acknowledged", "visible")]
            if level is AckLevel.LOGGED:
                _judge(results, scene, runs)
            claimed = f"{scene.claimed:,}" + (f" at {scene.claimed_us:,}" if scene.claimed_us else "")
            rows.append(
                (
                    scene.name,
                    level.name.lower(),
                    f"{flight} × {scene.size}",
                    f"{rate.median:,.0f} ({rate.low:,.0f}-{rate.high:,.0f})",
                    f"{rate.median / scene.claimed:.2f}",
                    f"{rate.median / results.figures[bare_name(scene.size)]['median']:.0%}",
                    f"{cpu.median:.2f}",
                    *latencies,
                    claimed,
                )
            )
    header = (
        "configuration",
        "acknowledged",
        "in flight",
        "deltas/s, median (rounds)",
        "×",
        "of a bare loop",
        "CPU µs a delta",
        "µs until acknowledged, p50 / p99",
        "µs until all sinks have it",
        "specification, at µs",
    )
    results.tables.append(table("deltas a second, until every sink has applied the last one", header, rows))


def _latency(results: Results, name: str, which: str, runs: list[CallTimings]) -> str:
    figures: list[Figure] = []
    for share in (50, 99):
        times = [percentile(getattr(one, which), share / 100) * 1e6 for one in runs]
        figures.append(results.add_figure(f"{name}: {which}, p{share}", times, "µs", less=True))
    return " / ".join(f"{figure.median:,.0f}" for figure in figures)


def _judge(results: Results, scene: Scene, runs: list[CallTimings]) -> None:
    """Judge a scene at level logged; a scene of the sweep also by its latency."""
    if scene.goals is None:
        return
    row = "9" if scene.claimed_us else "8"
    target, moonshot = scene.goals
    goal = Goal(row, f"{scene.name}: ours over {scene.claimed:,}/s", target, moonshot)
    results.add_goal(goal, [one.rate / scene.claimed for one in runs])
    if scene.claimed_us is not None:
        goal = Goal(row, f"{scene.name}: p50 over {scene.claimed_us:,} µs", 1.0, less=True)
        results.add_goal(goal, [percentile(one.acknowledged, 0.5) * 1e6 / scene.claimed_us for one in runs])


if __name__ == "__main__":
    sys.exit(main())
