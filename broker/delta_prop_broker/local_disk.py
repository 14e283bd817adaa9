"""The disk of the machine, one directory of it. Every call blocks. For Linux and macOS.

Names are looked up part by part from the root, and a symbolic link below the root is refused: whatever a
name says, nothing outside is touched. The root itself may be a link; where it points is the operator's
choice. Files are made for their owner alone (0600), directories too (0700).
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import sys
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from typing_extensions import Buffer

    from delta_prop_broker.disk import Disk, File, Lock

_FILE_MODE = 0o600
_DIRECTORY_MODE = 0o700
_PARTS_MAX = max(16, os.sysconf("SC_IOV_MAX"))  # 16 is what POSIX promises where the system names no bound
_LOCK_TEXT_BYTES_MAX = 32
_CHUNK_BYTES = 1024 * 1024


def path_parts(path: str) -> list[str]:
    """The names in a path of the disk port; none for the root itself, `""` or `"."`. Raises ValueError."""
    if path in ("", "."):
        return []
    parts = path.split("/")
    if "\0" in path or any(part in ("", ".", "..") for part in parts):
        raise ValueError(
            f"{path!r} is no path below the data directory: names with one '/' between them, "
            "without '.', '..' and NUL"
        )
    return parts


def file_parts(path: str) -> tuple[list[str], str]:
    """The directory of a file, as its names, and the file's own name. Raises ValueError."""
    parts = path_parts(path)
    if not parts:
        raise ValueError(f"{path!r} is the data directory itself: name a file in it")
    return parts[:-1], parts[-1]


def in_use(name: str, text: bytes) -> BlockingIOError:
    """What says that a lock is taken, and by which process."""
    process = text.decode("ascii", "replace").strip() or "unknown"
    told = f"the data directory is locked by process {process}: stop that one, or name another directory"
    return BlockingIOError(errno.EWOULDBLOCK, told, name)


class LocalFile:
    """One open file. It must not be closed while another thread reads from it."""

    def __init__(self, descriptor: int, name: str) -> None:
        self._descriptor = descriptor
        self._name = name

    def read(self, at: int, size: int) -> bytes:
        """Up to `size` bytes from `at` on; fewer only where the file ends."""
        with _Named(self._name):
            found = os.pread(self._descriptor, size, at)
            if not found or len(found) == size:
                return found
            pieces = [found]  # the system may give less than it has
            missing = size - len(found)
            while missing and (found := os.pread(self._descriptor, missing, at + size - missing)):
                pieces.append(found)
                missing -= len(found)
            return b"".join(pieces)

    def write(self, at: int, parts: Sequence[Buffer]) -> int:
        """Write these buffers one behind the other from `at` on; how many bytes were taken."""
        if at < 0:  # -1 would mean "where the last call stopped" to the system
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), self._name)
        if len(parts) <= _PARTS_MAX:
            try:
                return os.pwritev(self._descriptor, parts, at)
            except OSError as error:
                error.filename = self._name
                raise
        taken = 0
        with _Named(self._name):
            for first in range(0, len(parts), _PARTS_MAX):
                some = parts[first : first + _PARTS_MAX]
                now = os.pwritev(self._descriptor, some, at + taken)
                taken += now
                if now < sum(memoryview(part).nbytes for part in some):
                    break
        return taken

    def sync(self) -> None:
        """Return when everything written is on stable storage, the file's size with it."""
        if self._descriptor < 0:  # the system's other calls find that out for themselves
            raise OSError(errno.EBADF, os.strerror(errno.EBADF), self._name)
        with _Named(self._name):
            _sync_file(self._descriptor)

    def size(self) -> int:
        """How long the file is, in bytes."""
        with _Named(self._name):
            return os.fstat(self._descriptor).st_size

    def truncate(self, size: int) -> None:
        """Cut the file, or lengthen it with zeros."""
        with _Named(self._name):
            os.ftruncate(self._descriptor, size)

    def allocate(self, size: int) -> None:
        """Take room for so many bytes; the file is at least that long then."""
        with _Named(self._name):
            if sys.platform == "linux":
                os.posix_fallocate(self._descriptor, 0, size)
                return
            zeros = bytes(_CHUNK_BYTES)
            at = os.fstat(self._descriptor).st_size
            while at < size:
                at += os.pwrite(self._descriptor, memoryview(zeros)[: size - at], at)

    def descriptor(self) -> int | None:
        """The system's number of the file; None once it is closed."""
        return self._descriptor if self._descriptor >= 0 else None

    def close(self) -> None:
        """Let go of it. A second time does nothing."""
        # Later calls must fail, and not reach the file that gets this number next.
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


