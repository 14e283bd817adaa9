"""Clients made of frames alone, which take every answer literally, as the page of the protocol says it.

They are written against that page: of the project they know only what turns frames into bytes and back. They
connect again as fast as they can, so that their hellos fall between a failure of the log and the end of its
recovery.
"""

from __future__ import annotations

from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

import anyio

from benchmarks._crash_callers import keys_of, made
from delta_prop_wire.codec import NEED_BYTES
from delta_prop_wire.connection import Connection
from delta_prop_wire.delta import AckLevel, Priority, make_origin, producer_id_of
from delta_prop_wire.encode import encode_batch
from delta_prop_wire.errors import PeerError
from delta_prop_wire.frames import Ack, BatchFrame, DeltaFrame, Heartbeat, Hello, Nack, OriginClaim, Subscribe
from delta_prop_wire.spec import RETRYABLE, UNKNOWN_OFFSET, VOIDING, ErrorCode
from delta_prop_wire.state import Phase, Role

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks._crash_answers import Answers, Call
    from benchmarks._crash_callers import Pace
    from delta_prop.ports import Network, Stream
    from delta_prop_wire.delta import Delta
    from delta_prop_wire.frames import Frame, OriginGrant

WINDOW = 3
"""Frames that are sent in one go, and without an outcome at the same time."""
AGAIN_S_FIRST, AGAIN_S_MAX, AGAIN_GROWTH = 0.002, 0.25, 1.4
"""From one try to the next: at first as fast as it can be, later there is nothing to be seen any more."""
HEARTBEAT_S, SILENCE_S_MAX, CONNECT_TIMEOUT_S = 4.0, 15.0, 5.0
_BYTES = 64 * 1024


class Temper(Enum):
    """The ways to take it that a frame was refused for now: "nothing has happened"."""

    PATIENT = "patient"
    """Waits as long as it is told to, and sends the same frame again."""
    HASTY = "hasty"
    """Connects again at once, and sends the same frame."""
    FICKLE = "fickle"
    """Gives the dot to another delta, as the first one has not happened."""


class Break(Exception):
    """The connection is of no use any more."""


@dataclass(frozen=True, slots=True)
class Site:
    """The place of the service, and the time there."""

    network: Network
    address: tuple[str, int]
    now: Callable[[], float]


class Link:
    """One connection: frames out, frames in, heartbeats."""

    def __init__(self, stream: Stream, now: Callable[[], float]) -> None:
        self.connection = Connection(Role.CLIENT)
        self._stream = stream
        self._now = now
        self._heard_s = now()
        self._buffer = memoryview(bytearray(_BYTES))
        self._next_sequence = 1
        self._beats = 0

    def draw(self, rows: int) -> int:
        """Return the next sequence, for a frame of so many rows."""
        sequence = self._next_sequence
        self._next_sequence += rows
        return sequence

    async def send(self, frame: Frame) -> None:
        """Send one frame."""
        await self._stream.send([self.connection.send(frame)])

    async def receive(self, timeout_s: float) -> list[Frame]:
        """Return the frames that came; none of them where a time has passed. Raises Break."""
        with anyio.move_on_after(min(timeout_s, HEARTBEAT_S)) as scope:
            count = await self._stream.receive_into(self._buffer)
        if scope.cancelled_caught:
            if self._now() - self._heard_s > SILENCE_S_MAX:
                raise Break
            if timeout_s >= HEARTBEAT_S and self.connection.phase is Phase.OPEN:
                self._beats += 1
                await self.send(Heartbeat(self._beats))
            return []
        if not count:
            raise Break
        self._heard_s = self._now()
        self.connection.receive(bytes(self._buffer[:count]))
        frames = []
        while (frame := self.connection.next_event()) is not NEED_BYTES:
            frames.append(frame)
        return frames

    async def greet(self, hello: Hello) -> tuple[OriginGrant, ...]:
        """Say hello, and return what was granted. Raises Break."""
        await self.send(Subscribe(1, hello))
        granted: tuple[OriginGrant, ...] = ()
        while self.connection.phase is not Phase.OPEN:
            for frame in await self.receive(HEARTBEAT_S):
                if isinstance(frame, Nack):
                    raise Break
                if isinstance(frame, Ack) and frame.welcome is not None:
                    granted += frame.welcome.origins
        return granted


