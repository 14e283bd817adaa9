"""Models of the set-ups, with laws so simple that what must come out is known; and how rounds compare."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import anyio
import pytest

from delta_prop_simulations.calibration import index, storage, subscriber
from delta_prop_simulations.calibration.busy_loop import BusyTime
from delta_prop_simulations.calibration.comparison import compare, table
from delta_prop_simulations.calibration.distributions import Distribution
from delta_prop_simulations.calibration.driving import Observation, Rig, Stopwatch
from delta_prop_simulations.calibration.models import Draws, contention_of
from delta_prop_simulations.calibration.rounds import Figures, Round
from delta_prop_simulations.rng import Seed

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from delta_prop_simulations.calibration.rounds import SetUp

CUTTING = storage.THREAD_TRUNCATING
ZERO = Distribution.of({1: [0.0], 1_000: [0.0]})


def per_delta(seconds: float) -> Distribution:
    return Distribution.of({1: [seconds], 1_000: [1_000 * seconds]})


def predicted(
    set_up: SetUp,
    laws: Mapping[str, Distribution],
    drive: Callable[[Rig], Awaitable[None]],
    settle_s: float = 0.5,
) -> Observation:
    time = BusyTime(lambda: 0.0)

    async def main() -> Observation:
        async with set_up.model(Draws(laws, time, Seed(1).stream("draws")), anyio.current_time) as rig:
            await rig.source.send_closed_loop(settle_s, set_up.unapplied_max)
            rig.watch.begin()
            await drive(rig)
            return rig.watch.end()

    return time.run(main, 1)


def flat_out(rig: Rig, seconds: float, ahead_max: int) -> Awaitable[None]:
    return rig.source.send_closed_loop(seconds, ahead_max)


def test_a_sink_that_takes_a_millisecond_a_delta_takes_a_thousand_a_second() -> None:
    laws = {
        "send": per_delta(1e-6),
        "loop": ZERO,
        "thread": per_delta(1e-3),
        CUTTING: ZERO,
        storage.WAL_BYTES: ZERO,
    }
    seen = predicted(storage.SET_UP, laws, partial(flat_out, seconds=2.0, ahead_max=100))
    assert seen.rate == pytest.approx(1_000, rel=0.05)


def test_cutting_off_the_write_ahead_log_comes_on_top_when_it_is_large(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(storage, "WAL_BYTES_MAX", 400)
    cutting = Distribution.of({storage.TRUNCATING_DELTAS: [0.6]})
    laws = {"send": per_delta(1e-7), "loop": ZERO, "thread": per_delta(1e-3), CUTTING: cutting}
    laws[storage.WAL_BYTES] = per_delta(1.0)
    seen = predicted(storage.SET_UP, laws, partial(flat_out, seconds=7.0, ahead_max=4_000))
    # Calls take a thousand deltas in a second, and each one cuts; of its time 0.3 s is the call's usual time.
    assert seen.rate == pytest.approx(1_000 / 1.3, rel=0.1)


def test_a_log_that_is_copied_in_time_is_not_cut_off() -> None:
    wal = storage._Wal()
    assert not any(wal.write(1_000, 1_000_000) for _ in range(200))
    assert sum(wal.write(100, 350_000) for _ in range(2_000)) == pytest.approx(
        2_000 * 350_000 / 67.1e6, abs=1
    )


def test_a_loop_that_is_busy_with_publishing_is_the_bound() -> None:
    laws = {
        "send": per_delta(1e-3),
        "loop": ZERO,
        "thread": per_delta(1e-5),
        CUTTING: ZERO,
        storage.WAL_BYTES: ZERO,
    }
    seen = predicted(storage.SET_UP, laws, partial(flat_out, seconds=2.0, ahead_max=100))
    assert seen.rate == pytest.approx(1_000, rel=0.05)


def test_in_an_open_loop_at_rest_the_lag_is_the_call() -> None:
    laws = {
        "send": ZERO,
        "loop": per_delta(1e-4),
        "thread": per_delta(1e-4),
        CUTTING: ZERO,
        storage.WAL_BYTES: ZERO,
    }

    async def drive(rig: Rig) -> None:
        await anyio.sleep(1.0)
        rig.watch.begin()
        await rig.source.send_open_loop(iter([0.1] * 30), 2.0)
        await anyio.sleep(0.1)

    seen = predicted(storage.SET_UP, laws, drive)
    assert len(seen.lags_s) >= 18
    assert seen.lag_s(0.5) == pytest.approx(storage.SENT * 2e-4, rel=0.01)


def test_an_index_at_its_bound_takes_what_linking_takes() -> None:
    laws = {"send": ZERO, "call": per_delta(1e-6), "thread": Distribution.of({index.CHUNK: [0.25]})}
    seen = predicted(index.SET_UP, laws, partial(flat_out, seconds=3.0, ahead_max=4_000), settle_s=2.0)
    assert seen.rate == pytest.approx(index.CHUNK / 0.25, rel=0.1)


def test_a_subscriber_takes_what_it_reads_a_second() -> None:
    laws = {"send": ZERO, "call": ZERO}
    seen = predicted(subscriber.SET_UP, laws, partial(flat_out, seconds=1.0, ahead_max=500))
    assert seen.rate == pytest.approx(subscriber.RATE_PER_S, rel=0.1)


def test_what_loop_and_thread_cost_each_other_is_what_both_took_longer() -> None:
    laws = {
        "thread": Distribution.of({100: [0.010]}),
        "thread beside": Distribution.of({100: [0.040]}),
        "busy": Distribution.of({100: [0.5]}),
        "send alone": Distribution.of({100: [0.001]}),
        "send beside": Distribution.of({100: [0.002]}),
    }
    (found,) = contention_of(laws).values()
    assert found.loop_slower == pytest.approx(2.0)
    assert found.thread_loses_s == pytest.approx(0.030 / 0.020)
    assert contention_of({}) == {}


def test_a_stopwatch_counts_from_the_offset_to_the_application_what_began_in_time() -> None:
    now = 0.0
    watch = Stopwatch(lambda: now)
    watch.note_offset(10)
    now = 1.0
    watch.begin()
    watch.note_offset(20)
    watch.note_offset(30)
    now = 3.0
    watch.note_applied(25)
    now = 4.0
    watch.note_applied(30)
    watch.note_offset(30)  # known to be applied already
    seen = watch.end()
    assert seen.lags_s == [2.0, 3.0]
    assert (seen.deltas, seen.seconds) == (30, 3.0)
    assert seen.lag_s(0.5) == 3.0


def rounds(ratios: list[tuple[float, float, float]]) -> list[Round]:
    return [
        Round(Figures(1_000 * a, 0.01 * b, 0.1 * c, 50), Figures(1_000, 0.01, 0.1, 50), 400.0, 0.5)
        for a, b, c in ratios
    ]


def test_a_prediction_is_good_by_the_median_of_its_rounds() -> None:
    found = compare("storage", "a store", rounds([(1.19, 0.81, 1.49), (9, 9, 9), (1.19, 0.81, 1.49)]))
    assert found.is_good
    assert [round(one.ratio, 2) for one in found.figures] == [1.19, 0.81, 1.49]
    assert found.figures[0].ratio_high == pytest.approx(9)


@pytest.mark.parametrize("off", [(1.21, 1, 1), (0.79, 1, 1), (1, 1.21, 1), (1, 1, 1.51), (1, 1, 0.66)])
def test_a_prediction_that_is_off_in_one_figure_is_off(off: tuple[float, float, float]) -> None:
    found = compare("storage", "a store", rounds([off]))
    assert not found.is_good
    machine = {"processors": "2 × one", "system": "here", "python": "3.11"}
    told = table([found], machine)
    assert told.count("| off |") == 1
    assert told.count("| good |") == 2
    assert "storage: a store. 1 rounds, 50 lags, lags at 400 deltas/s" in told
