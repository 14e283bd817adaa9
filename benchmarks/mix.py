"""Measures the cost of mixed traffic: ten namespaces and four operations, against one
namespace and one operation.

Deltas go through `delta-prop serve` (from publish to receive, one consumer of everything, wall time), and
through an embedded service (log in a directory, one sink that takes everything, CPU time). All rows have 16
numbers, or 8 with their indices.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

import anyio

from benchmarks._growth_service import CountingSink
from benchmarks._measure import table
from benchmarks._mixes import BY_BATCH, BY_ROW, ONE_KIND, OursWithTraffic, Traffic
from benchmarks._peers_ours import Ours, with_counter
from benchmarks._peers_scenes import Scene, measure
from benchmarks._results import Goal, Results, format_figure, options_of
from delta_prop.api.propagator import Propagator
from delta_prop.api.settings import Settings
from delta_prop.client import SyncProducer
from delta_prop_wire.codec import encode
from delta_prop_wire.delta import AckLevel, Priority, make_origin, producer_id_of
from delta_prop_wire.frames import BatchFrame

TRAFFICS = (*ONE_KIND, BY_BATCH, BY_ROW)
ROWS = 100
SERVER, EMBEDDED = "server", "in process"


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, write; return the exit status."""
    parser = options_of("mix", __doc__, rounds=5)
    given = parser.parse_args(arguments)
    seconds = 0.6 if given.quick else 1.5
    rates: dict[tuple[str, str], list[float]] = {}
    lost = 0
    with tempfile.TemporaryDirectory(prefix="mix-") as folder:
        server = Ours()
        try:
            server.start(Path(folder))
            for turn in range(given.rounds):
                for traffic in TRAFFICS:
                    rate, missing = measure_server(server, traffic, f"m{turn}", seconds)
                    rates.setdefault((SERVER, traffic.name), []).append(rate)
                    lost += missing
        finally:
            server.stop()
    for turn in range(given.rounds):
        for traffic in TRAFFICS:
            rate = anyio.run(measure_embedded, traffic, 20_000 if given.quick else 60_000)
            rates.setdefault((EMBEDDED, traffic.name), []).append(rate)
            print(f"{turn} {traffic.name}: {rate:,.0f} a CPU second in process", file=sys.stderr)
    return _report(rates, lost).finish(given.json)


def measure_server(server: Ours, traffic: Traffic, topic: str, seconds: float) -> tuple[float, int]:
    """Return the deltas per second until the consumer has the last one, and the number of lost deltas."""
    topic = f"{topic}{TRAFFICS.index(traffic)}"
    with SyncProducer(
        f"127.0.0.1:{server.port}", name=f"first-{topic}", ack_level=AckLevel.LOGGED
    ) as producer:
        for delta in traffic.create_deltas(topic):
            producer.offer(delta)
    scene = Scene(traffic.name, consumers=1, batch=ROWS, seconds_max=seconds)
    measured = measure(OursWithTraffic(server, traffic), scene, topic)
    print(
        f"{traffic.name}: {measured.deltas_a_second:,.0f}/s, {measured.server_cpu_us:.2f} µs CPU a delta",
        file=sys.stderr,
    )
    return measured.deltas_a_second, measured.lost


async def measure_embedded(traffic: Traffic, delta_count: int) -> float:
    """Return the deltas per CPU second, from encoded frames to the sink."""
    origin = make_origin(producer_id_of("mix"), Priority.NORMAL)
    settings = Settings(rate_initial=1e9, rate_max=1e9)
    with tempfile.TemporaryDirectory(prefix="mix-") as folder:
        async with Propagator(settings, data=folder) as propagator:
            await propagator.attach(CountingSink())
            await propagator.publish(*traffic.create_deltas("m"), ack_level=AckLevel.LOGGED)
            producer = propagator.producer("mix", ack_level=AckLevel.LOGGED)
            templates = [
                encode(BatchFrame(1, batch))
                for batch in traffic.batches("m", ROWS, origin, AckLevel.LOGGED, 1)
            ]
            count = delta_count // ROWS
            frames = [with_counter(templates[at % len(templates)], 1 + at * ROWS) for at in range(count)]
            await propagator.wait_visible(propagator.statistics().log.next_offset, timeout_s=30)
            began = time.process_time()
            for at, frame in enumerate(frames):
                receipt = producer.send_frame(frame)
                if at % 20 == 19:
                    await receipt.wait()
            await receipt.wait()
            await propagator.wait_visible(propagator.statistics().log.next_offset, timeout_s=30)
            return count * ROWS / (time.process_time() - began)


def _report(rates: dict[tuple[str, str], list[float]], lost: int) -> Results:
    results = Results("mix")
    rows = []
    for setup in (SERVER, EMBEDDED):
        unit = "deltas/s" if setup == SERVER else "deltas a CPU s"
        singles = [
            statistics.fmean(rates_of_round)
            for rates_of_round in zip(*(rates[setup, kind.name] for kind in ONE_KIND), strict=True)
        ]
        for traffic in TRAFFICS:
            traffic_rates = rates[setup, traffic.name]
            shares = [rate / single for rate, single in zip(traffic_rates, singles, strict=True)]
            results.add_figure(f"{setup}: {traffic.name}", traffic_rates, unit)
            share = results.add_figure(f"{setup}: {traffic.name}: of one of each", shares, "×")
            figure = results.figures[f"{setup}: {traffic.name}"]
            rows.append((f"{setup}: {traffic.name}", format_figure(figure), f"{share.median:.2f}"))
            if traffic in (BY_BATCH, BY_ROW):
                results.add_goal(Goal("16", f"{setup}: {traffic.name}, of one of each", 0.5, 0.8), shares)
    header = ("", "deltas/s (in process: a CPU second)", "of one of each")
    results.tables.append(table(f"mixtures, {ROWS} deltas a batch", header, rows))
    results.notes.append("one of each: the mean of the four operations alone, in the same round")
    if lost:
        results.failures.append(f"{lost} deltas were lost")
    return results


if __name__ == "__main__":
    sys.exit(main())
