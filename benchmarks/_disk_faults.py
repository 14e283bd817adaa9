"""Failures of a real disk under another process: calls that fail, and a full file system.

A library built from `_failing_disk.c` and preloaded into that process makes its calls fail; a small file that
both processes map controls it.
"""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import struct
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from benchmarks._images import UnusableError

if TYPE_CHECKING:
    import random

SOURCE = Path(__file__).with_name("_failing_disk.c")
WRITES, SYNCS, NAMES = 1, 2, 4
"""Classes of calls, as bits. NAMES: calls that create, rename or remove files."""
ALWAYS = -1
"""`Rule.times` of a rule that lasts until it is disarmed."""
_SHARED = struct.Struct("=4i4i4i")
_ARMED, _FAILED_CALLS = struct.Struct("=i"), struct.Struct("=4xi")
_BUILD_S_MAX = 60.0
_CHUNK_BYTES_MAX = 16 * 1024 * 1024


class Rule(NamedTuple):
    """A rule for classes of calls: `skip` calls pass, then `times` calls fail with an errno, `error`. With
    error 0 each of these calls writes only half of its bytes.
    """

    classes: int = 0
    skip: int = 0
    times: int = 0
    error: int = 0


NO_RULE = Rule()


class Failure(NamedTuple):
    """The disk's failure in one round. `after_s`: seconds from the start of the round; `lasts_s`: its
    duration, unless it ends after a number of calls. `rules`: the second one begins when the first has ended.
    Kind "full" fills the file system, without rules.
    """

    kind: str
    after_s: float
    lasts_s: float
    rules: tuple[Rule, Rule] = (NO_RULE, NO_RULE)

    def __str__(self) -> str:
        if self.kind == "full":
            return f"file system full for {self.lasts_s:.2f} s"
        first, second = self.rules
        extent = f"for {self.lasts_s:.2f} s" if first.times == ALWAYS else f"{first.times} times"
        later = "" if second.classes != WRITES | SYNCS | NAMES else f", and {second.skip} calls later"
        return f"{self.kind} fails {extent} after {first.skip} calls{later}"


CALLS = {
    "write": (WRITES, errno.EIO),
    "sync": (SYNCS, errno.EIO),
    "no space": (WRITES, errno.ENOSPC),
    "name": (NAMES, errno.EIO),
    "short write": (WRITES, 0),
}
"""Kinds of failures that the preloaded library makes: the classes of calls that fail, and their error."""
FULL = "full"
"""The kind that fills a file system; it needs a small one of its own."""


def draw_failure(kind: str, rng: random.Random, busy_s: float) -> Failure:
    """Draw a failure of a kind for a round that is busy for `busy_s` seconds."""
    after_s, lasts_s = rng.uniform(0.2, 0.6) * busy_s, rng.uniform(0.1, 0.5)
    if kind == FULL:
        return Failure(kind, after_s, lasts_s)
    classes, error = CALLS[kind]
    times = 1 if kind == "short write" else rng.choice((1, 1, 3, ALWAYS))
    first = Rule(classes, rng.randrange(4 if kind == "name" else 30), times, error)
    if kind == "short write":
        return Failure(kind, after_s, lasts_s, (first, Rule(WRITES, 0, 1, errno.ENOSPC)))
    has_second = times > 0 and rng.random() < 0.4
    second = Rule(WRITES | SYNCS | NAMES, rng.randrange(40), 1, errno.EIO) if has_second else NO_RULE
    return Failure(kind, after_s, lasts_s, (first, second))


def build(folder: Path) -> Path:
    """Build the library. Raises UnusableError if that is impossible on this machine."""
    if sys.platform != "linux":
        raise UnusableError(f"LD_PRELOAD works on Linux only; this is {sys.platform}")
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise UnusableError("there is no C compiler: install gcc, or name one in CC")
    library = folder / "failing-disk.so"
    command = [compiler, "-O2", "-shared", "-fPIC", "-o", str(library), str(SOURCE), "-ldl", "-lpthread"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=_BUILD_S_MAX, check=False)
    except OSError as error:
        raise UnusableError(f"{compiler} cannot be run: {error}") from None
    if result.returncode:
        raise UnusableError(f"{compiler} failed: {result.stderr.strip()[-300:]}")
    return library


class FailingCalls:
    """Controls the library in one process, for calls on files below `directory`."""

    def __init__(self, library: Path, file: Path, directory: Path) -> None:
        file.write_bytes(bytes(_SHARED.size))
        with file.open("r+b") as opened:
            self._shared = mmap.mmap(opened.fileno(), _SHARED.size)
        self.env = {
            "LD_PRELOAD": str(library),
            "DISK_FAULTS": str(file),
            "DISK_FAULTS_BELOW": str(directory.resolve()),
        }

    @property
    def failed_calls(self) -> int:
        """The number of calls that have failed since the last `arm`."""
        (failed_calls,) = _FAILED_CALLS.unpack_from(self._shared)
        return int(failed_calls)

    def arm(self, rules: tuple[Rule, Rule]) -> None:
        """Make calls fail from now on."""
        self.disarm()
        self._shared[:] = _SHARED.pack(0, 0, 0, 0, *rules[0], *rules[1])
        _ARMED.pack_into(self._shared, 0, 1)

    def disarm(self) -> None:
        """Let all calls succeed."""
        _ARMED.pack_into(self._shared, 0, 0)

    def close(self) -> None:
        """Unmap the file."""
        self._shared.close()


class Ballast:
    """A file that can take all free space of a file system."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def fill(self) -> None:
        """Take all free space, down to the last block."""
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            offset, size = 0, _CHUNK_BYTES_MAX
            while size >= 512:
                try:
                    os.posix_fallocate(descriptor, offset, size)
                    offset += size
                except OSError:
                    size //= 2
        finally:
            os.close(descriptor)

    def free(self) -> None:
        """Remove the file, which frees the space."""
        with suppress(FileNotFoundError):
            self._path.unlink()
