"""Kafka as a peer: one broker in KRaft mode on Java, topics of one partition, groups that commit offsets.

It implements the part of the binary protocol that the harness needs. The payloads of one call are one record
batch in a request of its own.
"""

from __future__ import annotations

import re
import struct
import time
from collections import deque
from contextlib import AbstractAsyncContextManager
from functools import cache
from pathlib import Path

from benchmarks._peers_calls import raw_calls
from benchmarks._peers_contract import (
    WAIT_S_MAX,
    Call,
    Consumer,
    EncodedPublisher,
    Peer,
    Publisher,
    Wire,
    connect,
    free_port,
)
from delta_prop_wire.crc import crc32c

_GET = "mvn -f benchmarks/kafka.xml dependency:copy-dependencies"
_JARS = Path(__file__).parent / "target" / "dependency"
_OPTIONS = "-Xms1G -Xmx1G -server -XX:+UseG1GC -XX:MaxGCPauseMillis=20 -XX:InitiatingHeapOccupancyPercent=35"
"""The options of Java in Kafka's own start script."""
_CONFIGURATION = """
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller}
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}
controller.listener.names=CONTROLLER
log.dirs={folder}/log
offsets.topic.num.partitions=1
offsets.topic.replication.factor=1
"""
_PRODUCE, _FETCH, _COMMIT, _COORDINATOR, _CREATE, _DELETE = (
    *((0, 7), (1, 4), (8, 2)),
    *((10, 0), (19, 2), (20, 1)),
)
"""Kinds of requests: number and version."""
_ACKS_LEADER, _TIMEOUT_MS, _WAIT_MS, _FETCH_BYTES = 1, 30_000, 500, 1 << 20
_WARM_UP_S, _WARM_UP_RECORDS = 5.0, 4_000
_COMMIT_RECORDS, _COMMIT_S = 1_000, 0.005
"""A consumer commits its offset after this many records, or after this time."""
_BATCH = struct.Struct(">qiibIhiqqqhii")
"""Header of a record batch: base offset, length, leader epoch, format, checksum, attributes, last offset, two
times, three of an idempotent producer, the number of records."""
_UNCHECKED_BYTES, _LENGTH_FROM = 21, 12


class Kafka(Peer):
    """Acknowledges once the page cache has a record batch; leaves syncs to the system."""

    name = "Kafka raw"
    durability = "page cache"
    program = "java"

    def missing_program(self) -> str | None:
        """See `Peer`: Java, or the jars of Kafka."""
        missing = super().missing_program()
        return missing or (None if any(_JARS.glob("kafka_*.jar")) else f"Kafka (`{_GET}` gets it)")

    def start(self, folder: Path) -> None:
        """Format the folder, and start the broker."""
        self.port = free_port()
        settings = folder / "kafka.properties"
        settings.write_text(_CONFIGURATION.format(port=self.port, controller=free_port(), folder=folder))
        java = [self.program, *_OPTIONS.split(), "-cp", f"{_JARS}/*"]
        log_id = ("-t", "AAAAAAAAAAAAAAAAAAAAAQ")
        self.spawn([*java, "kafka.tools.StorageTool", "format", *log_id, "-c", str(settings)], folder)
        if self.processes.pop().wait(WAIT_S_MAX):
            raise OSError((folder / "output").read_text())
        self.spawn([*java, "kafka.Kafka", str(settings)], folder)
        self.wait_open(folder)
        self._warm_up()

    def _warm_up(self) -> None:
        """Publish and consume until the code of the broker is compiled; create the topic of offsets."""
        self.create("first", 1)
        publisher, consumer = self.publisher("first"), self.consumer("first", 0, 128)
        consumer.begin()
        stop, sent, received = time.monotonic() + _WARM_UP_S, 0, 0
        while received < sent or time.monotonic() < stop:
            while sent - received < _WARM_UP_RECORDS and time.monotonic() < stop:
                publisher.send(bytes(128), 100)
                sent += 100
            received += len(consumer.receive()) // 8
            publisher.take_acks(wait=False)
        publisher.finish()
        consumer.close()
        self.drop("first")

    def create(self, topic: str, consumers: int) -> None:
        """Create a topic, and commit the first offset of each group."""
        name = text_of(topic)
        settings = struct.pack(">ihiiib", 1, 1, 0, 0, _TIMEOUT_MS, 0)
        self._ask(_CREATE, struct.pack(">i", 1) + name + settings, 8 + len(name))
        self._ask(_FETCH, _fetch_of(topic, 0), 16 + len(name))
        for number in range(consumers):
            self._ask(_COORDINATOR, text_of(_group(topic, number)), 0)
            self._ask(_COMMIT, _commit_of(topic, _group(topic, number), 0), 12 + len(name))

    def drop(self, topic: str) -> None:
        """Delete the topic."""
        name = text_of(topic)
        self._ask(_DELETE, struct.pack(">i", 1) + name + struct.pack(">i", _TIMEOUT_MS), 8 + len(name))

    def publisher(self, topic: str) -> Publisher:
        """See `Peer`."""
        calls = Calls(topic)
        return EncodedPublisher(self.port, calls.encode, calls.count_acks)

    def consumer(self, topic: str, number: int, size: int) -> Consumer:
        """See `Peer`."""
        return _Consumer(Wire(connect(self.port)), Wire(connect(self.port)), topic, number, size)

    def calls(self, topic: str) -> AbstractAsyncContextManager[Call]:
        """See `Peer`."""
        calls = Calls(topic)
        return raw_calls(self.port, lambda payload: calls.encode(payload, 1), calls.count_acks)

    def _ask(self, kind: tuple[int, int], body: bytes, error_at: int) -> None:
        """Repeat a request until its answer has no error: the broker follows its controller with a delay."""
        wire, began, error = Wire(connect(self.port)), time.monotonic(), -1
        while error:
            wire.send(request_of(kind, body))
            while len(wire.unread) < 4 or len(wire.unread) < 4 + int.from_bytes(wire.unread[:4], "big"):
                wire.unread = wire.receive()
            error = int.from_bytes(wire.unread[8 + error_at : 10 + error_at], "big")
            wire.unread = b""
            if error and time.monotonic() > began + WAIT_S_MAX:
                raise RuntimeError(f"Kafka: request {kind[0]}: error {error}")
        wire.socket.close()


