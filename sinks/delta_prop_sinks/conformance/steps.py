"""Calls into a sink, step by step: cancelled at a chosen wait, or told to have taken too long.

A wait is one hand-back of control to the event loop, so the same code serves asyncio and trio.
"""

from __future__ import annotations

import gc
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from types import coroutine
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from weakref import ref

import anyio

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator
    from types import FrameType
    from weakref import ReferenceType

T = TypeVar("T")


class Cancelled(NamedTuple):
    """What became of a cancelled call: how often it waited, and whether it returned all the same."""

    waits: int
    returned: bool


async def cancelled_at(wait: int, call: Callable[[], Awaitable[object]]) -> Cancelled:
    """Make a call and cancel it when it waits for the `wait`-th time; at 0 before it begins."""
    outcome = _Outcome()
    # In a task of its own: what the cancellation of a task has touched may live as long as the task.
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_cancel_at, wait, call, outcome)
    if outcome.failure is not None:
        failure, outcome.failure = outcome.failure, None
        raise failure
    return Cancelled(outcome.waits, outcome.returned)


@dataclass
class _Outcome:
    waits: int = 0
    returned: bool = False
    failure: Exception | None = None


async def _cancel_at(wait: int, call: Callable[[], Awaitable[object]], outcome: _Outcome) -> None:
    with anyio.CancelScope() as scope:

        def on_wait() -> None:
            outcome.waits += 1
            if outcome.waits == wait:
                scope.cancel()

        if wait == 0:
            scope.cancel()
        try:
            await watched(call(), on_wait)
        except Exception as failure:
            outcome.failure = failure
        else:
            outcome.returned = True


@coroutine
def watched(call: Awaitable[T], on_wait: Callable[[], None]) -> Generator[Any, Any, T]:
    """`await call`, telling each time that it is about to wait."""
    steps: Any = call.__await__()
    answer: Any = None
    failure: BaseException | None = None
    try:
        while True:
            try:
                waits_for = steps.send(answer) if failure is None else steps.throw(failure)
            except StopIteration as end:
                result: T = end.value
                return result
            on_wait()
            answer = failure = None
            try:
                answer = yield waits_for
            except BaseException as error:  # how a cancellation comes; the call decides
                failure = error
    finally:
        steps.close()


class Leftovers:
    """What a process has open, as far as it can be told without a helper: tasks, threads, files."""

    def __init__(self) -> None:
        self._tasks = {task.id: task.name for task in anyio.get_running_tasks()}
        self._threads = _threads()
        self._files = _files()

    def since(self) -> list[str]:
        """What there is now and was not when this was made."""
        tasks = {task.id: task.name for task in anyio.get_running_tasks()}
        left = [f"the task {name!r}" for key, name in tasks.items() if key not in self._tasks]
        left += [f"a thread in {place}" for key, place in _threads().items() if key not in self._threads]
        before = list(self._files)
        for name in _files():
            if name in before:
                before.remove(name)
            else:
                left.append(f"the open file {name}")
        return left


def _threads() -> dict[int, str]:
    """Threads and the function that each began with; those that the async libraries keep are left out."""
    begun: dict[int, str] = {}
    for key, innermost in sys._current_frames().items():
        places = []
        frame: FrameType | None = innermost
        while frame is not None:
            places.append((Path(frame.f_code.co_filename), frame.f_code.co_qualname))
            frame = frame.f_back
        if not any({"anyio", "trio"} & set(path.parts) for path, _ in places):
            own = [name for path, name in places if path.name != "threading.py"]
            begun[key] = own[-1] if own else places[-1][1]
    return begun


def _files() -> list[str]:
    """Where the process's descriptors point to; nothing where the system does not tell."""
    found = []
    try:
        for path in Path("/proc/self/fd").iterdir():
            found.append(str(path.readlink()))
    except OSError:
        pass  # the listing's own descriptor is gone by now; other systems have no such folder
    return [name for name in found if name.startswith("/") and not name.startswith(("/proc/", "/dev/"))]


def let_go() -> None:
    """See to it that what nobody refers to any more is gone, and the files it had open with it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


def reference(something: object) -> ReferenceType[object] | None:
    """What tells whether an object is still there, where that can be told."""
    try:
        return ref(something)
    except TypeError:  # it has slots
        return None
