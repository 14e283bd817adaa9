"""A propagator in virtual time, run by a function and by the pytest fixture of a user's project."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import anyio
import pytest

from delta_prop import Delta, Propagator, opaque
from delta_prop.sinks import CallbackSink
from delta_prop.testing import Stuck, run_propagator

if TYPE_CHECKING:
    from pathlib import Path

USERS_TEST = """
import anyio
from delta_prop import Delta, create

def test_mine(run_propagator):
    async def main(p):
        await anyio.sleep(3600)
        return await p.publish(Delta("v", create([1.0])))

    assert run_propagator(main).offset == 0
"""


def test_plugin_fixture_works_in_a_users_project(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["delta_prop.testing.plugin"]\n')
    (tmp_path / "test_mine.py").write_text(USERS_TEST)
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout
    assert "1 passed" in run.stdout


def test_runs_with_one_seed_are_identical() -> None:
    async def main(p: Propagator) -> tuple[object, float]:
        published = await p.publish(Delta("v", opaque(b"x")), Delta("w", opaque(b"x")))
        return published.dot, anyio.current_time()

    assert run_propagator(main) == run_propagator(main)
    assert run_propagator(main, seed=1) != run_propagator(main, seed=2)


def test_sink_that_waits_forever_raises_stuck() -> None:
    async def wait_forever(*_: object) -> None:
        await anyio.sleep_forever()

    async def main(p: Propagator) -> None:
        await p.attach(CallbackSink(wait_forever))
        await p.publish(Delta("v", opaque(b"x")))
        await p.wait_visible(1, timeout_s=1e9)

    with pytest.raises(Stuck, match="horizon"):
        run_propagator(main, horizon_s=100)