class Answers:
    """Counts answers of the same length."""

    def __init__(self, length: int, error_at: int) -> None:
        """`error_at`: the position of the error code."""
        self._length, self._error_at = length, error_at
        self._rest = b""

    def count(self, received: bytes) -> int:
        """Count the answers that end in these bytes, wherever the stream was split."""
        data = self._rest + received
        end = len(data) // self._length * self._length
        self._rest = data[end:]
        for at in range(self._error_at, end, self._length):
            if data[at : at + 2] != b"\0\0":
                raise RuntimeError(f"Kafka: error {int.from_bytes(data[at : at + 2], 'big')}")
        return end // self._length


class Calls:
    """Encodes the calls of one connection, and counts the payloads in acknowledged calls."""

    def __init__(self, topic: str) -> None:
        settings = struct.pack(">hhii", -1, _ACKS_LEADER, _TIMEOUT_MS, 1)
        self._head = settings + text_of(topic) + struct.pack(">ii", 1, 0)
        self._open: deque[int] = deque()
        self._answers = Answers(50 + len(text_of(topic)), 20 + len(text_of(topic)))

    def encode(self, payload: bytes, count: int) -> bytes:
        """Return the request that publishes the payload `count` times."""
        self._open.append(count)
        batch = batch_of(payload, count)
        return request_of(_PRODUCE, self._head + len(batch).to_bytes(4, "big") + batch)

    def count_acks(self, received: bytes) -> int:
        """Count the payloads that these bytes acknowledge."""
        return sum(self._open.popleft() for _ in range(self._answers.count(received)))


def batch_of(payload: bytes, count: int) -> bytes:
    """Return a record batch that has the payload `count` times."""
    records = payload.join(_between(len(payload), count))
    now = int(time.time() * 1_000)
    length = _BATCH.size - _LENGTH_FROM + len(records)
    header = _BATCH.pack(0, length, -1, 2, 0, 0, count - 1, now, now, -1, -1, -1, count)
    checked = header[_UNCHECKED_BYTES:] + records
    return header[: _UNCHECKED_BYTES - 4] + crc32c(checked).to_bytes(4, "big") + checked


@cache
def _between(size: int, count: int) -> list[bytes]:
    """Return what is before, between and after the payloads of a record batch."""
    parts = [b""]
    for number in range(count):
        fields = b"\0\0" + _varint(number) + b"\1" + _varint(size)  # attributes, time, offset, no key, size
        parts[-1] += _varint(len(fields) + size + 1) + fields
        parts.append(b"\0")  # no headers
    return parts


