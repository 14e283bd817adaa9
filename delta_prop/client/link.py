"""A client's link to its service: connects, says hello, reads and writes, and comes back when it broke.

It knows how, never what: what is said and what an answer means is its user's, a producer or a subscriber.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Protocol

import anyio

from delta_prop.client.backoff import Backoff
from delta_prop.client.errors import Reconnect, Unreachable
from delta_prop.client.outage import Outage
from delta_prop.client.session import Session
from delta_prop.misconfigured import Lasting, Misconfigured
from delta_prop_wire.errors import DeltaPropError, PeerError, Refused, UsageError
from delta_prop_wire.frames import Ack, Welcome
from delta_prop_wire.requests import joined

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Buffer

    from delta_prop.client.addresses import Address
    from delta_prop.client.settings import ClientSettings
    from delta_prop.ports import Network, Stream, Tls, World
    from delta_prop_wire.frames import Frame, Hello

logger = logging.getLogger("delta_prop.client")

FAULTS_MAX = 5
"""Connections in a row on which a service may send what breaks the protocol."""
_WAIT_S_MIN = 0.001
"""Below that a clock may not tell the end of a wait from its beginning."""


class User(Protocol):
    """Who talks over a link. What raises DeltaPropError ends the link, Reconnect this connection."""

    def hello(self) -> Hello:
        """What opens a connection."""
        ...

    def welcomed(self, welcome: Welcome, *, same_address: bool) -> None:
        """A hello was answered; `same_address`: from where the one before was."""
        ...

    def take(self, frame: Frame, size: int, now: float) -> bool:
        """A frame of so many bytes came; whether it brought something forward."""
        ...

    def to_send(self, session: Session, now: float) -> Sequence[Buffer]:
        """What is to be sent now, within bounds; nothing: ask again when rung."""
        ...

    def sent(self) -> None:
        """What `to_send` gave is on its way."""
        ...

    def wait_s(self, now: float) -> float | None:
        """When `to_send` may have something though nobody rings."""
        ...

    def dealt_with(self) -> int | None:
        """What a heartbeat says."""
        ...

    def disconnected(self) -> None:
        """The connection is gone."""
        ...


class Link:
    """*Resources*: one connection, two tasks. *Errors*: `run` raises why it cannot go on."""

    def __init__(
        self,
        addresses: Sequence[Address],
        user: User,
        *,
        world: World,
        network: Network,
        tls: Tls | None,
        settings: ClientSettings,
        warns: bool = True,
    ) -> None:
        """`warns`: say so in the log while no service answers."""
        self.welcomed = anyio.Event()
        """Set once a service has answered."""
        self.reconnects = 0
        self.cause: Exception | None = None
        """The reason why there is no connection at present."""
        self._addresses = addresses
        self._user = user
        self._now = world.clock.now
        self._chance = world.randomness.fork("client").random
        self._network = network
        self._tls = tls
        self._settings = settings
        self._outage = Outage(addresses) if warns else None
        self._bell = anyio.Event()
        self._last: Address | None = None  # that answered
        self._pages: list[Welcome] = []  # of an answer to a hello that is not whole yet
        self._got_on = self._answered = False  # on this connection
        self._faults = 0

    def ring(self) -> None:
        """There may be something to send."""
        self._bell.set()

    async def run(self) -> None:
        """Keep a connection until cancelled. Raises Unreachable, Refused, UsageError.

        Before a service has answered, what cannot work as it is configured ends it at once.
        """
        backoff, turn = Backoff(), 0
        lasting, warned = Lasting(len(self._addresses)), ""
        since, limit_s = self._now(), self._settings.open_s_max
        while True:
            address = self._addresses[turn % len(self._addresses)]
            after_s = 0.0
            try:
                cause = await self._connect(address)
            except Reconnect as again:
                after_s, cause = again.after_s, again.cause or ConnectionError("it asked to connect again")
            if not self.welcomed.is_set():
                lasting.note(cause)  # what it raises its caller tells
            if isinstance(cause, Misconfigured) and str(cause) != warned:
                warned = str(cause)
                logger.warning("%s", cause)  # which names the address
            else:
                logger.info("%s: %s", address, cause)
            self.cause = cause
            if self._answered:
                since, limit_s = self._now(), self._settings.offline_s_max
                self.reconnects += 1
            if self._got_on:
                backoff.reset()
                self._faults = 0
            turn += 1
            since_s = self._now() - since
            if since_s >= limit_s:
                raise self._unreachable(limit_s, cause) from None
            if self._outage is not None and str(cause) != warned:
                self._outage.lasts(cause, since_s, limit_s - since_s)
            if turn % len(self._addresses) == 0 or after_s:
                await anyio.sleep(max(after_s, backoff.next_s(self._chance())))

    async def _connect(self, address: Address) -> Exception:
        """One connection, from its beginning to its end; returns why it ended."""
        self._answered = self._got_on = False
        try:
            stream = await self._network.connect(
                address.host, address.port, tls=self._tls, timeout_s=self._settings.connect_s_max
            )
        except (OSError, TimeoutError, Misconfigured) as error:
            return error
        try:
            await self._converse(stream, address)
        except (OSError, Misconfigured) as error:
            return error
        except PeerError as error:
            self._faults += 1
            if self._faults >= FAULTS_MAX:
                raise
            return error
        finally:
            self._user.disconnected()
            await stream.aclose()
        raise AssertionError("a conversation ends by an error")

    async def _converse(self, stream: Stream, address: Address) -> None:
        session = Session(self._settings, self._now(), address, secured=self._tls is not None)
        broken: list[Exception] = []
        async with anyio.create_task_group() as tasks:

            async def guarded(read: bool) -> None:
                try:
                    if read:
                        await self._read(stream, session, address)
                    else:
                        await self._write(stream, session)
                except (OSError, DeltaPropError, Reconnect) as error:  # a task group would wrap it
                    broken.append(error)
                    tasks.cancel_scope.cancel()

            tasks.start_soon(guarded, False)
            await guarded(True)
        # The reader knows better: it may have read why the other side ended, when the writer only saw that.
        raise next((one for one in broken if not isinstance(one, OSError)), broken[0])

    async def _read(self, stream: Stream, session: Session, address: Address) -> None:
        connection = session.connection
        while True:
            with anyio.move_on_after(session.patience_s(self._now())) as scope:
                count = await stream.receive_into(connection.buffer())
            if scope.cancelled_caught:
                raise ConnectionError(f"{address} has been silent for too long")
            if not count:
                raise session.ended()
            connection.received(count)
            now = self._now()
            for frame in session.frames(now):
                self._take(frame, connection.frame_bytes, address, now)
            self.ring()

    def _take(self, frame: Frame, size: int, address: Address, now: float) -> None:
        if isinstance(frame, Ack) and frame.welcome is not None:
            self._pages.append(frame.welcome)
            if frame.more:
                return
            welcome, self._pages = joined(self._pages), []
            assert isinstance(welcome, Welcome)
            self._user.welcomed(welcome, same_address=self._last in (None, address))
            self._last, self._answered, self.cause = address, True, None
            self.welcomed.set()
            if self._outage is not None:
                self._outage.ended()
        elif self._user.take(frame, size, now):
            self._got_on = True

    async def _write(self, stream: Stream, session: Session) -> None:
        user = self._user
        self._pages = []
        _, hello = session.request(user.hello())
        await stream.send([hello])
        while True:
            now = self._now()
            parts = user.to_send(session, now) if session.open else ()
            if not parts:
                beat = session.beat(now, user.dealt_with())
                parts = () if beat is None else (beat,)
            if parts:
                await stream.send(parts)
                session.said(self._now())
                user.sent()
                continue
            self._bell = anyio.Event()
            wait_s, asked = session.beat_wait_s(now), user.wait_s(now) if session.open else None
            wait_s = wait_s if asked is None else min(wait_s, asked)
            with anyio.move_on_after(max(wait_s, _WAIT_S_MIN)):
                await self._bell.wait()

    def _unreachable(self, limit_s: float, cause: Exception) -> Exception:
        if isinstance(cause, Refused | UsageError):
            return cause
        names = ", ".join(map(str, self._addresses))
        return Unreachable(
            f"none of {names} has answered for {limit_s:g} s (the last one: {_told(cause)}): start the "
            "service or correct the address"
        )


def _told(cause: Exception) -> str:
    return str(cause) or type(cause).__name__
