"""A benchmark that is interrupted leaves nothing behind: no process, no directory, no traceback."""

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
def _as_in_the_foreground() -> Iterator[None]:
    """Restore Ctrl-C, which background processes ignore."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def until(true: Callable[[], object]) -> None:
    began = time.monotonic()
    while not true():
        assert time.monotonic() < began + WAIT_S
        time.sleep(0.02)


def members(group: int) -> list[str]:
    """The processes of a group that live."""
    found = []
    for place in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = place.read_text()
        except OSError:
            continue
        state, _, of = text.rpartition(")")[2].split()[:3]
        if int(of) == group and state not in "ZX":
            found.append(text)
    return found


@pytest.mark.parametrize(
    ("said", "number", "status", "said_then"),
    [
        ("*/geo/serve/output", signal.SIGTERM, 143, ""),
        ("*/geo/link/output", signal.SIGINT, 130, "./run bench pipeline: interrupted\n"),
        ("delta-prop-bench-*/log", signal.SIGTERM, 143, ""),
    ],
    ids=["replica starts", "link starts", "service runs"],
)
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads what lives from /proc")
def test_nothing_stays_behind_wherever_a_signal_strikes(
    said: str, number: signal.Signals, status: int, said_then: str, tmp_path: Path
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
        until(lambda: list(tmp_path.glob(said)) or process.poll() is not None)
        if number == signal.SIGINT:
            os.killpg(process.pid, number)  # as a terminal does
        else:
            process.send_signal(number)
        told = process.communicate(timeout=WAIT_S)[0]
        assert (process.returncode, told) == (status, said_then)
        until(lambda: not members(process.pid))
        assert not list(tmp_path.iterdir())
    finally:
        end(process)


def test_a_process_of_its_own_does_not_hear_ctrl_c_and_ends_in_order() -> None:
    service = Service(Holdings("few", vectors=1_000))
    try:
        process = service._process
        assert process.pid is not None
        os.kill(process.pid, signal.SIGINT)
        assert service.cpu_us(Kind.DENSE, 100) > 0
    finally:
        service.stop()
    assert process.exitcode == 0, "it has put its directory away"


def test_an_interruption_waits_until_what_starts_is_known() -> None:
    known = []

    def start() -> None:
        with ignore_interrupts():
            interrupt(None)
            known.append("process")

    with pytest.raises(KeyboardInterrupt):
        start()
    assert known
    with ignore_interrupts():
        """It comes once."""


def test_ctrl_c_that_another_thread_takes_waits_too() -> None:
    known = []

    def start() -> None:
        with ignore_interrupts():
            signal.raise_signal(signal.SIGINT)  # blocked here
            other = threading.Thread(
                target=signal.pthread_sigmask, args=(signal.SIG_UNBLOCK, {signal.SIGINT})
            )
            os.kill(os.getpid(), signal.SIGINT)
            other.start()
            other.join()
            known.append("process")

    with pytest.raises(KeyboardInterrupt):
        start()
    assert known


def test_what_is_started_apart_is_a_matter_of_its_start_alone() -> None:
    with ignore_interrupts():
        script = "import signal; print(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ()))"
        process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.communicate(timeout=WAIT_S)[0] == "True\n"
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
