"""Advice: what a service says of pressure, and when that lets a producer send."""

from __future__ import annotations

import pytest

from delta_prop.client.advice import PAUSE_S_MAX, STOP_S, Advice
from delta_prop_wire.frames import Backpressure, Level


def advised(level: Level, *, rate: float | None = None, retry_after_ms: int | None = None) -> Advice:
    advice = Advice()
    advice.take(Backpressure(1, level, rate=rate, retry_after_ms=retry_after_ms), 100.0)
    return advice


@pytest.mark.parametrize("level", [Level.OK, Level.WARN, Level.THROTTLE])
def test_below_stop_nobody_stands_still(level: Level) -> None:
    assert advised(level, retry_after_ms=10_000).wait_s(100.0) == 0


@pytest.mark.parametrize(
    ("retry_after_ms", "pause_s"), [(None, STOP_S), (0, STOP_S), (250, 0.25), (10_000_000, PAUSE_S_MAX)]
)
def test_stop_is_a_pause(retry_after_ms: int | None, pause_s: float) -> None:
    advice = advised(Level.STOP, retry_after_ms=retry_after_ms)
    assert advice.wait_s(100.0) == pause_s
    assert advice.wait_s(100.0 + pause_s) == 0


@pytest.mark.parametrize("level", [Level.WARN, Level.THROTTLE])
def test_a_rate_is_kept_to(level: Level) -> None:
    advice = advised(level, rate=100.0)
    advice.spend(50, 100.0)
    assert advice.wait_s(100.0) == pytest.approx(0.5)
    assert advice.wait_s(100.5) == pytest.approx(0)


def test_ok_ends_it_whatever_else_it_says() -> None:
    advice = advised(Level.STOP, rate=1.0, retry_after_ms=5_000)
    advice.spend(500, 100.0)
    advice.take(Backpressure(2, Level.OK, rate=1.0, retry_after_ms=5_000), 101.0)
    advice.spend(500, 101.0)
    assert advice.wait_s(101.0) == 0
