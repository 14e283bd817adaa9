"""Kills the service at random moments while producers publish, and checks its log against its acks.

After each kill the service starts again on the same directory. Before the producers continue, the benchmark
compares the service's log, its producers' watermarks and its SQLite file with every printed acknowledgement.
The directories are used in turn by a service with several producers, by one that also feeds a SQLite file,
and by the command `delta-prop publish`. Exit status 1 if anything differs from its acknowledgement.

With --disk-faults nothing is killed. Instead the disk fails under a server, and under a program that embeds
the service, while callers of every kind publish and reconnect. Either calls to the disk fail (by a preloaded
library, which needs a C compiler), or the disk is full (a small file system, which needs root on Linux).
Once the log has recovered in place, every answer is compared with it. Exit status 77 if neither is possible.
"""

from __future__ import annotations

import argparse
import os
import random
import sqlite3
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks._arguments import Arguments, bounded_int, writable_file
from benchmarks._crash_check import KINDS, print_totals
from benchmarks._crash_disk import run as run_disk_faults
from benchmarks._crash_rounds import CommandCrashRun, CrashRun, DirectoryOptions, Totals
from benchmarks._crash_writer import ACTIVITIES
from benchmarks._measure import percentile, write_json

OPEN_S_MAX = 2.0
"""Maximum seconds for opening the log after a kill; a longer opening fails the benchmark."""
SERVICE_ONLY, TABLE, COMMAND = "service", "service and SQLite", "command"
"""The programs that are killed."""


def main(arguments: list[str] | None = None) -> int:
    """Kill, check, print; return the exit status."""
    parser = parser_of(
        "crash", __doc__, 50, "number of kills, or of disk failures", quick_rounds=6,
        status_1="an answer was false, or a start took too long; 77: nothing could be run",
    )  # fmt: skip
    parser.option("--producers", bounded_int(1, 1_000), 4, "producers of a killed service")
    parser.add_argument(
        "--disk-faults", action="store_true", help="make the disk fail instead, under callers of every kind"
    )
    parser.add_argument("--plant", choices=PLANTED_FAULTS, help="plant a fault that the check must find")
    given, seed = parse_seeded(parser, arguments)
    if given.disk_faults:
        if given.plant is not None:
            parser.error("--plant works with kills only: omit it, or --disk-faults")
        return run_disk_faults(given, seed)
    with tempfile.TemporaryDirectory(prefix="delta-prop-crash-") as folder:
        totals = _run(Path(folder), given, random.Random(seed))
    return report(f"kill -9, {given.rounds} rounds, seed {seed}", totals, given.json)


def parser_of(
    bench: str, about: str | None, rounds: int, rounds_about: str, *, quick_rounds: int, status_1: str
) -> Arguments:
    """Return a parser with the options of every benchmark that ends processes at random moments."""
    parser = Arguments(bench, about, status_1=status_1)
    count = bounded_int(1, 1_000_000)
    parser.option("--rounds", count, rounds, rounds_about)
    parser.add_argument("--quick", action="store_true", help=f"a short run: up to {quick_rounds} rounds")
    parser.set_defaults(quick_rounds=quick_rounds)
    parser.option(
        "--rounds-per-directory", count, 10, "number of rounds on one directory, before it is closed cleanly"
    )
    parser.option("--seed", int, None, "seed of the random moments; default: a new one each time")
    parser.option("--json", writable_file, None, "also write the figures to FILE", metavar="FILE")
    return parser


def parse_seeded(parser: Arguments, arguments: list[str] | None) -> tuple[argparse.Namespace, int]:
    """Return the parsed arguments, with fewer rounds if quick, and the seed to use."""
    given = parser.parse_args(arguments)
    if given.quick:
        given.rounds = min(given.rounds, given.quick_rounds)
        given.rounds_per_directory = min(given.rounds_per_directory, 2)
    return given, random.SystemRandom().randrange(1 << 30) if given.seed is None else given.seed


