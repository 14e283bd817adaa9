"""The disk as the broker sees it: a few calls, each of which can fail, tear or be cut off by a crash.

Paths are relative to one directory, with `/` between their parts. Nothing is durable before it is
synced: bytes by `File.sync`, a new, renamed or removed name by `Disk.sync_directory` of its directory.
Every call may raise OSError; an error of `sync` says that what was written since the last one may be
gone, and that calling it again proves nothing.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from typing_extensions import Buffer

PIECE_BYTES_MAX = 256 * 1024
"""How much of a range is read at once."""


class File(Protocol):
    """One open file. Calls come from one thread at a time, reads from any."""

    def read(self, at: int, size: int) -> bytes:
        """Up to `size` bytes from position `at` on; fewer only where the file ends."""
        ...

    def write(self, at: int, parts: Sequence[Buffer]) -> int:
        """Write these buffers one behind the other from `at` on; how many bytes were taken.

        Fewer than asked for is no error: the caller goes on behind them, or gives up.
        """
        ...

    def sync(self) -> None:
        """Return when everything written is on stable storage, the file's size with it."""
        ...

    def size(self) -> int:
        """How long the file is, in bytes."""
        ...

    def truncate(self, size: int) -> None:
        """Cut the file, or lengthen it with zeros. Not durable before `sync`."""
        ...

    def allocate(self, size: int) -> None:
        """Take room on the disk for so many bytes, really, the file being at least that long afterwards.

        What was written stays; what was not reads as zeros. `truncate` gives the room back. Not durable
        before `sync`.
        """
        ...

    def descriptor(self) -> int | None:
        """The system's number of the file, for calls that send from it; None where it has none."""
        ...

    def close(self) -> None:
        """Let go of it. Syncs nothing."""
        ...


class FileRange(NamedTuple):
    """`size` bytes of a file from position `at` on, which nobody writes any more."""

    file: File
    at: int
    size: int

    def pieces(self, begin: int = 0) -> Iterator[bytes]:
        """Read them piece by piece, from `begin` bytes behind `at` on. Raises OSError."""
        while begin < self.size:
            found = self.file.read(self.at + begin, min(self.size - begin, PIECE_BYTES_MAX))
            if not found:
                raise self.short(begin)
            begin += len(found)
            yield found

    def short(self, found: int) -> OSError:
        """What says that the file holds only so many of these bytes."""
        told = f"a file ends at byte {self.at + found}, and {self.size - found} more were to be read"
        return OSError(errno.EIO, told)


class Lock(Protocol):
    """Held until `release`, or until the process ends, however it does."""

    def release(self) -> None:
        """Let others have it."""
        ...


class Disk(Protocol):
    """The directory that one service keeps its data in."""

    @property
    def name(self) -> str:
        """The directory's own path, as commands take it."""
        ...

    def open(self, path: str, *, create: bool = False, read_only: bool = False) -> File:
        """Open a file; with `create` make it, where there is none. Raises FileNotFoundError."""
        ...

    def list(self, path: str) -> list[str]:
        """The names in a directory, sorted; none where there is no such directory."""
        ...

    def make_directory(self, path: str) -> None:
        """Make a directory, and those above it, where they are not there yet."""
        ...

    def rename(self, old: str, new: str) -> None:
        """Give a file another name, in place of what had that name: it has the one or the other."""
        ...

    def remove(self, path: str) -> None:
        """Remove a file. Raises FileNotFoundError."""
        ...

    def sync_directory(self, path: str) -> None:
        """Return when the names in a directory are on stable storage."""
        ...

    def lock(self, path: str) -> Lock:
        """Take the directory for this process, by a file at `path`. Raises BlockingIOError if it is taken;
        its text says by which process.
        """
        ...

    def free_bytes(self) -> int:
        """How much room is left."""
        ...
