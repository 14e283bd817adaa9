"""What things take in memory: a delta in each place it may be in, an id, a vector, a producer, a connection.

Each case has a process of its own, which looks at itself (or at the server) before and after it has added
many. Beside it stands what the service counts on, where its limits are added up.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from benchmarks._arguments import named
from benchmarks._measure import table
from benchmarks._memory_cases import CASES, Case, run
from benchmarks._processes import PROCESSES, end_forked, forked
from benchmarks._results import Goal, Results, number, options_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, write."""
    parser = options_of("memory", __doc__, rounds=3)
    parser.add_argument(
        "--only",
        type=named([case.name for case in CASES]),
        default="",
        metavar="PART",
        help="only cases whose name has it",
    )
    given = parser.parse_args(arguments)
    found: dict[Case, list[float]] = {}
    for _ in range(1 if given.quick else given.rounds):
        for case in CASES:
            if case.name in given.only:
                found.setdefault(case, []).append(measured(case, given.quick))
                print(f"{case.name}: {found[case][-1]:,.0f} B", file=sys.stderr)
    return report(found, quick=given.quick).finish(given.json)


def measured(case: Case, quick: bool) -> float:
    """Bytes of one, in a process of its own."""
    here, there = PROCESSES.Pipe()
    process = forked(run, case.name, things(case, quick), there)
    try:
        told: Any = here.recv() if here.poll(300) else "it has said nothing for 300 s"
        process.join(5)
    finally:
        end_forked(process)
    if isinstance(told, str):
        raise RuntimeError(f"{case.name}: {told}")
    return float(told)


def things(case: Case, quick: bool) -> int:
    """How many are added."""
    return max(case.things // 4, 75) if quick else case.things


def report(found: Mapping[Case, Sequence[float]], *, quick: bool = False) -> Results:
    """Table, figures, goals."""
    results = Results("memory")
    rows = []
    for case, some in found.items():
        figure = results.figure(case.name, some, "B", less=True)
        rows.append(
            (
                case.name,
                f"{things(case, quick):,}",
                f"{number(figure.median)} ({number(figure.low)}-{number(figure.high)})",
                "" if case.counted_on is None else f"{case.counted_on:,}",
            )
        )
        if case.counted_on is not None:
            results.goal(Goal("", f"memory: {case.name}", case.counted_on, unit="B", less=True), some)
    results.tables.append(table("bytes of memory of one", ("", "added", "B", "counted on"), rows))
    results.notes.append(
        "the bytes of one depend on how many were added, as tables grow by doubling: hold two runs beside "
        f"each other only where both or neither were --quick; this one was{'' if quick else ' not'}"
    )
    return results


if __name__ == "__main__":
    sys.exit(main())
