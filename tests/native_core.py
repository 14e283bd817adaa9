"""The native core for tests that compare it with its twin, and the mark of tests that need it."""

from __future__ import annotations

from typing import Any

import pytest

NativeCore: Any
try:
    from delta_prop_wire.native_core import NativeCore
except ImportError:
    NativeCore = None

needs_native_core = pytest.mark.skipif(
    NativeCore is None, reason="no native core: ./run builds it with cargo"
)
