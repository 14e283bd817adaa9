"""Compares one service with two: the gain of a second service, and the cost of spreading in a program.

Two raw publishers, each with its consumer if there is one, write to one service or each to its own: the load
is divided beforehand, without a client's hash, so that services are measured. All services share the
machine's cores with their clients: besides the rate, the CPU per delta shows the gain on services with cores
of their own.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import NamedTuple

from benchmarks._measure import ratios, table
from benchmarks._peers_ours import Ours, OursDurable
from benchmarks._peers_scenes import Measurement, Scene, measure
from benchmarks._results import Goal, Results, options_of
from delta_prop.client import Producer, SpreadProducer
from delta_prop_wire.delta import Delta, opaque

PAIRS = 2
"""Number of publishers, each with a consumer of its topic."""
SERVICES = (1, 2)
CALL_DELTAS, CALLS_IN_FLIGHT, CALLS = 100, 40, 400
_WAIT_S_MAX = 60.0


class Setting(NamedTuple):
    """One measurement: the type of its services, which have the ack level, and the consumers of each pair."""

    name: str
    service_type: type[Ours]
    consumers: int


SETTINGS = (
    Setting("publish to receive", Ours, 1),
    Setting("publish to ack", Ours, 0),
    Setting("publish to ack, durable", OursDurable, 0),
)


class ScaleMeasurement(NamedTuple):
    """The figures of one round of a setting."""

    deltas_a_second: float
    server_cpu_us: float
    """Per delta, over all services."""
    client_cpu_us: float
    lost: int


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, write; return the exit status."""
    parser = options_of("scale", __doc__, rounds=5)
    given = parser.parse_args(arguments)
    seconds = 0.5 if given.quick else 1.5
    measurements: dict[tuple[str, int], list[ScaleMeasurement]] = {}
    programs: dict[int, list[float]] = {}
    with ExitStack() as exits:
        running = {
            service_type: [exits.enter_context(service_type().running()) for _ in range(max(SERVICES))]
            for service_type in dict.fromkeys(setting.service_type for setting in SETTINGS)
        }
        for turn in range(given.rounds):
            for setting in SETTINGS:
                for count in SERVICES:
                    measurement = measure_services(
                        running[setting.service_type][:count], setting, f"s{turn}", seconds
                    )
                    measurements.setdefault((setting.name, count), []).append(measurement)
                    print(f"{turn} {setting.name}: {count}: {measurement}", file=sys.stderr)
            for count in SERVICES:
                ports = [peer.port for peer in running[Ours][:count]]
                programs.setdefault(count, []).append(
                    asyncio.run(program_cpu_us(ports, f"program {turn} {count}"))
                )
    return _report(measurements, programs).finish(given.json)


class _BarrierPeer(Ours):
    """A running service for one pair of clients. The first call of `counters` waits for all pairs."""

    def __init__(self, peer: Ours, ready: threading.Barrier) -> None:
        super().__init__()
        self.port, self.http_port = peer.port, peer.http_port
        self.level = peer.level  # type: ignore[misc]
        self._ready: threading.Barrier | None = ready

    def __getstate__(self) -> Mapping[str, object]:
        return {**super().__getstate__(), "_ready": None}

    def counters(self) -> dict[str, float]:
        """Wait at the barrier the first time; return no counters."""
        if self._ready is not None:
            self._ready.wait(_WAIT_S_MAX)
            self._ready = None
        return {}


def measure_services(
    services: Sequence[Ours], setting: Setting, topic: str, seconds: float
) -> ScaleMeasurement:
    """Measure all pairs concurrently, divided among the services."""
    scene = Scene(setting.name, consumers=setting.consumers, seconds_max=seconds)
    ready = threading.Barrier(PAIRS)
    peers = [_BarrierPeer(services[pair % len(services)], ready) for pair in range(PAIRS)]

    def measure_pair(pair: int) -> Measurement:
        return measure(peers[pair], scene, f"{topic}x{pair}x{setting.consumers}x{len(services)}")

    cpu_s = sum(peer.cpu_s() for peer in services)
    with ThreadPoolExecutor(PAIRS) as pool:
        pairs = list(pool.map(measure_pair, range(PAIRS)))
    cpu_s = sum(peer.cpu_s() for peer in services) - cpu_s
    deltas = sum(pair.deltas for pair in pairs)
    clients = sum((pair.publisher_cpu_us + pair.consumer_cpu_us) * pair.deltas for pair in pairs)
    return ScaleMeasurement(
        sum(pair.deltas_a_second for pair in pairs),
        cpu_s / deltas * 1e6,
        clients / deltas,
        sum(pair.lost + pair.twice for pair in pairs),
    )


