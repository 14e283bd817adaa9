"""One measurement: a publisher and consumers in processes of their own, against one server.

Every payload starts with the time at which it was passed to the client, in ns of the machine's monotonic
clock.
"""

from __future__ import annotations

import asyncio
import gc
import os
import struct
import time
from array import array
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks._measure import percentile
from benchmarks._peers_calls import publish_singly
from benchmarks._peers_contract import WAIT_S_MAX, Consumer, Peer, Publisher, Wire, connect
from benchmarks._peers_ours import BODY_HEADER, hello_of, next_frame
from benchmarks._processes import PROCESSES, end_forked, fork, run_forked, send_errors
from delta_prop_wire.codec import encode
from delta_prop_wire.frames import Ack, Start, StartAt, Subscribe, Subscription
from delta_prop_wire.spec import HEADER_BYTES, STAMP_BYTES, FrameType
from delta_prop_wire.topics import ALL

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.sharedctypes import Synchronized

PROCESSES.set_forkserver_preload([__name__, "benchmarks.peers"])
_WARM_SHARE = 0.1
"""The share of the latency samples, from the first on, that is discarded as warm-up."""
PIECE_BYTES = 1 << 20
_HEADER = struct.Struct(">4xQI")
_BODY_AT = HEADER_BYTES + STAMP_BYTES
_HEAD_BYTES = _BODY_AT + BODY_HEADER.size
_KIND_AT = 2
_BATCH = int(FrameType.BATCH)


@dataclass(frozen=True, slots=True)
class Scene:
    """The payloads, their rate, and the number of consumers."""

    name: str
    consumers: int
    batch: int = 100
    """Payloads of one call."""
    rate: float = 0.0
    """Calls per second, regardless of acknowledgements; 0: as fast as the window allows."""
    pause_s: float = 0.0
    """Pause between two calls on an otherwise idle server."""
    pack: int = 1
    """Deltas that the application has put into one payload."""
    size: int = 0
    """Bytes of a delta; 0: the size of the run."""
    window: int = 4_000
    """Payloads that may be unacknowledged."""
    has_single_calls: bool = False
    """True if each payload is published by a call of its own, in a task of its own."""
    from_log: bool = False
    """True if everything is published before the consumer subscribes."""
    sampled: int = 1
    """A consumer records the time of one in this many payloads: enough in a long run."""
    payloads_max: int = 3_000_000
    """The publisher stops after this many payloads, or after `seconds_max`."""
    seconds_max: float = 1.5

    @property
    def is_timed(self) -> bool:
        """True if it measures latency, not throughput."""
        return bool(self.rate or self.pause_s)


@dataclass(slots=True)
class Measurement:
    """One round of a scene. `lost`: payloads that a consumer did not get; `twice`: how often an earlier
    payload came after a later one.
    """

    deltas: int
    lost: int
    twice: int
    deltas_a_second: float
    acked_a_second: float
    latency_p50_us: float
    latency_p99_us: float
    ack_p50_us: float
    server_cpu_us: float
    """CPU µs per delta, as the next two fields."""
    publisher_cpu_us: float
    consumer_cpu_us: float = 0.0
    """Of the busiest consumer."""
    server_user_us: float = 0.0
    """The part of `server_cpu_us` outside of the system's calls."""
    payloads: int = 0
    counters: dict[str, float] = field(default_factory=dict)


def measure(peer: Peer, scene: Scene, topic: str, *, size: int = 128, window: int = 0) -> Measurement:
    """Measure a scene against a running server; a `window` of 0 means the scene's.

    Raises RuntimeError with a client's error.
    """
    if scene.from_log:
        return _measure_catch_up(peer, scene, topic, size=size, window=window)
    size, window = (scene.size or size) * scene.pack, window or scene.window
    peer.create(topic, scene.consumers)
    target = PROCESSES.Value("q", -1)
    pipes, processes = [], []
    for number in range(scene.consumers + 1):
        parent_pipe, child_pipe = PROCESSES.Pipe()
        if number < scene.consumers:
            work: tuple[Any, ...] = (_consume, peer, topic, (number, size, scene.sampled), target, child_pipe)
        else:
            work = (
                _publish_singly if scene.has_single_calls else _publish,
                peer,
                topic,
                (scene, size, window),
                target,
                child_pipe,
            )
        pipes.append(parent_pipe)
        processes.append(fork(_run, *work))
    try:
        for pipe in pipes:
            _receive_result(pipe)
        counters_before, cpu, user_cpu = peer.counters(), peer.cpu_s(), peer.user_cpu_s()
        for pipe in pipes:
            pipe.send("go")
        results = [_receive_result(pipe, scene.seconds_max) for pipe in pipes]
        cpu, user_cpu, counters = peer.cpu_s() - cpu, peer.user_cpu_s() - user_cpu, peer.counters()
        for process in processes:
            process.join(5)
    finally:
        for process in processes:
            end_forked(process)
    peer.drop(topic)
    *received, sent = results
    last = max((one["last"] for one in received), default=sent["acked_at"])
    deltas = sent["count"] * scene.pack
    return Measurement(
        deltas=deltas,
        lost=sum(sent["count"] - one["count"] for one in received),
        twice=sum(one["twice"] for one in received),
        deltas_a_second=deltas / (last - sent["began"]) * 1e9,
        acked_a_second=deltas / (sent["acked_at"] - sent["began"]) * 1e9,
        latency_p50_us=max((one["p50"] for one in received), default=0.0),
        latency_p99_us=max((one["p99"] for one in received), default=0.0),
        ack_p50_us=sent["ack_p50"],
        server_cpu_us=cpu / deltas * 1e6,
        publisher_cpu_us=sent["cpu"] / deltas * 1e6,
        consumer_cpu_us=max((one["cpu"] for one in received), default=0.0) / deltas * 1e6,
        server_user_us=user_cpu / deltas * 1e6,
        payloads=sent["count"],
        counters={name: counters[name] - counters_before.get(name, 0.0) for name in counters},
    )


