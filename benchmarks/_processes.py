"""Processes that a benchmark starts. They ignore Ctrl-C; the benchmark handles it, and ends them in order.

A terminal sends SIGINT to all processes at once, so each would otherwise end at a time of its own.
"""

from __future__ import annotations

import multiprocessing
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import resource_tracker
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.context import ForkServerProcess

END_S_MAX = 20.0
PROCESSES = multiprocessing.get_context("forkserver")


@dataclass(slots=True)
class _StartState:
    """`is_starting`: the main thread is starting a process; `interrupted`: a SIGINT arrived meanwhile."""

    is_starting: bool = False
    interrupted: bool = False


_start_state = _StartState()


@contextmanager
def ignore_interrupts() -> Iterator[None]:
    """Start processes within this block that ignore SIGINT; defer an interrupt of this process to its end."""
    resource_tracker.ensure_running()  # a tracker started within the block would unblock SIGINT
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    is_main = threading.current_thread() is threading.main_thread()
    _start_state.is_starting = _start_state.is_starting or is_main
    # Another thread may still receive SIGINT; Python then runs the handler in the main thread.
    handler = signal.signal(signal.SIGINT, lambda *_: interrupt(None)) if is_main else None
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if is_main:
            signal.signal(signal.SIGINT, handler)
            _start_state.is_starting = False
            if _start_state.interrupted:
                _start_state.interrupted = False
                interrupt(None)


def fork(work: Callable[..., None], *arguments: Any) -> ForkServerProcess:
    """Start a daemon process that runs `work`."""
    process = PROCESSES.Process(target=work, args=arguments, daemon=True)
    with ignore_interrupts():
        process.start()
    return process


def run_forked(work: Callable[..., None], *arguments: Any, timeout_s: float) -> Any:
    """Run `work` in a process, with a pipe as its last argument; return what it sends.

    Raises RuntimeError if nothing arrives in time, or the process sends a text, which is an error.
    """
    parent_pipe, child_pipe = PROCESSES.Pipe()
    process = fork(work, *arguments, child_pipe)
    try:
        result = parent_pipe.recv() if parent_pipe.poll(timeout_s) else f"no result after {timeout_s:.0f} s"
        process.join(5)
    finally:
        end_forked(process)
    if isinstance(result, str):
        raise RuntimeError(result)
    return result


@contextmanager
def send_errors(pipe: Connection, prefix: str = "") -> Iterator[None]:
    """Send an error of this block to the parent as a text; end the block on an interrupt."""
    try:
        yield
    except KeyboardInterrupt:
        return
    except Exception as error:
        pipe.send(f"{prefix}{error!r}")


def interrupt(frame: FrameType | None) -> None:
    """Act as on Ctrl-C: an event loop cancels its main task, then raises KeyboardInterrupt."""
    if _start_state.is_starting:
        _start_state.interrupted = True
        return
    handler = signal.getsignal(signal.SIGINT)
    if callable(handler):
        handler(signal.SIGINT, frame)


def end_on_sigterm() -> None:
    """Make SIGTERM act as Ctrl-C, for a process of `fork` that owns files or processes."""
    signal.signal(signal.SIGTERM, lambda _number, frame: interrupt(frame))


def end(process: subprocess.Popen[Any]) -> None:
    """Terminate a process that was started here."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(END_S_MAX)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(5)


def end_forked(process: ForkServerProcess) -> None:
    """Terminate a process of `fork`."""
    process.terminate()
    process.join(END_S_MAX)
    process.kill()
