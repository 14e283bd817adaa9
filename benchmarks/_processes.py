"""Processes that a benchmark starts: they do not hear Ctrl-C, as the benchmark does, and it ends them.

A terminal sends Ctrl-C to all of them at once; each would end in its own way, in the middle of the others.
"""

from __future__ import annotations

import multiprocessing
import signal
import subprocess
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import resource_tracker
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.context import ForkServerProcess
    from types import FrameType

END_S_MAX = 20.0
PROCESSES = multiprocessing.get_context("forkserver")


@dataclass(slots=True)
class _Starts:
    """Whether the main thread starts a process just now, and was to be interrupted meanwhile."""

    held: bool = False
    interrupted: bool = False


_starts = _Starts()


@contextmanager
def apart() -> Iterator[None]:
    """What is started within does not hear Ctrl-C; and this process is not interrupted before it knows it."""
    resource_tracker.ensure_running()  # started within, it would let signals through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    is_main = threading.current_thread() is threading.main_thread()
    _starts.held = _starts.held or is_main
    # The system hands it to another thread then, a library's for one, and its handler runs in this one.
    handler = signal.signal(signal.SIGINT, lambda *_: interrupt(None)) if is_main else None
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if is_main:
            signal.signal(signal.SIGINT, handler)
            _starts.held = False
            if _starts.interrupted:
                _starts.interrupted = False
                interrupt(None)


def forked(work: Callable[..., None], *given: Any) -> ForkServerProcess:
    """A Python process that does this work; it goes when this one does."""
    process = PROCESSES.Process(target=work, args=given, daemon=True)
    with apart():
        process.start()
    return process


def interrupt(frame: FrameType | None) -> None:
    """As Ctrl-C does: an event loop cancels what it runs, and then raises KeyboardInterrupt."""
    if _starts.held:
        _starts.interrupted = True
        return
    handler = signal.getsignal(signal.SIGINT)
    if callable(handler):
        handler(signal.SIGINT, frame)


def end_when_told() -> None:
    """In a process of `forked` that owns files or processes: SIGTERM ends it as Ctrl-C would."""
    signal.signal(signal.SIGTERM, lambda _number, frame: interrupt(frame))


def end(process: subprocess.Popen[Any]) -> None:
    """Stop one process that was started here."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(END_S_MAX)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(5)


def end_forked(process: ForkServerProcess) -> None:
    """The same of one of `forked`; at once where it owns nothing."""
    process.terminate()
    process.join(END_S_MAX)
    process.kill()
