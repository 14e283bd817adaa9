"""Virtual time: an event loop whose clock jumps to the next timer as soon as nothing is runnable.

It has no files, sockets, signals or threads: a wait for one would never end, so it raises Stuck.
"""

from __future__ import annotations

import asyncio
import math
import random
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Any, Literal, TypeVar
from weakref import WeakKeyDictionary

import anyio

from delta_prop_wire.errors import DeltaPropError, UsageError

if TYPE_CHECKING:
    import trio

T = TypeVar("T")

TURNS_AT_ONE_INSTANT_MAX = 1_000_000
"""Maximum turns of the loop at one instant; beyond it, tasks count as waking each other for ever."""

HORIZON_S = 86_400.0
"""Virtual time at which a run that has not ended counts as stuck."""

_TASKS_REPORTED_MAX = 20
_THREAD_TIMEOUT_S = 5.0
_SHIELDS_LIFTED_MAX = 10_000
_CANCELLED_TIMERS_MAX = 100
"""Maximum cancelled timers that stay in the heap of timers."""
_ANY_TIMEOUT_S = 1.0
"""Any positive timeout: it passes at once."""


class Stuck(DeltaPropError):
    """Virtual time cannot advance: every task waits for another, or tasks wake each other for ever."""


def run_virtual(
    main: Callable[..., Awaitable[T]],
    *args: Any,
    seed: int | None = None,
    horizon_s: float = HORIZON_S,
    on_turn: Callable[[float, int], object] | None = None,
    backend: Literal["asyncio", "trio"] = "asyncio",
) -> T:
    """Run `anyio.run(main, *args)` in virtual time, repeatably. Raises Stuck.

    `seed`: run tasks that are runnable at the same time in an order drawn from it, instead of the order of
    their creation. On trio the order is trio's own, which varies. `horizon_s`: a run that lasts longer counts
    as stuck, since it may wait for an event that never happens while timers keep the loop running. `on_turn`
    (asyncio only): called at every turn of the loop with the time and the number of runnable callbacks; an
    exception from it ends the run.
    """
    if backend == "trio":
        if on_turn is not None:
            raise UsageError("on_turn: trio does not report its turns: run on asyncio")
        return _run_on_trio(main, *args, horizon_s=horizon_s)

    def new_loop() -> VirtualLoop:
        loop = VirtualLoop(seed, horizon_s)
        loop.on_turn = on_turn
        return loop

    return anyio.run(main, *args, backend="asyncio", backend_options={"loop_factory": new_loop})


class _TaskOrder:
    """The order in which tasks run that are runnable at the same time: of creation, or drawn from a seed."""

    def __init__(self, seed: int | None) -> None:
        self._shuffle = None if seed is None else random.Random(seed).shuffle
        self._numbers: WeakKeyDictionary[asyncio.Task[Any], int] = WeakKeyDictionary()
        self._count = 0

    def add(self, task: asyncio.Task[Any]) -> None:
        """Number a task that was created."""
        self._count += 1
        self._numbers[task] = self._count

    def number(self, task: asyncio.Task[Any] | None) -> int:
        """Return a task's number, by which tasks sort in the order of their creation."""
        return self._numbers.get(task, 0)  # type: ignore[arg-type]

    def arrange(self, ready: deque[asyncio.Handle]) -> None:
        """Sort runnable tasks by creation, or shuffle them; other callbacks keep their positions.

        Otherwise some would run in the order of memory addresses: anyio cancels tasks in the order of a set.
        """
        positions = [position for position, handle in enumerate(ready) if _task_of(handle) is not None]
        handles = [ready[position] for position in positions]
        numbers = self._numbers
        handles.sort(key=lambda handle: numbers.get(_task_of(handle), 0))  # type: ignore[arg-type]
        if self._shuffle is not None:
            self._shuffle(handles)
        for position, handle in zip(positions, handles, strict=True):
            ready[position] = handle


