"""What is said of a place that the log has not come to yet."""

from __future__ import annotations

from delta_prop_wire.errors import UsageError


def check_reached(option: str, offset: int, end: int) -> None:
    """Raise UsageError where a read is to begin or end behind the next offset that the log will have."""
    if offset <= end:
        return
    last = f"its last delta has offset {end - 1}, the next one will have {end}" if end else "it is empty"
    raise UsageError(
        f"{option} {offset} is beyond the end of the log: {last}; give an offset up to {end}, earliest or "
        "latest"
    )
