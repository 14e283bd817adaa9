"""Detects changed texts of a folder by time of change and size.

Compares two scans; the caller scans, as often as it likes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

POLL_S = 0.5


class Changes(NamedTuple):
    """Paths to read, and paths that were removed."""

    modified: list[str]
    removed: list[str]


def compare_scans(before: Mapping[str, tuple[int, int]], after: Mapping[str, tuple[int, int]]) -> Changes:
    """Compare two scans, ordered by path."""
    touched = sorted(path for path, stat in after.items() if before.get(path) != stat)
    return Changes(touched, sorted(before.keys() - after.keys()))
