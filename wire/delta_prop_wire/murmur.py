"""murmur2, the hash that divides vectors between partitions: a vector is always in the same partition.

Pure. The variant that Kafka uses for keyed records (seed 0x9747b28c), which other languages have, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_SEED = 0x9747B28C
_M = 0x5BD1E995
_R = 24
_MASK = 0xFFFFFFFF
_POSITIVE = 0x7FFFFFFF
_NUMPY_MIN = 32
"""From this many keys on, numpy hashes them together."""


def murmur2(data: bytes) -> int:
    """Return the hash as a signed 32-bit number."""
    size = len(data)
    h = (_SEED ^ size) & _MASK
    full_bytes = size & ~3
    for position in range(0, full_bytes, 4):
        k = int.from_bytes(data[position : position + 4], "little") * _M & _MASK
        k = (k ^ k >> _R) * _M & _MASK
        h = (h * _M & _MASK) ^ k
    if full_bytes < size:
        h = (h ^ int.from_bytes(data[full_bytes:], "little")) * _M & _MASK
    h = (h ^ h >> 13) * _M & _MASK
    h ^= h >> 15
    return h - (1 << 32) if h >> 31 else h


def key_of(namespace: str, vector_id: str) -> bytes:
    """Return the bytes to hash for a vector: both names, separated by a zero byte, which no name holds."""
    return b"\0".join((namespace.encode(), vector_id.encode()))


def partition_of(namespace: str, vector_id: str, partition_count: int) -> int:
    """Return the partition, of `partition_count` ones, that holds a vector."""
    return (murmur2(key_of(namespace, vector_id)) & _POSITIVE) % partition_count


def partitions_of(namespace: str, vector_ids: Sequence[str], partition_count: int) -> NDArray[np.intp]:
    """Return `partition_of` for each of many vectors of one namespace."""
    if len(vector_ids) < _NUMPY_MIN:
        return np.array(
            [partition_of(namespace, vector_id, partition_count) for vector_id in vector_ids], np.intp
        )
    keys = [key_of(namespace, vector_id) for vector_id in vector_ids]
    sizes = np.fromiter(map(len, keys), np.uint32, len(keys))
    width = (int(sizes.max()) + 3) // 4
    padded = b"".join(key.ljust(4 * width, b"\0") for key in keys)
    words = np.frombuffer(padded, "<u4").reshape(len(keys), width)
    return ((_hash_rows(words, sizes) & np.uint32(_POSITIVE)) % np.uint32(partition_count)).astype(np.intp)


def _hash_rows(words: NDArray[np.uint32], sizes: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Return the murmur2 of each row: 4-byte words, zeros after its end. Products wrap around on purpose."""
    m, full_words = np.uint32(_M), sizes // 4
    h = np.uint32(_SEED) ^ sizes
    for position in range(words.shape[1]):
        k = words[:, position] * m
        k = (k ^ k >> np.uint32(_R)) * m
        tail = (h ^ words[:, position]) * m
        h = np.where(
            position < full_words, h * m ^ k, np.where((position == full_words) & (sizes % 4 != 0), tail, h)
        )
    h = (h ^ h >> np.uint32(13)) * m
    return h ^ h >> np.uint32(15)
