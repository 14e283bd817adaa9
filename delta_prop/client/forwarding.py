"""The link of a forwarding sink: sends batches of a log to another service and collects their outcomes.

It never re-encodes a body: only a frame's header is new, with the Lamport number and the link's sequence.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import anyio

from delta_prop.client.backoff import Backoff
from delta_prop.client.connector import Connector
from delta_prop.client.errors import Reconnect
from delta_prop.client.reconnecting_link import ReconnectingLink
from delta_prop.client.session import Session
from delta_prop.client.settings import ClientSettings
from delta_prop.platform.connection_faults import Misconfigured
from delta_prop.platform.ports import Tls, World
from delta_prop_wire.batch import LoggedBatch
from delta_prop_wire.control_rows import uses_dots
from delta_prop_wire.delta import Source
from delta_prop_wire.errors import DeltaPropError, Refused, UsageError
from delta_prop_wire.frames import Ack, BatchFrame, Frame, Hello, Nack, Welcome
from delta_prop_wire.spec import UNKNOWN_OFFSET, ErrorCode
from delta_prop_wire.stamp import Stamp

if TYPE_CHECKING:
    from typing_extensions import Buffer

logger = logging.getLogger("delta_prop.client")

SEND_BYTES_MAX = 256 * 1024
FORWARD_TIMEOUT_S = 120.0
"""Seconds for which a call waits for its outcomes before it closes the connection."""
CONNECT_TIMEOUT_S = 10.0
"""Seconds for which a call waits for the connection."""


@dataclass(frozen=True, slots=True)
class ForwardLinkStatistics:
    """Counters. `sent`: rows that were sent; `covered`: rows that the other service already had."""

    connected: bool
    reconnects: int
    sent: int
    covered: int


class _Call:
    """One call of `forward`: its batches and their outcomes. `next_index`: of the next batch to send."""

    def __init__(self, batches: Sequence[LoggedBatch]) -> None:
        self.batches = batches
        self.outcomes: list[Refused | None] = [None] * len(batches)
        self.in_flight: dict[int, int] = {}
        """Maps the first sequence of each batch in flight, in sending order, to its index in `batches`."""
        self.next_index = 0
        self.failure: Exception | None = None
        self.done = anyio.Event()


class _Watermarks:
    """The watermarks of the other service: those of its welcome, advanced by its acknowledgements."""

    def __init__(self, by_origin: dict[int, int]) -> None:
        self.by_origin = by_origin
        self.were_taken = False  # `wait_for_watermarks` has returned them for this connection

    def covers(self, logged: LoggedBatch) -> bool:
        """True if the other service has all rows of the batch, or if they are control rows without dots."""
        if not uses_dots(logged.batch):
            return True
        return logged.batch.last <= self.by_origin.get(logged.batch.origin, 0)

    def advance(self, logged: LoggedBatch) -> None:
        """Note that the other service has this batch."""
        batch = logged.batch
        self.by_origin[batch.origin] = max(self.by_origin.get(batch.origin, 0), batch.last)


@dataclass(slots=True)
class _Counts:
    """Counters of a link, over all its connections."""

    reconnects: int = 0
    sent: int = 0
    covered: int = 0


class ForwardLink:
    """The connection of a `ForwardSink` to the other service. Only one call of `forward` at a time.

    *Resources*: `run` owns a connection and its tasks. *Errors*: `forward` raises them.
    """

    def __init__(
        self,
        addresses: str | Iterable[str],
        *,
        token: str | None = None,
        tls: Tls | None = None,
        name: str = "forward",
        settings: ClientSettings | None = None,
        world: World | None = None,
    ) -> None:
        self._connector = Connector(addresses, token=token, tls=tls, settings=settings, world=world)
        self._token, self._name = token, name
        self._log_id: bytes | None = None
        self._link: ReconnectingLink | None = None
        self._call: _Call | None = None
        self._watermarks = _Watermarks({})
        self._connected = anyio.Event()
        self._changed = anyio.Event()  # set when connected, or when a connection failed
        self._last_error: DeltaPropError | None = None
        self._counts = _Counts()
        self._sequence = 1  # of the next row on this connection; a batch that is resent gets a new one

    # --- for the sink

    def begin(self, log_id: bytes) -> None:
        """Name the log whose batches are forwarded."""
        self._log_id = log_id

    async def run(self) -> None:
        """Keep the connection up until cancelled. While it is down, `forward` raises the reason."""
        world = self._connector.open()
        backoff = Backoff(first_s=1.0, max_s=30.0)
        while True:
            # The warning below replaces the link's, as the retries never end.
            self._link = ReconnectingLink(self._connector, self, warns=False)
            try:
                await self._link.run()
            except DeltaPropError as error:
                if self._link.welcomed.is_set():
                    backoff.reset()
                if str(error) != str(self._last_error):
                    logger.warning("%s: %s", self._name, error)
                self._last_error = error
                self._changed.set()
                self._fail(_to_call_error(error))
            finally:
                self._counts.reconnects += self._link.reconnects
            await anyio.sleep(backoff.next_s(world.randomness.random()))

    async def forward(self, batches: Sequence[LoggedBatch]) -> list[Refused | None]:
        """Send these batches; return the refusal of each, or None. Raises ConnectionError, Refused."""
        await self._wait_connected()
        call = self._call = _Call(batches)
        try:
            self._count_covered(call)
            if self._link is not None:
                self._link.notify()
            with anyio.move_on_after(FORWARD_TIMEOUT_S):
                await call.done.wait()
        finally:
            self._call = None
        if call.failure is not None:
            raise call.failure
        if not call.done.is_set():
            raise ConnectionError(f"not every batch was answered within {FORWARD_TIMEOUT_S:g} s")
        return call.outcomes

    async def wait_for_watermarks(self) -> Mapping[int, int] | None:
        """Wait for the connection; return the other service's watermarks.

        Returns None if an earlier call has returned them for this connection. Raises as `forward` does.
        """
        await self._wait_connected()
        if self._watermarks.were_taken:
            return None
        self._watermarks.were_taken = True
        return self._watermarks.by_origin

    async def _wait_connected(self) -> None:
        with anyio.move_on_after(CONNECT_TIMEOUT_S):
            while not (self._connected.is_set() or _is_permanent(self._last_error)):
                self._changed = anyio.Event()
                await self._changed.wait()
        if not self._connected.is_set():
            failure = None if self._last_error is None else _to_call_error(self._last_error)
            raise failure or ConnectionError(f"{self._connector.addresses[0]} has not answered yet")

    def statistics(self) -> ForwardLinkStatistics:
        """Return a snapshot of the counters."""
        counts = self._counts
        reconnects = counts.reconnects + (0 if self._link is None else self._link.reconnects)
        return ForwardLinkStatistics(self._connected.is_set(), reconnects, counts.sent, counts.covered)

    # --- for the link

    def hello(self) -> Hello:
        """Return the hello that opens a connection."""
        self._sequence = 1
        return Hello(token=self._token, source=Source.REPLICA, client=self._name, log_id=self._log_id)

    def on_welcome(self, welcome: Welcome, *, same_address: bool) -> None:
        """Start sending batches: the watermarks of the other service are known."""
        if welcome.log is not None and welcome.log.log_id == self._log_id:
            raise UsageError("the service would forward to itself: name another service")
        self._watermarks = _Watermarks({grant.origin: grant.watermark for grant in welcome.origins})
        self._last_error = None
        self._connected.set()
        self._changed.set()

    def on_frame(self, frame: Frame, size: int, now: float) -> bool:
        """Handle a frame; return True if it brought outcomes."""
        if isinstance(frame, Ack):
            return self._on_ack(frame)
        if isinstance(frame, Nack):
            self._on_nack(frame)
        return False

    def data_to_send(self, session: Session, now: float) -> Sequence[Buffer]:
        """Return the next batches, as credits allow."""
        call, parts, size = self._call, [], 0
        while call is not None and call.next_index < len(call.batches) and size < SEND_BYTES_MAX:
            if not session.connection.send_window.is_open:
                break
            logged = call.batches[call.next_index]
            if not self._watermarks.covers(logged):
                call.in_flight[self._sequence] = call.next_index
                stamp = Stamp(logged.lamport, Source.REPLICA)
                frame = BatchFrame(self._sequence, logged.batch, stamp, ack_wanted=True)
                self._sequence += logged.count
                raw = session.connection.send(frame)
                parts.append(raw)
                size += len(raw)
                self._counts.sent += logged.count
            call.next_index += 1
        if call is not None:
            self._finish(call)  # the remaining batches may all be covered
        return parts

    def on_sent(self) -> None:
        """Do nothing: no state depends on a completed send."""

    def wait_s(self, now: float) -> float | None:
        """Return None: `notify` wakes the link."""
        return None

    def processed_offset(self) -> int | None:
        """Return None: nothing is delivered here."""
        return None

    def on_disconnect(self) -> None:
        """Fail the call in flight: its batches are resent."""
        if self._connected.is_set():
            self._connected = anyio.Event()
        self._fail(ConnectionError("the connection broke"))

    # --- answers

    def _on_ack(self, ack: Ack) -> bool:
        call = self._call
        if call is None:
            return False
        acked = []
        for first, index in call.in_flight.items():
            if first + call.batches[index].count - 1 > ack.sequence:
                break
            acked.append(first)
        for first in acked:
            logged = call.batches[call.in_flight[first]]
            if _is_in_doubt(ack, first, first + logged.count - 1):
                raise Reconnect(cause=_in_doubt_error(logged))  # if it is there, the next welcome covers it
            del call.in_flight[first]
            self._watermarks.advance(logged)
        self._finish(call)
        return bool(acked)

    def _on_nack(self, nack: Nack) -> None:
        refusal = nack.refusal()
        call = self._call
        if nack.correlation_id is not None or nack.is_about_connection:
            if refusal.retryable:
                raise Reconnect((nack.retry_after_ms or 1_000) / 1_000, refusal)
            raise refusal
        if call is None:
            return
        index = call.in_flight.pop(nack.sequence, None)
        if index is not None:
            call.outcomes[index] = refusal
        self._finish(call)

    def _finish(self, call: _Call) -> None:
        if call.next_index == len(call.batches) and not call.in_flight:
            call.done.set()

    def _count_covered(self, call: _Call) -> None:
        """Count the rows that the other service has; finish the call if none is missing there."""
        covers = self._watermarks.covers
        self._counts.covered += sum(logged.count for logged in call.batches if covers(logged))
        if all(map(covers, call.batches)):
            call.next_index = len(call.batches)
            self._finish(call)

    def _fail(self, failure: Exception) -> None:
        call = self._call
        if call is not None and not call.done.is_set():
            call.failure = failure
            call.done.set()


def _is_in_doubt(ack: Ack, first: int, last: int) -> bool:
    """True if some of these sequences are acknowledged as duplicates at an unknown offset."""
    return any(
        acked.offset == UNKNOWN_OFFSET and acked.first <= last and first <= acked.last for acked in ack.ranges
    )


def _in_doubt_error(logged: LoggedBatch) -> Refused:
    return Refused(
        ErrorCode.OUTCOME_UNKNOWN,
        f"the other service reports the batch at offset {logged.offset} as a duplicate without an offset: "
        "reconnecting to read its watermarks",
    )


def _to_call_error(error: DeltaPropError) -> Exception:
    """Return the error that a call raises: a permanent refusal, or a ConnectionError, which is retried.

    After a misconfiguration the call is retried, since the other service may be at fault and be corrected.
    """
    if isinstance(error, UsageError) and not isinstance(error, Misconfigured):
        return Refused(ErrorCode.BAD_REQUEST, str(error))
    return error if isinstance(error, Refused) and not error.retryable else ConnectionError(str(error))


def _is_permanent(error: DeltaPropError | None) -> bool:
    """True if waiting for the connection does not help until someone fixes the cause."""
    return isinstance(error, UsageError) or (isinstance(error, Refused) and not error.retryable)