class _ForeignCalls:
    """Calls of the loop from other threads: faults of the run, unless cancelled tasks wait for them."""

    def __init__(self) -> None:
        self.are_allowed = False
        self._owner_thread_id = threading.get_ident()
        self._happened = threading.Event()  # set by other threads

    @property
    def have_disturbed(self) -> bool:
        """True if another thread called the loop while that was not allowed."""
        return self._happened.is_set() and not self.are_allowed

    def note(self) -> None:
        """Note a call, from whichever thread."""
        if threading.get_ident() != self._owner_thread_id:
            self._happened.set()

    def wait_for_allowed(self) -> bool:
        """Wait for a call if it is allowed; return True if there was one."""
        if self.are_allowed and self._happened.wait(_THREAD_TIMEOUT_S):
            self._happened.clear()
            return True
        return False


class VirtualLoop(asyncio.BaseEventLoop):
    """An asyncio loop for `loop_factory`. Its runs are repeatable, whatever the addresses and hash seeds."""

    _ready: deque[asyncio.Handle]
    _scheduled: list[asyncio.TimerHandle]
    _selector: VirtualLoop
    _timer_cancelled_count: int
    _clock_resolution: float
    _stopping: bool

    def __init__(self, seed: int | None = None, horizon_s: float = HORIZON_S) -> None:
        super().__init__()
        self.on_turn: Callable[[float, int], object] | None = None
        """Called at every turn with the time and the number of runnable callbacks; it may end the run."""
        self._horizon_s = horizon_s
        self._now = 0.0
        self._turns = 0
        self._task_order = _TaskOrder(seed)
        self._foreign_calls = _ForeignCalls()
        self._selector = self  # asyncio polls it once a turn: there time advances

    def time(self) -> float:
        """Return the virtual seconds since the loop was made."""
        return self._now

    def select(self, timeout: float | None) -> list[Any]:
        """Order the runnable tasks between two turns or, if there are none, advance to the next timer."""
        self._turns += 1
        if (on_turn := self.on_turn) is not None:
            self.on_turn = None  # not called after it has ended the run
            on_turn(self._now, len(self._ready))
            self.on_turn = on_turn
        if self._foreign_calls.have_disturbed:
            raise self._stuck_error(
                "another thread called the loop, which no run can repeat: use `virtual_world()`"
            )
        if timeout is None or timeout > 0:
            when = self._scheduled[0].when() if self._scheduled else math.inf
            if when == math.inf and self._foreign_calls.wait_for_allowed():
                return []  # a cancelled task has waited for its thread, which has ended
            if when == math.inf:
                raise self._stuck_error(f"nothing is runnable and no timer is set at {self._now} s")
            if when > self._horizon_s:
                self._horizon_s = math.inf  # so that the remaining tasks can be cancelled
                raise self._stuck_error(f"still running at {self._now} s, near the horizon")
            self._now = when
            self._turns = 0
        elif self._turns > TURNS_AT_ONE_INSTANT_MAX:
            self._turns = 0  # so that the remaining tasks can be cancelled
            raise self._stuck_error(f"{TURNS_AT_ONE_INSTANT_MAX} turns and still {self._now} s")
        elif len(self._ready) > 1:
            self._task_order.arrange(self._ready)
        return []

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        """Schedule as usual, without the debug checks."""
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        timer._scheduled = True  # type: ignore[attr-defined]
        heappush(self._scheduled, timer)
        return timer

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> asyncio.Handle:
        """Schedule as usual, without the debug checks."""
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def _run_once(self) -> None:
        """Run one turn as usual: timers that are due, then all that is runnable now."""
        scheduled: Any = self._scheduled
        ready: Any = self._ready
        cancelled = self._timer_cancelled_count
        if len(scheduled) > _CANCELLED_TIMERS_MAX and 2 * cancelled > len(scheduled):
            self._timer_cancelled_count = 0
            scheduled[:] = [timer for timer in scheduled if not timer._cancelled]
            heapify(scheduled)
        while scheduled and scheduled[0]._cancelled:
            self._timer_cancelled_count -= 1
            heappop(scheduled)._scheduled = False
        self.select(0 if ready or self._stopping else _ANY_TIMEOUT_S if scheduled else None)
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
        """Create a task as usual; numbers give the order of creation."""
        task = super().create_task(coro, **options)
        self._task_order.add(task)
        return task

    def _stuck_error(self, reason: str) -> Stuck:
        """Return the error; the remaining tasks are cancelled after it, and may wait for threads."""
        self._foreign_calls.are_allowed = True
        return Stuck(f"{reason}: {self._describe_tasks()}")

    def _describe_tasks(self) -> str:
        tasks = sorted(asyncio.all_tasks(self), key=self._task_order.number)
        lines = [f"{task.get_name()} waits at {_waiting_line(task)}" for task in tasks[:_TASKS_REPORTED_MAX]]
        return "; ".join([*lines, *(["…"] if len(tasks) > _TASKS_REPORTED_MAX else [])])

    def _process_events(self, event_list: list[Any]) -> None:
        """Do nothing: there are no events."""

    def _write_to_self(self) -> None:
        """Wake the loop, which never sleeps; a call from another thread disturbs the run."""
        self._foreign_calls.note()


