"""Chooses the core's mode by the environment, once, when the package is imported."""

from __future__ import annotations

import os

from delta_prop_wire.core_mode import VARIABLE, core_mode

core_mode.choose(os.environ.get(VARIABLE, "fast"))
