"""A directory on a local disk, as a `Disk`. Every call blocks. For Linux and macOS.

The service opens the files of its data directory only here.

Names are resolved part by part from the root, and a symbolic link below the root is refused, so no name
reaches a file outside. The root itself may be a link: its target is the operator's choice. Only the owner
can access the files (mode 0600) and directories (0700).
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from delta_prop_broker.disk import Disk, File, Lock

_FILE_MODE = 0o600
_DIRECTORY_MODE = 0o700
_BUFFERS_MAX = max(16, os.sysconf("SC_IOV_MAX"))
"""Maximum buffers of one write call; POSIX guarantees 16, also where the system names no limit."""
_LOCK_TEXT_BYTES_MAX = 32
_CHUNK_BYTES = 1024 * 1024  # zeros per write, where the system cannot allocate space


def path_parts(path: str) -> list[str]:
    """Split a path of the `Disk` protocol into its names. Raises ValueError.

    The paths `""` and `"."` mean the root, and have no names.
    """
    if path in ("", "."):
        return []
    parts = path.split("/")
    if "\0" in path or any(part in ("", ".", "..") for part in parts):
        raise ValueError(
            f"path {path!r}: not below the data directory: give names with one '/' between them, "
            "without '.', '..' and NUL"
        )
    return parts


def file_parts(path: str) -> tuple[list[str], str]:
    """Return the names of a file's parent directories, and its own name. Raises ValueError."""
    parts = path_parts(path)
    if not parts:
        raise ValueError(f"path {path!r}: this is the data directory itself: name a file in it")
    return parts[:-1], parts[-1]


def lock_taken_error(name: str, text: bytes) -> BlockingIOError:
    """Return the error for a lock that another process holds; it names that process."""
    process = text.decode("ascii", "replace").strip() or "unknown"
    reason = f"the data directory is locked by process {process}: stop that one, or name another directory"
    return BlockingIOError(errno.EWOULDBLOCK, reason, name)


class LocalFile:
    """One open `File`. It must not be closed while another thread reads from it."""

    def __init__(self, descriptor: int, name: str) -> None:
        self._descriptor = descriptor
        self._name = name

    def read(self, at: int, size: int) -> bytes:
        with _ErrorFilename(self._name):
            piece = os.pread(self._descriptor, size, at)
            if not piece or len(piece) == size:
                return piece
            pieces = [piece]  # the system may return less than the file has
            missing = size - len(piece)
            while missing and (piece := os.pread(self._descriptor, missing, at + size - missing)):
                pieces.append(piece)
                missing -= len(piece)
            return b"".join(pieces)

    def write(self, at: int, parts: Sequence[Buffer]) -> int:
        if at < 0:  # the system takes -1 for "the position after the last call"
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), self._name)
        if len(parts) <= _BUFFERS_MAX:
            try:
                return os.pwritev(self._descriptor, parts, at)
            except OSError as error:
                error.filename = self._name
                raise
        written = 0
        with _ErrorFilename(self._name):
            for first in range(0, len(parts), _BUFFERS_MAX):
                group = parts[first : first + _BUFFERS_MAX]
                count = os.pwritev(self._descriptor, group, at + written)
                written += count
                if count < sum(memoryview(part).nbytes for part in group):
                    break
        return written

    def sync(self) -> None:
        if self._descriptor < 0:  # the other calls report a closed file themselves
            raise OSError(errno.EBADF, os.strerror(errno.EBADF), self._name)
        with _ErrorFilename(self._name):
            _sync_file(self._descriptor)

    def size(self) -> int:
        with _ErrorFilename(self._name):
            return os.fstat(self._descriptor).st_size

    def truncate(self, size: int) -> None:
        with _ErrorFilename(self._name):
            os.ftruncate(self._descriptor, size)

    def allocate(self, size: int) -> None:
        with _ErrorFilename(self._name):
            if sys.platform == "linux":
                os.posix_fallocate(self._descriptor, 0, size)
                return
            zeros = bytes(_CHUNK_BYTES)
            at = os.fstat(self._descriptor).st_size
            while at < size:
                at += os.pwrite(self._descriptor, memoryview(zeros)[: size - at], at)

    def descriptor(self) -> int | None:
        """Return the file descriptor; None once the file is closed."""
        return self._descriptor if self._descriptor >= 0 else None

    def close(self) -> None:
        """Close the file. A second call does nothing."""
        # Later calls must fail: they must not reach the file that gets this descriptor next.
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


