"""Virtual time in which computing takes time: who computes holds up everybody on the loop, and no thread."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import pytest

from delta_prop_simulations.calibration.busy_loop import BusyTime, Contention

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


def finished(main: Callable[[BusyTime], Awaitable[None]], late_s: float = 0.0) -> float:
    """When it ended."""
    time = BusyTime(lambda: late_s)

    async def run() -> float:
        await main(time)
        return anyio.current_time()

    return time.run(run, 1)


def test_computing_takes_time() -> None:
    async def main(time: BusyTime) -> None:
        time.spend(2.0)

    assert finished(main) == pytest.approx(2.0)


def test_what_becomes_due_while_a_task_computes_comes_late() -> None:
    async def main(time: BusyTime) -> None:
        async def compute() -> None:
            time.spend(5.0)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(compute)
            await anyio.sleep(1.0)

    assert finished(main) == pytest.approx(5.0)


def test_a_thread_goes_on_while_the_loop_computes() -> None:
    async def main(time: BusyTime) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(time.wait_outside_loop, 6.0)
            await anyio.sleep(0.5)
            time.spend(5.0)

    assert finished(main) == pytest.approx(6.0)


def test_a_thread_and_a_loop_that_share_the_interpreter_take_turns() -> None:
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

    finished(main)
    # Two seconds of computing take four beside the thread, in which that does two seconds' work.
    assert ends == pytest.approx([5.0, 8.0])


def test_timers_are_as_late_as_is_drawn_and_threads_are_not() -> None:
    async def sleeps(time: BusyTime) -> None:
        await anyio.sleep(1.0)

    async def calls(time: BusyTime) -> None:
        await time.wait_outside_loop(1.0)

    assert finished(sleeps, late_s=0.25) == pytest.approx(1.25)
    assert finished(calls, late_s=0.25) == pytest.approx(1.0)
