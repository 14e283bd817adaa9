"""A service with jobs on a false disk in virtual time, and who runs a job against it by frames alone."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio

from delta_prop.config import Settings
from delta_prop.embedded import Propagator
from delta_prop.server.service import Service
from delta_prop.server.settings import ServerSettings
from delta_prop.testing import VirtualNetwork, virtual_world
from delta_prop_wire.delta import Delta, Priority, make_origin, producer_id_of
from delta_prop_wire.frames import (
    Ack,
    BatchFrame,
    Decide,
    Decision,
    Hello,
    JobPart,
    JobState,
    JobStatus,
    Nack,
    OriginClaim,
    StagedPart,
    Subscribe,
)
from tests.delta_prop.server.jobs import JOB, block_of
from tests.delta_prop.server.raw import Raw

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from delta_prop_simulations.disk import SimDisk


class Site:
    """A service, and connections to it."""

    def __init__(self, propagator: Propagator, service: Service, network: VirtualNetwork) -> None:
        self.propagator = propagator
        self.service = service
        self.network = network.at("client")

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[Raw]:
        assert self.service.address is not None
        stream = await self.network.connect("server", self.service.address.port)
        try:
            yield Raw(stream)
        finally:
            await stream.aclose()

    async def stage(self, part: int, attempt: int, deltas: Sequence[Delta], *, rows: int = 4) -> StagedPart:
        """One task. Raises Refused where its hello is refused."""
        async with self.connected() as raw:
            origin = origin_of(part)
            ack = await staged_hello(raw, part, attempt)
            have = ack.welcome.origins[0].watermark
            for begin in range(have, len(deltas), rows):
                block = block_of(deltas[begin : begin + rows])
                batch = block.encode(origin=origin, base=begin + 1, epoch=0)
                await raw.send(BatchFrame(begin + 1 - have, batch, ack_wanted=True))
            if len(deltas) > have:
                await raw.told(len(deltas) - have)
        return StagedPart(part, attempt, len(deltas))

    async def decide(self, decision: Decision, parts: Sequence[StagedPart] = (), job: str = JOB) -> JobStatus:
        """The driver. Raises Refused."""
        async with self.connected() as raw:
            await raw.hello()
            return await decided(raw, decision, parts, job)

    async def published(self) -> JobStatus:
        """How a committed job ended."""
        while True:
            status = await self.decide(Decision.LOOK)
            if status.state is JobState.PUBLISHED:
                return status
            await anyio.sleep(0.05)


def origin_of(part: int) -> int:
    return make_origin(producer_id_of(f"{JOB}/{part}"), Priority.NORMAL)


async def staged_hello(raw: Raw, part: int, attempt: int, job: str = JOB) -> Any:
    """The answer to a task's hello, once there is one. Raises Refused."""

    await raw.send(
        Subscribe(1, Hello(origins=(OriginClaim(origin_of(part)),), job=JobPart(job, part, attempt)))
    )
    return answer(await raw.next())


async def decided(
    raw: Raw, decision: Decision, parts: Sequence[StagedPart] = (), job: str = JOB
) -> JobStatus:
    await raw.send(Subscribe(9, Decide(job, decision, tuple(parts))))
    while (frame := await raw.next()) is not None:
        if isinstance(frame, Ack | Nack) and frame.answers == 9:
            status = answer(frame).job
            assert status is not None
            return status
    raise AssertionError("the connection ended before the answer")


def answer(frame: object) -> Ack:
    """An answer that grants. Raises Refused."""
    if isinstance(frame, Nack):
        raise frame.refusal()
    assert isinstance(frame, Ack), frame
    return frame


@asynccontextmanager
async def site(
    disk: SimDisk, seed: int = 1, settings: Settings | None = None, **server: Any
) -> AsyncIterator[Site]:
    """Serve what is on a disk."""
    network = VirtualNetwork(seed, host="server")
    world = virtual_world(seed, thread_delay_s_max=0.002, network=network, disk=disk)
    async with (
        Propagator(settings, data="x", world=world) as propagator,
        anyio.create_task_group() as tasks,
    ):
        made = ServerSettings(host="server", allow_anonymous=True, **server)
        service = Service(propagator, made)
        await tasks.start(service.run)
        found = Site(propagator, service, network)
        await until_read(found)
        try:
            yield found
        finally:
            service.stop()


async def until_read(site: Site) -> None:
    """Wait until the server knows what is staged."""
    hub = site.service._hub
    assert hub is not None
    while not hub.jobs._read:  # noqa: ASYNC110
        await anyio.sleep(0.01)
