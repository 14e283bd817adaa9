"""The native core for tests that compare it with its twin, and the mark of tests that need it."""

from __future__ import annotations

from typing import Any

import pytest

import delta_prop  # noqa: F401 - chooses the core
from delta_prop_wire.core import core_mode

NativeCore: Any
try:
    from delta_prop_wire.native_core import NativeCore
except ImportError:
    NativeCore = None

needs_native_core = pytest.mark.skipif(
    NativeCore is None, reason="no native core: ./run builds it with cargo"
)

coalesces_calls = pytest.mark.skipif(
    not core_mode.is_native, reason="the twin runs, which makes each call a batch of its own"
)
