"""A false disk behind the disk port: it crashes, tears, forgets and fails when told to, the same for a seed.

A process works on a SimDisk until it ends. `kill()` is what its successor finds after kill -9, `crash()`
what it may find after a power cut; neither changes the disk it is called on, so that one moment can be
looked at under many seeds. Calls of the port are numbered from 1 and each can be made to fail, or to be
the last one. `struck` counts what happened, over all disks that came out of each other: a test of a fault
that never struck proves nothing. One thread at a time.
"""

from __future__ import annotations

import errno
from contextlib import suppress
from random import Random
from typing import TYPE_CHECKING

from delta_prop_broker.local_disk import file_parts, in_use, path_parts
from delta_prop_simulations.disk_faults import CHANGING, Call, Faults, SimCrash, When, disk_error, nth
from delta_prop_simulations.disk_media import SECTOR, Change, DirectoryMedia, FileMedia, cuts, names_after

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Buffer

    from delta_prop_broker.disk import Disk, File, Lock

Node = FileMedia | DirectoryMedia
__all__ = ["CHANGING", "Call", "SimCrash", "SimDisk", "SimFile", "SimLock", "When", "nth"]

_ENDLESS_BYTES = 1 << 50


class SimDisk(Faults):
    """The disk of one machine. With `capacity_bytes`, files fill it by their length, holes too."""

    name = "facts"

    def __init__(self, seed: int = 0, *, capacity_bytes: int | None = None) -> None:
        self.capacity_bytes = capacity_bytes
        super().__init__(Random(seed))
        self._process = 1
        self._root = DirectoryMedia()
        self._used = 0
        self._changes = 0
        self._locked: dict[FileMedia, int] = {}

    # --- faults now

    def crash(self, seed: int | None = None) -> SimDisk:
        """The disk as it may be found after a power cut now; each seed finds it in another way."""
        chance = Random(self.chance.getrandbits(64) if seed is None else seed)
        directories = self._all_directories()
        kept = cuts(directories, chance)
        files: dict[int, FileMedia] = {}

        def found(node: Node) -> Node:
            if isinstance(node, FileMedia):
                if id(node) not in files:
                    files[id(node)] = node.crashed(chance, self.struck)
                return files[id(node)]
            names = {name: found(below) for name, below in names_after(node, kept[id(node)]).items()}
            return DirectoryMedia(names, dict(names))

        for one in directories:
            self.struck["names kept"] += kept[id(one)]
            self.struck["names lost"] += len(one.changes) - kept[id(one)]
        self.struck["crash"] += 1
        return self._successor(found(self._root), chance)

    def kill(self) -> SimDisk:
        """The disk as the next process finds it after kill -9: a copy, whose page cache is all there."""
        directories = {id(one): DirectoryMedia() for one in self._all_directories()}
        files: dict[int, FileMedia] = {}

        def copied(node: Node) -> Node:
            if isinstance(node, DirectoryMedia):
                return directories[id(node)]
            if id(node) not in files:
                files[id(node)] = node.copy()
            return files[id(node)]

        for one in self._all_directories():
            new = directories[id(one)]
            new.names = {name: copied(node) for name, node in one.names.items()}
            new.stored = {name: copied(node) for name, node in one.stored.items()}
            for change in one.changes:
                names = {name: node and copied(node) for name, node in change.names.items()}
                other = None if change.other is None else directories[id(change.other)]
                new.changes.append(Change(change.number, names, other))
        self.struck["kill"] += 1
        new_disk = self._successor(directories[id(self._root)], Random(self.chance.getrandbits(64)))
        new_disk._changes = self._changes
        return new_disk

    def flip(self, path: str, at: int | None = None, bit: int | None = None) -> tuple[int, int]:
        """Turn one bit of a file over, on the media and for reads; which one it was. Drawn by default."""
        file = self._file(path)
        if not file.cached:
            raise ValueError(f"{path} is empty: it has no bit to flip")
        at = self.chance.randrange(len(file.cached)) if at is None else at
        bit = self.chance.randrange(8) if bit is None else bit
        file.flip(at, bit)
        self.struck["flip"] += 1
        return at, bit

    def evict(self, path: str) -> None:
        """Let the cache forget what is clean, so that reads see what the media have."""
        self._file(path).evict()

    # --- looking, which counts as no call

    def peek(self, path: str) -> bytes:
        """What a file holds now, as reads see it."""
        return bytes(self._file(path).cached)

    def paths(self) -> list[str]:
        """All files, sorted."""
        return sorted(_paths(self._root, ""))

    def put(self, path: str, content: bytes) -> None:
        """Place a file that is on stable storage with all its directories, as if it had always been there."""
        above, name = file_parts(path)
        directory = self._root
        for part in above:
            below = directory.names.setdefault(part, DirectoryMedia())
            assert isinstance(below, DirectoryMedia)
            directory.stored[part] = directory = below
        file = FileMedia(content)
        file.links = 1
        self._used += len(content)
        self._unlink(directory.names.get(name))
        directory.names[name] = directory.stored[name] = file

    @property
    def used_bytes(self) -> int:
        """The length of all files together, of those that are open though removed, too."""
        return self._used

    # --- the port

    def open(self, path: str, *, create: bool = False, read_only: bool = False) -> SimFile:
        """Open a file; with `create` make it, where there is none."""
        if create and read_only:
            raise ValueError("a file to be made cannot be opened read-only: choose one")
        file_parts(path)

        def effect() -> SimFile:
            return SimFile(self, self._file(path, create=create), path, read_only)

        return self.do("open", path, effect)

    def list(self, path: str) -> list[str]:
        """The names in a directory, sorted; none where there is no such directory."""
        parts = path_parts(path)

        def effect() -> list[str]:
            try:
                return sorted(self._directory(parts).names)
            except FileNotFoundError:
                return []

        return self.do("list", path, effect)

    def make_directory(self, path: str) -> None:
        """Make a directory, and those above it, where they are not there yet. The root is always there."""
        parts = path_parts(path)

        def effect() -> None:
            directory = self._root
            for depth, part in enumerate(parts):
                if part not in directory.names:
                    self._change(directory, {part: DirectoryMedia()})
                directory = self._directory(parts[: depth + 1])

        self.do("make_directory", path, effect)

    def rename(self, old: str, new: str) -> None:
        """Give a file another name, in place of what had that name."""
        (old_above, old_name), (new_above, new_name) = file_parts(old), file_parts(new)

        def effect() -> None:
            source, target = self._directory(old_above), self._directory(new_above)
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
        """Remove a file."""
        above, name = file_parts(path)

        def effect() -> None:
            file = self._file(path)
            self._change(self._directory(above), {name: None})
            self._unlink(file)

        self.do("remove", path, effect)

    def sync_directory(self, path: str) -> None:
        """Return when the names in a directory are on stable storage."""
        parts = path_parts(path)

        def failing() -> None:
            with suppress(OSError):
                self.struck["names lost by sync"] += self._directory(parts).fail_sync(self.chance)

        self.do("sync_directory", path, lambda: self._directory(parts).sync(), failing=failing)

    def lock(self, path: str) -> SimLock:
        """Take the directory for this process, by a file at `path`."""
        file_parts(path)

        def effect() -> SimLock:
            file = self._file(path, create=True)
            if file in self._locked:
                raise in_use(path, str(self._locked[file]).encode())
            self._locked[file] = self._process
            self._resize(file, 0)
            self._write(file, 0, f"{self._process}\n".encode())
            return SimLock(self, file)

        return self.do("lock", path, effect)

    def free_bytes(self) -> int:
        """How much room is left; very much where no capacity was given."""
        return self.do("free_bytes", "", self._room)

    # --- state

    def _successor(self, root: Node, chance: Random) -> SimDisk:
        assert isinstance(root, DirectoryMedia)
        new = SimDisk(chance.getrandbits(64), capacity_bytes=self.capacity_bytes)
        new.struck, new._process, new._root = self.struck, self._process + 1, root
        for file in _files(root):
            file.links += 1
            new._used += file.size
        return new

    def _all_directories(self) -> Sequence[DirectoryMedia]:
        """Every directory that is there, or may be after a crash."""
        found = {id(self._root): self._root}
        waiting = [self._root]
        while waiting:
            one = waiting.pop()
            nodes = [*one.names.values(), *one.stored.values()]
            nodes += [node for change in one.changes for node in change.names.values() if node is not None]
            for node in nodes:
                if isinstance(node, DirectoryMedia) and id(node) not in found:
                    found[id(node)] = node
                    waiting.append(node)
        return list(found.values())

    def _directory(self, parts: Sequence[str]) -> DirectoryMedia:
        directory = self._root
        for depth, part in enumerate(parts):
            below = directory.names.get(part)
            if not isinstance(below, DirectoryMedia):
                code = errno.ENOENT if below is None else errno.ENOTDIR
                raise disk_error(code, "/".join(parts[: depth + 1]))
            directory = below
        return directory

    def _file(self, path: str, *, create: bool = False) -> FileMedia:
        above, name = file_parts(path)
        directory = self._directory(above)
        found = directory.names.get(name)
        if isinstance(found, DirectoryMedia):
            raise disk_error(errno.EISDIR, path)
        if found is None:
            if not create:
                raise disk_error(errno.ENOENT, path)
            found = FileMedia()
            found.links = 1
            self._change(directory, {name: found})
        return found

    def _change(
        self,
        directory: DirectoryMedia,
        names: dict[str, Node | None],
        other: DirectoryMedia | None = None,
        other_names: dict[str, Node | None] | None = None,
    ) -> None:
        self._changes += 1
        directory.change(Change(self._changes, names, other))
        if other is not None:
            other.change(Change(self._changes, other_names or {}, directory))

    def _unlink(self, node: Node | None) -> None:
        if isinstance(node, FileMedia):
            node.links -= 1
            self._forget(node)

    def _forget(self, file: FileMedia) -> None:
        if not file.links and not file.opened:
            self._used -= file.size

    def _room(self) -> int:
        if self.capacity_bytes is None:
            return _ENDLESS_BYTES
        return max(0, self.capacity_bytes - self._used)

    def _write(self, file: FileMedia, at: int, data: bytes) -> None:
        before = file.size
        file.write(at, data)
        self._used += file.size - before

    def _resize(self, file: FileMedia, size: int) -> None:
        self._used += size - file.size
        file.truncate(size)


