"""An interrupted benchmark leaves no process, no directory and no traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from benchmarks._growth_service import Holdings, Service
from benchmarks._processes import end, ignore_interrupts, interrupt
from delta_prop_wire.delta import Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).parents[2]
WAIT_S = 60.0


@pytest.fixture(autouse=True)
def _restored_interrupt_handler() -> Iterator[None]:
    """Use Python's handler of Ctrl-C, which a process in the background does not have by default."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


def wait_until(condition: Callable[[], object]) -> None:
    started_at = time.monotonic()
    while not condition():
        assert time.monotonic() < started_at + WAIT_S
        time.sleep(0.02)


def group_processes(group: int) -> list[str]:
    """Return the running processes of a group."""
    running = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = path.read_text()
        except OSError:
            continue
        state, _, process_group = text.rpartition(")")[2].split()[:3]
        if int(process_group) == group and state not in "ZX":
            running.append(text)
    return running


@pytest.mark.parametrize(
    ("awaited_file", "signum", "status", "expected_output"),
    [
        ("*/geo/output", signal.SIGTERM, 143, ""),
        ("*/geo/link/output", signal.SIGINT, 130, "./run bench pipeline: interrupted\n"),
        ("delta-prop-bench-*/log", signal.SIGTERM, 143, ""),
    ],
    ids=["replica starts", "link starts", "service runs"],
)
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads the processes from /proc")
def test_signalled_benchmark_leaves_no_process_or_file(
    awaited_file: str, signum: signal.Signals, status: int, expected_output: str, tmp_path: Path
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks", "pipeline", "--only", "geo", "--quick"],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        wait_until(lambda: list(tmp_path.glob(awaited_file)) or process.poll() is not None)
        if signum == signal.SIGINT:
            os.killpg(process.pid, signum)  # as a terminal does
        else:
            process.send_signal(signum)
        output = process.communicate(timeout=WAIT_S)[0]
        assert (process.returncode, output) == (status, expected_output)
        wait_until(lambda: not group_processes(process.pid))
        assert not list(tmp_path.iterdir())
    finally:
        end(process)


def test_child_process_ignores_interrupt_and_exits_cleanly() -> None:
    service = Service(Holdings("few", vectors=1_000))
    try:
        process = service._process
        assert process.pid is not None
        os.kill(process.pid, signal.SIGINT)
        assert service.cpu_us(Kind.DENSE, 100) > 0
    finally:
        service.stop()
    assert process.exitcode == 0, "the process did not end cleanly, so its directory may remain"


def test_interrupt_is_deferred_until_process_is_known() -> None:
    known_processes = []

    def start() -> None:
        with ignore_interrupts():
            interrupt(None)
            known_processes.append("process")

    with pytest.raises(KeyboardInterrupt):
        start()
    assert known_processes
    with ignore_interrupts():
        """The deferred interrupt is raised only once."""


def test_interrupt_handled_by_other_thread_is_deferred() -> None:
    known_processes = []

    def start() -> None:
        with ignore_interrupts():
            signal.raise_signal(signal.SIGINT)  # this thread blocks it
            other = threading.Thread(
                target=signal.pthread_sigmask, args=(signal.SIG_UNBLOCK, {signal.SIGINT})
            )
            os.kill(os.getpid(), signal.SIGINT)
            other.start()
            other.join()
            known_processes.append("process")

    with pytest.raises(KeyboardInterrupt):
        start()
    assert known_processes


def test_interrupt_stays_blocked_only_in_started_child() -> None:
    with ignore_interrupts():
        script = "import signal; print(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ()))"
        process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.communicate(timeout=WAIT_S)[0] == "True\n"
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
