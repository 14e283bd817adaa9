"""The twin of the native core runs each package by itself: log, sinks, service, client, simulation."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROGRAM = """
import sys
sys.modules["delta_prop_core"] = None  # an import of it fails
import anyio
from delta_prop import Delta, Propagator, create, opaque, sparse
from delta_prop.client import Producer
from delta_prop.sinks import CacheSink, IndexSink, StorageSink
from delta_prop_simulations.chaos.chaos_run import run
from delta_prop_simulations.chaos.plan_generator import draw
from delta_prop_wire.core import core_mode
from tests.delta_prop.server.raw import serving

assert core_mode.name == "python"
folder = sys.argv[1]


async def main():
    async with Propagator(data=f"{folder}/log") as p:
        cache = CacheSink()
        await p.attach(cache)
        await p.attach(StorageSink(f"{folder}/facts.db"))
        await p.attach(IndexSink())
        await p.publish(Delta("a", create([1.0, 2.0])))
        await p.publish_many(["b", "c"], [[3.0, 4.0], [5.0, 6.0]])
        async with serving(p) as (_, address):
            async with Producer(f"{address.host}:{address.port}", name="remote") as producer:
                await producer.publish(Delta("a", sparse([1], [7.0])), Delta("d", opaque(b"x")))
        await p.wait_visible(p.statistics().log.next_offset)
        print((await cache.get("default", "a")).vector.tolist(), p.statistics().accepted)
    async with Propagator(data=f"{folder}/log") as p:
        print(p.statistics().log.next_offset)


anyio.run(main)
outcome = run(draw(7))
print(outcome.violation, outcome.delta_count > 0)
"""


def test_each_package_runs_without_the_native_core(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        timeout=120,
    )
    assert done.stdout == "[1.0, 7.0] 5\n5\nNone True\n", done.stderr
