"""The interface of a peer: a server to start and stop, and clients that do the minimum of work.

Clients block and run in processes of their own, so that the benchmark measures the server.
"""

from __future__ import annotations

import os
import shutil
import socket
import struct
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Self

from benchmarks._processes import end, ignore_interrupts

if TYPE_CHECKING:
    from typing_extensions import Buffer

WAIT_S_MAX = 30.0
"""A client that receives nothing for this time fails, because something is lost."""
RECEIVE_BYTES = 256 * 1024


class Publisher(Protocol):
    """One connection that sends."""

    acked: int
    """The payloads that the server has acknowledged so far, at the durability that the peer declares."""

    def prepare(self, size: int, count: int) -> None:
        """Do what calls of `count` payloads of `size` bytes need once, so that it is not measured."""
        ...

    def send(self, payload: bytes, count: int) -> None:
        """Send the payload `count` times, as the peer sends the payloads of one call; do not wait."""
        ...

    def take_acks(self, *, wait: bool) -> None:
        """Count acknowledgements; with `wait`, block until something arrives."""
        ...

    def finish(self) -> None:
        """End the exchange after the last acknowledgement, and close."""
        ...


class EncodedPublisher:
    """A publisher of a peer with a text protocol, whose messages are encoded one by one."""

    def __init__(
        self, port: int, encode: Callable[[bytes, int], bytes], count_acks: Callable[[bytes], int]
    ) -> None:
        self.acked = 0
        self._wire = Wire(connect(port))
        self._encode, self._count_acks = encode, count_acks

    def prepare(self, size: int, count: int) -> None:
        """See `Publisher`: nothing."""

    def send(self, payload: bytes, count: int) -> None:
        """See `Publisher`."""
        self._wire.send(self._encode(payload, count))

    def take_acks(self, *, wait: bool) -> None:
        """See `Publisher`."""
        self.take(self._wire.receive(wait=wait))

    def take(self, received: bytes) -> None:
        """Count the acknowledgements in these bytes."""
        self.acked += self._count_acks(received)

    def finish(self) -> None:
        """See `Publisher`."""
        self._wire.socket.close()


class Consumer(Protocol):
    """One connection that receives and acknowledges payloads."""

    def begin(self) -> None:
        """Subscribe; return once the server will deliver everything that is published."""
        ...

    def receive(self) -> bytes:
        """Receive once, check sizes; return the joined first 8 bytes of each complete payload, or nothing."""
        ...

    def close(self) -> None:
        """End the connection."""
        ...


Call = Callable[[bytes], Awaitable[object]]
"""Function that publishes one payload and returns when it is acknowledged."""


