"""Lag in seconds, beside deltas, of each sink, group and subscriber, beside a log on disk and in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio
import pytest

from delta_prop import Propagator
from delta_prop.client import Producer, Subscriber
from delta_prop.server.metrics import Metrics
from delta_prop.server.server_status import ServerStatus
from delta_prop.server.service import Service
from delta_prop.server.settings import ServerSettings
from delta_prop.testing import VirtualNetwork, run_virtual, virtual_world
from delta_prop_simulations.disk import SimDisk
from delta_prop_sinks import CallbackSink
from tests.delta_prop.support import Gate, made

if TYPE_CHECKING:
    from delta_prop.ports import World

SERVER = "server:7373"


class Site:
    """A server and the world of its clients."""

    def __init__(self, *, durable: bool) -> None:
        network = VirtualNetwork(1, host="server")
        self.world: World = virtual_world(1, disk=SimDisk(1), network=network)
        self.clients = virtual_world(2, network=network.at("client"))
        self.propagator = Propagator(data="facts" if durable else None, world=self.world)
        self.overview = ServerStatus(version="1", now=self.world.clock.now)

    async def lags(self) -> dict[str, Any]:
        await self.overview.refresh()
        told: dict[str, Any] = self.overview.status()["lags"]
        return told

    def scraped(self, name: str) -> dict[str, float]:
        lines = Metrics(self.overview).scrape().text("")[0].decode().splitlines()
        rows = (line.rpartition(" ") for line in lines if line.startswith(f"delta_prop_{name}{{"))
        return {labels.partition("{")[2]: float(value) for labels, _, value in rows}


async def serve(site: Site, tasks: Any) -> None:
    service = Service(site.propagator, ServerSettings(host="server", port=7373, allow_anonymous=True))
    site.overview.propagator, site.overview.service = site.propagator, service
    await tasks.start(service.run)


@pytest.mark.parametrize("durable", [True, False])
def test_a_sink_is_as_late_as_the_oldest_delta_that_it_has_not_applied(durable: bool) -> None:
    async def main() -> None:
        site, gate = Site(durable=durable), Gate()
        async with site.propagator as p, anyio.create_task_group() as tasks:
            await serve(site, tasks)
            await p.attach(CallbackSink(gate, name="slow"))
            await p.attach(CallbackSink(lambda _at, _delta: None, name="quick"))
            assert p.statistics().sinks["slow"].lag_s == 0
            await anyio.sleep(1_000)
            for number in range(3):
                await p.publish(made(str(number)))
                await anyio.sleep(10)
            assert p.statistics().sinks["slow"].lag_s == pytest.approx(30, abs=0.2)
            assert p.statistics().sinks["quick"].lag_s == 0
            lags = await site.lags()
            assert lags["sinks"]["slow"] == {"deltas": 3, "seconds": pytest.approx(30, abs=0.2)}
            assert lags["sinks"]["quick"] == {"deltas": 0, "seconds": 0}
            assert site.scraped("sink_lag_seconds") == {
                'sink="slow"}': pytest.approx(30, abs=0.2),
                'sink="quick"}': 0,
            }
            told = {one["name"]: one["lag_s"] for one in site.overview.sinks()}
            assert told == {"slow": pytest.approx(30, abs=0.2), "quick": 0}
            gate.opened.set()
            await anyio.sleep(1)
            assert (await site.lags())["sinks"]["slow"] == {"deltas": 0, "seconds": 0}
            tasks.cancel_scope.cancel()

    run_virtual(main)


@pytest.mark.parametrize("durable", [True, False])
def test_a_subscriber_and_a_group_are_told_with_and_without_a_member(durable: bool) -> None:
    async def main() -> None:
        site = Site(durable=durable)
        async with site.propagator, anyio.create_task_group() as tasks:
            await serve(site, tasks)
            async with (
                Producer(SERVER, name="p", world=site.clients) as producer,
                Subscriber(
                    SERVER, "*", group="indexer", start="earliest", credit=(4, 1 << 20), world=site.clients
                ),
            ):
                for number in range(6):  # nobody takes them, so there is no credit for the fifth
                    await producer.publish(made(str(number)))
                    await anyio.sleep(1)
                await anyio.sleep(40)
                lags = await site.lags()
                (number,) = lags["subscribers"]
                assert lags["subscribers"][number] == {"deltas": 2, "seconds": pytest.approx(42, abs=0.3)}
                assert lags["groups"] == {"indexer": {"deltas": 6, "seconds": pytest.approx(46, abs=0.3)}}
                labels = f'client="subscriber",connection="{number}"}}'
                assert site.scraped("subscriber_lag_deltas") == {labels: 2}
                (seconds,) = site.scraped("subscriber_lag_seconds").values()
                assert seconds == pytest.approx(42, abs=0.3)
            await anyio.sleep(60)
            lags = await site.lags()
            assert lags["subscribers"] == {}
            late = {"deltas": 6, "seconds": pytest.approx(106, abs=1)}
            assert lags["groups"] == {"indexer": late}
            assert site.scraped("group_lag_seconds") == {'group="indexer"}': late["seconds"]}
            assert site.scraped("group_lag_deltas") == {'group="indexer"}': 6}
            tasks.cancel_scope.cancel()

    run_virtual(main)
