"""A full disk, log or queue: every report says which one and since when; with space the service continues."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import anyio

from delta_prop import LogSettings, Propagator, Settings
from delta_prop.client import Producer
from delta_prop.client.settings import ClientSettings
from delta_prop.commands.status import flatten, format_value
from delta_prop.server.metrics import Metrics
from delta_prop.server.server_status import ServerStatus
from delta_prop.server.service import Service
from delta_prop.server.settings import ServerSettings
from delta_prop.testing import NetworkConditions, VirtualNetwork, run_virtual, virtual_world
from delta_prop_simulations.disk import SimDisk
from delta_prop_sinks import CallbackSink
from delta_prop_wire.delta import Delta, create
from delta_prop_wire.frames import PressureLevel
from tests.delta_prop.support import make_delta
from tests.page_samples import mask_numbers, printed_in, sample

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from delta_prop.platform.ports import World

CAPACITY_BYTES = 400_000
LOG = LogSettings(
    segment_bytes_max=10_000,
    bytes_max=150_000,
    retention_bytes=150_000,
    free_bytes_min=60_000,
    reserve_bytes=0,
)
OFFERS = 52
LATENCY_S = 0.1
"""Frame latency: longer than all offers take, so all batches are sent before one is refused."""
LONG_TIMEOUTS = ClientSettings(publish_timeout_s=3_000, delivery_timeout_s=3_000)


class Site:
    """A server, and the disk and the clock of its world."""

    def __init__(self, log: LogSettings, settings: Settings, latency_s: float) -> None:
        network = VirtualNetwork(1, NetworkConditions(latency_s=latency_s), host="server")
        self.disk = SimDisk(1, capacity_bytes=CAPACITY_BYTES)
        self.world: World = virtual_world(1, disk=self.disk, network=network)
        self.client_world = virtual_world(2, network=network.at("client"))
        self.propagator = Propagator(settings, data="facts", log=log, world=self.world)
        self.server_status = ServerStatus(version="1", clock=self.world.clock)

    def nack_count(self) -> int:
        counters = self.server_status.counters()
        assert counters is not None
        return sum(counters.nacks.values())

    def fill_disk(self, bytes_left: int = 50_000) -> None:
        self.disk.put("others", bytes(self.disk.free_bytes() - bytes_left))

    def free_disk(self) -> None:
        self.disk.remove("others")


def run_with_site(
    scenario: Callable[[Site, Producer], Awaitable[None]],
    *,
    log: LogSettings = LOG,
    settings: Settings | None = None,
    latency_s: float = 0.0005,
) -> None:
    async def main() -> None:
        site = Site(log, settings or Settings(), latency_s)
        async with site.propagator as p, anyio.create_task_group() as tasks:
            service = Service(p, ServerSettings(host="server", port=7373, allow_anonymous=True))
            site.server_status.propagator, site.server_status.service = p, service
            await tasks.start(service.run)
            async with Producer(
                "server:7373", name="p", settings=LONG_TIMEOUTS, world=site.client_world
            ) as producer:
                await producer.publish(make_delta("before"))
                await scenario(site, producer)
            tasks.cancel_scope.cancel()

    run_virtual(main)


async def offer_in_batches(producer: Producer, count: int = OFFERS) -> None:
    """Offer `count` deltas, each in a batch of its own."""
    for number in range(count):
        producer.offer(make_delta(str(number)))
        await anyio.sleep(0.001)


async def check_reported(site: Site, cause: str, since_s: float) -> None:
    """Check that readiness, status, pressure, statistics and metrics report `cause` as full since then."""
    now_s = site.world.clock.now()
    full = site.propagator.statistics().full
    assert full is not None
    assert full.what == cause
    assert abs(now_s - since_s - full.seconds) < 0.5
    reason = site.server_status.unready_reason()
    assert reason is not None
    assert reason.startswith(f"the {cause} has been full since {full.since}, for ")
    status = site.server_status.status()
    assert not status["ready"]
    assert status["full"]["reason"] == full.reason
    pressure = site.propagator.pressure()
    assert pressure.level is PressureLevel.STOP
    assert f"the {cause} has been full since" in pressure.reason
    assert pressure.retry_after_ms is not None
    text = Metrics(site.server_status).scrape().text("")[0].decode()
    assert f'delta_prop_full_seconds{{what="{cause}"}} {full.seconds}' in text


def page_output(site: Site) -> list[str]:
    """Return what the commands on the page print: the answer of `/readyz`, and `full` of `status`."""
    full = {"full": site.server_status.status()["full"]}
    answer = json.dumps({"ready": False, "reason": site.server_status.unready_reason()})
    return [answer, *(f"{name}  {format_value(value)}" for name, value in flatten(full))]


async def check_healthy(site: Site) -> None:
    await anyio.sleep(0.3)
    assert site.propagator.statistics().full is None
    assert site.server_status.unready_reason() is None
    assert site.propagator.pressure().level is PressureLevel.OK


def test_full_disk_is_reported_everywhere_and_a_retry_is_one_frame() -> None:
    async def scenario(site: Site, producer: Producer) -> None:
        site.fill_disk()
        await anyio.sleep(0.2)
        await producer.publish(make_delta("first"))  # an append polls the free space
        start_s = site.world.clock.now()
        await offer_in_batches(producer)
        await anyio.sleep(57)
        print(f"{site.nack_count()} refusals of {OFFERS} batches in 57 s")
        await check_reported(site, "disk", start_s)
        full = site.propagator.statistics().full
        assert full is not None
        assert "bytes left" in full.reason
        page = printed_in(sample("curl -s localhost:7374/readyz"))
        assert [mask_numbers(line) for line in page_output(site)] == [mask_numbers(line) for line in page]
        assert OFFERS < site.nack_count() <= OFFERS + 57, "the frames in flight, then one frame per retry"
        site.free_disk()
        await producer.flush(3)
        await check_healthy(site)

    run_with_site(scenario, latency_s=LATENCY_S)


def test_disk_filled_by_others_is_reported_without_publishing() -> None:
    async def scenario(site: Site, producer: Producer) -> None:
        assert site.server_status.unready_reason() is None
        site.fill_disk()
        await anyio.sleep(1)
        start_s = site.world.clock.now()
        for _ in range(3):
            site.server_status.unready_reason()  # as a readiness probe does
            await anyio.sleep(1)
        await check_reported(site, "disk", start_s)
        site.free_disk()
        await check_healthy(site)

    run_with_site(scenario)


def test_commit_without_space_is_reported_as_a_full_disk() -> None:
    async def scenario(site: Site, producer: Producer) -> None:
        free_bytes = site.disk.free_bytes
        site.fill_disk(0)
        site.disk.free_bytes = lambda: 1 << 40  # type: ignore[method-assign]  # as under a quota
        start_s = site.world.clock.now()
        await offer_in_batches(producer)
        await anyio.sleep(20)
        await check_reported(site, "disk", start_s)
        site.disk.free_bytes = free_bytes  # type: ignore[method-assign]
        site.free_disk()
        await producer.flush(60)
        await check_healthy(site)

    run_with_site(scenario)


def test_log_held_full_by_a_paused_sink_names_the_sink() -> None:
    async def scenario(site: Site, producer: Producer) -> None:
        p = site.propagator
        await p.attach(CallbackSink(lambda _at, _delta: None, name="slow"), on_log_full="refuse")
        p.pause("slow")
        log = p.internals().partition.log
        number = 0
        while p.statistics().log.refused == 0:
            producer.offer(Delta(f"n{number}", create([0.5] * 100), "large"))
            number += 1
            await anyio.sleep(0.01)
        assert log.statistics().held_by == "slow"
        start_s = site.world.clock.now()
        await offer_in_batches(producer)
        await anyio.sleep(10)
        await check_reported(site, "log", start_s)
        full = p.statistics().full
        assert full is not None
        assert "'slow'" in full.reason
        p.resume("slow")
        await producer.flush(60)
        await check_healthy(site)

    run_with_site(scenario)


def test_full_queue_is_reported() -> None:
    async def scenario(site: Site, producer: Producer) -> None:
        p = site.propagator
        gate = p.internals().partition.pipeline._gate
        gate.admits = lambda *_: False  # type: ignore[method-assign]
        start_s = site.world.clock.now()
        for number in range(30):
            p.offer(make_delta(str(number)))
        await anyio.sleep(5)
        await check_reported(site, "queue", start_s)
        del gate.admits
        await anyio.sleep(1)
        await check_healthy(site)

    run_with_site(scenario, settings=Settings(queue_deltas_max=20))
