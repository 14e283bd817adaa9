"""Kills the service at random moments while producers publish, and checks that all it acknowledged is there.

After each kill it is started again on the same directory; what its log, its producers' marks and its SQLite
file then hold is compared with every acknowledgement that was printed, before the producers go on where they
stopped. Directories take turns: a service with several producers, the same with a SQLite file fed from it,
the command `delta-prop publish`. Exit status 1 where anything is not as it was acknowledged.

With --disk-faults nothing is killed: the disk beneath a server, and beneath a program with the service in
it, fails in its calls (a preloaded library, which takes a C compiler) or is full (a small file system, which
takes root on Linux), while callers of every kind publish and connect again. Once the log has recovered in
place, every answer that anybody got is held against it. Exit status 77 where neither can be had.
"""

from __future__ import annotations

import os
import random
import sqlite3
import sys
import tempfile
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks._arguments import Arguments, whole, writable_file
from benchmarks._crash_check import Verdict
from benchmarks._crash_disk import run as run_disk_faults
from benchmarks._crash_rounds import CommandStory, Story, Terms, Totals
from benchmarks._crash_writer import UNDER_WAY
from benchmarks._measure import percentile, table, write_json

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

RESTART_S_MAX = 2.0
ALONE, TABLE, COMMAND = "service", "service and SQLite", "command"
KINDS = (
    "lost", "moved", "given twice", "duplicate", "order", "hole", "corrupt", "forgotten", "refused", "table",
    "start",
)  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """Kill, check, print."""
    parser = Arguments(
        "crash", __doc__, failed="an answer was not true, or a start took too long; 77: nothing could be run"
    )
    parser.add_argument(
        "--rounds",
        type=whole(1, 1_000_000),
        default=50,
        help="how often the process is killed, or its disk fails",
    )
    parser.add_argument("--quick", action="store_true", help="a short run: 6 rounds at most")
    parser.add_argument(
        "--lives", type=whole(1, 1_000_000), default=10, help="rounds a directory, before it is closed well"
    )
    parser.add_argument("--producers", type=whole(1, 1_000), default=4, help="beside kills")
    parser.add_argument(
        "--disk-faults", action="store_true", help="have the disk fail instead, under callers of every kind"
    )
    parser.add_argument("--seed", type=int, help="of the moments; without it, another each time")
    parser.add_argument("--plant", choices=PLANTS, help="plant a fault, which the check must find")
    parser.add_argument("--json", type=writable_file, metavar="FILE", help="write the figures to FILE too")
    given = parser.parse_args(arguments)
    if given.quick:
        given.rounds, given.lives = min(given.rounds, 6), min(given.lives, 2)
    seed = random.SystemRandom().randrange(1 << 30) if given.seed is None else given.seed
    if given.disk_faults:
        if given.plant is not None:
            parser.error("--plant is for kills: leave it out, or --disk-faults")
        return run_disk_faults(given, seed)
    with tempfile.TemporaryDirectory(prefix="delta-prop-crash-") as folder:
        totals = _run(Path(folder), given, random.Random(seed))
    return report(f"kill -9, {given.rounds} rounds, seed {seed}", totals, given.json)