class Peer:
    """A server to be measured. `durability`: where a payload is when the server acknowledges it; `program`:
    the command that starts it. A peer is pickled for other processes, without `processes`.
    """

    name = ""
    durability = ""
    program = ""

    def __init__(self) -> None:
        self.port = 0
        self.processes: list[subprocess.Popen[bytes]] = []

    def __getstate__(self) -> Mapping[str, object]:
        return {**self.__dict__, "processes": []}

    def missing_program(self) -> str | None:
        """Return the name of the program to install before this peer can be measured, or None."""
        return None if shutil.which(self.program, path=PATHS) else self.program

    def start(self, folder: Path) -> None:
        """Start the server with its data below `folder`; return when it can be connected to."""
        raise NotImplementedError

    def stop(self) -> None:
        """Stop the processes that were started here."""
        for process in reversed(self.processes):
            end(process)
        self.processes = []

    @contextmanager
    def running(self, folder: Path | None = None) -> Iterator[Self]:
        """Start the server, by default in a temporary folder; stop it at the end."""
        with ExitStack() as exits:
            temporary = tempfile.TemporaryDirectory(prefix="bench-")
            folder = folder or Path(exits.enter_context(temporary))
            exits.callback(self.stop)
            self.start(folder)
            yield self

    def create(self, topic: str, consumers: int) -> None:
        """Create a topic and `consumers` durable consumers, each of which gets everything."""
        raise NotImplementedError

    def drop(self, topic: str) -> None:
        """Delete the topic."""

    def publisher(self, topic: str) -> Publisher:
        """Connect a publisher."""
        raise NotImplementedError

    def consumer(self, topic: str, number: int, size: int) -> Consumer:
        """Connect a consumer of payloads of `size` bytes; `number` counts from 0."""
        raise NotImplementedError

    def calls(self, topic: str) -> AbstractAsyncContextManager[Call]:
        """Open a connection of an asyncio program that publishes by single calls, each in a task."""
        raise NotImplementedError

    def counters(self) -> dict[str, float]:
        """Return the server's counters, if it exposes any."""
        return {}

    def cpu_s(self) -> float:
        """Return the CPU seconds that the server has used, all its threads."""
        return sum(cpu_s(process.pid) for process in self.processes)

    def user_cpu_s(self) -> float:
        """Return those of `cpu_s` that were spent outside of the system's calls, in steps of 10 ms."""
        return sum(user_cpu_s(process.pid) for process in self.processes)

    def spawn(self, arguments: Sequence[str], folder: Path, **options: object) -> subprocess.Popen[bytes]:
        """Start a process of this peer; its output goes to a file `output` in `folder`."""
        with (folder / "output").open("wb") as output, ignore_interrupts():
            process = subprocess.Popen(
                [shutil.which(arguments[0], path=PATHS) or arguments[0], *arguments[1:]],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                **options,  # type: ignore[call-overload]
            )
            self.processes.append(process)
        return process  # type: ignore[no-any-return]

    def wait_ready(self, folder: Path) -> dict[str, int]:
        """Wait for the line `ready NAME=PORT …` of the process that was started last; return the ports."""
        began = time.monotonic()
        while time.monotonic() < began + WAIT_S_MAX and self.processes[-1].poll() is None:
            for line in (folder / "output").read_text().splitlines():
                if line.startswith("ready "):
                    words = (word.partition("=") for word in line.split()[1:])
                    return {name: int(value) for name, _, value in words if value.isdecimal()}
            time.sleep(0.05)
        raise TimeoutError(f"{self.name} is not ready: {(folder / 'output').read_text()}")

    def wait_open(self, folder: Path) -> None:
        """Wait until the port accepts connections."""
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
            f"{self.name} does not answer on port {self.port}: {(folder / 'output').read_text()}"
        )


PATHS = os.pathsep.join((*os.get_exec_path(), "/usr/sbin", "/usr/local/bin"))
"""The search path for servers: it includes the folders of administrators' programs."""


@dataclass(slots=True)
class Wire:
    """A blocking socket with a buffer of unread bytes."""

    socket: socket.socket
    unread: bytes = b""
    _buffer: memoryview = field(default_factory=lambda: memoryview(bytearray(RECEIVE_BYTES)))

    def send(self, data: Buffer) -> None:
        """Send all of it."""
        self.socket.sendall(data)

    def receive(self, *, wait: bool = True) -> bytes:
        """Return the unread bytes and those that have arrived; nothing if none have and `wait` is false."""
        try:
            count = self.socket.recv_into(self._buffer, 0, 0 if wait else socket.MSG_DONTWAIT)
        except BlockingIOError:
            if wait:
                raise TimeoutError(f"the server has sent nothing for {WAIT_S_MAX} s") from None
            return b""
        if not count:
            raise ConnectionError("the server has closed the connection")
        return self.unread + self._buffer[:count] if self.unread else bytes(self._buffer[:count])


def connect(port: int) -> socket.socket:
    """Connect with TCP_NODELAY and a receive timeout."""
    connection = socket.create_connection(("127.0.0.1", port), timeout=WAIT_S_MAX)
    connection.settimeout(None)  # a Python timeout costs a system call at each receive
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", int(WAIT_S_MAX), 0))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def free_port() -> int:
    """Return a port of this machine on which no process listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def cpu_s(process_id: int) -> float:
    """Return the seconds that a process and its threads were on a CPU."""
    spent_ns = 0
    for task in Path(f"/proc/{process_id}/task").iterdir():
        try:
            spent_ns += int((task / "schedstat").read_text().split()[0])
        except (FileNotFoundError, ProcessLookupError):  # a thread that has just ended
            continue
    return spent_ns / 1e9


def user_cpu_s(process_id: int) -> float:
    """Return the seconds that a process was on a CPU outside of the system's calls."""
    fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) / os.sysconf("SC_CLK_TCK")
