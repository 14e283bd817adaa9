"""A producer for scripts and executors: plain calls on blocking sockets, no event loop and no thread.

It does its work within its calls, so a connection that rests between them for long is made anew by the next.
"""

from __future__ import annotations

import random
import selectors
import socket
import ssl
import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING

from delta_prop.checks import (
    cause_of,
    check_columns,
    check_deltas,
    looked_over,
    timeout_or,
    with_parents,
)
from delta_prop.client.addresses import parse_addresses
from delta_prop.client.arguments import check_connection, member_of, settings_of
from delta_prop.client.backoff import Backoff
from delta_prop.client.errors import Reconnect, Unreachable
from delta_prop.client.offer import Columns, Offer
from delta_prop.client.outage import Outage
from delta_prop.client.producing import Producing
from delta_prop.client.refusing import late, left_over
from delta_prop.client.session import Session
from delta_prop.misconfigured import FIRST_BYTES_MAX, Lasting, Misconfigured, of_tls
from delta_prop.published import Published
from delta_prop.tls_contexts import client_context
from delta_prop.unknown_hosts import unknown_host
from delta_prop_wire.bounds import check_level
from delta_prop_wire.delta import DEFAULT_NAMESPACE, Kind, Priority, Source
from delta_prop_wire.errors import PeerError, Refused, UsageError
from delta_prop_wire.frames import Ack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from types import TracebackType

    from numpy.typing import ArrayLike
    from typing_extensions import Buffer

    from delta_prop.checks import Cause
    from delta_prop.client.addresses import Address
    from delta_prop.client.counts import Counts
    from delta_prop.client.offer import Place
    from delta_prop.client.settings import ClientSettings
    from delta_prop.ports import Tls
    from delta_prop_wire.block import Block
    from delta_prop_wire.delta import AckLevel, Delta, Dot
    from delta_prop_wire.frames import JobPart

PUSH_ROWS = 1_000
"""So many rows may be offered before a call looks at the connection by itself."""
CHANCE = random.SystemRandom()
"""Of waits. Python's own generator is the program's, which may have seeded it."""
FAULTS_MAX = 5


class SyncReceipt:
    """What became of an offer. Only calls of its producer bring it on."""

    def __init__(self, producer: SyncProducer) -> None:
        self._producer = producer
        self.outcome: Published | Refused | None = None
        self.offer: Offer | None = None

    @property
    def done(self) -> bool:
        """Whether the outcome is known."""
        return self.outcome is not None

    def result(self, timeout_s: float | None = None) -> Published:
        """Wait for the outcome. Raises Refused."""
        return self._producer.result_of(self, timeout_s)


