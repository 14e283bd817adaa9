"""NATS JetStream as a peer: file storage, push consumers. One acknowledgement covers all earlier messages.

It implements the part of the text protocol that the harness needs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from benchmarks._peers_calls import raw_calls
from benchmarks._peers_contract import (
    Call,
    Consumer,
    EncodedPublisher,
    Peer,
    Publisher,
    Wire,
    connect,
    free_port,
)

_HELLO = b'CONNECT {"verbose":false,"pedantic":false,"headers":false}\r\n'
_MESSAGE = re.compile(rb"MSG \S+ \S+ (?:(\S+) )?(\d+)\r\n")
_CONFIGURATION = """
listen: "127.0.0.1:{port}"
max_payload: 8MB
jetstream {{ store_dir: "{folder}/js", max_file: 20GB, max_mem: 1GB }}
"""


class JetStream(Peer):
    """Acknowledges once the page cache has a message; syncs every two minutes."""

    name = "JetStream raw"
    durability = "page cache"
    program = "nats-server"

    def start(self, folder: Path) -> None:
        """Start nats-server."""
        self.port = free_port()
        configuration = folder / "nats.conf"
        configuration.write_text(_CONFIGURATION.format(port=self.port, folder=folder))
        self.spawn([self.program, "-c", str(configuration)], folder)
        self.wait_open(folder)

    def create(self, topic: str, consumers: int) -> None:
        """Create a stream and push consumers."""
        self._ask(f"STREAM.CREATE.{topic}", {"name": topic, "subjects": [topic], "storage": "file"})
        for number in range(consumers):
            durable = {
                "durable_name": f"c{number}",
                "deliver_subject": f"_d.{topic}.{number}",
                "deliver_policy": "all",
                "ack_policy": "all",
                "max_ack_pending": 20_000,
            }
            request = {"stream_name": topic, "config": durable}
            self._ask(f"CONSUMER.DURABLE.CREATE.{topic}.c{number}", request)

    def drop(self, topic: str) -> None:
        """Delete the stream."""
        self._ask(f"STREAM.DELETE.{topic}", {})

    def publisher(self, topic: str) -> Publisher:
        """See `Peer`."""
        return _Publisher(self.port, topic.encode())

    def consumer(self, topic: str, number: int, size: int) -> Consumer:
        """See `Peer`."""
        return _Consumer(self.port, f"_d.{topic}.{number}".encode(), size)

    def calls(self, topic: str) -> AbstractAsyncContextManager[Call]:
        """See `Peer`."""
        publish = _publish_encoder(topic.encode())
        return raw_calls(
            self.port, lambda payload: publish(payload, 1), count_acks, hello=_HELLO + b"SUB _r.acks 1\r\n"
        )

    def _ask(self, subject: str, request: object) -> None:
        wire = Wire(connect(self.port))
        body = json.dumps(request).encode()
        wire.send(
            _HELLO
            + b"SUB _r.ask 1\r\nPUB $JS.API.%b _r.ask %d\r\n%b\r\n" % (subject.encode(), len(body), body)
        )
        while not (header := _MESSAGE.search(wire.unread)) or len(wire.unread) < header.end() + int(
            header[2]
        ):
            wire.unread = wire.receive()
        answer = json.loads(wire.unread[header.end() : header.end() + int(header[2])])
        wire.socket.close()
        if "error" in answer:
            raise RuntimeError(f"JetStream: {subject}: {answer['error']}")


def message_pattern(size: int) -> re.Pattern[bytes]:
    """Return a pattern of a message of `size` bytes; its groups: the reply subject, the first 8 bytes."""
    return re.compile(rb"MSG \S+ \S+ (?:(\S+) )?%d\r\n(.{8}).{%d}\r\n" % (size, size - 8), re.DOTALL)


class _Publisher(EncodedPublisher):
    def __init__(self, port: int, topic: bytes) -> None:
        super().__init__(port, _publish_encoder(topic), count_acks)
        self._wire.send(_HELLO + b"SUB _r.acks 1\r\n")
        while b"\r\n" not in self._wire.receive():  # INFO, in one piece
            pass

    def take(self, received: bytes) -> None:
        super().take(received)
        if b"PING\r\n" in received:
            self._wire.send(b"PONG\r\n")


def count_acks(received: bytes) -> int:
    """Count the acknowledgements that start in these bytes, wherever the stream was split."""
    if b'"error"' in received or b"-ERR" in received:
        raise RuntimeError(f"JetStream: {received[:300]!r}")
    return received.count(b"{")


def _publish_encoder(topic: bytes) -> Callable[[bytes, int], bytes]:
    def bytes_of(payload: bytes, count: int) -> bytes:
        return b"PUB %b _r.acks %d\r\n%b\r\n" % (topic, len(payload), payload) * count

    return bytes_of


class _Consumer:
    def __init__(self, port: int, subject: bytes, size: int) -> None:
        self._wire = Wire(connect(port))
        self._message = message_pattern(size)
        self._subject = subject

    def begin(self) -> None:
        self._wire.send(_HELLO + b"SUB %b 1\r\nPING\r\n" % self._subject)
        while b"PONG\r\n" not in self._wire.unread:
            self._wire.unread = self._wire.receive()
        self._wire.unread = b""

    def receive(self) -> bytes:
        data = self._wire.receive()
        stamps: list[bytes] = []
        position, size, match, reply = 0, len(data), self._message.match, None
        while position < size:
            message = match(data, position)
            if message is None:
                line = data.find(b"\r\n", position)
                if line < 0 or data.startswith(b"M", position):
                    break
                if data.startswith(b"PING", position):
                    self._wire.send(b"PONG\r\n")
                position = line + 2
                continue
            stamps.append(message[2])
            position, reply = message.end(), message[1]
        self._wire.unread = data[position:]
        if reply is not None:
            self._wire.send(b"PUB %b 4\r\n+ACK\r\n" % reply)  # this acknowledges all earlier messages, too
        return b"".join(stamps)

    def close(self) -> None:
        self._wire.socket.close()
