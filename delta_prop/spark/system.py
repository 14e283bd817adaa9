"""System calls of the jobs: environment, Java, files, host names, other processes, the time.

No other module of the jobs makes them.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

now = time.monotonic
"""Clock in seconds, to measure spans."""


def wall_us() -> int:
    """Return the microseconds since 1970."""
    return time.time_ns() // 1000


pause = time.sleep
"""Block this task for a number of seconds."""

draw_bits = secrets.randbits
"""Return a random number of the given number of bits."""

PYTHON = sys.executable
HOST = socket.gethostname()
_JAVA_TIMEOUT_S = 30.0
_DRAINED = b"\0"  # ends the line that `drain` writes
_CHUNK_BYTES = 65_536
_UNKNOWN_HOST = {socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)}


def get_logger() -> logging.Logger:
    """Return the logger for users; in a process that configures no logging, it writes to standard error."""
    logger = logging.getLogger("delta_prop.spark")
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("delta_prop: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
    return logger


def read_environment() -> Mapping[str, str]:
    """Return the environment's variables."""
    return os.environ


def read_variable(name: str, default: str = "") -> str:
    """Return a variable of the environment."""
    return os.environ.get(name, default)


def set_default(name: str, value: str) -> None:
    """Set a variable of the environment, unless it is set."""
    os.environ.setdefault(name, value)


def is_on_terminal() -> bool:
    """True if standard error is a terminal, so that a person sees progress."""
    return sys.stderr.isatty()


def find_file_fault(path: str) -> str | None:
    """Return the reason why a file cannot be read here, None if it can."""
    try:
        with open(path, "rb") as file:
            file.read(1)
    except (OSError, ValueError) as error:  # also a name that no file can have
        return getattr(error, "strerror", None) or str(error)
    return None


def path_exists(path: str) -> bool:
    """True if something exists at a path of this machine."""
    try:
        return Path(path).exists()
    except (OSError, ValueError):  # a name that no file can have
        return False


def find_folder_fault(path: str) -> str | None:
    """Return the reason why no file can be created at a path of this machine, None if it can."""
    folder = Path(path).absolute().parent
    if not folder.is_dir():
        return f"there is no folder {str(folder)!r:.300}"
    return None if os.access(folder, os.W_OK | os.X_OK) else f"nothing can be written in {str(folder)!r:.300}"


def find_host_fault(host: str) -> str | None:
    """Return the reason why a host has no address, None if it has one or the name service is unavailable."""
    try:
        socket.getaddrinfo(host, None)
    except socket.gaierror as error:
        return error.strerror if error.errno in _UNKNOWN_HOST else None
    except UnicodeError:
        return "it is not a valid host name"
    return None


@contextmanager
def root_log_dropped() -> Iterator[None]:
    """Drop records of the root logger, where libraries log unexpected errors."""

    def drop(_: logging.LogRecord) -> bool:
        return False

    root = logging.getLogger()
    root.addFilter(drop)  # a logger's filter does not see the records of other loggers
    try:
        yield
    finally:
        root.removeFilter(drop)


class StderrCapture:
    """Captures the standard error of child processes line by line, in a daemon thread."""

    def __init__(self, accept_line: Callable[[str], bool]) -> None:
        """`accept_line` gets each line, and returns True to forward it to this process's standard error."""
        self._accept_line = accept_line
        self._drained = threading.Event()
        self._write_end = -1  # of the pipe

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Redirect the standard error of the processes started in the block, until they end."""
        sys.stderr.flush()
        read_end, self._write_end = os.pipe()
        original = os.dup(2)
        threading.Thread(target=self._forward, args=(read_end, os.dup(original)), daemon=True).start()
        os.dup2(self._write_end, 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(original, 2)
            os.close(original)

    def drain(self, timeout_s: float) -> None:
        """Wait until the lines written before are processed."""
        if self._write_end >= 0:
            os.write(self._write_end, _DRAINED + b"\n")
            self._drained.wait(timeout_s)

    def _forward(self, read_end: int, target: int) -> None:
        partial = b""
        while chunk := os.read(read_end, _CHUNK_BYTES):
            *lines, partial = (partial + chunk).split(b"\n")
            for line in lines:
                self._forward_line(line, target)
            if partial.startswith(b"\r"):  # a progress bar, which overwrites its line
                os.write(target, partial)
                partial = b""

    def _forward_line(self, line: bytes, target: int) -> None:
        text, drained = line.removesuffix(_DRAINED), line.endswith(_DRAINED)
        text = text.rpartition(b"\r")[2]
        if self._accept_line(text.decode(errors="replace")) and not (drained and not text):
            os.write(target, text + b"\n")
        if drained:
            self._drained.set()


def find_java() -> str | None:
    """Return the Java that Spark would start: the one in JAVA_HOME, else on the PATH."""
    home = read_variable("JAVA_HOME")
    if home:
        path = Path(home) / "bin" / "java"
        return str(path) if path.exists() else None
    return shutil.which("java")


def read_java_release(path: str) -> int | None:
    """Return the release of a Java (1.8 is 8), None if it does not print one."""
    try:
        result = subprocess.run(
            [path, "-version"], capture_output=True, text=True, timeout=_JAVA_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    release = re.search(r'version "(?:1\.)?(\d+)', result.stderr + result.stdout)
    return int(release[1]) if release else None


def find_installer() -> str | None:
    """Return the system's package installer, None if unknown."""
    return next((one for one in ("apt-get", "dnf", "apk", "brew") if shutil.which(one)), None)
