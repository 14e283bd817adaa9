"""Services that forward to one another: pairs and rings, cuts between them, and nothing that circles."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import anyio

from delta_prop import Delta, create, opaque, sparse_add
from delta_prop.client.forwarding import ForwardLink
from delta_prop.embedded import Propagator
from delta_prop.server.service import Service
from delta_prop.server.settings import ServerSettings
from delta_prop.sinks import ForwardSink, IndexSink, Resident
from delta_prop.testing import VirtualNetwork, run_virtual, virtual_world

if TYPE_CHECKING:
    from collections.abc import Sequence

PORT = 7373


class Node:
    """One service on a host of its own."""

    def __init__(self, name: str, network: VirtualNetwork) -> None:
        self.host = f"10.0.0.{name}"
        self.world = virtual_world(int(name), network=network.at(self.host))
        self.p = Propagator(world=self.world)
        self.resident = Resident()
        self.links: list[ForwardLink] = []

    async def open(self, exits: AsyncExitStack) -> None:
        await exits.enter_async_context(self.p)
        await self.p.attach(IndexSink(resident=self.resident))
        tasks = await exits.enter_async_context(anyio.create_task_group())
        service = Service(self.p, ServerSettings(host=self.host, port=PORT, allow_anonymous=True))
        await tasks.start(service.run)
        exits.callback(tasks.cancel_scope.cancel)

    async def forward_to(self, other: Node) -> None:
        link = ForwardLink(f"{other.host}:{PORT}", world=self.world)
        self.links.append(link)
        await self.p.attach(ForwardSink(link, name=f"to-{other.host}"))

    def deltas(self) -> list[tuple[object, ...]]:
        """What its log holds, in no order."""
        log = self.p.inside().log
        read = log.read(0, rows_max=1_000_000, bytes_max=1 << 30)
        return sorted(
            (logged.batch.origin, logged.batch.counter(row), logged.lamport + row)
            for logged in read
            for row in range(logged.count)
        )


async def settle(nodes: Sequence[Node], seconds: float = 60.0) -> None:
    """Until all hold the same and every sink has all of it."""
    with anyio.fail_after(seconds):
        while not settled(nodes):  # noqa: ASYNC110 - nobody tells when several services agree
            await anyio.sleep(0.2)


def settled(nodes: Sequence[Node]) -> bool:
    same = len({tuple(node.deltas()) for node in nodes}) == 1
    return same and not any(one.lag for node in nodes for one in node.p.statistics().sinks.values())


def test_a_pair_comes_to_the_same_and_then_is_quiet() -> None:
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
            await settle(nodes)
            assert len(a.deltas()) == 2
            network.cut(a.host, b.host)
            network.cut(b.host, a.host)
            for number in range(20):
                await a.p.publish(Delta("x", sparse_add([0], [1.0]), "facts"))
                await b.p.publish(Delta("x", sparse_add([0], [10.0]), "facts"))
                await b.p.publish(Delta(f"o{number}", opaque(b"z"), "rows"))
            await anyio.sleep(30)
            network.heal(a.host, b.host)
            network.heal(b.host, a.host)
            await settle(nodes, 600)
            assert len(a.deltas()) == 62
            for node in nodes:
                state = node.resident.state("facts", "x")
                assert state is not None
                assert state.vector is not None
                assert state.vector[0] == 1 + 20 + 200
            sent = [link.statistics().sent for node in nodes for link in node.links]
            await anyio.sleep(60)
            assert [link.statistics().sent for node in nodes for link in node.links] == sent

    run_virtual(main)


def test_a_ring_of_three_ends_its_circles() -> None:
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
            await settle(nodes)
            assert len(nodes[0].deltas()) == 90
            sent = [link.statistics().sent for node in nodes for link in node.links]
            await anyio.sleep(60)
            assert [link.statistics().sent for node in nodes for link in node.links] == sent

    run_virtual(main)
