"""Detects changed texts of a folder by modification time and size.

It compares two scans; the caller makes the scans.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

POLL_S = 0.5


class Changes(NamedTuple):
    """Paths that are new or modified, and paths that were removed."""

    modified: list[str]
    removed: list[str]


def compare_scans(before: Mapping[str, tuple[int, int]], after: Mapping[str, tuple[int, int]]) -> Changes:
    """Return the changes between two scans, ordered by path."""
    modified = sorted(path for path, stat in after.items() if before.get(path) != stat)
    return Changes(modified, sorted(before.keys() - after.keys()))
