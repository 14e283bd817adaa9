"""murmur2, the hash by which keys are spread: a vector is always at the same one of several services.

Pure. The form that brokers use for keyed records (seed 0x9747b28c), so that other languages have it at hand.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

_SEED = 0x9747B28C
_M = 0x5BD1E995
_R = 24
_MASK = 0xFFFFFFFF
_POSITIVE = 0x7FFFFFFF
_COLUMNS_FROM = 32
"""From so many keys on they are hashed by columns."""


def murmur2(data: bytes) -> int:
    """The hash as a signed number of 32 bits."""
    size = len(data)
    h = (_SEED ^ size) & _MASK
    whole = size & ~3
    for at in range(0, whole, 4):
        k = int.from_bytes(data[at : at + 4], "little") * _M & _MASK
        k = (k ^ k >> _R) * _M & _MASK
        h = (h * _M & _MASK) ^ k
    if whole < size:
        h = (h ^ int.from_bytes(data[whole:], "little")) * _M & _MASK
    h = (h ^ h >> 13) * _M & _MASK
    h ^= h >> 15
    return h - (1 << 32) if h >> 31 else h


def key_of(namespace: str, vector_id: str) -> bytes:
    """What is hashed of a vector: no name holds the byte 0."""
    return b"\0".join((namespace.encode(), vector_id.encode()))


def place_of(namespace: str, vector_id: str, places: int) -> int:
    """At which of so many services a vector is, from 0 on."""
    return (murmur2(key_of(namespace, vector_id)) & _POSITIVE) % places


def places_of(namespace: str, vector_ids: Sequence[str], places: int) -> NDArray[np.intp]:
    """The same of many vectors of a namespace."""
    if len(vector_ids) < _COLUMNS_FROM:
        return np.array([place_of(namespace, one, places) for one in vector_ids], np.intp)
    keys = [key_of(namespace, one) for one in vector_ids]
    sizes = np.fromiter(map(len, keys), np.uint32, len(keys))
    width = (int(sizes.max()) + 3) // 4
    padded = b"".join(key.ljust(4 * width, b"\0") for key in keys)
    words = np.frombuffer(padded, "<u4").reshape(len(keys), width)
    return ((_hashes(words, sizes) & np.uint32(_POSITIVE)) % np.uint32(places)).astype(np.intp)


def _hashes(words: NDArray[np.uint32], sizes: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """murmur2 of each row: words of four bytes, zeros behind its end. Numbers wrap around, as they should."""
    m, whole = np.uint32(_M), sizes // 4
    h = np.uint32(_SEED) ^ sizes
    for at in range(words.shape[1]):
        k = words[:, at] * m
        k = (k ^ k >> np.uint32(_R)) * m
        tail = (h ^ words[:, at]) * m
        h = np.where(at < whole, h * m ^ k, np.where((at == whole) & (sizes % 4 != 0), tail, h))
    h = (h ^ h >> np.uint32(13)) * m
    return h ^ h >> np.uint32(15)
