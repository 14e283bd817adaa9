"""The growth benchmark: memory and CPU of a large service, as ratios to a small one."""

from __future__ import annotations

import multiprocessing
import tempfile

import anyio

from benchmarks import _growth_service, growth
from benchmarks._growth_service import ROWS, Holdings, Load, hold, settings_of
from benchmarks.growth import BASE, LARGE
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


def test_goals_use_largest_service() -> None:
    costs = {(BASE, Kind.DENSE): [1.0, 2.0, 4.0], (LARGE, Kind.DENSE): [1.5, 3.0, 20.0]}
    results = growth.report(costs)
    (goal,) = results.goals
    assert (goal["row"], goal["found"]["median"], goal["verdict"]) == ("17", 1.5, "reached")
    assert results.figures[f"{LARGE}, dense"]["median"] == 3.0
    assert "1.5 (1.5-5)" in results.text()
