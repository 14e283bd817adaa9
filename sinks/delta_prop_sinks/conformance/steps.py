"""Makes calls of a sink step by step, and cancels them at a chosen wait; finds resources that are left open.

A wait is one return of control to the event loop, so the same code serves asyncio and trio.
"""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, coroutine
from typing import Any, NamedTuple, TypeVar
from weakref import ReferenceType, ref

import anyio

T = TypeVar("T")


class CancelledCall(NamedTuple):
    """The outcome of a cancelled call: the number of waits, and True if the call returned nevertheless."""

    waits: int
    returned: bool


async def call_and_cancel_at(wait: int, call: Callable[[], Awaitable[object]]) -> CancelledCall:
    """Make a call and cancel it at wait number `wait`, counted from 1; at 0 before it begins."""
    outcome = _Outcome()
    # The call gets a task of its own, because a task may keep objects alive that its cancellation has
    # touched.
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_cancel_at, wait, call, outcome)
    if outcome.failure is not None:
        failure, outcome.failure = outcome.failure, None
        raise failure
    return CancelledCall(outcome.waits, outcome.returned)


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
            await observe_waits(call(), on_wait)
        except Exception as failure:
            outcome.failure = failure
        else:
            outcome.returned = True


@coroutine
def observe_waits(call: Awaitable[T], on_wait: Callable[[], None]) -> Generator[Any, Any, T]:
    """Await `call`, and call `on_wait` each time that it is about to wait."""
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
            except BaseException as error:  # a cancellation arrives here; the call handles it
                failure = error
    finally:
        steps.close()


class Leftovers:
    """The open tasks, threads and files of the process, as far as they are visible from inside."""

    def __init__(self) -> None:
        self._tasks = {task.id: task.name for task in anyio.get_running_tasks()}
        self._threads = _threads()
        self._files = _files()

    def since(self) -> list[str]:
        """Return the resources that were not open when this object was created."""
        tasks = {task.id: task.name for task in anyio.get_running_tasks()}
        leftovers = [f"the task {name!r}" for key, name in tasks.items() if key not in self._tasks]
        leftovers += [
            f"a thread in {function}" for key, function in _threads().items() if key not in self._threads
        ]
        before = list(self._files)
        for name in _files():
            if name in before:
                before.remove(name)
            else:
                leftovers.append(f"the open file {name}")
        return leftovers


def _threads() -> dict[int, str]:
    """Return threads and the function that each one started with, without those of the async libraries."""
    functions_by_thread: dict[int, str] = {}
    for key, innermost in sys._current_frames().items():
        functions = []
        frame: FrameType | None = innermost
        while frame is not None:
            functions.append((Path(frame.f_code.co_filename), frame.f_code.co_qualname))
            frame = frame.f_back
        if not any({"anyio", "trio"} & set(path.parts) for path, _ in functions):
            own = [name for path, name in functions if path.name != "threading.py"]
            functions_by_thread[key] = own[-1] if own else functions[-1][1]
    return functions_by_thread


def _files() -> list[str]:
    """Return the paths of the process's open files; nothing if the system does not list them."""
    targets = []
    try:
        for path in Path("/proc/self/fd").iterdir():
            targets.append(str(path.readlink()))
    except OSError:
        pass  # the listing's own descriptor is closed by now; other systems have no such folder
    return [name for name in targets if name.startswith("/") and not name.startswith(("/proc/", "/dev/"))]


def collect_garbage() -> None:
    """Release unreferenced objects, and the files that they had open."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


def weak_reference(target: object) -> ReferenceType[object] | None:
    """Return a weak reference to an object; None if its class does not support them."""
    try:
        return ref(target)
    except TypeError:  # the class defines __slots__
        return None
