"""A producer for scripts and executors: blocking calls, no event loop and no thread.

It works only within its calls. A connection that is idle for long between two calls is reopened by the next.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING

from delta_prop.calls.argument_checks import (
    Dependency,
    check_columns,
    check_deltas,
    dependency_key,
    timeout_or_default,
    validate,
)
from delta_prop.calls.outcomes import PublishAck
from delta_prop.client.addresses import Address, parse_addresses
from delta_prop.client.arguments import check_connection, parse_member, settings_or_default
from delta_prop.client.backoff import Backoff
from delta_prop.client.blocking_connection import RNG, BlockingConnection
from delta_prop.client.counts import Counts
from delta_prop.client.errors import Reconnect, Unreachable
from delta_prop.client.facts import find_stream
from delta_prop.client.offer import Columns, Offer, PendingDot, make_offer
from delta_prop.client.outage import Outage
from delta_prop.client.partition_choice import DEFAULT_STREAM, PartitionChoice
from delta_prop.client.producer_protocol import ProducerProtocol
from delta_prop.client.refusals import offers_unacked, timed_out
from delta_prop.client.service_identity import check_requested_level
from delta_prop.client.settings import ClientSettings
from delta_prop.platform.connection_faults import AddressFaults, Misconfigured
from delta_prop.platform.ports import Tls
from delta_prop.platform.tls_contexts import client_context
from delta_prop_wire.block import Block
from delta_prop_wire.delta import DEFAULT_NAMESPACE, AckLevel, Delta, Dot, Kind, Priority, Source
from delta_prop_wire.errors import ProtocolError, Refused, UsageError
from delta_prop_wire.frames import Ack, JobPart
from delta_prop_wire.stamp import LogName

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

POLL_ROWS = 1_000
"""After this many offered rows, the call polls the connection."""
FAULTS_MAX = 5


class SyncReceipt:
    """The receipt of an offer; it gets the outcome during a call of its producer."""

    def __init__(self, producer: SyncProducer) -> None:
        self._producer = producer
        self.outcome: PublishAck | Refused | None = None
        self.offer: Offer | None = None

    @property
    def done(self) -> bool:
        """True once the outcome is known."""
        return self.outcome is not None

    def on_outcome(self, outcome: PublishAck | Refused) -> None:
        """Note the outcome, unless the caller has withdrawn the offer."""
        if self.outcome is None:
            self.outcome = outcome

    def result(self, timeout_s: float | None = None) -> PublishAck:
        """Wait for the outcome. Raises Refused."""
        return self._producer.result_of(self, timeout_s)


class SyncProducer:
    """`with SyncProducer("host:port", name="job") as p: p.publish(delta)`; the guarantees are `Producer`'s.

    For one thread. `offer` sends many without waiting for each; `flush`, `publish` and the end of the block
    wait. Once the producer cannot go on (fenced, not allowed), every later call raises the same error.
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
        stream: str | int = DEFAULT_STREAM,
        partition: int | None = None,
        log_id: bytes | None = None,
        settings: ClientSettings | None = None,
        job: JobPart | None = None,
        priority: Priority = Priority.NORMAL,
    ) -> None:
        """`job`: stage all deltas as a part of a job that is decided later; see `client.jobs`. Then `name`
        must be `JOB/PART`, each attempt needs a number of its own, and all deltas need the same priority.
        `ack_level`: as for `Producer`. `priority`: the priority whose watermark is known before something is
        offered. `stream`, `partition`: as for `Producer`. `log_id`: the only log that the partition may have.
        """
        self.name = name
        self.settings = settings_or_default(settings)
        check_connection(token, tls)
        self._dialer = _Dialer(
            parse_addresses(addresses), tls, self.settings, PartitionChoice(stream, partition)
        )
        self._protocol = ProducerProtocol(
            name,
            token=token,
            source=parse_member("source", source, Source),
            ack_level=check_requested_level(ack_level),
            log_id=log_id,
            job=job,
            priority=priority,
        )
        self._protocol.begin(RNG)
        self._producer_state = self._protocol.state
        self._state = "not open yet"
        self._connection: BlockingConnection | None = None
        self._last_address: Address | None = None
        self._cause: Exception | None = None
        self._troubles = _Troubles(self._dialer.addresses)
        self._offered_rows = 0
        self.waited_s = 0.0
        """Seconds for which calls have waited for the service: for credit, capacity or outcomes."""

    # --- opening and closing

    def __enter__(self) -> SyncProducer:
        if self._state != "not open yet":
            raise UsageError(f"this producer is {self._state}: create another one")
        self._state = "open"
        try:
            self._producer_state.bind(self._dialer.find_partition(self._protocol.token))
            if not self._run_until(lambda: self._last_address is not None, self.settings.open_timeout_s):
                raise self._final_error(self.settings.open_timeout_s)
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        unacked = 0
        try:
            if error is None or isinstance(error, Exception):
                with suppress(Refused, UsageError):
                    self._run_until(
                        lambda: not self._producer_state.in_flight_offers, self.settings.close_timeout_s
                    )
            unacked = self._producer_state.in_flight_offers
        finally:
            self._close()
        if unacked and error is None:
            raise offers_unacked(self.name, unacked)

    def _close(self) -> None:
        self._state = "closed"
        self._disconnect()
        self._producer_state.close()

    # --- calls

    @property
    def log_id(self) -> bytes | None:
        """The log of the service; None before it has answered."""
        return self._producer_state.log_id

    @property
    def in_flight_offers(self) -> int:
        """The number of calls that have no outcome yet."""
        return self._producer_state.in_flight_offers

    @property
    def waits_for(self) -> Exception | None:
        """The obstacle for the offers in flight: why there is no connection, or a retryable refusal."""
        return (self._cause if self._connection is None else None) or self._producer_state.waits_for

    def offer(self, *deltas: Delta, after: Sequence[SyncReceipt | Dependency] = ()) -> SyncReceipt:
        """Send deltas of one priority without waiting for the outcome; wait if too many offers are in flight.

        Raises InvalidDelta, UsageError; Refused if too many stay in flight, or the producer cannot go on.
        """
        priority, opaque_only = validate(deltas)
        return self._offer(priority, deltas, after, self.settings.publish_timeout_s, opaque_only=opaque_only)

    def publish(
        self, *deltas: Delta, after: Sequence[SyncReceipt | Dependency] = (), timeout_s: float | None = None
    ) -> PublishAck:
        """Send and wait for the acknowledgement.

        Raises Refused, whose text says if the deltas may be in the log.
        """
        limit_s = timeout_or_default(timeout_s, self.settings.publish_timeout_s)
        started_at = time.monotonic()
        priority, opaque_only = validate(deltas)
        receipt = self._offer(priority, deltas, after, limit_s, opaque_only=opaque_only)
        return self.result_of(receipt, max(limit_s - (time.monotonic() - started_at), 0.0), limit_s)

    def publish_many(
        self,
        ids: Sequence[str],
        matrix: ArrayLike,
        *,
        namespace: str = DEFAULT_NAMESPACE,
        kind: Kind = Kind.CREATE,
        priority: Priority = Priority.NORMAL,
        timeout_s: float | None = None,
    ) -> PublishAck:
        """Publish complete vectors as columns: row i of `matrix` (n × dimension) is the vector `ids[i]`."""
        rows = check_columns(ids, matrix, namespace=namespace, kind=kind, priority=priority)
        limit_s = timeout_or_default(timeout_s, self.settings.publish_timeout_s)
        columns = Columns(ids, rows, namespace, kind)
        receipt = self._offer(priority, (), (), limit_s, columns=columns)
        return self.result_of(receipt, limit_s)

    def offer_numbered(self, counter: int, delta: Delta, timeout_s: float | None = None) -> SyncReceipt:
        """Send a delta under the caller's counter, which rises within a priority; see `Producer`.

        `timeout_s`: maximum wait while too many offers are in flight.
        """
        limit_s = timeout_or_default(timeout_s, self.settings.publish_timeout_s)
        return self._offer(check_deltas([delta]), [delta], (), limit_s, counter=counter)

    def offer_block(
        self,
        block: Block,
        counter: int | None = None,
        *,
        priority: Priority = Priority.NORMAL,
        timeout_s: float | None = None,
    ) -> SyncReceipt:
        """Send columns of many deltas unchanged, without waiting for their common outcome.

        With `counter`, the rows have the counters `counter`, `counter` + 1 and so on, which must be above all
        earlier counters of this priority. The rows are not validated here, since their encoder has done it.
        `timeout_s`: maximum wait while too many offers are in flight. Raises as `offer` does.
        """
        limit_s = timeout_or_default(timeout_s, self.settings.publish_timeout_s)
        return self._offer(priority, (), (), limit_s, columns=block, counter=counter)

    def watermark(self, priority: Priority = Priority.NORMAL) -> int:
        """Return the counter up to which the service had processed this producer's deltas at the welcome."""
        return self._producer_state.watermark(priority)

    def flush(self, timeout_s: float | None = None) -> None:
        """Wait for the outcomes of all offers. Raises TimeoutError, or why the producer cannot go on."""
        limit_s = timeout_or_default(timeout_s, self.settings.delivery_timeout_s)
        if not self._run_until(lambda: not self._producer_state.in_flight_offers, limit_s):
            raise TimeoutError(
                f"no outcome of {self._producer_state.in_flight_offers} calls within {limit_s:g} s"
            )

    def result_of(
        self, receipt: SyncReceipt, timeout_s: float | None = None, reported_s: float | None = None
    ) -> PublishAck:
        """Wait for a receipt's outcome. Raises Refused. `reported_s`: the timeout that the error names."""
        limit_s = timeout_or_default(timeout_s, self.settings.delivery_timeout_s)
        if receipt.outcome is None and not self._run_until(lambda: receipt.done, limit_s):
            offer = receipt.offer
            assert offer is not None
            is_withdrawn = self._producer_state.drop(offer)
            reported_s = limit_s if reported_s is None else reported_s
            receipt.outcome = timed_out(offer, reported_s, withdrawn=is_withdrawn)
        outcome = receipt.outcome
        if isinstance(outcome, PublishAck):
            return outcome
        assert outcome is not None
        raise outcome

    def statistics(self) -> Counts:
        """Return the counts of sent batches, of deltas and of outcomes since this producer was made."""
        return self._producer_state.counts

    # --- helpers

    def _offer(
        self,
        priority: Priority,
        deltas: Sequence[Delta],
        after: Sequence[SyncReceipt | Dependency],
        limit_s: float,
        *,
        columns: Columns | Block | None = None,
        counter: int | None = None,
        opaque_only: bool = False,
    ) -> SyncReceipt:
        if self._state != "open":
            raise UsageError(f"producer {self.name!r} is {self._state}: use it inside its `with`")
        causes = [_find_cause(cause) for cause in after]
        receipt = SyncReceipt(self)
        offer = receipt.offer = make_offer(
            priority, deltas, receipt, causes, columns=columns, counter=counter, opaque_only=opaque_only
        )
        if not self._producer_state.has_capacity:
            self._run_until(lambda: self._producer_state.has_capacity, limit_s)
        self._producer_state.offer(offer, time.monotonic())
        self._offered_rows += offer.count
        if self._offered_rows >= POLL_ROWS:
            self._run_until(lambda: True, 0.0)
        return receipt

    def _run_until(self, until: Callable[[], bool], limit_s: float) -> bool:
        """Send, receive and reconnect, at least once, until `until()` is true or `limit_s` has passed.

        Returns True if `until()` is true. Raises the reason why nothing can be sent any more.
        """
        deadline = time.monotonic() + limit_s
        self._offered_rows = 0
        while True:
            self._producer_state.check_open()
            now = time.monotonic()
            self._producer_state.expire(now, self.settings.delivery_timeout_s)
            try:
                self._step(now, deadline, until)
            except Reconnect as reconnect:
                cause = reconnect.cause or ConnectionError("the service asks to reconnect")
                self._on_connection_lost(cause, reconnect.after_s)
            except (OSError, Misconfigured) as error:
                self._on_connection_lost(error)
            except ProtocolError as error:
                self._troubles.protocol_faults += 1
                if self._troubles.protocol_faults >= FAULTS_MAX:
                    self._producer_state.fail(Refused(error.code, error.message))
                self._on_connection_lost(error)
            except (Refused, UsageError) as failure:
                self._disconnect()
                self._producer_state.fail(failure)
            if until():
                return True
            if time.monotonic() >= deadline:
                self._producer_state.check_open()
                return False
            if self._connection is None and self._troubles.offline_at is not None:
                now = time.monotonic()
                self._troubles.outage.on_silence(self._cause, now - self._troubles.offline_at, deadline - now)

    def _step(self, now: float, deadline: float, until: Callable[[], bool]) -> None:
        """Connect, or send and receive once. Raises the reason why the connection is unusable."""
        connection = self._connection
        if connection is None:
            if now < self._dialer.not_before:
                time.sleep(max(min(self._dialer.not_before, deadline) - now, 0.0))
            else:
                self._connect(now, deadline)
            return
        session = connection.session
        # Read first, so that nothing is sent to a service that has closed.
        self._on_received(connection, connection.read())
        now = time.monotonic()
        wait_s = min(deadline - now, session.silence_left_s(now))
        if session.is_open:
            connection.send(self._protocol.data_to_send(session, now))
            beat = session.make_heartbeat(now)
            connection.send(() if beat is None else (beat,))
            protocol_wait_s = self._protocol.wait_s(now)
            wait_s = min(wait_s, session.heartbeat_wait_s(now))
            wait_s = wait_s if protocol_wait_s is None else min(wait_s, protocol_wait_s)
        started_at = time.monotonic()
        count = connection.step(0.0 if until() else max(wait_s, 0.0))
        self.waited_s += time.monotonic() - started_at
        self._on_received(connection, count)
        if session.silence_left_s(time.monotonic()) <= 0:
            raise ConnectionError(f"{connection.address} has been silent for too long")

    def _on_received(self, connection: BlockingConnection, count: int) -> None:
        """Handle the frames received, if any."""
        session, now = connection.session, time.monotonic()
        for frame in session.frames(now) if count else ():
            if isinstance(frame, Ack) and frame.welcome is not None:
                self._protocol.on_welcome(
                    frame.welcome, same_address=self._last_address in (None, connection.address)
                )
                self._last_address = connection.address
                self._troubles.on_answer()
            elif self._protocol.on_frame(frame, session.connection.last_frame_bytes, now):
                self._dialer.backoff.reset()
                self._troubles.protocol_faults = 0

    # --- the connection

    def _connect(self, now: float, deadline: float) -> None:
        if self._troubles.offline_at is None:
            self._troubles.offline_at = now
        connection = self._dialer.connect(now, deadline)
        self._connection = connection
        connection.send([connection.session.request(self._protocol.hello())[1]])

    def _on_connection_lost(self, cause: Exception, after_s: float = 0.0) -> None:
        self._cause = cause
        self._disconnect()
        if self._last_address is None:  # no service has answered yet
            try:
                self._troubles.address_faults.note(cause)
            except Misconfigured as fault:
                self._producer_state.fail(fault)
        self._dialer.not_before = max(self._dialer.not_before, time.monotonic() + after_s)

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
        self._protocol.on_disconnect()

    def _final_error(self, limit_s: float) -> Exception:
        if isinstance(self._cause, Refused | UsageError):
            return self._cause
        names = ", ".join(map(str, self._dialer.addresses))
        problem = f"none of {names} has answered for {limit_s:g} s (the last one: {self._cause})"
        return Unreachable(f"{problem}: start the service or correct the address")


