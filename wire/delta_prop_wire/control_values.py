"""Readers of values that several control frames hold: each converts a msgpack value or raises ValueError."""

from __future__ import annotations

from typing import Any

from delta_prop_wire.cursor import LOG_ID_BYTES, Cursor
from delta_prop_wire.frames import Credit
from delta_prop_wire.packing import U16_MAX, U32_MAX, blob, record, text, uint
from delta_prop_wire.spec import COUNTER_MAX

NAME_BYTES_MAX = 255

read_u16 = uint(U16_MAX)
read_u32 = uint(U32_MAX)
read_u64 = uint()
read_offset = uint(COUNTER_MAX)
read_name = text(NAME_BYTES_MAX)
read_log_id = blob(LOG_ID_BYTES, LOG_ID_BYTES)

_cursor_parts = record(read_log_id, read_offset, read_offset)
_credit_parts = record(read_u64, read_u64)


def read_cursor(value: Any) -> Cursor:
    """Read `[log id, epoch, next offset]`."""
    return Cursor(*_cursor_parts(value))


def read_credit(value: Any) -> Credit:
    """Read `[deltas, bytes]`."""
    return Credit(*_credit_parts(value))
