"""Compares the durable log with this machine's disk alone, in one process: publish, acknowledge, catch up.

Frames of about 13 KB (of whole vectors of 128 numbers, and of changes of 16 numbers in such), encoded as on
the wire, go through the whole pipeline: checked, ordered, logged, synced. Each round measures the disk alone
and the service in turn, in the same directory; the result is the ratio within a round, of which the median is
printed. Catching up reads a log that was closed and opened again, so nothing of it is in the service's
memory; the system's page cache is warm.
"""

from __future__ import annotations

import gc
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import anyio
import anyio.lowlevel
import numpy as np

from benchmarks._arguments import bounded_int, writable_directory
from benchmarks._measure import Figure, percentile, ratios, table
from benchmarks._results import Goal, Results, options_of
from delta_prop.api.producer import Producer
from delta_prop.api.propagator import Propagator
from delta_prop.api.settings import Settings
from delta_prop.calls.receipt import Receipt
from delta_prop_broker.log.settings import LogSettings
from delta_prop_sinks import CallbackSink, Delivery
from delta_prop_wire.batch import Batch
from delta_prop_wire.delta import (
    AckLevel,
    Delta,
    Operation,
    Priority,
    dense,
    make_origin,
    producer_id_of,
    sparse,
)
from delta_prop_wire.encode import encode_batch

MIB = 1024 * 1024
PRODUCER = "bench"
IN_FLIGHT_BYTES = 4 * MIB
FRAME_BYTES = 13_000
DIMENSION, NUMBERS, KEYS = 128, 16, 20_000
FULL, SPARSE = "whole vectors", "sparse changes"
THROUGHPUT_SHARE_MIN = 0.35
ACK_TIMES_MAX = 2.8
CATCH_UP_TIMES_MIN = 3.0


class Comparison(NamedTuple):
    """Two fields of `Round`, `measured` and `baseline`, and the target of their ratio."""

    what: str
    measured: str
    unit: str
    baseline: str
    baseline_what: str
    target: float
    less: bool = False


