"""A Bloom filter over 16-byte ids, read and filled many at a time.

Pure. A positive answer means "perhaps" and is never acted on without a look at the ids themselves.
pybloom-live gives the sizing and the bits. Its own hashing and loops, 3 to 10 us an id, are not used.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from pybloom_live import BloomFilter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

_WORD = (1 << 64) - 1
_HALF = (1 << 32) - 1
_SPREAD = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB


def hash_ids(ids: Sequence[bytes]) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Each id as a hash of all its bits, and its second half: together as distinct as the ids are.

    A producer's ids may be counters, times or hashes. The 64-bit finaliser of splitmix spreads them
    all alike; as it can be undone, no two ids with one second half share a hash.
    """
    joined = b"".join(ids)
    assert len(joined) == 16 * len(ids)
    halves = np.frombuffer(joined, dtype="<u8").reshape(-1, 2)
    second = halves[:, 1].copy()
    mixed = halves[:, 0] + second * np.uint64(_SPREAD)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(_FIRST)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(_SECOND)
    return mixed ^ (mixed >> np.uint64(31)), second


def hash_id(one: bytes) -> tuple[int, int]:
    """The same for one id, where numpy would take longer."""
    second = int.from_bytes(one[8:], "little")
    mixed = (int.from_bytes(one[:8], "little") + second * _SPREAD) & _WORD
    mixed = ((mixed ^ (mixed >> 30)) * _FIRST) & _WORD
    mixed = ((mixed ^ (mixed >> 27)) * _SECOND) & _WORD
    return mixed ^ (mixed >> 31), second


class IdFilter:
    """The bits for up to `capacity` hashes, wrong for about `error_rate` of the others once full.

    Slice i holds bit `low + i * high` of a hash, its halves taken as fractions of the slice.
    """

    __slots__ = ("_bytes", "_filter", "_slices", "bits", "slice_bits")

    def __init__(self, capacity: int, error_rate: float) -> None:
        self._filter = BloomFilter(capacity, error_rate)
        self._slices: int = self._filter.num_slices
        self.slice_bits: int = self._filter.bits_per_slice
        self.bits = self._filter.bitarray
        self._bytes = np.frombuffer(self.bits, dtype=np.uint8)

    @staticmethod
    def size_of(capacity: int, error_rate: float) -> int:
        """Return the bytes that the bits of such a filter take, without creating one."""
        slices = math.ceil(math.log(1.0 / error_rate, 2))
        bits = math.ceil(capacity * abs(math.log(error_rate)) / (slices * math.log(2) ** 2))
        return -(-slices * bits // 8)

    def __len__(self) -> int:
        return len(self._filter)

    @property
    def nbytes(self) -> int:
        """Bytes of its bits."""
        return self._bytes.nbytes

    @property
    def capacity(self) -> int:
        """For how many hashes it was made."""
        return int(self._filter.capacity)

    def save(self) -> bytes:
        """Its bits, for `load`."""
        return self._bytes.tobytes()

    def load(self, bits: bytes | memoryview, count: int) -> bool:
        """Take over the bits of a filter of the same size that holds so many; False if they do not fit."""
        if len(bits) != self._bytes.nbytes or count > self.capacity:
            return False
        self._bytes[:] = np.frombuffer(bits, np.uint8)
        self._filter.count = count
        return True

    def add(self, hashes: NDArray[np.uint64]) -> None:
        """Add hashes that are not in it yet."""
        assert len(self) + len(hashes) <= self._filter.capacity
        point, stride = _halves(hashes)
        for start in range(0, self._slices * self.slice_bits, self.slice_bits):
            at = start + (point * self.slice_bits >> 32)
            np.bitwise_or.at(self._bytes, at >> 3, _bit(at))
            point = (point + stride) & _HALF
        self._filter.count += len(hashes)

    def may_hold(self, hashed: int) -> bool:
        """Whether a hash is perhaps in it. An absent one costs two looks on average."""
        bits, width = self.bits, self.slice_bits
        point, stride = hashed & _HALF, hashed >> 32
        for start in range(0, self._slices * width, width):
            if not bits[start + (point * width >> 32)]:
                return False
            point = (point + stride) & _HALF
        return True

    def candidates(self, hashes: NDArray[np.uint64]) -> NDArray[np.intp]:
        """The rows of the hashes that are perhaps in it."""
        rows = np.arange(len(hashes))
        point, stride = _halves(hashes)
        for start in range(0, self._slices * self.slice_bits, self.slice_bits):
            at = start + (point * self.slice_bits >> 32)
            held = np.flatnonzero(self._bytes[at >> 3] & _bit(at))
            if not held.size:
                return held
            rows, stride = rows[held], stride[held]
            point = (point[held] + stride) & _HALF
        return rows


def _halves(hashes: NDArray[np.uint64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    return (hashes & np.uint64(_HALF)).astype(np.int64), (hashes >> np.uint64(32)).astype(np.int64)


def _bit(at: NDArray[np.int64]) -> NDArray[np.uint8]:
    """The bit that stands for a place, in its byte; bitarray counts from the low end."""
    return np.left_shift(np.uint8(1), (at & 7).astype(np.uint8))
