"""Failures of a real disk beneath another process: calls that fail, and a file system without room.

Calls fail by a library that is built from `_failing_disk.c` and preloaded there; what it does is told through
a small file that both processes map.
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

from benchmarks._images import Unusable

if TYPE_CHECKING:
    import random

SOURCE = Path(__file__).with_name("_failing_disk.c")
WRITES, SYNCS, NAMES = 1, 2, 4
ALWAYS = -1
_SHARED = struct.Struct("=4i4i4i")
_ARMED, _STRUCK = struct.Struct("=i"), struct.Struct("=4xi")
_BUILD_S_MAX = 60.0
_CHUNK_BYTES_MAX = 16 * 1024 * 1024


class Rule(NamedTuple):
    """Calls of some classes: so many pass, then so many fail; with error 0 a write is cut short."""

    classes: int = 0
    skip: int = 0
    times: int = 0
    error: int = 0


NO_RULE = Rule()


class Failure(NamedTuple):
    """What befalls the disk in one round. `after_s`: from the beginning; `lasts_s`: how long it goes on,
    where a number of calls does not end it. Kind "full" leaves no room on the file system.
    """

    kind: str
    after_s: float
    lasts_s: float
    rules: tuple[Rule, Rule] = (NO_RULE, NO_RULE)

    def __str__(self) -> str:
        if self.kind == "full":
            return f"file system full for {self.lasts_s:.2f} s"
        first, then = self.rules
        often = f"for {self.lasts_s:.2f} s" if first.times == ALWAYS else f"{first.times} times"
        again = "" if then.classes != WRITES | SYNCS | NAMES else f", and {then.skip} calls later"
        return f"{self.kind} fails {often} after {first.skip} calls{again}"


CALLS = {
    "write": (WRITES, errno.EIO),
    "sync": (SYNCS, errno.EIO),
    "no room": (WRITES, errno.ENOSPC),
    "name": (NAMES, errno.EIO),
    "short write": (WRITES, 0),
}
"""Kinds of failures that a preloaded library makes: what it strikes, and with which error."""
FULL = "full"
"""The kind that takes a file system of one's own."""


def drawn(kind: str, chance: random.Random, busy_s: float) -> Failure:
    """Draw a failure of a kind within a round that is busy for so long."""
    after_s, lasts_s = chance.uniform(0.2, 0.6) * busy_s, chance.uniform(0.1, 0.5)
    if kind == FULL:
        return Failure(kind, after_s, lasts_s)
    classes, error = CALLS[kind]
    times = 1 if kind == "short write" else chance.choice((1, 1, 3, ALWAYS))
    first = Rule(classes, chance.randrange(4 if kind == "name" else 30), times, error)
    if kind == "short write":
        return Failure(kind, after_s, lasts_s, (first, Rule(WRITES, 0, 1, errno.ENOSPC)))
    strikes_again = times > 0 and chance.random() < 0.4
    then = Rule(WRITES | SYNCS | NAMES, chance.randrange(40), 1, errno.EIO) if strikes_again else NO_RULE
    return Failure(kind, after_s, lasts_s, (first, then))


def build(folder: Path) -> Path:
    """Build the library. Raises Unusable where that cannot be done here."""
    if sys.platform != "linux":
        raise Unusable(f"libraries are preloaded so on Linux, this is {sys.platform}")
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise Unusable("there is no C compiler: install gcc, or name one in CC")
    library = folder / "failing-disk.so"
    command = [compiler, "-O2", "-shared", "-fPIC", "-o", str(library), str(SOURCE), "-ldl", "-lpthread"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_BUILD_S_MAX, check=False)
    except OSError as error:
        raise Unusable(f"{compiler} cannot be run: {error}") from None
    if done.returncode:
        raise Unusable(f"{compiler} failed: {done.stderr.strip()[-300:]}")
    return library


class FailingCalls:
    """The library in one process, whose data lie below a directory."""

    def __init__(self, library: Path, file: Path, below: Path) -> None:
        file.write_bytes(bytes(_SHARED.size))
        with file.open("r+b") as opened:
            self._shared = mmap.mmap(opened.fileno(), _SHARED.size)
        self.env = {
            "LD_PRELOAD": str(library),
            "DISK_FAULTS": str(file),
            "DISK_FAULTS_BELOW": str(below.resolve()),
        }

    @property
    def struck(self) -> int:
        """How many calls have failed since it was armed last."""
        found: tuple[int] = _STRUCK.unpack_from(self._shared)
        return found[0]

    def arm(self, rules: tuple[Rule, Rule]) -> None:
        """Have calls fail from now on."""
        self.disarm()
        self._shared[:] = _SHARED.pack(0, 0, 0, 0, *rules[0], *rules[1])
        _ARMED.pack_into(self._shared, 0, 1)

    def disarm(self) -> None:
        """Let all calls be done."""
        _ARMED.pack_into(self._shared, 0, 0)

    def close(self) -> None:
        """Let go of the file."""
        self._shared.close()


class Ballast:
    """A file that takes all room of a file system."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def fill(self) -> None:
        """Take what is left, down to the last block."""
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            at, size = 0, _CHUNK_BYTES_MAX
            while size >= 512:
                try:
                    os.posix_fallocate(descriptor, at, size)
                    at += size
                except OSError:
                    size //= 2
        finally:
            os.close(descriptor)

    def free(self) -> None:
        """Give it back."""
        with suppress(FileNotFoundError):
            self._path.unlink()
