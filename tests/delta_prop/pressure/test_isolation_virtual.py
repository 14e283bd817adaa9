"""A stalled and a failing sink delay no other sink and no producer, not even by a tick of the clock.

The same traffic runs twice, with and without these two sinks; the other sinks must receive the same rows at
the same times. Times are compared exactly, so even the smallest delay by another sink would show.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, TypeAlias

import anyio

from delta_prop import Propagator, Settings
from delta_prop.testing import run_virtual, virtual_world
from tests.delta_prop.pressure.isolation import (
    TimedSink,
    failing_sink,
    publish_all,
    stalled_sink,
    steady_sink,
    traffic,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from delta_prop.api.propagator import Statistics

Times: TypeAlias = list[tuple[int, float]]
"""Pairs of offset and seconds."""

CALLS, CALLS_PER_S = 420, 6.0  # some 70 s of traffic, 13 deltas per call
STALL_S = 60.0
STALL_OFFSET = 500
"""The stall begins in the call that delivers this offset."""
MIDWAY_S = 60.0
"""Time at which statistics are taken, late in the stall."""
SETTINGS = Settings(mailbox_deltas_max=300, merge_deltas_max=200)


@dataclass(frozen=True, slots=True)
class RunResult:
    """The results of one run; `midway` is taken late in the stall."""

    acknowledged: Times
    applied: dict[str, Times]
    disturbing: dict[str, TimedSink]
    midway: Statistics
    end: int


def healthy(_seed: int) -> list[tuple[TimedSink, str]]:
    """Return sinks with their topics: a quick one, one mostly busy, one that accumulates batches."""
    return [
        (steady_sink("quick", call_s=0.001), "*"),
        (steady_sink("busy", call_s=0.05, row_s=0.005), "*"),
        (steady_sink("slow", call_s=0.7), "ns:a"),
    ]


def occasionally_failing(seed: int) -> list[tuple[TimedSink, str]]:
    """Return other sinks that themselves fail now and then."""
    return [
        (failing_sink("troubled", seed, share=0.1, call_s=0.002), "*"),
        (failing_sink("also troubled", seed, share=0.02, call_s=0.05), "ns:b"),
    ]


def disturbing_sinks(seed: int) -> list[TimedSink]:
    """Return the stalled and the failing sink, which must not affect the others."""
    return [
        stalled_sink("stalled", from_offset=STALL_OFFSET, stall_s=STALL_S),
        failing_sink("failing", seed, share=0.3),
    ]


def no_sinks(_seed: int) -> list[TimedSink]:
    return []


def run(
    seed: int,
    disturbing: Callable[[int], list[TimedSink]] = no_sinks,
    *,
    calls: int = CALLS,
    settings: Settings = SETTINGS,
    others: Callable[[int], list[tuple[TimedSink, str]]] = healthy,
) -> RunResult:
    """Run the traffic once in virtual time."""

    async def main() -> RunResult:
        arrivals = traffic(seed, calls=calls, calls_per_s=CALLS_PER_S)
        other_sinks, added_sinks = others(seed), disturbing(seed)
        async with Propagator(settings, world=virtual_world(seed)) as p:
            for sink, topic in other_sinks:
                await p.attach(sink, topics=topic)
            for sink in added_sinks:
                await p.attach(sink)
            midway: list[Statistics] = []

            async def take_midway() -> None:
                await anyio.sleep(MIDWAY_S)
                midway.append(p.statistics())

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(take_midway)
                acknowledged = await publish_all(p, arrivals)
            end = p.statistics().log.next_offset
            await p.wait_visible(end, timeout_s=600)
        applied = {sink.name: sink.applied for sink, _ in other_sinks}
        return RunResult(acknowledged, applied, {sink.name: sink for sink in added_sinks}, midway[0], end)

    return run_virtual(main)


def first_difference(baseline: RunResult, other: RunResult) -> str | None:
    """Describe the first time that differs; None if both runs are exactly equal."""
    series = {"acknowledgements": (baseline.acknowledged, other.acknowledged)} | {
        name: (times, other.applied[name]) for name, times in baseline.applied.items()
    }
    for name, (expected, actual) in series.items():
        if expected != actual:
            position = next(
                (
                    index
                    for index, (left, right) in enumerate(zip(expected, actual, strict=False))
                    if left != right
                ),
                -1,
            )
            pair = f"{expected[position]} and {actual[position]}"
            return f"{name}: {len(expected)} and {len(actual)}; {position}: {pair}"
    return None


def longest_gap_s(times: Times) -> float:
    return max(later - earlier for (_, earlier), (_, later) in pairwise(times))


def test_disturbing_sinks_change_no_time_of_others(full: bool) -> None:
    seeds = range(40 if full else 2)
    for seed in seeds:
        baseline, disturbed_run = run(seed), run(seed, disturbing_sinks)
        difference = first_difference(baseline, disturbed_run)
        assert difference is None
        # The equality means something: there was traffic, some of it waited, and both sinks did fail.
        assert baseline.end == disturbed_run.end > 4_000
        assert disturbed_run.acknowledged[-1][1] > MIDWAY_S
        assert disturbed_run.midway.pending.released > 10
        stalled_sink, failing_sink = (disturbed_run.midway.sinks[name] for name in ("stalled", "failing"))
        assert stalled_sink.catching_up
        assert not any(sink.pacing for sink in disturbed_run.midway.sinks.values())
        assert stalled_sink.lag > baseline.end // 2
        assert failing_sink.errors > 20
        # The disturbing sinks received everything too, in order, each row once.
        for sink in disturbed_run.disturbing.values():
            assert [offset for offset, _ in sink.applied] == list(range(disturbed_run.end))
        longest_stall_s = longest_gap_s(disturbed_run.disturbing["stalled"].applied)
        assert longest_stall_s >= STALL_S
    print(
        f"{len(seeds)} seeds of {CALLS} calls ({baseline.end} deltas in the last), equal to the tick; "
        f"{failing_sink.errors} failures, a stall of {longest_stall_s:.1f} s"
    )


def test_retries_of_one_sink_change_no_time_of_another() -> None:
    seed = 1
    difference = first_difference(
        run(seed, others=occasionally_failing), run(seed, disturbing_sinks, others=occasionally_failing)
    )
    assert difference is None


# --- sensitivity of these tests


def test_shared_lock_would_be_detected() -> None:
    """A lock shared by a healthy sink and the stalled one already changes times."""
    locks: list[anyio.Lock] = []

    def with_shared_lock(sink: TimedSink) -> TimedSink:
        work, lock = sink.work, locks[-1]

        async def work_under_lock(offsets: list[int]) -> int | None:
            async with lock:
                return await work(offsets)

        sink.work = work_under_lock
        return sink

    def others(seed: int) -> list[tuple[TimedSink, str]]:
        locks.append(anyio.Lock())
        (first, topic), *rest = healthy(seed)
        return [(with_shared_lock(first), topic), *rest]

    def disturbing(seed: int) -> list[TimedSink]:
        return [with_shared_lock(sink) for sink in disturbing_sinks(seed)]

    baseline, disturbed_run = run(0, others=others, calls=120), run(0, disturbing, others=others, calls=120)
    difference = first_difference(baseline, disturbed_run)
    assert difference is not None
    assert difference.startswith("quick")


def test_log_too_small_for_the_stall_would_be_detected() -> None:
    """If the stalled sink fills the log, producers wait for it."""
    small = replace(SETTINGS, log_deltas_max=600)

    def short_stall(_seed: int) -> list[TimedSink]:
        return [stalled_sink("stalled", from_offset=STALL_OFFSET, stall_s=8)]

    baseline, disturbed_run = (
        run(0, settings=small, calls=120),
        run(0, short_stall, settings=small, calls=120),
    )
    difference = first_difference(baseline, disturbed_run)
    assert difference is not None
    assert difference.startswith("acknowledgements")