async def program_cpu_us(ports: Sequence[int], name: str) -> float:
    """Measure CPU µs per delta of a program that publishes 100 a call, to one or to several services."""
    addresses = [f"127.0.0.1:{port}" for port in ports]
    client = SpreadProducer(addresses, name=name) if len(addresses) > 1 else Producer(addresses[0], name=name)
    calls = [
        [Delta(f"key-{(call * 37 + row * 11) % 1_000}", opaque(bytes(128))) for row in range(CALL_DELTAS)]
        for call in range(50)
    ]
    async with client:
        publish: Callable[..., object] = client.publish
        limit = asyncio.Semaphore(CALLS_IN_FLIGHT)

        async def publish_call(number: int) -> None:
            async with limit:
                await publish(*calls[number % len(calls)])  # type: ignore[misc]

        began = time.process_time()
        await asyncio.gather(*(publish_call(number) for number in range(CALLS)))
        return (time.process_time() - began) / (CALLS * CALL_DELTAS) * 1e6


def _report(
    measurements: Mapping[tuple[str, int], Sequence[ScaleMeasurement]],
    programs: Mapping[int, Sequence[float]],
) -> Results:
    results, rows = Results("scale"), []
    for setting in SETTINGS:
        single, double = (measurements[setting.name, count] for count in SERVICES)
        for count, rounds in zip(SERVICES, (single, double), strict=True):
            label = f"{setting.name}, {count} services"
            figures = [
                results.add_figure(f"{label}: {column}", [each[at] for each in rounds], unit, less=at > 0)
                for at, (column, unit) in enumerate(_UNITS.items())
            ]
            rows.append((label, *map(str, figures)))
        (rates, rates_of_two), (cpu, cpu_of_two) = (
            ([each[at] for each in single], [each[at] for each in double]) for at in (0, 1)
        )
        rate_ratios, cpu_ratios = ratios(rates_of_two, rates), ratios(cpu_of_two, cpu)
        what = f"{setting.name}: two against one"
        rate = results.add_figure(f"{what}, rate", rate_ratios, "×")
        server_cpu = results.add_figure(f"{what}, server CPU a delta", cpu_ratios, "×", less=True)
        rows.append((f"{setting.name}: two / one", f"× {rate}", f"× {server_cpu}", ""))
        results.add_goal(
            Goal("scale", f"{setting.name}: server CPU a delta, two / one", 1.25, 1.0, less=True), cpu_ratios
        )
        lost = sum(each.lost for each in (*single, *double))
        if lost:
            results.failures.append(f"{setting.name}: {lost} deltas were lost, or came twice")
    results.tables.append(table(f"{PAIRS} pairs of clients, batch 100", ("", *_UNITS), rows))
    programs_by_name = zip(
        ("Producer, one service", "SpreadProducer, two services"), programs.items(), strict=True
    )
    program_rows = [
        (
            name,
            results.add_figure(f"a program, {count} services: CPU a delta", program_rounds, "µs", less=True),
        )
        for name, (count, program_rounds) in programs_by_name
    ]
    title = f"a program's own CPU a delta, µs, {CALL_DELTAS} deltas a call"
    results.tables.append(table(title, ("", "µs"), program_rows))
    results.notes.append(
        f"{os.cpu_count()} cores for the services and their clients: if two services cost as much CPU a "
        "delta as one alone, the rate doubles once each has its own core"
    )
    return results


_UNITS = {"deltas/s": "deltas/s", "server": "µs", "clients": "µs"}
"""Columns of the table, with their units: the first fields of `ScaleMeasurement`."""


if __name__ == "__main__":
    sys.exit(main())
