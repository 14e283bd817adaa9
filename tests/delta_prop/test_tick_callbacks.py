"""Calls left for the end of a turn, made once and in order; a bell that wakes its waiters."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import pytest

from delta_prop.testing import run_virtual
from delta_prop.tick_callbacks import CALLS_MAX, DEFER_WINDOW_S, TickCallbacks, Wakeup

if TYPE_CHECKING:
    from collections.abc import Callable


def test_calls_wait_for_the_end_of_the_outermost_turn() -> None:
    turn, made = TickCallbacks(lambda: 0.0), list[str]()
    assert not turn.call_at_end(lambda: made.append("never"))
    with turn:
        assert turn.call_at_end(lambda: made.append("second"))
        assert turn.call_at_end(lambda: made.append("first"), first=True)
        with turn:
            pass
        assert not made
    assert made == ["first", "second"]
    assert not turn.call_at_end(lambda: made.append("never"))


def test_a_call_may_leave_others_behind() -> None:
    turn, made = TickCallbacks(lambda: 0.0), list[str]()

    def call() -> None:
        made.append("call")
        with turn:
            assert turn.call_at_end(lambda: made.append("left by it"))
        assert turn.call_at_end(lambda: made.append("ahead of that"), first=True)
        made.append("called")

    with turn:
        turn.call_at_end(call)
        turn.call_at_end(lambda: made.append("other"))
    assert made == ["call", "called", "ahead of that", "other", "left by it"]


def test_a_call_that_fails_is_told_and_the_others_are_made(caplog: pytest.LogCaptureFixture) -> None:
    turn, made = TickCallbacks(lambda: 0.0), list[str]()

    def fail() -> None:
        with turn:
            turn.call_at_end(lambda: made.append(str(1 / 0)))
            turn.call_at_end(lambda: made.append("after it"))
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert made == ["after it"]
    assert "a callback at the end of a tick failed" in caplog.text


def test_a_turn_holds_so_many_calls_and_no_more() -> None:
    turn, made = TickCallbacks(lambda: 0.0), list[int]()
    with turn:
        found = [turn.call_at_end(lambda: made.append(1)) for _ in range(CALLS_MAX + 2)]
    assert found == [True] * CALLS_MAX + [False] * 2
    assert len(made) == CALLS_MAX


def test_turns_close_upon_each_other_leave_their_calls_to_the_task() -> None:
    async def main() -> list[tuple[float, str]]:
        turn, made = TickCallbacks(anyio.current_time), list[tuple[float, str]]()

        def end(name: str) -> None:
            with turn:
                turn.call_at_end(lambda: made.append((anyio.current_time() - began, name)))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(turn.run)
            await anyio.sleep(1)
            began = anyio.current_time()
            for name in "abc":
                end(name)
            assert made == [(0, "a")]
            await anyio.sleep(DEFER_WINDOW_S / 2)
            assert made == [(0, "a"), (0, "b"), (0, "c")]
            end("d")
            assert len(made) == 3
            await anyio.sleep(DEFER_WINDOW_S)
            assert made[3] == (pytest.approx(DEFER_WINDOW_S / 2), "d")
            await anyio.sleep(DEFER_WINDOW_S)
            end("e")
            assert len(made) == 5, "long after the last one: at its own end"
            tasks.cancel_scope.cancel()
        end("f")
        assert len(made) == 6, "without its task at once, whenever"
        return made

    run_virtual(main)


def test_a_bell_is_heard_by_who_waits_and_by_who_comes_next() -> None:
    async def main() -> None:
        bell, heard = Wakeup(), list[str]()

        async def listen() -> None:
            while True:
                await bell.wait()
                heard.append("ring")

        async with anyio.create_task_group() as tasks:
            bell.notify()
            bell.notify()
            assert bell.has_waiter is False
            tasks.start_soon(listen)
            await anyio.sleep(1)
            assert heard == ["ring"]  # twice before anybody came is once
            assert bell.has_waiter
            bell.notify()
            assert not bell.has_waiter
            await anyio.sleep(1)
            assert heard == ["ring"] * 2
            tasks.cancel_scope.cancel()
        with anyio.move_on_after(1):
            await bell.wait()
        bell.notify()
        await bell.wait()
        with anyio.move_on_after(1) as scope:
            await bell.wait()
        assert scope.cancelled_caught

    run_virtual(main)


def test_who_finds_a_bell_rung_lets_others_have_their_turn() -> None:
    async def main() -> list[str]:
        bell, made = Wakeup(), list[str]()

        async def other() -> None:
            made.append("other")

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(other)
            for _ in range(5):
                bell.notify()
                await bell.wait()
            made.append("heard")
        return made

    assert run_virtual(main) == ["other", "heard"]


def test_where_the_loop_can_call_back_no_task_makes_the_calls() -> None:
    async def main() -> None:
        waiting: list[Callable[[], None]] = []
        turn, made = TickCallbacks(lambda: 0.0, waiting.append), list[str]()

        def end(name: str) -> None:
            with turn:
                turn.call_at_end(lambda: made.append(name))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(turn.run)
            await anyio.sleep(1)
            for name in "abc":
                end(name)
            await anyio.sleep(1)
            assert (made, len(waiting)) == (["a"], 1), "once for all that were left"
            with turn:
                turn.call_at_end(lambda: made.append("d"))
                waiting.pop()()  # whoever is called back is in a turn of its own
                assert made == ["a", "b", "c", "d"]
            end("e")
            tasks.cancel_scope.cancel()
        waiting.pop()()
        end("f")
        assert made == ["a", "b", "c", "d", "e", "f"]

    run_virtual(main)
