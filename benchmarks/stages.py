"""Measures the cost of each stage for a single delta, and of all stages together, against the specification.

Stages are measured in CPU time, as medians of interleaved rounds. End-to-end latency is measured from the
time a delta was due until storage, index and cache have it, in an open loop through a propagator with its log
in a directory, at ack levels `logged` and `durable`. Batches of 100 are measured as well as single deltas.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from functools import partial

import anyio
import numpy as np

from benchmarks._arguments import bounded_int
from benchmarks._embedded import DIMENSION, KEYS, NAMES, NUMBERS, Bench, CallTimings, Columns, prepare_calls
from benchmarks._measure import cpu_us, percentile, table
from benchmarks._results import Goal, Results, options_of
from delta_prop.delivery.routing_table import RoutingTable
from delta_prop.partition.ingest.seen_ids import SeenIds
from delta_prop.partition.order.orderer import Orderer
from delta_prop_broker.log.memory import MemoryLog
from delta_prop_sinks import CacheSink, Delivery, IndexSink, ResidentVectors
from delta_prop_wire.batch import Batch, LoggedBatch
from delta_prop_wire.body_checks import parse_batch
from delta_prop_wire.delta import AckLevel, Delta, Kind, Priority, Source, make_origin
from delta_prop_wire.encode import encode_batch, encode_vectors
from delta_prop_wire.topics import ALL
from delta_prop_wire.validate import validate_batch

ORIGIN = make_origin(4711, Priority.NORMAL)
OPEN_LOOP_SHARE = 0.3
"""Share of the rate that one caller reaches in a closed loop."""
SINKS = ("storage", "index", "cache")
IN_FLIGHT = {AckLevel.LOGGED: 4, AckLevel.DURABLE: 16}
"""Maximum number of calls in flight; while that many are late, the next call is delayed."""

CLAIMS = (
    ("ingest", "ingest: decoded, checked, known or not", 5.0, 5.0, 6.0),
    ("order", "order", 10.0, 10.0, 20.0),
    ("route", "route to 5 sinks", 8.0, 5.0, 8.0),
    ("cache", "cache: refreshed", 2.0, 2.0, 3.0),
    ("index", "index: applied, can be found", 50.0, 3.0, 5.0),
    ("storage", "storage: applied, can be read", 100.0, 5.0, 8.0),
)
"""Name, description, the specification's median in µs, the target and the moonshot as multiples of its speed.
"""
CLAIMED_TOTAL_US = {50: 175.0, 95: 780.0, 99: 3300.0}


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, write; return the exit status."""
    parser = options_of("stages", __doc__, rounds=7, rounds_min=5)
    parser.option("--samples", bounded_int(1_000, 10_000_000), 10_000, "latency samples in open loop")
    given = parser.parse_args(arguments)
    results = Results("stages")
    _measure_stages(results, given)
    anyio.run(_measure_total, results, given)
    results.notes.append(
        f"a delta: {NUMBERS} of {DIMENSION} float32, {KEYS:,} vectors, one producer; stages in CPU time"
    )
    results.notes.append(
        "end to end: log in a directory, write-behind storage, exact index on the same vectors, cache; "
        f"open loop at {OPEN_LOOP_SHARE:.0%} of one caller's peak; gc.freeze() after the start"
    )
    return results.finish(given.json)


def _print_progress(what: str) -> None:
    """Print the current step, as the first table takes half a minute."""
    print(what, file=sys.stderr, flush=True)


# --- stages, CPU time


def _measure_stages(results: Results, given: argparse.Namespace) -> None:
    rounds = 5 if given.quick else given.rounds
    singles, batches = (_stages(size, rounds, quick=given.quick) for size in (1, 100))
    rows = []
    for name, what, claimed, target, moonshot in CLAIMS:
        times = singles[name]
        single = results.add_figure(f"{name}, single", times, "µs CPU", less=True)
        batch = results.add_figure(f"{name}, batch 100", batches[name], "µs CPU", less=True)
        results.add_goal(
            Goal("10", f"{name}: claim over ours", target, moonshot), [claimed / time_us for time_us in times]
        )
        rows.append((what, str(single), str(batch), f"{claimed:g}", f"{claimed / single.median:.2f}"))
    header = ("stage", "single", "batch 100", "specification", "× faster, single")
    results.tables.append(table("stages: CPU µs a delta, median (lowest-highest round)", header, rows))