class Bare:
    """One client over all its connections."""

    def __init__(self, name: str, answers: Answers, pace: Pace, site: Site) -> None:
        self.name = name
        self.connections = 0
        self._answers = answers
        self._pace = pace
        self._site = site
        self._tries = 0  # since something was acknowledged

    @property
    def is_done(self) -> bool:
        """True once there is nothing more to send, nor an outcome to wait for."""
        raise NotImplementedError

    async def serve(self, link: Link) -> None:
        """Say hello, and send what there is. Raises Break."""
        raise NotImplementedError

    async def run(self) -> None:
        """Connect again and again until all is done."""
        async with anyio.create_task_group() as closing:
            while not self.is_done:
                with suppress(Break, OSError, TimeoutError, PeerError):
                    host, port = self._site.address
                    stream = await self._site.network.connect(host, port, timeout_s=CONNECT_TIMEOUT_S)
                    self.connections += 1
                    try:
                        await self.serve(Link(stream, self._site.now))
                    finally:
                        closing.start_soon(stream.aclose)  # which waits for the other side
                await anyio.sleep(self._draw_wait_s())

    def _draw_wait_s(self) -> float:
        """Return how long to wait before the next try."""
        self._tries += 1
        return min(AGAIN_S_FIRST * AGAIN_GROWTH ** min(self._tries, 30), AGAIN_S_MAX)


@dataclass(slots=True, eq=False)
class Open:
    """A batch without an outcome. `sequence`: under which it was sent on this connection; 0: it was not."""

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


class BareBatches(Bare):
    """Sends batches under dots of its own, some at a time, each until it has its outcome."""

    def __init__(self, name: str, answers: Answers, pace: Pace, site: Site, temper: Temper) -> None:
        super().__init__(name, answers, pace, site)
        self._temper = temper
        self._window = 1 if temper is Temper.FICKLE else WINDOW
        self._lives = 0
        self._begin_anew()

    def _begin_anew(self) -> None:
        """Take another origin: with the former one there is no going on."""
        self._lives += 1
        self._origin = make_origin(producer_id_of(f"{self.name} {self._lives}"), Priority.NORMAL)
        self._epoch = 0
        self._next = 1
        self._open: OrderedDict[int, Open] = OrderedDict()
        self._again_s = 0.0

    @property
    def is_done(self) -> bool:
        """See `Bare`."""
        return not self._open and not self._pace.going()

    async def serve(self, link: Link) -> None:
        """Send what is open, in order, then what is new, and take what comes. Raises Break."""
        claim = OriginClaim(self._origin, self._epoch)
        self._granted(*(await link.greet(Hello(origins=(claim,), client="bare"))))
        while not self.is_done:
            wait_s = self._again_s - self._site.now()
            if wait_s <= 0:
                wait_s = HEARTBEAT_S
                for one in list(self._open.values()):
                    if not one.sequence:
                        await self._send(link, one)
                if not self._open:  # so that the service takes some of them in one go
                    await anyio.sleep(self._pace.pause_s())
                    while len(self._open) < self._window and self._pace.going():
                        await self._send(link, self._draw())
            for frame in await link.receive(wait_s):
                if isinstance(frame, Ack):
                    self._acknowledged(frame)
                elif isinstance(frame, Nack):
                    self._refused(frame)

    def _granted(self, grant: OriginGrant) -> None:
        self._epoch = grant.epoch
        self._answers.welcomed(self.name, self._origin, grant.watermark)
        for one in self._open.values():
            one.sequence = 0
            one.offsets.clear()
        first = next(iter(self._open.values()), None)
        if grant.watermark < (self._next if first is None else first.base) - 1:
            self._leave()  # what is open would wait for ever for what is not counted any more

    def _leave(self) -> None:
        """Give this origin up with all that is open. Raises Break."""
        for one in self._open.values():
            one.call.excused = True
        self._begin_anew()
        raise Break

    def _draw(self) -> Open:
        """Make the next batch, of one row or two."""
        number = self._pace.next()
        deltas = made(self.name, number, 1 + number % 2)
        call = self._answers.call(self.name, keys_of(deltas), AckLevel.DURABLE)
        one = self._open[self._next] = Open(self._next, deltas, call)
        self._next = one.last + 1
        return one

    async def _send(self, link: Link, one: Open) -> None:
        if not link.connection.window.open:
            return
        batch = encode_batch(
            one.deltas, origin=self._origin, base=one.base, epoch=self._epoch, ack_level=AckLevel.DURABLE
        )
        one.sequence = link.draw(len(one.deltas))
        if one.was_sent:
            self._answers.sent_again(one.call)
        one.was_sent = True
        await link.send(BatchFrame(one.sequence, batch, ack_wanted=True))

    # --- answers

    def _acknowledged(self, ack: Ack) -> None:
        for told in ack.ranges:
            for one in self._open.values():
                for row in range(len(one.deltas)):
                    sequence = one.sequence + row
                    if one.sequence and told.first <= sequence <= told.last:
                        known = told.offset != UNKNOWN_OFFSET
                        one.offsets[row] = told.offset + (sequence - told.first if known else 0)
                        one.duplicate = one.duplicate or told.duplicate
        for one in list(self._open.values()):
            rows = len(one.deltas)
            if one.sequence and (len(one.offsets) == rows or one.sequence + rows - 1 <= ack.sequence):
                offsets = [one.offsets.get(row, UNKNOWN_OFFSET) for row in range(rows)]
                known_ones = [None if at == UNKNOWN_OFFSET else at for at in offsets]
                self._answers.acknowledged(one.call, known_ones, duplicate=one.duplicate)
                self._tries = 0
                del self._open[one.base]

    def _refused(self, nack: Nack) -> None:
        one = next((one for one in self._open.values() if one.sequence == nack.sequence), None)
        if not nack.sequence or one is None:
            raise Break
        self._answers.refused(one.call, nack.refusal())
        one.sequence = 0
        if nack.code in (ErrorCode.OUTCOME_UNKNOWN, ErrorCode.UNKNOWN_ORIGIN):
            raise Break  # after a hello the same frame has the exact answer
        if nack.code in VOIDING:
            del self._open[one.base]
        elif nack.code not in RETRYABLE or nack.code is ErrorCode.OVERLAP:
            del self._open[one.base]
            self._leave()
        elif self._temper is Temper.FICKLE:
            deltas = made(self.name, self._pace.next(), len(one.deltas))
            call = self._answers.call(self.name, keys_of(deltas), AckLevel.DURABLE)
            self._open[one.base] = Open(one.base, deltas, call)
            self._again_s = self._site.now() + self._draw_wait_s()
        elif self._temper is Temper.HASTY:
            raise Break
        else:
            self._again_s = self._site.now() + (nack.retry_after_ms or 100) / 1000


