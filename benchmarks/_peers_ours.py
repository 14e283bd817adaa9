"""delta-prop serve as a peer: the command with default settings, and minimal clients.

Opaque deltas of several vectors, under dots of one producer: deduplicated, ordered, logged.
"""

from __future__ import annotations

import itertools
import random
import struct
import sys
import time
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import ClassVar, Protocol

import msgpack

from benchmarks._peers_contract import Call, Consumer, Peer, Publisher, Wire, connect
from delta_prop.client import Producer
from delta_prop_wire.batch import Batch
from delta_prop_wire.codec import decode, encode
from delta_prop_wire.crc import crc32c
from delta_prop_wire.cursor import Cursor
from delta_prop_wire.delta import AckLevel, Delta, Priority, make_origin, opaque
from delta_prop_wire.encode import encode_batch
from delta_prop_wire.frames import (
    Ack,
    BatchFrame,
    Frame,
    Hello,
    Nack,
    OriginClaim,
    OriginGrant,
    Start,
    StartAt,
    Subscribe,
    Subscription,
)
from delta_prop_wire.layout import Column
from delta_prop_wire.spec import CRC_BYTES, HEADER_BYTES, STAMP_BYTES, FrameType
from delta_prop_wire.stamp import DEFAULT_LOG, pack_producer_rest
from delta_prop_wire.topics import Topic, TopicKind

KEYS = 1_000
"""Number of vectors of a topic."""
TEMPLATES = 50
"""Number of frames with different vectors, used in turn."""
ACK_DELTAS, ACK_S = 1_000, 0.005
"""A consumer acknowledges after this many deltas, as many as a read of Redis returns, or after this time."""
DUPLICATES = 10
"""Frames that are sent a second time at the end: none may reach a consumer twice."""

BODY_HEADER = struct.Struct("<4xI16xQ")
"""Fields of a body's header: the number of rows, the counter of the first."""
_HEADER = struct.Struct(">BBBBQI")
_SEQUENCE = struct.Struct(">Q")
_COUNTER = struct.Struct("<Q")
_CRC = struct.Struct("<I")
_SEQUENCE_AT = 4
_BODY_AT = HEADER_BYTES + STAMP_BYTES
_SENT_REST = pack_producer_rest(DEFAULT_LOG)
_COUNTER_AT = _BODY_AT + 24
_BLOBS_BEFORE_END = 8
"""Bytes of a frame after its payloads, which are a multiple of 8: the checksum, at the end of 8 bytes."""
_BATCH, _ACK, _NACK = (int(kind) for kind in (FrameType.BATCH, FrameType.ACK, FrameType.NACK))


