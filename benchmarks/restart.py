"""How soon a service with a large directory is there again: accepts a publish, answers a search.

Two directories are built once. One has millions of vectors of 16 numbers, each published with an id, over
thousands of origins, with a storage sink (rows in the order of their ids); the other is a plain log of 13 KB
frames. Then fresh processes are started on them, in turn after a clean close and after kill -9.
Times count from the start of the process, imports included; the system's page cache is warm.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks._arguments import Arguments, kept_directory, whole, writable_directory
from benchmarks._measure import Figure, percentile, table
from benchmarks._processes import apart, end
from benchmarks._restart_service import LANES, MIB, Terms, command
from benchmarks._results import REACHED, Goal, Results, options_of

if TYPE_CHECKING:
    import argparse

QUICK = {"rounds": 1, "vectors": 100_000, "origins": 1_000, "changes": 10_000, "starts": 4, "mib": 32}
"""At most, in a quick run."""
ACCEPTED_S_MAX, SEARCHED_S_MAX, PLAIN_P99_S_MAX = 5.0, 30.0, 2.0
_FAILED = "a search was wrong, or a start took longer than its target (with --quick: three times that)"
CLOSED, KILLED = "after a clean close", "after kill -9"
STEPS = (
    ("log open", "open"),
    ("first publish acknowledged, durable", "accepted"),
    ("storage attached", "storage"),
    ("index attached", "index"),
    ("both level with the log", "level"),
    ("first search answered", "searched"),
)


def main(arguments: list[str] | None = None) -> int:
    """Build, start again and again, print, write. For the exit status see `_FAILED`."""
    options = parser()
    given = options.parse_args(arguments)
    if not given.vectors and not given.starts:
        options.error("nothing is left to measure: give vectors, or starts of the plain log")
    for name, most in QUICK.items():
        if given.quick:
            setattr(given, name, min(getattr(given, name), most))
    place = (
        nullcontext(given.keep)
        if given.keep
        else tempfile.TemporaryDirectory(prefix="delta-prop-restart-", dir=given.directory)
    )
    figures: dict[str, Any] = {}
    with place as folder:
        if given.vectors:
            terms = Terms(
                f"{folder}/vectors", "vectors", vectors=given.vectors, origins=given.origins,
                changes=min(given.changes, given.vectors),
            )  # fmt: skip
            figures["build"] = built(terms)
            figures["vectors"] = lives(terms, given.rounds)
        if given.starts:
            terms = Terms(f"{folder}/plain", "plain", mib=given.mib)
            figures["build plain"] = built(terms)
            figures["plain"] = lives(terms, -(-given.starts // 2))
    return report(figures, given).finish(given.json)


def parser() -> Arguments:
    """What can be asked for."""
    options = options_of("restart", __doc__, rounds=2, failed=_FAILED)
    options.add_argument(
        "--vectors",
        type=whole(0, 100_000_000),
        default=10_000_000,
        help="0: leave that out; default: 10 million",
    )
    options.add_argument("--origins", type=whole(LANES, 1_000_000), default=10_000, help="default: 10,000")
    options.add_argument(
        "--changes", type=whole(0), default=100_000, help="vectors that each start writes anew"
    )
    options.add_argument(
        "--starts", type=whole(0, 10_000), default=20, help="of the plain log; 0: leave that out"
    )
    options.add_argument("--mib", type=whole(1, 1_000_000), default=1024, help="MiB of the plain log")
    options.add_argument(
        "--directory", type=writable_directory, metavar="DIR", help="build on the disk that DIR is on"
    )
    options.add_argument(
        "--keep",
        type=kept_directory,
        metavar="DIR",
        help="build in DIR, or use what was built there; it stays",
    )
    return options


def built(terms: Terms) -> float:
    """Build the directory, unless it is there; the seconds it took."""
    folder = Path(terms.directory)
    mark = folder / "built"
    if not mark.exists():
        folder.mkdir()
        begin = time.monotonic()
        with apart():
            process = subprocess.Popen(command(replace(terms, build=True)))
        try:
            if process.wait():
                raise SystemExit(f"FAILED: {terms.kind} could not be built, status {process.returncode}")
        finally:
            end(process)
        mark.write_text(json.dumps({"seconds": time.monotonic() - begin, "life": 0}))
    told = json.loads(mark.read_text())
    sizes = {name: _size(folder, name) / MIB for name in ("data", "vectors.db", "graphs")}
    print(
        f"{terms.kind}: built in {told['seconds']:.0f} s; MiB on disk: "
        + ", ".join(f"{name} {size:,.0f}" for name, size in sizes.items() if size)
    )
    return float(told["seconds"])


def _size(folder: Path, name: str) -> int:
    every = (path for begin in folder.glob(f"{name}*") for path in (begin, *begin.rglob("*")))
    return sum(path.stat().st_size for path in every if path.is_file())


def lives(terms: Terms, rounds: int) -> dict[str, list[dict[str, Any]]]:
    """Start so many times after a close and after a kill, in turn."""
    mark = Path(terms.directory) / "built"
    told: dict[str, list[dict[str, Any]]] = {CLOSED: [], KILLED: []}
    for number in range(2 * rounds):
        before = json.loads(mark.read_text())
        one = replace(terms, life=before["life"])
        told[CLOSED if number % 2 == 0 else KILLED].append(live(one, kill=number % 2 == 0))
        mark.write_text(json.dumps({**before, "life": one.life + 1}))
    return told


def live(terms: Terms, *, kill: bool) -> dict[str, Any]:
    """Start a process, take its figures, end it."""
    with apart():
        process = subprocess.Popen(
            command(replace(terms, spawned_at=time.monotonic())),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
    with process:
        try:
            return _lived(process, terms, kill=kill)
        finally:
            process.kill()


def _lived(process: subprocess.Popen[str], terms: Terms, *, kill: bool) -> dict[str, Any]:
    assert process.stdin is not None
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise SystemExit(f"FAILED: the service in {terms.directory} ended, status {process.wait()}")
    told: dict[str, Any] = json.loads(line)
    begin = time.monotonic()
    if kill:
        process.kill()
    else:
        process.stdin.write("close\n")
        process.stdin.flush()
        if process.wait():
            raise SystemExit(f"FAILED: closing the service in {terms.directory} failed")
    told["end_s"] = time.monotonic() - begin
    return told


# --- printing


def report(figures: dict[str, Any], given: argparse.Namespace) -> Results:
    """Tables, figures, goals."""
    results = Results("restart")
    if "vectors" in figures:
        _report_vectors(results, figures["vectors"], given)
    if "plain" in figures:
        _report_plain(results, figures["plain"], given)
    results.more["rounds"] = figures
    return results


def _report_vectors(
    results: Results, kinds: dict[str, list[dict[str, Any]]], given: argparse.Namespace
) -> None:
    rows: list[tuple[object, ...]] = []
    for kind, some in kinds.items():
        rows += [
            (
                f"{title}, {kind}",
                *(_figure(some, f"{step}_{unit}") for unit in ("s", "rss_mb", "peak_mb")),
            )
            for title, step in STEPS
        ]
    head = ("median (lowest-highest)", "s since start", "resident MB", "at most MB")
    title = f"{given.vectors:,} vectors of 16 numbers, {given.origins:,} origins"
    results.tables.append(table(title, head, rows))
    for kind, some in kinds.items():
        rate = [given.changes / one["changes_s"] for one in some]
        results.notes.append(
            f"{kind}: imports {_figure(some, 'imported_s')} s; up to the first search "
            f"{_figure(some, 'cpu_s')} s CPU; the next search {_figure(some, 'search_s')} s; "
            f"then {given.changes:,} changes at {Figure.of(rate)} rows/s while rows are linked, "
            f"applied after {_figure(some, 'changes_applied_s')} s; "
            f"image: {some[-1]['image']}; graphs: {some[-1]['graphs']}; log: {some[-1]['recovery']}"
        )
    every = [one for some in kinds.values() for one in some]
    results.notes.append(f"clean closes took {_figure(kinds[KILLED], 'end_s')} s")
    if not all(one["right"] and one["vectors"] >= given.vectors for one in every):
        results.failures.append("a search was wrong")
    for step, most in (("accepted", ACCEPTED_S_MAX), ("searched", SEARCHED_S_MAX)):
        took = [one[f"{step}_s"] for one in every]
        results.figure(f"{step} after", took, "s", less=True)
        goal = Goal("", f"restart: {step} after, the slowest", most, unit="s", less=True)
        if results.goal(goal, [max(took)]) != REACHED and not given.quick:
            results.failures.append(f"{step} after {max(took):.1f} s, target {most:.0f} s")


def _report_plain(
    results: Results, kinds: dict[str, list[dict[str, Any]]], given: argparse.Namespace
) -> None:
    every = [one for some in kinds.values() for one in some]
    rows = [
        (
            kind,
            len(some),
            *(
                f"{percentile([one[name] for one in some], share):.2f}"
                for name in ("accepted_s", "accepted_after_open_s")
                for share in (0.5, 0.99)
            ),
            _figure(some, "accepted_rss_mb"),
        )
        for kind, some in (*kinds.items(), ("all", every))
    ]
    head = ("starts", "", "s p50", "s p99", "without imports p50", "p99", "resident MB")
    title = f"a plain log of {given.mib:,} MiB in frames of 13 KB, to the first acknowledgement"
    results.tables.append(table(title, head, rows))
    took = [one["accepted_s"] for one in every]
    results.figure("plain log: accepted after", took, "s", less=True)
    goal = Goal("", "restart: plain log, accepted after, p99", PLAIN_P99_S_MAX, unit="s", less=True)
    slowest = percentile(took, 0.99)
    if results.goal(goal, [slowest]) != REACHED and not given.quick:
        results.failures.append(f"plain log p99 {slowest:.1f} s, target {PLAIN_P99_S_MAX:.0f} s")


def _figure(some: list[dict[str, Any]], name: str) -> Figure:
    return Figure.of([one[name] for one in some])


if __name__ == "__main__":
    sys.exit(main())
