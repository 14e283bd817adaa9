"""What things take in memory: a delta in each place it may be in, an id, a vector, a producer, a connection.

Each case has a process of its own, which looks at itself (or at the server) before and after it has added
many. Beside it stands what the service counts on, where its limits are added up.
"""

from __future__ import annotations

import multiprocessing
import sys
from typing import TYPE_CHECKING, Any

from benchmarks._measure import table
from benchmarks._memory_cases import CASES, Case, run
from benchmarks._results import Goal, Results, number, options_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_PROCESSES = multiprocessing.get_context("forkserver")


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, write."""
    parser = options_of("memory", __doc__, rounds=3)
    parser.add_argument("--only", default="", metavar="PART", help="only cases whose name has it")
    given = parser.parse_args(arguments)
    if given.rounds < 1:
        parser.error("give at least 1 round")
    found: dict[Case, list[float]] = {}
    for _ in range(1 if given.quick else given.rounds):
        for case in CASES:
            if given.only in case.name:
                found.setdefault(case, []).append(measured(case, given.quick))
                print(f"{case.name}: {found[case][-1]:,.0f} B", file=sys.stderr)
    return report(found).finish(given.json)


def measured(case: Case, quick: bool) -> float:
    """Bytes of one, in a process of its own."""
    here, there = _PROCESSES.Pipe()
    count = max(case.things // 4, 75) if quick else case.things
    process = _PROCESSES.Process(target=run, args=(case.name, count, there))
    process.start()
    try:
        told: Any = here.recv() if here.poll(300) else "it has said nothing for 300 s"
    finally:
        process.join(10)
        process.kill()
    if isinstance(told, str):
        raise RuntimeError(f"{case.name}: {told}")
    return float(told)


def report(found: Mapping[Case, Sequence[float]]) -> Results:
    """Table, figures, goals."""
    results = Results("memory")
    rows = []
    for case, some in found.items():
        figure = results.figure(case.name, some, "B", less=True)
        rows.append(
            (
                case.name,
                f"{number(figure.median)} ({number(figure.low)}-{number(figure.high)})",
                "" if case.counted_on is None else f"{case.counted_on:,}",
            )
        )
        if case.counted_on is not None:
            results.goal(Goal("", f"memory: {case.name}", case.counted_on, unit="B", less=True), some)
    results.tables.append(table("bytes of memory of one", ("", "B", "counted on"), rows))
    return results


if __name__ == "__main__":
    sys.exit(main())
