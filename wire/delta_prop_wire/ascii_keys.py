"""Checks and packs the names of many rows together, without a loop over names.

A name that is not printable ASCII is left to the caller, which then packs names one by one.
"""

from __future__ import annotations

import struct
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

from delta_prop_wire.batch import PRINTABLE

if TYPE_CHECKING:
    from collections.abc import Sequence

_LINE_FEED = 10
_END = struct.Struct("<I")
_NUMPY_MIN = 60
"""Below this many names a loop is faster than calls of numpy."""


def pack_ascii_keys(keys: Sequence[str], bytes_max: int) -> tuple[bytes, bytes] | None:
    """Return names of printable ASCII as bytes, end to end, and the end of each (u32, little-endian).

    Return None if a name is empty, longer than `bytes_max`, or not printable ASCII.
    """
    if len(keys) == 1:
        return _pack_single(keys[0], bytes_max)
    try:
        text = "\n".join(keys)
    except TypeError:
        return None
    count = len(keys)
    if not count or not text.isascii():
        return None
    raw = text.encode("ascii")
    # Valid only if the line feeds between names are the only characters that are not printable.
    if count < _NUMPY_MIN:
        sizes = [*map(len, keys)]
        if min(sizes) < 1 or max(sizes) > bytes_max or len(raw.translate(None, PRINTABLE)) != count - 1:
            return None
        return "".join(keys).encode("ascii"), _pack_ends(accumulate(sizes), count)
    if len(raw.translate(None, PRINTABLE)) != count - 1 or raw.count(b"\n") != count - 1:
        return None
    ends = np.empty(count, np.int64)
    ends[:-1] = (np.frombuffer(raw, np.uint8) == _LINE_FEED).nonzero()[0]
    ends[-1] = len(raw)
    ends -= np.arange(count)
    first_size, later_sizes = int(ends[0]), ends[1:] - ends[:-1]
    if min(first_size, int(later_sizes.min())) < 1 or max(first_size, int(later_sizes.max())) > bytes_max:
        return None
    return raw.replace(b"\n", b""), ends.astype("<u4").tobytes()


def _pack_single(name: object, bytes_max: int) -> tuple[bytes, bytes] | None:
    if not (isinstance(name, str) and name.isascii() and name.isprintable() and 0 < len(name) <= bytes_max):
        return None
    return name.encode("ascii"), _END.pack(len(name))


def _pack_ends(ends: accumulate[int], count: int) -> bytes:
    return struct.pack(f"<{count}I", *ends)
