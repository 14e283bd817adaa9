"""The link of a replication sink: hands another service batches of a log, and hears what became of them.

It never re-encodes a body: a frame's head is made anew, with the Lamport number and the forwarder's sequence.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import anyio

from delta_prop.client.addresses import parse_addresses
from delta_prop.client.arguments import check_connection, settings_of
from delta_prop.client.backoff import Backoff
from delta_prop.client.errors import Reconnect
from delta_prop.client.link import Link
from delta_prop.misconfigured import Misconfigured
from delta_prop_wire.control_rows import uses_dots
from delta_prop_wire.delta import Source
from delta_prop_wire.errors import DeltaPropError, Refused, UsageError
from delta_prop_wire.frames import Ack, BatchFrame, Hello, Nack
from delta_prop_wire.spec import UNKNOWN_OFFSET, ErrorCode
from delta_prop_wire.stamp import Stamp

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from typing_extensions import Buffer

    from delta_prop.client.session import Session
    from delta_prop.client.settings import ClientSettings
    from delta_prop.ports import Tls, World
    from delta_prop_wire.batch import LoggedBatch
    from delta_prop_wire.frames import Frame, Welcome

logger = logging.getLogger("delta_prop.client")

SEND_BYTES_MAX = 256 * 1024
FORWARD_S_MAX = 120.0
"""How long a call may wait for its outcomes before the connection is given up."""
GREETED_S_MAX = 10.0
"""How long a call waits for the connection: as soon as it is back things go on."""


@dataclass(frozen=True, slots=True)
class ForwardLinkStatistics:
    """`sent`: rows that went over the wire; `covered`: rows that the other service had already."""

    connected: bool
    reconnects: int
    sent: int
    covered: int


class _Call:
    """One `forward`: its batches, what became of each, and how many are not told yet."""

    def __init__(self, batches: Sequence[LoggedBatch]) -> None:
        self.batches = batches
        self.outcomes: list[Refused | None] = [None] * len(batches)
        self.open: dict[int, int] = {}
        """First sequence to place, of what was sent and is not told, in that order."""
        self.next = 0
        self.failure: Exception | None = None
        self.done = anyio.Event()


class ForwardLink:
    """Implements what `ForwardSink` is handed. One call at a time.

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
        self._addresses = parse_addresses(addresses)
        self._given_world = world
        self._token, self._tls, self._name = token, tls, name
        check_connection(token, tls, world)
        self._settings = settings_of(settings)
        self._log_id: bytes | None = None
        self._link: Link | None = None
        self._call: _Call | None = None
        self._has: dict[
            int, int
        ] = {}  # what the other service has, by its watermarks and its acknowledgements
        self._connected = anyio.Event()
        self._changed = anyio.Event()  # it is connected, or cannot be for now
        self._told = False  # what it has, since it is connected
        self._ended: DeltaPropError | None = None
        self._reconnects = self._sent = self._covered = 0
        self._sequence = 1  # of the next row on this connection; one that is sent again gets another one

    # --- for the sink

    def begin(self, log_id: bytes) -> None:
        """Whose batches they will be."""
        self._log_id = log_id

    async def run(self) -> None:
        """Keep the connection up until cancelled. What stands in the way is told by `forward`."""
        world = self._given_world or _real_world()
        network = world.network
        if network is None:
            raise UsageError("this world has no network to forward over")
        backoff = Backoff(first_s=1.0, max_s=30.0)
        while True:
            self._link = Link(
                self._addresses,
                self,
                world=world,
                network=network,
                tls=self._tls,
                settings=self._settings,
                warns=False,  # it is told below, and the tries go on for ever
            )
            try:
                await self._link.run()
            except DeltaPropError as error:
                if self._link.welcomed.is_set():
                    backoff.reset()
                if str(error) != str(self._ended):
                    logger.warning("%s: %s", self._name, error)
                self._ended = error
                self._changed.set()
                self._fail(_as_failure(error))
            finally:
                self._reconnects += self._link.reconnects
            await anyio.sleep(backoff.next_s(world.randomness.random()))

    async def forward(self, batches: Sequence[LoggedBatch]) -> list[Refused | None]:
        """Have these taken; what became of each. Raises ConnectionError, Refused."""
        await self._wait_connected()
        call = self._call = _Call(batches)
        try:
            self._pass_covered(call)
            if self._link is not None:
                self._link.ring()
            with anyio.move_on_after(FORWARD_S_MAX):
                await call.done.wait()
        finally:
            self._call = None
        if call.failure is not None:
            raise call.failure
        if not call.done.is_set():
            raise ConnectionError(f"not all was answered within {FORWARD_S_MAX:g} s")
        return call.outcomes

    async def greeted(self) -> Mapping[int, int] | None:
        """Wait for the connection; what the other service has, once for each. Raises as `forward` does."""
        await self._wait_connected()
        if self._told:
            return None
        self._told = True
        return self._has

    async def _wait_connected(self) -> None:
        with anyio.move_on_after(GREETED_S_MAX):
            while not (self._connected.is_set() or _lasts(self._ended)):
                self._changed = anyio.Event()
                await self._changed.wait()
        if not self._connected.is_set():
            failure = None if self._ended is None else _as_failure(self._ended)
            raise failure or ConnectionError(f"{self._addresses[0]} has not answered yet")

    def statistics(self) -> ForwardLinkStatistics:
        """A snapshot."""
        reconnects = self._reconnects + (0 if self._link is None else self._link.reconnects)
        return ForwardLinkStatistics(self._connected.is_set(), reconnects, self._sent, self._covered)

    # --- for the link

    def hello(self) -> Hello:
        """What opens a connection."""
        self._sequence = 1
        return Hello(token=self._token, source=Source.REPLICA, client=self._name, log_id=self._log_id)

    def welcomed(self, welcome: Welcome, *, same_address: bool) -> None:
        """It takes batches from now on; what the other service has is known."""
        if welcome.log is not None and welcome.log.log_id == self._log_id:
            raise UsageError("it would forward to itself: name another service")
        self._has = {one.origin: one.watermark for one in welcome.origins}
        self._told, self._ended = False, None
        self._connected.set()
        self._changed.set()

    def take(self, frame: Frame, size: int, now: float) -> bool:
        """What became of some batches."""
        if isinstance(frame, Ack):
            return self._take_ack(frame)
        if isinstance(frame, Nack):
            self._take_nack(frame)
        return False

    def to_send(self, session: Session, now: float) -> Sequence[Buffer]:
        """The next batches, as credits allow."""
        call, parts, size = self._call, [], 0
        while call is not None and call.next < len(call.batches) and size < SEND_BYTES_MAX:
            if not session.connection.window.open:
                break
            logged = call.batches[call.next]
            if not self._covers(logged):
                call.open[self._sequence] = call.next
                stamp = Stamp(logged.lamport, Source.REPLICA)
                frame = BatchFrame(self._sequence, logged.batch, stamp, ack_wanted=True)
                self._sequence += logged.count
                raw = session.connection.send(frame)
                parts.append(raw)
                size += len(raw)
                self._sent += logged.count
            call.next += 1
        if call is not None:
            self._finish(call)  # what was left may have been there already
        return parts

    def sent(self) -> None:
        """Nothing is remembered of it."""

    def wait_s(self, now: float) -> float | None:
        """It is rung."""
        return None

    def dealt_with(self) -> int | None:
        """Nothing is delivered here."""
        return None

    def disconnected(self) -> None:
        """What was under way comes again."""
        if self._connected.is_set():
            self._connected = anyio.Event()
        self._fail(ConnectionError("the connection broke"))

    # --- what came

    def _take_ack(self, ack: Ack) -> bool:
        call = self._call
        if call is None:
            return False
        told = []
        for first, place in call.open.items():
            if first + call.batches[place].count - 1 > ack.sequence:
                break
            told.append(first)
        for first in told:
            logged = call.batches[call.open[first]]
            if _is_in_doubt(ack, first, first + logged.count - 1):
                raise Reconnect(cause=_in_doubt(logged))  # if it is there, the next welcome says so
            del call.open[first]
            self._note_has(logged)
        self._finish(call)
        return bool(told)

    def _take_nack(self, nack: Nack) -> None:
        refusal = nack.refusal()
        call = self._call
        if nack.correlation_id is not None or nack.is_about_connection:
            if refusal.retryable:
                raise Reconnect((nack.retry_after_ms or 1_000) / 1_000, refusal)
            raise refusal
        if call is None:
            return
        place = call.open.pop(nack.sequence, None)
        if place is not None:
            call.outcomes[place] = refusal
        self._finish(call)

    def _finish(self, call: _Call) -> None:
        if call.next == len(call.batches) and not call.open:
            call.done.set()

    def _pass_covered(self, call: _Call) -> None:
        """Count what the other service has; where it has all, nothing is left to do."""
        self._covered += sum(logged.count for logged in call.batches if self._covers(logged))
        if all(map(self._covers, call.batches)):
            call.next = len(call.batches)
            self._finish(call)

    def _covers(self, logged: LoggedBatch) -> bool:
        """Return True if the other service needs none of it: it has it, or these are the log's own rows."""
        if not uses_dots(logged.batch):
            return True
        return logged.batch.last <= self._has.get(logged.batch.origin, 0)

    def _note_has(self, logged: LoggedBatch) -> None:
        batch = logged.batch
        self._has[batch.origin] = max(self._has.get(batch.origin, 0), batch.last)

    def _fail(self, failure: Exception) -> None:
        call = self._call
        if call is not None and not call.done.is_set():
            call.failure = failure
            call.done.set()