def _batches(size: int, count: int) -> list[Batch]:
    """Return `count` batches made from the calls that `prepare_calls` returns, as a producer encodes them."""
    batches: list[Batch] = []
    calls = prepare_calls(size)
    for number in range(count):
        call, base = calls[number % len(calls)], 1 + number * size
        if isinstance(call, Columns):
            batches.append(
                encode_vectors(
                    call.ids,
                    call.values,
                    indices=call.indices,
                    namespace="default",
                    kind=Kind.SPARSE,
                    origin=ORIGIN,
                    base=base,
                )
            )
        else:
            assert isinstance(call, Delta)
            batches.append(encode_batch([call], origin=ORIGIN, base=base))
    return batches


def _new_vectors() -> LoggedBatch:
    matrix = np.zeros((KEYS, DIMENSION), np.float32)
    batch = encode_vectors(NAMES, matrix, namespace="default", origin=ORIGIN + 16, base=1)
    return LoggedBatch(batch, 0, 1, Source.LOCAL)


def _stages(size: int, rounds: int, *, quick: bool) -> dict[str, list[float]]:
    """Measure CPU µs per delta of each stage, round by round, for batches of `size`."""
    _print_progress(f"stages, batches of {size}: {rounds} rounds")
    calls = (400 if quick else 2_000) if size == 1 else (50 if quick else 200)
    batches = _batches(size, calls)
    bodies = [bytes(batch.body) for batch in batches]
    logged = [
        LoggedBatch(batch, KEYS + number * size, KEYS + number * size + 1, Source.LOCAL)
        for number, batch in enumerate(batches)
    ]
    stages: dict[str, Callable[[], int]] = {
        "ingest": partial(_ingest, bodies),
        "order": partial(_order, batches),
        "log": partial(_log, batches),
        "route": partial(_route, batches),
        "storage": _resident_stage(logged),
        "index": _sink_stage(IndexSink(), logged),
        "cache": _sink_stage(CacheSink(), logged),
    }
    return {
        name: [time_us / size for time_us in times] for name, times in cpu_us_rounds(rounds, stages).items()
    }


def cpu_us_rounds(rounds: int, stages: Mapping[str, Callable[[], int]]) -> dict[str, list[float]]:
    """Measure CPU µs per call of each stage; each stage prepares, then runs, once per round."""
    times_by_stage: dict[str, list[float]] = {name: [] for name in stages}
    for turn in range(1, rounds + 1):
        _print_progress(f"round {turn} of {rounds}")
        for name, stage in stages.items():
            if isinstance(stage, _ApplyStage):
                stage.prepare()
            times_by_stage[name].append(cpu_us(1, {name: stage})[name].median)
    return times_by_stage


def _ingest(bodies: Sequence[bytes]) -> int:
    watermark = 0
    for body in bodies:
        batch = parse_batch(body)
        validate_batch(batch)
        assert batch.base == watermark + 1
        watermark = batch.last
    return len(bodies)


def _order(batches: Sequence[Batch]) -> int:
    """Run the orderer as the pipeline does for a batch that is the next of its origin."""
    orderer = Orderer(SeenIds())
    for batch in batches:
        assert batch.base == orderer.watermarks.get(batch.origin, 0) + 1
        orderer.note_delivered(batch.origin, batch.base + batch.count - 1)
        assert not orderer.has_ready
    return len(batches)


def _log(batches: Sequence[Batch]) -> int:
    log = MemoryLog(bytes(16))
    for lamport, batch in enumerate(batches):
        log.append(batch, lamport=lamport, source=Source.LOCAL)
    return len(batches)


def _route(batches: Sequence[Batch]) -> int:
    routes: RoutingTable[int] = RoutingTable()
    for target in range(5):
        routes.subscribe(target, [ALL])
    for batch in batches:
        for _target, _rows in routes.plan(batch):
            pass
    return len(batches)


class _Context:
    """The minimal context with which a sink opens."""

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

    def dimension(self, namespace: str) -> int | None:
        return None

    async def history(self, vectors: Collection[tuple[str, str]]) -> AsyncIterator[tuple[LoggedBatch, int]]:
        return
        yield


