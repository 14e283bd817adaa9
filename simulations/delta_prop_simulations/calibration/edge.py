"""The machine that is calibrated: its clocks, a directory for a while, what it is called.

The only module here that touches the real world.
"""

from __future__ import annotations

import gc
import os
import platform
import sqlite3
import sys
import tempfile
import time
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

now_s = time.perf_counter
"""Real seconds."""
computed_s = time.thread_time
"""Seconds for which this thread has had a processor."""


@contextmanager
def at_rest() -> Iterator[None]:
    """What is there already is not looked through for garbage meanwhile: a rig holds far more than a service
    would, and each search would take tens of milliseconds.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def folder(within: str | None = None) -> Iterator[Path]:
    """A directory that is gone afterwards, where the system has its temporary files or `within` another."""
    with tempfile.TemporaryDirectory(prefix="delta-prop-calibrate-", dir=within) as path:
        yield Path(path)


def machine() -> dict[str, str]:
    """What was measured, and when, for people."""
    return {
        "measured": datetime.now(UTC).isoformat(timespec="seconds"),
        "system": platform.platform(),
        "processors": f"{os.cpu_count()} × {_processor()}",
        "python": sys.version.split()[0],
        "sqlite": sqlite3.sqlite_version,
        **{name: _version(name) for name in ("delta-prop", "numpy", "anyio", "usearch")},
    }


def load() -> float:
    """How many threads wanted a processor during the last minute, on average; 0 where nobody knows."""
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