class BareDeltas(Bare):
    """Sends single deltas without dots, one at a time, and takes each refusal as the end of it.

    With ids a delta whose answer was lost is sent again; without them nobody knows what became of it.
    """

    def __init__(self, name: str, answers: Answers, pace: Pace, site: Site, *, with_ids: bool) -> None:
        super().__init__(name, answers, pace, site)
        self._with_ids = with_ids
        self._open: tuple[Delta, Call] | None = None

    @property
    def is_done(self) -> bool:
        """See `Bare`."""
        return self._open is None and not self._pace.going()

    async def serve(self, link: Link) -> None:
        """Send one after the other. Raises Break."""
        await link.greet(Hello(client="bare"))
        try:
            while not self.is_done:
                await self._send_one(link)
                await anyio.sleep(self._pace.pause_s())
        finally:
            if self._open is not None and not self._with_ids:
                self._open[1].excused = True
                self._open = None

    async def _send_one(self, link: Link) -> None:
        if self._open is None:
            (delta,) = made(self.name, self._pace.next(), with_ids=self._with_ids)
            call = self._answers.call(self.name, [delta.vector_id], AckLevel.DURABLE)
            self._open = delta, call
        else:
            delta, call = self._open
            self._answers.sent_again(call)
        sequence = link.draw(1)
        await link.send(DeltaFrame(sequence, delta, ack_wanted=True, ack_level=AckLevel.DURABLE))
        while self._open is not None:
            for frame in await link.receive(HEARTBEAT_S):
                if self._open is not None:  # an Ack behind a Nack says only that all is told
                    self._take(frame, sequence, call)

    def _take(self, frame: Frame, sequence: int, call: Call) -> None:
        if isinstance(frame, Nack):
            if frame.sequence != sequence:
                raise Break
            self._answers.refused(call, frame.refusal())
            if frame.code is ErrorCode.OUTCOME_UNKNOWN and self._with_ids:
                raise Break  # sent again with its id it has the exact answer
            self._open = None
        elif isinstance(frame, Ack) and frame.sequence >= sequence:
            told = next((one for one in frame.ranges if one.first <= sequence <= one.last), None)
            at = None if told is None or told.offset == UNKNOWN_OFFSET else told.offset
            self._answers.acknowledged(call, [at], duplicate=told is not None and told.duplicate)
            self._tries = 0
            self._open = None
