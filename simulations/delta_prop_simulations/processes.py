"""Runs tasks on all cores, in worker processes, and yields each result as soon as it is available.

No other module of the simulations starts processes. Closing the iterator ends the workers. They also end with
their parent process, even if that is killed.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from itertools import islice
from typing import NoReturn, TypeVar

T = TypeVar("T")

_QUEUED_MAX = 2
"""The number of tasks per process that are submitted in advance."""


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def in_processes(tasks: Iterable[Callable[[], T]], jobs: int) -> Iterator[T]:
    """Run all tasks, up to `jobs` at a time, and yield each result as soon as its task ends.

    Tasks must be picklable: functions of modules, or `partial` of such functions. With one job they run in
    this process, one after the other. An exception in one task ends all tasks. While tasks run, SIGTERM
    raises SystemExit, as Ctrl-C raises KeyboardInterrupt.
    """
    if jobs <= 1:
        for task in tasks:
            yield task()
        return
    remaining = iter(tasks)
    with _exit_on_sigterm():
        pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), initializer=_init_worker)
        try:
            pending: set[Future[T]] = {pool.submit(task) for task in islice(remaining, _QUEUED_MAX * jobs)}
            while pending:
                done, pending = wait(pending, return_when=FIRST_COMPLETED)
                pending |= {pool.submit(task) for task in islice(remaining, len(done))}
                for future in done:
                    yield future.result()
        finally:
            _end(pool)


@contextmanager
def _exit_on_sigterm() -> Iterator[None]:
    """Make SIGTERM raise SystemExit, unless the program handles it or this is not its main thread."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _exit)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _exit(number: int, _frame: object) -> NoReturn:
    raise SystemExit(128 + number)


def _init_worker() -> None:
    """Make this worker ignore Ctrl-C, which the parent handles, and end when its parent ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)  # a killed parent cannot end its workers; nobody reads their results any more


def _end(pool: ProcessPoolExecutor) -> None:
    """End the workers without waiting for their tasks, whose results nobody reads any more."""
    running = list((pool._processes or {}).values())
    pool.shutdown(wait=False, cancel_futures=True)
    for process in running:
        process.terminate()
    for process in running:
        process.join()
