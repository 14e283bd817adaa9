"""Growth: a service holds what it says, and what it costs is told beside the small one."""

from __future__ import annotations

import multiprocessing
import tempfile

import anyio

from benchmarks import _growth_service, growth
from benchmarks._growth_service import ROWS, Holdings, Load, hold, settings_of
from benchmarks.growth import BASE, LARGE
from delta_prop.embedded import Propagator
from delta_prop_wire.delta import Kind


def test_a_service_holds_what_it_is_to_hold() -> None:
    held = Holdings("some", vectors=1_500, subscriptions=3, sinks=2, pending=20, heads_max=1_000)

    async def play() -> None:
        with tempfile.TemporaryDirectory() as folder:
            async with Propagator(settings_of(held), data=folder) as propagator:
                load = Load(propagator, held.vectors)
                await load.build()
                async with anyio.create_task_group() as tasks:
                    await hold(propagator, held, tasks)
                    told = propagator.statistics()
                    assert (told.accepted, told.pending.pending_deltas, len(told.sinks)) == (1_500, 20, 5)
                    for kind in (Kind.DENSE, Kind.SPARSE):
                        assert await load.measure(kind, 3 * ROWS) > 0
                    assert propagator.statistics().accepted == 1_500 + 6 * ROWS
                    assert propagator.sink("taken-1").statistics() == 6 * ROWS
                    tasks.cancel_scope.cancel()

    anyio.run(play)


def test_a_service_that_cannot_be_built_says_why() -> None:
    here, there = multiprocessing.Pipe()
    _growth_service._run(Holdings("none", vectors=1, heads_max=-1), there)
    said = here.recv()
    assert said.startswith("none: ")
    assert "heads_max" in said


def test_goals_are_of_the_service_that_holds_most() -> None:
    costs = {(BASE, Kind.DENSE): [1.0, 2.0, 4.0], (LARGE, Kind.DENSE): [1.5, 3.0, 20.0]}
    results = growth.report(costs)
    (goal,) = results.goals
    assert (goal["row"], goal["found"]["median"], goal["verdict"]) == ("17", 1.5, "reached")
    assert results.figures[f"{LARGE}, dense"]["median"] == 3.0
    assert "1.5 (1.5-5)" in results.text()
