"""The real ports do what they say, on every loop that a service may run on."""

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

from delta_prop.testing import run_virtual
from delta_prop.world import real_world

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
def test_the_clock_is_the_loops_own(loop: dict[str, Any]) -> None:
    async def main() -> None:
        clock = real_world().clock
        before = anyio.current_time()
        now = clock.now()
        assert before <= now <= anyio.current_time() + 0.001
        assert abs(clock.wall_us() / 1e6 - time.time()) < 1

    anyio.run(main, **loop)


@pytest.mark.alone
def test_the_clock_is_cheap() -> None:
    async def main() -> float:
        now = real_world().clock.now
        spent = []
        for _ in range(20):
            begin = time.thread_time()
            for _ in range(1000):
                now()
            spent.append(time.thread_time() - begin)
        return min(spent) / 1000 * 1e6

    cost_us = anyio.run(main)
    print(f"clock: {cost_us:.3f} us a call")
    assert cost_us < 1.0  # five times what is meant, for busy machines


def test_the_real_world_in_virtual_time() -> None:
    async def main() -> None:
        clock = real_world().clock
        await anyio.sleep(3600)
        assert clock.now() == 3600

    run_virtual(main)


def test_chance_differs() -> None:
    async def main() -> None:
        randomness = real_world().randomness
        assert len(randomness.bytes(16)) == 16
        assert randomness.bytes(16) != real_world().randomness.bytes(16)
        assert 0 <= randomness.random() < 1

    anyio.run(main)


@LOOPS
def test_calls_on_a_thread_come_one_at_a_time_off_the_loop(loop: dict[str, Any]) -> None:
    async def main() -> None:
        threads = real_world().new_threads()
        running = most = 0
        order: list[int] = []

        def call(number: int) -> None:
            nonlocal running, most
            running += 1
            most = max(most, running)
            assert threading.current_thread() is not threading.main_thread()
            order.append(number)
            threading.Event().wait(0.001)
            running -= 1

        async with anyio.create_task_group() as tasks:
            for number in range(8):
                tasks.start_soon(threads.run, lambda number=number: call(number))
        assert most == 1
        assert sorted(order) == list(range(8))

    anyio.run(main, **loop)


@LOOPS
def test_errors_come_back_and_the_thread_goes_on(loop: dict[str, Any]) -> None:
    async def main() -> None:
        threads = real_world().new_threads()
        with pytest.raises(ZeroDivisionError):
            await threads.run(lambda: 1 // 0)
        assert await threads.run(lambda: 3) == 3

    anyio.run(main, **loop)


@LOOPS
def test_a_cancelled_caller_waits_for_the_end_of_its_call(loop: dict[str, Any]) -> None:
    async def main() -> None:
        threads = real_world().new_threads()
        begun, go, done = threading.Event(), threading.Event(), []

        def call() -> None:
            begun.set()
            assert go.wait(5)
            done.append("effect")

        async def let_go() -> None:
            await real_world().new_threads().run(begun.wait)
            tasks.cancel_scope.cancel()
            go.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(threads.run, call)
            tasks.start_soon(let_go)
        assert done == ["effect"]

    anyio.run(main, **loop)


@LOOPS
def test_a_background_thread_stands_back_and_ends_with_its_scope(loop: dict[str, Any]) -> None:
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
def test_an_own_thread_is_like_any_other_and_is_not_kept_waiting_for_the_interpreter(
    loop: dict[str, Any],
) -> None:
    async def main() -> None:
        async with real_world().own_thread() as threads:
            first = await threads.run(threading.current_thread)
            assert await threads.run(threading.current_thread) is first is not threading.main_thread()
            assert sys.getswitchinterval() <= 0.0005
            if sys.platform == "linux":
                assert await threads.run(niceness) == niceness()
            order: list[int] = []
            async with anyio.create_task_group() as tasks:
                for number in range(8):
                    tasks.start_soon(threads.run, partial(order.append, number))
            assert sorted(order) == list(range(8))
        assert not first.is_alive()

    before = sys.getswitchinterval()
    try:
        sys.setswitchinterval(0.005)
        anyio.run(main, **loop)
    finally:
        sys.setswitchinterval(before)


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


@LOOPS
def test_a_background_thread_finishes_its_call_before_a_cancelled_scope_ends(loop: dict[str, Any]) -> None:
    async def main() -> None:
        begun, go, done = threading.Event(), threading.Event(), []

        def call() -> None:
            begun.set()
            assert go.wait(5)
            done.append(threading.current_thread())

        async def work() -> None:
            async with real_world().background_thread() as threads:
                await threads.run(call)

        async def let_go() -> None:
            await real_world().new_threads().run(begun.wait)
            tasks.cancel_scope.cancel()
            go.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(work)
            tasks.start_soon(let_go)
        assert not done[0].is_alive()

    anyio.run(main, **loop)