def _is_in_doubt(ack: Ack, first: int, last: int) -> bool:
    """True if some of these sequences are acknowledged as duplicates at an unknown offset."""
    return any(one.offset == UNKNOWN_OFFSET and one.first <= last and first <= one.last for one in ack.ranges)


def _in_doubt(logged: LoggedBatch) -> Refused:
    return Refused(
        ErrorCode.OUTCOME_UNKNOWN,
        f"the other service calls the batch at offset {logged.offset} a repeat and does not say where it has "
        "it: connecting again to hear its watermarks",
    )


def _as_failure(error: DeltaPropError) -> Exception:
    """Return what a call raises: a refusal that lasts ends the sink, all else passes.

    What is misconfigured may be so at the other service, so that it passes once it is mended there.
    """
    if isinstance(error, UsageError) and not isinstance(error, Misconfigured):
        return Refused(ErrorCode.BAD_REQUEST, str(error))
    return error if isinstance(error, Refused) and not error.retryable else ConnectionError(str(error))


def _lasts(error: DeltaPropError | None) -> bool:
    """True if waiting for the connection is of no use before something is mended."""
    return isinstance(error, UsageError) or (isinstance(error, Refused) and not error.retryable)


def _real_world() -> World:
    from delta_prop.world import real_world

    return real_world()
