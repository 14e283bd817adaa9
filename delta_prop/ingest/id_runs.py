"""Sorted runs of ids: immutable, in pages that are found by fences in memory and checked when they are read.

A run says of each id where it stood first. It lies in memory until it is written, then in a file, of which
only the fences and, within a budget, the filter stay in memory. Pure but for the file it is handed.

    pages of `page_bytes`: rows (hash, second half, offset; 24 bytes each), zeros, page number, rows, CRC32C
    fences: the hash of each page's first row, one behind the other, then the second halves
    the bits of the filter
    the trailer
"""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from delta_prop.ingest.bloom import IdFilter
from delta_prop_wire.crc import crc32c
from delta_prop_wire.errors import DeltaPropError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from delta_prop_broker.disk import File
    from delta_prop_broker.log.files.checkpoints import PartName

PAGE_BYTES = 4096
ROW_BYTES = 24
_PAGES_A_CHUNK = 64
_CHUNK_BYTES = 1 << 18
FENCE_BYTES = 16
"""What a page takes in memory."""
_KEY_BYTES = 16
_TAIL = struct.Struct("<QII")
"""Number, rows and CRC32C of a page, the last over all before it."""
_CRC_BYTES = 4
_TRAILER = struct.Struct("<8sIIQQQQdIII")
"""magic, version, bytes of a page, rows, first and last offset, capacity of the filter, its error rate,
CRC32C of the fences, of the filter, of the trailer."""
_MAGIC, _VERSION = b"dp-idrun", 1
_U64 = np.dtype("<u8")


_Page: TypeAlias = tuple[bytes, int]
"""A page, and up to where its rows reach in it."""


