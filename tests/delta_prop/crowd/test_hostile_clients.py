"""Mutated frames, wrong lengths, and silent or slow connections do not slow honest clients.

The server has a process of its own; honest clients run all the time.
"""

from __future__ import annotations

import random
import socket
import struct
import time
from contextlib import closing, suppress
from typing import TYPE_CHECKING

import numpy as np
import pytest

from delta_prop_wire.codec import encode
from delta_prop_wire.delta import AckLevel, make_origin
from delta_prop_wire.frames import Ack, Hello, Nack, Subscribe
from tests.delta_prop.crowd.attacks import attacking_connection, mutated_frames
from tests.delta_prop.crowd.open_loop import BatchSubscriber, Client, median_ratio
from tests.delta_prop.server.process import served
from tests.delta_prop.server.raw import opaque_batch

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.delta_prop.server.process import Served

ROUNDS, TRIES = 5, 5
"""Rounds per try; tries until the measure is within its bound."""
ROWS = 10
"""Rows of each batch."""
MEMORY_BYTES_MAX = 64 * 1024 * 1024
P99_RATIO_MAX = 2.0
CPU_RATIO_MAX = 3.0
ENVIRONMENT = {
    "DELTA_PROP_SERVER__HANDSHAKE_TIMEOUT_S": "1",
    "DELTA_PROP_SERVER__HEARTBEAT_INTERVAL_S": "1",
    "DELTA_PROP_SERVER__PEER_TIMEOUT_S": "3",
    "DELTA_PROP_SERVER__CONNECTIONS_PER_HOST_MAX": "300",
}


class HonestClient:
    """A producer and a subscriber; each batch is delivered before the next is sent."""

    def __init__(self, port: int, producer_id: int) -> None:
        self.origin = make_origin(producer_id, 2)
        self.producer = Client(port, self.origin)
        self.subscriber = BatchSubscriber(port)
        self.subscriber.socket.setblocking(True)
        assert isinstance(self.producer.welcome, Ack)
        assert self.producer.welcome.welcome is not None
        self.epoch = self.producer.welcome.welcome.origins[0].epoch
        self.next_counter = 1

    def exchange(self, count: int) -> list[float]:
        """Exchange `count` batches, one after the other; return the seconds until each was delivered."""
        durations: list[float] = []
        for _ in range(count):
            if self.next_counter % (10 * ROWS) == 1:
                self.subscriber.send_heartbeat()
            began = time.perf_counter()
            level, origin = AckLevel.LOGGED, self.origin
            self.producer.send(
                opaque_batch(self.next_counter, ROWS, level=level, origin=origin, epoch=self.epoch)
            )
            self.next_counter += ROWS
            while True:
                answer = self.producer.next()
                assert answer is not None, "the server must not end an honest client's connection"
                assert not isinstance(answer, Nack), answer
                if isinstance(answer, Ack) and answer.sequence >= self.next_counter - 1:
                    break
            while not self.subscriber.receive():
                pass
            durations.append(time.perf_counter() - began)
            time.sleep(0.001)
        return durations

    def close(self) -> None:
        self.producer.close()
        self.subscriber.socket.close()


