"""Measures many partitions in one process: start, memory, the cost of idle ones, durable commits of many.

A service is started on a directory of one partition and on one of a thousand, each of which was written and
closed; a client then publishes to one of them. In a program, as many callers publish durable calls to one
partition as to a hundred: few, so that each commit has the rows of one call, and enough for the full rate.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import anyio
import numpy as np
import uvloop

from benchmarks._measure import Figure, percentile, ratios, table
from benchmarks._peers_ours import Ours
from benchmarks._results import Goal, Results, options_of
from delta_prop.api.propagator import Propagator
from delta_prop.client import Producer
from delta_prop.hosting.streams import Streams
from delta_prop_broker.log.statistics import DurableLogStatistics
from delta_prop_wire.delta import Delta, opaque

STREAM = "bench"
PARTITIONS, ACTIVE = 1_000, 100
CALL_DELTAS, CALLS_IN_FLIGHT, CALLS = 100, 40, 400
FEW, MANY = ACTIVE, 8 * ACTIVE
"""Numbers of callers: one for each active partition, and eight."""
DIMENSION = 32
WINDOW_S = 3.0
START = Goal("", "start on 1,000 partitions after a clean close, s", 5.0, unit="s", less=True)
MEMORY = Goal("", "memory of the idle service above one of one partition, MB", 1_000.0, unit="MB", less=True)
COST = Goal("", "CPU a delta of one active partition, 1,000 partitions over one", 1.1, less=True)
RATE = Goal("", f"durable rate over 100 active partitions, of one's, {MANY} callers", 0.5)


class Service(NamedTuple):
    """The figures of one start: seconds to ready, MB after it, CPU µs a delta, deltas without an outcome."""

    start_s: float
    memory_mb: float
    cpu_us: float
    lost: int


class Load(NamedTuple):
    """A number of callers, and the partitions that they publish to."""

    callers: int
    partitions: int


class Window(NamedTuple):
    """The figures of one window of durable calls."""

    deltas_a_second: float
    syncs_a_second: float
    p99_ms: float


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, write; return the exit status."""
    given = options_of("partitions", __doc__, rounds=5).parse_args(arguments)
    count = 50 if given.quick else PARTITIONS
    services: dict[int, list[Service]] = {1: [], count: []}
    windows: dict[Load, list[Window]] = {
        Load(callers, partitions): [] for callers in (FEW, MANY) for partitions in (1, ACTIVE)
    }
    with tempfile.TemporaryDirectory(prefix="delta-prop-partitions-") as folder:
        for number in services:
            anyio.run(_fill, Path(folder, str(number), "data"), number)
        for turn in range(given.rounds):
            for number, rounds in services.items():
                rounds.append(_measure_service(Path(folder, str(number)), f"program {turn}"))
                print(f"{turn} {number} partitions: {rounds[-1]}", file=sys.stderr)
        asyncio.run(_measure_windows(folder, windows, given.rounds, 1.0 if given.quick else WINDOW_S))
    return _report(services, windows).finish(given.json)


async def _fill(data: Path, count: int) -> None:
    """Create a directory with a stream whose partitions have a row each, and close it."""
    data.parent.mkdir(parents=True)
    async with Streams(data=data) as streams:
        stream = await streams.create(STREAM, count)
        for number in range(count):
            p = await streams.open_partition(stream, number)
            await p.publish(Delta("v", opaque(b"x")))


def _measure_service(folder: Path, name: str) -> Service:
    peer = Ours()
    began = time.perf_counter()
    peer.start(folder)
    start_s = time.perf_counter() - began
    try:
        memory_mb = _memory_mb(peer)
        cpu_s = peer.cpu_s()
        acknowledged = uvloop.run(_publish(f"127.0.0.1:{peer.port}", name))
        deltas = CALLS * CALL_DELTAS
        return Service(start_s, memory_mb, (peer.cpu_s() - cpu_s) / deltas * 1e6, deltas - acknowledged)
    finally:
        peer.stop()


