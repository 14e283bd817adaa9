"""Forwarding services with all links cut, written to on all sides, then healed: they converge."""

from __future__ import annotations

from contextlib import AsyncExitStack
from random import Random
from typing import TYPE_CHECKING

import anyio
import pytest

from delta_prop import LogSettings, Propagator, Settings
from delta_prop.client import ClientSettings, ForwardLink
from delta_prop.server.service import Service as Server
from delta_prop.server.settings import ServerSettings
from delta_prop.sinks import ForwardSink
from tests.delta_prop.services import Service, Writer, fold_accepted, summarize_state
from tests.net.proxy import Proxy, proxy_to

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.anyio
PAIR, CYCLE = [(0, 1), (1, 0)], [(0, 1), (1, 2), (2, 0)]
HEARTBEAT_S = 0.2
CLIENT = ClientSettings(heartbeat_interval_s=HEARTBEAT_S, peer_timeout_s=4.0, reconnect_timeout_s=60.0)
SERVER = ServerSettings(port=0, heartbeat_interval_s=HEARTBEAT_S, peer_timeout_s=4.0)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Cluster:
    """Services, the links between them, and a proxy in each link."""

    def __init__(self, services: list[Service]) -> None:
        self.services = services
        self.servers: list[Server] = []
        self.links: list[ForwardLink] = []
        self.proxies: list[Proxy] = []

    async def open(self, exits: AsyncExitStack, links: list[tuple[int, int]]) -> None:
        for service in self.services:
            await exits.enter_async_context(service)
            tasks = await exits.enter_async_context(anyio.create_task_group())
            server = Server(service.p, SERVER)
            await tasks.start(server.run)
            exits.callback(tasks.cancel_scope.cancel)
            self.servers.append(server)
        for here, there in links:
            address = self.servers[there].address
            assert address is not None
            proxy = await exits.enter_async_context(proxy_to(address))
            link = ForwardLink("{}:{}".format(*proxy.address), settings=CLIENT)
            await self.services[here].p.attach(ForwardSink(link, name=f"to-{there}"))
            self.proxies.append(proxy)
            self.links.append(link)

    def cut(self) -> None:
        """Cut all links."""
        for proxy in self.proxies:
            proxy.refusing = True
            proxy.cut()

    def heal(self) -> None:
        """Restore all links."""
        for proxy in self.proxies:
            proxy.refusing = False

    async def wait_converged(self) -> None:
        """Wait until all logs are equal and all sinks have applied them."""
        with anyio.fail_after(60):
            while not self._has_converged():  # noqa: ASYNC110 - there is no event for several services agreeing
                await anyio.sleep(0.05)

    def _has_converged(self) -> bool:
        is_same = len({frozenset(service.dots()) for service in self.services}) == 1
        return is_same and not any(
            sink.lag for service in self.services for sink in service.p.statistics().sinks.values()
        )

    def sent_counts(self) -> list[int]:
        """Return for each link the number of deltas sent so far."""
        return [link.statistics().sent for link in self.links]


async def check_states(services: list[Service]) -> None:
    expected_states = fold_accepted(services)
    assert len(expected_states) >= 3
    for service in services:
        dots = service.dots()
        assert len(dots) == len(set(dots))  # each delta once
        assert service.p.statistics().pending.pending_runs == 0
        for sink, content in (await service.contents(set(expected_states))).items():
            expected = {
                name: summarize_state(state, with_counts=sink != "cache")
                for name, state in expected_states.items()
            }
            assert content == expected, (service.number, sink)


@pytest.mark.parametrize(("links", "durable"), [(PAIR, True), (CYCLE, False)], ids=["pair", "cycle"])
async def test_services_converge_after_a_cut_then_send_nothing(
    links: list[tuple[int, int]], durable: bool, tmp_path: Path
) -> None:
    random = Random(7)
    log = LogSettings(segment_bytes_max=1 << 20, bytes_max=1 << 24, retention_bytes=1 << 24, reserve_bytes=0)
    services = []
    for number in range(len({here for here, _ in links})):
        data = tmp_path / f"log-{number}" if durable else None
        p = Propagator(Settings(close_timeout_s=5), data=data, log=log if durable else None)
        services.append(Service(number, tmp_path, random, propagator=p))
    writer, cluster = Writer(random), Cluster(services)
    async with AsyncExitStack() as exits:
        await cluster.open(exits, links)
        for service in services:
            await service.p.publish(service.new_delta_of_own_dimension())
        await cluster.wait_converged()
        for _ in range(2):
            cluster.cut()
            for _ in range(40):
                await writer.write(random.choice(services))
            assert len({frozenset(service.dots()) for service in services}) > 1
            cluster.heal()
            await cluster.wait_converged()
        await check_states(services)
        assert any(batch.known_ids for service in services for batch in service.batches())
        sent_before, bytes_before = (
            cluster.sent_counts(),
            [sum(proxy.bytes.values()) for proxy in cluster.proxies],
        )
        received = [server.counters.deltas_in for server in cluster.servers if server.counters is not None]
        await anyio.sleep(3 * HEARTBEAT_S + 0.5)
        assert cluster.sent_counts() == sent_before
        assert [server.counters.deltas_in for server in cluster.servers if server.counters] == received
        heartbeat_bytes = [
            sum(proxy.bytes.values()) - size_before
            for proxy, size_before in zip(cluster.proxies, bytes_before, strict=True)
        ]
        assert all(0 < size < 4_000 for size in heartbeat_bytes)
        print(len(services[0].dots()), "dots,", sent_before, "sent")