def _task_of(handle: asyncio.Handle) -> asyncio.Task[Any] | None:
    task = getattr(handle._callback, "__self__", None)  # type: ignore[attr-defined]
    return task if isinstance(task, asyncio.Task) else None


def _waiting_line(task: asyncio.Task[Any]) -> str:
    """Return the innermost line of a waiting task that is outside the async libraries."""
    coroutine: Any = task.get_coro()
    location = "the library"
    while coroutine is not None:
        frame = getattr(coroutine, "cr_frame", None)
        if frame is not None and not {"anyio", "asyncio"} & set(frame.f_code.co_filename.split("/")):
            location = f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_qualname})"
        coroutine = getattr(coroutine, "cr_await", None)
    return location


def _run_on_trio(main: Callable[..., Awaitable[T]], *args: Any, horizon_s: float) -> T:
    import trio
    from trio.testing import MockClock

    reports: list[str] = []

    async def end_at_horizon(main_task: trio.lowlevel.Task, scope: anyio.CancelScope) -> None:
        await trio.sleep(horizon_s)
        reports.append(_describe_trio_tasks(main_task))
        scope.cancel()
        for _ in range(_SHIELDS_LIFTED_MAX):  # shields may be nested, or open during a cancellation
            await trio.testing.wait_all_tasks_blocked()
            _lift_shields(main_task)

    async def within_horizon() -> T:
        with anyio.CancelScope() as scope:
            main_task = trio.lowlevel.current_task()
            trio.lowlevel.spawn_system_task(end_at_horizon, main_task, scope)
            return await main(*args)
        raise Stuck(
            f"nothing is runnable and no timer is set before the horizon, {horizon_s} s: {''.join(reports)}"
        )

    return anyio.run(
        within_horizon, backend="trio", backend_options={"clock": MockClock(autojump_threshold=0)}
    )


def _with_children(main_task: trio.lowlevel.Task) -> Iterator[trio.lowlevel.Task]:
    """Yield a task and all tasks that it has started, oldest first."""
    tasks = [main_task]
    while tasks:
        task = tasks.pop(0)
        yield task
        tasks += [child for nursery in task.child_nurseries for child in nursery.child_tasks]


def _lift_shields(main_task: trio.lowlevel.Task) -> None:
    """Remove the shields of waiting tasks, which at the horizon would wait for ever."""
    for task in _with_children(main_task):
        status: Any = task._cancel_status
        while status is not None:
            if status._scope.shield:
                status._scope.shield = False
            status = status._parent


def _describe_trio_tasks(main_task: trio.lowlevel.Task) -> str:
    lines = []
    for task in _with_children(main_task):
        location = "the library"
        for frame, line in task.iter_await_frames():
            if not {"anyio", "trio"} & set(frame.f_code.co_filename.split("/")):
                location = f"{frame.f_code.co_filename}:{line} ({frame.f_code.co_qualname})"
        lines.append(f"{'main' if task is main_task else task.name} waits at {location}")
    return "; ".join([*lines[:_TASKS_REPORTED_MAX], *(["…"] if len(lines) > _TASKS_REPORTED_MAX else [])])