def _memory_mb(peer: Ours) -> float:
    pages = int(Path(f"/proc/{peer.processes[0].pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


async def _publish(address: str, name: str) -> int:
    """Publish to the first partition; return the number of acknowledged deltas."""
    contents = [
        [Delta(f"key-{(call * 37 + row * 11) % 1_000}", opaque(bytes(128))) for row in range(CALL_DELTAS)]
        for call in range(50)
    ]
    async with Producer(address, name=name, stream=STREAM, partition=0) as producer:
        limit = asyncio.Semaphore(CALLS_IN_FLIGHT)

        async def publish_call(number: int) -> None:
            async with limit:
                await producer.publish(*contents[number % len(contents)])

        await asyncio.gather(*(publish_call(number) for number in range(CALLS)))
        return producer.statistics().acknowledged


async def _measure_windows(
    folder: str, windows: dict[Load, list[Window]], rounds: int, window_s: float
) -> None:
    """Measure a window of durable calls with each load, in turn."""
    async with Streams(data=Path(folder, "durable")) as streams:
        await streams.create(STREAM, ACTIVE)
        partitions = {
            1: [await streams.open()],
            ACTIVE: [await streams.open(STREAM, k) for k in range(ACTIVE)],
        }
        for turn in range(rounds + 1):  # the first one warms up
            for load, found in windows.items():
                window = await _measure_window(partitions[load.partitions], load.callers, window_s)
                if turn:
                    found.append(window)
                    print(f"{turn} durable, {load}: {window}", file=sys.stderr)


async def _measure_window(propagators: list[Propagator], callers: int, window_s: float) -> Window:
    ids, vectors = [f"v{row}" for row in range(CALL_DELTAS)], np.zeros((CALL_DELTAS, DIMENSION), np.float32)
    durations: list[float] = []
    began, commits = time.perf_counter(), _commits(propagators)

    async def call_repeatedly(p: Propagator) -> None:
        while time.perf_counter() < began + window_s:
            called_at = time.perf_counter()
            await p.publish_many(ids, vectors)
            durations.append(time.perf_counter() - called_at)

    await asyncio.gather(*(call_repeatedly(propagators[k % len(propagators)]) for k in range(callers)))
    seconds = time.perf_counter() - began
    return Window(
        len(durations) * CALL_DELTAS / seconds,
        (_commits(propagators) - commits) / seconds,
        percentile(durations, 0.99) * 1e3,
    )


def _commits(propagators: list[Propagator]) -> int:
    logs = [p.statistics().log for p in propagators]
    return sum(log.commits for log in logs if isinstance(log, DurableLogStatistics))


def _report(services: dict[int, list[Service]], windows: dict[Load, list[Window]]) -> Results:
    results = Results("partitions")
    rows = [
        (f"{count} partitions", *(str(Figure.of([each[at] for each in rounds])) for at in range(3)))
        for count, rounds in services.items()
    ]
    header = ("service", "start, s", "memory, MB", "CPU a delta, µs")
    results.tables.append(table("One active partition", header, rows))
    rows = [
        (
            f"{load.callers} callers, {load.partitions} partitions",
            *(str(Figure.of([each[at] for each in rounds])) for at in range(3)),
        )
        for load, rounds in windows.items()
    ]
    header = ("calls of 100 deltas", "deltas a second", "syncs a second", "p99, ms")
    results.tables.append(table("Durable calls", header, rows))
    single, many = services.values()
    results.add_goal(START, [each.start_s for each in many])
    memory = [each.memory_mb - other.memory_mb for each, other in zip(many, single, strict=True)]
    results.add_goal(MEMORY, memory)
    results.add_goal(COST, ratios([each.cpu_us for each in many], [each.cpu_us for each in single]))
    results.add_goal(RATE, _rate_ratios(windows, MANY))
    lost = sum(each.lost for rounds in services.values() for each in rounds)
    if lost:
        results.failures.append(f"{lost} deltas were not acknowledged")
    few = Figure.of(_rate_ratios(windows, FEW))
    results.notes.append(
        f"with one call in flight in each partition the rate over {ACTIVE} is {few} of one's"
    )
    results.notes.append(
        "a partition that was closed cleanly opens at its first use, so idle ones cost nothing"
    )
    return results


def _rate_ratios(windows: dict[Load, list[Window]], callers: int) -> list[float]:
    one, active = ([each.deltas_a_second for each in windows[Load(callers, count)]] for count in (1, ACTIVE))
    return ratios(active, one)


if __name__ == "__main__":
    sys.exit(main())
