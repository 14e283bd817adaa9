"""A fake disk behind the disk port. On request it crashes, fails, and tears or loses writes, as its seed
determines.

A process works on a SimDisk until it ends. `kill()` returns the disk that the next process finds after
SIGKILL, `crash()` a disk that it may find after a power cut. Neither changes the original disk, so one state
can be examined with many seeds. Calls of the port are numbered from 1, and each can be made to fail, or to be
the last one before a crash. `fault_counts` counts the faults that occurred, for all disks derived from one: a
test of a fault that never occurred proves nothing. Not thread-safe.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from contextlib import suppress
from random import Random
from typing import TYPE_CHECKING

from delta_prop_broker.local_disk import file_parts, lock_taken_error, path_parts
from delta_prop_simulations.disk_faults import CHANGING, Call, Faults, SimCrash, When, disk_error, nth
from delta_prop_simulations.disk_media import (
    SECTOR,
    Change,
    DirectoryMedia,
    FileMedia,
    draw_surviving_changes,
    names_after,
)

if TYPE_CHECKING:
    from typing_extensions import Buffer


Node = FileMedia | DirectoryMedia
__all__ = ["CHANGING", "Call", "SimCrash", "SimDisk", "SimFile", "SimLock", "When", "nth"]

_UNLIMITED_BYTES = 1 << 50


class SimDisk(Faults):
    """The disk of one machine. `capacity_bytes`: the maximum total length of all files, holes included."""

    name = "facts"

    def __init__(self, seed: int = 0, *, capacity_bytes: int | None = None) -> None:
        self.capacity_bytes = capacity_bytes
        super().__init__(Random(seed))
        self._process = 1
        self._root = DirectoryMedia()
        self._used_bytes = 0
        self._change_count = 0
        self._locked: dict[FileMedia, int] = {}

    # --- immediate faults

    def crash(self, seed: int | None = None) -> SimDisk:
        """Return the disk as a process may find it after a power cut now; each seed draws another state."""
        rng = Random(self.rng.getrandbits(64) if seed is None else seed)
        directories = self._all_directories()
        survivors = draw_surviving_changes(directories, rng)
        files: dict[int, FileMedia] = {}

        def surviving_node(node: Node) -> Node:
            if isinstance(node, FileMedia):
                if id(node) not in files:
                    files[id(node)] = node.after_crash(rng, self.fault_counts)
                return files[id(node)]
            names = {
                name: surviving_node(child) for name, child in names_after(node, survivors[id(node)]).items()
            }
            return DirectoryMedia(names, dict(names))

        for directory in directories:
            self.fault_counts["names kept"] += survivors[id(directory)]
            self.fault_counts["names lost"] += len(directory.changes) - survivors[id(directory)]
        self.fault_counts["crash"] += 1
        return self._successor(surviving_node(self._root), rng)

    def kill(self) -> SimDisk:
        """Return the disk as the next process finds it after SIGKILL: a copy, including the page cache."""
        directories = {id(one): DirectoryMedia() for one in self._all_directories()}
        files: dict[int, FileMedia] = {}

        def copy_of(node: Node) -> Node:
            if isinstance(node, DirectoryMedia):
                return directories[id(node)]
            if id(node) not in files:
                files[id(node)] = node.copy()
            return files[id(node)]

        for one in self._all_directories():
            new = directories[id(one)]
            new.names = {name: copy_of(node) for name, node in one.names.items()}
            new.stored = {name: copy_of(node) for name, node in one.stored.items()}
            for change in one.changes:
                names = {name: node and copy_of(node) for name, node in change.names.items()}
                other = None if change.other is None else directories[id(change.other)]
                new.changes.append(Change(change.number, names, other))
        self.fault_counts["kill"] += 1
        new_disk = self._successor(directories[id(self._root)], Random(self.rng.getrandbits(64)))
        new_disk._change_count = self._change_count
        return new_disk

    def flip(self, path: str, at: int | None = None, bit: int | None = None) -> tuple[int, int]:
        """Flip one bit of a file, on the media and for reads; return its byte and bit, drawn if not given."""
        file = self._file(path)
        if not file.cached:
            raise ValueError(f"{path}: empty: choose a file with at least one byte")
        at = self.rng.randrange(len(file.cached)) if at is None else at
        bit = self.rng.randrange(8) if bit is None else bit
        file.flip(at, bit)
        self.fault_counts["flip"] += 1
        return at, bit

    def evict(self, path: str) -> None:
        """Drop the synced data of a file from the cache, so that reads see the media."""
        self._file(path).evict()

    # --- inspection and preparation, which do not count as calls

    def peek(self, path: str) -> bytes:
        """Return the current content of a file, as reads see it."""
        return bytes(self._file(path).cached)

    def paths(self) -> list[str]:
        """Return the paths of all files, sorted."""
        return sorted(_paths(self._root, ""))

    def put(self, path: str, content: bytes) -> None:
        """Create a file on stable storage, with all its directories, as if it had always been there."""
        parents, name = file_parts(path)
        directory = self._root
        for part in parents:
            child = directory.names.setdefault(part, DirectoryMedia())
            assert isinstance(child, DirectoryMedia)
            directory.stored[part] = directory = child
        file = FileMedia(content)
        file.links = 1
        self._used_bytes += len(content)
        self._unlink(directory.names.get(name))
        directory.names[name] = directory.stored[name] = file

    @property
    def used_bytes(self) -> int:
        """The total length of all files, including removed ones that are still open."""
        return self._used_bytes

    # --- the port

    def open(self, path: str, *, create: bool = False, read_only: bool = False) -> SimFile:
        if create and read_only:
            raise ValueError("create, read_only: both are set: choose one")
        file_parts(path)

        def effect() -> SimFile:
            return SimFile(self, self._file(path, create=create), path, read_only)

        return self.do("open", path, effect)

    def list(self, path: str) -> list[str]:
        parts = path_parts(path)

        def effect() -> list[str]:
            try:
                return sorted(self._directory(parts).names)
            except FileNotFoundError:
                return []

        return self.do("list", path, effect)

    def make_directory(self, path: str) -> None:
        parts = path_parts(path)

        def effect() -> None:
            directory = self._root
            for depth, part in enumerate(parts):
                if part not in directory.names:
                    self._change(directory, {part: DirectoryMedia()})
                directory = self._directory(parts[: depth + 1])

        self.do("make_directory", path, effect)

    def rename(self, old: str, new: str) -> None:
        (old_parents, old_name), (new_parents, new_name) = file_parts(old), file_parts(new)

        def effect() -> None:
            source, target = self._directory(old_parents), self._directory(new_parents)
            file = self._file(old)
            replaced = target.names.get(new_name)
            if isinstance(replaced, DirectoryMedia):
                raise disk_error(errno.EISDIR, new)
            if replaced is file:
                return
            if source is target:
                self._change(source, {old_name: None, new_name: file})
            else:
                self._change(source, {old_name: None}, target, {new_name: file})
            self._unlink(replaced)

        self.do("rename", old, effect)

    def remove(self, path: str) -> None:
        parents, name = file_parts(path)

        def effect() -> None:
            file = self._file(path)
            self._change(self._directory(parents), {name: None})
            self._unlink(file)

        self.do("remove", path, effect)

    def remove_directory(self, path: str) -> None:
        parents, name = file_parts(path)

        def effect() -> None:
            if self._directory([*parents, name]).names:
                raise disk_error(errno.ENOTEMPTY, path)
            self._change(self._directory(parents), {name: None})

        self.do("remove_directory", path, effect)

    def sync_directory(self, path: str) -> None:
        parts = path_parts(path)

        def failing() -> None:
            with suppress(OSError):
                self.fault_counts["names lost by sync"] += self._directory(parts).fail_sync(self.rng)

        self.do("sync_directory", path, lambda: self._directory(parts).sync(), failing=failing)

    def lock(self, path: str) -> SimLock:
        file_parts(path)

        def effect() -> SimLock:
            file = self._file(path, create=True)
            if file in self._locked:
                raise lock_taken_error(path, str(self._locked[file]).encode())
            self._locked[file] = self._process
            self._resize(file, 0)
            self._write(file, 0, f"{self._process}\n".encode())
            return SimLock(self, file)

        return self.do("lock", path, effect)

    def free_bytes(self) -> int:
        return self.do("free_bytes", "", self._free_capacity)

    # --- state

    def _successor(self, root: Node, rng: Random) -> SimDisk:
        assert isinstance(root, DirectoryMedia)
        new = SimDisk(rng.getrandbits(64), capacity_bytes=self.capacity_bytes)
        new.fault_counts, new._process, new._root = self.fault_counts, self._process + 1, root
        for file in _files(root):
            file.links += 1
            new._used_bytes += file.size
        return new

    def _all_directories(self) -> Sequence[DirectoryMedia]:
        """Return every directory that exists, or may exist after a crash."""
        directories = {id(self._root): self._root}
        unvisited = [self._root]
        while unvisited:
            directory = unvisited.pop()
            nodes = [*directory.names.values(), *directory.stored.values()]
            for change in directory.changes:
                nodes += [node for node in change.names.values() if node is not None]
            for node in nodes:
                if isinstance(node, DirectoryMedia) and id(node) not in directories:
                    directories[id(node)] = node
                    unvisited.append(node)
        return list(directories.values())

    def _directory(self, parts: Sequence[str]) -> DirectoryMedia:
        directory = self._root
        for depth, part in enumerate(parts):
            child = directory.names.get(part)
            if not isinstance(child, DirectoryMedia):
                code = errno.ENOENT if child is None else errno.ENOTDIR
                raise disk_error(code, "/".join(parts[: depth + 1]))
            directory = child
        return directory

    def _file(self, path: str, *, create: bool = False) -> FileMedia:
        parents, name = file_parts(path)
        directory = self._directory(parents)
        node = directory.names.get(name)
        if isinstance(node, DirectoryMedia):
            raise disk_error(errno.EISDIR, path)
        if node is None:
            if not create:
                raise disk_error(errno.ENOENT, path)
            node = FileMedia()
            node.links = 1
            self._change(directory, {name: node})
        return node

    def _change(
        self,
        directory: DirectoryMedia,
        names: dict[str, Node | None],
        other: DirectoryMedia | None = None,
        other_names: dict[str, Node | None] | None = None,
    ) -> None:
        self._change_count += 1
        directory.change(Change(self._change_count, names, other))
        if other is not None:
            other.change(Change(self._change_count, other_names or {}, directory))

    def _unlink(self, node: Node | None) -> None:
        if isinstance(node, FileMedia):
            node.links -= 1
            self._forget(node)

    def _forget(self, file: FileMedia) -> None:
        if not file.links and not file.opened:
            self._used_bytes -= file.size

    def _free_capacity(self) -> int:
        if self.capacity_bytes is None:
            return _UNLIMITED_BYTES
        return max(0, self.capacity_bytes - self._used_bytes)

    def _write(self, file: FileMedia, at: int, data: bytes) -> None:
        before = file.size
        file.write(at, data)
        self._used_bytes += file.size - before

    def _resize(self, file: FileMedia, size: int) -> None:
        self._used_bytes += size - file.size
        file.truncate(size)


class SimFile:
    """One open file of a fake disk."""

    def __init__(self, disk: SimDisk, file: FileMedia, path: str, read_only: bool) -> None:
        self._disk = disk
        self._file: FileMedia | None = file
        self._path = path
        self._read_only = read_only
        file.opened += 1

    def read(self, at: int, size: int) -> bytes:
        def effect() -> bytes:
            file = self._open(at)
            content = bytes(memoryview(file.cached)[at : at + size])
            return content + bytes(max(0, min(at + size, file.allocated) - at - len(content)))

        return self._disk.do("read", self._path, effect, at=at, size=size)

    def write(self, at: int, parts: Sequence[Buffer]) -> int:
        data = b"".join(parts)
        disk = self._disk

        def effect() -> int:
            file = self._writable(at, errno.EBADF)
            written = min(len(data), file.size + disk._free_capacity() - at)
            if data and written <= 0:
                disk.fault_counts["no room"] += 1
                raise disk_error(errno.ENOSPC, self._path)
            disk.fault_counts["short for want of room"] += written < len(data)
            written = self._shortened(written)
            disk._write(file, at, data[:written])
            return written

        def partly() -> None:
            if self._file is not None and not self._read_only and at >= 0:
                size_max = min(len(data), self._file.size + disk._free_capacity() - at)
                disk._write(self._file, at, data[: disk.rng.randint(0, max(0, size_max))])

        return disk.do("write", self._path, effect, at=at, size=len(data), partly=partly, failing=partly)

    def sync(self) -> None:
        disk = self._disk

        def effect() -> None:
            file = self._open(0)
            lose, misdirect = disk.next_rule("lose"), disk.next_rule("misdirect")
            dirty = [sector for sector in sorted(file.dirty) if sector * SECTOR < len(file.cached)]
            sector_count = -(-len(file.cached) // SECTOR)
            if lose is not None and dirty:
                file.sync(disk.rng.sample(dirty, disk.rng.randint(1, len(dirty))))
                disk.fault_counts["writes lost"] += 1
            elif misdirect is not None and dirty and sector_count > 1:
                sector = disk.rng.choice(dirty)
                file.misdirect(sector, (sector + disk.rng.randint(1, sector_count - 1)) % sector_count)
                disk.fault_counts["writes misdirected"] += 1
            else:
                file.sync()

        def failing() -> None:
            if self._file is not None:
                disk.fault_counts["sectors lost by sync"] += self._file.fail_sync(disk.rng)

        disk.do("sync", self._path, effect, failing=failing)

    def size(self) -> int:
        return self._disk.do("size", self._path, lambda: self._open(0).size)

    def truncate(self, size: int) -> None:
        def effect() -> None:
            self._disk._resize(self._growable(size, errno.EINVAL), size)

        self._disk.do("truncate", self._path, effect, size=size)

    def allocate(self, size: int) -> None:
        def effect() -> None:
            file = self._growable(size, errno.EBADF)
            self._disk._used_bytes += max(0, size - file.size)
            file.allocated = max(file.allocated, size)

        self._disk.do("allocate", self._path, effect, size=size)

    def descriptor(self) -> int | None:
        """Return None: the operating system does not know the file."""
        return None

    def close(self) -> None:
        """Close the file. A second call does nothing."""
        file, self._file = self._file, None
        if file is not None:
            file.opened -= 1
            self._disk._forget(file)

    def _open(self, at: int) -> FileMedia:
        if self._file is None:
            raise disk_error(errno.EBADF, self._path)
        if at < 0:
            raise disk_error(errno.EINVAL, self._path)
        return self._file

    def _writable(self, at: int, read_only_error: int) -> FileMedia:
        file = self._open(at)
        if self._read_only:
            raise disk_error(read_only_error, self._path)
        return file

    def _growable(self, size: int, read_only_error: int) -> FileMedia:
        """Return the file, which has room to grow to this size."""
        file = self._writable(size, read_only_error)
        if size - file.size > self._disk._free_capacity():
            self._disk.fault_counts["no room"] += 1
            raise disk_error(errno.ENOSPC, self._path)
        return file

    def _shortened(self, size: int) -> int:
        rule = self._disk.next_rule("shorten")
        if rule is None or size < 2:
            return size
        shortened = self._disk.rng.randint(1, size - 1) if rule.value is None else min(rule.value, size)
        self._disk.fault_counts["short writes"] += shortened < size
        return shortened


class SimLock:
    """A process's lock on a fake disk."""

    def __init__(self, disk: SimDisk, file: FileMedia) -> None:
        self._disk = disk
        self._file: FileMedia | None = file

    def release(self) -> None:
        """Release the lock. A second call does nothing."""
        file, self._file = self._file, None
        if file is not None and not self._disk.is_off:
            self._disk._resize(file, 0)
            del self._disk._locked[file]


def _paths(directory: DirectoryMedia, prefix: str) -> list[str]:
    paths = []
    for name, node in directory.names.items():
        paths += [prefix + name] if isinstance(node, FileMedia) else _paths(node, f"{prefix}{name}/")
    return paths


def _files(directory: DirectoryMedia) -> list[FileMedia]:
    files = []
    for node in directory.names.values():
        files += [node] if isinstance(node, FileMedia) else _files(node)
    return files
