"""The way of a delta is short: the stations that docs/architecture.md lists are those that calls pass."""

from __future__ import annotations

import re
from pathlib import Path

import anyio

from delta_prop import Delta, Propagator, create
from delta_prop.platform.world import real_world
from delta_prop.sinks import CacheSink
from delta_prop_wire.frames import BatchFrame, Credit
from tests.delta_prop.server.raw import ORIGIN, connected, opaque_batch, serving
from tests.stations import Way, traced


async def trace_publish() -> Way:
    async with Propagator() as p:
        await p.attach(CacheSink())
        await p.publish(Delta("a", create([1.0, 2.0])))
        await anyio.sleep(0.01)  # the next call is the first of its tick
        delta = Delta("b", create([1.0, 2.0]))
        with traced(from_tests=True) as way:
            await p.publish(delta)
        return way


async def trace_wire() -> Way:
    async with (
        Propagator() as p,
        serving(p) as (_, address),
        connected(address, real_world().network) as producer,
        connected(address, real_world().network) as subscriber,
    ):
        await subscriber.hello()
        await subscriber.subscribe(credit=Credit(1 << 20, 1 << 30))
        await producer.hello(ORIGIN)
        await producer.send(opaque_batch(1, 100))
        await subscriber.until(BatchFrame)
        await producer.until_acked(1)
        await anyio.sleep(0.05)
        with traced(from_tests=False) as way:
            await producer.send(opaque_batch(101, 100))
            await subscriber.until(BatchFrame)
            await producer.until_acked(101)
        return way


def listed_stations(heading: str) -> list[tuple[str, str]]:
    """Return the stations below a heading of architecture.md: lines of a code block, `path function`."""
    page = Path("docs/architecture.md").read_text("utf-8")
    block = re.search(rf"### {heading}\n.*?```\n(.*?)```", page, re.DOTALL)
    assert block is not None, f"docs/architecture.md has no list below {heading!r}"
    lines = re.findall(r"^\s*(\S+\.py) +(\S+)", block.group(1), re.MULTILINE)
    return [(path, name) for path, name in lines]


def test_lone_publish_passes_the_listed_stations() -> None:
    way = anyio.run(trace_publish)
    assert way.stations == listed_stations("A lone publish")
    assert len(way.stations) <= 20, way.stations
    assert len(way.files) <= 12, way.files


def test_batch_from_wire_to_subscriber_passes_the_listed_stations() -> None:
    way = anyio.run(trace_wire)
    assert set(way.stations) <= set(listed_stations("From the wire to a subscriber"))
    assert len(way.stations) <= 24, way.stations
    assert len(way.backward) <= 4, way.backward
