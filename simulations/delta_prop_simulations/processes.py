"""Work on all cores: each piece in a process of its own kind, what comes out as soon as it is there.

The one place of the simulations that starts processes. Who stops asking ends them.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from itertools import islice
from typing import TypeVar

T = TypeVar("T")

_AHEAD = 2
"""Pieces a process that are handed out before they are needed."""


def cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def in_processes(works: Iterable[Callable[[], T]], jobs: int) -> Iterator[T]:
    """Do all of these, at most `jobs` at a time, and give what each returns, in the order in which they end.

    Works are functions of modules, or partial ones. With one job they are done here, in their order. What a
    work raises ends all of it.
    """
    if jobs <= 1:
        for work in works:
            yield work()
        return
    left = iter(works)
    pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), initializer=_ignore_interrupts)
    try:
        open_works: set[Future[T]] = {pool.submit(work) for work in islice(left, _AHEAD * jobs)}
        while open_works:
            done, open_works = wait(open_works, return_when=FIRST_COMPLETED)
            open_works |= {pool.submit(work) for work in islice(left, len(done))}
            for one in done:
                yield one.result()
    finally:
        _end(pool)


def _ignore_interrupts() -> None:
    """Ctrl-C goes to the whole group; who started these processes ends them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _end(pool: ProcessPoolExecutor) -> None:
    """Do not wait for what is under way: nobody asks for it any more."""
    running = list((pool._processes or {}).values())
    pool.shutdown(wait=False, cancel_futures=True)
    for process in running:
        process.terminate()
    for process in running:
        process.join()
