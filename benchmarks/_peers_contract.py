"""What a peer of the harness is: a server to start and stop, and clients that do no more than they must.

Clients are blocking and in processes of their own, so that the server is what is measured.
"""

from __future__ import annotations

import os
import shutil
import socket
import struct
import subprocess
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from benchmarks._processes import apart, end

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextlib import AbstractAsyncContextManager

    from typing_extensions import Buffer

WAIT_S_MAX = 30.0
"""A client that hears nothing for so long gives up: something is lost."""
RECEIVE_BYTES = 256 * 1024


class Publisher(Protocol):
    """One connection that sends."""

    acked: int
    """How many payloads the server has acknowledged so far, at the durability that the peer declares."""

    def send(self, payload: bytes, count: int) -> None:
        """Send it so many times, as the peer sends what is published in one call; wait for nothing."""
        ...

    def take_acks(self, *, wait: bool) -> None:
        """Count what has been acknowledged; with `wait`, once something has come."""
        ...

    def finish(self) -> None:
        """All was acknowledged: say what is left to say, and close."""
        ...


class Consumer(Protocol):
    """One connection that receives, and acknowledges what it got."""

    def begin(self) -> None:
        """Return when the server delivers whatever is published from now on."""
        ...

    def receive(self) -> bytes:
        """The first 8 bytes of each payload that came with the next bytes, end to end.

        Each is seen to have the size that was said; nothing where no whole one has come.
        """
        ...

    def close(self) -> None:
        """End the connection."""
        ...


Call = Callable[[bytes], Awaitable[object]]
"""Publishes one payload; returns when it is acknowledged."""


class Peer:
    """A server to be measured. It is handed to other processes, which have no use for `processes`."""

    name = ""
    durability = ""
    program = ""

    def __init__(self) -> None:
        self.port = 0
        self.processes: list[subprocess.Popen[bytes]] = []

    def __getstate__(self) -> Mapping[str, object]:
        return {**self.__dict__, "processes": []}

    def missing(self) -> str | None:
        """What is to be installed before this peer can be measured."""
        return None if shutil.which(self.program, path=PATHS) else self.program

    def start(self, folder: Path) -> None:
        """Start the server with its data below `folder`; return when it can be connected to."""
        raise NotImplementedError

    def stop(self) -> None:
        """Stop it, by its own process id."""
        for process in reversed(self.processes):
            end(process)
        self.processes = []

    def create(self, topic: str, consumers: int) -> None:
        """Make a topic and so many durable consumers, each of which gets everything."""
        raise NotImplementedError

    def drop(self, topic: str) -> None:
        """Throw the topic away."""

    def publisher(self, topic: str) -> Publisher:
        """A connected publisher."""
        raise NotImplementedError

    def consumer(self, topic: str, number: int, size: int) -> Consumer:
        """A connected consumer of payloads of `size` bytes; `number` counts from 0."""
        raise NotImplementedError

    def calls(self, topic: str) -> AbstractAsyncContextManager[Call]:
        """A connection of an asyncio program that publishes by single calls, each a task of its own."""
        raise NotImplementedError

    def counters(self) -> dict[str, float]:
        """What the server has counted so far, where it tells."""
        return {}

    def cpu_s(self) -> float:
        """Seconds of CPU that the server has used, all its threads."""
        return sum(cpu_s(process.pid) for process in self.processes)

    def spawn(self, arguments: Sequence[str], folder: Path, **more: object) -> subprocess.Popen[bytes]:
        """Start a process of this peer; what it says goes to a file `said` in `folder`."""
        with (folder / "said").open("wb") as said, apart():
            process = subprocess.Popen(
                [shutil.which(arguments[0], path=PATHS) or arguments[0], *arguments[1:]],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                **more,  # type: ignore[call-overload]
            )
            self.processes.append(process)
        return process  # type: ignore[no-any-return]

    def wait_open(self, folder: Path) -> None:
        """Return when the port can be connected to."""
        began = time.monotonic()
        while time.monotonic() < began + WAIT_S_MAX:
            try:
                connect(self.port).close()
            except OSError:
                if self.processes and self.processes[-1].poll() is not None:
                    break
                time.sleep(0.05)
            else:
                return
        raise TimeoutError(
            f"{self.name} does not answer on port {self.port}: {(folder / 'said').read_text()}"
        )


PATHS = os.pathsep.join((*os.get_exec_path(), "/usr/sbin", "/usr/local/bin"))
"""Where servers are looked for: administrators' programs are often not on the path of others."""


@dataclass(slots=True)
class Wire:
    """A blocking socket with a buffer of what came and was not used yet."""

    socket: socket.socket
    rest: bytes = b""
    _buffer: memoryview = field(default_factory=lambda: memoryview(bytearray(RECEIVE_BYTES)))

    def send(self, data: Buffer) -> None:
        """Send all of it."""
        self.socket.sendall(data)

    def receive(self, *, wait: bool = True) -> bytes:
        """What was left, and what has come since; nothing where nothing has come and nobody waits."""
        try:
            count = self.socket.recv_into(self._buffer, 0, 0 if wait else socket.MSG_DONTWAIT)
        except BlockingIOError:
            if wait:
                raise TimeoutError(f"the server has said nothing for {WAIT_S_MAX} s") from None
            return b""
        if not count:
            raise ConnectionError("the server has closed the connection")
        return self.rest + self._buffer[:count] if self.rest else bytes(self._buffer[:count])


def connect(port: int) -> socket.socket:
    """A connection that sends at once and waits for nothing longer than it should."""
    found = socket.create_connection(("127.0.0.1", port), timeout=WAIT_S_MAX)
    found.settimeout(None)  # a timeout of Python's own costs a call of the system at each receive
    found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", int(WAIT_S_MAX), 0))
    found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return found


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def cpu_s(process_id: int) -> float:
    """Seconds that a process and its threads were on a CPU."""
    spent_ns = 0
    for task in Path(f"/proc/{process_id}/task").iterdir():
        try:
            spent_ns += int((task / "schedstat").read_text().split()[0])
        except (FileNotFoundError, ProcessLookupError):  # a thread that has just ended
            continue
    return spent_ns / 1e9