class Ours(Peer):
    """Acknowledges, and delivers to consumers, once the page cache has a delta."""

    name = "delta-prop raw"
    durability = "page cache"
    level: ClassVar[AckLevel] = AckLevel.LOGGED
    command: ClassVar[tuple[str, ...]] = (sys.executable, "-m", "delta_prop", "serve")

    def __init__(self) -> None:
        super().__init__()
        self.http_port = 0

    def missing_program(self) -> str | None:
        """Return None: the program is this checkout."""
        return None

    def start(self, folder: Path) -> None:
        """Start delta-prop serve."""
        data, level = str(folder / "data"), self.level.name.lower()
        ports = ("--port", "0", "--http-port", "0")
        self.spawn([*self.command, "--data", data, *ports, "--read-level", level], folder)
        ready = self.wait_ready(folder)
        self.port, self.http_port = ready["port"], ready["http"]

    def create(self, topic: str, consumers: int) -> None:
        """Do nothing: a topic is a namespace, and a group starts with its first member."""

    def publisher(self, topic: str) -> Publisher:
        """See `Peer`."""
        return RawPublisher(self.port, topic, self.level)

    def consumer(self, topic: str, number: int, size: int) -> Consumer:
        """See `Peer`."""
        return RawConsumer(self.port, topic, f"{topic}-{number}", size)

    @asynccontextmanager
    async def calls(self, topic: str) -> AsyncIterator[Call]:
        """See `Peer`. The calls use the client's producer, which batches the calls of one event loop turn."""
        names = itertools.cycle([f"key-{number}" for number in range(KEYS)])
        address = f"127.0.0.1:{self.port}"
        async with Producer(address, name=topic, ack_level=self.level) as producer:
            yield lambda payload: producer.publish(Delta(next(names), opaque(payload), namespace=topic))

    def counters(self) -> dict[str, float]:
        """Return the counters of /metrics."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.http_port}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        fields = (line.rpartition(" ") for line in lines if line.startswith("delta_prop_"))
        return {name: float(value) for name, _, value in fields}


class OursDurable(Ours):
    """Acknowledges, and delivers to consumers, once a delta is on stable storage."""

    name = "delta-prop durable raw"
    durability = "durable"
    level = AckLevel.DURABLE


class FrameMaker(Protocol):
    """Makes the frames of one producer."""

    def frame(self, counter: int, payloads: bytes) -> bytearray:
        """Return the next frame, with this counter and sequence for its first row; `payloads` are joined."""
        ...


class Frames:
    """Frames of one producer, made from templates that have the keys; payloads are filled in."""

    def __init__(self, topic: str, grant: OriginGrant, level: AckLevel, shape: tuple[int, int]) -> None:
        """`shape`: the number of rows, and the bytes of each."""
        rows, size = shape
        rng = random.Random(rows)
        self._templates: list[tuple[bytes, int, int]] = []
        for _ in range(TEMPLATES):
            deltas = [
                Delta(f"key-{rng.randrange(KEYS)}", opaque(bytes(size)), namespace=topic) for _ in range(rows)
            ]
            batch = encode_batch(deltas, origin=grant.origin, base=1, epoch=grant.epoch, ack_level=level)
            start, end = batch.column_bounds[Column.BLOBS]
            frame = encode(BatchFrame(1, batch, ack_wanted=True))
            self._templates.append((frame, _BODY_AT + start, _BODY_AT + end))
        self._turn = 0

    def frame(self, counter: int, payloads: bytes) -> bytearray:
        """See `FrameMaker`."""
        template, start, end = self._templates[self._turn]
        self._turn = (self._turn + 1) % TEMPLATES
        frame = bytearray(template)
        frame[start:end] = payloads
        number_frame(frame, counter)
        return frame


def number_frame(frame: bytearray, counter: int) -> None:
    """Make an encoded frame the next one of its producer: set its sequence, counter and checksums."""
    _COUNTER.pack_into(frame, _COUNTER_AT, counter)
    _CRC.pack_into(frame, len(frame) - _CRC.size, crc32c(memoryview(frame)[_BODY_AT : -_CRC.size]))
    set_sequence(frame, counter)


def set_sequence(frame: bytearray, sequence: int) -> None:
    """Set the sequence of a frame, and the checksum in its stamp."""
    _SEQUENCE.pack_into(frame, _SEQUENCE_AT, sequence)
    _CRC.pack_into(frame, HEADER_BYTES, crc32c(frame[:HEADER_BYTES] + _SENT_REST))


def with_counter(template: bytes, counter: int) -> Batch:
    """Return the batch of an encoded frame under another counter, for an embedded service."""
    frame = bytearray(template)
    number_frame(frame, counter)
    return Batch(bytes(frame[_BODY_AT:]))


class RawPublisher:
    """A publisher that is a producer of its own."""

    def __init__(self, port: int, topic: str, level: AckLevel) -> None:
        self.acked = 0
        self._topic, self._level = topic, level
        origin = make_origin(random.getrandbits(44), Priority.NORMAL)
        self._wire = Wire(connect(port))
        self._wire.send(hello_of(topic, origin))
        welcomed = next_frame(self._wire)
        if not isinstance(welcomed, Ack) or welcomed.welcome is None or welcomed.credit is None:
            raise RuntimeError(f"delta-prop: {welcomed}")
        (self._grant,) = welcomed.welcome.origins
        self._deltas_left, self._bytes_left = welcomed.credit  # those that the server still allows
        self._sent = 0
        self._frames: dict[tuple[int, int], FrameMaker] = {}
        self._first_frames: list[bytes] = []

    def prepare(self, size: int, count: int) -> None:
        shape = (count, size)
        self._frames[shape] = self.frames_of(self._topic, self._grant, self._level, shape)

    def send(self, payload: bytes, count: int) -> None:
        frames = self._frames[count, len(payload)]
        while self._deltas_left <= 0 or self._bytes_left <= 0:
            self.take_acks(wait=True)
        frame = frames.frame(self._sent + 1, payload * count)
        self._sent += count
        self._deltas_left -= count
        self._bytes_left -= len(frame)
        self._wire.send(frame)
        if len(self._first_frames) < DUPLICATES:
            self._first_frames.append(bytes(frame))

    def frames_of(
        self, topic: str, grant: OriginGrant, level: AckLevel, shape: tuple[int, int]
    ) -> FrameMaker:
        """Return a maker of frames of this shape: the number of rows, and the bytes of each."""
        return Frames(topic, grant, level, shape)

    def take_acks(self, *, wait: bool) -> None:
        data = self._wire.receive(wait=wait)
        position, size = 0, len(data)
        while size - position >= HEADER_BYTES:
            _, _, kind, _, sequence, length = _HEADER.unpack_from(data, position)
            start, end = position + HEADER_BYTES, position + HEADER_BYTES + length
            if end > size:
                break
            if kind == _ACK:
                self.acked = max(self.acked, sequence)
                credit = msgpack.unpackb(data[start : end - CRC_BYTES]).get("credit")
                if credit is not None:
                    self._deltas_left += credit[0]
                    self._bytes_left += credit[1]
            elif kind == _NACK:
                raise RuntimeError(f"delta-prop: {msgpack.unpackb(data[start : end - CRC_BYTES])}")
            position = end
        self._wire.unread = data[position:]

    def finish(self) -> None:
        """Send the first frames a second time; return when each was answered as a duplicate."""
        before = self._deltas_left
        rows = sum(Batch(frame[_BODY_AT:]).count for frame in self._first_frames)
        for frame in self._first_frames:
            duplicate = bytearray(frame)  # the same payload under the next sequences
            set_sequence(duplicate, self._sent + 1)
            self._sent += Batch(frame[_BODY_AT:]).count
            self._wire.send(duplicate)
        while self._deltas_left < before + rows:
            self.take_acks(wait=True)
        self._wire.socket.close()


class RawConsumer:
    """A member of a group of its own, which commits its cursor."""

    def __init__(self, port: int, topic: str, group: str, size: int) -> None:
        self._wire = Wire(connect(port))
        self._topic, self._group, self._size = topic, group, size
        self._counter = 0  # counter of the last received row: the producer's counters have no gap
        self._log = Cursor(bytes(16), 0, 0)
        self._unacked, self._acked_at = 0, 0.0

    def begin(self) -> None:
        self._wire.send(hello_of(self._group))
        welcomed = next_frame(self._wire)
        self._wire.send(subscription_of(self.topic_of(self._topic), self._group))
        granted = next_frame(self._wire)
        if not isinstance(welcomed, Ack) or not isinstance(granted, Ack) or granted.subscribed is None:
            raise RuntimeError(f"delta-prop: {welcomed}, {granted}")
        self._log = granted.subscribed.start

    def topic_of(self, topic: str) -> Topic:
        """Return the topic to subscribe to."""
        return Topic(TopicKind.NAMESPACE, topic)

    def stamps_of(self, data: bytes, end: int, rows: int) -> bytes:
        """Return the first 8 bytes of each row of the frame that ends there, after a check of their sizes.

        As a client of the other peers, it makes no object of what it receives.
        """
        blobs_end = end - _BLOBS_BEFORE_END
        blobs = blobs_end - rows * self._size
        ends = blobs - (4 * rows + 7) // 8 * 8
        if data[max(ends, 0) : ends + 4 * rows] != _row_ends(rows, self._size):
            raise RuntimeError(f"delta-prop: a batch without rows of {self._size} B")
        return memoryview(data)[blobs:blobs_end].cast("Q")[:: self._size // 8].tobytes()

    def receive(self) -> bytes:
        data = self._wire.receive()
        stamps: list[bytes] = []
        position, size, offset = 0, len(data), 0
        while size - position >= HEADER_BYTES:
            _, _, kind, _, sequence, length = _HEADER.unpack_from(data, position)
            end = position + HEADER_BYTES + length
            if end > size:
                break
            if kind == _BATCH:
                rows, counter = BODY_HEADER.unpack_from(data, position + _BODY_AT)
                if counter != self._counter + 1:
                    raise RuntimeError(f"delta-prop: a batch from {counter}, expected {self._counter + 1}")
                stamps.append(self.stamps_of(data, end, rows))
                self._counter += rows
                self._unacked += rows
                offset = sequence + rows
            elif kind == _NACK:
                refusal = msgpack.unpackb(data[position + HEADER_BYTES : end - CRC_BYTES])
                raise RuntimeError(f"delta-prop: {refusal}")
            position = end
        self._wire.unread = data[position:]
        if offset and (self._unacked >= ACK_DELTAS or time.monotonic() - self._acked_at >= ACK_S):
            self._wire.send(commit_of(self._log, offset))
            self._unacked, self._acked_at = 0, time.monotonic()
        return b"".join(stamps)

    def close(self) -> None:
        self._wire.socket.close()


def hello_of(client: str, *origins: int) -> bytes:
    """Return the frame that opens a connection; a producer claims its origin."""
    claims = tuple(OriginClaim(origin) for origin in origins)
    return encode(Subscribe(1, Hello(origins=claims, client=client)))


def subscription_of(topic: Topic, group: str) -> bytes:
    """Return a subscription to a topic from the log's end on, without lingering."""
    return encode(Subscribe(2, Subscription(1, (topic,), Start(StartAt.LATEST), group=group, wait_ms_max=0)))


