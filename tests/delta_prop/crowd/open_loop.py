"""Open-loop load on a server: frames leave on schedule, whether or not earlier ones were answered.

One thread and one selector serve a publisher and many subscribers, which read only the headers of deliveries.
"""

from __future__ import annotations

import selectors
import socket
import struct
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from delta_prop_wire.codec import NEED_BYTES, Decoder, encode
from delta_prop_wire.delta import AckLevel, Delta, opaque
from delta_prop_wire.encode import encode_batch
from delta_prop_wire.frames import (
    Ack,
    BatchFrame,
    Heartbeat,
    Hello,
    Nack,
    OriginClaim,
    Start,
    StartAt,
    Subscribe,
    Subscription,
)
from delta_prop_wire.topics import Topic

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from delta_prop_wire.frames import Frame

ROWS = 100
_HEADER = struct.Struct(">BBBBQI")
_BATCH = 1


class Client:
    """A blocking connection after its hello."""

    def __init__(self, port: int, *origins: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=60)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._decoder = Decoder()
        self.send(Subscribe(1, Hello(origins=tuple(OriginClaim(origin) for origin in origins))))
        self.welcome = self.next()
        assert isinstance(self.welcome, Ack), self.welcome

    def send(self, frame: Frame) -> None:
        self.socket.sendall(encode(frame))

    def next(self) -> Frame | None:
        """Return the next frame, or None at the end."""
        while (frame := self._decoder.next_event()) is NEED_BYTES:
            chunk = self.socket.recv(64 * 1024)
            if not chunk:
                return None
            self._decoder.receive(chunk)
        return frame

    def subscribe(self, start: Start = Start(StartAt.LATEST)) -> None:  # noqa: B008 - a constant
        self.send(Subscribe(2, Subscription(1, (Topic.parse("*"),), start)))
        answer = self.next()
        assert isinstance(answer, Ack), answer

    def close(self) -> None:
        self.socket.close()


class BatchSubscriber:
    """A subscriber that reads only the headers of batches."""

    def __init__(self, port: int) -> None:
        client = Client(port)
        client.subscribe()
        self.socket = client.socket
        self.socket.setblocking(False)
        self._rest = b""
        self.rows = 0

    def send_heartbeat(self) -> None:
        """Send a heartbeat, so that the server does not close the connection."""
        self.socket.send(encode(Heartbeat(1)))

    def receive(self) -> list[int]:
        """Return the offsets of the batches that have arrived."""
        try:
            came = self.socket.recv(1 << 20)
        except BlockingIOError:
            return []
        assert came, "the server must not end a subscriber's connection"
        raw = self._rest + came
        offsets, at = [], 0
        while at + 16 <= len(raw):
            _, _, kind, _, sequence, length = _HEADER.unpack_from(raw, at)
            if at + 16 + length > len(raw):
                break
            if kind == _BATCH:
                offsets.append(sequence)
                self.rows += ROWS
            at += 16 + length
        self._rest = raw[at:]
        return offsets


@dataclass(slots=True)
class LoadResult:
    """Results of a run."""

    frames: int = 0
    latencies_s: list[float] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def p99_s(self) -> float:
        return float(np.percentile(self.latencies_s, 99))


