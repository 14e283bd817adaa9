"""TickCallbacks runs each call once, in order, at the end of a tick; Wakeup wakes its waiter."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import pytest

from delta_prop.platform.tick_callbacks import CALLS_MAX, DEFER_WINDOW_S, TickCallbacks, Wakeup
from delta_prop.testing import run_virtual

if TYPE_CHECKING:
    from collections.abc import Callable


def test_calls_run_at_end_of_outermost_tick() -> None:
    tick, calls = TickCallbacks(lambda: 0.0), list[str]()
    assert not tick.call_at_end(lambda: calls.append("never"))
    with tick:
        assert tick.call_at_end(lambda: calls.append("second"))
        assert tick.call_at_end(lambda: calls.append("first"), first=True)
        with tick:
            pass
        assert not calls
    assert calls == ["first", "second"]
    assert not tick.call_at_end(lambda: calls.append("never"))


def test_call_can_schedule_further_calls() -> None:
    tick, calls = TickCallbacks(lambda: 0.0), list[str]()

    def nested_call() -> None:
        calls.append("call")
        with tick:
            assert tick.call_at_end(lambda: calls.append("scheduled last"))
        assert tick.call_at_end(lambda: calls.append("scheduled first"), first=True)
        calls.append("called")

    with tick:
        tick.call_at_end(nested_call)
        tick.call_at_end(lambda: calls.append("other"))
    assert calls == ["call", "called", "scheduled first", "other", "scheduled last"]


def test_failed_call_is_logged_and_others_run(caplog: pytest.LogCaptureFixture) -> None:
    tick, calls = TickCallbacks(lambda: 0.0), list[str]()

    def fail() -> None:
        with tick:
            tick.call_at_end(lambda: calls.append(str(1 / 0)))
            tick.call_at_end(lambda: calls.append("after it"))
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert calls == ["after it"]
    assert "a callback at the end of a tick failed" in caplog.text


def test_calls_per_tick_are_limited() -> None:
    tick, calls = TickCallbacks(lambda: 0.0), list[int]()
    with tick:
        scheduled = [tick.call_at_end(lambda: calls.append(1)) for _ in range(CALLS_MAX + 2)]
    assert scheduled == [True] * CALLS_MAX + [False] * 2
    assert len(calls) == CALLS_MAX


def test_calls_of_ticks_in_quick_succession_are_left_to_the_task() -> None:
    async def main() -> list[tuple[float, str]]:
        tick, calls = TickCallbacks(anyio.current_time), list[tuple[float, str]]()

        def end_tick(name: str) -> None:
            with tick:
                tick.call_at_end(lambda: calls.append((anyio.current_time() - start_s, name)))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(tick.run)
            await anyio.sleep(1)
            start_s = anyio.current_time()
            for name in "abc":
                end_tick(name)
            assert calls == [(0, "a")]
            await anyio.sleep(DEFER_WINDOW_S / 2)
            assert calls == [(0, "a"), (0, "b"), (0, "c")]
            end_tick("d")
            assert len(calls) == 3
            await anyio.sleep(DEFER_WINDOW_S)
            assert calls[3] == (pytest.approx(DEFER_WINDOW_S / 2), "d")
            await anyio.sleep(DEFER_WINDOW_S)
            end_tick("e")
            assert len(calls) == 5, "long after the last tick, the call must run at the end of its own tick"
            tasks.cancel_scope.cancel()
        end_tick("f")
        assert len(calls) == 6, "without the task, the call must run at once"
        return calls

    run_virtual(main)


def test_wakeup_wakes_its_waiter_or_the_next_one() -> None:
    async def main() -> None:
        wakeup, wakeups = Wakeup(), list[str]()

        async def listen() -> None:
            while True:
                await wakeup.wait()
                wakeups.append("woken")

        async with anyio.create_task_group() as tasks:
            wakeup.notify()
            wakeup.notify()
            assert wakeup.has_waiter is False
            tasks.start_soon(listen)
            await anyio.sleep(1)
            assert wakeups == ["woken"]  # two notifications before the wait count as one
            assert wakeup.has_waiter
            wakeup.notify()
            assert not wakeup.has_waiter
            await anyio.sleep(1)
            assert wakeups == ["woken"] * 2
            tasks.cancel_scope.cancel()
        with anyio.move_on_after(1):
            await wakeup.wait()
        wakeup.notify()
        await wakeup.wait()
        with anyio.move_on_after(1) as scope:
            await wakeup.wait()
        assert scope.cancelled_caught

    run_virtual(main)


def test_wait_on_notified_wakeup_yields_once() -> None:
    async def main() -> list[str]:
        wakeup, order = Wakeup(), list[str]()

        async def other() -> None:
            order.append("other")

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(other)
            for _ in range(5):
                wakeup.notify()
                await wakeup.wait()
            order.append("woken")
        return order

    assert run_virtual(main) == ["other", "woken"]


def test_loop_callback_runs_deferred_calls_without_the_task() -> None:
    async def main() -> None:
        loop_callbacks: list[Callable[[], None]] = []
        tick, calls = TickCallbacks(lambda: 0.0, loop_callbacks.append), list[str]()

        def end_tick(name: str) -> None:
            with tick:
                tick.call_at_end(lambda: calls.append(name))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(tick.run)
            await anyio.sleep(1)
            for name in "abc":
                end_tick(name)
            await anyio.sleep(1)
            assert (calls, len(loop_callbacks)) == (["a"], 1), "all deferred calls must share one callback"
            with tick:
                tick.call_at_end(lambda: calls.append("d"))
                loop_callbacks.pop()()  # the callback runs in a tick of its own
                assert calls == ["a", "b", "c", "d"]
            end_tick("e")
            tasks.cancel_scope.cancel()
        loop_callbacks.pop()()
        end_tick("f")
        assert calls == ["a", "b", "c", "d", "e", "f"]

    run_virtual(main)
