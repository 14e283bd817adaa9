"""The disk as the broker sees it: a few calls, each of which can fail, tear or be interrupted by a crash.

Paths are relative to one directory, with `/` between their parts. Nothing is durable before it is
synced: `File.sync` syncs bytes, `Disk.sync_directory` syncs new, renamed and removed names.
Every call may raise OSError. After an error of `sync`, the bytes written since the last sync may be lost,
and a second call that succeeds proves nothing.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from typing_extensions import Buffer

CHUNK_BYTES_MAX = 256 * 1024
"""Maximum bytes of a range that one read returns."""


class File(Protocol):
    """One open file. Any thread may call `read`; all other calls come from one thread at a time."""

    def read(self, at: int, size: int) -> bytes:
        """Read up to `size` bytes from position `at` on; fewer only where the file ends."""

    def write(self, at: int, parts: Sequence[Buffer]) -> int:
        """Write these buffers one after the other from `at` on; return the number of bytes written.

        A short count is not an error: the caller writes the rest, or stops.
        """

    def sync(self) -> None:
        """Wait until everything written, and the file's size, is on stable storage."""

    def size(self) -> int:
        """Return the length of the file, in bytes."""

    def truncate(self, size: int) -> None:
        """Set the size of the file: truncate it, or extend it with zeros. Not durable before `sync`."""

    def allocate(self, size: int) -> None:
        """Allocate disk space for this many bytes; the file is at least that long afterwards.

        Written bytes stay; the others read as zeros. `truncate` frees the space. Not durable before `sync`.
        """

    def descriptor(self) -> int | None:
        """Return the file descriptor, for system calls that send the file; None if there is none."""

    def close(self) -> None:
        """Close the file, without a sync."""


class FileRange(NamedTuple):
    """A range of a file, whose bytes no one changes any more: `size` bytes from `position` on."""

    file: File
    position: int
    size: int

    def chunks(self, start: int = 0) -> Iterator[bytes]:
        """Yield the bytes of the range in chunks, without the first `start` bytes. Raises OSError."""
        while start < self.size:
            chunk = self.file.read(self.position + start, min(self.size - start, CHUNK_BYTES_MAX))
            if not chunk:
                raise self.short_read_error(start)
            start += len(chunk)
            yield chunk

    def short_read_error(self, byte_count: int) -> OSError:
        """Return the error for a file that ends after `byte_count` bytes of the range."""
        end, missing = self.position + byte_count, self.size - byte_count
        text = f"the file ends at byte {end}, {missing} bytes before the range does"
        return OSError(errno.EIO, text)


class Lock(Protocol):
    """A lock, held until `release` or until the process ends, even by a crash."""

    def release(self) -> None:
        """Release the lock."""


class Disk(Protocol):
    """The directory that holds the data of one service."""

    @property
    def name(self) -> str:
        """The path of the directory, as an operator passes it to a command."""

    def open(self, path: str, *, create: bool = False, read_only: bool = False) -> File:
        """Open a file for reading and, unless `read_only`, for writing. Raises FileNotFoundError.

        `create`: create the file if it is missing.
        """

    def list(self, path: str) -> list[str]:
        """Return the names in a directory, sorted; an empty list if there is no such directory."""

    def make_directory(self, path: str) -> None:
        """Create a directory and its parents if they are missing."""

    def rename(self, old: str, new: str) -> None:
        """Rename a file; it replaces a file that has the new name. Atomic, even in a crash."""

    def remove(self, path: str) -> None:
        """Remove a file. Raises FileNotFoundError."""

    def remove_directory(self, path: str) -> None:
        """Remove an empty directory. Raises FileNotFoundError."""

    def sync_directory(self, path: str) -> None:
        """Wait until the names in a directory are on stable storage."""

    def lock(self, path: str) -> Lock:
        """Lock the directory for this process, by a file at `path`.

        Raises BlockingIOError if it is locked; its text names the process.
        """

    def free_bytes(self) -> int:
        """Return the free space, in bytes."""