class Load:
    """A publisher and its subscribers on one server."""

    def __init__(self, port: int, origin: int, subscribers: int, level: AckLevel) -> None:
        self.publisher = Client(port, origin)
        welcome = self.publisher.welcome
        assert isinstance(welcome, Ack)
        assert welcome.welcome is not None
        (grant,) = welcome.welcome.origins
        assert welcome.credit is not None
        self._credit = welcome.credit.deltas
        self._origin, self._epoch, self._next = origin, grant.epoch, grant.watermark + 1
        self._level = level
        self.subscribers = [BatchSubscriber(port) for _ in range(subscribers)]
        self.publisher.socket.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self.publisher.socket, selectors.EVENT_READ, None)
        for one in self.subscribers:
            self._selector.register(one.socket, selectors.EVENT_READ, one)
        self._prepared: list[tuple[int, bytes]] = []
        self._unsent = b""
        self._sent_at: dict[int, float] = {}
        self._offset: int | None = None
        self._beat_at = time.perf_counter()
        self._decoder = self.publisher._decoder

    def run(self, seconds: float, frames_per_s: float | None) -> LoadResult:
        """Publish for this time, at this rate or as fast as credit allows; return when all is delivered."""
        run, began = LoadResult(), time.perf_counter()
        due, outstanding = 0, 0
        prepared = self._prepared
        while True:
            now = time.perf_counter()
            left = now - began < seconds
            while left and not self._unsent and self._credit > 0:
                if frames_per_s is None:
                    if outstanding > 2_000:
                        break
                    at = now
                else:
                    at = began + due / frames_per_s
                    if at > now:
                        break
                if not prepared:
                    prepared += self._prepare(64)
                self._publish(prepared.pop(0), at)
                due += 1
                outstanding += len(self.subscribers)
            outstanding -= self._pump(run, 0.0005 if left else 0.01)
            if (not left and outstanding <= 0) or now - began > seconds + 30:
                break
        assert outstanding == 0, f"all deliveries must arrive; {outstanding} are missing"
        run.frames, run.seconds = due, time.perf_counter() - began
        return run

    def _prepare(self, count: int) -> list[tuple[int, bytes]]:
        prepared = []
        for _ in range(count):
            base = self._next
            self._next += ROWS
            rows = [
                Delta(f"key-{(base + 7 * row) % 1000}", opaque(b"x" * 128), "load") for row in range(ROWS)
            ]
            batch = encode_batch(
                rows, origin=self._origin, base=base, epoch=self._epoch, ack_level=self._level
            )
            prepared.append((base, encode(BatchFrame(base, batch, ack_wanted=True))))
        return prepared

    def _publish(self, prepared: tuple[int, bytes], at: float) -> None:
        base, raw = prepared
        self._sent_at[base] = at
        self._credit -= ROWS
        self._flush(raw)

    def _flush(self, raw: bytes = b"") -> None:
        self._unsent += raw
        try:
            sent = self.publisher.socket.send(self._unsent)
        except BlockingIOError:
            sent = 0
        self._unsent = self._unsent[sent:]

    def _pump(self, run: LoadResult, wait_s: float) -> int:
        if self._unsent:
            self._flush()
        now = time.perf_counter()
        if now - self._beat_at > 3:
            self._beat_at = now
            for one in self.subscribers:
                one.send_heartbeat()
        came = 0
        for key, _ in self._selector.select(0 if self._unsent else wait_s):
            if key.data is None:
                self._take_answers()
                continue
            offsets = key.data.receive()
            now = time.perf_counter()
            for offset in offsets:
                run.latencies_s.append(now - self._sent_at_of(offset))
            came += len(offsets)
        return came

    def _sent_at_of(self, offset: int) -> float:
        """Return the send time of a batch: the log has these batches in the order sent, and nothing else."""
        if self._offset is None:
            self._offset = offset - min(self._sent_at)
        return self._sent_at[offset - self._offset]

    def _take_answers(self) -> None:
        self._decoder.receive(self.publisher.socket.recv(1 << 16))
        while (frame := self._decoder.next_event()) is not NEED_BYTES:
            assert not isinstance(frame, Nack), frame
            if isinstance(frame, Ack) and frame.credit is not None:
                self._credit += frame.credit.deltas

    def close(self) -> None:
        for one in (self.publisher, *self.subscribers):
            one.socket.close()
        self._selector.close()


def median_ratio(pairs: list[tuple[float, float]]) -> float:
    """Return the median of the ratios second / first."""
    ratios: NDArray[np.float64] = np.array([second / first for first, second in pairs])
    return float(np.median(ratios))
