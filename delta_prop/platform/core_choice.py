"""Chooses the core by the environment, once, when the package is imported.

The native core is taken if it is installed in the version that this package needs.
"""

from __future__ import annotations

import os
from functools import cache

from delta_prop_wire.core import VARIABLE, Core, core_mode


@cache
def _make_native_core() -> Core:
    from delta_prop_wire.native_core import NativeCore

    return NativeCore()


def _default() -> str:
    try:
        _make_native_core()
    except ImportError:
        return "python"
    return "native"


core_mode.install(_make_native_core)
core_mode.choose(os.environ.get(VARIABLE) or _default())
