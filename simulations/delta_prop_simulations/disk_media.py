"""The media of a fake disk: for files and directories, their state in the page cache and on the media.

A file reaches the media by sectors of 512 bytes, aligned to its start; a sector is written completely or not
at all. Until a sync the media may hold any of a sector's contents since the last one, sector by sector, and
any length between the shortest and the longest since then; unwritten bytes read as zeros. The changes of a
directory's names reach the media in their order: after a crash a prefix of these changes is on the media. A
file that was moved is in its old or its new directory, never in both or none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from random import Random

SECTOR = 512
_VERSIONS_MAX = 8
"""Maximum number of older contents that are stored per sector between two syncs."""


class FileMedia:
    """One file. `cached` is what reads see; `stored` and `stored_size` are certainly on the media."""

    __slots__ = (
        "_older",
        "_shared",
        "_size_high",
        "_size_low",
        "allocated",
        "allocated_stored",
        "cached",
        "dirty",
        "links",
        "opened",
        "stored",
        "stored_size",
    )

    def __init__(self, content: bytes | bytearray = b"") -> None:
        self.cached = self.stored = content
        self.stored_size = len(content)
        self._size_low = self._size_high = len(content)  # the shortest and longest length since the last sync
        self._shared = True  # `cached` and `stored` may be one object, and are copied before a change
        self.dirty: set[int] = set()
        self._older: dict[int, list[bytes]] = {}  # older contents of dirty sectors since the last sync
        self.links = self.opened = 0  # the number of its names, and of its open `SimFile`s
        self.allocated = self.allocated_stored = 0  # lengths of allocated space, which has no bytes here

    def copy(self) -> FileMedia:
        """Return a copy; it is cheap until one of the two is changed."""
        self._shared = True
        new = FileMedia.__new__(FileMedia)
        new.cached, new.stored, new.stored_size = self.cached, self.stored, self.stored_size
        new._size_low, new._size_high, new._shared = self._size_low, self._size_high, True
        new.dirty = self.dirty.copy()
        new._older = {sector: versions.copy() for sector, versions in self._older.items()}
        new.links = new.opened = 0
        new.allocated, new.allocated_stored = self.allocated, self.allocated_stored
        return new

    @property
    def size(self) -> int:
        """The length of the file, or of its allocated space if that is longer."""
        return max(len(self.cached), self.allocated)

    def _own(self) -> tuple[bytearray, bytearray]:
        if self._shared:
            self.cached, self.stored, self._shared = bytearray(self.cached), bytearray(self.stored), False
        assert isinstance(self.cached, bytearray)
        assert isinstance(self.stored, bytearray)
        return self.cached, self.stored

    def write(self, at: int, data: bytes | memoryview) -> None:
        """Write into the page cache; a gap after the file's end is filled with zeros."""
        if not data:
            return
        cached, _ = self._own()
        end = at + len(data)
        self._touch(range(at // SECTOR, -(-end // SECTOR)))  # a gap before `at` reads as zeros in any case
        if at > len(cached):
            cached.extend(bytes(at - len(cached)))
        cached[at:end] = data
        self._size_high = max(self._size_high, len(cached))

    def truncate(self, size: int) -> None:
        """Truncate, or extend with zeros."""
        self.allocated = min(self.allocated, size)
        cached, _ = self._own()
        ends = sorted((size, len(cached)))
        self._touch(range(ends[0] // SECTOR, -(-ends[1] // SECTOR)))
        if size < len(cached):
            del cached[size:]
        else:
            cached.extend(bytes(size - len(cached)))
        self._size_low, self._size_high = min(self._size_low, size), max(self._size_high, size)

    def _touch(self, sectors: range) -> None:
        for sector in self.dirty.intersection(sectors):
            versions = self._older.setdefault(sector, [])
            versions.append(bytes(self.cached[sector * SECTOR : (sector + 1) * SECTOR]))
            if len(versions) > _VERSIONS_MAX:
                del versions[0]
        self.dirty.update(sectors)

    # --- actions of the machine

    def sync(self, lost: Iterable[int] = ()) -> None:
        """Write all dirty sectors to the media, except those that are silently lost."""
        self.allocated_stored = self.allocated
        _, stored = self._own()
        self._store(stored, self.dirty.difference(lost))
        self._clean(len(self.cached))

    def fail_sync(self, rng: Random) -> int:
        """Write some dirty sectors to the media and lose the others; afterwards all sectors count as clean.

        In half of the cases, as drawn, the cache is dropped, so that reads see the loss at once; else only a
        crash shows it. Returns the number of lost sectors.
        """
        _, stored = self._own()
        lost = _draw_some(sorted(self.dirty), rng)
        self._store(stored, self.dirty.difference(lost))
        self._clean(self.stored_size if rng.random() < 0.5 else len(self.cached))
        if rng.random() < 0.5:
            self.evict()
        return len(lost)

    def evict(self) -> None:
        """Drop clean sectors from the cache, so that the next reads see the media."""
        cached, stored = self._own()
        clean = bytearray(_resized(stored, len(cached)))
        for sector in self.dirty:
            part = slice(sector * SECTOR, (sector + 1) * SECTOR)
            clean[part] = cached[part]
        self.cached = clean

    def misdirect(self, sector: int, target: int) -> None:
        """Write a dirty sector to the media at the position of another one, whose content is lost."""
        cached, stored = self._own()
        at, end = target * SECTOR, min((target + 1) * SECTOR, len(cached))
        self.sync(lost=[sector])
        _fit(stored, len(cached))
        stored[at:end] = _resized(cached[sector * SECTOR : (sector + 1) * SECTOR], end - at)

    def flip(self, at: int, bit: int) -> None:
        """Flip one bit on the media and in the cache, so that reads see it."""
        for content in self._own():
            if at < len(content):
                content[at] ^= 1 << bit

    def after_crash(self, rng: Random, fault_counts: Counter[str]) -> FileMedia:
        """Return the file as a process may find it after a crash."""
        file = self._new_after_crash(rng, fault_counts)
        file.allocated = self.allocated_stored
        if self.allocated != self.allocated_stored:
            file.allocated = rng.choice((self.allocated, self.allocated_stored))
        file.allocated_stored = file.allocated
        return file

    def _new_after_crash(self, rng: Random, fault_counts: Counter[str]) -> FileMedia:
        if not self.dirty and self._size_low == self._size_high == self.stored_size:
            return self._as_stored()
        size = self._draw_size(rng)
        content = bytearray(_resized(self.stored, size))
        share = rng.choice((0.0, 1.0, rng.random(), rng.random()))
        survivor_count = stale_count = 0
        dirty = sorted(self.dirty)
        for sector in dirty:
            at = sector * SECTOR
            if at >= size or rng.random() >= share:
                continue
            versions = self._older.get(sector, [])
            if at < len(self.cached):
                versions = [*versions, bytes(self.cached[at : at + SECTOR])]
            if not versions:
                continue
            # If all dirty sectors survive, they have their newest content; else the newest content is as
            # likely as all older ones together.
            newest = share == 1.0 or rng.random() < 0.5
            pick = len(versions) - 1 if newest else rng.randrange(len(versions))
            stale_count += pick < len(versions) - 1
            survivor_count += 1
            content[at : at + SECTOR] = _resized(versions[pick], min(SECTOR, size - at))
        fault_counts["sectors kept"] += survivor_count
        fault_counts["sectors lost"] += len(dirty) - survivor_count
        fault_counts["sectors stale"] += stale_count
        fault_counts["torn"] += 0 < survivor_count < len(dirty)
        fault_counts["size between"] += size not in (self.stored_size, len(self.cached))
        return FileMedia(content)

    def _draw_size(self, rng: Random) -> int:
        choice = rng.randrange(5)
        if choice < 2:
            return len(self.cached)
        if choice == 2:
            return self.stored_size
        size = rng.randint(self._size_low, self._size_high)
        return size if choice == 3 else max(self._size_low, size // SECTOR * SECTOR)

    def _as_stored(self) -> FileMedia:
        if len(self.stored) != self.stored_size:
            return FileMedia(_resized(self.stored, self.stored_size))
        self._shared = True
        return FileMedia(self.stored)

    def _store(self, stored: bytearray, sectors: set[int]) -> None:
        """Copy sectors from the cache to the media, and resize the stored content to the file's length."""
        cached = self.cached
        _fit(stored, len(cached))
        if len(sectors) == -(-len(cached) // SECTOR) > 0 and max(sectors) < len(sectors):
            stored[:] = cached
            return
        for sector in sectors:
            part = slice(sector * SECTOR, min((sector + 1) * SECTOR, len(cached)))
            if part.start < part.stop:
                stored[part] = cached[part]

    def _clean(self, stored_size: int) -> None:
        self.stored_size = self._size_low = self._size_high = stored_size
        self._size_low = min(self._size_low, len(self.cached))
        self._size_high = max(self._size_high, len(self.cached))
        self.dirty.clear()
        self._older.clear()


@dataclass(slots=True, eq=False)
class Change:
    """One change of a directory's names, not on the media yet. `names`: new nodes; None removes a name."""

    number: int
    names: dict[str, FileMedia | DirectoryMedia | None]
    other: DirectoryMedia | None = None  # the directory with the other half of the same change


@dataclass(slots=True, eq=False)
class DirectoryMedia:
    """One directory: `changes` lead from the `stored` names, on the media, to its current `names`."""

    names: dict[str, FileMedia | DirectoryMedia] = field(default_factory=dict)
    stored: dict[str, FileMedia | DirectoryMedia] = field(default_factory=dict)
    changes: list[Change] = field(default_factory=list)

    def change(self, change: Change) -> None:
        """Change names; a crash before the next sync may lose the change."""
        _apply(self.names, change)
        self.changes.append(change)

    def sync(self, until: int | None = None) -> None:
        """Write the changes up to number `until`, or all, to the media; a move in both directories."""
        count = len(self.changes)
        if until is not None:
            count = sum(change.number <= until for change in self.changes)
        synced, self.changes = self.changes[:count], self.changes[count:]
        for change in synced:
            _apply(self.stored, change)
        for change in synced:
            if change.other is not None:
                change.other.sync(change.number)

    def fail_sync(self, rng: Random) -> int:
        """Write some changes to the media and silently lose the others; return the number of lost changes."""
        count = rng.randint(0, len(self.changes))
        if count:
            self.sync(self.changes[count - 1].number)
        lost = 0
        # A move must not be lost in one directory only, so the changes from the first move on are not lost.
        while self.changes and self.changes[0].other is None:
            del self.changes[0]
            lost += 1
        return lost


def draw_surviving_changes(directories: Iterable[DirectoryMedia], rng: Random) -> dict[int, int]:
    """Draw how many changes of each directory, by its `id`, survive a crash; moves stay atomic."""
    directories = list(directories)
    survivors = {}
    for directory in directories:
        count = len(directory.changes)
        survivors[id(directory)] = rng.choice((0, count, rng.randint(0, count)))
    changed = True
    while changed:
        changed = False
        for directory in directories:
            for index, change in enumerate(directory.changes[: survivors[id(directory)]]):
                if change.other is not None and not _is_within(change, survivors[id(change.other)]):
                    survivors[id(directory)], changed = index, True
                    break
    return survivors


def names_after(directory: DirectoryMedia, change_count: int) -> dict[str, FileMedia | DirectoryMedia]:
    """Return the names in a directory after its first `change_count` changes have reached the media."""
    names = dict(directory.stored)
    for change in directory.changes[:change_count]:
        _apply(names, change)
    return names


def _is_within(change: Change, change_count: int) -> bool:
    """True if the other half of a move is among the first changes of its directory."""
    assert change.other is not None
    return any(other.number == change.number for other in change.other.changes[:change_count])


def _apply(names: dict[str, FileMedia | DirectoryMedia], change: Change) -> None:
    for name, node in change.names.items():
        if node is None:
            names.pop(name, None)
        else:
            names[name] = node


def _draw_some(sectors: list[int], rng: Random) -> list[int]:
    """Draw some sectors, at least one if there is any: a fault without an effect tests nothing."""
    share = rng.random()
    drawn = [sector for sector in sectors if rng.random() < share]
    return drawn or sectors[:1]


def _resized(content: bytes | bytearray, size: int) -> bytes | bytearray:
    part = content[:size]
    return part if len(part) == size else part + bytes(size - len(part))


def _fit(content: bytearray, size: int) -> None:
    if len(content) > size:
        del content[size:]
    else:
        content.extend(bytes(size - len(content)))
