"""Services that forward to one another, in pairs and cycles, converge and then send nothing.

Also checked: network cuts, a target that lost its log, missing permissions, rate limits, a link to itself.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import anyio

from delta_prop import Delta, Settings, create, opaque, sparse_add
from delta_prop.api.propagator import Propagator
from delta_prop.client.forwarding import ForwardLink
from delta_prop.server.access import Access
from delta_prop.server.service import Service
from delta_prop.server.settings import ServerSettings
from delta_prop.sinks import ForwardSink, IndexSink, ResidentVectors
from delta_prop.testing import VirtualNetwork, run_virtual, virtual_world
from tests.delta_prop.server.tokens import TokenFile, table
from tests.full_log import read_all

if TYPE_CHECKING:
    from collections.abc import Sequence

    from delta_prop.delivery.status import FeedStatistics

PORT = 7373


class Node:
    """One service on a host of its own."""

    def __init__(
        self,
        name: str,
        network: VirtualNetwork,
        *,
        tokens: TokenFile | None = None,
        settings: Settings | None = None,
    ) -> None:
        self.host = f"10.0.0.{name}"
        self.world = virtual_world(int(name), network=network.at(self.host))
        self.p = Propagator(settings, world=self.world)
        self.access = None if tokens is None else Access(self.world, tokens)
        self.resident = ResidentVectors()
        self.links: list[ForwardLink] = []

    async def open(self, exits: AsyncExitStack) -> None:
        await exits.enter_async_context(self.p)
        await self.p.attach(IndexSink(resident=self.resident))
        tasks = await exits.enter_async_context(anyio.create_task_group())
        settings = ServerSettings(host=self.host, port=PORT, allow_anonymous=True)
        self.service = Service(self.p, settings, access=self.access)
        await tasks.start(self.service.run)
        exits.callback(tasks.cancel_scope.cancel)

    async def forward_to(self, other: Node, token: str | None = None) -> None:
        link = ForwardLink(f"{other.host}:{PORT}", world=self.world, token=token)
        self.links.append(link)
        await self.p.attach(ForwardSink(link, name=f"to-{other.host}"))

    def statistics_to(self, other: Node) -> FeedStatistics:
        """Return the statistics of the sink that forwards to a node."""
        return self.p.statistics().sinks[f"to-{other.host}"]

    async def write(self, count: int, name: str = "v") -> None:
        """Publish `count` deltas."""
        for number in range(count):
            await self.p.publish(Delta(f"{name}{number % 5}", opaque(b"%d" % number), "rows"))

    def logged_dots(self) -> list[tuple[object, ...]]:
        """Return origin, counter and Lamport number of each logged row, sorted."""
        log = self.p.internals().partition.log
        read = read_all(log)
        return sorted(
            (logged.batch.origin, logged.batch.counter(row), logged.lamport + row)
            for logged in read
            for row in range(logged.count)
        )


async def wait_converged(nodes: Sequence[Node], seconds: float = 60.0) -> None:
    """Wait until all nodes hold the same deltas and no sink lags."""
    with anyio.fail_after(seconds):
        while not has_converged(nodes):  # noqa: ASYNC110 - there is no event for several services agreeing
            await anyio.sleep(0.2)


def has_converged(nodes: Sequence[Node]) -> bool:
    is_same = len({tuple(node.logged_dots()) for node in nodes}) == 1
    return is_same and not any(sink.lag for node in nodes for sink in node.p.statistics().sinks.values())


def test_pair_converges_then_sends_nothing() -> None:
    async def main() -> None:
        network = VirtualNetwork(3)
        async with AsyncExitStack() as exits:
            nodes = [Node(name, network) for name in ("1", "2")]
            for node in nodes:
                await node.open(exits)
            a, b = nodes
            await a.forward_to(b)
            await b.forward_to(a)
            await a.p.publish(Delta("x", create([1.0, 2.0]), "facts"))
            await b.p.publish(Delta("y", create([3.0, 4.0]), "facts"))
            await wait_converged(nodes)
            assert len(a.logged_dots()) == 2
            network.cut(a.host, b.host)
            network.cut(b.host, a.host)
            for number in range(20):
                await a.p.publish(Delta("x", sparse_add([0], [1.0]), "facts"))
                await b.p.publish(Delta("x", sparse_add([0], [10.0]), "facts"))
                await b.p.publish(Delta(f"o{number}", opaque(b"z"), "rows"))
            await anyio.sleep(30)
            network.heal(a.host, b.host)
            network.heal(b.host, a.host)
            await wait_converged(nodes, 600)
            assert len(a.logged_dots()) == 62
            for node in nodes:
                state = node.resident.state("facts", "x")
                assert state is not None
                assert state.vector is not None
                assert state.vector[0] == 1 + 20 + 200
            sent_counts = [link.statistics().sent for node in nodes for link in node.links]
            await anyio.sleep(60)
            assert [link.statistics().sent for node in nodes for link in node.links] == sent_counts

    run_virtual(main)


def test_forwarding_in_a_cycle_terminates() -> None:
    async def main() -> None:
        network = VirtualNetwork(4)
        async with AsyncExitStack() as exits:
            nodes = [Node(name, network) for name in ("1", "2", "3")]
            for node in nodes:
                await node.open(exits)
            for node, other in zip(nodes, nodes[1:] + nodes[:1], strict=True):
                await node.forward_to(other)
            for number in range(30):
                for node in nodes:
                    await node.p.publish(Delta(f"v{number % 5}", opaque(b"%d" % number), "rows"))
            await wait_converged(nodes)
            assert len(nodes[0].logged_dots()) == 90
            sent_counts = [link.statistics().sent for node in nodes for link in node.links]
            await anyio.sleep(60)
            assert [link.statistics().sent for node in nodes for link in node.links] == sent_counts

    run_virtual(main)


def test_forwarding_resumes_soon_after_a_long_cut() -> None:
    async def main() -> None:
        network = VirtualNetwork(5)
        async with AsyncExitStack() as exits:
            a, b = (Node(name, network) for name in ("1", "2"))
            for node in (a, b):
                await node.open(exits)
            await a.forward_to(b)
            network.cut(a.host, b.host)
            await a.write(10)
            await anyio.sleep(300)
            assert a.statistics_to(b).lag == 10
            assert a.statistics_to(b).breaker == "closed"
            network.heal(a.host, b.host)
            await wait_converged((a, b), 25)

    run_virtual(main)


def test_target_that_lost_its_log_is_resent_everything() -> None:
    async def main() -> None:
        network = VirtualNetwork(6)
        async with AsyncExitStack() as exits:
            a, b = (Node(name, network) for name in ("1", "2"))
            await a.open(exits)
            async with AsyncExitStack() as first_run:
                await b.open(first_run)
                await a.forward_to(b)
                await a.write(20)
                await wait_converged((a, b))
            restarted = Node("2", network)  # the log was in memory, so this node's log is empty
            await restarted.open(exits)
            await a.write(1, "more")
            await wait_converged((a, restarted))
            assert len(restarted.logged_dots()) == 21
            assert a.statistics_to(b).rebuilds == 0

    run_virtual(main)


def test_forwarding_stops_when_needed_rows_left_the_log() -> None:
    async def main() -> None:
        network = VirtualNetwork(7)
        async with AsyncExitStack() as exits:
            a, b = Node("1", network, settings=Settings(log_deltas_max=10)), Node("2", network)
            await a.open(exits)
            async with AsyncExitStack() as first_run:
                await b.open(first_run)
                await a.forward_to(b)
                for _ in range(4):
                    await a.write(5)
                    await a.p.wait_visible(a.p.statistics().log.next_offset)
            restarted = Node("2", network)
            await restarted.open(exits)
            await a.write(1, "more")
            await anyio.sleep(60)
            statistics = a.statistics_to(b)
            assert statistics.state == "stopped"
            assert statistics.reason is not None
            assert "lacks deltas from offset 0 on, which this log no longer holds" in statistics.reason
            assert restarted.logged_dots() == []

    run_virtual(main)


def test_forwarding_stops_without_permission_and_resumes_with_it() -> None:
    async def main() -> None:
        network = VirtualNetwork(8)
        file = TokenFile(table("other", "t" * 32, publish=True, subscribe=True, namespaces='["*"]'))
        async with AsyncExitStack() as exits:
            a, b = Node("1", network), Node("2", network, tokens=file)
            for node in (a, b):
                await node.open(exits)
            await a.forward_to(b, token="t" * 32)
            await a.write(3)
            await anyio.sleep(300)
            statistics = a.statistics_to(b)
            assert statistics.state == "stopped"
            assert statistics.reason is not None
            assert "the other service refuses" in statistics.reason
            assert b.service.counters is not None
            assert b.service.counters.connections < 40
            file.content = table(
                "other", "t" * 32, publish=True, subscribe=True, forward=True, namespaces='["*"]'
            )
            await anyio.sleep(60)
            a.p.restart(f"to-{b.host}")
            await wait_converged((a, b))

    run_virtual(main)


def test_forwarding_to_itself_stops() -> None:
    async def main() -> None:
        async with AsyncExitStack() as exits:
            a = Node("1", VirtualNetwork(9))
            await a.open(exits)
            await a.forward_to(a)
            await a.write(1)
            await anyio.sleep(30)
            statistics = a.statistics_to(a)
            assert statistics.state == "stopped"
            assert "forward to itself" in (statistics.reason or "")

    run_virtual(main)


def test_rate_limited_rows_are_resent() -> None:
    """Rows above the other service's rate are resent, and none of them becomes a no-op there."""

    async def main() -> None:
        network = VirtualNetwork(10)
        permissions = {"publish": True, "forward": True, "namespaces": '["*"]', "rate": 20, "burst": 5}
        async with AsyncExitStack() as exits:
            a = Node("1", network)
            b = Node("2", network, tokens=TokenFile(table("other", "t" * 32, **permissions)))
            for node in (a, b):
                await node.open(exits)
            await a.forward_to(b, token="t" * 32)
            await a.write(100)
            await wait_converged((a, b), 600)
            assert b.p.statistics().noops == 0

    run_virtual(main)
