"""A client's credit is returned as it was charged; producers' backpressure is sent to producers only."""

from __future__ import annotations

import pytest

from delta_prop.api.propagator import Propagator
from delta_prop.server.settings import ServerSettings
from delta_prop_wire.codec import encode
from delta_prop_wire.compression import Compression
from delta_prop_wire.frames import Ack, Backpressure, Credit, Heartbeat, PressureLevel
from tests.delta_prop.server.raw import ORIGIN, connected, opaque_batch, serving

pytestmark = pytest.mark.anyio


async def test_credit_for_a_compressed_batch_equals_its_charge() -> None:
    async with Propagator() as p, serving(p) as (_, address), connected(address) as producer:
        await producer.hello(ORIGIN)
        frame = opaque_batch(1, 500)
        raw = encode(frame, compression=Compression.ZSTD)
        assert len(raw) < frame.batch.size / 2
        await producer.stream.send([raw])
        assert (await producer.until(Ack)).credit == Credit(500, len(raw))


async def test_producer_backpressure_goes_to_producers_only() -> None:
    quick = ServerSettings(port=0, heartbeat_interval_s=0.2)
    async with (
        Propagator() as p,
        serving(p, quick) as (service, address),
        connected(address) as producer,
        connected(address) as subscriber,
    ):
        await producer.hello(ORIGIN)
        await subscriber.hello()
        await subscriber.subscribe()
        for handler in service._handlers.values():
            handler.send_pressure(Backpressure(1, PressureLevel.WARN))
        assert await producer.next() == Backpressure(1, PressureLevel.WARN)
        assert isinstance(await subscriber.next(), Heartbeat)
