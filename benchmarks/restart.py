"""Measures the start of a service on a large directory, until it accepts a publish and answers a search.

Two directories are built once. One has millions of vectors of 16 numbers, each published with an id, over
thousands of origins, with a storage sink, whose rows are written in the order of their ids; the other is a
plain log of 13 KB frames. New processes are then started on them, alternately after a clean close and after
kill -9.
Times count from the start of the process, imports included; the system's page cache is warm.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks._arguments import Arguments, bounded_int, created_directory, writable_directory
from benchmarks._measure import Figure, percentile, table
from benchmarks._processes import end, ignore_interrupts
from benchmarks._restart_service import LANES, MIB, RunOptions, command
from benchmarks._results import REACHED, Goal, Results, options_of

QUICK_MAXIMA = {"rounds": 1, "vectors": 100_000, "origins": 1_000, "changes": 10_000, "starts": 4, "mib": 32}
"""Maxima of a quick run, by option."""
ACCEPTED_S_MAX, SEARCHED_S_MAX, PLAIN_P99_S_MAX = 5.0, 30.0, 2.0
_FAILED = "a search was wrong, or a start took longer than its target (with --quick: three times that)"
CLOSED, KILLED = "after a clean close", "after kill -9"
STEPS = (  # of a start: the label in the table, and the key in the figures
    ("log open", "open"),
    ("first publish acknowledged, durable", "accepted"),
    ("storage attached", "storage"),
    ("index attached", "index"),
    ("both caught up with the log", "caught_up"),
    ("first search answered", "searched"),
)


def main(arguments: list[str] | None = None) -> int:
    """Build, start repeatedly, print, write. `_FAILED` describes exit status 1."""
    parser = make_parser()
    given = parser.parse_args(arguments)
    if not given.vectors and not given.starts:
        parser.error("nothing is left to measure: set --vectors or --starts above 0")
    for name, maximum in QUICK_MAXIMA.items():
        if given.quick:
            setattr(given, name, min(getattr(given, name), maximum))
    output_folder = (
        nullcontext(given.keep)
        if given.keep
        else tempfile.TemporaryDirectory(prefix="delta-prop-restart-", dir=given.directory)
    )
    figures: dict[str, Any] = {}
    with output_folder as folder:
        if given.vectors:
            run_options = RunOptions(
                f"{folder}/vectors", "vectors", vectors=given.vectors, origins=given.origins,
                changes=min(given.changes, given.vectors),
            )  # fmt: skip
            figures["build"] = build_directory(run_options)
            figures["vectors"] = measure_runs(run_options, given.rounds)
        if given.starts:
            run_options = RunOptions(f"{folder}/plain", "plain", mib=given.mib)
            figures["build plain"] = build_directory(run_options)
            figures["plain"] = measure_runs(run_options, -(-given.starts // 2))
    return report(figures, given).finish(given.json)


def make_parser() -> Arguments:
    """Return the parser of the command line."""
    parser = options_of("restart", __doc__, rounds=2, status_1=_FAILED)
    parser.option(
        "--vectors", bounded_int(0, 100_000_000), 10_000_000, "0: skip that directory; default: 10 million"
    )
    parser.option("--origins", bounded_int(LANES, 1_000_000), 10_000, "default: 10,000")
    parser.option("--changes", bounded_int(0), 100_000, "vectors that each start rewrites")
    parser.option("--starts", bounded_int(0, 10_000), 20, "starts on the plain log; 0: skip it")
    parser.add_argument("--mib", type=bounded_int(1, 1_000_000), default=1024, help="MiB of the plain log")
    parser.option("--directory", writable_directory, None, "build on the disk that DIR is on", metavar="DIR")
    parser.option(
        "--keep",
        created_directory,
        None,
        "build in DIR, or use the directories built there; they are not removed",
        metavar="DIR",
    )
    return parser


def build_directory(run_options: RunOptions) -> float:
    """Build the directory unless it exists; return the seconds it took."""
    folder = Path(run_options.directory)
    built_file = folder / "built"
    if not built_file.exists():
        folder.mkdir()
        begin = time.monotonic()
        with ignore_interrupts():
            process = subprocess.Popen(command(replace(run_options, build=True)))
        try:
            if process.wait():
                raise SystemExit(
                    f"FAILED: {run_options.kind} could not be built, status {process.returncode}"
                )
        finally:
            end(process)
        built_file.write_text(json.dumps({"seconds": time.monotonic() - begin, "starts": 0}))
    built = json.loads(built_file.read_text())
    sizes = {name: _size(folder, name) / MIB for name in ("data", "vectors.db", "graphs")}
    print(
        f"{run_options.kind}: built in {built['seconds']:.0f} s; MiB on disk: "
        + ", ".join(f"{name} {size:,.0f}" for name, size in sizes.items() if size)
    )
    return float(built["seconds"])


def _size(folder: Path, name: str) -> int:
    files = (path for root in folder.glob(f"{name}*") for path in (root, *root.rglob("*")))
    return sum(path.stat().st_size for path in files if path.is_file())


def measure_runs(run_options: RunOptions, rounds: int) -> dict[str, list[dict[str, Any]]]:
    """Start the service `rounds` times after a clean close and `rounds` times after a kill, alternately."""
    built_file = Path(run_options.directory) / "built"
    runs: dict[str, list[dict[str, Any]]] = {CLOSED: [], KILLED: []}
    for number in range(2 * rounds):
        before = json.loads(built_file.read_text())
        options = replace(run_options, starts_before=before["starts"])
        # After a clean close, the next run ends with a kill; after a kill, it ends with a clean close.
        follows_close = number % 2 == 0
        runs[CLOSED if follows_close else KILLED].append(measure_run(options, kill=follows_close))
        built_file.write_text(json.dumps({**before, "starts": options.starts_before + 1}))
    return runs


def measure_run(run_options: RunOptions, *, kill: bool) -> dict[str, Any]:
    """Start a process, read its figures, end it."""
    with ignore_interrupts():
        process = subprocess.Popen(
            command(replace(run_options, spawned_at=time.monotonic())),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
    with process:
        try:
            return _read_figures_and_end(process, run_options, kill=kill)
        finally:
            process.kill()


def _read_figures_and_end(
    process: subprocess.Popen[str], run_options: RunOptions, *, kill: bool
) -> dict[str, Any]:
    assert process.stdin is not None
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise SystemExit(f"FAILED: the service in {run_options.directory} ended, status {process.wait()}")
    figures: dict[str, Any] = json.loads(line)
    begin = time.monotonic()
    if kill:
        process.kill()
    else:
        process.stdin.write("close\n")
        process.stdin.flush()
        if process.wait():
            raise SystemExit(f"FAILED: closing the service in {run_options.directory} failed")
    figures["end_s"] = time.monotonic() - begin
    return figures


# --- printing


def report(figures: dict[str, Any], given: argparse.Namespace) -> Results:
    """Return tables, figures, goals."""
    results = Results("restart")
    if "vectors" in figures:
        _report_vectors(results, figures["vectors"], given)
    if "plain" in figures:
        _report_plain(results, figures["plain"], given)
    results.more["rounds"] = figures
    return results


def _report_vectors(
    results: Results, runs_by_previous_end: dict[str, list[dict[str, Any]]], given: argparse.Namespace
) -> None:
    rows: list[tuple[object, ...]] = []
    for kind, runs in runs_by_previous_end.items():
        rows += [
            (f"{title}, {kind}", *(_figure(runs, f"{step}_{unit}") for unit in ("s", "rss_mb", "peak_mb")))
            for title, step in STEPS
        ]
    header = ("median (lowest-highest)", "s since start", "resident MB", "peak MB")
    title = f"{given.vectors:,} vectors of 16 numbers, {given.origins:,} origins"
    results.tables.append(table(title, header, rows))
    _report_changes(results, runs_by_previous_end, given)
    all_runs = [one for runs in runs_by_previous_end.values() for one in runs]
    # A run that follows a kill ends with a clean close.
    results.notes.append(f"clean closes took {_figure(runs_by_previous_end[KILLED], 'end_s')} s")
    if not all(one["right"] and one["vectors"] >= given.vectors for one in all_runs):
        results.failures.append("a search was wrong")
    for step, maximum in (("accepted", ACCEPTED_S_MAX), ("searched", SEARCHED_S_MAX)):
        took = [one[f"{step}_s"] for one in all_runs]
        results.add_figure(f"{step} after", took, "s", less=True)
        goal = Goal("", f"restart: {step} after, the slowest", maximum, unit="s", less=True)
        if results.add_goal(goal, [max(took)]) != REACHED and not given.quick:
            results.failures.append(f"{step} after {max(took):.1f} s, target {maximum:.0f} s")


def _report_changes(
    results: Results, runs_by_previous_end: dict[str, list[dict[str, Any]]], given: argparse.Namespace
) -> None:
    """Report the imports and the searches of a start, and the changes after it."""
    rows: list[tuple[object, ...]] = []
    for kind, runs in runs_by_previous_end.items():
        rate = [given.changes / one["changes_s"] for one in runs]
        searched = (_figure(runs, name) for name in ("imported_s", "cpu_s", "search_s"))
        rows.append((kind, *searched, Figure.of(rate), _figure(runs, "changes_applied_s")))
        recovery = runs[-1]["recovery"].replace("\n", "; ")
        results.notes.append(f"{kind}: image: {runs[-1]['image']}; graphs: {runs[-1]['graphs']}; {recovery}")
    header = ("", "imports s", "CPU s to first search", "next search s", "changes rows/s", "applied after s")
    title = f"the start, then {given.changes:,} changes while rows are indexed"
    results.tables.append(table(title, header, rows))


def _report_plain(
    results: Results, runs_by_previous_end: dict[str, list[dict[str, Any]]], given: argparse.Namespace
) -> None:
    all_runs = [one for runs in runs_by_previous_end.values() for one in runs]
    rows = [
        (
            kind,
            len(runs),
            *(
                f"{percentile([one[name] for one in runs], share):.2f}"
                for name in ("accepted_s", "accepted_after_open_s")
                for share in (0.5, 0.99)
            ),
            _figure(runs, "accepted_rss_mb"),
        )
        for kind, runs in (*runs_by_previous_end.items(), ("all", all_runs))
    ]
    header = ("previous end", "starts", "s p50", "s p99", "without imports p50", "p99", "resident MB")
    title = f"a plain log of {given.mib:,} MiB in frames of 13 KB, to the first acknowledgement"
    results.tables.append(table(title, header, rows))
    took = [one["accepted_s"] for one in all_runs]
    results.add_figure("plain log: accepted after", took, "s", less=True)
    goal = Goal("", "restart: plain log, accepted after, p99", PLAIN_P99_S_MAX, unit="s", less=True)
    slowest = percentile(took, 0.99)
    if results.add_goal(goal, [slowest]) != REACHED and not given.quick:
        results.failures.append(f"plain log p99 {slowest:.1f} s, target {PLAIN_P99_S_MAX:.0f} s")


def _figure(runs: list[dict[str, Any]], name: str) -> Figure:
    return Figure.of([one[name] for one in runs])


if __name__ == "__main__":
    sys.exit(main())
