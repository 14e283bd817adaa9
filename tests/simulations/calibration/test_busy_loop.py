"""Virtual time in which computing takes time: it delays every task of the event loop, but no thread."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import pytest

from delta_prop_simulations.calibration.busy_loop import BusyTime, Contention
from delta_prop_simulations.calibration.distributions import Distribution
from delta_prop_simulations.rng import Random

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


def run_and_return_end(main: Callable[[BusyTime], Awaitable[None]], timer_delay_s: float = 0.0) -> float:
    """Run a function; return the time at which it ended."""
    time = BusyTime(Distribution.of({1: [timer_delay_s]}), Random(1))

    async def run() -> float:
        await main(time)
        return anyio.current_time()

    return time.run(run, 1)


def test_computing_takes_time() -> None:
    async def main(time: BusyTime) -> None:
        time.spend(2.0)

    assert run_and_return_end(main) == pytest.approx(2.0)


def test_timer_due_during_computation_is_late() -> None:
    async def main(time: BusyTime) -> None:
        async def compute() -> None:
            time.spend(5.0)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(compute)
            await anyio.sleep(1.0)

    assert run_and_return_end(main) == pytest.approx(5.0)


def test_thread_runs_on_while_loop_computes() -> None:
    async def main(time: BusyTime) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(time.wait_outside_loop, 6.0)
            await anyio.sleep(0.5)
            time.spend(5.0)

    assert run_and_return_end(main) == pytest.approx(6.0)


def test_thread_and_loop_slow_each_other_down() -> None:
    ends: list[float] = []

    async def main(time: BusyTime) -> None:
        async def call() -> None:
            await time.wait_outside_loop(6.0, Contention(loop_slower=2.0, thread_loses_s=0.5))
            ends.append(anyio.current_time())

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(call)
            await anyio.sleep(1.0)
            time.spend(2.0)
            ends.append(anyio.current_time())

    run_and_return_end(main)
    # While the thread runs, two seconds of computing take four, in which the thread does two seconds' work.
    assert ends == pytest.approx([5.0, 8.0])


def test_drawn_lateness_affects_timers_but_not_threads() -> None:
    async def sleep(time: BusyTime) -> None:
        await anyio.sleep(1.0)

    async def call_thread(time: BusyTime) -> None:
        await time.wait_outside_loop(1.0)

    assert run_and_return_end(sleep, timer_delay_s=0.25) == pytest.approx(1.25)
    assert run_and_return_end(call_thread, timer_delay_s=0.25) == pytest.approx(1.0)
