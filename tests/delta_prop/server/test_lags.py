"""Lag in seconds and in deltas of each sink, group and subscriber, with a log on disk and in memory."""

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
from tests.delta_prop.support import Gate, make_delta

if TYPE_CHECKING:
    from delta_prop.platform.ports import World

SERVER = "server:7373"


class Site:
    """A server, its status and metrics, and the world of its clients."""

    def __init__(self, *, durable: bool) -> None:
        network = VirtualNetwork(1, host="server")
        self.world: World = virtual_world(1, disk=SimDisk(1), network=network)
        self.client_world = virtual_world(2, network=network.at("client"))
        self.propagator = Propagator(data="facts" if durable else None, world=self.world)
        self.server_status = ServerStatus(version="1", clock=self.world.clock)

    async def lags(self) -> dict[str, Any]:
        await self.server_status.refresh()
        lags: dict[str, Any] = self.server_status.status()["lags"]
        return lags

    def scrape(self, name: str) -> dict[str, float]:
        lines = Metrics(self.server_status).scrape().text("")[0].decode().splitlines()
        rows = (line.rpartition(" ") for line in lines if line.startswith(f"delta_prop_{name}{{"))
        return {labels.partition("{")[2]: float(value) for labels, _, value in rows}


async def serve(site: Site, tasks: Any) -> None:
    service = Service(site.propagator, ServerSettings(host="server", port=7373, allow_anonymous=True))
    site.server_status.propagator, site.server_status.service = site.propagator, service
    await tasks.start(service.run)


@pytest.mark.parametrize("durable", [True, False])
def test_sink_lag_is_the_age_of_its_oldest_unapplied_delta(durable: bool) -> None:
    async def main() -> None:
        site, gate = Site(durable=durable), Gate()
        async with site.propagator as p, anyio.create_task_group() as tasks:
            await serve(site, tasks)
            await p.attach(CallbackSink(gate, name="slow"))
            await p.attach(CallbackSink(lambda _at, _delta: None, name="quick"))
            assert p.statistics().sinks["slow"].lag_s == 0
            await anyio.sleep(1_000)
            for number in range(3):
                await p.publish(make_delta(str(number)))
                await anyio.sleep(10)
            assert p.statistics().sinks["slow"].lag_s == pytest.approx(30, abs=0.2)
            assert p.statistics().sinks["quick"].lag_s == 0
            lags = await site.lags()
            assert lags["sinks"]["slow"] == {"deltas": 3, "seconds": pytest.approx(30, abs=0.2)}
            assert lags["sinks"]["quick"] == {"deltas": 0, "seconds": 0}
            assert site.scrape("sink_lag_seconds") == {
                'partition="0",sink="slow",stream="default"}': pytest.approx(30, abs=0.2),
                'partition="0",sink="quick",stream="default"}': 0,
            }
            sink_lags = {sink["name"]: sink["lag_s"] for sink in site.server_status.sinks()}
            assert sink_lags == {"slow": pytest.approx(30, abs=0.2), "quick": 0}
            gate.opened.set()
            await anyio.sleep(1)
            assert (await site.lags())["sinks"]["slow"] == {"deltas": 0, "seconds": 0}
            tasks.cancel_scope.cancel()

    run_virtual(main)


@pytest.mark.parametrize("durable", [True, False])
def test_lag_of_subscriber_and_group_with_and_without_member(durable: bool) -> None:
    async def main() -> None:
        site = Site(durable=durable)
        async with site.propagator, anyio.create_task_group() as tasks:
            await serve(site, tasks)
            async with (
                Producer(SERVER, name="p", world=site.client_world) as producer,
                Subscriber(
                    SERVER,
                    "*",
                    group="indexer",
                    start="earliest",
                    credit=(4, 1 << 20),
                    world=site.client_world,
                ),
            ):
                for number in range(6):  # the subscriber reads nothing, so the fifth delta exceeds its credit
                    await producer.publish(make_delta(str(number)))
                    await anyio.sleep(1)
                await anyio.sleep(40)
                lags = await site.lags()
                (number,) = lags["subscribers"]
                assert lags["subscribers"][number] == {"deltas": 2, "seconds": pytest.approx(42, abs=0.3)}
                assert lags["groups"] == {"indexer": {"deltas": 6, "seconds": pytest.approx(46, abs=0.3)}}
                labels = f'client="subscriber",connection="{number}"}}'
                assert site.scrape("subscriber_lag_deltas") == {labels: 2}
                (seconds,) = site.scrape("subscriber_lag_seconds").values()
                assert seconds == pytest.approx(42, abs=0.3)
            await anyio.sleep(60)
            lags = await site.lags()
            assert lags["subscribers"] == {}
            group_lag = {"deltas": 6, "seconds": pytest.approx(106, abs=1)}
            assert lags["groups"] == {"indexer": group_lag}
            labels = 'group="indexer",partition="0",stream="default"}'
            assert site.scrape("group_lag_seconds") == {labels: group_lag["seconds"]}
            assert site.scrape("group_lag_deltas") == {labels: 6}
            tasks.cancel_scope.cancel()

    run_virtual(main)
