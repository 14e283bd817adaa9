"""Cuts the power under the service at random moments, on real ext4 and xfs, and checks what it acknowledged.

Each file system lies in an image file on a loop device of its own. A cut stops the process, with calls to the
disk under way brought to their end, and shuts the file system down without its journal being flushed: what
was not synced is gone, as it is when the power goes. It is then mounted again, its journal replayed, and the
service started. The same cuts under ack level `logged`, which promises nothing about power, must show losses:
if they do not, nothing was cut. Needs root, losetup, mkfs and mount; where one is missing it says so.
"""

from __future__ import annotations

import random
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks._arguments import FAILED, Arguments, amount, whole, writable_file
from benchmarks._crash_rounds import START_SHARE, Story, Terms, Totals
from benchmarks._images import KINDS, Unusable, check_usable, mounted
from benchmarks.crash import report

if TYPE_CHECKING:
    from benchmarks._images import Image

SEGMENT_BYTES = 16 * 1024
KEEP_BYTES = 48 * 1024
"""Every third directory keeps no more than that of its log, and compacts the rest all the time."""
LOGGED_SHARE = 0.25
"""How many cuts, beside those asked for, are made under ack level `logged`."""
LIFE_S = (0.02, 0.4)
_SKIPPED = 77


def main(arguments: list[str] | None = None) -> int:
    """Cut, check, print. Exit status 77 where nothing could be run."""
    parser = Arguments("powercut", __doc__, failed=f"{FAILED}; {_SKIPPED}: nothing could be run")
    parser.add_argument("--rounds", type=whole(1, 1_000_000), default=40, help="cuts, over all file systems")
    parser.add_argument("--quick", action="store_true", help="a short run: 4 cuts at most")
    parser.add_argument(
        "--lives", type=whole(1, 1_000_000), default=10, help="cuts a directory, before it is closed well"
    )
    parser.add_argument(
        "--minutes", type=amount(0.01, 10_000), default=30.0, help="no further cut is made after that time"
    )
    parser.add_argument("--fs", choices=KINDS, help="this file system alone")
    parser.add_argument("--seed", type=int, help="of the moments; without it, another each time")
    parser.add_argument("--json", type=writable_file, metavar="FILE", help="write the figures to FILE too")
    given = parser.parse_args(arguments)
    if given.quick:
        given.rounds, given.lives = min(given.rounds, 4), min(given.lives, 2)
    seed = random.SystemRandom().randrange(1 << 30) if given.seed is None else given.seed
    usable = []
    for kind in [given.fs] if given.fs else KINDS:
        try:
            check_usable(kind)
            usable.append(kind)
        except Unusable as reason:
            print(f"NOT RUN on {kind}: {reason}", file=sys.stderr)
    if not usable:
        return _SKIPPED
    totals: dict[str, Totals] = {}
    logged: dict[str, Totals] = {}
    draw, deadline = random.Random(seed), time.monotonic() + given.minutes * 60
    with tempfile.TemporaryDirectory(prefix="delta-prop-powercut-") as folder:
        for number, kind in enumerate(usable):
            rounds = given.rounds // len(usable) + (number < given.rounds % len(usable))
            with mounted(kind, Path(folder)) as image:
                totals[kind] = _durable(image, rounds, given.lives, draw, deadline)
                logged[kind] = _logged(image, max(int(rounds * LOGGED_SHARE), 2), draw, deadline)
    status = report(f"power cuts, {given.rounds} rounds, seed {seed}", totals, given.json)
    return max(status, *(_tell_logged(kind, one) for kind, one in logged.items()))


def _durable(image: Image, rounds: int, lives: int, draw: random.Random, deadline: float) -> Totals:
    totals = Totals()
    for number in range(-(-rounds // lives)):
        compacts = number % 3 == 0
        terms = Terms(
            storage=number % 3 == 1,
            segment_bytes=SEGMENT_BYTES,
            keep_bytes=KEEP_BYTES if compacts else None,
        )
        story = _story(image, f"durable-{number}", terms, totals, draw)
        left = min(lives, rounds - totals.rounds)
        if all(story.round() and time.monotonic() < deadline for _ in range(left)):
            story.end()
        shutil.rmtree(story.directory)
        if time.monotonic() >= deadline:
            print(f"{image.kind}: the time was up after {totals.rounds} of {rounds} cuts", file=sys.stderr)
            break
    return totals


def _logged(image: Image, rounds: int, draw: random.Random, deadline: float) -> Totals:
    """Each cut in a directory of its own, as acknowledged ones may be gone after it."""
    totals = Totals()
    for number in range(rounds):
        terms = Terms(level="logged", segment_bytes=SEGMENT_BYTES)
        story = _story(image, f"logged-{number}", terms, totals, draw)
        if story.round():
            story.end()
        shutil.rmtree(story.directory)
        if time.monotonic() >= deadline:
            break
    return totals


def _story(image: Image, name: str, terms: Terms, totals: Totals, draw: random.Random) -> Story:
    return Story(
        image.mount / name,
        terms,
        totals,
        draw,
        life_s=LIFE_S,
        start_share=0.0 if terms.level == "logged" else START_SHARE,
        die=image.cut,
        scratch=image.folder / f"{image.kind}-copy",
    )


def _tell_logged(kind: str, totals: Totals) -> int:
    """Losses must be all that went wrong, and there must be some."""
    counts = totals.verdict.counts
    lost = counts["lost"]
    print(
        f"{kind}, ack level logged: {lost} of {totals.acks} acknowledged lost in {totals.rounds} cuts", end=""
    )
    if totals.verdict.total > lost:
        print("; and what no cut may do: FAILED")
        print("".join(f"{text}\n" for text in totals.verdict.told if not text.startswith("lost")), end="")
        return 1
    print(": the cuts are real" if lost else ": nothing was cut, so nothing is proved: FAILED")
    return 0 if lost else 1


if __name__ == "__main__":
    sys.exit(main())
