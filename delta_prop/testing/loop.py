"""Virtual time: an event loop whose clock jumps to the next timer as soon as nothing is runnable.

It serves no files, sockets, signals or threads: what waits for one would wait for ever, and is told so.
"""

from __future__ import annotations

import asyncio
import math
import random
import threading
from functools import partial
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Any, Literal, TypeVar
from weakref import WeakKeyDictionary

import anyio

from delta_prop_wire.errors import DeltaPropError, UsageError

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Awaitable, Callable, Iterator

    import trio

T = TypeVar("T")

TURNS_AT_ONE_INSTANT_MAX = 1_000_000
"""Turns of the loop without time moving on; more is taken for tasks that wake each other for ever."""

HORIZON_S = 86_400.0
"""The time at which a run that still goes on is taken for one that waits for ever."""

_TASKS_TOLD_MAX = 20
_THREAD_S_MAX = 5.0
_SHIELDS_LIFTED_MAX = 10_000
_TIMERS_FEW = 100
"""So many may lie about after they were cancelled."""
_FOR_EVER = 1.0
"""Any time to wait: it passes at once."""


class Stuck(DeltaPropError):
    """Virtual time cannot go on: every task waits for another, or tasks wake each other for ever."""


def run_virtual(
    main: Callable[..., Awaitable[T]],
    *args: Any,
    seed: int | None = None,
    horizon_s: float = HORIZON_S,
    on_turn: Callable[[float, int], object] | None = None,
    backend: Literal["asyncio", "trio"] = "asyncio",
) -> T:
    """`anyio.run(main, *args)` in virtual time, the same at each run. Raises Stuck.

    `seed`: let tasks that are runnable at the same time run in an order drawn from it, instead of that
    of their creation. On trio the order is trio's own, which changes from run to run.
    `horizon_s`: a run that lasts longer waits for something that never comes, beside a timer that
    always does.
    `on_turn`: called at every turn of the loop with the time and the number of callbacks that are runnable;
    what it raises ends the run. On asyncio alone.
    """
    if backend == "trio":
        if on_turn is not None:
            raise UsageError("on_turn: on trio nobody is told of turns; run it on asyncio")
        return _run_on_trio(main, *args, horizon_s=horizon_s)
    options = {"loop_factory": partial(VirtualLoop, seed, horizon_s, on_turn)}
    return anyio.run(main, *args, backend="asyncio", backend_options=options)


class VirtualLoop(asyncio.BaseEventLoop):
    """An asyncio loop for `loop_factory`: the same at each run, whatever the addresses and hash seeds."""

    _ready: deque[asyncio.Handle]
    _scheduled: list[asyncio.TimerHandle]
    _selector: VirtualLoop
    _timer_cancelled_count: int
    _clock_resolution: float
    _stopping: bool

    def __init__(
        self,
        seed: int | None = None,
        horizon_s: float = HORIZON_S,
        on_turn: Callable[[float, int], object] | None = None,
    ) -> None:
        super().__init__()
        self._on_turn = on_turn
        self._horizon_s = horizon_s
        self._now = 0.0
        self._turns = 0
        self._shuffle = None if seed is None else random.Random(seed).shuffle
        self._numbers: WeakKeyDictionary[asyncio.Task[Any], int] = WeakKeyDictionary()
        self._tasks_made = 0
        self._thread = threading.get_ident()
        self._disturbed = threading.Event()  # by a thread
        self._stuck = False
        self._selector = self  # asyncio asks it for events once a turn: there time moves

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._now

    def select(self, timeout: float | None) -> list[Any]:
        """Between two turns: put what is runnable in order or, if nothing is, go to the next timer."""
        self._turns += 1
        if (on_turn := self._on_turn) is not None:
            self._on_turn = None  # it is not asked again about a run that it has ended
            on_turn(self._now, len(self._ready))
            self._on_turn = on_turn
        if self._disturbed.is_set() and not self._stuck:
            raise self._stuck_as(
                "a thread has called the loop, at a time that no run repeats: use `virtual_world()`"
            )
        if timeout is None or timeout > 0:
            when = self._scheduled[0].when() if self._scheduled else math.inf
            if when == math.inf and self._stuck and self._disturbed.wait(_THREAD_S_MAX):
                self._disturbed.clear()  # what was cancelled has waited for its thread, which has come
                return []
            if when == math.inf:
                raise self._stuck_as(f"nothing is runnable and no timer is set at {self._now} s")
            if when > self._horizon_s:
                self._horizon_s = math.inf  # what is left can still be cancelled
                raise self._stuck_as(f"still running at {self._now} s, near the horizon")
            self._now = when
            self._turns = 0
        elif self._turns > TURNS_AT_ONE_INSTANT_MAX:
            self._turns = 0  # what is left can still be cancelled
            raise self._stuck_as(f"{TURNS_AT_ONE_INSTANT_MAX} turns and still {self._now} s")
        elif len(self._ready) > 1:
            self._order_tasks()
        return []

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        """As usual, without the looks at debugging that nobody does here."""
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        timer._scheduled = True  # type: ignore[attr-defined]
        heappush(self._scheduled, timer)
        return timer

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> asyncio.Handle:
        """As usual, without the looks at debugging that nobody does here."""
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def _run_once(self) -> None:
        """One turn, as the usual one: timers that are due, then all that is runnable now."""
        scheduled: Any = self._scheduled
        ready: Any = self._ready
        cancelled = self._timer_cancelled_count
        if len(scheduled) > _TIMERS_FEW and 2 * cancelled > len(scheduled):
            self._timer_cancelled_count = 0
            scheduled[:] = [timer for timer in scheduled if not timer._cancelled]
            heapify(scheduled)
        while scheduled and scheduled[0]._cancelled:
            self._timer_cancelled_count -= 1
            heappop(scheduled)._scheduled = False
        self.select(0 if ready or self._stopping else _FOR_EVER if scheduled else None)
        due = self._now + self._clock_resolution
        while scheduled and scheduled[0]._when < due:
            timer = heappop(scheduled)
            timer._scheduled = False
            ready.append(timer)
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle._cancelled:
                handle._run()

    def create_task(self, coro: Any, **options: Any) -> asyncio.Task[Any]:
        """As usual; the number tells which of two tasks is older."""
        task = super().create_task(coro, **options)
        self._tasks_made += 1
        self._numbers[task] = self._tasks_made
        return task

    def _order_tasks(self) -> None:
        """Runnable tasks in order of creation, or shuffled; other callbacks keep their places.

        Left alone, some would come in order of memory addresses: anyio cancels the tasks of a set.
        """
        places = [place for place, handle in enumerate(self._ready) if _task_of(handle) is not None]
        handles = [self._ready[place] for place in places]
        handles.sort(key=lambda handle: self._numbers.get(_task_of(handle), 0))  # type: ignore[arg-type]
        if self._shuffle is not None:
            self._shuffle(handles)
        for place, handle in zip(places, handles, strict=True):
            self._ready[place] = handle

    def _stuck_as(self, why: str) -> Stuck:
        """The error; from then on all that is left is cancelled, and may wait for threads."""
        self._stuck = True
        return Stuck(f"{why}: {self._told()}")

    def _told(self) -> str:
        tasks = sorted(asyncio.all_tasks(self), key=lambda task: self._numbers.get(task, 0))
        told = [f"{task.get_name()} waits at {_place(task)}" for task in tasks[:_TASKS_TOLD_MAX]]
        return "; ".join([*told, *(["…"] if len(tasks) > _TASKS_TOLD_MAX else [])])

    def _process_events(self, event_list: list[Any]) -> None:
        """There are none."""

    def _write_to_self(self) -> None:
        """Called to wake the loop, which never sleeps; from elsewhere it spoils the run."""
        if threading.get_ident() != self._thread:
            self._disturbed.set()


