"""Measures the cost of mixed traffic: ten namespaces and four operations, against one of each.

Deltas go through `delta-prop serve` (from publish to receive, one consumer of everything, wall time), and
through an embedded service (log in a directory, one sink that takes everything, CPU time). All rows have 16
numbers, or 8 with their indices. By row: each delta of a batch differs from its predecessor in namespace or
operation. By batch: a batch has one namespace and one operation, and the next batch differs in one of them.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass

import anyio
import numpy as np

from benchmarks._growth_service import CountingSink
from benchmarks._measure import ratios, table
from benchmarks._peers_contract import Consumer, Publisher
from benchmarks._peers_ours import Ours, RawConsumer, RawPublisher, number_frame, with_counter
from benchmarks._peers_scenes import Scene, measure
from benchmarks._results import Goal, Results, options_of
from delta_prop.api.propagator import Propagator
from delta_prop.api.settings import Settings
from delta_prop.client import SyncProducer
from delta_prop_wire.batch import Batch
from delta_prop_wire.codec import encode
from delta_prop_wire.delta import (
    AckLevel,
    Delta,
    Kind,
    Priority,
    dense,
    make_origin,
    opaque,
    producer_id_of,
    sparse,
    sparse_add,
)
from delta_prop_wire.encode import encode_batch
from delta_prop_wire.frames import BatchFrame, OriginGrant
from delta_prop_wire.topics import ALL, Topic

DIMENSION, CHANGED = 16, 8
KEYS = 1_000
"""Vectors of all namespaces together."""
NAMESPACES = 10
TEMPLATES = 40
"""Batches of one traffic, which are published in turn."""
_INDICES = np.arange(CHANGED, dtype=np.uint32) * 2
_NUMBERS = np.arange(DIMENSION, dtype=np.float32) / 8
OPERATIONS = {
    Kind.DENSE: dense(_NUMBERS),
    Kind.SPARSE: sparse(_INDICES, _NUMBERS[:CHANGED]),
    Kind.SPARSE_ADD: sparse_add(_INDICES, _NUMBERS[:CHANGED]),
    Kind.OPAQUE: opaque(_NUMBERS.tobytes()),
}
KINDS = tuple(OPERATIONS)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Deltas of these kinds. `by_row`: kind and namespace change by row, else by batch."""

    name: str
    namespaces: int
    kinds: tuple[Kind, ...]
    by_row: bool = False

    def batches(self, topic: str, rows: int, origin: int, level: AckLevel, epoch: int) -> Iterator[Batch]:
        """Yield `TEMPLATES` batches of `rows` rows, which use every namespace and kind, from counter 1 on."""
        rng = random.Random(rows)
        for number in range(TEMPLATES):
            deltas = [
                self._delta(topic, number * rows + row if self.by_row else number, rng) for row in range(rows)
            ]
            yield encode_batch(deltas, origin=origin, base=1, epoch=epoch, ack_level=level)

    def create_deltas(self, topic: str) -> list[Delta]:
        """Return the deltas that create the vectors."""
        return [
            Delta(f"key-{key}", dense(_NUMBERS), namespace=f"{topic}-{namespace_number}")
            for namespace_number in range(self.namespaces)
            for key in range(KEYS // self.namespaces)
        ]

    def _delta(self, topic: str, turn: int, rng: random.Random) -> Delta:
        kind = self.kinds[turn % len(self.kinds)]
        namespace_number = turn // len(self.kinds) % self.namespaces
        key = rng.randrange(KEYS // self.namespaces)
        name = f"fact-{key}" if kind is Kind.OPAQUE else f"key-{key}"
        return Delta(name, OPERATIONS[kind], namespace=f"{topic}-{namespace_number}")


ONE_KIND = tuple(Traffic(f"one namespace, {kind.name.lower()}", 1, (kind,)) for kind in KINDS)
BY_BATCH = Traffic(f"{NAMESPACES} namespaces, {len(KINDS)} operations, by batch", NAMESPACES, KINDS)
BY_ROW = Traffic(f"{NAMESPACES} namespaces, {len(KINDS)} operations, by row", NAMESPACES, KINDS, by_row=True)


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
    with Ours().running() as server:
        for turn in range(given.rounds):
            for traffic in TRAFFICS:
                rate, missing = measure_server(server, traffic, f"m{turn}", seconds)
                rates.setdefault((SERVER, traffic.name), []).append(rate)
                lost += missing
    for turn in range(given.rounds):
        for traffic in TRAFFICS:
            rate = anyio.run(measure_embedded, traffic, 20_000 if given.quick else 60_000)
            rates.setdefault((EMBEDDED, traffic.name), []).append(rate)
            print(f"{turn} {traffic.name}: {rate:,.0f} a CPU second in process", file=sys.stderr)
    return _report(rates, lost).finish(given.json)


def measure_server(server: Ours, traffic: Traffic, topic: str, seconds: float) -> tuple[float, int]:
    """Return the deltas per second until the consumer has the last one, and the number of lost deltas."""
    topic = f"{topic}{TRAFFICS.index(traffic)}"
    address = f"127.0.0.1:{server.port}"
    with SyncProducer(address, name=f"first-{topic}", ack_level=AckLevel.LOGGED) as producer:
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


class OursWithTraffic(Ours):
    """A running server, with clients of one traffic."""

    def __init__(self, server: Ours, traffic: Traffic) -> None:
        super().__init__()
        self.traffic = traffic
        self.port, self.http_port, self.processes = server.port, server.http_port, server.processes

    def publisher(self, topic: str) -> Publisher:
        """See `Peer`."""
        return _Publisher(self.port, topic, self.level, self.traffic)

    def consumer(self, topic: str, number: int, size: int) -> Consumer:
        """See `Peer`. The consumer takes every topic."""
        return _Consumer(self.port, topic, f"{topic}-{number}", size)


class _Frames:
    """Frames made from encoded batches."""

    def __init__(self, batches: Iterator[Batch]) -> None:
        self._templates = [encode(BatchFrame(1, batch, ack_wanted=True)) for batch in batches]
        self._turn = 0

    def frame(self, counter: int, payloads: bytes) -> bytearray:
        """See `FrameMaker`. The batch is encoded already, so `payloads` is not used."""
        frame = bytearray(self._templates[self._turn])
        self._turn = (self._turn + 1) % TEMPLATES
        number_frame(frame, counter)
        return frame


class _Publisher(RawPublisher):
    def __init__(self, port: int, topic: str, level: AckLevel, traffic: Traffic) -> None:
        super().__init__(port, topic, level)
        self._traffic = traffic

    def frames_of(self, topic: str, grant: OriginGrant, level: AckLevel, shape: tuple[int, int]) -> _Frames:
        """Return frames of the traffic; of `shape` only the number of rows is used."""
        return _Frames(self._traffic.batches(topic, shape[0], grant.origin, level, grant.epoch))


class _Consumer(RawConsumer):
    def topic_of(self, topic: str) -> Topic:
        """Return the topic of everything."""
        return ALL

    def stamps_of(self, data: bytes, end: int, rows: int) -> bytes:
        """Return zeros: these rows carry no times, and their counters are checked."""
        return bytes(8 * rows)


# --- results


def _report(rates: dict[tuple[str, str], list[float]], lost: int) -> Results:
    results = Results("mix")
    rows = []
    for setup in (SERVER, EMBEDDED):
        unit = "deltas/s" if setup == SERVER else "deltas a CPU s"
        singles = zip(*(rates[setup, kind.name] for kind in ONE_KIND), strict=True)
        references = list(map(statistics.fmean, singles))
        for traffic in TRAFFICS:
            traffic_rates = rates[setup, traffic.name]
            shares = ratios(traffic_rates, references)
            name = f"{setup}: {traffic.name}"
            figure = results.add_figure(name, traffic_rates, unit)
            share = results.add_figure(f"{name}: of unmixed traffic", shares, "×")
            rows.append((name, figure, f"{share.median:.2f}"))
            if traffic in (BY_BATCH, BY_ROW):
                results.add_goal(Goal("", f"{name}, of unmixed traffic", 0.5, 0.8), shares)
    header = ("", "deltas/s (in process: a CPU second)", "of unmixed traffic")
    results.tables.append(table(f"mixtures, {ROWS} deltas a batch", header, rows))
    results.notes.append("unmixed traffic: the mean of the four operations alone, in the same round")
    if lost:
        results.failures.append(f"{lost} deltas were lost")
    return results


if __name__ == "__main__":
    sys.exit(main())
