"""`delta-prop simulate mutants`: whether the checks find named wrong versions of our own code.

The right program stands first, and must break nothing; each mutant must be found within so many seeds.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING

from delta_prop.commands import edge
from delta_prop_simulations.disasters.mutants import MUTANTS
from delta_prop_simulations.disasters.mutants.hunt import SEEDS_MAX, Hunt, hunt
from delta_prop_simulations.processes import cores, in_processes
from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Iterable, Iterator, Sequence

_EVIDENCE_MAX = 60
_BLOCK = 25
"""Seeds of the right program that one process runs at a time."""


def add_arguments(parser: ArgumentParser) -> None:
    """Which, how many seeds, on how many cores."""
    parser.description = (
        "Puts named mistakes into the running code, one at a time, and runs seeds until a check finds each. "
        "Exit status 1 where one is not found, or the right program breaks a promise."
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="these mutants alone (default: all)")
    parser.add_argument("--seeds", type=int, default=SEEDS_MAX, metavar="N", help="at most so many each")
    parser.add_argument("--jobs", type=int, default=cores(), metavar="J", help="processes (default: cores)")
    parser.add_argument("--list", action="store_true", help="say what each mutant does wrong, and run none")
    parser.add_argument("--json", action="store_true", help="print the outcome as JSON")


def run(options: Namespace) -> int:
    """Hunt them and print the table."""
    if options.list:
        for mutant in MUTANTS.values():
            print(f"{mutant.name}: {mutant.what}; promised: {mutant.promise}")
        return 0
    names = chosen(options.names)
    found = list(_hunts(names, options.seeds, options.jobs))
    right = joined(one for one in found if one.mutant is None)
    hunts = sorted((one for one in found if one.mutant), key=lambda one: names.index(one.mutant or ""))
    if options.json:
        print(json.dumps([asdict(one) for one in (right, *hunts)], indent=1))
    else:
        print("\n".join(table([right, *hunts])))
    return int(right.found or not all(one.found for one in hunts))


def chosen(names: Sequence[str]) -> list[str]:
    """The mutants of these names, all where none is given. Raises UsageError."""
    for name in names:
        if name not in MUTANTS:
            raise UsageError(f"{name}: there is no such mutant; --list names them")
    return [name for name in MUTANTS if not names or name in names]


def _hunts(names: Sequence[str], seeds: int, jobs: int) -> Iterator[Hunt]:
    works = [partial(hunt, name, range(seeds)) for name in names]
    works += [partial(hunt, None, range(at, min(at + _BLOCK, seeds))) for at in range(0, seeds, _BLOCK)]
    progress = edge.Progress()
    try:
        progress.tell(f"0 of {len(works)} hunts")
        for done, one in enumerate(in_processes(works, jobs), 1):
            progress.tell(f"{done} of {len(works)} hunts")
            yield one
    finally:
        progress.end()


def joined(parts: Iterable[Hunt]) -> Hunt:
    """The hunts of one program over several stretches of seeds, as one."""
    parts = list(parts)
    first = min((one for one in parts if one.found), key=lambda one: one.seed or 0, default=Hunt(None, 0, 0))
    tried, reached = sum(one.tried for one in parts), sum(one.reached for one in parts)
    return Hunt(first.mutant, tried, reached, first.seed, first.check, first.evidence)


def table(hunts: Sequence[Hunt]) -> list[str]:
    """The lines of the table."""
    wide = max(len(one.mutant or "the right program") for one in hunts)
    lines = [f"{'mutant':{wide}}  {'seeds':>5}  {'check':10}  evidence"]
    return lines + [_line(one, wide) for one in hunts]


def _line(one: Hunt, wide: int) -> str:
    name = one.mutant or "the right program"
    if one.found:
        evidence = f"seed {one.seed}: {one.evidence[:_EVIDENCE_MAX]}"
    elif one.mutant is None:
        evidence = f"0 of {one.tried} seeds break a promise"
    elif one.reached:
        evidence = f"not found; its code ran with {one.reached} of them"
    else:
        evidence = "never reached"
    return f"{name:{wide}}  {one.tried:5}  {one.check or '-':10}  {evidence}"
