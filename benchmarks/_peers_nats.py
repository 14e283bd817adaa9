"""NATS JetStream as a peer: file storage, push consumers that acknowledge all up to a message.

Speaks the text protocol as far as the harness needs it.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from benchmarks._peers_calls import raw_calls
from benchmarks._peers_contract import Consumer, Peer, Publisher, Wire, connect, free_port

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from benchmarks._peers_calls import raw_calls
from benchmarks._peers_contract import Call

_HELLO = b'CONNECT {"verbose":false,"pedantic":false,"headers":false}\r\n'
_MESSAGE = re.compile(rb"MSG \S+ \S+ (?:(\S+) )?(\d+)\r\n")
_CONFIGURATION = """
listen: "127.0.0.1:{port}"
max_payload: 8MB
jetstream {{ store_dir: "{folder}/js", max_file: 20GB, max_mem: 1GB }}
"""


class JetStream(Peer):
    """Acknowledges what the page cache has; syncs every two minutes."""

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
        """A stream, and push consumers."""
        self._ask(f"STREAM.CREATE.{topic}", {"name": topic, "subjects": [topic], "storage": "file"})
        for number in range(consumers):
            durable = {
                "durable_name": f"c{number}",
                "deliver_subject": f"_d.{topic}.{number}",
                "deliver_policy": "all",
                "ack_policy": "all",
                "max_ack_pending": 20_000,
            }
            asked = {"stream_name": topic, "config": durable}
            self._ask(f"CONSUMER.DURABLE.CREATE.{topic}.c{number}", asked)

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
        publish = _publishing(topic.encode())
        return raw_calls(self.port, lambda one: publish(one, 1), acks_in, hello=_HELLO + b"SUB _r.acks 1\r\n")

    def _ask(self, what: str, asked: object) -> None:
        wire = Wire(connect(self.port))
        body = json.dumps(asked).encode()
        wire.send(
            _HELLO + b"SUB _r.ask 1\r\nPUB $JS.API.%b _r.ask %d\r\n%b\r\n" % (what.encode(), len(body), body)
        )
        while not (said := _MESSAGE.search(wire.rest)) or len(wire.rest) < said.end() + int(said[2]):
            wire.rest = wire.receive()
        answer = json.loads(wire.rest[said.end() : said.end() + int(said[2])])
        wire.socket.close()
        if "error" in answer:
            raise RuntimeError(f"JetStream: {what}: {answer['error']}")


def message_of(size: int) -> re.Pattern[bytes]:
    """A whole message with a payload of this size: where to acknowledge it, the first 8 bytes."""
    return re.compile(rb"MSG \S+ \S+ (?:(\S+) )?%d\r\n(.{8}).{%d}\r\n" % (size, size - 8), re.DOTALL)


class _Publisher:
    def __init__(self, port: int, topic: bytes) -> None:
        self.acked = 0
        self._wire = Wire(connect(port))
        self._publishing = _publishing(topic)
        self._wire.send(_HELLO + b"SUB _r.acks 1\r\n")
        while b"\r\n" not in self._wire.receive():  # INFO, in one piece
            pass

    def send(self, payload: bytes, count: int) -> None:
        self._wire.send(self._publishing(payload, count))

    def take_acks(self, *, wait: bool) -> None:
        said = self._wire.receive(wait=wait)
        self.acked += acks_in(said)
        if b"PING\r\n" in said:
            self._wire.send(b"PONG\r\n")

    def finish(self) -> None:
        self._wire.socket.close()


def acks_in(said: bytes) -> int:
    """How many acknowledgements begin in these bytes, wherever they were cut."""
    if b'"error"' in said or b"-ERR" in said:
        raise RuntimeError(f"JetStream: {said[:300]!r}")
    return said.count(b"{")


def _publishing(topic: bytes) -> Callable[[bytes, int], bytes]:
    def bytes_of(payload: bytes, count: int) -> bytes:
        return b"PUB %b _r.acks %d\r\n%b\r\n" % (topic, len(payload), payload) * count

    return bytes_of


class _Consumer:
    def __init__(self, port: int, subject: bytes, size: int) -> None:
        self._wire = Wire(connect(port))
        self._message = message_of(size)
        self._subject = subject

    def begin(self) -> None:
        self._wire.send(_HELLO + b"SUB %b 1\r\nPING\r\n" % self._subject)
        while b"PONG\r\n" not in self._wire.rest:
            self._wire.rest = self._wire.receive()
        self._wire.rest = b""

    def receive(self) -> bytes:
        data = self._wire.receive()
        found: list[bytes] = []
        at, size, match, reply = 0, len(data), self._message.match, None
        while at < size:
            message = match(data, at)
            if message is None:
                line = data.find(b"\r\n", at)
                if line < 0 or data.startswith(b"M", at):
                    break
                if data.startswith(b"PING", at):
                    self._wire.send(b"PONG\r\n")
                at = line + 2
                continue
            found.append(message[2])
            at, reply = message.end(), message[1]
        self._wire.rest = data[at:]
        if reply is not None:
            self._wire.send(b"PUB %b 4\r\n+ACK\r\n" % reply)  # it stands for all before it
        return b"".join(found)

    def close(self) -> None:
        self._wire.socket.close()
