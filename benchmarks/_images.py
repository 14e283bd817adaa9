"""File systems that lie in an image file each, on a loop device of their own. For Linux, as root.

They can be made small, and their power can be cut.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import struct
import subprocess
import sys
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks._crash_rounds import Life

KINDS = ("ext4", "xfs")
IMAGE_BYTES = 512 * 1024 * 1024
_SHUTDOWN, _NO_FLUSH = 0x8004587D, 2
_TOOL_S_MAX = 60.0


class Unusable(Exception):
    """Why something cannot be done on this machine."""


def check_usable(kind: str) -> None:
    """Raise Unusable where this file system cannot be made, mounted and cut here."""
    if sys.platform != "linux":
        raise Unusable(f"loop devices are Linux's, this is {sys.platform}")
    if os.geteuid() != 0:
        raise Unusable("only root can mount an image: run it as root")
    for tool in ("mount", "umount", "losetup", f"mkfs.{kind}"):
        if shutil.which(tool) is None:
            raise Unusable(f"{tool} is not installed")
    if not Path("/dev/loop-control").exists():
        raise Unusable("there are no loop devices")
    if kind not in Path("/proc/filesystems").read_text().split():
        raise Unusable("the kernel has no such file system loaded")


@dataclass(slots=True)
class Image:
    """A file system in a file."""

    kind: str
    folder: Path
    size: int = IMAGE_BYTES
    cuts: int = 0

    @property
    def mount(self) -> Path:
        """Where it is mounted."""
        return self.folder / self.kind

    @property
    def path(self) -> Path:
        """The file."""
        return self.folder / f"{self.kind}.image"

    def make(self) -> None:
        """Make it, mounted."""
        with self.path.open("wb") as file:
            file.truncate(self.size)
        self.mount.mkdir()
        _run(f"mkfs.{self.kind}", "-q", str(self.path))
        self.mount_again()

    def mount_again(self) -> None:
        """Mount it on a loop device that goes when it is unmounted."""
        _run("mount", "-t", self.kind, "-o", "loop", str(self.path), str(self.mount))

    def cut(self, life: Life) -> None:
        """Cut the power under a process."""
        if not life.freeze():
            raise RuntimeError("a thread of the process did not stop: the cut would prove nothing")
        # A sync that runs while the file system goes down may return as if it had been done.
        descriptor = os.open(self.mount, os.O_RDONLY)
        try:
            fcntl.ioctl(descriptor, _SHUTDOWN, struct.pack("I", _NO_FLUSH))
        finally:
            os.close(descriptor)
        life.kill()
        _run("umount", str(self.mount))
        self.mount_again()
        self.cuts += 1

    def drop(self) -> None:
        """Unmount it, whatever state it is in."""
        with suppress(subprocess.CalledProcessError):
            _run("umount", str(self.mount))
        if os.path.ismount(self.mount):
            _run("umount", "--lazy", str(self.mount))
        self.path.unlink(missing_ok=True)


@contextmanager
def mounted(kind: str, folder: Path, size: int = IMAGE_BYTES) -> Iterator[Image]:
    """A new file system, gone at the end."""
    image = Image(kind, folder, size)
    try:
        image.make()
        yield image
    finally:
        image.drop()


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TOOL_S_MAX, check=False)
    if done.returncode:
        error = subprocess.CalledProcessError(done.returncode, command, done.stdout, done.stderr)
        error.add_note(done.stderr.strip())
        raise error
