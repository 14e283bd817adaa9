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

    None if one is empty, longer than `bytes_max`, or not printable ASCII.
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
    if count < _NUMPY_MIN:
        sizes = [*map(len, keys)]
        if min(sizes) < 1 or max(sizes) > bytes_max or len(raw.translate(None, PRINTABLE)) != count - 1:
            return None
        return "".join(keys).encode("ascii"), _pack_ends(accumulate(sizes), count)
    # Valid only if the line feeds between names are the only characters that are not printable.
    if len(raw.translate(None, PRINTABLE)) != count - 1 or raw.count(b"\n") != count - 1:
        return None
    stops = np.empty(count, np.int64)
    stops[:-1] = (np.frombuffer(raw, np.uint8) == _LINE_FEED).nonzero()[0]
    stops[-1] = len(raw)
    stops -= np.arange(count)
    widths = stops[1:] - stops[:-1]
    first_width = int(stops[0])
    if min(first_width, int(widths.min())) < 1 or max(first_width, int(widths.max())) > bytes_max:
        return None
    return raw.replace(b"\n", b""), stops.astype("<u4").tobytes()


def _pack_single(name: object, bytes_max: int) -> tuple[bytes, bytes] | None:
    if not (isinstance(name, str) and name.isascii() and name.isprintable() and 0 < len(name) <= bytes_max):
        return None
    return name.encode("ascii"), _END.pack(len(name))


def _pack_ends(stops: accumulate[int], count: int) -> bytes:
    return struct.pack(f"<{count}I", *stops)
