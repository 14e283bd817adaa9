"""A service with jobs on a simulated disk in virtual time, and clients that run a job frame by frame."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Literal

import anyio

from delta_prop.api.propagator import Propagator
from delta_prop.api.settings import Settings
from delta_prop.server.access import Access
from delta_prop.server.service import Service
from delta_prop.server.settings import ServerSettings
from delta_prop.testing import VirtualNetwork, run_virtual, virtual_world
from delta_prop_broker.log.settings import LogSettings
from delta_prop_wire.delta import Delta, Priority, make_origin, producer_id_of
from delta_prop_wire.errors import Refused
from delta_prop_wire.frames import (
    Ack,
    AckRange,
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
from tests.delta_prop.server.jobs import JOB, block_of, part_deltas
from tests.delta_prop.server.raw import FrameClient

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    from delta_prop.server.jobs import Jobs
    from delta_prop_simulations.disk import SimDisk
    from delta_prop_wire.spec import ErrorCode
    from tests.delta_prop.server.tokens import TokenFile


NO_RESERVE = LogSettings(free_bytes_min=0, reserve_bytes=0)


class Site:
    """A service, with requests to it as a task and as a driver send them."""

    def __init__(self, propagator: Propagator, service: Service, network: VirtualNetwork) -> None:
        self.propagator = propagator
        self.service = service
        self.network = network.at("client")

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[FrameClient]:
        assert self.service.address is not None
        stream = await self.network.connect("server", self.service.address.port)
        try:
            yield FrameClient(stream)
        finally:
            await stream.aclose()

    @property
    def jobs(self) -> Jobs:
        context = self.service._context
        assert context is not None
        return context.served.jobs

    async def stage(
        self,
        part: int,
        attempt: int,
        deltas: Sequence[Delta],
        *,
        block_rows: int = 4,
        job: str = JOB,
        token: str | None = None,
    ) -> StagedPart:
        """Stage a part as one task does. Raises Refused if its hello is refused."""
        async with self.connected() as raw:
            ack = await staged_hello(raw, part, attempt, job, token)
            watermark = ack.welcome.origins[0].watermark
            for start in range(watermark, len(deltas), block_rows):
                await raw.send(
                    frame(part, deltas[start : start + block_rows], start + 1, start + 1 - watermark)
                )
            if len(deltas) > watermark:
                await raw.until_acked(len(deltas) - watermark)
        return StagedPart(part, attempt, len(deltas))

    async def decide(
        self,
        decision: Decision,
        parts: Sequence[StagedPart] = (),
        job: str = JOB,
        token: str | None = None,
        run: int | None = None,
    ) -> JobStatus:
        """Send a decision as a driver does. Raises Refused."""
        async with self.connected() as raw:
            await raw.send(Subscribe(1, Hello(token=token)))
            expect_ack(await raw.next())
            return await request_decision(raw, decision, parts, job, run)

    async def wait_published(self, job: str = JOB) -> JobStatus:
        """Wait until a job is published; return its status."""
        while True:
            status = await self.decide(Decision.QUERY, job=job)
            if status.state is JobState.PUBLISHED:
                return status
            await anyio.sleep(0.05)


def origin_of(part: int, job: str = JOB) -> int:
    return make_origin(producer_id_of(f"{job}/{part}"), Priority.NORMAL)


def frame(part: int, deltas: Sequence[Delta], base: int, sequence: int | None = None) -> BatchFrame:
    """Return a frame of deltas as a task sends them. By default, `sequence` equals `base`."""
    batch = block_of(deltas).encode(origin=origin_of(part), base=base, epoch=0)
    return BatchFrame(base if sequence is None else sequence, batch, ack_wanted=True)


async def staged_hello(
    raw: FrameClient, part: int, attempt: int, job: str = JOB, token: str | None = None
) -> Any:
    """Send a task's hello; return its answer. Raises Refused."""
    claims = (OriginClaim(origin_of(part)),)
    await raw.send(Subscribe(1, Hello(origins=claims, job=JobPart(job, part, attempt), token=token)))
    return expect_ack(await raw.next())


async def request_decision(
    raw: FrameClient,
    decision: Decision,
    parts: Sequence[StagedPart] = (),
    job: str = JOB,
    run: int | None = None,
) -> JobStatus:
    await raw.send(Subscribe(9, Decide(job, decision, tuple(parts), run)))
    while (frame := await raw.next()) is not None:
        if isinstance(frame, Ack | Nack) and frame.correlation_id == 9:
            status = expect_ack(frame).job
            assert status is not None
            return status
    raise AssertionError("the connection ended before the answer")


def expect_ack(frame: object) -> Ack:
    """Return the frame, which should be an Ack. Raises Refused for a Nack."""
    if isinstance(frame, Nack):
        raise frame.refusal()
    assert isinstance(frame, Ack), frame
    return frame


@asynccontextmanager
async def serve_virtual(
    disk: SimDisk,
    seed: int = 1,
    settings: Settings | None = None,
    *,
    log: LogSettings | None = None,
    tokens: TokenFile | None = None,
    thread_delay_s_max: float = 0.002,
    **server_options: Any,
) -> AsyncIterator[Site]:
    """Serve the data of a simulated disk in virtual time."""
    network = VirtualNetwork(seed, host="server")
    world = virtual_world(seed, thread_delay_s_max=thread_delay_s_max, network=network, disk=disk)
    async with (
        Propagator(settings, data="x", log=log, world=world) as propagator,
        anyio.create_task_group() as tasks,
    ):
        server_settings = ServerSettings(host="server", allow_anonymous=True, **server_options)
        service = Service(
            propagator, server_settings, access=None if tokens is None else Access(world, tokens)
        )
        await tasks.start(service.run)
        site = Site(propagator, service, network)
        await wait_staged_read(site)
        try:
            yield site
        finally:
            service.stop()


async def wait_staged_read(site: Site) -> None:
    """Wait until the server has read the staged parts."""
    while not site.jobs._table.is_loaded:  # noqa: ASYNC110
        await anyio.sleep(0.01)


def run_scenario(
    disk: SimDisk,
    scenario: Callable[[Site], Awaitable[None]],
    *,
    backend: Literal["asyncio", "trio"] = "asyncio",
    **more: object,
) -> None:
    """Run a scenario on a service in virtual time."""

    async def main() -> None:
        with anyio.fail_after(3_600):
            async with serve_virtual(disk, **more) as site:  # type: ignore[arg-type]
                await scenario(site)

    run_virtual(main, backend=backend)


def part_paths(disk: SimDisk) -> list[str]:
    return [path for path in disk.paths() if path.endswith(".part")]


async def refusal_code(call: Awaitable[object]) -> ErrorCode | None:
    try:
        await call
    except Refused as refused:
        return refused.code
    return None


async def stage_first_rows(site: Site, raw: FrameClient, attempt: int = 1) -> None:
    assert (await staged_hello(raw, 0, attempt)).welcome.origins == ((origin_of(0), 0, 0),)
    await raw.send(frame(0, part_deltas(0, 4), 1))
    assert (await raw.until_acked(4)).ranges == (AckRange(1, 4, 0),)