class RunDamaged(DeltaPropError):
    """A run, or a page of it, is not as it was written: what it holds is not known."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path


class RunFacts(NamedTuple):
    """What a run is, as its trailer says it."""

    rows: int
    first_offset: int
    last_offset: int
    filter_ids: int
    error_rate: float
    page_bytes: int

    @property
    def rows_a_page(self) -> int:
        """Ids on a full page."""
        return (self.page_bytes - _TAIL.size) // ROW_BYTES

    @property
    def pages(self) -> int:
        """Number of pages."""
        return -(-self.rows // self.rows_a_page)


class IdRun:
    """Ids in order of (hash, second half), none of them twice. `part`: its file; None while it has none.

    It lies in memory, page by page, or in `file`, which is at `path`. Looking into a file raises RunDamaged
    or OSError where that cannot be read.
    """

    def __init__(
        self,
        facts: RunFacts,
        fences: tuple[array[int], array[int]],
        *,
        pages: list[bytes] | None = None,
        file: File | None = None,
        part: PartName | None = None,
        path: str = "",
    ) -> None:
        self.facts = facts
        self.part = part
        self.filter: IdFilter | None = None
        self._hashes, self._seconds = fences
        self._fences = np.frombuffer(self._hashes, np.uint64)
        self._holders, self._closed = 0, False
        self._stride = 1  # pages that a fence in memory stands for
        self._held = pages
        self._file = file
        self.path = path

    @classmethod
    def open(cls, file: File, part: PartName, path: str) -> IdRun:
        """Open a run that was written; of its file only the fences are read. Raises RunDamaged, OSError."""
        raw = file.read(part.size - _TRAILER.size, _TRAILER.size) if part.size >= _TRAILER.size else b""
        if len(raw) < _TRAILER.size or file.size() != part.size:
            raise RunDamaged(path, f"it has {file.size()} bytes, and should have {part.size}")
        magic, version, page_bytes, rows, first, last, *filter_, fences_crc, _, crc = _TRAILER.unpack(raw)
        if magic != _MAGIC or version != _VERSION or crc != crc32c(raw[:-_CRC_BYTES]):
            raise RunDamaged(path, "its trailer does not fit its checksum, or is of another version")
        facts = RunFacts(rows, first, last, filter_[0], filter_[1], page_bytes)
        at, size = facts.pages * page_bytes, facts.pages * FENCE_BYTES
        fences = file.read(at, size)
        if len(fences) != size or crc32c(fences) != fences_crc:
            raise RunDamaged(path, "its fences do not fit their checksum")
        hashes, seconds = array("Q"), array("Q")
        hashes.frombytes(np.frombuffer(fences[: size // 2], _U64).astype(np.uint64).tobytes())
        seconds.frombytes(np.frombuffer(fences[size // 2 :], _U64).astype(np.uint64).tobytes())
        return cls(facts, (hashes, seconds), file=file, part=part, path=path)

    # --- what it takes

    @property
    def in_memory(self) -> bool:
        """True until its pages lie in a file alone."""
        return self._held is not None

    @property
    def nbytes(self) -> int:
        """The memory it takes."""
        pages = 0 if self._held is None else len(self._held) * self.facts.page_bytes
        filter_ = 0 if self.filter is None else self.filter.nbytes
        return pages + filter_ + self.fences_nbytes

    @property
    def fences_nbytes(self) -> int:
        """The memory that its fences take."""
        return FENCE_BYTES * len(self._hashes)

    @property
    def filter_nbytes(self) -> int:
        """The memory that its filter takes, or would take."""
        return IdFilter.size_of(self.facts.filter_ids, self.facts.error_rate)

    def thin(self) -> bool:
        """Drop every other fence, so that a lookup reads twice as many pages; False if one is left."""
        if len(self._hashes) <= 1:
            return False
        self._hashes, self._seconds = self._hashes[::2], self._seconds[::2]
        self._fences = np.frombuffer(self._hashes, np.uint64)
        self._stride *= 2
        return True

    # --- looking

    def find(self, hashed: int, second: int) -> int | None:
        """Find the offset of an id; None if it is not in the run."""
        place = self._fence_of(hashed, second)
        if place < 0:
            return None
        return self._search(self._pages(place), hashed.to_bytes(8, "little") + second.to_bytes(8, "little"))

    def find_many(self, hashes: NDArray[np.uint64], seconds: NDArray[np.uint64]) -> list[int | None]:
        """Find the offsets of many ids; each page is read once."""
        found: list[int | None] = [None] * len(hashes)
        places = self._fences.searchsorted(hashes, side="right") - 1
        for row in np.flatnonzero(self._fences[places] == hashes).tolist():  # may be on a page before that
            places[row] = self._fence_of(int(hashes[row]), int(seconds[row]))
        keys = np.stack((hashes, seconds), axis=1).astype(_U64).tobytes()
        held, pages = -1, list[_Page]()
        for row in places.argsort().tolist():
            place = int(places[row])
            if place < 0:
                continue
            if place != held:
                held, pages = place, self._pages(place)
            found[row] = self._search(pages, keys[_KEY_BYTES * row : _KEY_BYTES * (row + 1)])
        return found

    @staticmethod
    def _search(pages: list[_Page], key: bytes) -> int | None:
        """Find the offset that follows a key in some pages."""
        for raw, stop in pages:
            at = raw.find(key, 0, stop)
            while at >= 0 and at % ROW_BYTES:  # the bytes of two rows may look like one
                at = raw.find(key, at + 1, stop)
            if at >= 0:
                return int.from_bytes(raw[at + _KEY_BYTES : at + ROW_BYTES], "little")
        return None

    def rows(self, first: int, count: int) -> NDArray[np.uint64]:
        """Read the rows of some pages, as columns hash, second half, offset."""
        parts = []
        for number in range(first, min(first + count, self.facts.pages)):
            raw, stop = self._page(number)
            parts.append(np.frombuffer(raw, _U64, stop // 8))
        return np.concatenate(parts).astype(np.uint64, copy=False).reshape(-1, 3)

    def _fence_of(self, hashed: int, second: int) -> int:
        """Find the fence whose pages hold an id if the run does; -1 if the id is below all."""
        end = bisect_right(self._hashes, hashed)
        start = bisect_left(self._hashes, hashed, 0, end)
        return bisect_right(self._seconds, second, start, end) - 1 if start < end else end - 1

    def _pages(self, place: int) -> list[_Page]:
        """Read the pages from a fence to the next one."""
        first = place * self._stride
        return [self._page(number) for number in range(first, min(first + self._stride, self.facts.pages))]

    def _page(self, number: int) -> _Page:
        size, rows_a_page = self.facts.page_bytes, self.facts.rows_a_page
        rows = min(self.facts.rows - number * rows_a_page, rows_a_page)
        if self._held is not None:
            return self._held[number], rows * ROW_BYTES
        assert self._file is not None, "a run lies in memory or in a file"
        raw = self._file.read(number * size, size)
        if len(raw) != size or raw[-_TAIL.size :] != _TAIL.pack(number, rows, crc32c(raw[:-_CRC_BYTES])):
            raise RunDamaged(self.path, f"page {number} does not fit its checksum")
        return raw, rows * ROW_BYTES

    # --- being kept

    def chunks(self) -> Iterator[bytes]:
        """Yield the bytes of the file of a run in memory."""
        assert self._held is not None
        assert self.filter is not None
        assert self._stride == 1, "what waits to be written is not thinned"
        for first in range(0, len(self._held), _PAGES_A_CHUNK):
            yield b"".join(self._held[first : first + _PAGES_A_CHUNK])
        yield from tail_of(self.facts, (self._hashes, self._seconds), self.filter)

    def load_filter(self) -> IdFilter:
        """Read the filter from the file. Raises RunDamaged, OSError."""
        assert self._file is not None
        facts, trailer = self.facts, _TRAILER.size
        filter_ = IdFilter(facts.filter_ids, facts.error_rate)
        end = facts.pages * (facts.page_bytes + FENCE_BYTES) + filter_.nbytes + trailer
        raw = self._file.read(end - trailer - filter_.nbytes, filter_.nbytes + trailer)
        told = _TRAILER.unpack(raw[-trailer:])[-2] if len(raw) == filter_.nbytes + trailer else None
        if told != crc32c(raw[:-trailer]):
            raise RunDamaged(self.path, "its filter does not fit its checksum")
        filter_.load(raw[:-trailer], facts.rows)
        return filter_

    def hold(self) -> None:
        """Keep the file open until `release`, even if the run is closed: another thread reads it."""
        self._holders += 1

    def release(self) -> None:
        """End a `hold`."""
        self._holders -= 1
        self._close()

    def close(self) -> None:
        """Close the file, unless it is held: nobody looks into the run any more."""
        self._closed = True
        self._close()

    def _close(self) -> None:
        if self._closed and not self._holders and self._file is not None:
            self._file.close()
            self._file = None


class RunWriter:
    """Makes a run of rows that come in order, a few pages at a time."""

    def __init__(self, filter_ids: int, error_rate: float) -> None:
        self.filter = IdFilter(filter_ids, error_rate)
        self._error_rate = error_rate
        self._fences = array("Q"), array("Q")
        self._left = np.empty((0, 3), np.uint64)
        self._rows = self._pages = 0
        self._first, self._last = (1 << 64) - 1, 0
        self._page_bytes = PAGE_BYTES

    def add(self, rows: NDArray[np.uint64]) -> list[bytes]:
        """Take the next rows, as columns hash, second half, offset; return the pages that are full."""
        if len(rows):
            self.filter.add(np.ascontiguousarray(rows[:, 0]))
            self._first = min(self._first, int(rows[:, 2].min()))
            self._last = max(self._last, int(rows[:, 2].max()))
            self._rows += len(rows)
        rows = np.concatenate((self._left, rows)) if len(self._left) else rows
        full = len(rows) - len(rows) % self._facts().rows_a_page
        self._left = rows[full:]
        return self._paged(rows[:full])

    def finish(self) -> tuple[RunFacts, list[bytes]]:
        """End the run; return its facts and its last page."""
        last = self._paged(self._left)
        return self._facts(), last

    @property
    def fences(self) -> tuple[array[int], array[int]]:
        """The first row of each page."""
        return self._fences

    def _facts(self) -> RunFacts:
        return RunFacts(
            self._rows, self._first, self._last, self.filter.capacity, self._error_rate, self._page_bytes
        )

    def _paged(self, rows: NDArray[np.uint64]) -> list[bytes]:
        size, rows_a_page = self._page_bytes - _TAIL.size, self._facts().rows_a_page
        raw, pages = np.ascontiguousarray(rows, _U64).tobytes(), []
        for at in range(0, len(raw), rows_a_page * ROW_BYTES):
            part = raw[at : at + rows_a_page * ROW_BYTES]
            head = _TAIL.pack(self._pages, len(part) // ROW_BYTES, 0)[:-_CRC_BYTES]
            page = part.ljust(size, b"\0") + head
            pages.append(page + crc32c(page).to_bytes(_CRC_BYTES, "little"))
            self._pages += 1
        starts = rows[::rows_a_page]
        self._fences[0].extend(starts[:, 0].tolist())
        self._fences[1].extend(starts[:, 1].tolist())
        return pages


def tail_of(facts: RunFacts, fences: tuple[array[int], array[int]], filter_: IdFilter) -> Iterator[bytes]:
    """Yield what follows the pages in a run's file, in pieces, so that other threads run between two."""
    told = b"".join(np.frombuffer(column, np.uint64).astype(_U64).tobytes() for column in fences)
    yield told
    bits = memoryview(filter_.save())
    crc = 0
    for at in range(0, len(bits), _CHUNK_BYTES):
        chunk = bytes(bits[at : at + _CHUNK_BYTES])
        crc = crc32c(chunk, crc)
        yield chunk
    head = _TRAILER.pack(
        _MAGIC, _VERSION, facts.page_bytes, facts.rows, facts.first_offset, facts.last_offset,
        facts.filter_ids, facts.error_rate, crc32c(told), crc, 0,
    )[:-_CRC_BYTES]  # fmt: skip
    yield head + crc32c(head).to_bytes(_CRC_BYTES, "little")


def in_order(rows: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Sort rows by hash, then by second half; of an id that is there twice keep the lower offset."""
    order = rows[:, 0].argsort()
    ordered = rows[order]
    if not (ordered[1:, 0] == ordered[:-1, 0]).any():
        return ordered
    # Equal hashes are rare, and sorting by all columns is slow.
    ordered = rows[np.lexsort((rows[:, 2], rows[:, 1], rows[:, 0]))]
    again = (ordered[1:, :2] == ordered[:-1, :2]).all(axis=1)
    return ordered[np.concatenate(([True], ~again))]