class _ApplyStage:
    """A sink's `apply` of prepared deliveries. Each round has later offsets, as the sink skips duplicates.

    Deliveries are made before the timed part, because the service makes each delivery once, for all sinks
    together.
    """

    def __init__(self, apply: Callable[[list[Delivery]], object], logged: Sequence[LoggedBatch]) -> None:
        self._apply, self._logged = apply, logged
        self._turn = 0
        self._prepared: list[list[Delivery]] = []

    def prepare(self) -> None:
        """Make the next round's deliveries."""
        self._turn += 1
        shift = self._turn * (self._logged[-1].next_offset - self._logged[0].offset)
        self._prepared = [
            [Delivery(LoggedBatch(one.batch, one.offset + shift, one.lamport + shift, one.source))]
            for one in self._logged
        ]

    def __call__(self) -> int:
        apply = self._apply
        for deliveries in self._prepared:
            assert apply(deliveries)  # the sink would skip duplicates
        return len(self._prepared)


def _resident_stage(logged: Sequence[LoggedBatch]) -> _ApplyStage:
    """Return the stage that ends when a delta can be read from a write-behind storage sink."""
    resident, context = ResidentVectors(), _Context()
    resident.enter(context)  # type: ignore[arg-type]
    assert resident.apply_now([Delivery(_new_vectors())], context)  # type: ignore[arg-type]
    return _ApplyStage(lambda deliveries: resident.apply_now(deliveries, context), logged)  # type: ignore[arg-type]


def _sink_stage(sink: IndexSink | CacheSink, logged: Sequence[LoggedBatch]) -> _ApplyStage:
    anyio.run(sink.open, _Context())  # type: ignore[arg-type]
    assert sink.apply_now([Delivery(_new_vectors())])
    return _ApplyStage(sink.apply_now, logged)


# --- end to end, wall time


async def _measure_total(results: Results, given: argparse.Namespace) -> None:
    rounds = 5
    samples = (1_000 if given.quick else given.samples) // rounds
    rows = []
    _print_progress("end to end, open loop")
    async with Bench(*SINKS, linger_ms=0) as bench:
        gc.collect()
        gc.freeze()
        for level in (AckLevel.LOGGED, AckLevel.DURABLE):
            name = level.name.lower()
            peaks, runs = [], []
            for turn in range(1, rounds + 1):
                _print_progress(f"{name}, round {turn} of {rounds}")
                peak = await bench.closed_loop(1, level, in_flight=1, seconds=0.1 if given.quick else 0.3)
                peaks.append(peak.rate)
                rate = peak.rate * OPEN_LOOP_SHARE
                runs.append(
                    await bench.open_loop(1, level, rate=rate, calls=samples, in_flight=IN_FLIGHT[level])
                )
            rows.append(_total_row(results, name, peaks, runs))
    header = (
        "acknowledged",
        "one caller's peak/s",
        "samples",
        "µs until all sinks have it, p50 / p95 / p99",
        "until acknowledged",
        "specification",
    )
    results.tables.append(table("a single delta end to end, open loop", header, rows))


def _total_row(results: Results, level: str, peaks: list[float], runs: list[CallTimings]) -> tuple[str, ...]:
    peak = results.add_figure(f"one caller, {level}", peaks, "deltas/s")
    latencies = []
    for which in ("visible", "acknowledged"):
        times = {
            share: [percentile(getattr(one, which), share / 100) * 1e6 for one in runs]
            for share in CLAIMED_TOTAL_US
        }
        figures = {
            share: results.add_figure(f"{which}, {level}, p{share}", rounds, "µs", less=True)
            for share, rounds in times.items()
        }
        latencies.append(" / ".join(f"{figure.median:,.0f}" for figure in figures.values()))
        if which == "visible" and level == "logged":
            for share, target, moonshot in ((50, 3.0, 9.0), (99, 5.0, 16.0)):
                claimed = CLAIMED_TOTAL_US[share]
                goal = Goal("10", f"total p{share}: claim over ours", target, moonshot)
                results.add_goal(goal, [claimed / time_us for time_us in times[share]])
    samples = sum(len(one.visible) for one in runs)
    claimed_text = " / ".join(f"{claimed:g}" for claimed in CLAIMED_TOTAL_US.values())
    return (level, f"{peak.median:,.0f}", f"{samples:,}", *latencies, claimed_text)


if __name__ == "__main__":
    sys.exit(main())
