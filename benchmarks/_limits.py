"""This machine's limits for a service in Python: bytes over loopback TCP, bytes onto its disk.

They are measured in every round that is compared with them, as a shared machine's limits change by the
minute.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from benchmarks._processes import PROCESSES, end_forked, fork

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from pathlib import Path

SECONDS = 0.4
"""Duration of one TCP measurement."""
MIB = 1 << 20


def limits_mb_s(folder: Path) -> dict[str, float]:
    """Return MB per second: of each way to send over TCP; `tcp`, the best of these; `sync`, synced writes."""
    kinds = ("raw", "asyncio", "uvloop") if find_spec("uvloop") else ("raw", "asyncio")
    tcp_rates = {
        f"tcp {kind} {size >> 10} KiB": tcp_mb_s(kind, size) for kind in kinds for size in (64 << 10, MIB)
    }
    return {**tcp_rates, "tcp": max(tcp_rates.values()), "sync": sync_mb_s(folder)}


def tcp_mb_s(kind: str, size: int) -> float:
    """Measure one sender and one receiver process, which send blocks of `size` bytes.

    `kind`: raw (blocking sockets), asyncio or uvloop (protocols of that event loop).
    """
    parent_pipe, child_pipe = PROCESSES.Pipe()
    receiver = fork(_receive, kind, child_pipe)
    try:
        port = parent_pipe.recv()
        began = time.monotonic()
        if kind == "raw":
            _send_raw(port, size)
        else:
            _run(kind, _send(port, size))
        if not parent_pipe.poll(30):
            raise RuntimeError("the receiver has sent no result")
        count, ended = parent_pipe.recv()
        receiver.join(5)
    finally:
        end_forked(receiver)
    return float(count / (ended - began) / 1e6)


def sync_mb_s(folder: Path, count: int = 48) -> float:
    """Measure writes of 1 MiB to a growing file, each synced, by the median of their times."""
    took = []
    path = folder / "synced"
    block = os.urandom(MIB)
    with path.open("wb", buffering=0) as file:
        for _ in range(count):
            began = time.monotonic()
            file.write(block)
            os.fdatasync(file.fileno())
            took.append(time.monotonic() - began)
    path.unlink()
    return MIB / sorted(took)[count // 2] / 1e6


def _send_raw(port: int, size: int) -> None:
    block, end = bytes(size), time.monotonic() + SECONDS
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.settimeout(None)
        while time.monotonic() < end:
            connection.sendall(block)


async def _send(port: int, size: int) -> None:
    loop = asyncio.get_running_loop()
    block, end, gate = bytes(size), time.monotonic() + SECONDS, _Gate()
    transport, _ = await loop.create_connection(lambda: gate, "127.0.0.1", port)
    while time.monotonic() < end:
        transport.write(block)
        await gate.opened.wait()
    transport.close()
    await gate.closed


class _Gate(asyncio.Protocol):
    """The sender's protocol: `opened` is set while the transport accepts more."""

    def __init__(self) -> None:
        self.opened = asyncio.Event()
        self.opened.set()
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def pause_writing(self) -> None:
        self.opened.clear()

    def resume_writing(self) -> None:
        self.opened.set()

    def connection_lost(self, error: Exception | None) -> None:
        self.opened.set()
        self.closed.set_result(None)


def _receive(kind: str, pipe: Connection) -> None:
    if kind == "raw":
        with socket.create_server(("127.0.0.1", 0)) as server:
            pipe.send(server.getsockname()[1])
            connection, _ = server.accept()
            buffer, count = bytearray(MIB), 0
            while received := connection.recv_into(buffer):
                count += received
            pipe.send((count, time.monotonic()))
    else:
        _run(kind, _receive_in_loop(pipe))


async def _receive_in_loop(pipe: Connection) -> None:
    sink = _Sink()
    server = await asyncio.get_running_loop().create_server(lambda: sink, "127.0.0.1", 0)
    pipe.send(server.sockets[0].getsockname()[1])
    await sink.ended
    pipe.send((sink.count, time.monotonic()))
    server.close()


class _Sink(asyncio.Protocol):
    """The receiver's protocol: counts bytes."""

    def __init__(self) -> None:
        self.count = 0
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        self.count += len(data)

    def connection_lost(self, error: Exception | None) -> None:
        self.ended.set_result(None)


def _run(kind: str, work: Any) -> None:
    factory = None
    if kind == "uvloop":
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(work)