class SyncProducer:
    """`with SyncProducer("host:port", name="job") as p: p.publish(delta)`; `Producer` says what is promised.

    For one thread. `offer` sends many without waiting for each; `flush`, `publish` and the end of the block
    wait. What a call raises once the producer cannot go on (fenced, not allowed), every later one raises.
    """

    def __init__(
        self,
        addresses: str | Iterable[str],
        *,
        name: str,
        token: str | None = None,
        tls: Tls | None = None,
        ack_level: AckLevel | str | None = None,
        source: Source = Source.LOCAL,
        log_id: bytes | None = None,
        settings: ClientSettings | None = None,
        job: JobPart | None = None,
        priority: Priority = Priority.NORMAL,
    ) -> None:
        """`job`: have all this kept aside, as a part of a job that is decided later; see `client.jobs`. Each
        attempt of a part has a number of its own, and one priority; its name is `JOB/PART`.
        `priority`: that of which `watermark` tells before something is offered. `log_id`: the only log that
        the service may have.
        """
        self.name = name
        self.settings = settings_of(settings)
        check_connection(token, tls)
        self._addresses = parse_addresses(addresses)
        self._context = None if tls is None else client_context(tls)
        self._server_name = None if tls is None else tls.server_name
        self._producing = Producing(
            name,
            token=token,
            source=member_of("source", source, Source),
            ack_level=None if ack_level is None else check_level(ack_level),
            chance=CHANCE.random,
            log_id=log_id,
            job=job,
            priority=priority,
        )
        self._out = self._producing.out
        self._state = "not open yet"
        self._wire: Wire | None = None
        self._turn = 0
        self._backoff = Backoff()
        self._not_before = 0.0
        self._last: Address | None = None
        self._cause: Exception | None = None
        self._outage = Outage(self._addresses)
        self._offline_at: float | None = None
        """When the first try began since a service answered last."""
        self._faults = 0
        self._lasting = Lasting(len(self._addresses))
        self._offered_rows = 0
        self.waited_s = 0.0
        """How long its calls have waited for the service: for credit, for room, for outcomes."""

    # --- life

    def __enter__(self) -> SyncProducer:
        if self._state != "not open yet":
            raise UsageError(f"this producer is {self._state}: make another one")
        self._state = "open"
        try:
            if not self._drive(lambda: self._last is not None, self.settings.open_s_max):
                raise self._unreachable(self.settings.open_s_max)
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        left = 0
        try:
            if error is None or isinstance(error, Exception):
                with suppress(Refused, UsageError):
                    self._drive(lambda: not self._out.open_offers, self.settings.close_s_max)
            left = self._out.open_offers
        finally:
            self._close()
        if left and error is None:
            raise left_over(self.name, left)

    def _close(self) -> None:
        self._state = "closed"
        self._disconnect()
        self._out.close()

    # --- what programs call

    @property
    def log_id(self) -> bytes | None:
        """The log of the service; None before it has answered."""
        return self._out.log_id

    @property
    def open_offers(self) -> int:
        """Calls whose outcome is not known yet."""
        return self._out.open_offers

    @property
    def waits_for(self) -> Exception | None:
        """The obstacle for what is open: why there is no connection, or a refusal that may pass."""
        return (self._cause if self._wire is None else None) or self._out.waits_for

    def offer(self, *deltas: Delta, after: Sequence[SyncReceipt | Cause] = ()) -> SyncReceipt:
        """Send deltas of one priority without waiting for the outcome. Waits for room where too much is open.

        Raises InvalidDelta, UsageError; Refused where there is no room in time, or why nothing goes any more.
        """
        priority, simple = looked_over(deltas)
        return self._offer(priority, deltas, after, self.settings.publish_s_max, simple=simple)

    def publish(
        self, *deltas: Delta, after: Sequence[SyncReceipt | Cause] = (), timeout_s: float | None = None
    ) -> Published:
        """Send and wait for the acknowledgement. Raises Refused, which says whether it may have happened."""
        limit_s = timeout_or(timeout_s, self.settings.publish_s_max)
        began = time.monotonic()
        priority, simple = looked_over(deltas)
        receipt = self._offer(priority, deltas, after, limit_s, simple=simple)
        return self.result_of(receipt, max(limit_s - (time.monotonic() - began), 0.0), limit_s)

    def publish_many(
        self,
        ids: Sequence[str],
        matrix: ArrayLike,
        *,
        namespace: str = DEFAULT_NAMESPACE,
        kind: Kind = Kind.CREATE,
        priority: Priority = Priority.NORMAL,
        timeout_s: float | None = None,
    ) -> Published:
        """Publish whole vectors as columns: row i of `matrix` (n × dimension) is the vector `ids[i]`."""
        rows = check_columns(ids, matrix, namespace=namespace, kind=kind, priority=priority)
        limit_s = timeout_or(timeout_s, self.settings.publish_s_max)
        columns = Columns(ids, rows, namespace, kind)
        receipt = self._offer(priority, (), (), limit_s, columns=columns)
        return self.result_of(receipt, limit_s)

    def offer_numbered(self, counter: int, delta: Delta, after_s: float | None = None) -> SyncReceipt:
        """Send a delta under a counter of the caller's, which rises within a priority; see `Producer`."""
        limit_s = timeout_or(after_s, self.settings.publish_s_max, "after_s")
        return self._offer(check_deltas([delta]), [delta], (), limit_s, counter=counter)

    def offer_block(
        self,
        block: Block,
        counter: int | None = None,
        *,
        priority: Priority = Priority.NORMAL,
        after_s: float | None = None,
    ) -> SyncReceipt:
        """Send columns of many deltas, as they are, without waiting for the outcome; they share one fate.

        With `counter` the caller numbers: rows have `counter`, `counter` + 1 and so on, above all that were
        given in this priority. Its rows are not looked at here: who made them has. Raises as `offer` does.
        """
        limit_s = timeout_or(after_s, self.settings.publish_s_max, "after_s")
        return self._offer(priority, (), (), limit_s, columns=block, counter=counter)

    def watermark(self, priority: Priority = Priority.NORMAL) -> int:
        """The counter up to which the service had dealt with this producer's deltas when it said hello."""
        return self._out.watermark(priority)

    def flush(self, timeout_s: float | None = None) -> None:
        """Wait until everything offered has its outcome. Raises TimeoutError, or why nothing goes."""
        limit_s = timeout_or(timeout_s, self.settings.delivery_s_max)
        if not self._drive(lambda: not self._out.open_offers, limit_s):
            raise TimeoutError(f"{self._out.open_offers} calls have no outcome after {limit_s:g} s")

    def result_of(
        self, receipt: SyncReceipt, timeout_s: float | None = None, told_s: float | None = None
    ) -> Published:
        """Wait for a receipt's outcome. Raises Refused."""
        limit_s = timeout_or(timeout_s, self.settings.delivery_s_max)
        if receipt.outcome is None and not self._drive(lambda: receipt.done, limit_s):
            offer = receipt.offer
            assert offer is not None
            gone = self._out.give_up(offer)
            receipt.outcome = late(offer, limit_s if told_s is None else told_s, gone=gone)
        outcome = receipt.outcome
        if isinstance(outcome, Published):
            return outcome
        assert outcome is not None
        raise outcome

    def statistics(self) -> Counts:
        """What was sent and what became of it, since this producer was made."""
        return self._out.counts

    # --- helpers

    def _offer(
        self,
        priority: Priority,
        deltas: Sequence[Delta],
        after: Sequence[SyncReceipt | Cause],
        limit_s: float,
        *,
        columns: Columns | Block | None = None,
        counter: int | None = None,
        simple: bool = False,
    ) -> SyncReceipt:
        if self._state != "open":
            raise UsageError(f"producer {self.name!r} is {self._state}: use it inside its `with`")
        causes, places = _named(after)
        if len(deltas) and causes:
            deltas = with_parents(deltas, causes)
        receipt = SyncReceipt(self)

        def tell(outcome: Published | Refused) -> None:
            if receipt.outcome is None:
                receipt.outcome = outcome

        simple = simple and not after
        offer = receipt.offer = Offer(
            priority, deltas, tell, columns=columns, after=places, counter=counter, simple=simple
        )
        if not self._out.has_room:
            self._drive(lambda: self._out.has_room, limit_s)
        self._out.offer(offer, time.monotonic())
        self._offered_rows += offer.count
        if self._offered_rows >= PUSH_ROWS:
            self._drive(lambda: True, 0.0)
        return receipt

    def _drive(self, until: Callable[[], bool], limit_s: float) -> bool:
        """Send, take in and reconnect until something is so, at least one round; whether it is in time.

        Raises why nothing goes any more.
        """
        deadline = time.monotonic() + limit_s
        self._offered_rows = 0
        while True:
            self._out.check_open()
            now = time.monotonic()
            self._out.expire(now, self.settings.delivery_s_max)
            try:
                self._round(now, deadline, until)
            except Reconnect as again:
                self._lost(
                    again.cause or ConnectionError("the service asked to connect again"), again.after_s
                )
            except (OSError, Misconfigured) as error:
                self._lost(error)
            except PeerError as error:
                self._faults += 1
                if self._faults >= FAULTS_MAX:
                    self._out.fail(Refused(error.code, error.message))
                self._lost(error)
            except (Refused, UsageError) as failure:
                self._disconnect()
                self._out.fail(failure)
            if until():
                return True
            if time.monotonic() >= deadline:
                self._out.check_open()
                return False
            if self._wire is None and self._offline_at is not None:
                now = time.monotonic()
                self._outage.lasts(self._cause, now - self._offline_at, deadline - now)

    def _round(self, now: float, deadline: float, until: Callable[[], bool]) -> None:
        """Connect, or send and take in once. Raises why the connection is of no use any more."""
        wire = self._wire
        if wire is None:
            if now < self._not_before:
                time.sleep(max(min(self._not_before, deadline) - now, 0.0))
            else:
                self._connect(now, deadline)
            return
        session = wire.session
        self._take_in(wire, wire.read())  # a service that has ended meanwhile is not sent to
        now = time.monotonic()
        wait_s = min(deadline - now, session.patience_s(now))
        if session.open:
            wire.send(self._producing.to_send(session, now))
            beat = session.beat(now)
            wire.send(() if beat is None else (beat,))
            asked = self._producing.wait_s(now)
            wait_s = min(wait_s, session.beat_wait_s(now), wait_s if asked is None else asked)
        began = time.monotonic()
        count = wire.step(0.0 if until() else max(wait_s, 0.0))
        self.waited_s += time.monotonic() - began
        self._take_in(wire, count)
        if session.patience_s(time.monotonic()) <= 0:
            raise ConnectionError(f"{wire.address} has been silent for too long")

    def _take_in(self, wire: Wire, count: int) -> None:
        """What came, if anything did."""
        session, now = wire.session, time.monotonic()
        for frame in session.frames(now) if count else ():
            if isinstance(frame, Ack) and frame.welcome is not None:
                self._producing.welcomed(frame.welcome, same_address=self._last in (None, wire.address))
                self._last, self._offline_at = wire.address, None
                self._outage.ended()
            elif self._producing.take(frame, session.connection.frame_bytes, now):
                self._backoff.reset()
                self._faults = 0

    # --- the connection

    def _connect(self, now: float, deadline: float) -> None:
        address = self._addresses[self._turn % len(self._addresses)]
        self._turn += 1
        if self._turn % len(self._addresses) == 0:
            self._not_before = now + self._backoff.next_s(CHANCE.random())
        if self._offline_at is None:
            self._offline_at = now
        timeout_s = min(self.settings.connect_s_max, max(deadline - now, 0.05))
        wire = Wire(address, timeout_s, self._context, self._server_name, self.settings)
        self._wire = wire
        wire.send([wire.session.request(self._producing.hello())[1]])

    def _lost(self, cause: Exception, after_s: float = 0.0) -> None:
        self._cause = cause
        self._disconnect()
        if self._last is None:  # no service has answered yet
            try:
                self._lasting.note(cause)
            except Misconfigured as fault:
                self._out.fail(fault)
        self._not_before = max(self._not_before, time.monotonic() + after_s)

    def _disconnect(self) -> None:
        wire, self._wire = self._wire, None
        if wire is not None:
            wire.close()
        self._producing.disconnected()

    def _unreachable(self, limit_s: float) -> Exception:
        if isinstance(self._cause, Refused | UsageError):
            return self._cause
        names = ", ".join(map(str, self._addresses))
        told = f"none of {names} has answered for {limit_s:g} s (the last one: {self._cause})"
        return Unreachable(f"{told}: start the service or correct the address")


