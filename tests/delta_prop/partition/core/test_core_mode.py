"""The environment chooses the core's mode when the package is imported."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from delta_prop_wire.core import VARIABLE, CoreMode
from delta_prop_wire.errors import UsageError
from delta_prop_wire.fast.fast_core import FastCore

PROGRAM = "import delta_prop; from delta_prop_wire.core import core_mode; print(core_mode.is_fast)"


@pytest.mark.parametrize(
    ("value", "expected"), [(None, "True"), ("fast", "True"), ("general", "False"), ("slow", "give fast or")]
)
def test_environment_chooses_the_mode(value: str | None, expected: str) -> None:
    environment = {name: text for name, text in os.environ.items() if name != VARIABLE}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path)} | ({} if value is None else {VARIABLE: value})
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=False
    )
    assert expected in done.stdout + done.stderr


def test_switched_mode_ends_with_the_block() -> None:
    mode = CoreMode()
    assert not mode.is_fast
    mode.install(FastCore)
    mode.choose("fast")
    with mode.switched("general"):
        assert not mode.is_fast
        with mode.switched("fast"):
            assert mode.is_fast
        assert not mode.is_fast
    assert mode.is_fast
    with pytest.raises(UsageError, match="DELTA_PROP_CORE='': give fast or general"):
        mode.choose("")