class SimFile:
    """One open file of a false disk."""

    def __init__(self, disk: SimDisk, file: FileMedia, path: str, read_only: bool) -> None:
        self._disk = disk
        self._file: FileMedia | None = file
        self._path = path
        self._read_only = read_only
        file.opened += 1

    def read(self, at: int, size: int) -> bytes:
        """Up to `size` bytes from `at` on; fewer only where the file ends."""

        def effect() -> bytes:
            file = self._open(at)
            found = bytes(memoryview(file.cached)[at : at + size])
            return found + bytes(max(0, min(at + size, file.allocated) - at - len(found)))

        return self._disk.do("read", self._path, effect, at=at, size=size)

    def write(self, at: int, parts: Sequence[Buffer]) -> int:
        """Write these buffers one behind the other from `at` on; how many bytes were taken."""
        data = b"".join(parts)
        disk = self._disk

        def effect() -> int:
            file = self._writable(at, errno.EBADF)
            taken = min(len(data), file.size + disk._room() - at)
            if data and taken <= 0:
                disk.struck["no room"] += 1
                raise disk_error(errno.ENOSPC, self._path)
            disk.struck["short for want of room"] += taken < len(data)
            taken = self._shortened(taken)
            disk._write(file, at, data[:taken])
            return taken

        def partly() -> None:
            if self._file is not None and not self._read_only and at >= 0:
                taken = min(len(data), self._file.size + disk._room() - at)
                disk._write(self._file, at, data[: disk.chance.randint(0, max(0, taken))])

        return disk.do("write", self._path, effect, at=at, size=len(data), partly=partly, failing=partly)

    def sync(self) -> None:
        """Return when everything written is on stable storage."""
        disk = self._disk

        def effect() -> None:
            file = self._open(0)
            lose, misdirect = disk.due("lose"), disk.due("misdirect")
            dirty = [sector for sector in sorted(file.dirty) if sector * SECTOR < len(file.cached)]
            count = -(-len(file.cached) // SECTOR)
            if lose is not None and dirty:
                file.sync(disk.chance.sample(dirty, disk.chance.randint(1, len(dirty))))
                disk.struck["writes lost"] += 1
            elif misdirect is not None and dirty and count > 1:
                sector = disk.chance.choice(dirty)
                file.misdirect(sector, (sector + disk.chance.randint(1, count - 1)) % count)
                disk.struck["writes misdirected"] += 1
            else:
                file.sync()

        def failing() -> None:
            if self._file is not None:
                disk.struck["sectors lost by sync"] += self._file.fail_sync(disk.chance)

        disk.do("sync", self._path, effect, failing=failing)

    def size(self) -> int:
        """How long the file is, in bytes."""
        return self._disk.do("size", self._path, lambda: self._open(0).size)

    def truncate(self, size: int) -> None:
        """Cut the file, or lengthen it with zeros."""

        def effect() -> None:
            file = self._writable(size, errno.EINVAL)
            if size - file.size > self._disk._room():
                self._disk.struck["no room"] += 1
                raise disk_error(errno.ENOSPC, self._path)
            self._disk._resize(file, size)

        self._disk.do("truncate", self._path, effect, size=size)

    def allocate(self, size: int) -> None:
        """Take room for so many bytes; the file is at least that long then."""

        def effect() -> None:
            file = self._writable(size, errno.EBADF)
            if size - file.size > self._disk._room():
                self._disk.struck["no room"] += 1
                raise disk_error(errno.ENOSPC, self._path)
            self._disk._used += max(0, size - file.size)
            file.allocated = max(file.allocated, size)

        self._disk.do("allocate", self._path, effect, size=size)

    def descriptor(self) -> int | None:
        """None: the system knows nothing of it."""
        return None

    def close(self) -> None:
        """Let go of it. A second time does nothing."""
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

    def _writable(self, at: int, refusal: int) -> FileMedia:
        file = self._open(at)
        if self._read_only:
            raise disk_error(refusal, self._path)
        return file

    def _shortened(self, taken: int) -> int:
        rule = self._disk.due("shorten")
        if rule is None or taken < 2:
            return taken
        fewer = self._disk.chance.randint(1, taken - 1) if rule.value is None else min(rule.value, taken)
        self._disk.struck["short writes"] += fewer < taken
        return fewer


class SimLock:
    """A lock of a process on a false disk."""

    def __init__(self, disk: SimDisk, file: FileMedia) -> None:
        self._disk = disk
        self._file: FileMedia | None = file

    def release(self) -> None:
        """Let others have it. A second time does nothing."""
        file, self._file = self._file, None
        if file is not None and not self._disk.is_off:
            self._disk._resize(file, 0)
            del self._disk._locked[file]


def _paths(directory: DirectoryMedia, above: str) -> list[str]:
    found = []
    for name, node in directory.names.items():
        found += [above + name] if isinstance(node, FileMedia) else _paths(node, f"{above}{name}/")
    return found


def _files(directory: DirectoryMedia) -> list[FileMedia]:
    found = []
    for node in directory.names.values():
        found += [node] if isinstance(node, FileMedia) else _files(node)
    return found


if TYPE_CHECKING:

    def _conforms(disk: SimDisk, file: SimFile, lock: SimLock) -> tuple[Disk, File, Lock]:
        return disk, file, lock
