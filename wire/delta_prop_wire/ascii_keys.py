"""Checks and packs the names of many rows together, without a loop over names.

A name that is not printable ASCII is left to the caller, which then packs names one by one.
"""

from __future__ import annotations

import struct
from itertools import accumulate
from typing import TYPE_CHECKING

from delta_prop_wire.batch import PRINTABLE

if TYPE_CHECKING:
    from collections.abc import Sequence

_END = struct.Struct("<I")


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
    sizes = [*map(len, keys)]
    # Valid only if the line feeds between names are the only characters that are not printable.
    if min(sizes) < 1 or max(sizes) > bytes_max or len(raw.translate(None, PRINTABLE)) != count - 1:
        return None
    return "".join(keys).encode("ascii"), _pack_ends(accumulate(sizes), count)


def _pack_single(name: object, bytes_max: int) -> tuple[bytes, bytes] | None:
    if not (isinstance(name, str) and name.isascii() and name.isprintable() and 0 < len(name) <= bytes_max):
        return None
    return name.encode("ascii"), _END.pack(len(name))


def _pack_ends(ends: accumulate[int], count: int) -> bytes:
    return struct.pack(f"<{count}I", *ends)
