"""A Bloom filter over 16-byte ids, read and filled in bulk.

Pure. A positive answer means "perhaps": callers confirm it with the ids themselves. pybloom-live provides the
size and the storage of the bits. Its hashing and its loops are not used, since they take 3 to 10 us per id.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from pybloom_live import BloomFilter

if TYPE_CHECKING:
    from numpy.typing import NDArray

_WORD = (1 << 64) - 1
_HALF = (1 << 32) - 1
"""Masks of 64 and of 32 bits."""
_SECOND_FACTOR = 0x9E3779B97F4A7C15
_FACTOR_1 = 0xBF58476D1CE4E5B9
_FACTOR_2 = 0x94D049BB133111EB
"""Constants of splitmix64: its increment, and the factors of its two rounds."""


def hash_ids(ids: Sequence[bytes]) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Return for each id a hash of all its bits, and its second 8 bytes; the pair is unique for each id.

    Ids of a producer may be counters, times or hashes. The 64-bit finalizer of splitmix spreads them
    uniformly; it is invertible, so two ids with the same second half have different hashes.
    """
    joined = b"".join(ids)
    assert len(joined) == 16 * len(ids)
    halves = np.frombuffer(joined, dtype="<u8").reshape(-1, 2)
    second = halves[:, 1].copy()
    mixed = halves[:, 0] + second * np.uint64(_SECOND_FACTOR)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(_FACTOR_1)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(_FACTOR_2)
    return mixed ^ (mixed >> np.uint64(31)), second


def hash_id(delta_id: bytes) -> tuple[int, int]:
    """Hash one id, as `hash_ids` does; for one id, numpy would take longer."""
    second = int.from_bytes(delta_id[8:], "little")
    mixed = (int.from_bytes(delta_id[:8], "little") + second * _SECOND_FACTOR) & _WORD
    mixed = ((mixed ^ (mixed >> 30)) * _FACTOR_1) & _WORD
    mixed = ((mixed ^ (mixed >> 27)) * _FACTOR_2) & _WORD
    return mixed ^ (mixed >> 31), second


class IdFilter:
    """A filter for up to `capacity` hashes; once it is full, a share of `error_rate` of other hashes matches
    falsely.

    For a hash with the 32-bit halves `low` and `high`, slice i has a bit at `low + i * high` modulo 2^32,
    scaled to the slice.
    """

    __slots__ = ("_bytes", "_filter", "_slices", "bits", "slice_bits")

    def __init__(self, capacity: int, error_rate: float) -> None:
        self._filter = BloomFilter(capacity, error_rate)
        self._slices: int = self._filter.num_slices
        self.slice_bits: int = self._filter.bits_per_slice
        self.bits = self._filter.bitarray
        self._bytes = np.frombuffer(self.bits, dtype=np.uint8)

    @staticmethod
    def compute_size(capacity: int, error_rate: float) -> int:
        """Return the bytes that the bits of such a filter take, without creating one."""
        slices = math.ceil(math.log(1.0 / error_rate, 2))
        bits = math.ceil(capacity * abs(math.log(error_rate)) / (slices * math.log(2) ** 2))
        return -(-slices * bits // 8)

    def __len__(self) -> int:
        return len(self._filter)

    @property
    def nbytes(self) -> int:
        """Size of the bits, in bytes."""
        return self._bytes.nbytes

    @property
    def capacity(self) -> int:
        """Maximum number of hashes."""
        return int(self._filter.capacity)

    def save(self) -> bytes:
        """Return the bits, for `load`."""
        return self._bytes.tobytes()

    def load(self, bits: bytes | memoryview, count: int) -> bool:
        """Load the bits of a filter of the same size with `count` hashes; return False if they do not fit."""
        if len(bits) != self._bytes.nbytes or count > self.capacity:
            return False
        self._bytes[:] = np.frombuffer(bits, np.uint8)
        self._filter.count = count
        return True

    def add(self, hashes: NDArray[np.uint64]) -> None:
        """Add hashes that the filter does not hold yet."""
        assert len(self) + len(hashes) <= self._filter.capacity
        point, stride = _halves(hashes)
        for start in range(0, self._slices * self.slice_bits, self.slice_bits):
            bit = start + (point * self.slice_bits >> 32)
            np.bitwise_or.at(self._bytes, bit >> 3, _bit_mask(bit))
            point = (point + stride) & _HALF
        self._filter.count += len(hashes)

    def may_hold(self, hashed: int) -> bool:
        """Return True if the filter perhaps holds a hash. An absent hash takes two reads on average."""
        bits, width = self.bits, self.slice_bits
        point, stride = hashed & _HALF, hashed >> 32
        for start in range(0, self._slices * width, width):
            if not bits[start + (point * width >> 32)]:
                return False
            point = (point + stride) & _HALF
        return True

    def candidates(self, hashes: NDArray[np.uint64]) -> NDArray[np.intp]:
        """Return the rows of the hashes that the filter perhaps holds."""
        rows = np.arange(len(hashes))
        point, stride = _halves(hashes)
        for start in range(0, self._slices * self.slice_bits, self.slice_bits):
            bit = start + (point * self.slice_bits >> 32)
            held = np.flatnonzero(self._bytes[bit >> 3] & _bit_mask(bit))
            if not held.size:
                return held
            rows, stride = rows[held], stride[held]
            point = (point[held] + stride) & _HALF
        return rows


def _halves(hashes: NDArray[np.uint64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    return (hashes & np.uint64(_HALF)).astype(np.int64), (hashes >> np.uint64(32)).astype(np.int64)


def _bit_mask(bit: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Return the mask of a bit within its byte; bitarray counts from the least significant bit."""
    return np.left_shift(np.uint8(1), (bit & 7).astype(np.uint8))
