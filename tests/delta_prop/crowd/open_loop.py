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
"""Rows of each batch."""
_HEADER = struct.Struct(">BBBBQI")
_BATCH_TYPE = 1


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
            chunk = self.socket.recv(1 << 20)
        except BlockingIOError:
            return []
        assert chunk, "the server must not end a subscriber's connection"
        raw = self._rest + chunk
        offsets, position = [], 0
        while position + 16 <= len(raw):
            _, _, frame_type, _, sequence, length = _HEADER.unpack_from(raw, position)
            if position + 16 + length > len(raw):
                break
            if frame_type == _BATCH_TYPE:
                offsets.append(sequence)
                self.rows += ROWS
            position += 16 + length
        self._rest = raw[position:]
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
        self._origin, self._epoch, self._next_counter = origin, grant.epoch, grant.watermark + 1
        self._level = level
        self.subscribers = [BatchSubscriber(port) for _ in range(subscribers)]
        self.publisher.socket.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self.publisher.socket, selectors.EVENT_READ, None)
        for subscriber in self.subscribers:
            self._selector.register(subscriber.socket, selectors.EVENT_READ, subscriber)
        self._prepared: list[tuple[int, bytes]] = []
        self._unsent = b""
        self._due_at: dict[int, float] = {}  # by the first counter of a batch
        self._offset_shift: int | None = None  # from the first counter of a batch to its offset
        self._heartbeat_at = time.perf_counter()
        self._decoder = self.publisher._decoder

    def run(self, seconds: float, frames_per_s: float | None) -> LoadResult:
        """Publish for `seconds`, at this rate or as fast as credit allows; return when all is delivered."""
        result, began = LoadResult(), time.perf_counter()
        sent_frames, outstanding_deliveries = 0, 0
        prepared = self._prepared
        while True:
            now = time.perf_counter()
            is_running = now - began < seconds
            while is_running and not self._unsent and self._credit > 0:
                if frames_per_s is None:
                    if outstanding_deliveries > 2_000:
                        break
                    due_at = now
                else:
                    due_at = began + sent_frames / frames_per_s
                    if due_at > now:
                        break
                if not prepared:
                    prepared += self._prepare(64)
                self._publish(prepared.pop(0), due_at)
                sent_frames += 1
                outstanding_deliveries += len(self.subscribers)
            outstanding_deliveries -= self._pump(result, 0.0005 if is_running else 0.01)
            if (not is_running and outstanding_deliveries <= 0) or now - began > seconds + 30:
                break
        assert outstanding_deliveries == 0, (
            f"all deliveries must arrive; {outstanding_deliveries} are missing"
        )
        result.frames, result.seconds = sent_frames, time.perf_counter() - began
        return result

    def _prepare(self, count: int) -> list[tuple[int, bytes]]:
        prepared = []
        for _ in range(count):
            base = self._next_counter
            self._next_counter += ROWS
            rows = [
                Delta(f"key-{(base + 7 * row) % 1000}", opaque(b"x" * 128), "load") for row in range(ROWS)
            ]
            batch = encode_batch(
                rows, origin=self._origin, base=base, epoch=self._epoch, ack_level=self._level
            )
            prepared.append((base, encode(BatchFrame(base, batch, ack_wanted=True))))
        return prepared

    def _publish(self, prepared: tuple[int, bytes], due_at: float) -> None:
        base, raw = prepared
        self._due_at[base] = due_at
        self._credit -= ROWS
        self._flush(raw)

    def _flush(self, raw: bytes = b"") -> None:
        self._unsent += raw
        try:
            sent = self.publisher.socket.send(self._unsent)
        except BlockingIOError:
            sent = 0
        self._unsent = self._unsent[sent:]

    def _pump(self, result: LoadResult, wait_s: float) -> int:
        """Send and receive what is ready; return how many batches were delivered."""
        if self._unsent:
            self._flush()
        now = time.perf_counter()
        if now - self._heartbeat_at > 3:
            self._heartbeat_at = now
            for subscriber in self.subscribers:
                subscriber.send_heartbeat()
        delivered_count = 0
        for key, _ in self._selector.select(0 if self._unsent else wait_s):
            if key.data is None:
                self._take_answers()
                continue
            offsets = key.data.receive()
            now = time.perf_counter()
            for offset in offsets:
                result.latencies_s.append(now - self._due_at_of(offset))
            delivered_count += len(offsets)
        return delivered_count

    def _due_at_of(self, offset: int) -> float:
        """Return the time at which a batch was due; the log has only these batches, in the order sent."""
        if self._offset_shift is None:
            self._offset_shift = offset - min(self._due_at)
        return self._due_at[offset - self._offset_shift]

    def _take_answers(self) -> None:
        self._decoder.receive(self.publisher.socket.recv(1 << 16))
        while (frame := self._decoder.next_event()) is not NEED_BYTES:
            assert not isinstance(frame, Nack), frame
            if isinstance(frame, Ack) and frame.credit is not None:
                self._credit += frame.credit.deltas

    def close(self) -> None:
        for client in (self.publisher, *self.subscribers):
            client.socket.close()
        self._selector.close()


def median_ratio(pairs: list[tuple[float, float]]) -> float:
    """Return the median of the ratios second / first."""
    ratios: NDArray[np.float64] = np.array([second / first for first, second in pairs])
    return float(np.median(ratios))
