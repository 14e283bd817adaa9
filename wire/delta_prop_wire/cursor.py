"""A cursor: the position of a reader in one partition, and the log that it reads.

An offset means nothing in another log, so the three parts travel together.
"""

from __future__ import annotations

from typing import NamedTuple

from delta_prop_wire.errors import UsageError

LOG_ID_BYTES = 16


class Cursor(NamedTuple):
    """(log id, epoch, next offset): everything below `next_offset` has been processed."""

    log_id: bytes
    epoch: int
    next_offset: int

    def __str__(self) -> str:
        return f"{self.log_id.hex()}:{self.epoch}:{self.next_offset}"

    @classmethod
    def parse(cls, text: str) -> Cursor:
        """Parse the text that `str` gives. Raises UsageError."""
        parts = text.split(":")
        try:
            log_id, epoch, next_offset = bytes.fromhex(parts[0]), int(parts[1]), int(parts[2])
        except (IndexError, ValueError):
            log_id, epoch, next_offset = b"", -1, -1
        if len(parts) != 3 or len(log_id) != LOG_ID_BYTES or epoch < 0 or next_offset < 0:
            raise UsageError(
                f"cursor {text!r} is malformed: give LOG_ID:EPOCH:OFFSET (32 hex digits, two numbers)"
            )
        return cls(log_id, epoch, next_offset)
