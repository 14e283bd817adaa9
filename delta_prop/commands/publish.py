"""`publish`: JSON lines into a log, many in flight at once, each with a fate of its own.

A line's dot is (producer, number of the line), so that what was killed and is repeated has one effect: lines
up to the watermark are answered from what the log says of them, the others are sent.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel

from delta_prop.checks import is_transform
from delta_prop.commands import edge
from delta_prop.embedded import Propagator
from delta_prop_wire.delta import AckLevel
from delta_prop_wire.errors import InvalidDelta, Refused
from delta_prop_wire.jsonlines import delta_from_line
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from delta_prop.producer import Producer
    from delta_prop.receipt import Receipt
    from delta_prop_wire.delta import Delta

OK, FAILED = 0, 1
IN_FLIGHT_MAX = 4_000
IN_FLIGHT_BYTES_MAX = 32 * 1024 * 1024
STUCK_S_MAX = 60.0
"""How long the same refusals may stand in the way before the import ends; it can be repeated."""
_PAUSE_S_MIN = 0.005
_GIVE_WAY_LINES = 64


@dataclass(frozen=True, slots=True)
class Job:
    """What to publish where. `producer` None: under a name drawn for this once."""

    files: list[str]
    data: str
    producer: str | None = None
    acks: bool = False
    level: AckLevel = AckLevel.DURABLE


@dataclass(slots=True)
class Totals:
    """What became of the lines; blank ones are not counted."""

    lines: int = 0
    acknowledged: int = 0
    duplicates: int = 0
    refused: int = 0
    next_offset: int = 0
    seconds: float = 0.0


async def publish(job: Job) -> int:
    """Publish all lines; exit status 0 where none was refused. Raises UsageError, Refused, OSError."""
    source = edge.Input(job.files)
    async with Propagator(data=job.data) as p:
        name = job.producer or edge.drawn_name()
        import_ = _Import(p.producer(name, ack_level=job.level), acks=job.acks)
        try:
            await import_.run(source)
        finally:
            import_.progress.end()
            edge.put(json.dumps(import_.told()))
    return FAILED if import_.totals.refused else OK


@dataclass(slots=True)
class _Import:
    producer: Producer
    acks: bool
    totals: Totals = field(default_factory=Totals)
    progress: edge.Progress = field(default_factory=edge.Progress)
    _sizes: dict[int, int] = field(default_factory=dict)  # of the lines in flight, in bytes
    _bytes: int = 0
    _standing: dict[int, Refused] = field(default_factory=dict)  # refusals that may pass
    _change: anyio.Event = field(default_factory=anyio.Event)
    _began: float = field(default_factory=edge.now)

    async def run(self, source: edge.Input) -> None:
        number = 0
        async for line in source.lines():
            number += 1
            if not line.strip():
                continue
            self.totals.lines += 1
            try:
                await self._send(number, _read(line), len(line))
            except Refused as refusal:
                if not refusal.voids:  # the line is not at fault
                    raise
                self._refused(number, refusal)
            if number % _GIVE_WAY_LINES == 0:
                await anyio.lowlevel.checkpoint()
                self._tell()
            await self._until(IN_FLIGHT_MAX, IN_FLIGHT_BYTES_MAX)
        await self._until(1, 1)

    def told(self) -> dict[str, object]:
        """The totals, for the last line."""
        totals = self.totals
        return {
            "lines": totals.lines,
            "acknowledged": totals.acknowledged,
            "duplicates": totals.duplicates,
            "refused": totals.refused,
            "unanswered": len(self._sizes),
            "next_offset": totals.next_offset,
            "seconds": round(edge.now() - self._began, 3),
        }

    # --- one line

    async def _send(self, number: int, delta: Delta, size: int) -> None:
        """Send it once there is room for it. Raises Refused."""
        deadline = anyio.current_time() + STUCK_S_MAX
        self._sizes[number] = size
        self._bytes += size
        while True:
            try:
                sent = self.producer.offer_numbered(number, delta, lambda told: self._note(number, told))
            except Refused as refusal:
                if not refusal.retryable or anyio.current_time() >= deadline:
                    self._done(number)
                    raise
                await self._pause(refusal)
            else:
                break
        if not sent:
            self._done(number)
            self._answer(number, delta)

    def _answer(self, number: int, delta: Delta) -> None:
        """A line that was dealt with by an earlier run."""
        outcome = self.producer.outcome(number, delta.priority)
        if isinstance(outcome, ErrorCode):
            self._refused(number, Refused(outcome, "refused for good before: publish it as another line"))
        else:
            self._acknowledged(number, outcome, duplicate=True)

    def _note(self, number: int, told: Receipt) -> None:
        refusal = told.refusal()
        if refusal is not None and refusal.retryable:
            self._standing[number] = refusal
        else:
            self._done(number)
            if refusal is not None:
                self._refused(number, refusal)
            else:
                published = told.result()
                first = published.duplicates.get(0, published.offset)
                self._acknowledged(number, first, duplicate=published.duplicate)
        self._change.set()

    def _done(self, number: int) -> None:
        self._bytes -= self._sizes.pop(number)
        self._standing.pop(number, None)

    # --- waiting

    async def _until(self, lines: int, size: int) -> None:
        """Until fewer lines and bytes are in flight. Raises the refusal that stands in the way too long."""
        deadline = anyio.current_time() + STUCK_S_MAX
        left = len(self._sizes)
        while len(self._sizes) >= lines or self._bytes >= size:
            if self._standing:
                refusal = self._standing[min(self._standing)]
                if len(self._sizes) < left:
                    left, deadline = len(self._sizes), anyio.current_time() + STUCK_S_MAX
                if refusal.code is ErrorCode.LOG_FAILED or anyio.current_time() >= deadline:
                    raise refusal
                await self._pause(refusal)
                self._resend()
            else:
                self._change = anyio.Event()
                await self._change.wait()
            self._tell()

    def _resend(self) -> None:
        try:
            self.producer.resend()
        except Refused as refusal:
            if not refusal.retryable:
                raise

    async def _pause(self, refusal: Refused) -> None:
        if refusal.code is ErrorCode.LOG_FAILED:
            raise refusal
        await anyio.sleep(max((refusal.retry_after_ms or 0) / 1000, _PAUSE_S_MIN))

    # --- telling

    def _acknowledged(self, number: int, offset: int | None, *, duplicate: bool) -> None:
        totals = self.totals
        totals.acknowledged += 1
        totals.duplicates += duplicate
        totals.next_offset = max(totals.next_offset, 0 if offset is None else offset + 1)
        if self.acks:
            edge.put(json.dumps({"line": number, "offset": offset, "duplicate": duplicate}))

    def _refused(self, number: int, refusal: Refused) -> None:
        self.totals.refused += 1
        if self.acks:
            told = {"line": number, "error": refusal.code.name, "message": refusal.message}
            edge.put(json.dumps(told, ensure_ascii=False))
        else:
            edge.note(f"line {number}: {refusal}")

    def _tell(self) -> None:
        totals = self.totals
        self.progress.tell(
            f"{totals.lines:,} lines, {totals.acknowledged:,} acknowledged, {totals.refused:,} refused"
        )


def _read(line: bytes) -> Delta:
    """The delta of a line. Raises InvalidDelta."""
    delta = delta_from_line(line)
    if is_transform(delta):
        raise InvalidDelta(
            "op", "transform needs a function that a program has registered: publish what it gives"
        )
    return delta
