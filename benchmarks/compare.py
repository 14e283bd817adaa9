"""Compares two saved runs, figure by figure: `./run bench compare OLD NEW`.

Both are files that --json wrote, or folders of them.

A figure is called better or worse only if the rounds of the two runs do not overlap. The exit status is 1
only if a figure is more than three times worse than it was: a shared machine moves figures by less than that.
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks._arguments import Arguments
from benchmarks._measure import format_number, table
from benchmarks._results import format_figure
from benchmarks._saved import FAR_WORSE, Change, Run, changes, read


def main(arguments: list[str] | None = None) -> int:
    """Compare and print; return the exit status."""
    parser = Arguments("compare", __doc__, status_1="a figure is more than three times worse than it was")
    parser.add_argument("old", type=Path, help="a file, or a folder of files")
    parser.add_argument("new", type=Path, help="a file, or a folder of files, of another run")
    parser.add_argument("--all", action="store_true", help="also show figures within the noise")
    given = parser.parse_args(arguments)
    try:
        old, new = read([given.old]), read([given.new])
    except ValueError as error:
        parser.error(str(error))
    compared = changes(old, new)
    if not compared:
        names = ", ".join(old), ", ".join(new)
        parser.error(f"no figure is in both: {given.old} is of {names[0]}, {given.new} of {names[1]}")
    for name in sorted(old.keys() ^ new.keys()):
        print(f"{name} is skipped: only {given.old if name in old else given.new} has it", file=sys.stderr)
    return report(old, new, compared, show_all=given.all)


def report(old: Run, new: Run, compared: list[Change], *, show_all: bool) -> int:
    """Print the table of changes; return the exit status."""
    shown = [change for change in compared if show_all or change.verdict]
    rows = [
        (
            f"{change.bench}: {change.name}",
            format_figure(dict(change.before)),
            format_figure(dict(change.now)),
            change.unit,
            f"{change.ratio:.2f}",
            change.verdict,
        )
        for change in shown
    ]
    if rows:
        print(table("how many times better it is now", ("", "before", "now", "", "×", ""), rows))
    same = len(compared) - sum(bool(change.verdict) for change in compared)
    print(f"{len(compared)} figures in both, {same} of them within the noise of their rounds")
    loop_turns_ns = [[results["calibration_ns"] for results in run.values()] for run in (old, new)]
    print(
        "a loop turn took",
        " and ".join(
            f"{format_number(min(times))} to {format_number(max(times))} ns" for times in loop_turns_ns
        ),
    )
    return int(any(change.verdict == FAR_WORSE for change in compared))


if __name__ == "__main__":
    sys.exit(main())
