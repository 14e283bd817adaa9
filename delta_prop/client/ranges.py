"""Reads a range of a log over the network by blocking calls: for executors and scripts.

No event loop and no thread. A connection that is idle for long between two batches is reopened for the next.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from delta_prop.client.addresses import Address, parse_addresses
from delta_prop.client.arguments import check_connection, settings_or_default
from delta_prop.client.backoff import Backoff
from delta_prop.client.blocking_connection import RNG, BlockingConnection
from delta_prop.client.errors import Reconnect, Unreachable
from delta_prop.client.producer_protocol import check_staging
from delta_prop.client.range_fetch import CREDIT_BYTES, RangeFetch
from delta_prop.client.settings import ClientSettings
from delta_prop.client.sync_producer import FAULTS_MAX
from delta_prop.platform.connection_faults import AddressFaults, Misconfigured
from delta_prop.platform.ports import Tls
from delta_prop.platform.tls_contexts import client_context
from delta_prop_wire.batch import LoggedBatch
from delta_prop_wire.errors import ProtocolError, Refused, UsageError
from delta_prop_wire.frames import (
    Ack,
    Credit,
    Hello,
    Nack,
    OriginClaim,
    Start,
    StartAt,
    Subscription,
    Welcome,
)
from delta_prop_wire.spec import ErrorCode
from delta_prop_wire.stamp import DEFAULT_LOG, LogName
from delta_prop_wire.topics import ALL, Topic

if TYPE_CHECKING:
    T = TypeVar("T")

_CLIENT_NAME = "reads a range"
_NO_CREDIT = Credit(0, 0)


class LogBounds(NamedTuple):
    """The bounds of a log: it has the offsets from `start_offset` up to `end_offset` (exclusive)."""

    log_id: bytes
    epoch: int
    start_offset: int
    end_offset: int


class RangeReader:
    """Reads a partition of one service, by any of its addresses. Holds no connection."""

    def __init__(
        self,
        addresses: str | Iterable[str],
        *,
        token: str | None = None,
        tls: Tls | None = None,
        settings: ClientSettings | None = None,
        partition: LogName = DEFAULT_LOG,
    ) -> None:
        self._addresses = parse_addresses(addresses)
        self._partition = partition
        self._token = token
        self._tls = tls
        check_connection(token, tls)
        self._settings = settings_or_default(settings)

    def bounds(self) -> LogBounds:
        """Return the offsets that can be read now. Raises Refused, Unreachable."""

        def ask(connection: _OpenConnection) -> LogBounds:
            log = connection.welcome.log
            assert log is not None, "services of this protocol report their log"
            earliest = connection.resolve_start(Start(StartAt.EARLIEST))
            return LogBounds(log.log_id, log.epoch, earliest, log.next_offset)

        return self._query(ask)

    def offset_at(self, time_us: int) -> int:
        """Return the first offset that was logged at a time or later. Raises Refused, Unreachable."""
        return self._query(lambda connection: connection.resolve_start(Start(StartAt.TIME, time_us)))

    def check_can_publish(self, *, staging: bool = False) -> None:
        """Raise Refused if the service does not know the token, or the token may not publish.

        With `staging`, also raise UsageError if the service has no jobs. Raises Unreachable.
        """

        def ask(connection: _OpenConnection) -> None:
            if staging:
                check_staging(connection.welcome)
            if not connection.can_publish:
                raise Refused(
                    ErrorCode.UNAUTHORIZED,
                    "this token may read, not publish: give one that was made with --publish",
                )

        self._query(ask)

    def watermark(self, origin: int, epoch: int) -> int:
        """Return the highest processed counter of an origin. Raises Refused, Unreachable.

        `epoch`: that of the origin's current producer, so that this query does not fence the producer. Raises
        Refused (FENCED) if there is a later epoch.
        """

        def ask(connection: _OpenConnection) -> int:
            return next(grant.watermark for grant in connection.welcome.origins if grant.origin == origin)

        return self._query(ask, OriginClaim(origin, epoch))

    def read(
        self,
        start: int,
        end: int,
        topics: Sequence[Topic] = (ALL,),
        *,
        log: tuple[bytes, int] | None = None,
        credit_bytes: int = CREDIT_BYTES,
    ) -> Iterator[LoggedBatch]:
        """Yield the rows of `topics` from offset `start` up to `end` (exclusive), each once, in order.

        `log`: the id and the epoch of the log to which the offsets belong. A batch of which only some rows
        are read is sliced, and carries their offsets. Raises Refused (CURSOR_TOO_OLD if the log has removed
        the next rows), UsageError if the service has another log, Unreachable.
        """
        fetch = RangeFetch(start, end, topics, log=log, credit_bytes=credit_bytes)
        retries = _RetryState(self._settings, self._addresses)
        while not fetch.done:
            try:
                with self._connect(retries) as connection:
                    fetch.on_welcome(connection.welcome)
                    connection.send(fetch.make_requests(connection.connection.session))
                    for batch in _read_batches(connection, fetch):
                        retries.on_success()
                        yield batch
            except (OSError, ProtocolError, Reconnect, Misconfigured) as error:
                retries.wait_retry(error)

    # --- helpers

    def _query(self, request: Callable[[_OpenConnection], T], claim: OriginClaim | None = None) -> T:
        retries = _RetryState(self._settings, self._addresses)
        while True:
            try:
                with self._connect(retries, claim) as connection:
                    return request(connection)
            except (OSError, ProtocolError, Reconnect, Misconfigured) as error:
                retries.wait_retry(error)

    @contextmanager
    def _connect(self, retries: _RetryState, claim: OriginClaim | None = None) -> Iterator[_OpenConnection]:
        """Open a connection whose hello was answered."""
        address = self._addresses[retries.next_index() % len(self._addresses)]
        context = None if self._tls is None else client_context(self._tls)
        name = None if self._tls is None else self._tls.server_name
        connection = BlockingConnection(
            address, self._settings.connect_timeout_s, context, name, self._settings
        )
        try:
            stream, partition = self._partition
            hello = Hello(
                token=self._token,
                client=_CLIENT_NAME,
                origins=() if claim is None else (claim._replace(stream=stream),),
                stream=stream,
                partition=partition,
            )
            yield _OpenConnection(connection, hello)
        finally:
            connection.close()


class _RetryState:
    """Counts the attempts and faults so far, and decides when to retry and when to give up."""

    def __init__(self, settings: ClientSettings, addresses: Sequence[Address]) -> None:
        self._addresses = addresses
        self._address_faults = AddressFaults(len(addresses))
        self._limit_s = settings.open_timeout_s
        self._backoff = Backoff()
        self._index = -1
        self._faults = 0
        self._since = time.monotonic()

    def next_index(self) -> int:
        self._index += 1
        return self._index

    def on_success(self) -> None:
        self._backoff.reset()
        self._faults, self._since = 0, time.monotonic()

    def wait_retry(self, error: Exception) -> None:
        """Wait until the next attempt is due. Raises the last error if there is no further attempt."""
        self._address_faults.note(error)
        addresses = self._addresses
        wait_s, cause = 0.0, error
        if isinstance(error, Reconnect):
            wait_s, cause = error.after_s, error.cause or ConnectionError("the service asks to reconnect")
        elif isinstance(error, ProtocolError):
            self._faults += 1
            if self._faults >= FAULTS_MAX:
                raise Refused(error.code, error.message) from None
        if (self._index + 1) % len(addresses) == 0:
            wait_s = max(wait_s, self._backoff.next_s(RNG.random()))
        if time.monotonic() + wait_s - self._since >= self._limit_s:
            if isinstance(cause, Refused | UsageError):
                raise cause from None
            names = ", ".join(map(str, addresses))
            raise Unreachable(
                f"none of {names} has answered for {self._limit_s:g} s (the last one: {cause}): start the "
                "service or correct the address"
            ) from None
        time.sleep(wait_s)


class _OpenConnection:
    """A connection whose hello was answered."""

    def __init__(self, connection: BlockingConnection, hello: Hello) -> None:
        self.connection = connection
        ack = self._request(hello)
        assert ack.welcome is not None, "a hello is answered by a welcome"
        self.welcome: Welcome = ack.welcome
        self.can_publish = ack.credit is not None

    def resolve_start(self, start: Start) -> int:
        """Return the offset that a start resolves to."""
        granted = self._request(Subscription(1, (ALL,), start, _NO_CREDIT)).subscribed
        if granted is None:
            raise ConnectionError(f"{self.connection.address} sent an unexpected answer")
        return granted.start.next_offset

    def send(self, parts: Iterable[bytes]) -> None:
        """Queue bytes for the next step."""
        self.connection.send(parts)

    def step(self) -> None:
        """Send and receive until something arrives or a heartbeat is due. Raises OSError."""
        session, now = self.connection.session, time.monotonic()
        if session.silence_left_s(now) <= 0:
            raise ConnectionError(f"{self.connection.address} has been silent for too long")
        beat = session.make_heartbeat(now)
        self.connection.send(() if beat is None else (beat,))
        self.connection.step(max(min(session.silence_left_s(now), session.heartbeat_wait_s(now)), 0.0))

    def _request(self, request: Hello | Subscription) -> Ack:
        session = self.connection.session
        number, raw = session.request(request)
        self.connection.send([raw])
        while True:
            for frame in session.frames(time.monotonic()):
                if isinstance(frame, Nack) and (frame.correlation_id == number or not frame.sequence):
                    raise _nack_error(frame)
                if isinstance(frame, Ack) and frame.correlation_id == number and not frame.more:
                    return frame
            self.step()


def _nack_error(nack: Nack) -> Exception:
    refusal = nack.refusal()
    return Reconnect((refusal.retry_after_ms or 0) / 1000, refusal) if refusal.retryable else refusal


def _read_batches(connection: _OpenConnection, fetch: RangeFetch) -> Iterator[LoggedBatch]:
    session = connection.connection.session
    while True:
        for frame in session.frames(time.monotonic()):
            yield from fetch.on_frame(frame, session.connection.last_frame_bytes)
            if fetch.done:
                return
        connection.send(fetch.make_grant(session))
        connection.step()
