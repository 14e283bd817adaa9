"""The server, frame by frame: hello, publish, acknowledgements, subscriptions, refusals, shutdown."""

from __future__ import annotations

from dataclasses import replace

import anyio
import pytest

from delta_prop import Delta, opaque
from delta_prop.api.propagator import Propagator
from delta_prop_wire.delta import AckLevel
from delta_prop_wire.frames import (
    Ack,
    AckRange,
    BatchFrame,
    Credit,
    DeltaFrame,
    Heartbeat,
    Hello,
    Nack,
    OriginClaim,
    Subscribe,
    Unsubscribe,
)
from delta_prop_wire.spec import ErrorCode
from tests.delta_prop.server.raw import ORIGIN, FrameClient, connected, opaque_batch, serving


@pytest.fixture(params=["asyncio", "asyncio+uvloop", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> object:
    name, _, uvloop = request.param.partition("+")
    return (name, {"use_uvloop": True}) if uvloop else name


pytestmark = pytest.mark.anyio


async def test_published_batch_is_acknowledged_and_delivered() -> None:
    async with (
        Propagator() as p,
        serving(p) as (_, address),
        connected(address) as producer,
        connected(address) as subscriber,
    ):
        await subscriber.hello()
        granted = await subscriber.subscribe("ns:rows")
        assert granted.correlation_id == 2
        welcome = await producer.hello(ORIGIN)
        assert welcome.welcome is not None
        assert welcome.welcome.origins == ((ORIGIN, 1, 0),)
        assert welcome.credit is not None
        await producer.send(opaque_batch(1, 3))
        ack = await producer.until(Ack)
        assert (ack.sequence, ack.ranges) == (3, (AckRange(1, 3, 0),))
        frame = await subscriber.until(BatchFrame)
        assert [frame.batch.delta(row).operation.data for row in range(3)] == [b"1", b"2", b"3"]
        assert (frame.sequence, frame.stamp is not None) == (0, True)


async def test_duplicate_batch_is_acked_with_its_first_offset() -> None:
    async with Propagator() as p, serving(p) as (_, address), connected(address) as producer:
        await producer.hello(ORIGIN)
        for sequence in (1, 3, 5):
            await producer.send(replace(opaque_batch(1, 2), sequence=sequence))
        ranges: list[AckRange] = []
        while len(ranges) < 3:
            ranges += (await producer.until(Ack)).ranges
        assert ranges == [AckRange(1, 2, 0), AckRange(3, 4, 0, True), AckRange(5, 6, 0, True)]
        assert p.statistics().accepted == 2


async def test_delta_without_a_dot_is_acked_or_refused() -> None:
    async with Propagator() as p, serving(p) as (_, address), connected(address) as producer:
        await producer.hello()
        await producer.send(DeltaFrame(9, Delta("a", opaque(b"x")), True))
        ack = await producer.until(Ack)
        assert ack.ranges == (AckRange(9, 9, 0),)
        await producer.send(DeltaFrame(10, Delta("a" * 600, opaque(b"x")), True))
        nack = await producer.until(Nack)
        assert (nack.sequence, nack.code, nack.field) == (10, ErrorCode.INVALID_DELTA, "vector_id")
        assert (await producer.until(Ack)).sequence == 10


async def test_invalid_delta_with_a_dot_consumes_the_dot() -> None:
    async with Propagator() as p, serving(p) as (_, address), connected(address) as producer:
        await producer.hello(ORIGIN)
        invalid = Delta("a" * 600, opaque(b"x"), dot=opaque_batch(1).batch.dot(0))
        await producer.send(DeltaFrame(1, invalid, True), opaque_batch(2))
        assert (await producer.until(Nack)).code is ErrorCode.INVALID_DELTA
        assert (await producer.until_acked(2)).sequence == 2
        assert p.statistics().noops == 1


async def test_frames_before_hello_are_refused() -> None:
    async with Propagator() as p, serving(p) as (_, address):
        for frame in (opaque_batch(1), Heartbeat(1), Unsubscribe(1, 1), Ack(1)):
            async with connected(address) as client:
                await client.send(frame)
                nack = await client.next()
                assert isinstance(nack, Nack)
                assert nack.code is ErrorCode.UNAUTHORIZED
                assert await client.next() is None
        assert p.statistics().accepted == 0


async def test_older_epoch_is_fenced() -> None:
    async with (
        Propagator() as p,
        serving(p) as (_, address),
        connected(address) as first,
        connected(address) as second,
    ):
        await first.hello(ORIGIN)
        await second.hello(ORIGIN)
        await first.send(opaque_batch(1))
        assert (await first.until(Nack)).code is ErrorCode.FENCED
        await second.send(opaque_batch(1, epoch=2))
        assert (await second.until(Ack)).sequence == 1


async def test_reconnecting_producer_keeps_its_epoch() -> None:
    async with Propagator() as p, serving(p) as (_, address):
        async with connected(address) as first:
            await first.hello(ORIGIN)
            await first.send(opaque_batch(1, 5))
            await first.until(Ack)
        async with connected(address) as second:
            await second.send(Subscribe(1, Hello(origins=(OriginClaim(ORIGIN, 1),))))
            welcome = await second.until(Ack)
            assert welcome.welcome is not None
            assert welcome.welcome.origins == ((ORIGIN, 1, 5),)


async def test_acked_batch_returns_its_credit() -> None:
    async with Propagator() as p, serving(p) as (_, address), connected(address) as producer:
        await producer.hello(ORIGIN)
        frame = opaque_batch(1, 10)
        await producer.send(frame)
        returned_credit = (await producer.until(Ack)).credit
        assert returned_credit == Credit(10, frame.batch.size)


async def test_unsubscribe_reports_processed_and_frees_the_number() -> None:
    async with Propagator() as p, serving(p) as (_, address), connected(address) as subscriber:
        await subscriber.hello()
        await subscriber.subscribe("ns:rows")
        await p.publish(Delta("a", opaque(b"1"), "rows"), Delta("b", opaque(b"2"), "other"))
        frame = await subscriber.until(BatchFrame)
        assert frame.batch.keys == ["a"]
        assert frame.batch.row_offsets is not None
        assert list(frame.batch.row_offsets) == [0]
        await subscriber.send(Unsubscribe(3, 1))
        ended = await subscriber.until(Ack)
        assert (ended.correlation_id, ended.processed) == (3, 2)
        await subscriber.send(Unsubscribe(4, 1))
        assert (await subscriber.until(Nack)).code is ErrorCode.BAD_REQUEST


async def test_shutdown_notifies_clients_and_loses_nothing() -> None:
    async with Propagator() as p:
        async with (
            serving(p) as (service, address),
            connected(address) as producer,
            connected(address) as subscriber,
        ):
            await subscriber.hello()
            await subscriber.subscribe()
            await producer.hello(ORIGIN)
            await producer.send(*(opaque_batch(1 + 10 * n, 10) for n in range(50)))
            await producer.until(Ack)
            service.stop()
            answers, delivered = await read_until_closed(producer), await read_until_closed(subscriber)
        acknowledged = max((frame.sequence for frame in answers if isinstance(frame, Ack)), default=0)
        row_count = sum(frame.batch.count for frame in delivered if isinstance(frame, BatchFrame))
        assert row_count >= acknowledged
        for frames in (answers, delivered):
            last = frames[-1]
            assert isinstance(last, Nack)
            assert last.code is ErrorCode.SHUTTING_DOWN


async def read_until_closed(client: FrameClient) -> list[object]:
    """Return all frames until the connection ends."""
    frames: list[object] = []
    with anyio.fail_after(60):
        while (frame := await client.next()) is not None:
            frames.append(frame)
    return frames


async def test_level_that_the_log_cannot_grant_is_refused() -> None:
    async with Propagator() as p, serving(p) as (_, address), connected(address) as producer:
        await producer.hello(ORIGIN)
        await producer.send(opaque_batch(1, level=AckLevel.DURABLE))
        assert (await producer.until(Nack)).code is ErrorCode.LEVEL_UNAVAILABLE


async def test_data_with_sequence_0_is_a_protocol_error() -> None:
    """A refusal of sequence 0 would look like a refusal of the connection."""
    async with Propagator() as p, serving(p) as (_, address), connected(address) as producer:
        await producer.hello(ORIGIN)
        await producer.send(DeltaFrame(0, Delta("a", opaque(b"x")), True))
        nack = await producer.until(Nack)
        assert (nack.code, "from 1" in nack.text) == (ErrorCode.BAD_FRAME, True)
        assert await producer.next() is None
        assert p.statistics().accepted == 0