@cache
def _records_bytes(size: int, count: int) -> int:
    return size * count + sum(map(len, _between(size, count)))


def _varint(value: int) -> bytes:
    value, encoded = value << 1, bytearray()  # no value is negative here
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*encoded, value))


class _Consumer:
    """Reads a partition, and commits offsets on a connection of its own, as a read blocks the other."""

    def __init__(self, wire: Wire, commits: Wire, topic: str, number: int, size: int) -> None:
        self._wire, self._commits = wire, commits
        self._topic, self._group, self._size = topic, _group(topic, number), size
        name = len(text_of(topic))
        self._answer = struct.Struct(f">16x{name}x8xh20xi")
        self._committed = Answers(22 + name, 20 + name)
        self._record = re.compile(rb"\x01%b(.{8}).{%d}\0" % (re.escape(_varint(size)), size - 8), re.DOTALL)
        self._left = 0  # bytes left of the current answer
        self._offset = 0
        self._unacked, self._acked_at = 0, 0.0

    def begin(self) -> None:
        self._fetch()

    def receive(self) -> bytes:
        data, position, before = self._wire.receive(), 0, self._offset
        stamps: list[bytes] = []
        while (end := self._end_of(data, position)) <= len(data):
            if self._left:
                self._left -= end - position
                stamps += self._take(data, position, end)
            else:
                error, records_bytes = self._answer.unpack_from(data, position)
                if error:
                    raise RuntimeError(f"Kafka: error {error}")
                self._left = max(records_bytes, 0)
            if not self._left:
                self._fetch()
            position = end
        self._wire.unread = data[position:]
        self._unacked += self._offset - before
        is_due = time.monotonic() - self._acked_at >= _COMMIT_S
        if self._unacked and (is_due or self._unacked >= _COMMIT_RECORDS):
            self._committed.count(self._commits.receive(wait=False))
            self._commits.send(request_of(_COMMIT, _commit_of(self._topic, self._group, self._offset)))
            self._unacked, self._acked_at = 0, time.monotonic()
        return b"".join(stamps)

    def _fetch(self) -> None:
        self._wire.send(request_of(_FETCH, _fetch_of(self._topic, self._offset)))

    def _end_of(self, data: bytes, position: int) -> int:
        """Return the end of the answer's header, or of the record batch, that starts at this position."""
        if not self._left:
            return position + self._answer.size
        if min(self._left, len(data) - position) < _LENGTH_FROM:
            return position + min(self._left, _LENGTH_FROM)
        length = int.from_bytes(data[position + _LENGTH_FROM - 4 : position + _LENGTH_FROM], "big")
        return position + min(self._left, _LENGTH_FROM + length)

    def _take(self, data: bytes, start: int, end: int) -> list[bytes]:
        """Return the first 8 bytes of each payload of a batch; none if the end of the answer cuts it off."""
        records = start + _BATCH.size
        if end < records:
            return []
        base, length, *_, count = _BATCH.unpack_from(data, start)
        if start + _LENGTH_FROM + length > end:
            return []
        stamps: list[bytes] = self._record.findall(data, records, end)
        is_intact = len(stamps) == count and end - records == _records_bytes(self._size, count)
        if base != self._offset or not is_intact:
            raise RuntimeError(f"Kafka: a batch from {base}, expected {self._offset}, of {self._size} B")
        self._offset += count
        return stamps

    def close(self) -> None:
        self._wire.socket.close()
        self._commits.socket.close()


def request_of(kind: tuple[int, int], body: bytes) -> bytes:
    """Return a request without correlation id and client id."""
    return struct.pack(">ihhih", 10 + len(body), *kind, 0, -1) + body


def text_of(text: str) -> bytes:
    """Encode a text."""
    return struct.pack(">h", len(text)) + text.encode()


def _group(topic: str, number: int) -> str:
    return f"{topic}-{number}"


def _fetch_of(topic: str, offset: int) -> bytes:
    """Return the body of a request that waits until there are records from this offset on."""
    limits = struct.pack(">iiiibi", -1, _WAIT_MS, 1, _FETCH_BYTES, 0, 1)
    return limits + text_of(topic) + struct.pack(">iiqi", 1, 0, offset, _FETCH_BYTES)


def _commit_of(topic: str, group: str, offset: int) -> bytes:
    """Return the body of a request that commits the offset of a group without members."""
    member = struct.pack(">ihqi", -1, 0, -1, 1)
    return text_of(group) + member + text_of(topic) + struct.pack(">iiqh", 1, 0, offset, -1)
