"""The real world: the event loop's clock, the system's randomness, worker threads, sockets.

With `sockets.py` and `tls.py` the only module of the service that touches them; everything else is handed a
`World`.
"""

from __future__ import annotations

import asyncio
import os
import queue
import random
import sys
import threading
import time
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import anyio
import anyio.to_thread

from delta_prop.local_places import check_data_directory
from delta_prop.ports import World
from delta_prop.sockets import SocketNetwork
from delta_prop_broker.local_disk import LocalDisk

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

T = TypeVar("T")

BACKGROUND_NICENESS = 10
"""How far background threads stand back: against a busy thread of the usual 0 they get about a tenth."""
SWITCH_S_MAX = 0.0005
"""How long a thread that has the interpreter may keep it while another waits for it."""


class LoopClock:
    """Time of the event loop that runs where this is made, so that virtual time is followed too."""

    def __init__(self) -> None:
        # anyio asks which loop is running at each call, which costs a microsecond; once is enough.
        self.now: Callable[[], float] = _loop_time()

    @staticmethod
    def wall_us() -> int:
        """Microseconds since 1970."""
        return time.time_ns() // 1000


class SystemRandomness:
    """The operating system's source for identifiers; an ordinary generator for jitter."""

    def __init__(self) -> None:
        self._generator = random.Random()

    @staticmethod
    def bytes(count: int) -> bytes:
        """That many random bytes."""
        return os.urandom(count)

    def random(self) -> float:
        """A number from 0 to 1."""
        return self._generator.random()

    def fork(self, name: str) -> SystemRandomness:
        """A source for one concern."""
        return SystemRandomness()


this_thread = threading.get_ident
"""The thread that runs, as a number."""


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
    """A thread that runs nothing else: there and back takes half the time that one of anyio's takes.

    With a niceness it stands back, on Linux; anyio's threads are pooled, so theirs must stay as it is.
    It ends with `stop`, which the scope that gave it calls.
    """

    def __init__(self, name: str, niceness: int = 0) -> None:
        self._calls: queue.SimpleQueue[_Call[Any] | None] = queue.SimpleQueue()
        self._waited_for: set[_Call[Any]] = set()
        self._niceness = niceness
        self._wake = waker()
        # A daemon, so that an interpreter which dies in the middle of a call is not held up by it.
        self._thread = threading.Thread(target=self._work, name=f"delta-prop {name}", daemon=True)
        self._thread.start()

    async def run(self, function: Callable[[], T]) -> T:
        """Run `function` on the thread; a cancelled caller waits for its end, so it knows the outcome."""
        call = _Call(function)
        with anyio.CancelScope(shield=True):
            # It takes them one at a time, in their order; last here, as it begins when this thread waits.
            self._waited_for.add(call)
            self._calls.put(call)
            await call.done.wait()
            self._waited_for.discard(call)
        if call.failure is not None:
            raise call.failure
        return call.result[0]

    def stop(self) -> None:
        """End the thread, now or when the call that runs returns; whoever waits for that waits no more."""
        self._calls.put(None)
        if not self._waited_for:
            self._thread.join()
        for call in self._waited_for:
            call.failure = RuntimeError("the thread was given up while it ran this call")
            call.done.set()

    def _work(self) -> None:
        if self._niceness and sys.platform == "linux":  # elsewhere a thread's number would name a process
            with suppress(OSError):
                thread = threading.get_native_id()
                niceness = os.getpriority(os.PRIO_PROCESS, thread) + self._niceness
                os.setpriority(os.PRIO_PROCESS, thread, niceness)
        while (call := self._calls.get()) is not None:
            call.work()
            with suppress(RuntimeError):  # the loop is gone, and whoever waited with it
                self._wake(call.done.set)
            del call


class _Call(Generic[T]):
    """One call on its way to the thread and back."""

    def __init__(self, function: Callable[[], T]) -> None:
        self.function = function
        self.done = anyio.Event()
        self.result: list[T] = []
        self.failure: BaseException | None = None

    def work(self) -> None:
        try:
            self.result.append(self.function())
        except BaseException as failure:
            self.failure = self.failure or failure


@asynccontextmanager
async def background_thread() -> AsyncIterator[OwnThread]:
    """A thread of low priority for as long as the scope lasts."""
    thread = OwnThread("background", BACKGROUND_NICENESS)
    try:
        yield thread
    finally:
        thread.stop()


@asynccontextmanager
async def own_thread() -> AsyncIterator[OwnThread]:
    """A thread for as long as the scope lasts.

    From then on nobody keeps the interpreter for more than 0.5 ms while another thread waits for it: else
    this one would wait up to 5 ms for a busy loop, after each of its calls of the system.
    """
    sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_S_MAX))
    thread = OwnThread("own")
    try:
        yield thread
    finally:
        thread.stop()


def real_world() -> World:
    """The world of the running event loop. Call it inside one."""
    return World(
        clock=LoopClock(),
        randomness=SystemRandomness(),
        new_threads=WorkerThread,
        own_thread=own_thread,
        background_thread=background_thread,
        open_disk=_disk_at,
        network=SocketNetwork(),
        soon=_soon(),
    )


def _disk_at(path: str) -> LocalDisk:
    """The disk of a data directory, there or to be made. Raises UsageError where it cannot be."""
    check_data_directory(path)
    return LocalDisk(path)


def waker() -> Callable[[Callable[[], object]], object]:
    """What other threads call to have something done on the running loop."""
    try:
        return asyncio.get_running_loop().call_soon_threadsafe
    except RuntimeError:
        import trio

        return trio.lowlevel.current_trio_token().run_sync_soon


def _soon() -> Callable[[Callable[[], None]], object] | None:
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
