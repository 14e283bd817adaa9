"""The machine that is calibrated: its clocks, its temporary directories, its description."""

from __future__ import annotations

import gc
import os
import platform
import sqlite3
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


class PreciseTimer:
    """Real time, in seconds."""

    now = staticmethod(time.perf_counter)


now_s = PreciseTimer.now
"""Returns real time, in seconds."""
cpu_s = time.thread_time
"""Returns the CPU time of this thread, in seconds."""


@contextmanager
def without_gc() -> Iterator[None]:
    """Exempt existing objects from garbage collection, which would take tens of milliseconds each time."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def folder(within: str | None = None) -> Iterator[Path]:
    """Yield a directory that is removed afterwards, in the system's temporary directory or in `within`."""
    with tempfile.TemporaryDirectory(prefix="delta-prop-calibrate-", dir=within) as path:
        yield Path(path)


def machine() -> dict[str, str]:
    """Return a description of the machine, and the date, to be read by people."""
    return {
        "measured": datetime.now(UTC).isoformat(timespec="seconds"),
        "system": platform.platform(),
        "processors": f"{os.cpu_count()} × {_processor()}",
        "python": sys.version.split()[0],
        "sqlite": sqlite3.sqlite_version,
        **{name: _version(name) for name in ("delta-prop", "numpy", "anyio", "usearch")},
    }


def load_average() -> float:
    """Return the machine's load average of the last minute; 0 if it is unknown."""
    try:
        return os.getloadavg()[0]
    except OSError:
        return 0.0


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
