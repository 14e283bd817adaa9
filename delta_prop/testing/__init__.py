"""For tests of programs that embed delta-prop: virtual time and the world that goes with it."""

from __future__ import annotations

from delta_prop.testing.loop import Stuck, VirtualLoop, run_virtual
from delta_prop.testing.world import virtual_world

__all__ = ["Stuck", "VirtualLoop", "run_virtual", "virtual_world"]
