"""Golden frames with one flipped bit, sent to a server, affect nothing but their own connection."""

from __future__ import annotations

import random

import anyio
import pytest

from delta_prop.api.propagator import Propagator
from delta_prop_wire.codec import encode
from delta_prop_wire.delta import make_origin
from delta_prop_wire.frames import Ack, BatchFrame, DeltaFrame, Heartbeat
from delta_prop_wire.spec import FrameType
from tests.delta_prop.server.raw import connected, opaque_batch, serving
from tests.wire.samples import ORIGIN, SAMPLES

pytestmark = pytest.mark.anyio

FLIPS = 400
"""Number of flipped bits in a short run."""
OTHER = make_origin(78, 2)
FRAMES = [
    encode(frame)
    for frame in SAMPLES.values()
    if not isinstance(frame, DeltaFrame | BatchFrame)
    or (frame.stamp is None if isinstance(frame, BatchFrame) else frame.lamport is None)
]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_flipped_bit_has_no_effect_beyond_its_connection(full: bool) -> None:
    flips = [(raw, bit) for raw in FRAMES for bit in range(8 * len(raw))]
    if not full:
        flips = random.Random(17).sample(flips, FLIPS)
    print(f"{len(flips)} flipped bits")
    async with Propagator() as p, serving(p) as (service, address), connected(address) as honest:
        await honest.hello(OTHER)
        for number, (raw, bit) in enumerate(flips):
            if number % 1_000 == 0:  # a silent client would be disconnected
                await honest.send(Heartbeat(number))
            flipped = bytearray(raw)
            flipped[bit // 8] ^= 1 << bit % 8
            async with connected(address) as client:
                await client.hello(ORIGIN)
                await client.stream.send([flipped])
        with anyio.fail_after(60):
            while len(service._handlers) > 1:  # noqa: ASYNC110
                await anyio.sleep(0.01)
        assert (p.statistics().accepted, p.internals().partition.log.next_offset) == (0, 0)
        await honest.send(opaque_batch(1, origin=OTHER))
        assert (await honest.until(Ack)).sequence == 1


def test_samples_cover_the_main_frame_types() -> None:
    kinds = {FrameType(raw[2]) for raw in FRAMES}
    assert {FrameType.DELTA, FrameType.BATCH, FrameType.SUBSCRIBE, FrameType.ACK} <= kinds


async def test_unflipped_batch_is_logged() -> None:
    async with Propagator() as p, serving(p) as (_, address), connected(address) as client:
        await client.hello(ORIGIN)
        await client.send(opaque_batch(1, origin=ORIGIN))
        await client.until(Ack)
        assert p.statistics().accepted == 1
