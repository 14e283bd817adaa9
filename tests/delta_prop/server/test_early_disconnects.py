"""A connection that ends early gets the reason, and no other connection is affected."""

from __future__ import annotations

import anyio
import pytest

from delta_prop.api.propagator import Propagator
from delta_prop.server.settings import ServerSettings
from delta_prop_wire.codec import encode
from delta_prop_wire.frames import (
    Ack,
    BatchFrame,
    Credit,
    Heartbeat,
    Hello,
    Nack,
    OriginClaim,
    Start,
    StartAt,
    Subscribe,
    Unsubscribe,
)
from delta_prop_wire.spec import ErrorCode
from tests.delta_prop.server.raw import ORIGIN, connected, opaque_batch, serving

pytestmark = pytest.mark.anyio
QUICK = ServerSettings(port=0, heartbeat_interval_s=0.2)


async def test_refused_first_hello_ends_only_its_connection() -> None:
    async with Propagator() as p, serving(p, QUICK) as (_, address), connected(address) as honest:
        await honest.hello()
        for _ in range(2):
            async with connected(address) as client:
                await client.hello(ORIGIN)
        async with connected(address) as stale:
            await stale.send(Subscribe(1, Hello(origins=(OriginClaim(ORIGIN, 1),))))
            nack = await stale.next()
            assert isinstance(nack, Nack)
            assert (nack.code, nack.correlation_id) == (ErrorCode.FENCED, 1)
            assert await stale.next() is None
            await anyio.sleep(1)  # heartbeats are due, but not on closed connections
        assert isinstance(await honest.next(), Heartbeat)
        await honest.send(Heartbeat(1))
        assert isinstance(await honest.next(), Heartbeat)


@pytest.mark.parametrize("drain", [True, False])
async def test_unsubscribe_ends_at_once_or_after_the_drain(drain: bool) -> None:
    async with (
        Propagator() as p,
        serving(p) as (_, address),
        connected(address) as producer,
        connected(address) as subscriber,
    ):
        await producer.hello(ORIGIN)
        await producer.send(*(opaque_batch(base, 2) for base in (1, 3, 5)))
        await producer.until_acked(6)
        await subscriber.hello()
        await subscriber.subscribe(credit=Credit(1, 1_000_000))
        assert (await subscriber.until(BatchFrame)).sequence == 0
        await subscriber.send(Unsubscribe(7, 1, drain=drain), Unsubscribe(8, 3, drain=drain))
        if drain:  # an unknown number is refused at once, because there is nothing to drain
            nack = await subscriber.next()
            assert isinstance(nack, Nack)
            assert (nack.correlation_id, nack.code) == (8, ErrorCode.BAD_REQUEST)
            with anyio.move_on_after(0.3) as scope:
                await subscriber.until(BatchFrame)
            assert scope.cancelled_caught, "without credit no batch should come"
            await subscriber.send(Ack(credit=Credit(100, 1_000_000)))
            assert (await subscriber.until(BatchFrame)).sequence == 2
            assert (await subscriber.until(BatchFrame)).sequence == 4
        ack = await subscriber.next()
        assert isinstance(ack, Ack)
        assert (ack.correlation_id, ack.processed) == (7, 6 if drain else 2)
        if not drain:
            nack = await subscriber.next()
            assert isinstance(nack, Nack)
            assert (nack.correlation_id, nack.code) == (8, ErrorCode.BAD_REQUEST)
        await producer.send(opaque_batch(7, 2))
        await producer.until_acked(8)
        await subscriber.subscribe(start=Start(StartAt.OFFSET, 7))
        assert (await subscriber.until(BatchFrame)).sequence in (6, 7)


async def test_frames_before_garbage_are_accepted_and_garbage_is_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with Propagator() as p, serving(p, QUICK) as (_, address), connected(address) as client:
        await client.hello(ORIGIN)
        await client.stream.send([encode(opaque_batch(1, 3)) + b"GET / HTTP/1.1\r\n\r\n"])
        nack = await client.until(Nack)
        assert (nack.sequence, nack.code, nack.correlation_id) == (0, ErrorCode.BAD_FRAME, None)
        while (rest := await client.next()) is not None:
            assert isinstance(rest, Ack)
        assert p.statistics().accepted == 3
        async with connected(address) as second:
            welcome = await second.hello(ORIGIN)
            assert isinstance(welcome, Ack)
            assert welcome.welcome is not None
            assert welcome.welcome.origins == ((ORIGIN, 2, 3),)
    assert "failed" not in caplog.text
