"""Runs work on all cores: each piece in a worker process, results as soon as they are there.

The only module of the simulations that starts processes. Closing the iterator ends them; they end with their
parent too, however that ends.
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
"""The number of pieces per process that are submitted in advance."""


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def in_processes(works: Iterable[Callable[[], T]], jobs: int) -> Iterator[T]:
    """Run all works, up to `jobs` at a time, and yield each result, in the order in which they end.

    Works are functions of modules, or partial ones. With one job they run in this process, in their order. An
    exception of a work ends all of them. SIGTERM raises SystemExit meanwhile, as Ctrl-C raises
    KeyboardInterrupt.
    """
    if jobs <= 1:
        for work in works:
            yield work()
        return
    left = iter(works)
    with _ended_in_order():
        pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), initializer=_begin_worker)
        try:
            open_works: set[Future[T]] = {pool.submit(work) for work in islice(left, _QUEUED_MAX * jobs)}
            while open_works:
                done, open_works = wait(open_works, return_when=FIRST_COMPLETED)
                open_works |= {pool.submit(work) for work in islice(left, len(done))}
                for one in done:
                    yield one.result()
        finally:
            _end(pool)


@contextmanager
def _ended_in_order() -> Iterator[None]:
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


def _begin_worker() -> None:
    """Ignore Ctrl-C, which the parent handles for the entire process group, and end with the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)  # a killed parent cannot end its workers, and nothing reads their results


def _end(pool: ProcessPoolExecutor) -> None:
    """End the workers without waiting for their work: nothing reads its result."""
    running = list((pool._processes or {}).values())
    pool.shutdown(wait=False, cancel_futures=True)
    for process in running:
        process.terminate()
    for process in running:
        process.join()
