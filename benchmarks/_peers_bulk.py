"""Bulk reads of the log: a consumer that subscribes at the start of a large backlog and reads to its end.

It receives large pieces and walks from frame to frame; it checks that offsets and counters have no gap.
"""

from __future__ import annotations

import struct
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from benchmarks._peers_contract import Wire, connect
from benchmarks._peers_ours import hello_of, next_frame
from benchmarks._processes import PROCESSES, end_forked, fork
from delta_prop_wire.codec import encode
from delta_prop_wire.frames import Ack, Start, StartAt, Subscribe, Subscription
from delta_prop_wire.spec import HEADER_BYTES, STAMP_BYTES, FrameType
from delta_prop_wire.topics import ALL

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

    from benchmarks._peers_contract import Peer
    from benchmarks._peers_scenes import Measurement, Scene

PIECE_BYTES = 1 << 20
_HEADER = struct.Struct(">4xQI")
_ROWS = struct.Struct("<4xI16xQ")
"""Fields of a body's header: the number of rows, the counter of the first."""
_BODY_AT = HEADER_BYTES + STAMP_BYTES
_HEAD_BYTES = _BODY_AT + _ROWS.size
_KIND_AT = 2
_BATCH = int(FrameType.BATCH)


def measure_catch_up(
    peer: Peer, scene: Scene, topic: str, fill: Callable[[Peer, Scene, str], Measurement]
) -> Measurement:
    """Fill the log as the scene says, without consumers; then measure one consumer that reads all of it."""
    wire = Wire(connect(peer.port))
    start_offset = subscribe(wire, Start(StartAt.LATEST))
    wire.socket.close()
    filled = fill(peer, replace(scene, from_log=False, consumers=0), topic)
    parent_pipe, child_pipe = PROCESSES.Pipe()
    cpu = peer.cpu_s()
    reader = fork(_read, peer.port, start_offset, filled.payloads, child_pipe)
    try:
        result = parent_pipe.recv() if parent_pipe.poll(60) else "the consumer has sent no result"
        reader.join(5)
    finally:
        end_forked(reader)
    if isinstance(result, str):
        raise RuntimeError(result)
    seconds, consumer_cpu_s = result
    return replace(
        filled,
        deltas_a_second=filled.deltas / seconds,
        server_cpu_us=(peer.cpu_s() - cpu) / filled.deltas * 1e6,
        consumer_cpu_us=consumer_cpu_s / filled.deltas * 1e6,
    )


def subscribe(wire: Wire, start: Start) -> int:
    """Say hello and subscribe to everything; return the start offset."""
    wire.send(hello_of("bulk"))
    next_frame(wire)
    wire.send(encode(Subscribe(2, Subscription(1, (ALL,), start, wait_ms_max=0))))
    granted = next_frame(wire)
    if not isinstance(granted, Ack) or granted.subscribed is None:
        raise RuntimeError(f"delta-prop: {granted}")
    return granted.subscribed.start.next_offset


class FrameScanner:
    """Walks from frame to frame through the pieces of a stream that starts at this offset."""

    def __init__(self, offset: int) -> None:
        self.rows = 0
        self._offset = offset
        self._counter = 1
        self._skip = 0
        self._rest = b""

    @property
    def is_unfinished(self) -> bool:
        """True while the last frame is incomplete."""
        return self._skip > 0 or bool(self._rest)

    def take(self, piece: memoryview) -> None:
        """Scan the next piece. Raises RuntimeError if an offset or a counter is missing."""
        data: bytes | memoryview = self._rest + piece if self._rest else piece
        position, size = self._skip, len(data)
        while size - position >= HEADER_BYTES:
            offset, length = _HEADER.unpack_from(data, position)
            if data[position + _KIND_AT] == _BATCH:
                if size - position < _HEAD_BYTES:
                    break
                rows, counter = _ROWS.unpack_from(data, position + _BODY_AT)
                if (offset, counter) != (self._offset, self._counter):
                    raise RuntimeError(f"offset {offset}, counter {counter}: after {self._offset}")
                self.rows += rows
                self._offset += rows
                self._counter += rows
            position += HEADER_BYTES + length
        self._skip = max(position - size, 0)
        self._rest = bytes(data[position:]) if position < size else b""


def _read(port: int, start_offset: int, rows: int, pipe: Connection) -> None:
    try:
        wire, scanner = Wire(connect(port)), FrameScanner(start_offset)
        buffer = memoryview(bytearray(PIECE_BYTES))
        cpu, began = time.process_time(), time.monotonic()
        subscribe(wire, Start(StartAt.OFFSET, start_offset))
        scanner.take(memoryview(wire.unread))
        while scanner.rows < rows or scanner.is_unfinished:
            count = wire.socket.recv_into(buffer)
            if not count:
                raise ConnectionError("the server has closed the connection")
            scanner.take(buffer[:count])
        pipe.send((time.monotonic() - began, time.process_time() - cpu))
        wire.socket.close()
    except Exception as error:
        pipe.send(f"failed: {error!r}")
