"""Models of the set-ups, with distributions that make the result predictable; comparison of rounds."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import anyio
import pytest

from delta_prop.testing.world import VirtualClock
from delta_prop_simulations.calibration import index, storage, subscriber
from delta_prop_simulations.calibration.busy_loop import BusyTime
from delta_prop_simulations.calibration.distributions import Distribution
from delta_prop_simulations.calibration.driving import Observation, Rig, Stopwatch
from delta_prop_simulations.calibration.models import Draws, contention_by_size
from delta_prop_simulations.calibration.rounds import Figures, Round, compare, format_table
from delta_prop_simulations.rng import Random, Seed

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from delta_prop_simulations.calibration.rounds import SetUp

TRUNCATING = storage.THREAD_TRUNCATING
ZERO = Distribution.of({1: [0.0], 1_000: [0.0]})


def per_delta(seconds: float) -> Distribution:
    return Distribution.of({1: [seconds], 1_000: [1_000 * seconds]})


def predict(
    set_up: SetUp,
    distributions: Mapping[str, Distribution],
    drive: Callable[[Rig], Awaitable[None]],
    settle_s: float = 0.5,
) -> Observation:
    time = BusyTime(ZERO, Random(1))

    async def main() -> Observation:
        async with set_up.model(Draws(distributions, time, Seed(1).stream("draws")), VirtualClock()) as rig:
            await rig.source.send_closed_loop(settle_s, set_up.unapplied_max)
            rig.watch.begin()
            await drive(rig)
            return rig.watch.end()

    return time.run(main, 1)


def send_flat_out(rig: Rig, seconds: float, unapplied_max: int) -> Awaitable[None]:
    return rig.source.send_closed_loop(seconds, unapplied_max)


def test_sink_of_one_ms_per_delta_applies_thousand_per_s() -> None:
    distributions = {
        "send": per_delta(1e-6),
        "loop": ZERO,
        "thread": per_delta(1e-3),
        TRUNCATING: ZERO,
        storage.WAL_BYTES: ZERO,
    }
    observation = predict(
        storage.SET_UP, distributions, partial(send_flat_out, seconds=2.0, unapplied_max=100)
    )
    assert observation.rate == pytest.approx(1_000, rel=0.05)


def test_truncating_large_wal_adds_to_call_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(storage, "WAL_BYTES_MAX", 400)
    truncating = Distribution.of({storage.TRUNCATING_DELTAS: [0.6]})
    distributions = {"send": per_delta(1e-7), "loop": ZERO, "thread": per_delta(1e-3), TRUNCATING: truncating}
    distributions[storage.WAL_BYTES] = per_delta(1.0)
    observation = predict(
        storage.SET_UP, distributions, partial(send_flat_out, seconds=7.0, unapplied_max=4_000)
    )
    # A call applies 1,000 deltas in 1 s and truncates; 0.3 s of the 0.6 s are the call's usual time.
    assert observation.rate == pytest.approx(1_000 / 1.3, rel=0.1)


def test_wal_checkpointed_in_time_is_not_truncated() -> None:
    wal = storage._Wal()
    assert not any(wal.write(1_000, 1_000_000) for _ in range(200))
    assert sum(wal.write(100, 350_000) for _ in range(2_000)) == pytest.approx(
        2_000 * 350_000 / 67.1e6, abs=1
    )


def test_loop_busy_with_publishing_limits_the_rate() -> None:
    distributions = {
        "send": per_delta(1e-3),
        "loop": ZERO,
        "thread": per_delta(1e-5),
        TRUNCATING: ZERO,
        storage.WAL_BYTES: ZERO,
    }
    observation = predict(
        storage.SET_UP, distributions, partial(send_flat_out, seconds=2.0, unapplied_max=100)
    )
    assert observation.rate == pytest.approx(1_000, rel=0.05)


def test_lag_in_idle_open_loop_equals_call_time() -> None:
    distributions = {
        "send": ZERO,
        "loop": per_delta(1e-4),
        "thread": per_delta(1e-4),
        TRUNCATING: ZERO,
        storage.WAL_BYTES: ZERO,
    }

    async def drive(rig: Rig) -> None:
        await anyio.sleep(1.0)
        rig.watch.begin()
        await rig.source.send_open_loop(iter([0.1] * 30), 2.0)
        await anyio.sleep(0.1)

    observation = predict(storage.SET_UP, distributions, drive)
    assert len(observation.lags_s) >= 18
    assert observation.lag_s(0.5) == pytest.approx(storage.DELTAS_PER_PUBLISH * 2e-4, rel=0.01)


def test_index_at_its_bound_is_limited_by_graph_building() -> None:
    distributions = {"send": ZERO, "call": per_delta(1e-6), "thread": Distribution.of({index.CHUNK: [0.25]})}
    observation = predict(
        index.SET_UP, distributions, partial(send_flat_out, seconds=3.0, unapplied_max=4_000), settle_s=2.0
    )
    assert observation.rate == pytest.approx(index.CHUNK / 0.25, rel=0.1)


def test_subscriber_rate_equals_its_read_rate() -> None:
    distributions = {"send": ZERO, "call": ZERO}
    observation = predict(
        subscriber.SET_UP, distributions, partial(send_flat_out, seconds=1.0, unapplied_max=500)
    )
    assert observation.rate == pytest.approx(subscriber.RATE_PER_S, rel=0.1)


def test_contention_is_derived_from_slowdown_of_both() -> None:
    distributions = {
        "thread": Distribution.of({100: [0.010]}),
        "thread beside": Distribution.of({100: [0.040]}),
        "busy": Distribution.of({100: [0.5]}),
        "send alone": Distribution.of({100: [0.001]}),
        "send beside": Distribution.of({100: [0.002]}),
    }
    (contention,) = contention_by_size(distributions).values()
    assert contention.loop_slower == pytest.approx(2.0)
    assert contention.thread_loses_s == pytest.approx(0.030 / 0.020)
    assert contention_by_size({}) == {}


class FakeTimer:
    def __init__(self) -> None:
        self.time_s = 0.0

    def now(self) -> float:
        return self.time_s


def test_stopwatch_measures_lag_from_offset_to_application() -> None:
    timer = FakeTimer()
    watch = Stopwatch(timer)
    watch.note_offset(10)
    timer.time_s = 1.0
    watch.begin()
    watch.note_offset(20)
    watch.note_offset(30)
    timer.time_s = 3.0
    watch.note_applied(25)
    timer.time_s = 4.0
    watch.note_applied(30)
    watch.note_offset(30)  # has no effect: the row is applied already
    observation = watch.end()
    assert observation.lags_s == [2.0, 3.0]
    assert (observation.deltas, observation.seconds) == (30, 3.0)
    assert observation.lag_s(0.5) == 3.0


def rounds(ratios: list[tuple[float, float, float]]) -> list[Round]:
    return [
        Round(Figures(1_000 * a, 0.01 * b, 0.1 * c, 50), Figures(1_000, 0.01, 0.1, 50), 400.0, 0.5)
        for a, b, c in ratios
    ]


def test_prediction_is_judged_by_median_of_rounds() -> None:
    comparison = compare("storage", "a store", rounds([(1.19, 0.81, 1.49), (9, 9, 9), (1.19, 0.81, 1.49)]))
    assert comparison.is_good
    assert [round(figure.ratio, 2) for figure in comparison.figures] == [1.19, 0.81, 1.49]
    assert comparison.figures[0].ratio_high == pytest.approx(9)


@pytest.mark.parametrize("factors", [(1.21, 1, 1), (0.79, 1, 1), (1, 1.21, 1), (1, 1, 1.51), (1, 1, 0.66)])
def test_prediction_off_in_one_figure_is_not_good(factors: tuple[float, float, float]) -> None:
    comparison = compare("storage", "a store", rounds([factors]))
    assert not comparison.is_good
    machine = {"processors": "2 × one", "system": "here", "python": "3.11"}
    text = format_table([comparison], machine)
    assert text.count("| off |") == 1
    assert text.count("| good |") == 2
    assert "storage: a store. 1 rounds, 50 lags, lags at 400 deltas/s" in text
