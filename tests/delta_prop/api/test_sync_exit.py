"""A SyncPropagator that is not closed: the interpreter's exit closes it, in bounded time, with a warning."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from delta_prop import Delta, SyncPropagator, create

if TYPE_CHECKING:
    from pathlib import Path

PREAMBLE = """
import threading, time
from delta_prop import Delta, Settings, SyncPropagator, create
from delta_prop.sinks import CallbackSink, StorageSink

def delta(key="a"):
    return Delta(key, create([1.0]))
"""


def run_script(program: str, folder: Path) -> tuple[int, str, str]:
    """Run a script; return its status, stdout and stderr."""
    finished = subprocess.run(
        [sys.executable, "-c", PREAMBLE + program],
        check=False,
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=60,
    )
    return finished.returncode, finished.stdout, finished.stderr


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_script_that_leaves_propagator_open_exits(backend: str, tmp_path: Path) -> None:
    program = f"p = SyncPropagator(backend={backend!r}); p.__enter__(); p.publish(delta()); print('last')"
    assert run_script(program, tmp_path) == (0, "last\n", "")


def test_script_that_raises_exits_with_its_own_error(tmp_path: Path) -> None:
    status, _, stderr = run_script("p = SyncPropagator().open(); p.publish(delta()); 1 / 0", tmp_path)
    assert (status, stderr.splitlines()[-1]) == (1, "ZeroDivisionError: division by zero")


def test_exit_preserves_published_deltas(tmp_path: Path) -> None:
    program = """
p = SyncPropagator(data="facts").open()
p.attach(StorageSink("vectors.db"))
p.publish(delta(), ack_level="memory")
"""
    assert run_script(program, tmp_path) == (0, "", "")
    with SyncPropagator(data=tmp_path / "facts") as p:
        assert p.recovery is not None
        assert p.statistics().log.next_offset == 1
        assert p.publish(Delta("b", create([1.0]))).offset == 1


def test_exit_waits_for_publishing_threads(tmp_path: Path) -> None:
    program = """
p = SyncPropagator().open()
def work():
    time.sleep(0.3)
    print("at", p.publish(delta()).offset)
threading.Thread(target=work).start()
"""
    assert run_script(program, tmp_path) == (0, "at 0\n", "")


def test_exit_names_sinks_that_lack_deltas(tmp_path: Path) -> None:
    program = """
p = SyncPropagator(Settings(close_timeout_s=0.2)).open()
p.attach(CallbackSink(lambda *_: time.sleep(600), name="slow"))
p.publish(delta("a"), delta("b"))
"""
    status, _, stderr = run_script(program, tmp_path)
    (line,) = stderr.splitlines()
    assert status == 0
    assert line.startswith("a SyncPropagator was left open, and closed at the program's exit: not every")
    assert "'slow' is working, 2 deltas behind" in line
    assert line.endswith("close it yourself, with close() or a `with` block")


def test_exit_abandons_a_blocked_event_loop(tmp_path: Path) -> None:
    program = """
p = SyncPropagator(Settings(close_timeout_s=0.2)).open()
blocked = threading.Event()
def block():
    blocked.set()
    time.sleep(600)
threading.Thread(target=lambda: p.call(block), daemon=True).start()
blocked.wait()
"""
    status, _, stderr = run_script(program, tmp_path)
    assert status == 0
    assert "its event loop has been blocked for 0.6 s: close it" in stderr