def _run(folder: Path, given: argparse.Namespace, draw: random.Random) -> dict[str, Totals]:
    totals = {name: Totals() for name in (ALONE, TABLE, COMMAND)}
    names = tuple(f"p{at}" for at in range(given.producers))
    ways = {"early-ack": [ALONE], "cut-log": [ALONE, COMMAND], "old-table": [TABLE]}
    spoil = PLANTS.get(given.plant, lambda _: None)
    for number in range(-(-given.rounds // given.lives)):
        some = ways.get(given.plant, list(totals))
        way = some[number % len(some)]
        terms = Terms(
            level="memory" if given.plant == "early-ack" else "durable",
            storage=way == TABLE,
            producers=names,
        )
        kind = CommandStory if way == COMMAND else Story
        story = kind(folder / f"data-{number}", terms, totals[way], draw, spoil=spoil)
        lives = min(given.lives, given.rounds - number * given.lives)
        if all(story.round() for _ in range(lives)):
            story.end()
    return totals


def report(title: str, totals: dict[str, Totals], path: Path | str | None) -> int:
    """Print what was found; the exit status."""
    columns = {name: one for name, one in totals.items() if one.rounds}
    rows: list[tuple[object, ...]] = [
        ("kills", *(one.rounds for one in columns.values())),
        ("  while it started", *(one.in_start for one in columns.values())),
        ("directories", *(one.directories for one in columns.values())),
        ("acknowledgements", *(f"{one.acks:,}" for one in columns.values())),
        ("  of repeats", *(f"{one.repeats:,}" for one in columns.values())),
        ("deltas in the logs", *(f"{one.rows:,}" for one in columns.values())),
        ("  not acknowledged", *(f"{one.unacknowledged:,}" for one in columns.values())),
        ("rolls", *(one.rolls for one in columns.values())),
        *((f"  while {name}", *(one.under_way[name] for one in columns.values())) for name in UNDER_WAY),
        ("torn tails cut", *(one.cuts for one in columns.values())),
        ("process start to ready, s p50 / max", *(_times(one.restarts_s) for one in columns.values())),
        ("  of that the log, s p50 / max", *(_times(one.opens_s) for one in columns.values())),
        *((kind, *(one.verdict.counts[kind] for one in columns.values())) for kind in KINDS),
    ]
    print(table(title, ("", *columns), rows))
    violations = sum(one.verdict.total for one in columns.values())
    for one in columns.values():
        print("".join(f"{text}\n" for text in one.verdict.told), end="")
    # Where next to nothing was acknowledged, nothing could be lost.
    vacuous = [name for name, one in columns.items() if one.acks < one.rounds or not one.restarts_s]
    for name in vacuous:
        print(f"{name}: too little was acknowledged for the check to mean anything")
    slow = max((max(one.opens_s) for one in columns.values() if one.opens_s), default=0.0)
    print(f"opening the log took up to {slow:.2f} s (bound {RESTART_S_MAX:.0f} s)")
    failed = violations or vacuous or slow > RESTART_S_MAX
    print(f"{violations} violations: " + ("FAILED" if failed else "all that was acknowledged is there, once"))
    figures = {name: _plain(one) for name, one in columns.items()}
    write_json(path, {"title": title, "violations": violations, "vacuous": vacuous, **figures})
    return 1 if failed else 0


def _plain(totals: Totals) -> dict[str, object]:
    """What JSON can say of them; `asdict` alone makes counts of a Counter's pairs before Python 3.12."""
    counted = replace(totals, under_way=Counter(), verdict=Verdict())
    counts, told = dict(totals.verdict.counts), totals.verdict.told
    return asdict(counted) | {
        "under_way": dict(totals.under_way),
        "verdict": {"counts": counts, "told": told},
    }


def _times(samples: list[float]) -> str:
    return f"{percentile(samples, 0.5):.2f} / {max(samples):.2f}" if samples else "-"


# --- planted faults


def _cut_log(directory: Path) -> None:
    """Take the last frames away, as a disk would that lied about a sync."""
    for path in sorted(directory.glob("log/streams/default/0/*.log"))[-1:]:
        os.truncate(path, path.stat().st_size // 2)
    for path in directory.glob("log/streams/default/0/mark"):
        path.unlink()


def _old_table(directory: Path) -> None:
    """Set the SQLite file's cursor back, as if it were not kept with the data."""
    path = directory / "vectors.db"
    if path.exists():
        connection = sqlite3.connect(path)
        with connection:
            connection.execute("UPDATE vectors SET offset = 0")
            connection.execute("UPDATE cursor SET next_offset = 0")
        connection.close()


PLANTS: dict[str | None, Callable[[Path], None]] = {
    "early-ack": lambda _directory: None,
    "cut-log": _cut_log,
    "old-table": _old_table,
}


if __name__ == "__main__":
    sys.exit(main())
