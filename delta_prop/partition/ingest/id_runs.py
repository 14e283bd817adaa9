"""Sorted runs of ids: immutable pages, located by fences in memory and verified by checksum when read.

A run maps each id to its first offset. A fence is the first row of a page. A run is in memory until it is
written to a file; then only the fences and, within a budget, the filter stay in memory. Pure except for the
file.

    pages of `page_bytes`: rows (hash, second half of the id, offset; 24 bytes each), zeros, page number,
        number of rows, CRC32C
    fences: the hash of each page's first row, one after the other, then the second halves
    the bits of the filter
    the trailer
"""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from delta_prop.partition.ingest.bloom import IdFilter
from delta_prop_wire.crc import crc32c
from delta_prop_wire.errors import DeltaPropError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from delta_prop_broker.disk import File
    from delta_prop_broker.recovery.checkpoints import CheckpointFile

PAGE_BYTES = 4096
ROW_BYTES = 24
_PAGES_PER_CHUNK = 64
_CHUNK_BYTES = 1 << 18
FENCE_BYTES = 16
"""Memory of the fence of a page."""
_KEY_BYTES = 16
_TAIL = struct.Struct("<QII")
"""End of a page: its number, its number of rows, and the CRC32C of the bytes before."""
_CRC_BYTES = 4
_TRAILER = struct.Struct("<8sIIQQQQdIII")
"""Magic, version, bytes of a page, number of rows, first and last offset, capacity of the filter, its error
rate, CRC32C of the fences, of the filter, of the trailer.
"""
_MAGIC, _VERSION = b"dp-idrun", 1
_U64 = np.dtype("<u8")


_Page: TypeAlias = tuple[bytes, int]
"""A page, and the end of its rows in it."""


