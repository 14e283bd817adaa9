"""Clients that send bare frames and take every answer literally, as docs/protocol.md defines it.

They are written against that page: of the project they import only the wire codec. They reconnect as fast as
they can, so that their hellos arrive between a failure of the log and the end of its recovery.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum

import anyio

from benchmarks._crash_answers import Answers, Call
from benchmarks._crash_callers import Pace, keys_of, make_rows
from delta_prop.platform.ports import Network, Stream
from delta_prop_wire.codec import NEED_BYTES
from delta_prop_wire.connection import Connection
from delta_prop_wire.delta import AckLevel, Delta, Priority, make_origin, producer_id_of
from delta_prop_wire.encode import encode_batch
from delta_prop_wire.errors import ProtocolError
from delta_prop_wire.frames import (
    Ack,
    BatchFrame,
    DeltaFrame,
    Frame,
    Heartbeat,
    Hello,
    Nack,
    OriginClaim,
    OriginGrant,
    Subscribe,
)
from delta_prop_wire.message_rules import Phase, Role
from delta_prop_wire.spec import FINAL, RETRYABLE, UNKNOWN_OFFSET, ErrorCode

WINDOW = 3
"""Maximum number of batches of one client that have no outcome yet; up to this many are sent together."""
RETRY_S_FIRST, RETRY_S_MAX, RETRY_GROWTH = 0.002, 0.25, 1.4
"""Backoff between connection attempts: short at first, long once the log must have recovered."""
HEARTBEAT_S, PEER_TIMEOUT_S, CONNECT_TIMEOUT_S = 4.0, 15.0, 5.0
_BYTES = 64 * 1024


class RefusalPolicy(Enum):
    """A client's reaction to a retryable refusal, which says that the frame had no effect."""

    PATIENT = "patient"
    """Waits as long as the refusal says, and sends the same frame again."""
    HASTY = "hasty"
    """Reconnects at once, and sends the same frame."""
    FICKLE = "fickle"
    """Gives the dots of the refused deltas to other deltas."""


class ConnectionBroken(Exception):
    """The connection cannot be used any more."""


@dataclass(frozen=True, slots=True)
class Site:
    """The address of the service, and the network and clock to use."""

    network: Network
    address: tuple[str, int]
    now: Callable[[], float]


class BareConnection:
    """One connection: sends and receives frames, and sends heartbeats while it waits."""

    def __init__(self, stream: Stream, now: Callable[[], float]) -> None:
        self.connection = Connection(Role.CLIENT)
        self._stream = stream
        self._now = now
        self._last_receive_s = now()
        self._buffer = memoryview(bytearray(_BYTES))
        self._next_sequence = 1
        self._beats = 0

    def reserve_sequences(self, count: int) -> int:
        """Return the sequence of the next frame, which has `count` rows; each row takes one number."""
        sequence = self._next_sequence
        self._next_sequence += count
        return sequence

    async def send(self, frame: Frame) -> None:
        """Send one frame."""
        await self._stream.send([self.connection.send(frame)])

    async def receive(self, timeout_s: float) -> list[Frame]:
        """Return the frames that arrived; none if the timeout passed. Raises ConnectionBroken."""
        with anyio.move_on_after(min(timeout_s, HEARTBEAT_S)) as scope:
            count = await self._stream.receive_into(self._buffer)
        if scope.cancelled_caught:
            if self._now() - self._last_receive_s > PEER_TIMEOUT_S:
                raise ConnectionBroken
            if timeout_s >= HEARTBEAT_S and self.connection.phase is Phase.OPEN:
                self._beats += 1
                await self.send(Heartbeat(self._beats))
            return []
        if not count:
            raise ConnectionBroken
        self._last_receive_s = self._now()
        self.connection.receive(bytes(self._buffer[:count]))
        frames = []
        while (frame := self.connection.next_event()) is not NEED_BYTES:
            frames.append(frame)
        return frames

    async def greet(self, hello: Hello) -> tuple[OriginGrant, ...]:
        """Say hello, and return the granted origins. Raises ConnectionBroken."""
        await self.send(Subscribe(1, hello))
        granted: tuple[OriginGrant, ...] = ()
        while self.connection.phase is not Phase.OPEN:
            for frame in await self.receive(HEARTBEAT_S):
                if isinstance(frame, Nack):
                    raise ConnectionBroken
                if isinstance(frame, Ack) and frame.welcome is not None:
                    granted += frame.welcome.origins
        return granted