def _run(folder: Path, given: argparse.Namespace, rng: random.Random) -> dict[str, Totals]:
    totals = {name: Totals() for name in (SERVICE_ONLY, TABLE, COMMAND)}
    names = tuple(f"p{number}" for number in range(given.producers))
    programs_by_fault = {
        "early-ack": [SERVICE_ONLY],
        "cut-log": [SERVICE_ONLY, COMMAND],
        "old-table": [TABLE],
    }
    programs = programs_by_fault.get(given.plant, list(totals))
    corrupt = PLANTED_FAULTS.get(given.plant, lambda _: None)
    for number in range(-(-given.rounds // given.rounds_per_directory)):
        program = programs[number % len(programs)]
        options = DirectoryOptions(
            level="memory" if given.plant == "early-ack" else "durable",
            storage=program == TABLE,
            producers=names,
        )
        run_type = CommandCrashRun if program == COMMAND else CrashRun
        crash_run = run_type(folder / f"data-{number}", options, totals[program], rng, corrupt=corrupt)
        rounds = min(given.rounds_per_directory, given.rounds - number * given.rounds_per_directory)
        if all(crash_run.run_round() for _ in range(rounds)):
            crash_run.end()
    return totals


def report(title: str, totals: dict[str, Totals], path: Path | str | None) -> int:
    """Print the totals and the violations; return the exit status."""
    columns = {name: one for name, one in totals.items() if one.rounds}
    labels: dict[str, Callable[[Totals], object]] = {
        "kills": lambda one: one.rounds,
        "  while it started": lambda one: one.in_start,
        "directories": lambda one: one.directories,
        "acknowledgements": lambda one: f"{one.acks:,}",
        "  of duplicates": lambda one: f"{one.duplicates:,}",
        "deltas in the logs": lambda one: f"{one.rows:,}",
        "  not acknowledged": lambda one: f"{one.unacknowledged:,}",
        "segments begun": lambda one: one.rolls,
        **{f"  while {name}": partial(_interrupted, name) for name in ACTIVITIES},
        "torn tails truncated": lambda one: one.cuts,
        "process start to ready, s p50 / max": lambda one: _format_times(one.restarts_s),
        "  of that the log, s p50 / max": lambda one: _format_times(one.opens_s),
    }
    violations = print_totals(title, columns, labels, KINDS)
    for one in columns.values():
        print("".join(f"{text}\n" for text in one.verdict.examples), end="")
    # A run with next to no acknowledgements proves nothing.
    vacuous = [name for name, one in columns.items() if one.acks < one.rounds or not one.restarts_s]
    for name in vacuous:
        print(f"{name}: too few acknowledgements for a meaningful check: run more rounds")
    slowest_open_s = max((max(one.opens_s) for one in columns.values() if one.opens_s), default=0.0)
    print(f"opening the log took up to {slowest_open_s:.2f} s (bound {OPEN_S_MAX:.0f} s)")
    failed = violations or vacuous or slowest_open_s > OPEN_S_MAX
    print(
        f"{violations} violations:", "FAILED" if failed else "all that was acknowledged is in the log, once"
    )
    figures = {name: one.to_json() for name, one in columns.items()}
    write_json(path, {"title": title, "violations": violations, "vacuous": vacuous, **figures})
    return 1 if failed else 0


def _interrupted(activity: str, totals: Totals) -> int:
    return totals.interrupted[activity]


def _format_times(samples: list[float]) -> str:
    return f"{percentile(samples, 0.5):.2f} / {max(samples):.2f}" if samples else "-"


# --- planted faults


def _truncate_log(directory: Path) -> None:
    """Remove half of the newest segment, as if the disk had acknowledged a sync without doing it."""
    for path in sorted(directory.glob("log/streams/default/0/*.log"))[-1:]:
        os.truncate(path, path.stat().st_size // 2)
    for path in directory.glob("log/streams/default/0/mark"):
        path.unlink()


def _rewind_table(directory: Path) -> None:
    """Rewind the SQLite file's cursor, as if it were not stored with the data."""
    path = directory / "vectors.db"
    if path.exists():
        connection = sqlite3.connect(path)
        with connection:
            connection.execute("UPDATE vectors SET offset = 0")
            connection.execute("UPDATE cursor SET next_offset = 0")
        connection.close()


PLANTED_FAULTS: dict[str | None, Callable[[Path], None]] = {
    "early-ack": lambda _directory: None,  # its fault is the ack level, which `_run` sets to `memory`
    "cut-log": _truncate_log,
    "old-table": _rewind_table,
}
"""The faults of `--plant`: each changes a directory while no process runs on it."""


if __name__ == "__main__":
    sys.exit(main())
