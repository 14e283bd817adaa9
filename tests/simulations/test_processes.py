"""Work on all cores: each item is done once, results arrive as they end, workers end with their parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from functools import partial

import pytest

from delta_prop_simulations.processes import cores, in_processes

WAIT_S = 60.0
SLEEPERS = """
import os, time
from functools import partial
from delta_prop_simulations.processes import in_processes
for worker in in_processes([os.getpid, *[partial(time.sleep, 600.0)] * 4], 2):
    print(worker, flush=True)
"""
SQUARES = [partial(pow, number, 2) for number in range(5)]


def test_single_job_runs_in_this_process_in_order() -> None:
    assert list(in_processes(SQUARES, 1)) == [0, 1, 4, 9, 16]
    assert list(in_processes([os.getpid], 1)) == [os.getpid()]


def test_each_item_is_done_once_in_other_processes() -> None:
    results = list(in_processes(iter([*SQUARES, os.getpid]), 2))
    assert sorted(results)[:5] == [0, 1, 4, 9, 16]
    assert len(results) == 6
    assert os.getpid() not in results
    assert cores() >= 1


def test_closing_results_ends_running_work() -> None:
    results = in_processes([os.getpid, partial(time.sleep, 60.0)], 2)
    started_at = time.monotonic()
    worker = next(results)
    results.close()  # type: ignore[attr-defined]
    assert time.monotonic() - started_at < 30
    with pytest.raises(ProcessLookupError):
        os.kill(worker, 0)


def test_error_of_work_is_raised_to_caller() -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        list(in_processes([partial(int, "many"), *SQUARES], 2))


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)])
def test_workers_end_with_their_parent_process(signum: signal.Signals, status: int) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SLEEPERS],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signum)
    try:
        out, err = process.communicate(timeout=WAIT_S)  # returns once no process has these pipes open
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    assert (process.returncode, out) == (status, "")
    assert "Traceback" not in err