COMPARISONS = (
    Comparison("publish, 4 MiB in flight", "publish", "MiB/s", "disk", "the disk", THROUGHPUT_SHARE_MIN),
    Comparison("ack p50, one in flight", "ack_us", "µs", "sync_us", "fdatasync", ACK_TIMES_MAX, less=True),
    Comparison("a subscriber catches up", "catch_up", "MiB/s", "publish", "publish", CATCH_UP_TIMES_MIN),
)
YIELD_S = 0.0005
"""Interval at which the sender yields to the service's tasks, as `publish` and a connection's reads do."""
_WAIT_S = 60.0


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, write. Return 1 if a target is missed by far."""
    parser = options_of("log", __doc__, rounds=5)
    parser.option("--mib", bounded_int(IN_FLIGHT_BYTES // MIB, 100_000), 48, "MiB that each round publishes")
    parser.option("--acks", bounded_int(10, 1_000_000), 200, "acknowledgements per round, one at a time")
    parser.option("--directory", writable_directory, None, "measure the disk that DIR is on", metavar="DIR")
    given = parser.parse_args(arguments)
    mib, acks = (min(given.mib, 12), min(given.acks, 50)) if given.quick else (given.mib, given.acks)
    rounds: dict[str, list[Round]] = {FULL: [], SPARSE: []}
    with tempfile.TemporaryDirectory(prefix="delta-prop-log-", dir=given.directory) as folder:
        for number in range(given.rounds):
            for kind, kind_rounds in rounds.items():
                directory = Path(folder) / str(number)
                directory.mkdir()
                kind_rounds.append(anyio.run(measure, directory, kind, mib, acks))
                shutil.rmtree(directory)
    return report(rounds).finish(given.json)


@dataclass(frozen=True, slots=True)
class Round:
    """The figures of one round: rates in MiB/s, times in µs, `publish_deltas` in deltas/s, `rows` a frame."""

    disk: float
    publish: float
    publish_deltas: float
    commits: int
    sync_us: float
    ack_us: float
    ack_p99_us: float
    catch_up: float
    frame_bytes: float
    rows: int
    cpu_us: float


async def measure(folder: Path, kind: str, mib: int, acks: int) -> Round:
    """Measure the disk and the service in turn, in a directory of their own."""
    batches = frames(kind, mib * MIB, acks)
    many, single = batches[: len(batches) - acks], batches[len(batches) - acks :]
    size = sum(batch.size for batch in many)
    settings = Settings(rate_initial=1e9, rate_max=1e9)
    async with Propagator(settings, data=folder / "data", log=LogSettings()) as propagator:
        keys = [f"key-{number}" for number in range(KEYS)]
        await propagator.publish_many(keys, np.zeros((KEYS, DIMENSION), np.float32))
        producer = propagator.producer(PRODUCER)
        before = disk_rate(folder, mib)
        gc.collect()  # garbage of making the frames and vectors must not count as sending
        begin, cpu = time.perf_counter(), time.process_time()
        await send(producer, many)
        taken_s, cpu = time.perf_counter() - begin, time.process_time() - cpu
        commits = getattr(propagator.statistics().log, "commits", 0)
        disk = statistics.fmean((before, disk_rate(folder, mib)))  # the mean halves the effect of drift
        syncs, acks_us = await ack_times(folder, producer, single)
    caught_up = await catch_up(folder / "data", settings)
    return Round(
        disk=disk,
        publish=size / MIB / taken_s,
        publish_deltas=sum(batch.count for batch in many) / taken_s,
        commits=commits,
        sync_us=percentile(syncs, 0.5),
        ack_us=percentile(acks_us, 0.5),
        ack_p99_us=percentile(acks_us, 0.99),
        catch_up=caught_up,
        frame_bytes=size / len(many),
        rows=many[0].count,
        cpu_us=cpu * 1e6 / len(many),
    )


# --- the service


def frames(kind: str, size: int, extra_count: int) -> list[Batch]:
    """Return frames of `size` bytes in all, and `extra_count` frames more, filled with deltas of a kind."""
    numbers = np.random.default_rng(1)
    origin = make_origin(producer_id_of(PRODUCER), Priority.NORMAL)
    row_bytes = encode_batch(_deltas(kind, numbers, 100), origin=origin, base=1).size / 100
    rows = max(int(FRAME_BYTES / row_bytes), 1)
    deltas = [_deltas(kind, numbers, rows) for _ in range(50)]
    batches: list[Batch] = []
    counter, left = 1, float(size)
    while left > 0 or extra_count:
        batch = encode_batch(
            deltas[len(batches) % 50], origin=origin, base=counter, ack_level=AckLevel.DURABLE
        )
        extra_count -= left <= 0
        counter, left = counter + rows, left - batch.size
        batches.append(batch)
    return batches


def _deltas(kind: str, numbers: np.random.Generator, rows: int) -> list[Delta]:
    def operation() -> Operation:
        if kind == FULL:
            return dense(numbers.random(DIMENSION, np.float32))
        indices = np.sort(numbers.choice(DIMENSION, NUMBERS, replace=False))
        return sparse(indices, numbers.random(NUMBERS, np.float32))

    return [Delta(f"key-{numbers.integers(KEYS)}", operation()) for _ in range(rows)]


async def send(producer: Producer, batches: Sequence[Batch]) -> None:
    """Send all batches, with up to 4 MiB in flight; return when all are acknowledged."""
    in_flight_bytes, change, yielded_at = 0, anyio.Event(), 0.0
    sizes: deque[int] = deque()  # sizes of the frames in flight, which are acknowledged in order

    def on_acked(receipt: Receipt) -> None:
        nonlocal in_flight_bytes
        receipt.result()
        in_flight_bytes -= sizes.popleft()
        change.set()

    with anyio.fail_after(_WAIT_S):
        for batch in batches:
            while in_flight_bytes + batch.size > IN_FLIGHT_BYTES:
                change = anyio.Event()
                await change.wait()
            if time.perf_counter() - yielded_at >= YIELD_S:
                await anyio.lowlevel.checkpoint()
                yielded_at = time.perf_counter()
            in_flight_bytes += batch.size
            sizes.append(batch.size)
            producer.send_frame(batch).add_done_callback(on_acked)
        while in_flight_bytes:
            change = anyio.Event()
            await change.wait()


async def ack_times(
    folder: Path, producer: Producer, batches: Sequence[Batch]
) -> tuple[list[float], list[float]]:
    """Measure in turn, in µs: fdatasync after an append of 4 KiB, and the time of one batch until its ack."""
    chunk, path = os.urandom(4096), folder / "disk"
    syncs, acks = [], []
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        for batch in batches:
            os.write(descriptor, chunk)
            begin = time.perf_counter()
            os.fdatasync(descriptor)
            synced = time.perf_counter()
            await producer.send_frame(batch).wait()
            syncs.append((synced - begin) * 1e6)
            acks.append((time.perf_counter() - synced) * 1e6)
    finally:
        os.close(descriptor)
    return syncs, acks


async def catch_up(data: Path, settings: Settings) -> float:
    """Measure the MiB/s of one subscriber from the start of a log to its end, with all checks of reading."""
    bytes_read = 0

    def take(delivery: Delivery) -> None:
        nonlocal bytes_read
        bytes_read += delivery.batch.size

    async with Propagator(settings, data=data, log=LogSettings()) as propagator:
        end = propagator.statistics().log.next_offset
        begin = time.perf_counter()
        await propagator.attach(CallbackSink(take, per="delivery", nonblocking=True), start="earliest")
        await propagator.wait_visible(end, timeout_s=_WAIT_S)
        return bytes_read / MIB / (time.perf_counter() - begin)


# --- the disk


def disk_rate(folder: Path, mib: int) -> float:
    """Measure the MiB/s of the disk alone: append 1 MiB to a file, fdatasync, repeat."""
    chunk = os.urandom(MIB)
    path = folder / "disk"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        begin = time.perf_counter()
        for _ in range(mib):
            os.write(descriptor, chunk)
            os.fdatasync(descriptor)
        return mib / (time.perf_counter() - begin)
    finally:
        os.close(descriptor)
        path.unlink()


# --- printing


def report(rounds: Mapping[str, Sequence[Round]]) -> Results:
    """Return table, figures, goals."""
    results = Results("log")
    rows = []
    for kind, kind_rounds in rounds.items():
        for comparison in COMPARISONS:
            name = f"{comparison.what}, {kind}"
            measured, baseline = (
                [getattr(one, field) for one in kind_rounds]
                for field in (comparison.measured, comparison.baseline)
            )
            shares = ratios(measured, baseline)
            goal = Goal(
                "", f"log: {name}, beside {comparison.baseline_what}", comparison.target, less=comparison.less
            )
            verdict = results.add_goal(goal, shares)
            figure = results.add_figure(name, measured, comparison.unit, less=comparison.less)
            rows.append(
                (f"{name}, {comparison.unit}", figure, Figure.of(baseline), Figure.of(shares), verdict)
            )
        count, size, rate, cpu_us, commits, p99_us = (
            Figure.of([getattr(one, name) for one in kind_rounds]).median
            for name in ("rows", "frame_bytes", "publish_deltas", "cpu_us", "commits", "ack_p99_us")
        )
        results.notes.append(
            f"{kind}: {count:.0f} a frame of {size:,.0f} bytes, {rate:,.0f} deltas/s, {cpu_us:,.0f} µs CPU a "
            f"frame, {commits:,.0f} commits a round, ack p99 {p99_us:,.0f} µs"
        )
    header = ("median (lowest-highest round)", "measured", "baseline", "ratio", "")
    results.tables.append(table("the durable log, one process", header, rows))
    results.notes.append(
        "baselines: write + fdatasync of 1 MiB; fdatasync of 4 KiB; the durable publish of the round"
    )
    results.more["rounds"] = {kind: list(map(asdict, kind_rounds)) for kind, kind_rounds in rounds.items()}
    return results


if __name__ == "__main__":
    sys.exit(main())
