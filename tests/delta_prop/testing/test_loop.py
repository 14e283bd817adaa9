"""The virtual-time loop skips sleeps, repeats runs exactly, and raises `Stuck` when no task can continue."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from functools import partial
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from delta_prop.testing import Stuck, VirtualLoop, run_virtual
from delta_prop.testing import loop as loop_module
from delta_prop_wire.errors import UsageError

BACKENDS = pytest.mark.parametrize("backend", ["asyncio", "trio"])

TRACE_SCRIPT = """
import anyio
from delta_prop.testing import run_virtual

junk = [bytearray(hash(str(i)) % 4096) for i in range(2000)]  # addresses differ with the hash seed

async def main():
    trace = []
    async def worker(number):
        try:
            for step in range(3):
                await anyio.sleep(number % 3)
                trace.append((number, step, anyio.current_time()))
            await anyio.sleep_forever()
        finally:
            trace.append((number, "cancelled", anyio.current_time()))
    async with anyio.create_task_group() as tasks:
        for number in range(20):
            tasks.start_soon(worker, number)
            del junk[number::97]
        await anyio.sleep(10)
        tasks.cancel_scope.cancel()
    return trace

print(run_virtual(main), run_virtual(main, seed=7), run_virtual(main, seed=8), sep="\\n")
"""


@BACKENDS
def test_hours_of_sleep_take_milliseconds(backend: str) -> None:
    async def main() -> float:
        with anyio.move_on_after(3600):
            for _ in range(1000):
                await anyio.sleep(10)
        return anyio.current_time()

    started = time.process_time()
    assert run_virtual(main, backend=backend) == 3600
    assert time.process_time() - started < 2


def test_runs_are_identical_in_every_process() -> None:
    traces = [
        subprocess.run(
            [sys.executable, "-c", TRACE_SCRIPT],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("0", "1", "4711")
    ]
    assert traces[0] == traces[1] == traces[2]
    unshuffled, *shuffled = traces[0].splitlines()
    assert len({unshuffled, *shuffled}) == 3
    assert "cancelled" in unshuffled


def test_cancelled_tasks_end_in_creation_order() -> None:
    async def main() -> list[int]:
        ended: list[int] = []

        async def worker(number: int) -> None:
            try:
                await anyio.sleep_forever()
            finally:
                ended.append(number)

        async with anyio.create_task_group() as tasks:
            for number in range(50):
                tasks.start_soon(worker, number)
            await anyio.sleep(1)
            tasks.cancel_scope.cancel()
        return ended

    assert run_virtual(main) == list(range(50))
    shuffled = run_virtual(main, seed=1)
    assert shuffled != list(range(50))
    assert run_virtual(main, seed=1) == shuffled


@BACKENDS
def test_deadlock_raises_stuck(backend: str) -> None:
    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(anyio.sleep, 60, name="sleeper")
            tasks.start_soon(_wait_for_nobody, name="forgotten")

    with pytest.raises(BaseException, match="nothing"):  # trio wraps the error in a group
        run_virtual(main, backend=backend)


def test_deadlock_names_the_waiting_task_and_line() -> None:
    async def main() -> None:
        await anyio.sleep(60)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_wait_for_nobody, name="forgotten")

    with pytest.raises(
        Stuck, match=r"at 60\.0 s.*forgotten waits at .*test_loop\.py:\d+ \(_wait_for_nobody\)"
    ):
        run_virtual(main)


def test_sleeping_forever_is_a_deadlock() -> None:
    with pytest.raises(Stuck, match="no timer"):
        run_virtual(anyio.sleep_forever)


@BACKENDS
def test_endless_run_ends_at_its_horizon(backend: str) -> None:
    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_tick_forever)
            await _wait_for_nobody()

    with pytest.raises(Stuck, match="horizon"):
        run_virtual(main, horizon_s=100, backend=backend)


@BACKENDS
def test_shielded_wait_raises_stuck(backend: str) -> None:
    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_tick_shielded)
            try:
                with anyio.CancelScope(shield=True):
                    await _wait_for_nobody()
            finally:
                with anyio.CancelScope(shield=True), anyio.CancelScope(shield=True):
                    await anyio.sleep_forever()

    async def _tick_shielded() -> None:
        with anyio.CancelScope(shield=True):
            await _tick_forever()

    with pytest.raises(
        Stuck, match=r"100\.0 s|100 s.*main waits at .*test_loop\.py:\d+ \(_wait_for_nobody\)"
    ):
        run_virtual(main, horizon_s=100, backend=backend)


def test_endless_wakeups_at_one_instant_raise_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_module, "TURNS_AT_ONE_INSTANT_MAX", 1000)

    async def main() -> None:
        while True:
            await anyio.lowlevel.checkpoint()

    with pytest.raises(Stuck, match=r"1000 turns and still 0\.0 s"):
        run_virtual(main)


@pytest.mark.parametrize("seconds", [0.0, 0.001, 0.05])
def test_waiting_for_a_thread_raises_stuck(seconds: float) -> None:
    async def main() -> None:
        await anyio.to_thread.run_sync(partial(time.sleep, seconds))

    with pytest.raises(Stuck):
        run_virtual(main)


@BACKENDS
def test_timeouts_and_cancellation_happen_on_time(backend: str) -> None:
    async def main() -> list[tuple[str, float]]:
        events: list[tuple[str, float]] = []

        async def wait_with_cleanup() -> None:
            try:
                await anyio.sleep(100)
            finally:
                with anyio.move_on_after(3, shield=True):
                    await anyio.sleep(50)
                events.append(("clean", anyio.current_time()))

        with anyio.move_on_after(7):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(wait_with_cleanup)
        events.append(("left", anyio.current_time()))
        with pytest.raises(TimeoutError), anyio.fail_after(0.25):
            await anyio.sleep(1)
        events.append(("failed", anyio.current_time()))
        return events

    assert run_virtual(main, backend=backend) == [("clean", 10), ("left", 10), ("failed", 10.25)]


def test_results_and_errors_reach_the_caller() -> None:
    async def main(value: int) -> int:
        await anyio.sleep(1)
        if value < 0:
            raise ValueError(value)
        return value + 1

    assert run_virtual(main, 4) == 5
    with pytest.raises(ValueError, match="-1"):
        run_virtual(main, -1)


def test_loop_works_with_any_runner() -> None:
    async def main() -> float:
        await anyio.sleep(50_000)
        return anyio.current_time()

    assert anyio.run(main, backend_options={"loop_factory": VirtualLoop}) == 50_000


async def _wait_for_nobody() -> None:
    await anyio.Event().wait()


async def _tick_forever() -> None:
    while True:  # noqa: ASYNC110 - ticks like a service
        await anyio.sleep(1)


def test_on_turn_sees_each_turn_and_can_end_the_run() -> None:
    times: list[float] = []

    def on_turn(now: float, runnable: int) -> None:
        assert runnable >= 0
        times.append(now)
        if now >= 2:
            raise ZeroDivisionError

    async def main() -> None:
        for _ in range(10):
            await anyio.sleep(1)

    with pytest.raises(ZeroDivisionError):
        run_virtual(main, on_turn=on_turn)
    assert sorted(set(times)) == [0, 1, 2]
    assert times.count(2) == 1
    with pytest.raises(UsageError, match="asyncio"):
        run_virtual(main, on_turn=on_turn, backend="trio")


def test_cancelled_timers_do_not_pile_up() -> None:
    called: list[int] = []

    async def main() -> int:
        loop: Any = asyncio.get_running_loop()
        for number in range(50):
            loop.call_at(20.0 + number, called.append, number)
        for _ in range(5_000):
            with anyio.move_on_after(500):
                await anyio.sleep(0.001)
        timer_count = len(loop._scheduled)
        await anyio.sleep_until(100)
        return timer_count

    assert run_virtual(main) < 250
    assert called == list(range(50))
