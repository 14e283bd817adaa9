"""Compares two saved runs, figure by figure: `./run bench compare OLD NEW`, files or folders of --json.

A figure is called better or worse only if the rounds of the two runs do not overlap. The exit status is 1
only if a figure is worse than a third of what it was: a shared machine moves figures by less than that.
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks._arguments import Arguments
from benchmarks._measure import table
from benchmarks._results import number, spread
from benchmarks._saved import FAR_WORSE, Change, Run, changes, read


def main(arguments: list[str] | None = None) -> int:
    """Compare and print; return the exit status."""
    parser = Arguments("compare", __doc__, failed="a figure is worse than a third of what it was")
    parser.add_argument("old", type=Path, help="a file, or a folder of files")
    parser.add_argument("new", type=Path, help="a file, or a folder of files, of another run")
    parser.add_argument("--all", action="store_true", help="also show figures within the noise")
    given = parser.parse_args(arguments)
    try:
        old, new = read([given.old]), read([given.new])
    except ValueError as error:
        parser.error(str(error))
    found = changes(old, new)
    if not found:
        names = ", ".join(old), ", ".join(new)
        parser.error(f"no figure is in both: {given.old} is of {names[0]}, {given.new} of {names[1]}")
    for name in sorted(old.keys() ^ new.keys()):
        print(f"{name} is skipped: only {given.old if name in old else given.new} has it", file=sys.stderr)
    return report(old, new, found, everything=given.all)


def report(old: Run, new: Run, found: list[Change], *, everything: bool) -> int:
    """Print the table of changes; return the exit status."""
    shown = [one for one in found if everything or one.verdict]
    rows = [
        (
            f"{one.bench}: {one.name}",
            spread(dict(one.before)),
            spread(dict(one.now)),
            one.unit,
            f"{one.ratio:.2f}",
            one.verdict,
        )
        for one in shown
    ]
    if rows:
        print(table("how many times better it is now", ("", "before", "now", "", "×", ""), rows))
    same = len(found) - sum(bool(one.verdict) for one in found)
    print(f"{len(found)} figures in both, {same} of them within the noise of their rounds")
    loop_turns_ns = [[results["calibration_ns"] for results in run.values()] for run in (old, new)]
    print(
        "a loop turn took",
        " and ".join(f"{number(min(one))} to {number(max(one))} ns" for one in loop_turns_ns),
    )
    return int(any(one.verdict == FAR_WORSE for one in found))


if __name__ == "__main__":
    sys.exit(main())
