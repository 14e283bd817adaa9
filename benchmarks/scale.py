"""Compares a stream of one partition with one of two: the cost of several partitions in a program.

A program publishes the same calls with a `Producer` to the only partition of a stream, and with a
`StreamProducer` to both partitions of another stream of the same service. Its batches are divided between the
partitions, so it makes and reads twice as many frames, each of half the size.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from benchmarks._measure import ratios, table
from benchmarks._peers_ours import Ours
from benchmarks._results import Results, options_of
from delta_prop.client import Producer, StreamProducer
from delta_prop.client.request_client import RequestClient
from delta_prop_wire.delta import Delta, opaque
from delta_prop_wire.stream_requests import CreateStream

PARTITIONS = (1, 2)
CALL_DELTAS, CALLS_IN_FLIGHT, CALLS = 100, 40, 400
NAMES = {1: "Producer, one partition", 2: "StreamProducer, two partitions"}
_TIMEOUT_S = 30.0


class ProgramMeasurement(NamedTuple):
    """The figures of one round of a program."""

    cpu_us: float
    """Per delta, of the program."""
    server_cpu_us: float
    """Per delta, of the service."""
    lost: int


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, write; return the exit status."""
    parser = options_of("scale", __doc__, rounds=5)
    given = parser.parse_args(arguments)
    calls = CALLS // 4 if given.quick else CALLS
    rounds: dict[int, list[ProgramMeasurement]] = {}
    with Ours().running() as peer:
        for count in PARTITIONS:
            request = RequestClient("bench", None, None, _TIMEOUT_S, "start the service")
            request.ask(f"127.0.0.1:{peer.port}", CreateStream(_stream_of(count), count))
        for turn in range(given.rounds):
            for count in PARTITIONS:
                measurement = measure_program(peer, count, f"program {turn}", calls)
                rounds.setdefault(count, []).append(measurement)
                print(f"{turn} {NAMES[count]}: {measurement}", file=sys.stderr)
    return _report(rounds).finish(given.json)


def measure_program(peer: Ours, count: int, name: str, calls: int) -> ProgramMeasurement:
    """Measure a program that publishes `calls` calls to a stream with this number of partitions."""
    deltas = calls * CALL_DELTAS
    server_cpu_s = peer.cpu_s()
    cpu_s, acknowledged = asyncio.run(run_program(f"127.0.0.1:{peer.port}", count, name, calls))
    server_cpu_s = peer.cpu_s() - server_cpu_s
    return ProgramMeasurement(cpu_s / deltas * 1e6, server_cpu_s / deltas * 1e6, deltas - acknowledged)


async def run_program(address: str, count: int, name: str, calls: int) -> tuple[float, int]:
    """Publish by `calls` calls; return the seconds of CPU, and the number of acknowledged deltas."""
    stream = _stream_of(count)
    client = (
        Producer(address, name=name, stream=stream)
        if count == 1
        else StreamProducer(address, name=name, stream=stream)
    )
    contents = [
        [Delta(f"key-{(call * 37 + row * 11) % 1_000}", opaque(bytes(128))) for row in range(CALL_DELTAS)]
        for call in range(50)
    ]
    async with client:
        publish: Callable[..., object] = client.publish
        limit = asyncio.Semaphore(CALLS_IN_FLIGHT)

        async def publish_call(number: int) -> None:
            async with limit:
                await publish(*contents[number % len(contents)])  # type: ignore[misc]

        began = time.process_time()
        await asyncio.gather(*(publish_call(number) for number in range(calls)))
        cpu_s = time.process_time() - began
        statistics = client.statistics()
        counts = statistics if isinstance(statistics, list) else [statistics]
        return cpu_s, sum(each.acknowledged for each in counts)


def _stream_of(count: int) -> str:
    return f"bench-{count}"


def _report(rounds: Mapping[int, Sequence[ProgramMeasurement]]) -> Results:
    results, rows = Results("scale"), []
    for count in PARTITIONS:
        figures = [
            results.add_figure(
                f"{NAMES[count]}: {column}", [each[at] for each in rounds[count]], "µs", less=True
            )
            for at, column in enumerate(_COLUMNS)
        ]
        rows.append((NAMES[count], *map(str, figures)))
    single, double = (rounds[count] for count in PARTITIONS)
    quotients = []
    for at, column in enumerate(_COLUMNS):
        values = ratios([each[at] for each in double], [each[at] for each in single])
        quotients.append(results.add_figure(f"two partitions / one: {column}", values, "×", less=True))
    rows.append(("two / one", *(f"× {quotient}" for quotient in quotients)))
    results.tables.append(table(f"CPU a delta, µs, {CALL_DELTAS} deltas a call", ("", *_COLUMNS), rows))
    for count in PARTITIONS:
        lost = sum(each.lost for each in rounds[count])
        if lost:
            results.failures.append(f"{NAMES[count]}: {lost} deltas were not acknowledged")
    results.notes.append(f"{os.cpu_count()} cores for the service and its clients")
    return results


_COLUMNS = ("program", "server")
"""Columns of the table: the first fields of `ProgramMeasurement`."""


if __name__ == "__main__":
    sys.exit(main())
