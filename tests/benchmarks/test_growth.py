"""The growth benchmark: memory and CPU of a large service, as ratios to a small one."""

from __future__ import annotations

import multiprocessing
import tempfile

import anyio
import pytest

from benchmarks import _growth_service, growth
from benchmarks._growth_service import ROWS, Holdings, Load, hold, settings_of
from benchmarks.growth import BASE, CASES, LARGE
from delta_prop.api.propagator import Propagator
from delta_prop_wire.delta import Kind


def test_service_holds_configured_load() -> None:
    holdings = Holdings("some", vectors=1_500, subscriptions=3, sinks=2, pending=20, heads_max=1_000)

    async def play() -> None:
        with tempfile.TemporaryDirectory() as folder:
            async with Propagator(settings_of(holdings), data=folder) as propagator:
                load = Load(propagator, holdings.vectors)
                await load.build()
                async with anyio.create_task_group() as tasks:
                    await hold(propagator, holdings, tasks)
                    statistics = propagator.statistics()
                    assert (
                        statistics.accepted,
                        statistics.pending.pending_deltas,
                        len(statistics.sinks),
                    ) == (1_500, 20, 5)
                    for kind in (Kind.DENSE, Kind.SPARSE):
                        assert await load.measure(kind, 3 * ROWS) > 0
                    assert propagator.statistics().accepted == 1_500 + 6 * ROWS
                    assert propagator.sink("taken-1").statistics() == 6 * ROWS
                    tasks.cancel_scope.cancel()

    anyio.run(play)


def test_failed_service_build_reports_reason() -> None:
    receiver, sender = multiprocessing.Pipe()
    _growth_service._run(Holdings("none", vectors=1, heads_max=-1), sender)
    message = receiver.recv()
    assert message.startswith("none: ")
    assert "heads_max" in message


def test_goals_relate_largest_service_to_small_one() -> None:
    costs = {(BASE, Kind.DENSE): [1.0, 2.0, 4.0], (LARGE, Kind.DENSE): [1.2, 2.1, 20.0]}
    held_bytes = {case: 5e6 + 50 * case.vectors for case in CASES if case.name in (BASE, LARGE)}
    results = growth.report(costs, held_bytes)
    cpu, memory = results.goals
    assert (cpu["row"], cpu["verdict"]) == ("11", "reached")
    assert cpu["found"]["median"] == pytest.approx(0.2)
    assert (memory["row"], memory["found"]["median"], memory["verdict"]) == ("11", 50.0, "reached")
    assert results.figures[f"{LARGE}, dense"]["median"] == 2.1
    assert "1.2 (1.05-5)" in results.text()
