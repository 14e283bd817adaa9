"""CRC32C (Castagnoli), from the `crc32c` package.

The only module that imports it, so that another implementation can take its place.
"""

from __future__ import annotations

from collections.abc import Callable

from crc32c import crc32c as _crc32c

crc32c: Callable[..., int] = _crc32c
"""`crc32c(data, value=0)`: the checksum of a buffer, continued from `value`; an unsigned 32-bit number."""
