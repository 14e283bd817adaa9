"""The disk as the broker sees it: a few calls, each of which can fail, tear or be interrupted by a crash.

Paths are relative to one directory, with `/` between their parts. Nothing is durable before it is
synced: bytes by `File.sync`, a new, renamed or removed name by `Disk.sync_directory` of its directory.
Every call may raise OSError. After an error of `sync`, the bytes written since the last sync may be lost,
and a second call that succeeds proves nothing.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from typing_extensions import Buffer

CHUNK_BYTES_MAX = 256 * 1024
"""Maximum bytes of a range that one read returns."""


class File(Protocol):
    """One open file. Calls come from one thread at a time, reads from any."""

    def read(self, at: int, size: int) -> bytes:
        """Read up to `size` bytes from position `at` on; fewer only where the file ends."""
        ...

    def write(self, at: int, parts: Sequence[Buffer]) -> int:
        """Write these buffers one after the other from `at` on; return the number of bytes written.

        A short count is not an error: the caller writes the rest, or stops.
        """
        ...

    def sync(self) -> None:
        """Return when everything written is on stable storage, the file's size with it."""
        ...

    def size(self) -> int:
        """Return the length of the file, in bytes."""
        ...

    def truncate(self, size: int) -> None:
        """Truncate the file, or extend it with zeros. Not durable before `sync`."""
        ...

    def allocate(self, size: int) -> None:
        """Allocate disk space for this many bytes; the file is at least that long afterwards.

        Written bytes stay; the others read as zeros. `truncate` frees the space. Not durable before `sync`.
        """
        ...

    def descriptor(self) -> int | None:
        """Return the file descriptor, for calls that send from it; None where there is none."""
        ...

    def close(self) -> None:
        """Close the file, without a sync."""
        ...


class FileRange(NamedTuple):
    """`size` bytes of a file from position `at` on, which nobody writes any more."""

    file: File
    at: int
    size: int

    def chunks(self, begin: int = 0) -> Iterator[bytes]:
        """Yield the bytes in chunks, from `begin` bytes after `at` on. Raises OSError."""
        while begin < self.size:
            found = self.file.read(self.at + begin, min(self.size - begin, CHUNK_BYTES_MAX))
            if not found:
                raise self.short_read_error(begin)
            begin += len(found)
            yield found

    def short_read_error(self, found: int) -> OSError:
        """Return the error for a file that ends after `found` of these bytes."""
        text = f"the file ends at byte {self.at + found}, {self.size - found} bytes before the range does"
        return OSError(errno.EIO, text)


class Lock(Protocol):
    """A lock, held until `release` or until the process ends, even by a crash."""

    def release(self) -> None:
        """Release the lock."""
        ...


class Disk(Protocol):
    """The directory that holds the data of one service."""

    @property
    def name(self) -> str:
        """The directory's own path, as commands take it."""
        ...

    def open(self, path: str, *, create: bool = False, read_only: bool = False) -> File:
        """Open a file; with `create`, create it if it is missing. Raises FileNotFoundError."""
        ...

    def list(self, path: str) -> list[str]:
        """Return the names in a directory, sorted; an empty list if there is no such directory."""
        ...

    def make_directory(self, path: str) -> None:
        """Create a directory and its parents where they are missing."""
        ...

    def rename(self, old: str, new: str) -> None:
        """Rename a file, and replace the one that has the new name; atomic, also in a crash."""
        ...

    def remove(self, path: str) -> None:
        """Remove a file. Raises FileNotFoundError."""
        ...

    def sync_directory(self, path: str) -> None:
        """Return when the names in a directory are on stable storage."""
        ...

    def lock(self, path: str) -> Lock:
        """Lock the directory for this process, by a file at `path`.

        Raises BlockingIOError if it is locked; its text names the process.
        """
        ...

    def free_bytes(self) -> int:
        """Return the free space, in bytes."""
        ...
