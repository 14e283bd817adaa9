"""A service with streams on a thread of its own, and what tests ask about its partitions."""

from __future__ import annotations

from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING

import anyio
from anyio.from_thread import start_blocking_portal

from delta_prop.client.facts import find_stream
from delta_prop.client.request_client import RequestClient
from delta_prop.hosting.streams import Streams
from delta_prop.server.service import Service
from delta_prop.server.settings import ServerSettings
from delta_prop.spark.options import Remote
from delta_prop.spark.served_streams import partition_reader
from delta_prop_wire.slicing import deltas_of
from delta_prop_wire.stamp import LogName
from delta_prop_wire.stream_requests import CreateStream
from delta_prop_wire.topics import ALL, Topic

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

STREAM = "orders"


@asynccontextmanager
async def _run(data: Path) -> AsyncIterator[str]:
    async with Streams(data=data) as streams, anyio.create_task_group() as tasks:
        service = Service(streams, ServerSettings(port=0))
        await tasks.start(service.run)
        assert service.address is not None
        try:
            yield f"{service.address.host}:{service.address.port}"
        finally:
            service.stop()


@contextmanager
def serving(data: Path, partitions: int = 3) -> Iterator[str]:
    """Serve a directory in which stream `STREAM` has so many partitions; yield the address."""
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(_run(data)) as address:
        create(address, STREAM, partitions)
        yield address


def create(address: str, stream: str, partitions: int) -> None:
    """Create a stream, unless it exists."""
    client = RequestClient("tests", None, None, 30.0, "none")
    client.ask(address, CreateStream(stream, partitions, if_not_exists=True))


def keys_of_partitions(address: str, stream: str = STREAM, namespace: str = "") -> list[list[str]]:
    """Return the vector ids in each partition of a stream, in the order of its log."""
    found = find_stream(address, stream)
    topics = [Topic.parse(f"ns:{namespace}")] if namespace else [ALL]
    keys: list[list[str]] = []
    for partition in range(found.count):
        reader = partition_reader(Remote((address,)), LogName(found.stream, partition))
        bounds = reader.bounds()
        batches = reader.read(bounds.start_offset, bounds.end_offset, topics)
        keys.append([delta.vector_id for one in batches for delta in deltas_of(one.batch)])
    return keys
