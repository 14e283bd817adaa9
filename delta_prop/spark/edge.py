"""The jobs' contact with the world: the environment, Java, files, names of hosts, other processes, the time.

The only module of the jobs that touches them.
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
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

now = time.monotonic
"""Seconds, for how long something takes."""


def wall_us() -> int:
    """Microseconds since 1970."""
    return time.time_ns() // 1000


pause = time.sleep
"""Wait some seconds; nothing else goes on in this task meanwhile."""

drawn = secrets.randbits
"""A number of so many random bits."""

PYTHON = sys.executable
HOST = socket.gethostname()
_ASK_S_MAX = 30.0
_DRAINED = b"\0"
_CHUNK_BYTES = 65_536
_UNKNOWN_HOST = {socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)}


def logger() -> logging.Logger:
    """Where goes what users are to see; to standard error in the processes of Spark, which have no log."""
    found = logging.getLogger("delta_prop.spark")
    if not found.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("delta_prop: %(message)s"))
        found.addHandler(handler)
        found.setLevel(logging.INFO)
    return found


def environment() -> Mapping[str, str]:
    """All variables of the environment."""
    return os.environ


def setting(name: str, default: str = "") -> str:
    """A variable of the environment."""
    return os.environ.get(name, default)


def set_default(name: str, value: str) -> None:
    """Give a variable of the environment a value, unless it has one."""
    os.environ.setdefault(name, value)


def on_terminal() -> bool:
    """Whether somebody looks at what is told meanwhile."""
    return sys.stderr.isatty()


def file_fault(path: str) -> str | None:
    """Why a file cannot be read here; None: it can."""
    try:
        with open(path, "rb") as file:
            file.read(1)
    except (OSError, ValueError) as error:  # a name that no file can have, too
        return getattr(error, "strerror", None) or str(error)
    return None


def is_there(path: str) -> bool:
    """Whether something is at a path of this machine."""
    try:
        return Path(path).exists()
    except (OSError, ValueError):  # a name that no file can have
        return False


def folder_fault(path: str) -> str | None:
    """Why no file can be made at a path of this machine; None: it can."""
    folder = Path(path).absolute().parent
    if not folder.is_dir():
        return f"there is no folder {str(folder)!r:.300}"
    return None if os.access(folder, os.W_OK | os.X_OK) else f"nothing can be written in {str(folder)!r:.300}"


def host_fault(host: str) -> str | None:
    """Why a host has no address; None: it has one, or nobody can tell for now."""
    try:
        socket.getaddrinfo(host, None)
    except socket.gaierror as error:
        return error.strerror if error.errno in _UNKNOWN_HOST else None
    except UnicodeError:
        return "no name of a host looks so"
    return None


@contextmanager
def root_log_dropped() -> Iterator[None]:
    """Drop what is logged without a logger's name, as libraries do that were surprised."""

    def drop(_: logging.LogRecord) -> bool:
        return False

    root = logging.getLogger()
    root.addFilter(drop)  # records of other loggers do not come by here
    try:
        yield
    finally:
        root.removeFilter(drop)


class Errors:
    """The standard error of other processes, line by line, through a thread that ends with this process."""

    def __init__(self, take: Callable[[str], bool]) -> None:
        """`take`: is given each line, and says whether it goes on to this process's standard error."""
        self._take = take
        self._drained = threading.Event()
        self._write = -1

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Processes that are started meanwhile have it, as long as they live."""
        sys.stderr.flush()
        read, self._write = os.pipe()
        mine = os.dup(2)
        threading.Thread(target=self._pass_on, args=(read, os.dup(mine)), daemon=True).start()
        os.dup2(self._write, 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(mine, 2)
            os.close(mine)

    def drain(self, s_max: float) -> None:
        """Wait until what was written before has been taken."""
        if self._write >= 0:
            os.write(self._write, _DRAINED + b"\n")
            self._drained.wait(s_max)

    def _pass_on(self, read: int, onto: int) -> None:
        waiting = b""
        while chunk := os.read(read, _CHUNK_BYTES):
            *lines, waiting = (waiting + chunk).split(b"\n")
            for line in lines:
                self._pass_line(line, onto)
            if waiting.startswith(b"\r"):  # how far it is, which is written over and over
                os.write(onto, waiting)
                waiting = b""

    def _pass_line(self, line: bytes, onto: int) -> None:
        text, drained = line.removesuffix(_DRAINED), line.endswith(_DRAINED)
        text = text.rpartition(b"\r")[2]
        if self._take(text.decode(errors="replace")) and not (drained and not text):
            os.write(onto, text + b"\n")
        if drained:
            self._drained.set()


def java_path() -> str | None:
    """The Java that Spark would start: of JAVA_HOME, else the one on the PATH."""
    home = setting("JAVA_HOME")
    if home:
        path = Path(home) / "bin" / "java"
        return str(path) if path.exists() else None
    return shutil.which("java")


def java_release(path: str) -> int | None:
    """The release of a Java (1.8 is 8); None where it does not say."""
    try:
        asked = subprocess.run(
            [path, "-version"], capture_output=True, text=True, timeout=_ASK_S_MAX, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    told = re.search(r'version "(?:1\.)?(\d+)', asked.stderr + asked.stdout)
    return int(told[1]) if told else None


def installer() -> str | None:
    """The system's own way to install programs, as far as it is known here."""
    return next((one for one in ("apt-get", "dnf", "apk", "brew") if shutil.which(one)), None)
