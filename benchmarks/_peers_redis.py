"""Redis Streams as a peer: an append-only file, consumer groups.

It implements the part of RESP that the harness needs.
"""

from __future__ import annotations

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

_NO_ENTRIES = re.compile(rb"(?:\*-1|:\d+)\r\n|\*1\r\n\*2\r\n\$\d+\r\n[^\r]*\r\n\*\d+\r\n")
"""Replies without entries: a timeout, the number of acknowledged entries, the header before entries."""


class RedisEverySecond(Peer):
    """Acknowledges once the page cache has an entry; syncs once per second."""

    name = "Redis everysec raw"
    durability = "page cache"
    program = "redis-server"
    sync = "everysec"

    def start(self, folder: Path) -> None:
        """Start redis-server."""
        self.port = free_port()
        settings = {
            "port": str(self.port),
            "bind": "127.0.0.1",
            "dir": str(folder),
            "save": "",
            "appendonly": "yes",
            "appendfsync": self.sync,
            "auto-aof-rewrite-percentage": "0",
        }
        arguments = [word for name, value in settings.items() for word in (f"--{name}", value)]
        self.spawn([self.program, *arguments], folder)
        self.wait_open(folder)

    def create(self, topic: str, consumers: int) -> None:
        """Create a stream with its groups."""
        for number in range(max(consumers, 1)):
            self._ask(b"XGROUP", b"CREATE", topic.encode(), b"g%d" % number, b"0", b"MKSTREAM")

    def drop(self, topic: str) -> None:
        """Delete the stream."""
        self._ask(b"DEL", topic.encode())

    def publisher(self, topic: str) -> Publisher:
        """See `Peer`."""
        return EncodedPublisher(self.port, _publish_encoder(topic.encode()), count_acks)

    def consumer(self, topic: str, number: int, size: int) -> Consumer:
        """See `Peer`."""
        return _Consumer(self.port, topic.encode(), b"g%d" % number, size)

    def calls(self, topic: str) -> AbstractAsyncContextManager[Call]:
        """See `Peer`."""
        publish = _publish_encoder(topic.encode())
        return raw_calls(self.port, lambda payload: publish(payload, 1), count_acks)

    def _ask(self, *words: bytes) -> None:
        wire = Wire(connect(self.port))
        wire.send(_command(*words))
        answer = wire.receive()
        wire.socket.close()
        if answer.startswith(b"-"):
            raise RuntimeError(f"Redis: {answer!r}")


class RedisAlways(RedisEverySecond):
    """Syncs before it acknowledges, once per turn of its event loop."""

    name = "Redis always raw"
    durability = "durable"
    sync = "always"


def count_acks(received: bytes) -> int:
    """Count the acknowledgements that start in these bytes, wherever the stream was split."""
    if b"-ERR" in received:
        raise RuntimeError(f"Redis: {received[:300]!r}")
    return received.count(b"$")


def _publish_encoder(topic: bytes) -> Callable[[bytes, int], bytes]:
    def bytes_of(payload: bytes, count: int) -> bytes:
        return _command(b"XADD", topic, b"*", b"d", payload) * count

    return bytes_of


def entry_pattern(size: int) -> re.Pattern[bytes]:
    """Return a pattern of a complete entry with a payload of `size` bytes: its id, the first 8 bytes."""
    return re.compile(
        rb"\*2\r\n\$\d+\r\n(\d+-\d+)\r\n\*2\r\n\$1\r\nd\r\n\$%d\r\n(.{8}).{%d}\r\n" % (size, size - 8),
        re.DOTALL,
    )


class _Consumer:
    def __init__(self, port: int, topic: bytes, group: bytes, size: int) -> None:
        self._wire = Wire(connect(port))
        self._entry = entry_pattern(size)
        self._topic, self._group = topic, group
        self._entries_left = 0  # entries still to come in the current reply
        self._read = _command(
            *(b"XREADGROUP", b"GROUP", group, b"c", b"COUNT", b"1000", b"BLOCK", b"1000"),
            *(b"STREAMS", topic, b">"),
        )

    def begin(self) -> None:
        self._wire.send(self._read)

    def receive(self) -> bytes:
        data = self._wire.receive()
        stamps: list[bytes] = []
        ids: list[bytes] = []
        position, size, match = 0, len(data), self._entry.match
        while position < size:
            entry = match(data, position)
            if entry is None:
                reply = _NO_ENTRIES.match(data, position)
                if reply is None:
                    break
                position = reply.end()
                if reply[0].startswith(b"*-1"):
                    self._wire.send(self._read)
                elif reply[0].startswith(b"*1"):
                    self._entries_left = int(reply[0].rpartition(b"*")[2])
                continue
            stamps.append(entry[2])
            ids.append(entry[1])
            position = entry.end()
        self._wire.unread = data[position:]
        if ids:
            self._entries_left -= len(ids)
            acks = _command(b"XACK", self._topic, self._group, *ids)
            self._wire.send(acks if self._entries_left else acks + self._read)
        return b"".join(stamps)

    def close(self) -> None:
        self._wire.socket.close()


def _command(*words: bytes) -> bytes:
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)
