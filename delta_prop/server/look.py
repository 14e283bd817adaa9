"""What a server tells of itself: what the HTTP port needs to know, and the plain values it is told as.

A look is a snapshot: it waits for nothing and changes nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from enum import Enum
from math import isfinite
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from delta_prop.server.counters import Counters
    from delta_prop.statistics import Statistics


class Look(Protocol):
    """Asked while a server starts, serves and ends."""

    def ready(self) -> str | None:
        """None where deltas are taken, else why not, in words that anybody may read."""
        ...

    def status(self) -> dict[str, Any]:
        """The server as a whole, for JSON."""
        ...

    def sinks(self) -> list[dict[str, Any]]:
        """Each sink, for JSON."""
        ...

    def statistics(self) -> Statistics | None:
        """What the propagator counts; None while there is none."""
        ...

    def counters(self) -> Counters | None:
        """What connections count; None while none are taken."""
        ...

    def peers(self) -> list[dict[str, Any]]:
        """Each connection, for JSON."""
        ...

    def groups(self) -> list[dict[str, Any]]:
        """Each group of subscribers, for JSON."""
        ...

    async def refresh(self) -> None:
        """Find out what has to be read from the disk, before it is told."""
        ...

    def jobs(self) -> list[dict[str, Any]]:
        """Each job, for JSON."""
        ...


def plain(value: Any) -> Any:
    """A value as JSON has it: dataclasses as objects, enums by name, bytes in hexadecimal, no number that
    JSON lacks.
    """
    if isinstance(value, Enum):
        return value.name.lower()
    if isinstance(value, bool | int | str) or value is None:
        return value
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, bytes):
        return value.hex()
    if dataclasses.is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(plain(key)): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return str(value)
