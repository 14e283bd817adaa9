"""Measures the cost of a delta as the service grows: vectors, subscriptions, sinks, log, pending deltas.

One service holds few things, each of the others many things of one kind. All run in processes of their own,
with their log in a directory, at ack level logged. Batches have 100 rows, which set all 16 numbers of a
vector drawn at random, or 8 of them. CPU time is measured, in interleaved rounds. A subscription is of one
vector. `--only "10 million"` judges the goals alone.
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
LARGE = "10 million vectors"
CASES = (
    Holdings(BASE),
    Holdings("1 million vectors, 1,000 subscriptions", vectors=1_000_000, subscriptions=1_000),
    Holdings(LARGE, vectors=10_000_000),
    Holdings("1,000 subscriptions", subscriptions=1_000),
    Holdings("8 sinks", sinks=8),
    Holdings("5 million deltas in the log", logged=5_000_000),
    Holdings("9,000 deltas that wait", pending=9_000),
)
KINDS = (Kind.DENSE, Kind.SPARSE)


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, write; return the exit status."""
    parser = options_of("growth", __doc__, rounds=15)
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
    held_bytes = {case: services[case.name].held_bytes for case in cases}
    return report(costs, held_bytes).finish(given.json)


def _quick_case(case: Holdings) -> Holdings:
    """Return a smaller case for a quick run, under a name of its own."""
    name = case.name.replace("10 million", "2 million").replace("5 million", "1 million")
    return replace(case, name=name, vectors=min(case.vectors, 2_000_000), logged=case.logged // 5)


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


def report(
    costs: Mapping[tuple[str, Kind], Sequence[float]], held_bytes: Mapping[Holdings, float]
) -> Results:
    """Return table, figures, goals: each relative to the small service in the same round.

    `held_bytes`: the memory of each service before it was measured.
    """
    results = Results("growth")
    rows = []
    small = min(held_bytes, key=lambda case: case.name != BASE)
    large = max(held_bytes, key=lambda case: (case.subscriptions == small.subscriptions, case.vectors))
    for (name, kind), rounds in costs.items():
        label, base = f"{name}, {kind.name.lower()}", costs[BASE, kind]
        cost = results.add_figure(label, rounds, "µs a delta", less=True)
        share = results.add_figure(f"{label}: of the small", ratios(rounds, base), "×", less=True)
        rows.append((label, cost, share))
        if name == large.name and large is not small:
            more_us = [one - other for one, other in zip(rounds, base, strict=True)]
            goal = Goal("11", f"{label}: CPU a delta above the small", 0.25, 0.15, "µs", less=True)
            results.add_goal(goal, more_us)
    if large is not small:
        head = (held_bytes[large] - held_bytes[small]) / (large.vectors - small.vectors)
        results.add_goal(Goal("11", f"{large.name}: memory of a head", 60, unit="B", less=True), [head])
    header = ("", "CPU µs a delta", "of the small service")
    results.tables.append(table("cost of a delta, by the content of the service", header, rows))
    return results


if __name__ == "__main__":
    sys.exit(main())