def commit_of(log: Cursor, offset: int) -> bytes:
    """Return an Ack that commits `offset`: all deltas below it are processed."""
    return encode(Ack(0, cursor=Cursor(log.log_id, log.epoch, offset)))


@cache
def _row_ends(rows: int, size: int) -> bytes:
    """Return the row ends as a batch encodes them."""
    return struct.pack(f"<{rows}I", *range(size, (rows + 1) * size, size))


def payloads_of(batch: Batch) -> list[bytes]:
    """Return the payload of each row."""
    bounds, ends = batch.column_bounds[Column.BLOBS], batch.column_bounds[Column.BLOB_ENDS]
    blobs = bytes(batch.raw[bounds[0] : bounds[1]])
    payloads, start = [], 0
    for stop in struct.unpack_from(f"<{batch.count}I", batch.raw, ends[0]):
        payloads.append(blobs[start:stop])
        start = stop
    return payloads


def next_frame(wire: Wire) -> Frame:
    """Receive and decode the next frame; bytes after it stay unread."""
    end = HEADER_BYTES
    while len(wire.unread) < end:
        wire.unread = wire.receive()
        if len(wire.unread) >= HEADER_BYTES:
            end = HEADER_BYTES + _HEADER.unpack_from(wire.unread)[5]
    frame = decode(wire.unread[:end])
    wire.unread = wire.unread[end:]
    if isinstance(frame, Nack):
        raise RuntimeError(f"delta-prop: {frame}")
    return frame
