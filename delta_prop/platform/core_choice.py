"""Chooses the core by the environment, once, when the package is imported."""

from __future__ import annotations

import os
from functools import cache

from delta_prop_wire.core import VARIABLE, Core, core_mode


@cache
def _make_fast_core() -> Core:
    from delta_prop_wire.fast.fast_core import FastCore

    return FastCore()


core_mode.install(_make_fast_core)
core_mode.choose(os.environ.get(VARIABLE, "fast"))
