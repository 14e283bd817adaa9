"""How `publish` sends: into a data directory that it has open, or to a server. Each line's fate is told once.

What is refused for now is sent again until it has its place, or until nothing has moved for too long.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

import anyio

from delta_prop.client.errors import Reconnect
from delta_prop.client.offer import Offer
from delta_prop.client.outgoing import Outgoing
from delta_prop.commands import edge
from delta_prop.ingest.work import Sequenced, Session
from delta_prop.orphans import checked
from delta_prop.published import Published
from delta_prop.receipt import Receipt
from delta_prop.server.intake import ranges_of
from delta_prop.turns import Bell
from delta_prop_wire.cursor import Cursor
from delta_prop_wire.delta import Source, producer_id_of
from delta_prop_wire.errors import InvalidDelta, Refused
from delta_prop_wire.frames import Ack, Nack, OriginGrant, Welcome
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from delta_prop.client import Producer as RemoteProducer
    from delta_prop.embedded import Propagator
    from delta_prop.ingest.origins import Grant
    from delta_prop_wire.delta import AckLevel, Delta

STUCK_S_MAX = 60.0
"""How long the same refusals may stand in the way before the import ends; it can be repeated."""
_AGAIN_S = 0.02
_LOOK_S = 0.1


class Kept(NamedTuple):
    """A line that is in the log: where, and whether it was there before."""

    offset: int
    duplicate: bool


Then: TypeAlias = "Callable[[Kept | Refused], None]"


class Sender(Protocol):
    """Sends lines under their numbers."""

    async def send(self, number: int, delta: Delta, then: Then) -> None:
        """Send it once there is room; `then` is called with its fate, now or later. Raises Refused."""
        ...

    async def run(self) -> None:
        """What sending needs meanwhile, until cancelled. Raises Refused where it cannot go on."""
        ...

    def waits_for(self) -> Exception | None:
        """The obstacle for the lines that are open; None where that is not known."""
        ...

    def log_end(self) -> int | None:
        """The next offset of the log; None where that is not known."""
        ...


class LocalSender:
    """Into a propagator of this process: what a client has on its way, without a connection between."""

    def __init__(self, propagator: Propagator, name: str, level: AckLevel | None = None) -> None:
        """Raises Refused."""
        inside = propagator.inside()
        self._chain, self._log, self._turn, self._now = inside.chain, inside.log, inside.turn, inside.now
        self._name = name
        self._out = Outgoing(name, ack_level=level, splits=True)
        self._chance = inside.world.randomness.fork("publish").random
        self._bell = Bell()
        self._failure: Refused | None = None
        self._stands: tuple[int, Refused] | None = None  # a line that waits, and what it waits for
        self._moved_at = edge.now()
        self._life = 0  # of the hello: what was sent before counts no more
        grants = self._chain.hello(producer_id_of(name), name, self._now())
        self._welcome(grants)

    def waits_for(self) -> Exception | None:
        """The refusal of the first open line, or why the log takes nothing."""
        return self._out.waits_for

    def log_end(self) -> int:
        """The next offset of the log."""
        return self._log.next_offset

    async def send(self, number: int, delta: Delta, then: Then) -> None:
        """Send it once there is room. Raises Refused."""
        priority = checked([delta], self._chain.note_refused)
        if delta.source is Source.REPLICA:
            raise InvalidDelta("source", "replica is what a service says that forwards: give another one")
        offer = Offer(priority, [delta], lambda told: _tell(told, then), counter=number)
        while True:
            if self._out.has_room:
                self._out.offer(offer, self._now())
                self._bell.ring()
                return
            await anyio.sleep(_AGAIN_S)

    async def run(self) -> None:
        """Send what waits, until nothing has moved for too long. Raises Refused."""
        while True:
            wait_s = self._send_all()
            if self._failure is not None:
                raise self._failure
            self._check_stuck()
            with anyio.move_on_after(_LOOK_S if wait_s is None else min(wait_s, _LOOK_S)):
                await self._bell.wait()

    def _send_all(self) -> float | None:
        """Send what may go; when to try again."""
        if self._chain.rebuilt != self._rebuilt and self._chain.stopped is None:
            self._hello_again()
        with self._turn:
            while (frame := self._out.next_open(self._now())) is not None:
                session = Session(self._name, frame.source, splits=True)
                receipt = Receipt()
                receipt.when_done(partial(self._settled, self._life, frame.sequence, frame.base))
                self._chain.offer(Sequenced(frame.batch, session, receipt), self._now())
        return self._out.wait_s(self._now())

    def _settled(self, life: int, sequence: int, number: int, told: Receipt) -> None:
        """A batch was acknowledged or refused, maybe while it was sent."""
        if life != self._life:
            return
        refusal = told.refusal()
        self._bell.ring()
        if refusal is None:
            self._moved()
            self._out.acknowledged(Ack(0, ranges=ranges_of(sequence, told.result())))
            return
        if refusal.retryable:
            self._stands = self._stands or (number, refusal)
        else:
            self._moved()
        try:
            self._out.refused(Nack.of_frame(sequence, refusal), self._now(), self._chance())
        except Reconnect:
            self._hello_again()
        except Refused as failure:
            self._failure = of_line(number, failure)

    def _hello_again(self) -> None:
        """The log was recovered, or its answer is unclear: what is open is sent again."""
        self._life += 1
        self._out.disconnected()
        try:
            grants = self._chain.claim(self._out.claims(), self._name, self._now(), bounded=False)
            self._welcome(grants)
        except Refused as refusal:
            self._failure = refusal

    def _welcome(self, grants: Sequence[Grant]) -> None:
        self._rebuilt = self._chain.rebuilt
        log = self._log
        welcome = Welcome(
            origins=tuple(OriginGrant(one.origin, one.epoch, one.watermark) for one in grants),
            log=Cursor(log.log_id, log.epoch, log.next_offset),
            level=log.level,
        )
        self._out.welcomed(welcome, same_address=True)

    def _moved(self) -> None:
        self._stands, self._moved_at = None, edge.now()

    def _check_stuck(self) -> None:
        if self._stands is None:
            self._moved_at = edge.now()
            return
        number, refusal = self._stands
        for_good = refusal.code is ErrorCode.LOG_FAILED and refusal.retry_after_ms is None
        if for_good or edge.now() - self._moved_at > STUCK_S_MAX:
            raise of_line(number, refusal)


class RemoteSender:
    """To a server, by a client that sends again by itself, over lost connections too."""

    def __init__(self, producer: RemoteProducer) -> None:
        self._producer = producer

    def waits_for(self) -> Exception | None:
        """The reason why there is no connection, or the refusal that stands in the way."""
        return self._producer.waits_for

    async def send(self, number: int, delta: Delta, then: Then) -> None:
        """Send it once there is room. Raises Refused."""

        def note(told: Receipt) -> None:
            _tell(told.refusal() or told.result(), then)

        while True:
            try:
                return self._producer.offer_numbered(number, delta, note)
            except Refused as refusal:
                if refusal.code is not ErrorCode.QUEUE_FULL:
                    raise
            await anyio.sleep(_AGAIN_S)

    async def run(self) -> None:
        """The client has tasks of its own."""
        await anyio.sleep_forever()

    def log_end(self) -> None:
        """A producer is told of no log but what it is acknowledged."""


def _tell(outcome: Published | Refused, then: Then) -> None:
    if isinstance(outcome, Published):
        then(kept(outcome))
    else:
        then(_not_again(outcome.code) if outcome.code is ErrorCode.DOT_REUSED else outcome)


def _not_again(code: ErrorCode) -> Refused:
    """What is told of a line that an earlier run left out (DOT_REUSED), that was refused then, or of which
    the log no longer tells.
    """
    if code is ErrorCode.OUTCOME_UNKNOWN:
        return Refused(code, "sent when this producer published before; the log no longer tells its outcome")
    what = "left out" if code is ErrorCode.DOT_REUSED else "refused for good"
    cure = "publish it under another producer name, or as another line"
    return Refused(code, f"{what} when this producer published before: {cure}")


def of_line(number: int, refusal: Refused) -> Refused:
    """The same, with where it stands."""
    return Refused(refusal.code, f"line {number}: {refusal.message}")


def kept(published: Published) -> Kept:
    """Where an acknowledged delta of its own batch is."""
    offset = published.duplicates.get(0, published.offset)
    assert offset is not None, "a repeat at an unknown offset is no acknowledgement"
    return Kept(offset, published.duplicate)
