"""What the service needs of the world, as structural types: a clock, randomness, threads, sockets.

Nothing is implemented here. `world.py` has the real ones, `testing/` false ones; nowhere else does
time, chance, a thread or a socket come in.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, Protocol, TypeVar

from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractAsyncContextManager

    from typing_extensions import Buffer

    from delta_prop_broker.disk import Disk, FileRange

T = TypeVar("T")


class Clock(Protocol):
    """Elapsed time for rules, wall time for display and for dates that people wrote."""

    def now(self) -> float:
        """Monotonic seconds, of the running event loop."""
        ...

    def wall_us(self) -> int:
        """Microseconds since 1970; decides nothing but when tokens expire."""
        ...


class Randomness(Protocol):
    """Chance: identifiers and jitter."""

    def bytes(self, count: int) -> bytes:
        """That many random bytes."""
        ...

    def random(self) -> float:
        """A number from 0 (inclusive) to 1 (exclusive)."""
        ...

    def fork(self, name: str) -> Randomness:
        """A source for one concern, which takes nothing from what others draw."""
        ...


class Threads(Protocol):
    """One worker thread: calls that block run there, one at a time, in order."""

    async def run(self, function: Callable[[], T]) -> T:
        """Run `function` on the thread and return what it returns, or raise what it raises."""
        ...


@dataclass(frozen=True, slots=True)
class Tls:
    """What a side shows of itself and asks of the other one, as paths of PEM files. TLS 1.3 alone is spoken.

    `certificate`, `key`: of this side; a server has both. `authorities`: who signed the other side's; a
    server with it asks clients for one (mutual TLS), a client without it trusts the system's.
    `server_name`: the name that the server's certificate must bear; None: the host connected to.
    """

    certificate: str | None = None
    key: str | None = None
    authorities: str | None = None
    server_name: str | None = None

    def __post_init__(self) -> None:
        for name in ("certificate", "key", "authorities", "server_name"):
            value = getattr(self, name)
            if not isinstance(value, str | PurePath | None):
                raise UsageError(f"{name} {value!r:.60} is a {type(value).__name__}: give text")


class Stream(Protocol):
    """One connection: bytes both ways, in order. One task receives, one sends, at the same time or not.

    All raise ConnectionError once the connection is gone, whichever side ended it; those of a client also
    Misconfigured, where its TLS cannot work. Who gives up a receive loses nothing; a send that is cancelled
    leaves the stream fit for closing only.
    """

    @property
    def peer(self) -> str:
        """Who is at the other end: `host:port`."""
        ...

    @property
    def peer_host(self) -> str:
        """Where it is, without the port: what connections are counted for."""
        ...

    async def receive_into(self, buffer: memoryview) -> int:
        """Wait for bytes and put them there; how many, 0 where the peer sends no more."""
        ...

    async def receive_each(self, room: Callable[[], memoryview], take: Callable[[int], bool]) -> bool:
        """Receive into what `room` gives and hand each count to `take`, until that gives False or raises.

        Whether `take` ended it: False where the peer sends no more. Neither of them awaits anything; they may
        be called by the event loop, from within no task.
        """
        ...

    def send_now(self, parts: Sequence[Buffer]) -> int:
        """Send what the system takes at once, without waiting; how many bytes that were.

        What was not taken comes next: TLS may have encrypted it already.
        """
        ...

    async def send(self, parts: Sequence[Buffer]) -> None:
        """Send these buffers one behind the other; return when the system has taken all."""
        ...

    async def send_file(self, part: FileRange) -> None:
        """Send bytes of a file, without copying them through this process where the system can.

        Raises OSError where the file fails; then nobody knows how much has gone.
        """
        ...

    async def aclose(self, patience_s: float = 0.0) -> None:
        """End it, what was sent being on its way; shielded, bounded in time, idempotent.

        The other side has up to a second to end too, or `patience_s` where that is more. Then what it sends
        without having read all may cost it the rest.
        """
        ...


class Listener(Protocol):
    """Where connections come in."""

    @property
    def address(self) -> tuple[str, int]:
        """Host and port, the real one where 0 was asked for."""
        ...

    async def accept(self) -> Stream:
        """Wait for the next connection. With TLS its handshake is done by the first receive or send."""
        ...

    async def aclose(self) -> None:
        """Take no more; connections that were accepted go on."""
        ...


class Network(Protocol):
    """Where streams come from."""

    async def listen(self, host: str, port: int, *, tls: Tls | None = None) -> Listener:
        """Listen; port 0 is any free one. Raises OSError, UsageError (a certificate that cannot be used)."""
        ...

    async def connect(
        self, host: str, port: int, *, tls: Tls | None = None, timeout_s: float = 10.0
    ) -> Stream:
        """Connect, TLS handshake included. Raises OSError, TimeoutError, UsageError.

        That is Misconfigured where trying again changes nothing.
        """
        ...


@dataclass(frozen=True, slots=True)
class World:
    """All ports together.

    `new_threads` gives each owner a worker of its own. Two kinds of thread live as long as their scope:
    `own_thread` one that runs nothing else, for many short calls that somebody waits for; `background_thread`
    one of low priority, where the system knows that, for long computations that others must not feel.
    `open_disk` gives the disk below a directory. `network`: None where there is none. `soon` has a call made
    by the event loop behind all that it has to do already; None where only a task can do that.
    """

    clock: Clock
    randomness: Randomness
    new_threads: Callable[[], Threads]
    own_thread: Callable[[], AbstractAsyncContextManager[Threads]]
    background_thread: Callable[[], AbstractAsyncContextManager[Threads]]
    open_disk: Callable[[str], Disk]
    network: Network | None = None
    soon: Callable[[Callable[[], None]], object] | None = None
