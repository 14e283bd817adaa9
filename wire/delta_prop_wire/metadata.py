"""Changes of metadata: JSON merge patches (RFC 7396), applied and composed.

Pure, and never in place: a patch may lie in a batch that others read. Depth is `validate.py`'s matter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


def merge(target: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """What `target` becomes under `patch`: null removes a member, an object merges, all else replaces."""
    merged = dict(target)
    for name, value in patch.items():
        if value is None:
            merged.pop(name, None)
        elif isinstance(value, dict):
            below = merged.get(name)
            merged[name] = merge(below if isinstance(below, dict) else {}, value)
        else:
            merged[name] = value
    return merged


def compose(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any] | None:
    """The one patch that does what `first` and then `second` do to any target; None where none does.

    None comes where `first` removes or replaces a member that `second` then builds up as an object:
    a merge patch cannot say "put this object in the place of what is there".
    """
    composed = dict(first)
    for name, value in second.items():
        below = composed.get(name)
        if not isinstance(value, dict) or name not in composed:
            composed[name] = value
        elif not isinstance(below, dict):
            return None
        else:
            inner = compose(below, value)
            if inner is None:
                return None
            composed[name] = inner
    return composed
