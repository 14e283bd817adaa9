"""The long run: growth is judged after the warm-up, latency against short runs; sampling loses no counts."""

from __future__ import annotations

import multiprocessing
import os
from array import array
from typing import TYPE_CHECKING

import pytest

from benchmarks import sustained
from benchmarks._peers_scenes import Measurement, _receive_all
from benchmarks.sustained import growth, private_mb

if TYPE_CHECKING:
    from collections.abc import Iterator


def measurement(p99_us: float, lost: int = 0) -> Measurement:
    return Measurement(100, lost, 0, 1e6, 1e6, 1.0, p99_us, 1.0, 2.0, 3.0)


def test_growth_is_measured_after_warm_up() -> None:
    filling = [(float(second), 100.0 + 10 * second) for second in range(20)]
    assert growth([*filling, *((float(second), 300.0) for second in range(20, 60))]) == pytest.approx(
        (1.0, 0.0)
    )
    ratio, per_minute = growth([(float(second), 100.0 + second) for second in range(60)])
    assert per_minute == pytest.approx(60.0)
    assert 1.2 < ratio < 1.3


def test_growth_and_latency_miss_goals_but_only_loss_fails() -> None:
    flat, rising = ([(float(second), 100.0 + second * slope) for second in range(60)] for slope in (0.0, 1.0))
    short_runs = [measurement(p99_us) for p99_us in (9.0, 10.0, 11.0)]
    fine = sustained.report(short_runs, short_runs, measurement(14.0), flat, 60.0)
    assert [goal["verdict"] for goal in fine.goals] == ["reached", "far beyond"]
    missed = sustained.report(short_runs, short_runs, measurement(40.0), rising, 60.0)
    assert [goal["verdict"] for goal in missed.goals] == ["short", "short"]
    assert not missed.has_failed
    assert sustained.report(short_runs, short_runs, measurement(14.0, lost=1), flat, 60.0).has_failed


def test_long_run_samples_times_and_counts_all() -> None:
    class Consumer:
        def __init__(self) -> None:
            self._chunks: Iterator[bytes] = iter(
                [array("q", range(1, 301)).tobytes(), b"", array("q", range(301, 401)).tobytes()]
            )

        def begin(self) -> None:
            raise NotImplementedError

        def receive(self) -> bytes:
            return next(self._chunks)

        def close(self) -> None:
            raise NotImplementedError

    target = multiprocessing.get_context("spawn").Value("q", 400)
    received = _receive_all(Consumer(), target, sampled=100)
    assert (received["count"], received["twice"]) == (400, 0)
    target.get_obj().value = 300
    backwards = Consumer()
    backwards._chunks = iter([array("q", range(400, 100, -1)).tobytes()])
    assert _receive_all(backwards, target, sampled=100)["twice"] == 2


def test_private_memory_is_that_of_the_given_process() -> None:
    assert 5 < private_mb(os.getpid()) < 5_000
