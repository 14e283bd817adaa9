"""The real world: the event loop's clock, the system's randomness, worker threads, sockets.

With `sockets.py`, `tls.py` and `loop_thread.py` beside it, it is what the service uses them by: everything
else in the service gets a `World`.
"""

from __future__ import annotations

import asyncio
import os
import queue
import random
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, Generic, TypeVar

import anyio
import anyio.to_thread

from delta_prop.platform.path_checks import check_data_directory
from delta_prop.platform.ports import World
from delta_prop.platform.sockets import SocketNetwork
from delta_prop_broker.local_disk import LocalDisk

T = TypeVar("T")

BACKGROUND_NICENESS = 10
"""Niceness of background threads: against a busy thread of niceness 0 they get about a tenth of the CPU."""


class LoopClock:
    """Time of the event loop that runs at its creation, so that it follows virtual time too."""

    def __init__(self) -> None:
        # anyio looks up the running loop at each call, which costs a microsecond; one lookup is enough.
        self.now: Callable[[], float] = _loop_time()

    @staticmethod
    def wall_us() -> int:
        """Return microseconds since 1970."""
        return time.time_ns() // 1000


class SystemRandomness:
    """The operating system's source for identifiers; an ordinary generator for jitter."""

    def __init__(self) -> None:
        self._generator = random.Random()

    @staticmethod
    def bytes(count: int) -> bytes:
        """Return `count` random bytes."""
        return os.urandom(count)

    def random(self) -> float:
        """Return a number from 0 (inclusive) to 1 (exclusive)."""
        return self._generator.random()

    def fork(self, name: str) -> SystemRandomness:
        """Return an independent source for one purpose."""
        return SystemRandomness()


this_thread = threading.get_ident
"""Function that returns the identifier of the running thread."""


class WorkerThread:
    """Runs blocking calls one at a time, off the event loop."""

    def __init__(self) -> None:
        self._limiter = anyio.CapacityLimiter(1)

    async def run(self, function: Callable[[], T]) -> T:
        """Run `function` on a thread; a cancelled caller waits for its end, so that the outcome is known."""
        with anyio.CancelScope(shield=True):
            result = await anyio.to_thread.run_sync(function, limiter=self._limiter)
        return result  # noqa: RET504 - a scope may swallow what is raised in it, so mypy wants this outside


class OwnThread:
    """An exclusive thread: a call takes half the time of one on anyio's thread pool.

    With a niceness it has a lower priority, on Linux; anyio's threads are pooled, so theirs must not change.
    It ends with `stop`, which the scope that created it calls.
    """

    def __init__(self, name: str, niceness: int = 0) -> None:
        self._calls: queue.SimpleQueue[_ThreadCall[Any] | None] = queue.SimpleQueue()
        self._pending_calls: set[_ThreadCall[Any]] = set()
        self._niceness = niceness
        self._call_soon_threadsafe = waker()
        # A daemon thread, so that an interpreter which exits during a call is not blocked by it.
        self._thread = threading.Thread(target=self._work, name=f"delta-prop {name}", daemon=True)
        self._thread.start()

    async def run(self, function: Callable[[], T]) -> T:
        """Run `function` on the thread; a cancelled caller waits for its end, so it knows the outcome."""
        call = _ThreadCall(function)
        with anyio.CancelScope(shield=True):
            # The thread takes calls one at a time, in order. A call may start as soon as it is queued, so it
            # is noted first.
            self._pending_calls.add(call)
            self._calls.put(call)
            await call.done.wait()
            self._pending_calls.discard(call)
        if call.failure is not None:
            raise call.failure
        return call.result[0]

    def stop(self) -> None:
        """End the thread, at once or when the running call returns; callers that wait for it get an error."""
        self._calls.put(None)
        if not self._pending_calls:
            self._thread.join()
        for call in self._pending_calls:
            call.failure = RuntimeError("the thread was stopped while it ran this call")
            call.done.set()

    def _work(self) -> None:
        # on other systems the thread's number would name a process
        if self._niceness and sys.platform == "linux":
            with suppress(OSError):
                thread = threading.get_native_id()
                niceness = os.getpriority(os.PRIO_PROCESS, thread) + self._niceness
                os.setpriority(os.PRIO_PROCESS, thread, niceness)
        while (call := self._calls.get()) is not None:
            call.run()
            with suppress(RuntimeError):  # the loop has closed, and the waiting caller with it
                self._call_soon_threadsafe(call.done.set)
            del call


class _ThreadCall(Generic[T]):
    """One call, passed to the thread and back."""

    def __init__(self, function: Callable[[], T]) -> None:
        self.function = function
        self.done = anyio.Event()
        self.result: list[T] = []
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            self.result.append(self.function())
        except BaseException as failure:
            self.failure = self.failure or failure


@asynccontextmanager
async def background_thread() -> AsyncIterator[OwnThread]:
    """Run a thread of low priority for as long as the scope lasts."""
    thread = OwnThread("background", BACKGROUND_NICENESS)
    try:
        yield thread
    finally:
        thread.stop()


@asynccontextmanager
async def own_thread() -> AsyncIterator[OwnThread]:
    """Run a thread for as long as the scope lasts."""
    thread = OwnThread("own")
    try:
        yield thread
    finally:
        thread.stop()


def real_world() -> World:
    """Return the world of the running event loop. Call it inside one."""
    return World(
        clock=LoopClock(),
        randomness=SystemRandomness(),
        new_threads=WorkerThread,
        own_thread=own_thread,
        background_thread=background_thread,
        open_disk=_open_disk,
        network=SocketNetwork(),
        call_soon=_loop_call_soon(),
    )


def _open_disk(path: str) -> LocalDisk:
    """Return the disk of a data directory. Raises UsageError if the directory cannot be created."""
    check_data_directory(path)
    return LocalDisk(path)


def waker() -> Callable[[Callable[[], object]], object]:
    """Return the function by which other threads schedule calls on the running loop."""
    try:
        return asyncio.get_running_loop().call_soon_threadsafe
    except RuntimeError:
        import trio

        return trio.lowlevel.current_trio_token().run_sync_soon


def _loop_call_soon() -> Callable[[Callable[[], None]], object] | None:
    try:
        return asyncio.get_running_loop().call_soon
    except RuntimeError:
        return None


def _loop_time() -> Callable[[], float]:
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        import trio

        return trio.lowlevel.current_clock().current_time  # which any thread may call
    return loop.time
