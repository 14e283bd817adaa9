"""Connections that end early: each is told why, and nobody else notices."""

from __future__ import annotations

import anyio
import pytest

from delta_prop.embedded import Propagator
from delta_prop.server.settings import ServerSettings
from delta_prop_wire.codec import encode
from delta_prop_wire.frames import Ack, Heartbeat, Hello, Nack, OriginClaim, Subscribe
from delta_prop_wire.spec import ErrorCode
from tests.delta_prop.server.raw import ORIGIN, connected, opaque_batch, serving

pytestmark = pytest.mark.anyio
QUICK = ServerSettings(port=0, heartbeat_s=0.2)


async def test_a_first_hello_that_is_refused_ends_its_connection_alone() -> None:
    async with Propagator() as p, serving(p, QUICK) as (_, address), connected(address) as honest:
        await honest.hello()
        for _ in range(2):
            async with connected(address) as one:
                await one.hello(ORIGIN)
        async with connected(address) as late:
            await late.send(Subscribe(1, Hello(origins=(OriginClaim(ORIGIN, 1),))))
            nack = await late.next()
            assert isinstance(nack, Nack)
            assert (nack.code, nack.answers) == (ErrorCode.FENCED, 1)
            assert await late.next() is None
            await anyio.sleep(1)  # heartbeats are due, and not said to who is gone
        assert isinstance(await honest.next(), Heartbeat)
        await honest.send(Heartbeat(1))
        assert isinstance(await honest.next(), Heartbeat)


async def test_what_came_before_garbage_is_taken_and_the_garbage_is_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with Propagator() as p, serving(p, QUICK) as (_, address), connected(address) as one:
        await one.hello(ORIGIN)
        await one.stream.send([encode(opaque_batch(1, 3)) + b"GET / HTTP/1.1\r\n\r\n"])
        nack = await one.until(Nack)
        assert (nack.sequence, nack.code, nack.answers) == (0, ErrorCode.BAD_FRAME, None)
        while (rest := await one.next()) is not None:
            assert isinstance(rest, Ack)
        assert p.statistics().accepted == 3
        async with connected(address) as again:
            welcome = await again.hello(ORIGIN)
            assert isinstance(welcome, Ack)
            assert welcome.welcome is not None
            assert welcome.welcome.origins == ((ORIGIN, 2, 3),)
    assert "failed" not in caplog.text
