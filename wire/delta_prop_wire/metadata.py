"""Changes of metadata: JSON merge patches (RFC 7396), applied.

Pure. Changes nothing in place, since a patch may belong to a shared batch. `bounds.py` checks depth.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def merge(target: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """Apply `patch` to a copy of `target`: null removes a member, an object merges, all else replaces."""
    merged = dict(target)
    for name, value in patch.items():
        if value is None:
            merged.pop(name, None)
        elif isinstance(value, dict):
            current = merged.get(name)
            merged[name] = merge(current if isinstance(current, dict) else {}, value)
        else:
            merged[name] = value
    return merged