@pytest.mark.alone
def test_mutated_frames_do_not_slow_honest_clients(tmp_path: Path, full: bool) -> None:
    """The measure is the server's CPU time for one honest batch and one hostile connection."""
    frames = 20_000 if full else 500
    with (
        served(tmp_path / "data", "--read-level", "logged", env=ENVIRONMENT) as server,
        closing(HonestClient(server.port, 5)) as honest,
    ):
        honest.exchange(100)
        files_before, rss_before = server.open_file_count(), server.rss_bytes()
        pairs: list[tuple[float, float]] = []
        while len(pairs) < ROUNDS * TRIES and (not pairs or median_ratio(pairs) > CPU_RATIO_MAX):
            for number in range(len(pairs), len(pairs) + ROUNDS):
                pairs.append(measure_round(server, frames // ROUNDS, number, honest))
        wait_until(lambda: server.open_file_count() <= files_before)
        summary = ", ".join(f"{a * 1e3:.1f} -> {b * 1e3:.1f}" for a, b in pairs)
        print(
            f"{frames * len(pairs) // ROUNDS} mutated frames: CPU p99 x {median_ratio(pairs):.2f}, "
            f"{summary} ms, memory +"
            f"{(server.rss_bytes() - rss_before) / 2**20:.0f} MiB, "
            f"files {files_before} -> {server.open_file_count()}"
        )
        assert server.process.poll() is None
        assert server.rss_bytes() - rss_before <= MEMORY_BYTES_MAX
        assert server.open_file_count() <= files_before
        assert median_ratio(pairs) <= CPU_RATIO_MAX, summary


def measure_round(server: Served, frames: int, seed: int, honest: HonestClient) -> tuple[float, float]:
    """Return the p99 of the server's CPU seconds for a hostile connection and an honest batch.

    The first number is for connections that say hello and then are silent, the second for connections that
    send mutated frames. The two kinds alternate.
    """
    rng = random.Random(seed)
    durations: tuple[list[float], list[float]] = [], []
    for raw in mutated_frames(rng, frames):
        attacks = (b"", True), (raw, rng.random() < 0.8)
        for costs, (attack, says_hello) in zip(durations, attacks, strict=True):
            before = server.loop_cpu_s()
            with attacking_connection(server.port, attack, says_hello=says_hello):
                honest.exchange(1)
            costs.append(server.loop_cpu_s() - before)
    return p99(durations[0]), p99(durations[1])


@pytest.mark.alone
def test_half_open_connections_end_and_slow_nobody(tmp_path: Path) -> None:
    with (
        served(tmp_path / "data", "--read-level", "logged", env=ENVIRONMENT) as server,
        closing(HonestClient(server.port, 6)) as honest,
    ):
        honest.exchange(100)
        files_before, rss_before = server.open_file_count(), server.rss_bytes()
        pairs: list[tuple[float, float]] = []
        while len(pairs) < ROUNDS * TRIES and (not pairs or median_ratio(pairs) > P99_RATIO_MAX):
            pairs += [measure_half_open(server.port, honest) for _ in range(ROUNDS)]
        wait_until(lambda: server.open_file_count() <= files_before)
        summary = ", ".join(f"{a * 1e3:.1f} -> {b * 1e3:.1f}" for a, b in pairs)
        print(
            f"half-open: p99 x {median_ratio(pairs):.2f} ({summary} ms), memory "
            f"+{(server.rss_bytes() - rss_before) / 2**20:.0f} MiB, "
            f"files {files_before} -> {server.open_file_count()}"
        )
        assert server.open_file_count() <= files_before
        assert server.rss_bytes() - rss_before <= MEMORY_BYTES_MAX
        assert median_ratio(pairs) <= P99_RATIO_MAX, summary


def measure_half_open(port: int, honest: HonestClient) -> tuple[float, float]:
    """Return the p99 of delivery seconds without and with connections that are half open or send slowly."""
    baseline = honest.exchange(200)
    hello = encode(Subscribe(1, Hello()))
    huge_header = struct.pack(">BBBBQI", 0xD3, 1, 1, 9, 1, 16 * 1024 * 1024)
    openings = (
        b"",
        hello[:7],
        hello[:-1],
        hello + huge_header,
        hello + huge_header + bytes(5000),
        hello + b"\xd3",
    )
    sockets: list[socket.socket] = []
    under_attack: list[float] = []
    for step in range(200):  # half of the connections send a byte now and then
        if step % 5 == 0 and len(sockets) < 36:
            sockets.append(connect(port, openings[len(sockets) % len(openings)]))
        under_attack += honest.exchange(1)
        slow_sockets = [
            slow_socket for number, slow_socket in enumerate(sockets) if number // len(openings) % 2
        ]
        for slow_socket in slow_sockets[step % 10 :: 10]:
            with suppress(OSError):
                slow_socket.send(b"\x00")  # an occasional byte does not keep a connection open
    for slow_socket in sockets:
        slow_socket.close()
    return p99(baseline), p99(under_attack)


def connect(port: int, first: bytes) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=60)
    with suppress(OSError):
        connection.sendall(first)
    return connection


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait until the condition is true, for up to 60 s."""
    began = time.monotonic()
    while not condition() and time.monotonic() - began < 60:
        time.sleep(0.05)


def p99(latencies_s: list[float]) -> float:
    return float(np.percentile(latencies_s, 99))
