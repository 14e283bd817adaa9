"""Names of many rows looked over and laid out together, without a look at each.

What is no plain name is left to who looks at them one by one.
"""

from __future__ import annotations

import struct
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

from delta_prop_wire.batch import PRINTABLE

if TYPE_CHECKING:
    from collections.abc import Sequence

_LINE = 10
_END = struct.Struct("<I")
_FEW = 60
"""Below so many names a loop is quicker than calls of numpy."""


def laid_out(names: Sequence[str], bytes_max: int) -> tuple[bytes, bytes] | None:
    """Names of printable ASCII as bytes, one behind the other, and where each ends (u32, little-endian).

    None where one is empty, longer than `bytes_max`, or anything else.
    """
    if len(names) == 1:
        return _alone(names[0], bytes_max)
    try:
        text = "\n".join(names)
    except TypeError:
        return None
    count = len(names)
    if not count or not text.isascii():
        return None
    raw = text.encode("ascii")
    if count < _FEW:
        sizes = [*map(len, names)]
        if min(sizes) < 1 or max(sizes) > bytes_max or len(raw.translate(None, PRINTABLE)) != count - 1:
            return None
        return "".join(names).encode("ascii"), _pack(accumulate(sizes), count)
    # Of all characters that are not printable there are as many as stand between names, and those are lines.
    if len(raw.translate(None, PRINTABLE)) != count - 1 or raw.count(b"\n") != count - 1:
        return None
    stops = np.empty(count, np.int64)
    stops[:-1] = (np.frombuffer(raw, np.uint8) == _LINE).nonzero()[0]
    stops[-1] = len(raw)
    stops -= np.arange(count)
    widths = stops[1:] - stops[:-1]
    first = int(stops[0])
    if min(first, int(widths.min())) < 1 or max(first, int(widths.max())) > bytes_max:
        return None
    return raw.replace(b"\n", b""), stops.astype("<u4").tobytes()


def _alone(name: object, bytes_max: int) -> tuple[bytes, bytes] | None:
    if not (isinstance(name, str) and name.isascii() and name.isprintable() and 0 < len(name) <= bytes_max):
        return None
    return name.encode("ascii"), _END.pack(len(name))


def _pack(stops: accumulate[int], count: int) -> bytes:
    return struct.pack(f"<{count}I", *stops)
