"""Shared code of the job tests: a service with jobs, parts staged as a task does, and the keys in the log."""

from __future__ import annotations

import time
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import anyio
from anyio.from_thread import start_blocking_portal

from delta_prop.api.propagator import Propagator
from delta_prop.client import SyncProducer
from delta_prop.client.jobs import Decision, JobPart, JobState, JobStatus, StagedPart, decide
from delta_prop.platform.world import real_world
from delta_prop.server.service import Service
from delta_prop.server.settings import ServerSettings
from delta_prop_wire.block import Block
from delta_prop_wire.delta import Delta, opaque, sparse
from delta_prop_wire.encode import columns_of
from tests.full_log import read_all

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

    from anyio.from_thread import BlockingPortal

    from delta_prop.server.access import Access
    from delta_prop.server.jobs import Jobs
    from delta_prop_simulations.disk import SimDisk

JOB = "nightly"
NAMESPACE = "rows"


def block_of(deltas: Sequence[Delta]) -> Block:
    columns, mask, dimension = columns_of(deltas)
    return Block(len(deltas), columns, mask, dimension)


def part_deltas(part: int, count: int, start: int = 0) -> list[Delta]:
    """Return `count` deltas of a part, numbered from `start`: the same ones on each call."""
    names = (f"{part}-{start + number}" for number in range(count))
    return [Delta(name, opaque(name.encode()), NAMESPACE) for name in names]


def invalid_delta(part: int, number: int) -> Delta:
    """Return a delta that is refused when it is published, because its vector does not exist."""
    return Delta(f"none-{part}-{number}", sparse([0], [1.0]), NAMESPACE)


def stage(
    address: str,
    part: int,
    attempt: int,
    deltas: Sequence[Delta],
    *,
    job: str = JOB,
    block_rows: int = 10,
    token: str | None = None,
) -> StagedPart:
    """Stage a part as one task does, from its hello to its last acknowledgement."""
    job_part = JobPart(job, part, attempt)
    with SyncProducer(address, name=f"{job}/{part}", job=job_part, token=token) as producer:
        for start in range(0, len(deltas), block_rows):
            producer.offer_block(block_of(deltas[start : start + block_rows]))
        producer.flush()
    return StagedPart(part, attempt, len(deltas))


def without_rows(status: JobStatus) -> JobStatus:
    """Return a status without its list of the first refused rows."""
    return replace(status, refused_rows=())


def wait_published(address: str, job: str = JOB, *, timeout_s: float = 60.0) -> JobStatus:
    """Wait until a job is published; return its status."""
    deadline = time.monotonic() + timeout_s
    while (status := decide(address, job, Decision.QUERY)).state is not JobState.PUBLISHED:
        assert time.monotonic() < deadline, f"not published in {timeout_s} s: {status}"
        time.sleep(0.01)
    return status


def keys_in(propagator: Propagator) -> list[str]:
    """Return every vector id in the log, in log order, with repetitions."""
    batches = read_all(propagator.internals().partition.log)
    return [key for logged in batches if not logged.batch.is_control for key in logged.batch.keys]


class JobSite:
    """A service on a thread of its own, for blocking clients."""

    def __init__(self, portal: BlockingPortal, propagator: Propagator, service: Service) -> None:
        self.portal = portal
        self.propagator = propagator
        self.service = service
        assert service.address is not None
        self.address = f"{service.address.host}:{service.address.port}"

    @property
    def jobs(self) -> Jobs:
        context = self.service._context
        assert context is not None
        return context.served.jobs

    def keys(self) -> list[str]:
        """Return every vector id in the log, in log order, with repetitions."""
        return self.portal.call(lambda: keys_in(self.propagator))


@contextmanager
def serve_jobs(disk: SimDisk | None, *, access: Access | None = None, **settings: Any) -> Iterator[JobSite]:
    """Serve the data of a simulated disk until the block ends; with None, a log in memory."""

    def new_propagator() -> Propagator:
        if disk is None:
            return Propagator()
        return Propagator(data="x", world=replace(real_world(), open_disk=lambda _: disk))

    @asynccontextmanager
    async def run_service() -> AsyncIterator[tuple[Propagator, Service]]:
        async with new_propagator() as propagator, anyio.create_task_group() as tasks:
            service = Service(propagator, ServerSettings(port=0, **settings), access=access)
            await tasks.start(service.run)
            try:
                yield propagator, service
            finally:
                service.stop()

    with start_blocking_portal() as portal, portal.wrap_async_context_manager(run_service()) as (p, service):
        yield JobSite(portal, p, service)
