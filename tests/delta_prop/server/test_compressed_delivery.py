"""Delivery from a compressed log: stored frames for clients with the codec, else uncompressed frames."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import anyio
import pytest

from delta_prop import Delta, LogSettings, opaque
from delta_prop.api.propagator import Propagator
from delta_prop.client import Subscriber
from delta_prop_wire.codec import Decoder
from delta_prop_wire.compression import available_codecs
from delta_prop_wire.frames import Backpressure, BatchFrame, Credit, PressureLevel
from delta_prop_wire.spec import Flag, FrameType
from tests.delta_prop.server.raw import FrameClient, connected, serving

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from delta_prop.server.service import Address
    from delta_prop_broker.log.settings import Compress
    from delta_prop_wire.header import Header

ROWS, BATCHES = 20, 60
"""Rows of each batch, and number of batches."""
NAMES = [codec.name.lower() for codec in available_codecs()]

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@asynccontextmanager
async def serve_compressed(tmp_path: Path, codec: Compress) -> AsyncIterator[Address]:
    """Run a server with a small log that has at least one compressed segment."""
    log = LogSettings(compress=codec, segment_bytes_max=200_000, tail_bytes_max=1, compact=False)
    async with Propagator(data=tmp_path, log=log) as p:
        for number in range(BATCHES):
            data = b"%d " % number * 100
            await p.publish(*[Delta(f"v{row}", opaque(data), namespace="n") for row in range(ROWS)])
        with anyio.fail_after(60):
            while p.statistics().log.compressed_segments < 1:  # noqa: ASYNC110 - there is no event for it
                await anyio.sleep(0.05)
        async with serving(p) as (_, address):
            yield address


class ReceivedFrames:
    """The headers received, and the rows with their offsets."""

    def __init__(self, client: FrameClient) -> None:
        self.headers: list[Header] = []
        self.rows: list[tuple[int, str, bytes | None]] = []
        self._client = client
        client._decoder = Decoder(on_header=self.headers.append)

    async def receive_all(self) -> None:
        while len(self.rows) < ROWS * BATCHES:
            frame = await self._client.until(BatchFrame)
            offsets = frame.batch.row_offsets
            for row in range(frame.batch.count):
                offset = frame.sequence + row if offsets is None else int(offsets[row])
                self.rows.append((offset, frame.batch.keys[row], frame.batch.blob(row)))

    @property
    def compressed_count(self) -> int:
        """Return the number of compressed batches."""
        return sum(
            1 for header in self.headers if header.type is FrameType.BATCH and header.flags & Flag.COMPRESSED
        )


EXPECTED = [
    (number * ROWS + row, f"v{row}", b"%d " % number * 100)
    for number in range(BATCHES)
    for row in range(ROWS)
]


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
async def test_subscriber_with_the_codec_gets_stored_compressed_frames(
    tmp_path: Path, codec: Compress
) -> None:
    other_codec = next(name for name in NAMES if name != codec)
    async with serve_compressed(tmp_path, codec) as address:
        for features, is_compressed in (
            ((codec,), True),
            (tuple(NAMES), True),
            ((), False),
            ((other_codec,), False),
            (("unheard",), False),
        ):
            async with connected(address) as client:
                received = ReceivedFrames(client)
                ack = await client.hello(features=features)
                assert codec in ack.welcome.features  # type: ignore[union-attr]
                await client.subscribe()
                await received.receive_all()
                assert received.rows == EXPECTED
                assert (received.compressed_count > 0) == is_compressed


async def test_later_hello_without_features_keeps_the_codec(tmp_path: Path) -> None:
    async with serve_compressed(tmp_path, "zstd") as address, connected(address) as client:
        received = ReceivedFrames(client)
        await client.hello(features=("zstd",))
        await client.hello()
        await client.subscribe()
        await received.receive_all()
        assert received.rows == EXPECTED
        assert received.compressed_count > 0


async def test_sliced_deliveries_are_uncompressed_and_complete(tmp_path: Path) -> None:
    async with serve_compressed(tmp_path, "zstd") as address:
        for topic, rate in (("ns:n", None), ("*", 80.0 * ROWS), ("*", 1e6)):
            async with connected(address) as client:
                received = ReceivedFrames(client)
                await client.hello(features=("zstd",))
                await client.send(Backpressure(1, PressureLevel.WARN, rate=rate))
                await client.subscribe(topic, credit=Credit(100_000, 10_000_000))
                await received.receive_all()
                assert received.rows == EXPECTED
                assert topic == "*" or not received.compressed_count


async def test_client_subscriber_reads_compressed_frames(tmp_path: Path) -> None:
    blobs: list[bytes | None] = []
    size = 0
    async with (
        serve_compressed(tmp_path, "zstd") as address,
        Subscriber(f"{address.host}:{address.port}", "*", start="earliest", compressed=True) as subscriber,
    ):
        async for batch in subscriber.batches():
            blobs += [row.delta.operation.data for row in batch]
            size += batch.size
            if len(blobs) == len(EXPECTED):
                break
    assert blobs == [data for _, _, data in EXPECTED]
    assert size < sum(len(data) for _, _, data in EXPECTED) * 0.7, (
        "all segments but the last should be compressed"
    )
