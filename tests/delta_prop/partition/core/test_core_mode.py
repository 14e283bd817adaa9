"""The environment chooses the core when the package is imported."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from delta_prop_wire.core import VARIABLE, Core, CoreMode
from delta_prop_wire.errors import UsageError
from tests.native_core import needs_native_core

PROGRAM = "import delta_prop; from delta_prop_wire.core import core_mode; print(core_mode.name)"
WITHOUT = "import sys; sys.modules['delta_prop_core'] = None; "


def run(program: str, value: str | None) -> str:
    environment = {name: text for name, text in os.environ.items() if name != VARIABLE}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path)} | ({} if value is None else {VARIABLE: value})
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False
    )
    return done.stdout + done.stderr


@needs_native_core
@pytest.mark.parametrize("value", [None, "", "native"])
def test_the_native_core_is_chosen(value: str | None) -> None:
    assert run(PROGRAM, value) == "native\n"


def test_the_environment_chooses_python() -> None:
    assert run(PROGRAM, "python") == "python\n"
    assert "DELTA_PROP_CORE='slow': give native or python" in run(PROGRAM, "slow")


def test_without_a_native_core_python_runs() -> None:
    assert run(WITHOUT + PROGRAM, None) == "python\n"
    assert "DELTA_PROP_CORE=native: there is no native core" in run(WITHOUT + PROGRAM, "native")


def test_a_core_of_another_boundary_is_not_taken() -> None:
    other = "import sys, types; sys.modules['delta_prop_core'] = types.SimpleNamespace(BOUNDARY=0); "
    assert run(other + PROGRAM, None) == "python\n"
    assert "boundary 0" in run(other + PROGRAM, "native")


def test_switched_mode_ends_with_the_block() -> None:
    mode = CoreMode()
    assert mode.name == "python"
    mode.install(lambda: Core)
    mode.choose("native")
    with mode.switched("python"):
        assert mode.name == "python"
        with mode.switched("native"):
            assert mode.name == "native"
        assert not mode.is_native
    assert mode.is_native
    with pytest.raises(UsageError, match="DELTA_PROP_CORE='': give native or python"):
        mode.choose("")
