"""Measures the cost of a delta as the service grows: vectors, subscriptions, sinks, log, pending deltas.

One service holds few things, each of the others many things of one kind. All run in processes of their own,
with their log in a directory, at ack level logged. Batches have 100 rows, which set all 16 numbers of a
vector drawn at random, or 8 of them. CPU time is measured, in interleaved rounds. The service with 10 million
vectors has 1,000 subscriptions of one vector each: the share of deltas with a subscription is that of the
small one.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace

from benchmarks._arguments import bounded_int
from benchmarks._growth_service import Holdings, Service
from benchmarks._measure import ratios, table
from benchmarks._results import Goal, Results, options_of
from delta_prop_wire.delta import Kind

BASE = "10 thousand vectors, 1 subscription"
LARGE_VECTORS, LARGE_SUBSCRIPTIONS = 10_000_000, 1_000
# The end of the name of the largest service; a quick run makes this service, and its name, smaller.
LARGE_SUFFIX = "million vectors, 1,000 subscriptions"
LARGE = f"10 {LARGE_SUFFIX}"
CASES = (
    Holdings(BASE),
    Holdings("1 million vectors", vectors=1_000_000),
    Holdings(LARGE, vectors=LARGE_VECTORS, subscriptions=LARGE_SUBSCRIPTIONS),
    Holdings("1,000 subscriptions", subscriptions=LARGE_SUBSCRIPTIONS),
    Holdings("8 sinks", sinks=8),
    Holdings("5 million deltas in the log", logged=5_000_000),
    Holdings("9,000 deltas that wait", pending=9_000),
)
KINDS = (Kind.DENSE, Kind.SPARSE)


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, write; return the exit status."""
    parser = options_of("growth", __doc__, rounds=7)
    parser.add_only(
        [case.name for case in CASES], "only cases whose name contains PART, and the small service"
    )
    parser.option(
        "--heads", bounded_int(0), 0, "maximum number of vectors whose last dot is held; 0: the default"
    )
    given = parser.parse_args(arguments)
    cases = [case for case in CASES if case.name in (BASE, *given.only)]
    if given.quick:
        cases = [_quick_case(case) for case in cases]
    cases = [replace(case, heads_max=given.heads) for case in cases]
    services: dict[str, Service] = {}
    try:
        for case in cases:
            services[case.name] = Service(case)
            print(f"{case.name}: built in {services[case.name].built_s:.1f} s", file=sys.stderr)
        costs = measure(services, given.rounds, 10_000 if given.quick else 30_000)
    finally:
        for service in services.values():
            service.stop()
    return report(costs).finish(given.json)


def _quick_case(case: Holdings) -> Holdings:
    """Return a smaller case for a quick run, under a name of its own."""
    vectors, logged = min(case.vectors, 1_000_000), case.logged // 5
    name = case.name.replace("10 million", "1 million").replace("5 million", "1 million")
    return replace(case, name=name, vectors=vectors, logged=logged)


def measure(
    services: Mapping[str, Service], rounds: int, delta_count: int
) -> dict[tuple[str, Kind], list[float]]:
    """Measure CPU µs per delta, by name and kind, round by round; the first round warms up."""
    costs: dict[tuple[str, Kind], list[float]] = {}
    for turn in range(rounds + 1):
        for kind in KINDS:
            for name, service in services.items():
                cost = service.cpu_us(kind, delta_count)
                if turn:
                    costs.setdefault((name, kind), []).append(cost)
    return costs


def report(costs: Mapping[tuple[str, Kind], Sequence[float]]) -> Results:
    """Return table, figures, goals: each relative to the small service in the same round."""
    results = Results("growth")
    rows = []
    for (name, kind), rounds in costs.items():
        label, shares = f"{name}, {kind.name.lower()}", ratios(rounds, costs[BASE, kind])
        cost = results.add_figure(label, rounds, "µs a delta", less=True)
        share = results.add_figure(f"{label}: of the small", shares, "×", less=True)
        rows.append((label, cost, share))
        if name.endswith(LARGE_SUFFIX):
            results.add_goal(Goal("17", f"{label}: CPU", 2.0, 1.3, less=True), shares)
    header = ("", "CPU µs a delta", "of the small service")
    results.tables.append(table("cost of a delta, by the content of the service", header, rows))
    return results


if __name__ == "__main__":
    sys.exit(main())
