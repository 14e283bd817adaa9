"""Bulk out of the log: a consumer that begins where much was written before, and reads until it is level.

It takes large pieces and goes from frame to frame; of each it sees that offsets and counters have no gap.
"""

from __future__ import annotations

import struct
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from benchmarks._peers_contract import Wire, connect
from benchmarks._peers_ours import hello_of, next_frame
from benchmarks._processes import PROCESSES, end_forked, forked
from delta_prop_wire.codec import encode
from delta_prop_wire.frames import Ack, Start, StartAt, Subscribe, Subscription
from delta_prop_wire.spec import HEADER_BYTES, STAMP_BYTES, FrameType
from delta_prop_wire.topics import ALL

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

    from benchmarks._peers_contract import Peer
    from benchmarks._peers_scenes import Measured, Scene

PIECE_BYTES = 1 << 20
_HEADER = struct.Struct(">4xQI")
_ROWS = struct.Struct("<4xI16xQ")
"""Of a body's header: how many rows, the counter of the first."""
_BODY_AT = HEADER_BYTES + STAMP_BYTES
_HEAD_BYTES = _BODY_AT + _ROWS.size
_KIND_AT = 2
_BATCH = int(FrameType.BATCH)


def caught_up(peer: Peer, scene: Scene, topic: str, fill: Callable[[Peer, Scene, str], Measured]) -> Measured:
    """Fill the log as the scene says, with nobody there; then let one consumer read all of it."""
    wire = Wire(connect(peer.port))
    begin = subscribe(wire, Start(StartAt.LATEST))
    wire.socket.close()
    filled = fill(peer, replace(scene, from_log=False, consumers=0), topic)
    here, there = PROCESSES.Pipe()
    cpu = peer.cpu_s()
    reader = forked(_read, peer.port, begin, filled.payloads, there)
    try:
        told = here.recv() if here.poll(60) else "the consumer has said nothing"
        reader.join(5)
    finally:
        end_forked(reader)
    if isinstance(told, str):
        raise RuntimeError(told)
    seconds, consumer_cpu_s = told
    return replace(
        filled,
        deltas_a_second=filled.deltas / seconds,
        server_cpu_us=(peer.cpu_s() - cpu) / filled.deltas * 1e6,
        consumer_cpu_us=consumer_cpu_s / filled.deltas * 1e6,
    )


def subscribe(wire: Wire, start: Start) -> int:
    """Say hello, subscribe to everything; the offset where it begins."""
    wire.send(hello_of("bulk"))
    next_frame(wire)
    wire.send(encode(Subscribe(2, Subscription(1, (ALL,), start, wait_ms_max=0))))
    granted = next_frame(wire)
    if not isinstance(granted, Ack) or granted.subscribed is None:
        raise RuntimeError(f"delta-prop: {granted}")
    return granted.subscribed.start.next_offset


class Walk:
    """Goes from frame to frame through pieces of a stream that begins at this offset."""

    def __init__(self, offset: int) -> None:
        self.rows = 0
        self._offset = offset
        self._counter = 1
        self._skip = 0
        self._rest = b""

    @property
    def unfinished(self) -> bool:
        """Whether the last frame is not whole yet."""
        return self._skip > 0 or bool(self._rest)

    def take(self, piece: memoryview) -> None:
        """What came next. Raises RuntimeError where an offset or a counter is missing."""
        data: bytes | memoryview = self._rest + piece if self._rest else piece
        at, size = self._skip, len(data)
        while size - at >= HEADER_BYTES:
            offset, length = _HEADER.unpack_from(data, at)
            if data[at + _KIND_AT] == _BATCH:
                if size - at < _HEAD_BYTES:
                    break
                rows, counter = _ROWS.unpack_from(data, at + _BODY_AT)
                if (offset, counter) != (self._offset, self._counter):
                    raise RuntimeError(f"offset {offset}, counter {counter}: after {self._offset}")
                self.rows += rows
                self._offset += rows
                self._counter += rows
            at += HEADER_BYTES + length
        self._skip = max(at - size, 0)
        self._rest = bytes(data[at:]) if at < size else b""


def _read(port: int, begin: int, rows: int, pipe: Connection) -> None:
    try:
        wire, walk = Wire(connect(port)), Walk(begin)
        buffer = memoryview(bytearray(PIECE_BYTES))
        cpu, began = time.process_time(), time.monotonic()
        subscribe(wire, Start(StartAt.OFFSET, begin))
        walk.take(memoryview(wire.rest))
        while walk.rows < rows or walk.unfinished:
            count = wire.socket.recv_into(buffer)
            if not count:
                raise ConnectionError("the server has closed the connection")
            walk.take(buffer[:count])
        pipe.send((time.monotonic() - began, time.process_time() - cpu))
        wire.socket.close()
    except Exception as error:
        pipe.send(f"failed: {error!r}")
