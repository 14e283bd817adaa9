"""File systems in image files, each on a loop device of its own. For Linux, as root.

They can be small, and a power cut of each can be simulated.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks._crash_rounds import ChildProcess

FILE_SYSTEMS = ("ext4", "xfs")
IMAGE_BYTES = 512 * 1024 * 1024
_SHUTDOWN, _NO_FLUSH = 0x8004587D, 2
_TOOL_S_MAX = 60.0


class UnusableError(Exception):
    """This machine lacks what a benchmark needs; the text gives the reason."""


def check_usable(kind: str) -> None:
    """Raise UnusableError if this machine cannot make and mount this file system and cut its power."""
    if sys.platform != "linux":
        raise UnusableError(f"loop devices exist on Linux only; this is {sys.platform}")
    if os.geteuid() != 0:
        raise UnusableError("only root can mount an image: run it as root")
    for tool in ("mount", "umount", "losetup", f"mkfs.{kind}"):
        if shutil.which(tool) is None:
            raise UnusableError(f"{tool} is not installed")
    if not Path("/dev/loop-control").exists():
        raise UnusableError("there are no loop devices")
    if kind not in Path("/proc/filesystems").read_text().split():
        raise UnusableError("the kernel has not loaded this file system")


@dataclass(slots=True)
class Image:
    """A file system in a file of `size` bytes. `kind`: ext4 or xfs; `cuts`: the power cuts so far."""

    kind: str
    folder: Path
    size: int = IMAGE_BYTES
    cuts: int = 0

    @property
    def mount(self) -> Path:
        """The mount point."""
        return self.folder / self.kind

    @property
    def path(self) -> Path:
        """The image file."""
        return self.folder / f"{self.kind}.image"

    def make(self) -> None:
        """Create and mount it."""
        with self.path.open("wb") as file:
            file.truncate(self.size)
        self.mount.mkdir()
        _run(f"mkfs.{self.kind}", "-q", str(self.path))
        self.remount()

    def remount(self) -> None:
        """Mount it on a loop device that is removed when it is unmounted."""
        _run("mount", "-t", self.kind, "-o", "loop", str(self.path), str(self.mount))

    def cut(self, process: ChildProcess) -> None:
        """Simulate a power cut under a process."""
        # All threads stop first: a sync that runs during the shutdown may report success without syncing.
        if not process.freeze():
            raise RuntimeError("a thread of the process did not stop: the cut would prove nothing")
        descriptor = os.open(self.mount, os.O_RDONLY)
        try:
            fcntl.ioctl(descriptor, _SHUTDOWN, struct.pack("I", _NO_FLUSH))
        finally:
            os.close(descriptor)
        process.kill()
        _run("umount", str(self.mount))
        self.remount()
        self.cuts += 1

    def drop(self) -> None:
        """Unmount it, whatever state it is in."""
        with suppress(subprocess.CalledProcessError):
            _run("umount", str(self.mount))
        if os.path.ismount(self.mount):
            _run("umount", "--lazy", str(self.mount))
        self.path.unlink(missing_ok=True)


@contextmanager
def mount_image(kind: str, folder: Path, size: int = IMAGE_BYTES) -> Iterator[Image]:
    """Create and mount a file system; remove it at the end."""
    image = Image(kind, folder, size)
    try:
        image.make()
        yield image
    finally:
        image.drop()


def _run(*command: str) -> None:
    result = subprocess.run(command, capture_output=True, text=True, timeout=_TOOL_S_MAX, check=False)
    if result.returncode:
        error = subprocess.CalledProcessError(result.returncode, command, result.stdout, result.stderr)
        error.add_note(result.stderr.strip())
        raise error
