"""The cost of merging the deltas of two services that wrote to the same few vectors during a network cut.

In real time, over sockets, with a log on disk, storage, an index and a cache. Each round merges few deltas
and ten times as many; if a median exceeds its bound, more rounds are run, and all rounds count. With the full
amounts, Python's garbage collector would take half a second now and then, so it is off.
"""

from __future__ import annotations

import gc
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from delta_prop import Delta, Propagator, create, scale, sparse, sparse_add
from delta_prop.client import ClientSettings, ForwardLink
from delta_prop.server.service import Service as Server
from delta_prop.server.settings import ServerSettings
from delta_prop.sinks import CacheSink, ForwardSink, IndexSink, StorageSink
from delta_prop_wire.algebra import fold
from tests.full_log import read_all
from tests.net.proxy import Proxy, proxy_to

if TYPE_CHECKING:
    from pathlib import Path

    from delta_prop_wire.delta import Operation

VECTORS, DIMENSION = 10, 16
ROUNDS_MIN, ROUNDS_MAX = 3, 7
CONVERGED_S_MAX = 5.0
WAIT_S_MAX, WAIT_SHARE_MAX = 0.1, 0.1
"""Bounds of the longest wait: seconds, or (on a slower machine) a share of the CPU time of the merge."""
CPU_GROWTH_MAX = 12.0
SAMPLE_S = 0.002


@dataclass(frozen=True)
class Merge:
    """One merge: how many deltas each side sent, and its cost after the cut was healed.

    `seconds`: wall time, which is meaningful only on a quiet machine. `cpu_s`: CPU time of both services,
    which share this process. `wait_s`: the longest wait for the event loop, in CPU time. `refolded`: deltas
    that were folded to insert out-of-order deltas.
    """

    delta_count: int
    seconds: float
    cpu_s: float
    wait_s: float
    refolded: int


class Side:
    """One of the two services."""

    def __init__(self, folder: Path, number: int) -> None:
        self.storage = StorageSink(folder / f"{number}.db")
        self.index = IndexSink(resident=self.storage.resident)
        self.p = Propagator(data=str(folder / f"log-{number}"))

    async def open(self, exits: AsyncExitStack) -> None:
        await exits.enter_async_context(self.p)
        for sink in (self.storage, self.index, CacheSink(loader=self.storage.get)):
            await self.p.attach(sink)
        tasks = await exits.enter_async_context(anyio.create_task_group())
        self.server = Server(self.p, ServerSettings(port=0))
        await tasks.start(self.server.run)
        exits.callback(tasks.cancel_scope.cancel)

    async def forward_to(self, other: Side, exits: AsyncExitStack) -> Proxy:
        assert other.server.address is not None
        proxy = await exits.enter_async_context(proxy_to(other.server.address))
        self.link = ForwardLink(
            "{}:{}".format(*proxy.address), settings=ClientSettings(reconnect_timeout_s=600)
        )
        await self.p.attach(ForwardSink(self.link))
        return proxy

    async def write(self, count: int) -> None:
        """Publish one delta per frame, of kinds that do not commute."""
        for number in range(count):
            receipt = self.p.offer(Delta(f"v{number % VECTORS}", operation_of(number)))
            if number % 200 == 199 or number == count - 1:
                await receipt

    def has_all(self, delta_count: int) -> bool:
        """True if the log and all sinks have exactly `delta_count` deltas."""
        statistics = self.p.statistics()
        return statistics.log.next_offset == delta_count and not any(
            sink.lag for sink in statistics.sinks.values()
        )

    def states(self) -> dict[str, Any]:
        return {name: (state.content, state.key, state.ignored) for _, name, state in self.index.rows()}


