"""Measures memory use: of a delta in each part of the service, an id, a vector, a producer, a connection.

Each case has a process of its own, which measures itself (or the server) before and after it has added many
items. The table also has the service's own estimate, if its memory limits include one.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from benchmarks._arguments import select_names
from benchmarks._measure import table
from benchmarks._memory_cases import CASES, Case, run
from benchmarks._processes import PROCESSES, end_forked, fork
from benchmarks._results import Goal, Results, format_number, options_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, write; return the exit status."""
    parser = options_of("memory", __doc__, rounds=3)
    parser.add_argument(
        "--only",
        type=select_names([case.name for case in CASES]),
        default="",
        metavar="PART",
        help="only cases whose name contains PART",
    )
    given = parser.parse_args(arguments)
    bytes_by_case: dict[Case, list[float]] = {}
    for _ in range(1 if given.quick else given.rounds):
        for case in CASES:
            if case.name in given.only:
                bytes_by_case.setdefault(case, []).append(measure(case, given.quick))
                print(f"{case.name}: {bytes_by_case[case][-1]:,.0f} B", file=sys.stderr)
    return report(bytes_by_case, quick=given.quick).finish(given.json)


def measure(case: Case, quick: bool) -> float:
    """Measure the bytes of one item, in a process of its own."""
    parent_pipe, child_pipe = PROCESSES.Pipe()
    process = fork(run, case.name, count_of(case, quick), child_pipe)
    try:
        result: Any = parent_pipe.recv() if parent_pipe.poll(300) else "no result after 300 s"
        process.join(5)
    finally:
        end_forked(process)
    if isinstance(result, str):
        raise RuntimeError(f"{case.name}: {result}")
    return float(result)


def count_of(case: Case, quick: bool) -> int:
    """Return the number of items to add."""
    return max(case.item_count // 4, 75) if quick else case.item_count


def report(bytes_by_case: Mapping[Case, Sequence[float]], *, quick: bool = False) -> Results:
    """Return table, figures, goals."""
    results = Results("memory")
    rows = []
    for case, rounds in bytes_by_case.items():
        figure = results.add_figure(case.name, rounds, "B", less=True)
        rows.append(
            (
                case.name,
                f"{count_of(case, quick):,}",
                f"{format_number(figure.median)} ({format_number(figure.low)}-{format_number(figure.high)})",
                "" if case.expected_bytes is None else f"{case.expected_bytes:,}",
            )
        )
        if case.expected_bytes is not None:
            results.add_goal(
                Goal("", f"memory: {case.name}", case.expected_bytes, unit="B", less=True), rounds
            )
    results.tables.append(table("bytes of memory of one", ("", "added", "B", "bound"), rows))
    results.notes.append(
        "the bytes of one depend on how many were added, because tables grow by doubling: compare two runs "
        f"only if both or neither used --quick; this one {'did' if quick else 'did not'}"
    )
    return results


if __name__ == "__main__":
    sys.exit(main())