class BareClient:
    """One client across all its connections."""

    def __init__(self, name: str, answers: Answers, pace: Pace, site: Site) -> None:
        self.name = name
        self.connections = 0
        self._answers = answers
        self._pace = pace
        self._site = site
        self._tries = 0  # since the last acknowledgement

    @property
    def is_done(self) -> bool:
        """True once everything is sent and has its outcome."""
        raise NotImplementedError

    async def serve(self, link: BareConnection) -> None:
        """Say hello, and send what is pending. Raises ConnectionBroken."""
        raise NotImplementedError

    async def run(self) -> None:
        """Connect and serve until all is done."""
        async with anyio.create_task_group() as closing:
            while not self.is_done:
                with suppress(ConnectionBroken, OSError, TimeoutError, ProtocolError):
                    host, port = self._site.address
                    stream = await self._site.network.connect(host, port, timeout_s=CONNECT_TIMEOUT_S)
                    self.connections += 1
                    try:
                        await self.serve(BareConnection(stream, self._site.now))
                    finally:
                        closing.start_soon(stream.aclose)  # closing waits for the other side
                await anyio.sleep(self._next_wait_s())

    def _next_wait_s(self) -> float:
        """Count a try; return the seconds to wait before it."""
        self._tries += 1
        return min(RETRY_S_FIRST * RETRY_GROWTH ** min(self._tries, 30), RETRY_S_MAX)


@dataclass(slots=True, eq=False)
class UnackedBatch:
    """A batch without an outcome. `base`: the counter of its first row; `sequence`: that row's sequence on
    the current connection, 0 if it was not sent there; `offsets`: by row, those acknowledged so far.
    """

    base: int
    deltas: list[Delta]
    call: Call
    sequence: int = 0
    was_sent: bool = False
    offsets: dict[int, int] = field(default_factory=dict)
    duplicate: bool = False

    @property
    def last(self) -> int:
        """The counter of the last row."""
        return self.base + len(self.deltas) - 1


class BatchClient(BareClient):
    """Sends batches under dots of its own, up to `WINDOW` at a time, each again until it is answered."""

    def __init__(self, name: str, answers: Answers, pace: Pace, site: Site, policy: RefusalPolicy) -> None:
        super().__init__(name, answers, pace, site)
        self._policy = policy
        self._window = 1 if policy is RefusalPolicy.FICKLE else WINDOW
        self._origin_count = 0
        self._take_new_origin()

    def _take_new_origin(self) -> None:
        """Switch to a new origin, as the former one cannot be continued."""
        self._origin_count += 1
        self._origin = make_origin(producer_id_of(f"{self.name} {self._origin_count}"), Priority.NORMAL)
        self._epoch = 0
        self._next = 1
        self._open: OrderedDict[int, UnackedBatch] = OrderedDict()
        self._retry_s = 0.0

    @property
    def is_done(self) -> bool:
        """See `BareClient`."""
        return not self._open and not self._pace.has_more()

    async def serve(self, link: BareConnection) -> None:
        """Send the open batches in order, then new ones, and read the answers. Raises ConnectionBroken."""
        claim = OriginClaim(self._origin, self._epoch)
        self._take_grant(*(await link.greet(Hello(origins=(claim,), client="bare"))))
        while not self.is_done:
            wait_s = self._retry_s - self._site.now()
            if wait_s <= 0:
                wait_s = HEARTBEAT_S
                for unacked in list(self._open.values()):
                    if not unacked.sequence:
                        await self._send(link, unacked)
                if not self._open:  # new batches are sent together, so that the service takes several at once
                    await anyio.sleep(self._pace.pause_s())
                    while len(self._open) < self._window and self._pace.has_more():
                        await self._send(link, self._make_batch())
            for frame in await link.receive(wait_s):
                if isinstance(frame, Ack):
                    self._take_ack(frame)
                elif isinstance(frame, Nack):
                    self._take_nack(frame)

    def _take_grant(self, grant: OriginGrant) -> None:
        self._epoch = grant.epoch
        self._answers.note_welcome(self.name, self._origin, grant.watermark)
        for unacked in self._open.values():
            unacked.sequence = 0
            unacked.offsets.clear()
        first = next(iter(self._open.values()), None)
        if grant.watermark < (self._next if first is None else first.base) - 1:
            self._drop_origin()  # rows before the open batches are lost, so these would wait forever

    def _drop_origin(self) -> None:
        """Drop this origin and all open batches. Raises ConnectionBroken."""
        for unacked in self._open.values():
            unacked.call.is_excused = True
        self._take_new_origin()
        raise ConnectionBroken

    def _make_batch(self) -> UnackedBatch:
        """Make the next batch, of one or two rows."""
        number = self._pace.next()
        deltas = make_rows(self.name, number, 1 + number % 2)
        call = self._answers.call(self.name, keys_of(deltas), AckLevel.DURABLE)
        unacked = self._open[self._next] = UnackedBatch(self._next, deltas, call)
        self._next = unacked.last + 1
        return unacked

    async def _send(self, link: BareConnection, unacked: UnackedBatch) -> None:
        if not link.connection.send_window.is_open:
            return
        batch = encode_batch(
            unacked.deltas,
            origin=self._origin,
            base=unacked.base,
            epoch=self._epoch,
            ack_level=AckLevel.DURABLE,
        )
        unacked.sequence = link.reserve_sequences(len(unacked.deltas))
        if unacked.was_sent:
            self._answers.note_resent(unacked.call)
        unacked.was_sent = True
        await link.send(BatchFrame(unacked.sequence, batch, ack_wanted=True))

    # --- answers

    def _take_ack(self, ack: Ack) -> None:
        for acked in ack.ranges:
            for unacked in self._open.values():
                for row in range(len(unacked.deltas)):
                    sequence = unacked.sequence + row
                    if unacked.sequence and acked.first <= sequence <= acked.last:
                        known = acked.offset != UNKNOWN_OFFSET
                        unacked.offsets[row] = acked.offset + (sequence - acked.first if known else 0)
                        unacked.duplicate = unacked.duplicate or acked.duplicate
        for unacked in list(self._open.values()):
            rows = len(unacked.deltas)
            if unacked.sequence and (
                len(unacked.offsets) == rows or unacked.sequence + rows - 1 <= ack.sequence
            ):
                offsets = [unacked.offsets.get(row, UNKNOWN_OFFSET) for row in range(rows)]
                known_offsets = [None if offset == UNKNOWN_OFFSET else offset for offset in offsets]
                self._answers.note_acknowledged(unacked.call, known_offsets, duplicate=unacked.duplicate)
                self._tries = 0
                del self._open[unacked.base]

    def _take_nack(self, nack: Nack) -> None:
        unacked = next(
            (unacked for unacked in self._open.values() if unacked.sequence == nack.sequence), None
        )
        if not nack.sequence or unacked is None:
            raise ConnectionBroken
        self._answers.note_refused(unacked.call, nack.refusal())
        unacked.sequence = 0
        if nack.code in (ErrorCode.OUTCOME_UNKNOWN, ErrorCode.UNKNOWN_ORIGIN):
            raise ConnectionBroken  # after a new hello the same frame gets the exact answer
        if nack.code in FINAL:
            del self._open[unacked.base]
        elif nack.code not in RETRYABLE or nack.code is ErrorCode.OVERLAP:
            del self._open[unacked.base]
            self._drop_origin()
        elif self._policy is RefusalPolicy.FICKLE:
            deltas = make_rows(self.name, self._pace.next(), len(unacked.deltas))
            call = self._answers.call(self.name, keys_of(deltas), AckLevel.DURABLE)
            self._open[unacked.base] = UnackedBatch(unacked.base, deltas, call)
            self._retry_s = self._site.now() + self._next_wait_s()
        elif self._policy is RefusalPolicy.HASTY:
            raise ConnectionBroken
        else:
            self._retry_s = self._site.now() + (nack.retry_after_ms or 100) / 1000