def operation_of(number: int) -> Operation:
    index = number % DIMENSION
    return (
        sparse_add([index], [number]),
        sparse([index, 0], [number, 1]),
        sparse_add([index, 3], [0.1, number]),
        scale(-0.5),
    )[number // VECTORS % 4]


def expected_states(side: Side) -> dict[str, Any]:
    """Return the fold of all deltas in the log, in canonical order."""
    rows: dict[str, list[Any]] = {}
    for logged in read_all(side.p.internals().partition.log):
        for row, name in enumerate(logged.batch.keys):
            rows.setdefault(name, []).append((logged.key(row), logged.batch.operation(row), None))
    folded = {name: fold(operations) for name, operations in rows.items()}
    return {name: (state.content, state.key, state.ignored) for name, state in folded.items()}


class LoopWatch:
    """Measures the longest wait for the event loop, by its thread's CPU time."""

    def __init__(self) -> None:
        self.wait_s = 0.0

    async def run(self) -> None:
        while True:
            began = time.thread_time()
            await anyio.sleep(SAMPLE_S)
            self.wait_s = max(self.wait_s, time.thread_time() - began - SAMPLE_S)


async def run_merge(folder: Path, count: int) -> Merge:
    """Write `count` deltas on each side of a cut, heal the cut, and wait until both sides have all deltas."""
    async with AsyncExitStack() as exits:
        sides = [Side(folder, number) for number in range(2)]
        for side in sides:
            await side.open(exits)
        here, there = sides
        proxies = [await here.forward_to(there, exits), await there.forward_to(here, exits)]
        await here.p.publish(*(Delta(f"v{number}", create([1.0] * DIMENSION)) for number in range(VECTORS)))
        await wait_until_all_have(sides, VECTORS)
        for proxy in proxies:
            proxy.refusing = True
            proxy.cut()
        async with anyio.create_task_group() as tasks:
            for side in sides:
                tasks.start_soon(side.write, count)
        async with anyio.create_task_group() as tasks:
            watch, sent_before = LoopWatch(), [side.link.statistics().sent for side in sides]
            tasks.start_soon(watch.run)
            gc.collect()
            for proxy in proxies:
                proxy.refusing = False
            while [side.link.statistics().sent for side in sides] == sent_before:  # noqa: ASYNC110
                await anyio.sleep(SAMPLE_S)
            watch.wait_s, began, cpu = 0.0, time.monotonic(), time.process_time()
            await wait_until_all_have(sides, VECTORS + 2 * count)
            seconds, cpu_s = time.monotonic() - began, time.process_time() - cpu
            tasks.cancel_scope.cancel()
        assert here.states() == there.states() == expected_states(here)
        statistics = [side.storage.resident.statistics() for side in sides]
        assert sum(sink.out_of_order for sink in statistics) > count, (
            "nearly all forwarded deltas should be out of order"
        )
        return Merge(count, seconds, cpu_s, watch.wait_s, sum(sink.refolded for sink in statistics))


async def wait_until_all_have(sides: list[Side], delta_count: int) -> None:
    with anyio.fail_after(300):
        while not all(side.has_all(delta_count) for side in sides):  # noqa: ASYNC110 - there is no event for it
            await anyio.sleep(0.01)


@pytest.mark.alone
def test_merging_hot_vectors_after_a_cut_is_linear_and_smooth(tmp_path: Path, full: bool) -> None:
    few, many = (4_000, 40_000) if full else (200, 2_000)
    rounds: list[tuple[Merge, Merge]] = []
    gc.collect()
    gc.freeze()  # garbage collections leave out the objects of other tests
    if full:
        gc.disable()
    try:
        while len(rounds) < ROUNDS_MIN or (
            len(rounds) < ROUNDS_MAX and not all(check_limits(rounds).values())
        ):
            folder = tmp_path / f"{len(rounds)}"
            folder.mkdir()
            rounds.append(
                (anyio.run(run_merge, folder / "few", few), anyio.run(run_merge, folder / "many", many))
            )
    finally:
        gc.enable()
        gc.unfreeze()
    for pair in rounds:
        for merge in pair:
            print(
                f"{merge.delta_count} deltas on {VECTORS} vectors on each side: {merge.seconds:.2f} s, "
                f"CPU {merge.cpu_s:.2f} s, longest wait {merge.wait_s * 1000:.0f} ms, "
                f"{merge.refolded / merge.delta_count / 2:.1f} deltas folded for each"
            )
    print(f"CPU {cpu_growth(rounds):.1f} times for ten times the deltas")
    assert all(check_limits(rounds).values()), check_limits(rounds)


def cpu_growth(rounds: list[tuple[Merge, Merge]]) -> float:
    return median(many.cpu_s / few.cpu_s for few, many in rounds)


def check_limits(rounds: list[tuple[Merge, Merge]]) -> dict[str, bool]:
    """Return for each limit True if the median of the rounds meets it."""
    return {
        "converged": median(many.cpu_s for _, many in rounds)
        <= CONVERGED_S_MAX * rounds[0][1].delta_count / 4_000,
        "waits": median(many.wait_s / max(WAIT_S_MAX, WAIT_SHARE_MAX * many.cpu_s) for _, many in rounds)
        <= 1,
        "growth": cpu_growth(rounds) <= CPU_GROWTH_MAX,
    }
