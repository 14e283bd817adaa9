"""Ports: structural types of the world outside the service: clock, randomness, threads, sockets.

Nothing is implemented here. `world.py` has the real ones, `testing/` the fakes. `SYSTEM` in
`tools/architecture.py` lists the modules that may use the system beside them, such as the command's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, Protocol, TypeVar

from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from delta_prop_broker.disk import Disk, FileRange

T = TypeVar("T")


class Timer(Protocol):
    """Elapsed time."""

    def now(self) -> float:
        """Return monotonic seconds."""
        ...


class Clock(Timer, Protocol):
    """Elapsed time of the running event loop for rules, wall time for display and for dates of people."""

    def wall_us(self) -> int:
        """Return microseconds since 1970. They decide the expiry of tokens; else they only label."""
        ...


class Randomness(Protocol):
    """Source of random identifiers and jitter."""

    def bytes(self, count: int) -> bytes:
        """Return `count` random bytes."""
        ...

    def random(self) -> float:
        """Return a number from 0 (inclusive) to 1 (exclusive)."""
        ...

    def fork(self, name: str) -> Randomness:
        """Return an independent source for one purpose, whose draws do not affect other sources."""
        ...


class Threads(Protocol):
    """One worker thread that runs blocking calls one at a time, in order."""

    async def run(self, function: Callable[[], T]) -> T:
        """Run `function` on the thread and return what it returns, or raise what it raises."""
        ...


@dataclass(frozen=True, slots=True)
class Tls:
    """TLS 1.3 credentials of one side and its trust in the other, as paths of PEM files.

    `certificate`, `key`: of this side; required of a server. `authorities`: the trusted authorities of the
    other side's certificate; a server with it requires client certificates (mutual TLS), a client without it
    trusts the system's. `server_name`: the name that the server's certificate must bear; None: the host
    connected to.
    """

    certificate: str | None = None
    key: str | None = None
    authorities: str | None = None
    server_name: str | None = None

    def __post_init__(self) -> None:
        for name in ("certificate", "key", "authorities", "server_name"):
            value = getattr(self, name)
            if not isinstance(value, str | PurePath | None):
                raise UsageError(f"{name} {value!r:.60} is of type {type(value).__name__}: give text")


class Stream(Protocol):
    """One connection: bytes both ways, in order. One task receives while another may send.

    All methods raise ConnectionError once the connection has ended, whichever side closed it; those of a
    client also Misconfigured if its TLS cannot work. A cancelled receive loses nothing; after a cancelled
    send the stream can only be closed.
    """

    @property
    def peer(self) -> str:
        """Address of the other end: `host:port`."""
        ...

    @property
    def peer_host(self) -> str:
        """Host of the other end, without the port, by which connections are counted."""
        ...

    async def receive_into(self, buffer: memoryview) -> int:
        """Wait for bytes and read them into the buffer; return how many, 0 at the end of the stream."""
        ...

    async def receive_each(
        self, get_buffer: Callable[[], memoryview], on_received: Callable[[int], bool]
    ) -> bool:
        """Receive into `get_buffer()` and pass each count to `on_received`, until that is False or raises.

        Return True if `on_received` ended it, False at the end of the peer's stream. Neither callback awaits
        anything; the event loop may call them outside any task.
        """
        ...

    def send_now(self, parts: Sequence[Buffer]) -> int:
        """Send what the kernel takes at once, without waiting; return how many bytes that were.

        The caller must send the rest next: TLS may have encrypted it already.
        """
        ...

    async def send(self, parts: Sequence[Buffer]) -> None:
        """Send these buffers in order; return once the kernel has taken all."""
        ...

    async def send_file(self, part: FileRange) -> None:
        """Send bytes of a file, without copying them through this process if the system can.

        Raises OSError if the file fails; then it is unknown how much was sent.
        """
        ...

    async def aclose(self, patience_s: float = 0.0) -> None:
        """Close the connection, with what was sent still delivered; shielded, bounded in time, idempotent.

        The other side has up to a second to close too, or `patience_s` if that is more. If it then still
        sends data, which nobody reads, it may lose the rest of what was sent.
        """
        ...


class Listener(Protocol):
    """Listening socket that accepts connections."""

    @property
    def address(self) -> tuple[str, int]:
        """Host and port, the actual one if 0 was requested."""
        ...

    async def accept(self) -> Stream:
        """Wait for the next connection. With TLS its handshake is done by the first receive or send."""
        ...

    async def aclose(self) -> None:
        """Accept no more; accepted connections continue."""
        ...


class Network(Protocol):
    """Factory of listeners and streams."""

    async def listen(self, host: str, port: int, *, tls: Tls | None = None) -> Listener:
        """Listen; port 0 is any free one. Raises OSError, UsageError (a certificate that cannot be used)."""
        ...

    async def connect(
        self, host: str, port: int, *, tls: Tls | None = None, timeout_s: float = 10.0
    ) -> Stream:
        """Connect, TLS handshake included. Raises OSError, TimeoutError, UsageError.

        The UsageError is a Misconfigured if a retry changes nothing.
        """
        ...


@dataclass(frozen=True, slots=True)
class World:
    """All ports together.

    `new_threads` gives each owner a worker of its own. Two kinds of thread live as long as their scope:
    `own_thread` is exclusive, for many short calls that a task waits for; `background_thread` has a low
    priority, if the system supports that, for long computations that must not slow others. `open_disk` opens
    the disk below a directory. `network`: None if there is none. `call_soon` has the event loop make a call
    after everything that it has already scheduled; None if only a task can do that.
    """

    clock: Clock
    randomness: Randomness
    new_threads: Callable[[], Threads]
    own_thread: Callable[[], AbstractAsyncContextManager[Threads]]
    background_thread: Callable[[], AbstractAsyncContextManager[Threads]]
    open_disk: Callable[[str], Disk]
    network: Network | None = None
    call_soon: Callable[[Callable[[], None]], object] | None = None
