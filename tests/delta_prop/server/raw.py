"""A client that sends and receives single frames, so that a test controls every frame of a connection."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio

from delta_prop.api.propagator import Propagator
from delta_prop.platform.world import real_world
from delta_prop.server.service import Service
from delta_prop.server.settings import ServerSettings
from delta_prop_wire.codec import NEED_BYTES, Decoder, encode
from delta_prop_wire.delta import AckLevel, Delta, Priority, make_origin, opaque
from delta_prop_wire.encode import encode_batch
from delta_prop_wire.frames import (
    Ack,
    BatchFrame,
    Frame,
    Hello,
    OriginClaim,
    Start,
    StartAt,
    Subscribe,
    Subscription,
)
from delta_prop_wire.topics import Topic

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from delta_prop.platform.ports import Network, Stream
    from delta_prop.server.service import Address

WAIT_S_MAX = 10.0
EARLIEST = Start(StartAt.EARLIEST)


class FrameClient:
    """One connection to a server; the test sends and reads each frame."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.ended = False
        self._decoder = Decoder()
        self._buffer = bytearray(64 * 1024)
        self._sequence = 0

    async def send(self, *frames: Frame) -> None:
        await self.stream.send([encode(frame) for frame in frames])

    async def next(self) -> Frame | None:
        """Return the next frame; None if the server has ended the connection."""
        with anyio.fail_after(WAIT_S_MAX):
            while True:
                frame = self._decoder.next_event()
                if frame is not NEED_BYTES:
                    return frame
                try:
                    count = await self.stream.receive_into(memoryview(self._buffer))
                except ConnectionError:
                    count = 0
                if not count:
                    self.ended = True
                    return None
                self._decoder.receive(self._buffer[:count])

    async def until(self, kind: type[Any]) -> Any:
        """Return the next frame of a type; skip others."""
        while not isinstance(frame := await self.next(), kind):
            assert frame is not None, f"the connection ended before a {kind.__name__}"
        return frame

    async def until_acked(self, sequence: int) -> Ack:
        """Return the Ack that covers all sequences up to this one."""
        while (ack := await self.until(Ack)).sequence < sequence:
            pass
        assert isinstance(ack, Ack)
        return ack

    async def hello(self, *origins: int, **more: Any) -> Ack:
        claims = tuple(OriginClaim(origin) for origin in origins)
        await self.send(Subscribe(1, Hello(origins=claims, **more)))
        ack = await self.next()
        assert isinstance(ack, Ack), ack
        return ack

    async def subscribe(self, *topics: str, start: Start = EARLIEST, **more: Any) -> Ack:
        parsed = tuple(Topic.parse(topic) for topic in topics or ("*",))
        await self.send(Subscribe(2, Subscription(1, parsed, start, **more)))
        while isinstance(ack := await self.next(), Ack) and ack.correlation_id is None:
            pass  # the server reports progress now and then
        assert isinstance(ack, Ack), ack
        return ack


ORIGIN = make_origin(77, Priority.NORMAL)


def opaque_batch(
    base: int, count: int = 1, *, epoch: int = 1, level: AckLevel = AckLevel.MEMORY, **more: Any
) -> BatchFrame:
    """Return a frame of rows whose dots start at `base`; its sequences are the counters."""
    deltas = [Delta(f"v{(base + row) % 7}", opaque(b"%d" % (base + row)), "rows") for row in range(count)]
    origin = more.pop("origin", ORIGIN)
    batch = encode_batch(deltas, origin=origin, base=base, epoch=epoch, ack_level=level, **more)
    return BatchFrame(base, batch, ack_wanted=True)


@asynccontextmanager
async def serving(
    propagator: Propagator, settings: ServerSettings | None = None, **more: Any
) -> AsyncIterator[tuple[Service, Address]]:
    """Run a server on a free port, and stop it at the end."""
    service = Service(propagator, settings or ServerSettings(port=0), **more)
    async with anyio.create_task_group() as tasks:
        address = await tasks.start(service.run)
        try:
            yield service, address
        finally:
            service.stop()


@asynccontextmanager
async def connected(address: Address, network: Network | None = None) -> AsyncIterator[FrameClient]:
    network = network or real_world().network
    assert network is not None
    stream = await network.connect(address.host, address.port)
    try:
        yield FrameClient(stream)
    finally:
        await stream.aclose()
