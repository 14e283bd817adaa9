"""What each stage costs, single and in batches of 100, beside the specification's table.

Pure stages in CPU time (medians of interleaved rounds); the way through the whole service in wall time,
in open loop at a stated share of the measured peak. Everything at ack level `memory`, log in memory.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel
import numpy as np

from benchmarks._measure import Figure, calibration_ns, cpu_us, percentile, table, write_json
from delta_prop.config import Settings
from delta_prop.embedded import Propagator
from delta_prop.ingest.work import Sequenced, Session
from delta_prop.order.orderer import Entry, Orderer
from delta_prop.receipt import Receipt
from delta_prop.route.table import Table
from delta_prop_broker.log.memory import MemoryLog
from delta_prop_sinks import CacheSink, Delivery, IndexSink, Resident, StorageSink
from delta_prop_wire.batch import Batch, LoggedBatch
from delta_prop_wire.delta import Delta, Priority, Source, make_origin, sparse
from delta_prop_wire.encode import encode_batch, encode_vectors
from delta_prop_wire.soundness import parse_batch
from delta_prop_wire.topics import ALL
from delta_prop_wire.validate import validate_batch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

KEYS = 20_000
DIMENSION = 128
NUMBERS = 16
ORIGIN = make_origin(4711, Priority.NORMAL)
OPEN_LOOP_SHARE = 0.3

CLAIMS_P50_US = {
    "ingest": 5,
    "order": 10,
    "route": 8,
    "storage": 100,
    "index": 50,
    "cache": 2,
}
CLAIM_TOTAL = "175 / 780 / 3300"
CLAIMS_BATCH = {1: (50_000, 175), 10: (200_000, 200), 100: (500_000, 500), 1000: (800_000, 2000)}


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog="./run bench stages", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="interleaved rounds (at least 5)")
    parser.add_argument("--samples", type=int, default=10_000, help="latency samples in open loop")
    parser.add_argument("--json", metavar="FILE", help="write the figures to FILE too")
    given = parser.parse_args()
    if given.rounds < 5 or given.samples < 1000:
        parser.error("give at least 5 rounds and 1000 samples")
    print(f"calibration: {calibration_ns():.0f} ns CPU a loop turn; ack level memory; log in memory")
    print(f"a delta: sparse, {NUMBERS} of {DIMENSION} float32, {KEYS} vectors, one producer\n")
    singles, batches = _stages(1, given.rounds), _stages(100, given.rounds)
    _print_stages(singles, batches)
    sweep = {size: anyio.run(_throughput, size, given.rounds) for size in CLAIMS_BATCH}
    _print_sweep(sweep)
    rate = sweep[1]["rate"].median * OPEN_LOOP_SHARE
    latency = {linger_ms: anyio.run(_latency, given.samples, rate, linger_ms) for linger_ms in (10.0, 0.0)}
    _print_latency(latency)
    write_json(
        given.json,
        {"stages_single": singles, "stages_batch_100": batches, "sweep": sweep, "latency": latency},
    )
    return 0


# --- stages, CPU time


def _batches(size: int, count: int, seed: int = 1) -> list[Batch]:
    draw = random.Random(seed)
    numbers = np.random.default_rng(seed)
    made = []
    for number in range(count):
        deltas = [
            Delta(
                f"key-{draw.randrange(KEYS)}",
                sparse(numbers.integers(0, DIMENSION, NUMBERS), numbers.random(NUMBERS, np.float32)),
            )
            for _ in range(size)
        ]
        made.append(encode_batch(deltas, origin=ORIGIN, base=1 + number * size))
    return made


def _created() -> LoggedBatch:
    matrix = np.zeros((KEYS, DIMENSION), np.float32)
    keys = [f"key-{number}" for number in range(KEYS)]
    batch = encode_vectors(keys, matrix, namespace="default", origin=ORIGIN + 16, base=1)
    return LoggedBatch(batch, 0, 1, Source.LOCAL)


def _stages(size: int, rounds: int) -> dict[str, Figure]:
    """CPU µs a delta of each stage, for batches of `size`."""
    calls = 2000 if size == 1 else 200
    batches = _batches(size, calls)
    bodies = [bytes(batch.body) for batch in batches]
    logged = [
        LoggedBatch(batch, KEYS + at * size, KEYS + at * size + 1, Source.LOCAL)
        for at, batch in enumerate(batches)
    ]
    stages: dict[str, Callable[[], int]] = {
        "ingest (decode, checksum, validate, dedup)": partial(_ingest, bodies),
        "order": partial(_order, batches),
        "log append": partial(_log, batches),
        "route to 5 sinks": partial(_route, batches),
        "storage: applied, visible": _sink_stage(Resident, logged),
        "cache: refreshed": _sink_stage(None, logged),
    }
    figures = cpu_us(rounds, stages)
    return {name: Figure(f.median / size, f.low / size, f.high / size) for name, f in figures.items()}


def _ingest(bodies: Sequence[bytes]) -> int:
    have = 0
    for body in bodies:
        batch = parse_batch(body)
        validate_batch(batch)
        assert batch.base == have + 1
        have = batch.last
    return len(bodies)


def _order(batches: Sequence[Batch]) -> int:
    orderer = Orderer(knows_id=lambda _id: False)
    for batch in batches:
        entry = Entry(
            origin=batch.origin, first=batch.base, last=batch.last, previous=batch.base - 1,
            count=batch.count, size=batch.size, owner="", item=batch,
        )  # fmt: skip
        assert orderer.check(entry)
        orderer.delivered(entry.origin, entry.last)
    return len(batches)


def _log(batches: Sequence[Batch]) -> int:
    log = MemoryLog(bytes(16))
    for lamport, batch in enumerate(batches):
        log.append(batch, lamport=lamport, source=Source.LOCAL)
    return len(batches)


def _route(batches: Sequence[Batch]) -> int:
    routes: Table[int] = Table()
    for target in range(5):
        routes.subscribe(target, [ALL])
    for batch in batches:
        for _target, _rows in routes.plan(batch):
            pass
    return len(batches)


class _Context:
    """The least a sink needs to be opened."""

    log_id = bytes(16)
    epoch = 1
    log_start = 0
    topics = frozenset("*")

    def __init__(self) -> None:
        self.clock = self

    def now(self) -> float:
        return time.monotonic()

    def wall_us(self) -> int:
        return 0

    def committed(self, next_offset: int) -> None:
        pass

    def history(self, namespace: str, vector_id: str) -> Iterator[tuple[LoggedBatch, int]]:
        return iter(())


def _sink_stage(kind: type[Resident] | None, logged: Sequence[LoggedBatch]) -> Callable[[], int]:
    """Applying prepared batches, again and again under later offsets."""
    context, turn = _Context(), [0]
    resident = Resident()
    cache = CacheSink()

    def again() -> list[Delivery]:
        turn[0] += 1
        shift = turn[0] * (logged[-1].next_offset - logged[0].offset)
        return [
            Delivery(LoggedBatch(one.batch, one.offset + shift, one.lamport + shift, one.source))
            for one in logged
        ]

    def run_resident() -> int:
        for delivery in again():
            resident.apply([delivery], context)  # type: ignore[arg-type]
        return len(logged)

    def run_cache() -> int:
        async def apply() -> None:
            for delivery in again():
                await cache.apply([delivery])

        anyio.run(apply)
        return len(logged)

    if kind is not None:
        resident.enter(context)  # type: ignore[arg-type]
        resident.opened(0)
        resident.apply([Delivery(_created())], context)  # type: ignore[arg-type]
        return run_resident
    anyio.run(cache.open, context)  # type: ignore[arg-type]
    anyio.run(cache.apply, [Delivery(_created())])
    return run_cache


# --- the whole service, wall time


async def _throughput(size: int, rounds: int) -> dict[str, Figure]:
    """Deltas a second into log, storage and index, until all are applied; and the publishing call's time."""
    rates, calls = [], []
    async with _service() as (propagator, producer_batches):
        for turn in range(rounds):
            batches = producer_batches(size, max(4000 // size, 40), turn)
            session = Session("bench")
            begin = time.perf_counter()
            for batch in batches:
                at = time.perf_counter()
                propagator._chain.offer(Sequenced(batch, session, Receipt()), at)
                calls.append((time.perf_counter() - at) * 1e6)
                await propagator._give_way()
            await propagator.wait_visible(propagator._log.visible, timeout_s=60)
            rates.append(len(batches) * size / (time.perf_counter() - begin))
    return {
        "rate": Figure.of(rates),
        "call_p50_us": Figure.of([percentile(calls, 0.5)] * 1),
        "call_p99_us": Figure.of([percentile(calls, 0.99)]),
    }


async def _latency(samples: int, rate: float, linger_ms: float) -> dict[str, float]:
    """From the moment a delta was due to the moment storage and index both have it, in open loop."""
    due: dict[int, float] = {}
    async with _service(linger_ms) as (propagator, _):
        draw = random.Random(3)
        numbers = np.arange(NUMBERS)
        begin = time.perf_counter() + 0.01
        for number in range(samples):
            at = begin + number / rate
            # The loop's timers are a millisecond coarse, so the last stretch is turns of the loop.
            while (wait_s := at - time.perf_counter()) > 0:  # noqa: ASYNC110
                await anyio.sleep(wait_s - 0.0015 if wait_s > 0.003 else 0)
            published = await propagator.publish(
                Delta(f"key-{draw.randrange(KEYS)}", sparse(numbers, numbers))
            )
            assert published.offset is not None
            due[published.offset] = at
        await propagator.wait_visible(propagator._log.visible, timeout_s=60)
        applied = [one.sink.applied_at for one in propagator._attached.values()]  # type: ignore[attr-defined]
    taken = [(max(times[offset] for times in applied) - at) * 1e6 for offset, at in due.items()]
    return {
        "rate": rate,
        "samples": len(taken),
        "p50_us": percentile(taken, 0.5),
        "p95_us": percentile(taken, 0.95),
        "p99_us": percentile(taken, 0.99),
    }


class _TimedStorage(StorageSink):
    """Notes when each offset was applied."""

    applied_at: dict[int, float]

    async def apply(self, deliveries: Sequence[Delivery]) -> None:
        await super().apply(deliveries)
        _note(self.applied_at, deliveries)


class _TimedIndex(IndexSink):
    """Notes when each offset was applied."""

    applied_at: dict[int, float]

    async def apply(self, deliveries: Sequence[Delivery]) -> None:
        await super().apply(deliveries)
        _note(self.applied_at, deliveries)


def _note(applied_at: dict[int, float], deliveries: Sequence[Delivery]) -> None:
    now = time.perf_counter()
    for delivery in deliveries:
        for offset in range(delivery.first_offset, delivery.next_offset):
            applied_at[offset] = now


class _service:
    """A propagator with storage and index sharing their vectors, and the vectors in it."""

    def __init__(self, linger_ms: float = 10.0) -> None:
        self._settings = Settings(linger_ms_max=linger_ms)

    async def __aenter__(self) -> tuple[Propagator, Callable[[int, int, int], list[Batch]]]:
        self._folder = tempfile.TemporaryDirectory()
        self._propagator = Propagator(self._settings)
        await self._propagator.__aenter__()
        storage = _TimedStorage(Path(self._folder.name) / "bench.db")
        index = _TimedIndex(resident=storage.resident)
        storage.applied_at, index.applied_at = {}, {}
        await self._propagator.attach(storage)
        await self._propagator.attach(index)
        keys = [f"key-{number}" for number in range(KEYS)]
        await self._propagator.publish_many(keys, np.zeros((KEYS, DIMENSION), np.float32))
        # On disk first: else the first second measures how the store swallows all vectors at once.
        await self._propagator.wait_visible(KEYS, committed=True, timeout_s=60)
        self._grants = self._propagator._chain.hello(4711, "bench", 0.0)
        self._next = 1
        return self._propagator, self._make

    async def __aexit__(self, *failure: object) -> None:
        await self._propagator.__aexit__(None, None, None)
        self._folder.cleanup()

    def _make(self, size: int, count: int, seed: int) -> list[Batch]:
        made = []
        for batch in _batches(size, count, seed):
            deltas = [batch.delta(row) for row in range(size)]
            made.append(encode_batch(deltas, origin=ORIGIN, base=self._next))
            self._next += size
        return made


# --- printing


def _print_stages(singles: dict[str, Figure], batches: dict[str, Figure]) -> None:
    claims = (*CLAIMS_P50_US.values(),)
    named = {
        "ingest": claims[0],
        "order": claims[1],
        "route": claims[2],
        "storage": claims[3],
        "cache": claims[5],
    }
    rows = [
        (
            name,
            f"{singles[name]}",
            f"{batches[name]}",
            next((claim for word, claim in named.items() if name.startswith(word)), "-"),
        )
        for name in singles
    ]
    rows.append(
        ("index: applied, visible", "shares storage's rows", "shares storage's rows", CLAIMS_P50_US["index"])
    )
    print(
        table(
            "stages: CPU µs a delta, median (lowest-highest round)",
            ("stage", "single", "batch 100", "specification, p50"),
            rows,
        )
    )


def _print_sweep(sweep: dict[int, dict[str, Figure]]) -> None:
    rows = [
        (
            size,
            f"{figures['rate'].median:,.0f} ({figures['rate'].low:,.0f}-{figures['rate'].high:,.0f})",
            f"{figures['call_p50_us'].median:.0f} / {figures['call_p99_us'].median:.0f}",
            f"{CLAIMS_BATCH[size][0]:,} at {CLAIMS_BATCH[size][1]}",
        )
        for size, figures in sweep.items()
    ]
    print(
        table(
            "log in memory + storage (written behind) + exact index, all applied; ack level memory",
            ("batch", "deltas/s", "call p50/p99 µs", "specification: deltas/s at µs"),
            rows,
        )
    )


def _print_latency(latency: dict[float, dict[str, float]]) -> None:
    rows = [
        (
            f"gathering {linger_ms:.0f} ms",
            f"{one['rate']:,.0f}/s",
            f"{one['samples']:,.0f}",
            f"{one['p50_us']:,.0f} / {one['p95_us']:,.0f} / {one['p99_us']:,.0f}",
            CLAIM_TOTAL,
        )
        for linger_ms, one in latency.items()
    ]
    print(
        table(
            "publish one delta until storage and index have it, open loop at "
            f"{OPEN_LOOP_SHARE:.0%} of the peak; ack level memory (the specification states none)",
            ("busy sinks", "rate", "samples", "µs p50 / p95 / p99", "specification, total"),
            rows,
        )
    )
    print(
        "not built yet, so not measured: the pipeline with replication (50,000/s), geo-distributed (10,000/s)"
    )


if __name__ == "__main__":
    sys.exit(main())
