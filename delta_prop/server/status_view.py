"""The view of a server's status that the HTTP port reads, and the conversion of values for JSON.

A view is a snapshot: it waits for nothing and changes nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from enum import Enum
from math import isfinite
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from delta_prop.api.statistics import Statistics
    from delta_prop.server.counters import Counters, JobCounts


class StatusView(Protocol):
    """The status of a server that starts, serves or ends."""

    def unready_reason(self) -> str | None:
        """Return None while deltas are accepted, else the reason why not; it must not be secret."""
        ...

    def status(self) -> dict[str, Any]:
        """Return the status of the server, for JSON."""
        ...

    def sinks(self) -> list[dict[str, Any]]:
        """Return each sink, for JSON."""
        ...

    def statistics(self) -> Statistics | None:
        """Return the statistics of the propagator; None while there is none."""
        ...

    def counters(self) -> Counters | None:
        """Return the counters of connections; None while none are accepted."""
        ...

    def job_counts(self) -> JobCounts | None:
        """Return the counts of jobs; None while no connections are accepted."""
        ...

    def connections(self) -> list[dict[str, Any]]:
        """Return each connection, for JSON."""
        ...

    def groups(self) -> list[dict[str, Any]]:
        """Return each group of subscribers, for JSON."""
        ...

    async def refresh(self) -> None:
        """Read what a status needs from the disk."""
        ...

    def jobs(self) -> list[dict[str, Any]]:
        """Return each job, for JSON."""
        ...


def to_json_value(value: Any) -> Any:
    """Convert a value for JSON.

    Dataclasses become objects, enums names, bytes hexadecimal text; infinite numbers and NaN become null.
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
        return {field.name: to_json_value(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(to_json_value(key)): to_json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json_value(item) for item in value]
    return str(value)
