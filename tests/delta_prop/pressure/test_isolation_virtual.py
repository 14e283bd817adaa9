"""A stalled and a failing sink change nothing for the others nor for producers, to the tick of the clock.

The same traffic runs twice, with and without the two; what everyone else saw, and when, must be equal.
Times are compared as they are: a delay that came from elsewhere, however small, would show.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, TypeAlias

import anyio

from delta_prop import Propagator, Settings
from delta_prop.testing import run_virtual, virtual_world
from tests.delta_prop.pressure.isolation import TimedSink, failing, publish_all, stalled, steady, traffic

if TYPE_CHECKING:
    from collections.abc import Callable

    from delta_prop.embedded import Statistics

Times: TypeAlias = list[tuple[int, float]]
"""As (offset, seconds)."""

CALLS, CALLS_PER_S = 420, 6.0  # some 70 s of traffic, 13 deltas a call
STALL_S = 60.0
STALLED_FROM = 500
MIDWAY_S = 60.0
SETTINGS = Settings(mailbox_deltas_max=300, merge_deltas_max=200)


@dataclass(frozen=True, slots=True)
class Run:
    """Results of one run; `midway` is taken late in the stall."""

    acknowledged: Times
    applied: dict[str, Times]
    disturbed: dict[str, TimedSink]
    midway: Statistics
    end: int


def healthy(_seed: int) -> list[tuple[TimedSink, str]]:
    """The others, with their topics: quick, busy most of the time, and one that gathers batches."""
    return [
        (steady("quick", call_s=0.001), "*"),
        (steady("busy", call_s=0.05, row_s=0.005), "*"),
        (steady("slow", call_s=0.7), "ns:a"),
    ]


def troubled(seed: int) -> list[tuple[TimedSink, str]]:
    """Others that fail now and then themselves."""
    return [
        (failing("troubled", seed, share=0.1, call_s=0.002), "*"),
        (failing("also troubled", seed, share=0.02, call_s=0.05), "ns:b"),
    ]


def disturbing(seed: int) -> list[TimedSink]:
    """The two that must hurt nobody."""
    return [
        stalled("stalled", from_offset=STALLED_FROM, stall_s=STALL_S),
        failing("failing", seed, share=0.3),
    ]


def nobody(_seed: int) -> list[TimedSink]:
    return []


def run(
    seed: int,
    disturbed: Callable[[int], list[TimedSink]] = nobody,
    *,
    calls: int = CALLS,
    settings: Settings = SETTINGS,
    others: Callable[[int], list[tuple[TimedSink, str]]] = healthy,
) -> Run:
    """One run in virtual time."""

    async def main() -> Run:
        arrivals = traffic(seed, calls=calls, calls_per_s=CALLS_PER_S)
        sinks, extra = others(seed), disturbed(seed)
        async with Propagator(settings, world=virtual_world(seed)) as p:
            for sink, topic in sinks:
                await p.attach(sink, topics=topic)
            for sink in extra:
                await p.attach(sink)
            midway: list[Statistics] = []

            async def look() -> None:
                await anyio.sleep(MIDWAY_S)
                midway.append(p.statistics())

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(look)
                acknowledged = await publish_all(p, arrivals)
            end = p.statistics().log.next_offset
            await p.wait_visible(end, timeout_s=600)
        applied = {sink.name: sink.noted for sink, _ in sinks}
        return Run(acknowledged, applied, {sink.name: sink for sink in extra}, midway[0], end)

    return run_virtual(main)


def first_difference(alone: Run, beside: Run) -> str | None:
    """Describe the first time that differs; None if both runs are equal to the last bit."""
    everything = {"acknowledgements": (alone.acknowledged, beside.acknowledged)} | {
        name: (noted, beside.applied[name]) for name, noted in alone.applied.items()
    }
    for name, (expected, seen) in everything.items():
        if expected != seen:
            place = next(
                (at for at, (one, other) in enumerate(zip(expected, seen, strict=False)) if one != other), -1
            )
            return f"{name}: {len(expected)} and {len(seen)}; {place}: {expected[place]} and {seen[place]}"
    return None


def longest_gap_s(noted: Times) -> float:
    return max(later - sooner for (_, sooner), (_, later) in pairwise(noted))


def test_a_stalled_and_a_failing_sink_change_no_time_of_anybody_else(full: bool) -> None:
    seeds = range(40 if full else 2)
    for seed in seeds:
        alone, beside = run(seed), run(seed, disturbing)
        told = first_difference(alone, beside)
        assert told is None
        # So that equality means something: there was traffic, some of it waited, and the two were in trouble.
        assert alone.end == beside.end > 4_000
        assert beside.acknowledged[-1][1] > MIDWAY_S
        assert beside.midway.pending.released > 10
        stalled_sink, failing_sink = (beside.midway.sinks[name] for name in ("stalled", "failing"))
        assert stalled_sink.catching_up
        assert not any(sink.pacing for sink in beside.midway.sinks.values())
        assert stalled_sink.lag > alone.end // 2
        assert failing_sink.errors > 20
        # Who was in trouble has everything all the same: in order, each row once.
        for sink in beside.disturbed.values():
            assert [offset for offset, _ in sink.noted] == list(range(beside.end))
        stood_s = longest_gap_s(beside.disturbed["stalled"].noted)
        assert stood_s >= STALL_S
    print(
        f"{len(seeds)} seeds of {CALLS} calls ({alone.end} deltas in the last), equal to the tick; "
        f"{failing_sink.errors} failures, a stall of {stood_s:.1f} s"
    )


def test_retries_of_one_sink_do_not_move_those_of_another() -> None:
    seed = 1
    told = first_difference(run(seed, others=troubled), run(seed, disturbing, others=troubled))
    assert told is None


# --- what these tests would see


def test_a_delay_that_sinks_share_would_be_seen() -> None:
    """One lock between a healthy sink and the stalled one is enough."""
    locks: list[anyio.Lock] = []

    def shared(sink: TimedSink) -> TimedSink:
        work, lock = sink.work, locks[-1]

        async def locked(offsets: list[int]) -> int | None:
            async with lock:
                return await work(offsets)

        sink.work = locked
        return sink

    def others(seed: int) -> list[tuple[TimedSink, str]]:
        locks.append(anyio.Lock())
        (first, topic), *rest = healthy(seed)
        return [(shared(first), topic), *rest]

    def disturbed(seed: int) -> list[TimedSink]:
        return [shared(sink) for sink in disturbing(seed)]

    alone, beside = run(0, others=others, calls=120), run(0, disturbed, others=others, calls=120)
    told = first_difference(alone, beside)
    assert told is not None
    assert told.startswith("quick")


def test_a_log_that_cannot_hold_the_stall_would_be_seen() -> None:
    """The bounds are part of the promise: where the stalled sink fills the log, producers wait for it."""
    small = replace(SETTINGS, log_deltas_max=600)

    def short(_seed: int) -> list[TimedSink]:
        return [stalled("stalled", from_offset=STALLED_FROM, stall_s=8)]

    alone, beside = run(0, settings=small, calls=120), run(0, short, settings=small, calls=120)
    told = first_difference(alone, beside)
    assert told is not None
    assert told.startswith("acknowledgements")
