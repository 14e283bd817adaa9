"""delta-prop serve for another harness, whose peers are classes with `start`, `connect` and `publish_batch`.

Such a harness puts this folder before its own modules on the path, so no module here may have the name of one
of them. It calls these methods on asyncio. Frames are those of `_peers_ours.py`.
"""

from __future__ import annotations

import asyncio
import random
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks._peers_ours import (
    ACK_DELTAS,
    Frames,
    Ours,
    OursDurable,
    commit_of,
    hello_of,
    payloads_of,
    subscription_of,
)
from delta_prop_wire.batch import Batch
from delta_prop_wire.codec import decode
from delta_prop_wire.delta import Priority, make_origin
from delta_prop_wire.frames import Ack, OriginGrant
from delta_prop_wire.spec import HEADER_BYTES, STAMP_BYTES, FrameType
from delta_prop_wire.topics import Topic, TopicKind

_HEADER = struct.Struct(">BBBBQI")
_BATCH, _ACK, _NACK = (int(kind) for kind in (FrameType.BATCH, FrameType.ACK, FrameType.NACK))
_WRITE_BYTES_MAX = 8 * 1024 * 1024


class DeltaProp:
    """A server at ack level logged: it acknowledges, and delivers, deltas that the page cache has.

    The harness reads the class attributes.
    """

    name = "delta-prop serve (raw wire)"
    durability = "page cache"
    raw = True
    packed = False
    max_window = 1 << 30
    server_type: type[Ours] = Ours

    def __init__(self) -> None:
        self._server = self.server_type()
        self._topic = ""
        self._wire: _Wire | None = None
        self._frames: dict[tuple[int, int], Frames] = {}

    def __getstate__(self) -> Mapping[str, object]:
        return {**self.__dict__, "_wire": None, "_frames": {}}

    @property
    def pids(self) -> list[int]:
        """The processes whose CPU time is counted."""
        return [process.pid for process in self._server.processes]

    def start(self, folder: str) -> None:
        """Start the server; called in the driver."""
        self._server.start(Path(folder))

    def stop(self) -> None:
        """Stop the server."""
        self._server.stop()

    async def connect(self) -> None:
        """Do nothing: a worker connects when it first publishes or subscribes."""

    async def close(self) -> None:
        """End the connection."""
        if self._wire is not None:
            self._wire.transport.close()

    async def create(self, topic: str, consumers: int) -> None:
        """Do nothing: a topic is a namespace."""

    async def drop(self, topic: str) -> None:
        """Do nothing: retention removes old deltas."""

    async def publish_batch(self, topic: str, msgs: Sequence[bytes]) -> None:
        """Send one frame; return when it is acknowledged."""
        if self._wire is None:
            self._topic = topic
            origin = make_origin(random.getrandbits(44), Priority.NORMAL)
            self._wire = await _Wire.open(self._server.port)
            welcomed = await self._wire.ask(hello_of(topic, origin))
            assert welcomed.welcome is not None
            self._wire.grant = welcomed.welcome.origins[0]
        wire, shape = self._wire, (len(msgs), len(msgs[0]))
        frames = self._frames.get(shape)
        if frames is None:
            assert wire.grant is not None
            frames = Frames(self._topic, wire.grant, self._server.level, shape)
            self._frames[shape] = frames
        last = wire.sent = wire.sent + len(msgs)
        await wire.send(frames.frame(last - len(msgs) + 1, b"".join(msgs)), last)

    async def subscribe(self, topic: str, who: int, on_msgs: Callable[[list[bytes]], bool]) -> None:
        """Pass payloads to `on_msgs`, and acknowledge them, until it returns True."""
        wire = self._wire = await _Wire.open(self._server.port)
        await wire.ask(hello_of(f"{topic}-{who}"))
        granted = await wire.ask(subscription_of(Topic(TopicKind.NAMESPACE, topic), f"{topic}-{who}"))
        assert granted.subscribed is not None
        wire.log, wire.on_payloads = granted.subscribed.start, on_msgs
        on_msgs([])
        await wire.ended


class DeltaPropDurable(DeltaProp):
    """Deltas are acknowledged, and delivered, once they are on stable storage."""

    name = "delta-prop serve, durable (raw wire)"
    durability = "fdatasync before the acknowledgement"
    server_type = OursDurable


class _Wire(asyncio.Protocol):
    """A connection: sends frames, receives acknowledgements and batches."""

    def __init__(self) -> None:
        self.transport: Any = None
        self.sent = 0
        self.grant: OriginGrant | None = None
        self.log: Any = None
        self.on_payloads: Callable[[list[bytes]], bool] | None = None
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._rest = b""
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []
        self._answer: asyncio.Future[Ack] | None = None
        self._unacked = 0

    @classmethod
    async def open(cls, port: int) -> _Wire:
        """Connect."""
        _, wire = await asyncio.get_running_loop().create_connection(cls, "127.0.0.1", port)
        return wire

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        transport.set_write_buffer_limits(_WRITE_BYTES_MAX)

    def connection_lost(self, error: Exception | None) -> None:
        failure = error or ConnectionError("the server has closed the connection")
        awaited = [self._answer, *(future for _, future in self._waiting)]
        if self.on_payloads is not None:
            awaited.append(self.ended)
        for future in awaited:
            if future is not None and not future.done():
                future.set_exception(failure)

    async def ask(self, frame: bytes) -> Ack:
        """Send a request and return its answer."""
        self._answer = asyncio.get_running_loop().create_future()
        self.transport.write(frame)
        return await self._answer

    async def send(self, frame: bytes | bytearray, last: int) -> None:
        """Send a batch; return when all rows up to the sequence `last` are acknowledged."""
        acked = asyncio.get_running_loop().create_future()
        self._waiting.append((last, acked))
        self.transport.write(frame)
        await acked

    def data_received(self, data: bytes) -> None:
        data = self._rest + data if self._rest else data
        payloads: list[bytes] = []
        position, size, offset = 0, len(data), 0
        while size - position >= HEADER_BYTES:
            _, _, kind, _, sequence, length = _HEADER.unpack_from(data, position)
            end = position + HEADER_BYTES + length
            if end > size:
                break
            if kind == _BATCH:
                batch = Batch(data[position + HEADER_BYTES + STAMP_BYTES : end])
                payloads += payloads_of(batch)
                offset = sequence + batch.count
            elif kind == _ACK:
                self._take_ack(sequence, data[position:end])
            elif kind == _NACK:
                raise RuntimeError(f"delta-prop: {decode(data[position:end])}")
            position = end
        self._rest = data[position:]
        if payloads and self.on_payloads is not None:
            self._take_payloads(payloads, offset)

    def _take_ack(self, sequence: int, raw: bytes) -> None:
        if self._answer is not None and not self._answer.done():
            ack = decode(raw)
            if isinstance(ack, Ack) and ack.correlation_id is not None:
                self._answer.set_result(ack)
        while self._waiting and self._waiting[0][0] <= sequence:
            self._waiting.pop(0)[1].set_result(None)

    def _take_payloads(self, payloads: list[bytes], next_offset: int) -> None:
        assert self.on_payloads is not None
        self._unacked += len(payloads)
        if self._unacked >= ACK_DELTAS:
            self._unacked = 0
            self.transport.write(commit_of(self.log, next_offset))
        if self.on_payloads(payloads) and not self.ended.done():
            self.ended.set_result(None)