def _task_of(handle: asyncio.Handle) -> asyncio.Task[Any] | None:
    task = getattr(handle._callback, "__self__", None)  # type: ignore[attr-defined]
    return task if isinstance(task, asyncio.Task) else None


def _place(task: asyncio.Task[Any]) -> str:
    """The innermost line of a waiting task that is not of the async libraries themselves."""
    coroutine: Any = task.get_coro()
    place = "the library"
    while coroutine is not None:
        frame = getattr(coroutine, "cr_frame", None)
        if frame is not None and not {"anyio", "asyncio"} & set(frame.f_code.co_filename.split("/")):
            place = f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_qualname})"
        coroutine = getattr(coroutine, "cr_await", None)
    return place


def _run_on_trio(main: Callable[..., Awaitable[T]], *args: Any, horizon_s: float) -> T:
    import trio
    from trio.testing import MockClock

    told: list[str] = []

    async def end_at_horizon(own: trio.lowlevel.Task, scope: anyio.CancelScope) -> None:
        await trio.sleep(horizon_s)
        told.append(_told_on_trio(own))
        scope.cancel()
        for _ in range(_SHIELDS_LIFTED_MAX):  # one may stand within another, or rise as a wait is given up
            await trio.testing.wait_all_tasks_blocked()
            _lift_shields(own)

    async def within_horizon() -> T:
        with anyio.CancelScope() as scope:
            own = trio.lowlevel.current_task()
            trio.lowlevel.spawn_system_task(end_at_horizon, own, scope)
            return await main(*args)
        raise Stuck(
            f"nothing is runnable and no timer is set before the horizon, {horizon_s} s: {''.join(told)}"
        )

    return anyio.run(
        within_horizon, backend="trio", backend_options={"clock": MockClock(autojump_threshold=0)}
    )


def _with_children(own: trio.lowlevel.Task) -> Iterator[trio.lowlevel.Task]:
    """A task and all that it has started, the older first."""
    tasks = [own]
    while tasks:
        task = tasks.pop(0)
        yield task
        tasks += [child for nursery in task.child_nurseries for child in nursery.child_tasks]


def _lift_shields(own: trio.lowlevel.Task) -> None:
    """Let a cancellation through to what waits behind a shield, which at the horizon waits for ever."""
    for task in _with_children(own):
        status: Any = task._cancel_status
        while status is not None:
            if status._scope.shield:
                status._scope.shield = False
            status = status._parent


def _told_on_trio(own: trio.lowlevel.Task) -> str:
    told = []
    for task in _with_children(own):
        place = "the library"
        for frame, line in task.iter_await_frames():
            if not {"anyio", "trio"} & set(frame.f_code.co_filename.split("/")):
                place = f"{frame.f_code.co_filename}:{line} ({frame.f_code.co_qualname})"
        told.append(f"{'main' if task is own else task.name} waits at {place}")
    return "; ".join([*told[:_TASKS_TOLD_MAX], *(["…"] if len(told) > _TASKS_TOLD_MAX else [])])