def _receive_result(pipe: Connection, seconds: float = 0.0) -> Any:
    """Receive the result of a client whose work takes `seconds`."""
    if not pipe.poll(seconds + 2 * WAIT_S_MAX):
        raise RuntimeError("a client has sent no result")
    result = pipe.recv()
    if isinstance(result, str) and result.startswith("failed"):
        raise RuntimeError(result)
    return result


# --- in processes of their own


def _run(work: Any, *arguments: Any) -> None:
    with send_errors(arguments[-1], "failed: "):
        work(*arguments)


def _consume(
    peer: Peer, topic: str, options: tuple[int, int, int], target: Synchronized[int], pipe: Connection
) -> None:
    number, size, sampled = options
    consumer = peer.consumer(topic, number, size)
    consumer.begin()
    pipe.send("ready")
    pipe.recv()
    pipe.send(_receive_all(consumer, target, sampled))
    consumer.close()


def _receive_all(consumer: Consumer, target: Synchronized[int], sampled: int = 1) -> dict[str, float]:
    """Receive all payloads; then compute latencies and count duplicates."""
    stamps, times, counts = array("q"), array("q"), array("q")
    count, cpu = 0, time.process_time()
    expected = target.get_obj()  # the publisher sets it once, before its last call
    while not 0 <= expected.value <= count:
        received = consumer.receive()
        if received:
            times.append(time.monotonic_ns())
            count += len(received) // 8
            samples = received if sampled == 1 else memoryview(received).cast("q")[::sampled].tobytes()
            counts.append(len(samples) // 8)
            stamps.frombytes(samples)
    cpu = time.process_time() - cpu
    stamped_ns = np.array(stamps)
    latencies_ns = np.repeat(np.array(times), np.array(counts)) - stamped_ns
    p50, p99 = np.percentile(latencies_ns[int(_WARM_SHARE * len(latencies_ns)) :], (50, 99)) / 1e3
    twice = int((np.diff(stamped_ns) < 0).sum())  # an earlier payload arrived after a later one
    return {
        **{"count": count, "last": times[-1], "twice": twice, "cpu": cpu},
        **{"p50": float(p50), "p99": float(p99)},
    }


def _publish_singly(
    peer: Peer, topic: str, options: tuple[Scene, int, int], target: Synchronized[int], pipe: Connection
) -> None:
    """Publish by single calls, without consumers: the calls are measured."""
    scene, size, window = options
    target.get_obj().value = 0
    body = os.urandom(size - 8)

    async def publish() -> None:
        async with peer.calls(topic) as call:
            gc.collect()
            gc.freeze()  # the collector must not scan imported modules during the measurement
            pipe.send("ready")
            pipe.recv()
            cpu, began = time.process_time(), time.monotonic_ns()
            count, acked_at, took = await publish_singly(call, body, seconds=scene.seconds_max, window=window)
            result = {"count": count, "began": began, "acked_at": acked_at}
            pipe.send({**result, "cpu": time.process_time() - cpu, "ack_p50": percentile(took, 0.5) / 1e3})

    with asyncio.Runner(loop_factory=_fast_loop()) as runner:
        runner.run(publish())


def _fast_loop() -> Any:
    """Return the event loop factory of uvloop, on which all clients run fastest, or None if not installed."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def _publish(
    peer: Peer, topic: str, options: tuple[Scene, int, int], target: Synchronized[int], pipe: Connection
) -> None:
    scene, size, window = options
    publisher = peer.publisher(topic)
    publisher.prepare(size, scene.batch)
    pipe.send("ready")
    pipe.recv()
    run = _PublisherRun(publisher, scene, os.urandom(size - 8), target)
    cpu, began = time.process_time(), time.monotonic_ns()
    if scene.is_timed:
        run.send_open_loop()
    else:
        run.send_closed_loop(window)
    while publisher.acked < run.sent:
        run.take_acks(wait=True)
    acked_at, cpu = time.monotonic_ns(), time.process_time() - cpu
    publisher.finish()
    ack_p50 = percentile(run.acks_ns, 0.5) / 1e3
    pipe.send({"count": run.sent, "began": began, "acked_at": acked_at, "cpu": cpu, "ack_p50": ack_p50})


class _PublisherRun:
    """The run of one publisher."""

    def __init__(self, publisher: Publisher, scene: Scene, body: bytes, target: Synchronized[int]) -> None:
        self.sent = 0
        self.acks_ns: list[int] = []
        self._publisher = publisher
        self._scene = scene
        self._body = body
        self._target = target
        self._sent_at: list[tuple[int, int]] = []  # payloads sent so far, and the time of the last of them
        self._first_open = 0

    def send_closed_loop(self, window: int) -> None:
        """Send as fast as the acknowledgements allow."""
        scene, publisher = self._scene, self._publisher
        stop = time.monotonic_ns() + int(scene.seconds_max * 1e9)
        calls_max = scene.payloads_max // scene.batch
        for call in range(calls_max):
            while self.sent + scene.batch - publisher.acked > window:
                self.take_acks(wait=True)
            now = time.monotonic_ns()
            last = now > stop or call == calls_max - 1
            self._send(now, last=last)
            if last:
                return
            self.take_acks(wait=False)

    def send_open_loop(self) -> None:
        """Send at fixed times, regardless of acknowledgements."""
        scene = self._scene
        step = int(1e9 * (scene.pause_s or 1 / scene.rate))
        calls = int(scene.seconds_max * 1e9 / step)
        due = time.monotonic_ns()
        for call in range(calls):
            due += step
            while (left := due - time.monotonic_ns()) > 0:
                if scene.rate:
                    self.take_acks(wait=False)
                time.sleep(max(min(left, due - time.monotonic_ns()), 0) / 1e9)
            self._send(time.monotonic_ns(), last=call == calls - 1)
            if scene.pause_s:
                while self._publisher.acked < self.sent:
                    self.take_acks(wait=True)

    def take_acks(self, *, wait: bool) -> None:
        """Read acknowledgements, and record how long each call waited for its own."""
        self._publisher.take_acks(wait=wait)
        acked, now = self._publisher.acked, time.monotonic_ns()
        while self._first_open < len(self._sent_at) and self._sent_at[self._first_open][0] <= acked:
            self.acks_ns.append(now - self._sent_at[self._first_open][1])
            self._first_open += 1

    def _send(self, now: int, *, last: bool) -> None:
        batch = self._scene.batch
        self.sent += batch
        if last:  # consumers must know the end before they have received everything
            self._target.get_obj().value = self.sent
        self._sent_at.append((self.sent, now))
        self._publisher.send(now.to_bytes(8, "little") + self._body, batch)


# --- a consumer that subscribes at the start of a large backlog and reads to its end


def _measure_catch_up(peer: Peer, scene: Scene, topic: str, *, size: int, window: int) -> Measurement:
    """Fill the log as the scene says, without consumers; then measure one consumer that reads all of it.

    It receives large pieces and walks from frame to frame; it checks that offsets and counters have no gap.
    """
    wire = Wire(connect(peer.port))
    start_offset = subscribe(wire, Start(StartAt.LATEST))
    wire.socket.close()
    filled = measure(peer, replace(scene, from_log=False, consumers=0), topic, size=size, window=window)
    cpu, user_cpu = peer.cpu_s(), peer.user_cpu_s()
    seconds, consumer_cpu_s = run_forked(_read, peer.port, start_offset, filled.payloads, timeout_s=60)
    return replace(
        filled,
        deltas_a_second=filled.deltas / seconds,
        server_cpu_us=(peer.cpu_s() - cpu) / filled.deltas * 1e6,
        server_user_us=(peer.user_cpu_s() - user_cpu) / filled.deltas * 1e6,
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
                rows, counter = BODY_HEADER.unpack_from(data, position + _BODY_AT)
                if (offset, counter) != (self._offset, self._counter):
                    raise RuntimeError(f"offset {offset}, counter {counter}: after {self._offset}")
                self.rows += rows
                self._offset += rows
                self._counter += rows
            position += HEADER_BYTES + length
        self._skip = max(position - size, 0)
        self._rest = bytes(data[position:]) if position < size else b""


def _read(port: int, start_offset: int, rows: int, pipe: Connection) -> None:
    with send_errors(pipe, "failed: "):
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
