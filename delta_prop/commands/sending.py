"""How `publish` sends: into a data directory that it has open, or to a server. Each line's fate is told once.

What is refused for now is sent again until it has its place, or until nothing has moved for too long.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

import anyio

from delta_prop.commands import edge
from delta_prop_wire.errors import Refused
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from collections.abc import Callable

    from delta_prop.client import Producer as RemoteProducer
    from delta_prop.producer import Producer
    from delta_prop.receipt import Receipt
    from delta_prop_broker.log.durable import DurableLog
    from delta_prop_broker.log.memory import MemoryLog
    from delta_prop_wire.delta import Delta

STUCK_S_MAX = 60.0
"""How long the same refusals may stand in the way before the import ends; it can be repeated."""
_AGAIN_S = 0.02


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
        """What stands in the way of the lines that are open; None where that is not known."""
        ...

    def log_end(self) -> int | None:
        """The next offset of the log; None where that is not known."""
        ...


class LocalSender:
    """Into a propagator of this process. Lines up to the watermark are answered from what the log says."""

    def __init__(self, producer: Producer, log: MemoryLog | DurableLog) -> None:
        self._producer = producer
        self._log = log
        self._standing: dict[int, Refused] = {}  # refusals that may pass
        self._moved_at = self._again_at = 0.0

    def waits_for(self) -> Exception | None:
        """The refusal of the first open line, or why the log takes nothing."""
        return self._producer.waits_for

    async def send(self, number: int, delta: Delta, then: Then) -> None:
        """Send it once there is room. Raises Refused."""
        while True:
            try:
                sent = self._producer.offer_numbered(
                    number, delta, lambda told: self._note(number, told, then)
                )
            except Refused as refusal:
                if not refusal.retryable:
                    self._standing.pop(number, None)
                    raise
                self._stands(number, refusal)
                await anyio.sleep(max(self._again_at - edge.now(), _AGAIN_S))
            else:
                break
        if not sent:
            self._moved(number)
            then(await self._former(number, delta))

    async def run(self) -> None:
        """Send again what was refused for now, until nothing has moved for too long. Raises Refused."""
        while True:
            await anyio.sleep(_AGAIN_S)
            if not self._standing or edge.now() < self._again_at:
                continue
            with suppress(Refused):  # those that stay stand there, or come again with the next line
                self._producer.resend()
            for number, refusal in list(self._standing.items())[:1]:
                stuck = edge.now() - self._moved_at > STUCK_S_MAX
                if stuck or (refusal.code is ErrorCode.LOG_FAILED and refusal.retry_after_ms is None):
                    raise of_line(number, refusal)

    def log_end(self) -> int:
        """The next offset of the log."""
        return self._log.next_offset

    async def _former(self, number: int, delta: Delta) -> Kept | Refused:
        """What became of a line that was dealt with by an earlier run."""
        outcome = await self._producer.outcome(number, delta.priority)
        if outcome is None:
            return _not_again(ErrorCode.DOT_REUSED)
        return _not_again(outcome) if isinstance(outcome, ErrorCode) else Kept(outcome, True)

    def _note(self, number: int, told: Receipt, then: Then) -> None:
        refusal = told.refusal()
        if refusal is not None and refusal.retryable:
            self._stands(number, refusal)
        else:
            self._moved(number)
            then(kept(told) if refusal is None else refusal)

    def _stands(self, number: int, refusal: Refused) -> None:
        if not self._standing:
            self._moved_at = edge.now()
        self._standing[number] = refusal
        self._again_at = edge.now() + (refusal.retry_after_ms or 0) / 1000

    def _moved(self, number: int) -> None:
        self._standing.pop(number, None)
        self._moved_at = edge.now()


class RemoteSender:
    """To a server, by a client that sends again by itself, over lost connections too."""

    def __init__(self, producer: RemoteProducer) -> None:
        self._producer = producer

    def waits_for(self) -> Exception | None:
        """Why there is no connection, or the refusal that stands in the way."""
        return self._producer.waits_for

    async def send(self, number: int, delta: Delta, then: Then) -> None:
        """Send it once there is room. Raises Refused."""

        def note(told: Receipt) -> None:
            refusal = told.refusal()
            if refusal is None:
                then(kept(told))
            else:
                then(_not_again(refusal.code) if refusal.code is ErrorCode.DOT_REUSED else refusal)

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


def kept(told: Receipt) -> Kept:
    """Where an acknowledged delta of its own batch is."""
    published = told.result()
    offset = published.duplicates.get(0, published.offset)
    assert offset is not None, "a repeat at an unknown offset is no acknowledgement"
    return Kept(offset, published.duplicate)
