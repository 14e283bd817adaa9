"""Cuts the power at random moments, on real ext4 and xfs, and checks the log against its acknowledgements.

Each file system is in an image file on a loop device of its own. A cut stops the process once its current
calls to the disk have returned, and shuts the file system down without flushing its journal: unsynced data is
lost, as in a power failure. The file system is then mounted again, which replays its journal, and the service
is started again. Cuts at ack level `logged`, which promises nothing about power, must show losses: without
losses, the cuts had no effect. Needs root, losetup, mkfs and mount; it reports what is missing.
"""

from __future__ import annotations

import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

from benchmarks._arguments import bounded_float
from benchmarks._crash_rounds import START_SHARE, CrashRun, DirectoryOptions, Totals
from benchmarks._images import FILE_SYSTEMS, Image, UnusableError, check_usable, mount_image
from benchmarks.crash import parse_seeded, parser_of, report

SEGMENT_BYTES = 16 * 1024
RETENTION_BYTES = 48 * 1024
"""Every third directory retains only this much of its log, and compacts the rest again and again."""
LOGGED_SHARE = 0.25
"""Additional cuts at ack level `logged`, as a share of --rounds."""
RUN_S = (0.02, 0.4)
"""Bounds of the seconds between the first publish and the cut."""
_SKIPPED = 77


def main(arguments: list[str] | None = None) -> int:
    """Cut, check, print. Return 77 if nothing could be run."""
    failed = "an answer was false, a start took too long, or the cuts had no effect"
    parser = parser_of(
        "powercut", __doc__, 40, "number of cuts on all file systems together", quick_rounds=4,
        status_1=f"{failed}; {_SKIPPED}: nothing could be run",
    )  # fmt: skip
    parser.option(
        "--minutes", bounded_float(0.01, 10_000), 30.0, "make no further cut after this many minutes"
    )
    parser.add_argument("--fs", choices=FILE_SYSTEMS, help="only this file system")
    given, seed = parse_seeded(parser, arguments)
    usable = []
    for kind in [given.fs] if given.fs else FILE_SYSTEMS:
        try:
            check_usable(kind)
            usable.append(kind)
        except UnusableError as reason:
            print(f"NOT RUN on {kind}: {reason}", file=sys.stderr)
    if not usable:
        return _SKIPPED
    totals: dict[str, Totals] = {}
    logged: dict[str, Totals] = {}
    rng, deadline = random.Random(seed), time.monotonic() + given.minutes * 60
    with tempfile.TemporaryDirectory(prefix="delta-prop-powercut-") as folder:
        for number, kind in enumerate(usable):
            rounds = given.rounds // len(usable) + (number < given.rounds % len(usable))
            with mount_image(kind, Path(folder)) as image:
                totals[kind] = _run_durable(image, rounds, given.rounds_per_directory, rng, deadline)
                logged[kind] = _run_logged(image, max(int(rounds * LOGGED_SHARE), 2), rng, deadline)
    status = report(f"power cuts, {given.rounds} rounds, seed {seed}", totals, given.json)
    return max(status, *(_report_logged(kind, one) for kind, one in logged.items()))


def _run_durable(
    image: Image, rounds: int, rounds_per_directory: int, rng: random.Random, deadline: float
) -> Totals:
    totals = Totals()
    for number in range(-(-rounds // rounds_per_directory)):
        has_compaction = number % 3 == 0
        options = DirectoryOptions(
            storage=number % 3 == 1,
            segment_bytes=SEGMENT_BYTES,
            retention_bytes=RETENTION_BYTES if has_compaction else None,
        )
        crash_run = _new_run(image, f"durable-{number}", options, totals, rng)
        rounds_left = min(rounds_per_directory, rounds - totals.rounds)
        if all(crash_run.run_round() and time.monotonic() < deadline for _ in range(rounds_left)):
            crash_run.end()
        shutil.rmtree(crash_run.directory)
        if time.monotonic() >= deadline:
            print(f"{image.kind}: the time was up after {totals.rounds} of {rounds} cuts", file=sys.stderr)
            break
    return totals


def _run_logged(image: Image, rounds: int, rng: random.Random, deadline: float) -> Totals:
    """Make each cut in a directory of its own, as it may lose acknowledged deltas."""
    totals = Totals()
    for number in range(rounds):
        options = DirectoryOptions(level="logged", segment_bytes=SEGMENT_BYTES)
        crash_run = _new_run(image, f"logged-{number}", options, totals, rng)
        if crash_run.run_round():
            crash_run.end()
        shutil.rmtree(crash_run.directory)
        if time.monotonic() >= deadline:
            break
    return totals


def _new_run(
    image: Image, name: str, options: DirectoryOptions, totals: Totals, rng: random.Random
) -> CrashRun:
    return CrashRun(
        image.mount / name,
        options,
        totals,
        rng,
        run_s=RUN_S,
        start_share=0.0 if options.level == "logged" else START_SHARE,
        end_process=image.cut,
        scratch=image.folder / f"{image.kind}-copy",
    )


def _report_logged(kind: str, totals: Totals) -> int:
    """Print the losses; return 1 if nothing was lost, or if there are violations of another kind."""
    counts = totals.verdict.counts
    lost = counts["lost"]
    print(
        f"{kind}, ack level logged: {lost} of {totals.acks} acknowledged deltas lost in {totals.rounds} cuts",
        end="",
    )
    if totals.verdict.total > lost:
        print("; and other violations, which no cut may cause: FAILED")
        print("".join(f"{text}\n" for text in totals.verdict.examples if not text.startswith("lost")), end="")
        return 1
    print(": the cuts are real" if lost else ": the cuts had no effect, so nothing is proved: FAILED")
    return 0 if lost else 1


if __name__ == "__main__":
    sys.exit(main())