class LocalLock:
    """A locked file. The system releases the lock when the process ends."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def release(self) -> None:
        """Release the lock. A second call does nothing."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            with suppress(OSError):
                os.ftruncate(descriptor, 0)
            os.close(descriptor)


class LocalDisk:
    """A directory of this machine. The constructor touches nothing; `make_directory("")` creates the root."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)

    @property
    def name(self) -> str:
        """The directory's path, as it was given."""
        return str(self.root)

    def open(self, path: str, *, create: bool = False, read_only: bool = False) -> LocalFile:
        """Open a regular file for reading and, unless `read_only`, for writing.

        `create`: create the file if it is missing.
        """
        if create and read_only:
            raise ValueError("create, read_only: both are set: choose one")
        flags = os.O_RDONLY if read_only else os.O_RDWR
        return LocalFile(self._open(path, flags | (os.O_CREAT if create else 0)), str(self.root / path))

    def list(self, path: str) -> list[str]:
        try:
            with self._directory(path_parts(path)) as directory:
                return sorted(os.listdir(directory))
        except FileNotFoundError:
            return []

    def make_directory(self, path: str) -> None:
        """Create a directory and its parents if they are missing.

        The root is on stable storage when this returns, since no other call syncs its parent directory.
        """
        parts = path_parts(path)
        self._make_root()
        descriptor = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY)
        try:
            for depth, part in enumerate(parts):
                with suppress(FileExistsError), self._with_filename(parts[: depth + 1]):
                    os.mkdir(part, _DIRECTORY_MODE, dir_fd=descriptor)
                descriptor = self._open_subdirectory(descriptor, parts[: depth + 1])
        finally:
            os.close(descriptor)

    def rename(self, old: str, new: str) -> None:
        (old_parent, old_name), (new_parent, new_name) = file_parts(old), file_parts(new)
        with self._directory(old_parent) as source, self._directory(new_parent) as target:
            with self._with_filename([*old_parent, old_name]):
                status = os.stat(old_name, dir_fd=source, follow_symlinks=False)
            self._require_file(status, [*old_parent, old_name])
            try:
                os.rename(old_name, new_name, src_dir_fd=source, dst_dir_fd=target)
            except OSError as error:
                error.filename, error.filename2 = str(self.root / old), str(self.root / new)
                raise

    def remove(self, path: str) -> None:
        parent, name = file_parts(path)
        with self._directory(parent) as directory, self._with_filename([*parent, name]):
            status = os.stat(name, dir_fd=directory, follow_symlinks=False)
            self._require_file(status, [*parent, name])
            os.unlink(name, dir_fd=directory)

    def remove_directory(self, path: str) -> None:
        parent, name = file_parts(path)
        with self._directory(parent) as directory, self._with_filename([*parent, name]):
            os.rmdir(name, dir_fd=directory)

    def sync_directory(self, path: str) -> None:
        parts = path_parts(path)
        with self._directory(parts) as directory, self._with_filename(parts):
            _sync(directory)

    def lock(self, path: str) -> LocalLock:
        """Lock the directory for this process, by a file at `path` that holds the process id.

        The file stays when the lock is released, since another process may just have locked it.
        """
        while True:
            descriptor = self._open(path, os.O_RDWR | os.O_CREAT)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_current = self._is_at(path, descriptor)
                if is_current:
                    text = f"{os.getpid()}\n".encode()
                    with suppress(OSError):  # on a full disk the lock holds without its text
                        os.pwrite(descriptor, text, 0)
                        os.ftruncate(descriptor, len(text))
            except BlockingIOError:
                text = os.pread(descriptor, _LOCK_TEXT_BYTES_MAX, 0)
                os.close(descriptor)
                raise lock_taken_error(str(self.root / path), text) from None
            except BaseException:
                os.close(descriptor)
                raise
            if is_current:
                return LocalLock(descriptor)
            os.close(descriptor)  # the file was replaced meanwhile: lock the new one

    def free_bytes(self) -> int:
        """Return the free space for users other than root, in bytes."""
        status = os.statvfs(self.root)
        return status.f_bavail * status.f_frsize

    # --- name resolution

    def _is_at(self, path: str, descriptor: int) -> bool:
        parent, name = file_parts(path)
        try:
            with self._directory(parent) as directory:
                status = os.stat(name, dir_fd=directory, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return os.path.samestat(status, os.fstat(descriptor))

    def _open(self, path: str, flags: int) -> int:
        parent, name = file_parts(path)
        with self._directory(parent) as directory, self._with_filename([*parent, name]):
            # Without O_NONBLOCK, opening a pipe instead of a file would wait for its other end.
            flags |= os.O_NOFOLLOW | os.O_NONBLOCK
            descriptor = os.open(name, flags, _FILE_MODE, dir_fd=directory)
        try:
            self._require_file(os.fstat(descriptor), [*parent, name])
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    @contextmanager
    def _directory(self, parts: Sequence[str]) -> Iterator[int]:
        descriptor = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY)
        try:
            for depth in range(len(parts)):
                descriptor = self._open_subdirectory(descriptor, parts[: depth + 1])
            yield descriptor
        finally:
            os.close(descriptor)

    def _open_subdirectory(self, parent: int, parts: Sequence[str]) -> int:
        """Open the last of these directories from its open parent, and close the parent."""
        with self._with_filename(parts):
            status = os.stat(parts[-1], dir_fd=parent, follow_symlinks=False)
            self._reject_link(status, parts)
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
            child = os.open(parts[-1], flags, dir_fd=parent)
        os.close(parent)
        return child

    def _make_root(self) -> None:
        missing = []
        directory = self.root.absolute()
        while not directory.is_dir():
            missing.append(directory)
            directory = directory.parent
        for directory in reversed(missing):
            with suppress(FileExistsError):
                directory.mkdir(_DIRECTORY_MODE)
            parent = os.open(directory.parent, os.O_RDONLY | os.O_DIRECTORY)
            try:
                _sync(parent)
            finally:
                os.close(parent)

    def _require_file(self, status: os.stat_result, parts: Sequence[str]) -> None:
        self._reject_link(status, parts)
        name = str(self.root.joinpath(*parts))
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), name)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "is not a regular file: move it out of the data directory", name)

    def _reject_link(self, status: os.stat_result, parts: Sequence[str]) -> None:
        if stat.S_ISLNK(status.st_mode):
            text = "is a symbolic link, which the data directory must not hold: replace it by its target"
            raise OSError(errno.ELOOP, text, str(self.root.joinpath(*parts)))

    def _with_filename(self, parts: Sequence[str]) -> _ErrorFilename:
        return _ErrorFilename(str(self.root.joinpath(*parts)))


class _ErrorFilename:
    """Puts the full path into errors, since the system knows only a descriptor or the last name."""

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
        fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)  # on macOS, fsync leaves the bytes in the drive's cache
    else:
        os.fsync(descriptor)


def _sync_file(descriptor: int) -> None:
    """Sync the bytes and the size of a file, but not its times."""
    if sys.platform == "linux":
        os.fdatasync(descriptor)
    else:
        _sync(descriptor)


if TYPE_CHECKING:

    def _conforms(disk: LocalDisk, file: LocalFile, lock: LocalLock) -> tuple[Disk, File, Lock]:
        return disk, file, lock
