"""Checks that a position is not after the end of the log."""

from __future__ import annotations

from delta_prop_wire.errors import UsageError


def check_not_beyond(option: str, offset: int, end: int) -> None:
    """Raise UsageError if the bound of a read, from `option`, is after the log's next offset."""
    if offset <= end:
        return
    last = f"its last delta has offset {end - 1}, the next one will have {end}" if end else "it is empty"
    raise UsageError(
        f"{option} {offset} is after the end of the log ({last}): give an offset up to {end}, earliest or "
        "latest"
    )