class LocalLock:
    """A locked file. The system lets go of it when the process ends."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def release(self) -> None:
        """Let others have it. A second time does nothing."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            with suppress(OSError):
                os.ftruncate(descriptor, 0)
            os.close(descriptor)


class LocalDisk:
    """A directory of this machine. Making the object touches nothing; `make_directory("")` makes the root."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)

    @property
    def name(self) -> str:
        """The directory's path, as it was given."""
        return str(self.root)

    def open(self, path: str, *, create: bool = False, read_only: bool = False) -> LocalFile:
        """Open a regular file; with `create` make it, where there is none. Read-only changes nothing."""
        if create and read_only:
            raise ValueError("a file to be made cannot be opened read-only: choose one")
        flags = os.O_RDONLY if read_only else os.O_RDWR
        return LocalFile(self._open(path, flags | (os.O_CREAT if create else 0)), str(self.root / path))

    def list(self, path: str) -> list[str]:
        """The names in a directory, sorted; none where there is no such directory."""
        try:
            with self._directory(path_parts(path)) as directory:
                return sorted(os.listdir(directory))
        except FileNotFoundError:
            return []

    def make_directory(self, path: str) -> None:
        """Make a directory, and those above it, where they are not there yet.

        The root is on stable storage when this returns: nobody else could sync what is above it.
        """
        parts = path_parts(path)
        self._make_root()
        descriptor = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY)
        try:
            for depth, part in enumerate(parts):
                with suppress(FileExistsError), self._told(parts[: depth + 1]):
                    os.mkdir(part, _DIRECTORY_MODE, dir_fd=descriptor)
                descriptor = self._down(descriptor, parts[: depth + 1])
        finally:
            os.close(descriptor)

    def rename(self, old: str, new: str) -> None:
        """Give a file another name, in place of what had that name."""
        (old_above, old_name), (new_above, new_name) = file_parts(old), file_parts(new)
        with self._directory(old_above) as source, self._directory(new_above) as target:
            with self._told([*old_above, old_name]):
                found = os.stat(old_name, dir_fd=source, follow_symlinks=False)
            self._must_be_file(found, [*old_above, old_name])
            try:
                os.rename(old_name, new_name, src_dir_fd=source, dst_dir_fd=target)
            except OSError as error:
                error.filename, error.filename2 = str(self.root / old), str(self.root / new)
                raise

    def remove(self, path: str) -> None:
        """Remove a file."""
        above, name = file_parts(path)
        with self._directory(above) as directory, self._told([*above, name]):
            found = os.stat(name, dir_fd=directory, follow_symlinks=False)
            self._must_be_file(found, [*above, name])
            os.unlink(name, dir_fd=directory)

    def sync_directory(self, path: str) -> None:
        """Return when the names in a directory are on stable storage."""
        parts = path_parts(path)
        with self._directory(parts) as directory, self._told(parts):
            _sync(directory)

    def lock(self, path: str) -> LocalLock:
        """Take the directory for this process, by a file at `path` that says which process it is.

        The file stays when the lock is released: removing it could take it from one who just locked it.
        """
        while True:
            descriptor = self._open(path, os.O_RDWR | os.O_CREAT)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                mine = self._is_at(path, descriptor)
                if mine:
                    text = f"{os.getpid()}\n".encode()
                    with suppress(OSError):  # a full disk: the lock holds, and only its text is missing
                        os.pwrite(descriptor, text, 0)
                        os.ftruncate(descriptor, len(text))
            except BlockingIOError:
                text = os.pread(descriptor, _LOCK_TEXT_BYTES_MAX, 0)
                os.close(descriptor)
                raise in_use(str(self.root / path), text) from None
            except BaseException:
                os.close(descriptor)
                raise
            if mine:
                return LocalLock(descriptor)
            os.close(descriptor)  # another file was put in its place meanwhile: lock that one

    def free_bytes(self) -> int:
        """How much room is left for those who are not root."""
        found = os.statvfs(self.root)
        return found.f_bavail * found.f_frsize

    # --- looking names up

    def _is_at(self, path: str, descriptor: int) -> bool:
        above, name = file_parts(path)
        try:
            with self._directory(above) as directory:
                there = os.stat(name, dir_fd=directory, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return os.path.samestat(there, os.fstat(descriptor))

    def _open(self, path: str, flags: int) -> int:
        above, name = file_parts(path)
        with self._directory(above) as directory, self._told([*above, name]):
            # Without O_NONBLOCK a pipe in the place of a file would wait for its other end.
            flags |= os.O_NOFOLLOW | os.O_NONBLOCK
            descriptor = os.open(name, flags, _FILE_MODE, dir_fd=directory)
        try:
            self._must_be_file(os.fstat(descriptor), [*above, name])
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    @contextmanager
    def _directory(self, parts: Sequence[str]) -> Iterator[int]:
        descriptor = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY)
        try:
            for depth in range(len(parts)):
                descriptor = self._down(descriptor, parts[: depth + 1])
            yield descriptor
        finally:
            os.close(descriptor)

    def _down(self, above: int, parts: Sequence[str]) -> int:
        """Open the last of these directories, by the one above it, and close that one."""
        with self._told(parts):
            found = os.stat(parts[-1], dir_fd=above, follow_symlinks=False)
            self._must_be_no_link(found, parts)
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
            below = os.open(parts[-1], flags, dir_fd=above)
        os.close(above)
        return below

    def _make_root(self) -> None:
        missing = []
        at = self.root.absolute()
        while not at.is_dir():
            missing.append(at)
            at = at.parent
        for directory in reversed(missing):
            with suppress(FileExistsError):
                directory.mkdir(_DIRECTORY_MODE)
            above = os.open(directory.parent, os.O_RDONLY | os.O_DIRECTORY)
            try:
                _sync(above)
            finally:
                os.close(above)

    def _must_be_file(self, found: os.stat_result, parts: Sequence[str]) -> None:
        self._must_be_no_link(found, parts)
        name = str(self.root.joinpath(*parts))
        if stat.S_ISDIR(found.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), name)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "is no regular file: move it out of the data directory", name)

    def _must_be_no_link(self, found: os.stat_result, parts: Sequence[str]) -> None:
        if stat.S_ISLNK(found.st_mode):
            text = "is a symbolic link, and the data directory may hold none: put in its place what it names"
            raise OSError(errno.ELOOP, text, str(self.root.joinpath(*parts)))

    def _told(self, parts: Sequence[str]) -> _Named:
        return _Named(str(self.root.joinpath(*parts)))


class _Named:
    """Gives errors the whole path, where the system knows a descriptor or the last name alone."""

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, OSError):
            error.filename = self._name


def _sync(descriptor: int) -> None:
    if sys.platform == "darwin":
        fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)  # fsync leaves it in the drive's own cache there
    else:
        os.fsync(descriptor)


def _sync_file(descriptor: int) -> None:
    """Sync what reading the file back needs, its size too, but not its times."""
    if sys.platform == "linux":
        os.fdatasync(descriptor)
    else:
        _sync(descriptor)


if TYPE_CHECKING:

    def _conforms(disk: LocalDisk, file: LocalFile, lock: LocalLock) -> tuple[Disk, File, Lock]:
        return disk, file, lock
