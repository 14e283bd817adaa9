"""The real ports keep their contracts on every supported event loop."""

from __future__ import annotations

import os
import sys
import threading
import time
from functools import partial
from typing import Any

import anyio
import pytest
import uvloop

from delta_prop.platform.world import real_world
from delta_prop.testing import run_virtual

LOOPS = pytest.mark.parametrize(
    "loop",
    [
        {"backend": "asyncio"},
        {"backend": "asyncio", "backend_options": {"loop_factory": uvloop.new_event_loop}},
        {"backend": "trio"},
    ],
    ids=["asyncio", "uvloop", "trio"],
)


@LOOPS
def test_clock_is_the_event_loop_clock(loop: dict[str, Any]) -> None:
    async def main() -> None:
        clock = real_world().clock
        before = anyio.current_time()
        now = clock.now()
        assert before <= now <= anyio.current_time() + 0.001
        assert abs(clock.wall_us() / 1e6 - time.time()) < 1

    anyio.run(main, **loop)


@pytest.mark.alone
def test_clock_call_costs_under_one_microsecond() -> None:
    async def main() -> float:
        now = real_world().clock.now
        spent_s = []
        for _ in range(20):
            start_s = time.thread_time()
            for _ in range(1000):
                now()
            spent_s.append(time.thread_time() - start_s)
        return min(spent_s) / 1000 * 1e6

    cost_us = anyio.run(main)
    print(f"clock: {cost_us:.3f} us a call")
    assert cost_us < 1.0  # five times the target, for busy machines


def test_real_world_clock_follows_virtual_time() -> None:
    async def main() -> None:
        clock = real_world().clock
        await anyio.sleep(3600)
        assert clock.now() == 3600

    run_virtual(main)


def test_randomness_differs_between_worlds() -> None:
    async def main() -> None:
        randomness = real_world().randomness
        assert len(randomness.bytes(16)) == 16
        assert randomness.bytes(16) != real_world().randomness.bytes(16)
        assert 0 <= randomness.random() < 1

    anyio.run(main)


@LOOPS
def test_thread_calls_run_one_at_a_time_off_the_loop(loop: dict[str, Any]) -> None:
    async def main() -> None:
        threads = real_world().new_threads()
        running = running_max = 0
        order: list[int] = []

        def call(number: int) -> None:
            nonlocal running, running_max
            running += 1
            running_max = max(running_max, running)
            assert threading.current_thread() is not threading.main_thread()
            order.append(number)
            threading.Event().wait(0.001)
            running -= 1

        async with anyio.create_task_group() as tasks:
            for number in range(8):
                tasks.start_soon(threads.run, lambda number=number: call(number))
        assert running_max == 1
        assert sorted(order) == list(range(8))

    anyio.run(main, **loop)


@LOOPS
def test_thread_call_error_is_raised_and_thread_continues(loop: dict[str, Any]) -> None:
    async def main() -> None:
        threads = real_world().new_threads()
        with pytest.raises(ZeroDivisionError):
            await threads.run(lambda: 1 // 0)
        assert await threads.run(lambda: 3) == 3

    anyio.run(main, **loop)


@LOOPS
def test_cancelled_caller_waits_for_its_thread_call(loop: dict[str, Any]) -> None:
    async def main() -> None:
        threads = real_world().new_threads()
        started, release, done = threading.Event(), threading.Event(), []

        def call() -> None:
            started.set()
            assert release.wait(5)
            done.append("effect")

        async def cancel_then_release() -> None:
            await real_world().new_threads().run(started.wait)
            tasks.cancel_scope.cancel()
            release.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(threads.run, call)
            tasks.start_soon(cancel_then_release)
        assert done == ["effect"]

    anyio.run(main, **loop)


@LOOPS
def test_background_thread_is_niced_and_ends_with_its_scope(loop: dict[str, Any]) -> None:
    async def main() -> None:
        async with real_world().background_thread() as threads:
            first = await threads.run(threading.current_thread)
            assert await threads.run(threading.current_thread) is first
            assert first is not threading.main_thread()
            with pytest.raises(ZeroDivisionError):
                await threads.run(lambda: 1 // 0)
            if sys.platform == "linux":
                assert await threads.run(niceness) == min(niceness() + 10, 19)
                pooled = real_world().new_threads()
                assert await pooled.run(niceness) == niceness()
        assert not first.is_alive()

    anyio.run(main, **loop)


@LOOPS
def test_own_thread_has_normal_niceness_and_leaves_the_switch_interval(
    loop: dict[str, Any],
) -> None:
    async def main() -> None:
        async with real_world().own_thread() as threads:
            first = await threads.run(threading.current_thread)
            assert await threads.run(threading.current_thread) is first is not threading.main_thread()
            assert sys.getswitchinterval() == before
            if sys.platform == "linux":
                assert await threads.run(niceness) == niceness()
            order: list[int] = []
            async with anyio.create_task_group() as tasks:
                for number in range(8):
                    tasks.start_soon(threads.run, partial(order.append, number))
            assert sorted(order) == list(range(8))
        assert not first.is_alive()

    before = sys.getswitchinterval()
    anyio.run(main, **loop)


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


@LOOPS
def test_background_thread_finishes_call_before_cancelled_scope_ends(loop: dict[str, Any]) -> None:
    async def main() -> None:
        started, release, done = threading.Event(), threading.Event(), []

        def call() -> None:
            started.set()
            assert release.wait(5)
            done.append(threading.current_thread())

        async def work() -> None:
            async with real_world().background_thread() as threads:
                await threads.run(call)

        async def cancel_then_release() -> None:
            await real_world().new_threads().run(started.wait)
            tasks.cancel_scope.cancel()
            release.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(work)
            tasks.start_soon(cancel_then_release)
        assert not done[0].is_alive()

    anyio.run(main, **loop)