class _Dialer:
    """Connects to the addresses in turn, with a wait after each round."""

    def __init__(
        self,
        addresses: Sequence[Address],
        tls: Tls | None,
        settings: ClientSettings,
        choice: PartitionChoice,
    ) -> None:
        self.addresses = addresses
        self._choice = choice
        self._tls = tls
        self.backoff = Backoff()
        self.not_before = 0.0
        """Time of the next attempt."""
        self._settings = settings
        self._context = None if tls is None else client_context(tls)
        self._server_name = None if tls is None else tls.server_name
        self._attempts = 0

    def find_partition(self, token: str | None) -> LogName:
        """Return the partition to write to. Raises Refused, Unreachable, UsageError."""
        known = self._choice.known
        if known is not None:
            return known
        found = find_stream(
            map(str, self.addresses),
            self._choice.stream,
            token=token,
            tls=self._tls,
            timeout_s=self._settings.open_timeout_s,
        )
        return self._choice.resolve(found)

    def connect(self, now: float, deadline: float) -> BlockingConnection:
        """Connect to the next address. Raises OSError, Misconfigured."""
        address = self.addresses[self._attempts % len(self.addresses)]
        self._attempts += 1
        if self._attempts % len(self.addresses) == 0:
            self.not_before = now + self.backoff.next_s(RNG.random())
        timeout_s = min(self._settings.connect_timeout_s, max(deadline - now, 0.05))
        return BlockingConnection(address, timeout_s, self._context, self._server_name, self._settings)


class _Troubles:
    """Faults since a service last answered: unreachable addresses, broken protocol, time offline."""

    def __init__(self, addresses: Sequence[Address]) -> None:
        self.outage = Outage(addresses)
        self.address_faults = AddressFaults(len(addresses))
        self.protocol_faults = 0
        self.offline_at: float | None = None
        """Start of the first attempt since a service last answered."""

    def on_answer(self) -> None:
        """Note that a service has answered."""
        self.offline_at = None
        self.outage.on_answer()


def _find_cause(cause: SyncReceipt | Dependency) -> PendingDot | Dot | bytes:
    """Return the name of a delta that must come first, or its pending dot."""
    if isinstance(cause, SyncReceipt):
        if cause.outcome is None and cause.offer is not None:
            return cause.offer.pending_dot
        cause = cause.result()
    return dependency_key(cause)
