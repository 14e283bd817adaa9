"""The pytest fixture `run_propagator`. Enable it in a conftest.py by
`pytest_plugins = ["delta_prop.testing.plugin"]`. It needs no plugin for asynchronous tests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from delta_prop.testing.recorded import run_propagator as run


def _make_fixture() -> Callable[..., Any]:
    import pytest

    @pytest.fixture(name="run_propagator")
    def run_propagator_fixture() -> Callable[..., Any]:
        """Return `run_propagator`, which runs `main(propagator)` in virtual time."""
        return run

    return run_propagator_fixture


run_propagator = _make_fixture()