class Wire:
    """One connected socket and what is said over it. Raises OSError, Misconfigured."""

    def __init__(
        self,
        address: Address,
        timeout_s: float,
        context: ssl.SSLContext | None,
        server_name: str | None,
        settings: ClientSettings,
    ) -> None:
        self.address = address
        self._name = server_name or address.host
        sock = _connected(address, timeout_s)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if context is not None:
                sock = context.wrap_socket(sock, server_hostname=self._name, do_handshake_on_connect=False)
                self._shake_hands(sock)
            sock.setblocking(False)
        except BaseException:
            sock.close()
            raise
        self._socket = sock
        self._unsent: deque[memoryview] = deque()
        self._selector = selectors.DefaultSelector()
        self._selector.register(sock, selectors.EVENT_READ)
        self.session = Session(settings, time.monotonic(), address, secured=context is not None)

    def send(self, parts: Iterable[Buffer]) -> None:
        """Have these sent by the next steps."""
        self._unsent.extend(map(memoryview, parts))

    def step(self, wait_s: float) -> int:
        """Send what the system takes, receive what is there, waiting for either; how many bytes came.

        Raises OSError, Misconfigured.
        """
        self._write()
        count = self.read()
        if count:
            return count
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._unsent else 0)
        self._selector.modify(self._socket, wanted)
        if not self._selector.select(wait_s):
            return 0
        self._write()
        return self.read()

    def read(self) -> int:
        """Receive what is there, without waiting; how many bytes. Raises OSError, Misconfigured."""
        connection = self.session.connection
        try:
            count = self._socket.recv_into(connection.buffer())
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return 0
        except ssl.SSLError as error:
            raise of_tls(error, str(self.address), self._name, b"") or error from error
        if not count:
            raise self.session.ended()
        connection.received(count)
        return count

    def close(self) -> None:
        """End it."""
        self._selector.close()
        with suppress(OSError):
            self._socket.close()

    def _shake_hands(self, sock: ssl.SSLSocket) -> None:
        try:
            sock.do_handshake()
        except ssl.SSLError as error:
            fault = of_tls(error, str(self.address), self._name, _first_bytes(sock, error))
            raise fault or error from error

    def _write(self) -> None:
        while self._unsent:
            part = self._unsent[0]
            try:
                sent = self._socket.send(part)
            except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
                return
            self.session.said(time.monotonic())
            if sent < len(part):
                self._unsent[0] = part[sent:]
            else:
                self._unsent.popleft()


def _connected(address: Address, timeout_s: float) -> socket.socket:
    try:
        return socket.create_connection(address, timeout_s)
    except (socket.gaierror, UnicodeError) as error:
        raise unknown_host(address.host, error) or error from None


def _first_bytes(sock: ssl.SSLSocket, error: ssl.SSLError) -> bytes:
    """Read the answer of a server that does not speak TLS, which has taken five bytes of it."""
    if error.reason != "WRONG_VERSION_NUMBER":
        return b""
    with suppress(OSError):
        rest = socket.socket.recv(sock, FIRST_BYTES_MAX, socket.MSG_DONTWAIT)
        return b"HTTP/" + rest if rest.startswith((b"1.0 ", b"1.1 ")) else b""
    return b""


def _named(after: Sequence[SyncReceipt | Cause]) -> tuple[list[Dot | bytes], list[Place]]:
    causes: list[Dot | bytes] = []
    places: list[Place] = []
    for one in after:
        if not isinstance(one, SyncReceipt):
            causes.append(cause_of(one))
        elif one.outcome is None and one.offer is not None:
            places.append(one.offer.place)
        else:
            causes.append(cause_of(one.result()))
    return causes, places
