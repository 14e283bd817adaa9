"""CRC32C (Castagnoli), from the `crc32c` package.

The only module that imports it, so that another implementation can take its place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from crc32c import crc32c as _crc32c

if TYPE_CHECKING:
    from typing_extensions import Buffer


def crc32c(data: Buffer, value: int = 0) -> int:
    """Checksum of `data`, going on from `value`; an unsigned 32-bit number."""
    return _crc32c(data, value)