class DeltaClient(BareClient):
    """Sends single deltas without dots, one at a time, and never retries a refused one.

    With ids a delta whose answer was lost is sent again; without ids its outcome stays unknown.
    """

    def __init__(self, name: str, answers: Answers, pace: Pace, site: Site, *, with_ids: bool) -> None:
        super().__init__(name, answers, pace, site)
        self._with_ids = with_ids
        self._open: tuple[Delta, Call] | None = None

    @property
    def is_done(self) -> bool:
        """See `BareClient`."""
        return self._open is None and not self._pace.has_more()

    async def serve(self, link: BareConnection) -> None:
        """Send one delta after another. Raises ConnectionBroken."""
        await link.greet(Hello(client="bare"))
        try:
            while not self.is_done:
                await self._send_one(link)
                await anyio.sleep(self._pace.pause_s())
        finally:
            if self._open is not None and not self._with_ids:
                self._open[1].is_excused = True
                self._open = None

    async def _send_one(self, link: BareConnection) -> None:
        if self._open is None:
            (delta,) = make_rows(self.name, self._pace.next(), with_ids=self._with_ids)
            call = self._answers.call(self.name, [delta.vector_id], AckLevel.DURABLE)
            self._open = delta, call
        else:
            delta, call = self._open
            self._answers.note_resent(call)
        sequence = link.reserve_sequences(1)
        await link.send(DeltaFrame(sequence, delta, ack_wanted=True, ack_level=AckLevel.DURABLE))
        while self._open is not None:
            for frame in await link.receive(HEARTBEAT_S):
                if self._open is not None:  # an Ack after a Nack only says that all frames are answered
                    self._take(frame, sequence, call)

    def _take(self, frame: Frame, sequence: int, call: Call) -> None:
        if isinstance(frame, Nack):
            if frame.sequence != sequence:
                raise ConnectionBroken
            self._answers.note_refused(call, frame.refusal())
            if frame.code is ErrorCode.OUTCOME_UNKNOWN and self._with_ids:
                raise ConnectionBroken  # sent again with its id, the delta gets the exact answer
            self._open = None
        elif isinstance(frame, Ack) and frame.sequence >= sequence:
            acked = next((acked for acked in frame.ranges if acked.first <= sequence <= acked.last), None)
            offset = None if acked is None or acked.offset == UNKNOWN_OFFSET else acked.offset
            self._answers.note_acknowledged(call, [offset], duplicate=acked is not None and acked.duplicate)
            self._tries = 0
            self._open = None