class RunCorrupted(DeltaPropError):
    """A run, or a page of it, is corrupted, so its ids cannot be looked up."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path


class RunFacts(NamedTuple):
    """Properties of a run, as in its trailer. `filter_ids`, `error_rate`: capacity and error rate of its
    filter.
    """

    row_count: int
    first_offset: int
    last_offset: int
    filter_ids: int
    error_rate: float
    page_bytes: int

    @property
    def rows_per_page(self) -> int:
        """Maximum rows on a page."""
        return (self.page_bytes - _TAIL.size) // ROW_BYTES

    @property
    def page_count(self) -> int:
        """Number of pages."""
        return -(-self.row_count // self.rows_per_page)


class IdRun:
    """Ids in order of (hash, second half), each once. `checkpoint_file`: the run's file; None if it has none.

    The pages are in memory, or in `file`, which is at `path`. A lookup raises RunCorrupted or OSError if the
    file cannot be read.
    """

    def __init__(
        self,
        facts: RunFacts,
        fences: tuple[array[int], array[int]],
        *,
        pages: list[bytes] | None = None,
        file: File | None = None,
        checkpoint_file: CheckpointFile | None = None,
        path: str = "",
    ) -> None:
        self.facts = facts
        self.checkpoint_file = checkpoint_file
        self.filter: IdFilter | None = None
        self._hashes, self._seconds = fences
        self._fences = np.frombuffer(self._hashes, np.uint64)
        self._holder_count, self._is_closed = 0, False
        self._stride = 1  # number of pages per fence in memory
        self._memory_pages = pages
        self._file = file
        self.path = path

    @classmethod
    def open(cls, file: File, checkpoint_file: CheckpointFile, path: str) -> IdRun:
        """Open a written run; only its fences are read. Raises RunCorrupted, OSError."""
        raw = (
            file.read(checkpoint_file.size - _TRAILER.size, _TRAILER.size)
            if checkpoint_file.size >= _TRAILER.size
            else b""
        )
        if len(raw) < _TRAILER.size or file.size() != checkpoint_file.size:
            raise RunCorrupted(path, f"the file has {file.size()} bytes, expected {checkpoint_file.size}")
        magic, version, page_bytes, *properties, fences_crc, _, crc = _TRAILER.unpack(raw)
        if magic != _MAGIC or version != _VERSION or crc != crc32c(raw[:-_CRC_BYTES]):
            raise RunCorrupted(path, "the trailer does not match its checksum, or has another version")
        facts = RunFacts._make([*properties, page_bytes])
        position, size = facts.page_count * page_bytes, facts.page_count * FENCE_BYTES
        fences = file.read(position, size)
        if len(fences) != size or crc32c(fences) != fences_crc:
            raise RunCorrupted(path, "the fences do not match their checksum")
        hashes, seconds = array("Q"), array("Q")
        hashes.frombytes(np.frombuffer(fences[: size // 2], _U64).astype(np.uint64).tobytes())
        seconds.frombytes(np.frombuffer(fences[size // 2 :], _U64).astype(np.uint64).tobytes())
        return cls(facts, (hashes, seconds), file=file, checkpoint_file=checkpoint_file, path=path)

    # --- memory

    @property
    def is_in_memory(self) -> bool:
        """True while the pages are in memory."""
        return self._memory_pages is not None

    @property
    def nbytes(self) -> int:
        """Memory in bytes."""
        pages = 0 if self._memory_pages is None else len(self._memory_pages) * self.facts.page_bytes
        filter_ = 0 if self.filter is None else self.filter.nbytes
        return pages + filter_ + self.fences_nbytes

    @property
    def fences_nbytes(self) -> int:
        """Memory of the fences in bytes."""
        return FENCE_BYTES * len(self._hashes)

    @property
    def filter_nbytes(self) -> int:
        """Memory of the filter in bytes, loaded or not."""
        return IdFilter.compute_size(self.facts.filter_ids, self.facts.error_rate)

    def thin_fences(self) -> bool:
        """Drop every other fence, so that a lookup reads twice as many pages.

        Return False, with nothing changed, if only one fence is left.
        """
        if len(self._hashes) <= 1:
            return False
        self._hashes, self._seconds = self._hashes[::2], self._seconds[::2]
        self._fences = np.frombuffer(self._hashes, np.uint64)
        self._stride *= 2
        return True

    # --- lookups

    def find(self, hashed: int, second: int) -> int | None:
        """Find the offset of an id; None if it is not in the run."""
        fence = self._find_fence(hashed, second)
        if fence < 0:
            return None
        return self._search(
            self._read_pages(fence), hashed.to_bytes(8, "little") + second.to_bytes(8, "little")
        )

    def find_many(self, hashes: NDArray[np.uint64], seconds: NDArray[np.uint64]) -> list[int | None]:
        """Find the offsets of many ids, and read each page once."""
        offsets: list[int | None] = [None] * len(hashes)
        fences = self._fences.searchsorted(hashes, side="right") - 1
        # An id with the hash of a fence may be on an earlier page.
        for row in np.flatnonzero(self._fences[fences] == hashes).tolist():
            fences[row] = self._find_fence(int(hashes[row]), int(seconds[row]))
        keys = np.stack((hashes, seconds), axis=1).astype(_U64).tobytes()
        loaded, pages = -1, list[_Page]()
        for row in fences.argsort().tolist():
            fence = int(fences[row])
            if fence < 0:
                continue
            if fence != loaded:
                loaded, pages = fence, self._read_pages(fence)
            offsets[row] = self._search(pages, keys[_KEY_BYTES * row : _KEY_BYTES * (row + 1)])
        return offsets

    @staticmethod
    def _search(pages: list[_Page], key: bytes) -> int | None:
        """Return the offset of the row with this key in these pages; None if there is no such row."""
        for raw, rows_end in pages:
            start = raw.find(key, 0, rows_end)
            while start >= 0 and start % ROW_BYTES:  # bytes across two rows may equal a key
                start = raw.find(key, start + 1, rows_end)
            if start >= 0:
                return int.from_bytes(raw[start + _KEY_BYTES : start + ROW_BYTES], "little")
        return None

    def rows(self, first: int, count: int) -> NDArray[np.uint64]:
        """Read the rows of `count` pages from page `first` on, as columns hash, second half, offset."""
        parts = []
        for number in range(first, min(first + count, self.facts.page_count)):
            raw, rows_end = self._read_page(number)
            parts.append(np.frombuffer(raw, _U64, rows_end // 8))
        return np.concatenate(parts).astype(np.uint64, copy=False).reshape(-1, 3)

    def _find_fence(self, hashed: int, second: int) -> int:
        """Find the fence whose pages hold an id if the run has it; return -1 if the id precedes all."""
        end = bisect_right(self._hashes, hashed)
        start = bisect_left(self._hashes, hashed, 0, end)
        return bisect_right(self._seconds, second, start, end) - 1 if start < end else end - 1

    def _read_pages(self, fence: int) -> list[_Page]:
        """Read the pages from a fence to the next one."""
        first = fence * self._stride
        end = min(first + self._stride, self.facts.page_count)
        return [self._read_page(number) for number in range(first, end)]

    def _read_page(self, number: int) -> _Page:
        size, rows_per_page = self.facts.page_bytes, self.facts.rows_per_page
        row_count = min(self.facts.row_count - number * rows_per_page, rows_per_page)
        if self._memory_pages is not None:
            return self._memory_pages[number], row_count * ROW_BYTES
        assert self._file is not None, "a run is in memory or in a file"
        raw = self._file.read(number * size, size)
        if len(raw) != size or raw[-_TAIL.size :] != _TAIL.pack(number, row_count, crc32c(raw[:-_CRC_BYTES])):
            raise RunCorrupted(self.path, f"page {number} does not match its checksum")
        return raw, row_count * ROW_BYTES

    # --- the file

    def chunks(self) -> Iterator[bytes]:
        """Yield the bytes of the file of a run in memory."""
        assert self._memory_pages is not None
        assert self.filter is not None
        assert self._stride == 1, "a run that is not written yet keeps all fences"
        for first in range(0, len(self._memory_pages), _PAGES_PER_CHUNK):
            yield b"".join(self._memory_pages[first : first + _PAGES_PER_CHUNK])
        yield from pack_tail(self.facts, (self._hashes, self._seconds), self.filter)

    def load_filter(self) -> IdFilter:
        """Read the filter from the file. Raises RunCorrupted, OSError."""
        assert self._file is not None
        facts, trailer = self.facts, _TRAILER.size
        filter_ = IdFilter(facts.filter_ids, facts.error_rate)
        end = facts.page_count * (facts.page_bytes + FENCE_BYTES) + filter_.nbytes + trailer
        raw = self._file.read(end - trailer - filter_.nbytes, filter_.nbytes + trailer)
        crc = _TRAILER.unpack(raw[-trailer:])[-2] if len(raw) == filter_.nbytes + trailer else None
        if crc != crc32c(raw[:-trailer]):
            raise RunCorrupted(self.path, "the filter does not match its checksum")
        filter_.load(raw[:-trailer], facts.row_count)
        return filter_

    def hold(self) -> None:
        """Keep the file open until `release`, even if the run is closed, since another thread reads it."""
        self._holder_count += 1

    def release(self) -> None:
        """End a `hold`."""
        self._holder_count -= 1
        self._close()

    def close(self) -> None:
        """Close the file as soon as no caller of `hold` needs it; no lookups may follow."""
        self._is_closed = True
        self._close()

    def _close(self) -> None:
        if self._is_closed and not self._holder_count and self._file is not None:
            self._file.close()
            self._file = None


class RunWriter:
    """Builds a run from sorted rows, a few pages at a time."""

    def __init__(self, filter_ids: int, error_rate: float) -> None:
        self.filter = IdFilter(filter_ids, error_rate)
        self._error_rate = error_rate
        self._fences = array("Q"), array("Q")
        self._partial_page = np.empty((0, 3), np.uint64)
        self._row_count = self._page_count = 0
        self._first_offset, self._last_offset = (1 << 64) - 1, 0
        self._page_bytes = PAGE_BYTES

    def add(self, rows: NDArray[np.uint64]) -> list[bytes]:
        """Add the next rows, as columns hash, second half, offset; return the pages that are now full."""
        if len(rows):
            self.filter.add(np.ascontiguousarray(rows[:, 0]))
            self._first_offset = min(self._first_offset, int(rows[:, 2].min()))
            self._last_offset = max(self._last_offset, int(rows[:, 2].max()))
            self._row_count += len(rows)
        rows = np.concatenate((self._partial_page, rows)) if len(self._partial_page) else rows
        full_rows = len(rows) - len(rows) % self._facts().rows_per_page
        self._partial_page = rows[full_rows:]
        return self._pack_pages(rows[:full_rows])

    def finish(self) -> tuple[RunFacts, list[bytes]]:
        """End the run; return its facts, and its last page if that is not empty."""
        last_pages = self._pack_pages(self._partial_page)
        return self._facts(), last_pages

    @property
    def fences(self) -> tuple[array[int], array[int]]:
        """The first row of each page."""
        return self._fences

    def _facts(self) -> RunFacts:
        return RunFacts(
            self._row_count,
            self._first_offset,
            self._last_offset,
            self.filter.capacity,
            self._error_rate,
            self._page_bytes,
        )

    def _pack_pages(self, rows: NDArray[np.uint64]) -> list[bytes]:
        size, rows_per_page = self._page_bytes - _TAIL.size, self._facts().rows_per_page
        raw, pages = np.ascontiguousarray(rows, _U64).tobytes(), []
        for start in range(0, len(raw), rows_per_page * ROW_BYTES):
            part = raw[start : start + rows_per_page * ROW_BYTES]
            tail = _TAIL.pack(self._page_count, len(part) // ROW_BYTES, 0)[:-_CRC_BYTES]
            page = part.ljust(size, b"\0") + tail
            pages.append(page + crc32c(page).to_bytes(_CRC_BYTES, "little"))
            self._page_count += 1
        first_rows = rows[::rows_per_page]
        self._fences[0].extend(first_rows[:, 0].tolist())
        self._fences[1].extend(first_rows[:, 1].tolist())
        return pages


def pack_tail(facts: RunFacts, fences: tuple[array[int], array[int]], filter_: IdFilter) -> Iterator[bytes]:
    """Yield the bytes that follow the pages in a run's file, in chunks, so that other threads can run."""
    packed_fences = b"".join(np.frombuffer(column, np.uint64).astype(_U64).tobytes() for column in fences)
    yield packed_fences
    bits = memoryview(filter_.save())
    crc = 0
    for start in range(0, len(bits), _CHUNK_BYTES):
        chunk = bytes(bits[start : start + _CHUNK_BYTES])
        crc = crc32c(chunk, crc)
        yield chunk
    trailer = _TRAILER.pack(
        _MAGIC, _VERSION, facts.page_bytes, facts.row_count, facts.first_offset, facts.last_offset,
        facts.filter_ids, facts.error_rate, crc32c(packed_fences), crc, 0,
    )[:-_CRC_BYTES]  # fmt: skip
    yield trailer + crc32c(trailer).to_bytes(_CRC_BYTES, "little")


def sort_rows(rows: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Sort rows by hash, then by second half; keep the lower offset of a duplicate id."""
    order = rows[:, 0].argsort()
    ordered = rows[order]
    if not (ordered[1:, 0] == ordered[:-1, 0]).any():
        return ordered
    # Equal hashes are rare, and sorting by all columns is slow.
    ordered = rows[np.lexsort((rows[:, 2], rows[:, 1], rows[:, 0]))]
    duplicates = (ordered[1:, :2] == ordered[:-1, :2]).all(axis=1)
    return ordered[np.concatenate(([True], ~duplicates))]
