"""Tests for a program that embeds the propagator: in memory, in virtual time, with a recorder.

pytest examples/test_with_fixture.py
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio
import pytest

from delta_prop import Delta, Refused, Settings, create, scale
from delta_prop.sinks import CallbackSink

if TYPE_CHECKING:
    from delta_prop import Propagator
    from delta_prop.testing import RecordedPropagator

pytest_plugins = ["delta_prop.testing.plugin"]  # usually in conftest.py


async def halve_each_hour(p: Propagator, vector_id: str) -> None:
    """Halve a vector each hour. This is the program's own code, which a test checks."""
    while True:
        await anyio.sleep(3600)
        await p.publish(Delta(vector_id, scale(0.5)))


def test_halving_runs_each_hour(run_propagator: Any) -> None:
    async def halve_for_hours(p: RecordedPropagator) -> None:
        await p.publish_lines('{"vector_id": "weight", "op": "create", "vector": [128]}')
        with anyio.move_on_after(4.5 * 3600):
            await halve_each_hour(p, "weight")
        await p.settle()
        assert p.recorder.vector_ids == ["weight"] * 5

    run_propagator(halve_for_hours)  # the virtual hours pass within a second


def test_publish_is_refused_while_a_slow_sink_needs_the_full_log(run_propagator: Any) -> None:
    async def fill_log(p: RecordedPropagator) -> None:
        await p.attach(CallbackSink(lambda *_: anyio.sleep(3600), name="slow"))
        for n in range(10):
            await p.publish(Delta(f"v{n}", create([1.0])))
        with pytest.raises(Refused, match="sink 'slow' still needs the oldest"):
            await p.publish(Delta("one more", create([1.0])), timeout_s=60)

    run_propagator(fill_log, Settings(log_deltas_max=10, close_timeout_s=1))
