"""Every answer that a caller gets is correct, whatever disk call below the log fails in a commit.

An acknowledged delta is in the log, once, at its offset. A delta reported as not stored is never stored.
An outcome is reported as unknown only if there was no time to decide it. No watermark counts lost rows.
"""

from __future__ import annotations

import logging
import math
import random
import re
from collections import Counter
from functools import cache
from typing import TYPE_CHECKING

import pytest

from benchmarks._crash_answers import count_answers
from delta_prop_wire.delta import AckLevel
from tests.delta_prop.durable.failing_disk import NO_FAILURE, STRIKES, FailureRun, Point

if TYPE_CHECKING:
    from collections.abc import Iterator

    from delta_prop_simulations.disk import Call

LEVELS = (AckLevel.DURABLE, AckLevel.LOGGED)
TIMES = (1, 3, 0)
"""Values of `Point.times`."""
FAILURES = {
    "write": 600,
    "short": 250,
    "sync": 420,
    "name": 60,
    "full": 200,
    "recovery": 320,
    "closed": 100,
    "corrupted": 50,
}
"""The number of failures to test by kind, over both levels; 2,000 in all. A short run: a twentieth each.

recovery: a write or a sync fails, and then another call, during the recovery from it.
"""
RECOVERY_CALLS = 80
"""The second call that fails is fewer calls than this after the first."""
REPORTED_MAX = 8


@cache
def calls_of_log(level: AckLevel, seed: int) -> list[tuple[int, Call]]:
    """Return the log's disk calls in a run without failures, numbered from the start of the callers."""
    probe = FailureRun(Point(NO_FAILURE, 0, level=level, seed=seed)).run()
    assert probe.verdict.examples == []
    return [
        (call.number - probe.fault.base, call)
        for call in probe.trace
        if call.path.startswith("streams/") and "checkpoint" not in call.path
    ]


def calls_of(kind: str, level: AckLevel, seed: int) -> list[int]:
    """Return the numbers of the calls that a kind of failure may strike."""
    return [number for number, call in calls_of_log(level, seed) if call.name in STRIKES[kind]]


def points_of(kind: str, level: AckLevel, seed: int) -> list[Point]:
    """Return all points of one seed."""
    if kind != "recovery":
        times = 0 if kind == "closed" else TIMES[seed % len(TIMES)]
        return [Point(kind, n, times, level=level, seed=seed) for n in calls_of(kind, level, seed)]
    rng = random.Random(f"recovery {seed}")
    points = []
    for first in ("write", "sync"):
        n = rng.choice(calls_of(first, level, seed))
        points += [Point(first, n, 1, then, level, seed) for then in range(1, RECOVERY_CALLS)]
    return points


def points(kind: str, level: AckLevel, *, full: bool) -> Iterator[Point]:
    """Yield the points of three seeds at a time, in order, or shuffled if not all of them are needed."""
    seed = 0
    while True:
        seed_points = [point for number in range(seed, seed + 3) for point in points_of(kind, level, number)]
        if not full or kind in ("closed", "corrupted"):
            random.Random(f"{kind} {level}").shuffle(seed_points)
        yield from seed_points
        seed += 3


@pytest.mark.parametrize("level", LEVELS, ids=lambda level: level.name.lower())
@pytest.mark.parametrize("kind", FAILURES)
def test_every_answer_is_correct_when_the_disk_fails(
    kind: str, level: AckLevel, full: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    failures_wanted = math.ceil(FAILURES[kind] / len(LEVELS) / (1 if full else 20))
    answer_counts, wrong, wrong_runs = Counter[str](), Counter[str](), list[str]()
    runs = failures = recoveries = 0
    for point in points(kind, level, full=full):
        try:
            result = FailureRun(point).run()
        except BaseException as error:
            error.add_note(f"run it alone: {point.command}")
            raise
        runs += 1
        failures += result.failures
        recoveries += result.recoveries
        answer_counts += count_answers(result.answers)
        wrong += result.verdict.counts
        if result.verdict.total:
            wrong_runs.append(f"{point.command}\n  " + "\n  ".join(result.verdict.examples))
        if failures >= failures_wanted:
            break
    summary = f"{failures} failures in {runs} runs, recovered {recoveries} times"
    print(f"{kind}, {level.name.lower()}: {summary}: {dict(answer_counts)}")
    assert answer_counts["acknowledged"] > 20 * runs
    assert not wrong_runs, f"{dict(wrong)} in {len(wrong_runs)} of {runs} runs:\n" + "\n".join(
        wrong_runs[:REPORTED_MAX]
    )


def test_fault_point_gives_the_same_run_each_time() -> None:
    first, second = (FailureRun(Point("sync", 60, then=20, seed=3)).run() for _ in range(2))
    assert first.failures > 0
    assert first.answers.to_json() == second.answers.to_json()


def test_fault_point_round_trips_as_text() -> None:
    point = Point("sync", 21, 3, 40, AckLevel.LOGGED, 5)
    assert Point.parse(str(point)) == point
    assert re.fullmatch(r"\./run python -m [\w.]+ sync:21:3:40:logged:5", point.command)
