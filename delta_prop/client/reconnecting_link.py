"""A client's link to its service: connects, says hello, reads and writes, and reconnects after a failure.

It moves frames and does not interpret them: its `LinkProtocol`, a producer or a subscriber, does.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import anyio

from delta_prop.client.backoff import Backoff
from delta_prop.client.errors import Reconnect, Unreachable
from delta_prop.client.outage import Outage
from delta_prop.platform.connection_faults import AddressFaults, Misconfigured
from delta_prop_wire.errors import DeltaPropError, ProtocolError, Refused, UsageError
from delta_prop_wire.frames import Ack, Frame, Hello, Welcome
from delta_prop_wire.requests import join_pages

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from delta_prop.client.addresses import Address
    from delta_prop.client.connector import Connector
    from delta_prop.client.session import Session
    from delta_prop.platform.ports import Stream

logger = logging.getLogger("delta_prop.client")

FAULTS_MAX = 5
"""After this many connections in a row on which the service violates the protocol, `run` raises."""
_WAIT_S_MIN = 0.001
"""Minimum wait: after a shorter one, the clock may still show the same time, and the loop would spin."""


class LinkProtocol(Protocol):
    """The user of a link. A DeltaPropError from a method ends the link; Reconnect, only the connection."""

    def hello(self) -> Hello:
        """Return the hello that opens a connection."""
        ...

    def on_welcome(self, welcome: Welcome, *, same_address: bool) -> None:
        """Note that a hello was answered. `same_address`: the previous answer, if any, had this address."""
        ...

    def on_frame(self, frame: Frame, size: int, now: float) -> bool:
        """Handle a frame of `size` bytes; return True if it made progress."""
        ...

    def data_to_send(self, session: Session, now: float) -> Sequence[Buffer]:
        """Return bytes to send now. If there are none, the next call follows a `notify` or `wait_s`."""
        ...

    def on_sent(self) -> None:
        """Note that all that `data_to_send` returned was sent."""
        ...

    def wait_s(self, now: float) -> float | None:
        """Return the seconds until `data_to_send` may have something without a `notify`; None: never."""
        ...

    def processed_offset(self) -> int | None:
        """Return the processed offset for a heartbeat."""
        ...

    def on_disconnect(self) -> None:
        """Note that the connection is lost."""
        ...


class _Progress:
    """Progress of one connection: its hello, its welcome, its first outcomes."""

    def __init__(self) -> None:
        self.welcome_pages: list[Welcome] = []  # of an incomplete answer to a hello
        self.was_welcomed = False
        self.has_outcomes = False  # or other frames that show that the service works


class ReconnectingLink:
    """Keeps one connection to a service, and replaces it when it is lost.

    *Resources*: one connection, two tasks. *Errors*: `run` raises the reason why it cannot go on.
    """

    def __init__(
        self,
        connector: Connector,
        protocol: LinkProtocol,
        *,
        warns: bool = True,
    ) -> None:
        """`connector`: an open one. `warns`: log a warning while no service answers."""
        self.welcomed = anyio.Event()
        """Set once a service has answered."""
        self.reconnects = 0
        self.cause: Exception | None = None
        """The reason why there is no connection at present."""
        self._connector = connector
        self._protocol = protocol
        self._now = connector.world.clock.now
        self._randomness = connector.world.randomness.fork("client")
        self._outage = Outage(connector.addresses) if warns else None
        self._wakeup = anyio.Event()
        self._last_address: Address | None = None  # the last one that answered
        self._progress = _Progress()
        self._faults = 0

    def notify(self) -> None:
        """Wake the link: there may be something to send."""
        self._wakeup.set()

    async def run(self) -> None:
        """Keep a connection until cancelled. Raises Unreachable, Refused, UsageError.

        Before the first answer, raises Misconfigured as soon as all addresses, one after the other, have
        failed because of the configuration.
        """
        backoff, attempt = Backoff(), 0
        addresses, settings = self._connector.addresses, self._connector.settings
        address_faults, last_warning = AddressFaults(len(addresses)), ""
        since, limit_s = self._now(), settings.open_timeout_s
        while True:
            address = addresses[attempt % len(addresses)]
            after_s = 0.0
            try:
                cause = await self._connect(address)
            except Reconnect as reconnect:
                if reconnect.is_requested:
                    since, limit_s = self._now(), settings.reconnect_timeout_s
                    continue
                after_s = reconnect.after_s
                cause = reconnect.cause or ConnectionError("the service asks to reconnect")
            if not self.welcomed.is_set():
                address_faults.note(cause)  # raises if no address can work: the caller of `run` reports it
            if isinstance(cause, Misconfigured) and str(cause) != last_warning:
                last_warning = str(cause)
                logger.warning("%s", cause)  # the text names the address
            else:
                logger.info("%s: %s", address, cause)
            self.cause = cause
            if self._progress.was_welcomed:
                since, limit_s = self._now(), settings.reconnect_timeout_s
                self.reconnects += 1
            if self._progress.has_outcomes:
                backoff.reset()
                self._faults = 0
            attempt += 1
            since_s = self._now() - since
            if since_s >= limit_s:
                raise self._final_error(limit_s, cause) from None
            if self._outage is not None and str(cause) != last_warning:
                self._outage.on_silence(cause, since_s, limit_s - since_s)
            if attempt % len(addresses) == 0 or after_s:
                await anyio.sleep(max(after_s, backoff.next_s(self._randomness.random())))

    async def _connect(self, address: Address) -> Exception:
        """Run one connection until it ends; return the reason why it ended."""
        self._progress = _Progress()
        try:
            stream = await self._connector.connect(address)
        except (OSError, TimeoutError, Misconfigured) as error:
            return error
        try:
            await self._run_session(stream, address)
        except (OSError, Misconfigured) as error:
            return error
        except ProtocolError as error:
            self._faults += 1
            if self._faults >= FAULTS_MAX:
                raise
            return error
        finally:
            self._protocol.on_disconnect()
            await stream.aclose()
        raise AssertionError("a session ends only by an error")

    async def _run_session(self, stream: Stream, address: Address) -> None:
        session = self._connector.make_session(address)
        errors: list[Exception] = []
        async with anyio.create_task_group() as tasks:

            async def guarded(is_reader: bool) -> None:
                try:
                    if is_reader:
                        await self._read(stream, session, address)
                    else:
                        await self._write(stream, session)
                except (OSError, DeltaPropError, Reconnect) as error:  # a task group would wrap it
                    errors.append(error)
                    tasks.cancel_scope.cancel()

            tasks.start_soon(guarded, False)
            await guarded(True)
        # The reader may have read the peer's reason for closing, while the writer got only an OSError.
        raise next((error for error in errors if not isinstance(error, OSError)), errors[0])

    async def _read(self, stream: Stream, session: Session, address: Address) -> None:
        connection = session.connection
        while True:
            with anyio.move_on_after(session.silence_left_s(self._now())) as scope:
                count = await stream.receive_into(connection.get_buffer())
            if scope.cancelled_caught:
                raise ConnectionError(f"{address} has been silent for too long")
            if not count:
                raise session.eof_error()
            connection.buffer_updated(count)
            now = self._now()
            for frame in session.frames(now):
                self._on_frame(frame, connection.last_frame_bytes, address, now)
            self.notify()

    def _on_frame(self, frame: Frame, size: int, address: Address, now: float) -> None:
        if isinstance(frame, Ack) and frame.welcome is not None:
            progress = self._progress
            progress.welcome_pages.append(frame.welcome)
            if frame.more:
                return
            welcome, progress.welcome_pages = join_pages(progress.welcome_pages), []
            assert isinstance(welcome, Welcome)
            self._protocol.on_welcome(welcome, same_address=self._last_address in (None, address))
            self._last_address, progress.was_welcomed, self.cause = address, True, None
            self.welcomed.set()
            if self._outage is not None:
                self._outage.on_answer()
        elif self._protocol.on_frame(frame, size, now):
            self._progress.has_outcomes = True

    async def _write(self, stream: Stream, session: Session) -> None:
        protocol = self._protocol
        _, hello = session.request(protocol.hello())
        await stream.send([hello])
        while True:
            now = self._now()
            parts = protocol.data_to_send(session, now) if session.is_open else ()
            if not parts:
                beat = session.make_heartbeat(now, protocol.processed_offset())
                parts = () if beat is None else (beat,)
            if parts:
                await stream.send(parts)
                session.on_sent(self._now())
                protocol.on_sent()
                continue
            self._wakeup = anyio.Event()
            wait_s = session.heartbeat_wait_s(now)
            protocol_wait_s = protocol.wait_s(now) if session.is_open else None
            wait_s = wait_s if protocol_wait_s is None else min(wait_s, protocol_wait_s)
            with anyio.move_on_after(max(wait_s, _WAIT_S_MIN)):
                await self._wakeup.wait()

    def _final_error(self, limit_s: float, cause: Exception) -> Exception:
        if isinstance(cause, Refused | UsageError):
            return cause
        names = ", ".join(map(str, self._connector.addresses))
        return Unreachable(
            f"none of {names} has answered for {limit_s:g} s (the last one: {_describe(cause)}): start the "
            "service or correct the address"
        )


def _describe(cause: Exception) -> str:
    return str(cause) or type(cause).__name__
