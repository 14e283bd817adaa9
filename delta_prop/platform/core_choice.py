"""Chooses the core by the environment, once, when the package is imported."""

from __future__ import annotations

import os

from delta_prop_wire.core import VARIABLE, core_mode

if os.environ.get(VARIABLE) != "general":  # then a core that cannot be imported does no harm
    from delta_prop_wire.fast.fast_core import FastCore

    core_mode.install(FastCore())
core_mode.choose(os.environ.get(VARIABLE, "fast"))
