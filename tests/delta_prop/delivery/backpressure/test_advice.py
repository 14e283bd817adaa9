"""Backpressure advice: when, and how much, a producer may send."""

from __future__ import annotations

import pytest

from delta_prop.delivery.backpressure.advice import PAUSE_S_MAX, Advice
from delta_prop_wire.frames import Backpressure, PressureLevel


def new_advice(
    level: PressureLevel, *, rate: float | None = None, retry_after_ms: int | None = None
) -> Advice:
    advice = Advice()
    advice.update(Backpressure(1, level, rate=rate, retry_after_ms=retry_after_ms), 100.0)
    return advice


@pytest.mark.parametrize("level", [PressureLevel.OK, PressureLevel.WARN, PressureLevel.THROTTLE])
def test_level_below_stop_does_not_wait(level: PressureLevel) -> None:
    assert new_advice(level, retry_after_ms=10_000).wait_s(100.0) == 0


@pytest.mark.parametrize(
    ("retry_after_ms", "pause_s"), [(None, PAUSE_S_MAX), (0, 0), (250, 0.25), (10_000_000, PAUSE_S_MAX)]
)
def test_stop_ends_after_retry_after_ms(retry_after_ms: int | None, pause_s: float) -> None:
    advice = new_advice(PressureLevel.STOP, retry_after_ms=retry_after_ms)
    assert advice.wait_s(100.0) == pause_s
    assert advice.wait_s(100.0 + pause_s) == 0


@pytest.mark.parametrize("level", [PressureLevel.OK, PressureLevel.WARN, PressureLevel.THROTTLE])
def test_lower_level_ends_stop(level: PressureLevel) -> None:
    advice = new_advice(PressureLevel.STOP, retry_after_ms=5_000)
    advice.update(Backpressure(2, level), 101.0)
    assert advice.wait_s(101.0) == 0


def test_second_stop_restarts_the_pause() -> None:
    advice = new_advice(PressureLevel.STOP, retry_after_ms=5_000)
    advice.update(Backpressure(2, PressureLevel.STOP, retry_after_ms=2_000), 101.0)
    assert advice.wait_s(101.0) == 2


@pytest.mark.parametrize("rate", [1.0, 5.0, 8.0, 500.0, 1e6])
def test_bursts_after_idle_are_bounded_and_keep_the_rate(rate: float) -> None:
    advice, now, sent = new_advice(PressureLevel.WARN, rate=rate), 200.0, []
    while now < 210.0:
        now += advice.wait_s(now)
        assert advice.rows_max is not None
        advice.spend(advice.rows_max, now)
        sent.append((now, advice.rows_max))
    for start, _ in sent[:50]:
        burst = sum(rows for time_s, rows in sent if start <= time_s < start + 1e-3)
        assert burst <= max(1, rate * 0.251)
    total = sum(rows for _, rows in sent[:-1])
    assert rate * 9 <= total <= rate * 10.3 + 1


def test_rate_below_one_counts_as_one() -> None:
    for rate in (1e-300, 0.0, 0.5):
        advice = new_advice(PressureLevel.WARN, rate=rate)
        advice.spend(1, 100.0)
        assert advice.wait_s(100.0) == pytest.approx(1.0)


def test_debt_is_forgotten_when_the_rate_ends() -> None:
    advice = new_advice(PressureLevel.WARN, rate=1.0)
    advice.spend(1_000, 100.0)
    advice.update(Backpressure(2, PressureLevel.OK), 100.0)
    advice.update(Backpressure(3, PressureLevel.WARN, rate=1.0), 101.0)
    assert advice.wait_s(101.0) == 0


@pytest.mark.parametrize("level", [PressureLevel.WARN, PressureLevel.THROTTLE])
def test_rate_delays_the_next_send(level: PressureLevel) -> None:
    advice = new_advice(level, rate=100.0)
    advice.spend(50, 100.0)
    assert advice.wait_s(100.0) == pytest.approx(0.5)
    assert advice.wait_s(100.5) == pytest.approx(0)


def test_ok_level_ends_stop_and_ignores_rate() -> None:
    advice = new_advice(PressureLevel.STOP, rate=1.0, retry_after_ms=5_000)
    advice.spend(500, 100.0)
    advice.update(Backpressure(2, PressureLevel.OK, rate=1.0, retry_after_ms=5_000), 101.0)
    advice.spend(500, 101.0)
    assert advice.wait_s(101.0) == 0
