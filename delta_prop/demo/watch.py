"""Which texts of a folder changed since the last look, told by time of change and size.

Compares two scans; the scan itself, and how often it is made, is the caller's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

POLL_S = 0.5


class Changes(NamedTuple):
    """Paths to read again, and paths that are gone."""

    touched: list[str]
    gone: list[str]


def changes(before: Mapping[str, tuple[int, int]], after: Mapping[str, tuple[int, int]]) -> Changes:
    """What a later scan shows, in order of path."""
    touched = sorted(path for path, stat in after.items() if before.get(path) != stat)
    return Changes(touched, sorted(before.keys() - after.keys()))
