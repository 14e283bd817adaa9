"""Chooses the core by the environment, as it is when the package is imported.

The native core is taken if it is installed in the version that this package needs.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache

from delta_prop_wire.core import BOUNDARY, VARIABLE, Core, core_mode


@cache
def _make_native_core() -> Core:
    from delta_prop_wire.native_core import NativeCore

    return NativeCore()


def _find_native_core() -> Callable[[], Core]:
    """Return what makes the native core. Raises ImportError. Imports the extension only."""
    import delta_prop_core

    if delta_prop_core.BOUNDARY != BOUNDARY:
        raise ImportError(f"it has boundary {delta_prop_core.BOUNDARY}, but {BOUNDARY} is needed")
    return _make_native_core


def _default() -> str:
    try:
        _find_native_core()
    except ImportError:
        return "python"
    return "native"


core_mode.install(_find_native_core)
_given = os.environ.get(VARIABLE)
core_mode.choose_at_use(lambda: _given or _default())
