"""`publish`: JSON lines into a log, many in flight at once, each with a fate of its own.

A line's dot is (producer, number of the line), so that what was killed and is repeated has one effect: lines
up to the watermark are answered from what the log says of them, the others are sent.
"""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel

from delta_prop.checks import is_transform
from delta_prop.client import Producer
from delta_prop.commands import edge
from delta_prop.commands.places import name_fault
from delta_prop.commands.sending import Kept, LocalSender, RemoteSender, of_line
from delta_prop.commands.waiting import Waiting
from delta_prop.embedded import Propagator
from delta_prop_broker.log.damage import LogBusy
from delta_prop_wire.delta import AckLevel, Source
from delta_prop_wire.errors import InvalidDelta, Refused, UsageError
from delta_prop_wire.jsonlines import delta_from_line
from delta_prop_wire.spec import VECTOR_ID_BYTES_MAX, ErrorCode

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from delta_prop.commands.connecting import Link
    from delta_prop.commands.sending import Sender
    from delta_prop_wire.delta import Delta

OK, FAILED = 0, 1
IN_FLIGHT_MAX = 4_000
IN_FLIGHT_BYTES_MAX = 32 * 1024 * 1024
_GIVE_WAY_LINES = 500


@dataclass(frozen=True, slots=True)
class Job:
    """What to publish where: into a directory, or over a link. `producer` None: under a name drawn for this
    once; `level` None: the most that the server grants.
    """

    files: list[str]
    to: str | Link
    producer: str | None = None
    acks: bool = False
    level: AckLevel | None = None


@dataclass(slots=True)
class Totals:
    """What became of the lines; blank ones are not counted."""

    lines: int = 0
    acknowledged: int = 0
    duplicates: int = 0
    refused: int = 0
    forgotten: int = 0  # sent by an earlier run, and the log no longer tells what became of them
    next_offset: int | None = None  # None: of a server that has acknowledged nothing
    seconds: float = 0.0


async def publish(job: Job) -> int:
    """Publish all lines; exit status 0 where none was refused. Raises UsageError, Refused, OSError."""
    name = edge.drawn_name() if job.producer is None else job.producer
    fault = name_fault("--producer", name, VECTOR_ID_BYTES_MAX)
    if fault:
        raise UsageError(fault)
    source = edge.Input(job.files)
    import_: _Import | None = None
    waiting = Waiting()
    try:
        async with waiting.told(), _sender(job, name, waiting) as sender:
            import_ = _Import(sender, acks=job.acks, waiting=waiting)
            await import_.run(source)
            if import_.totals.next_offset is None:
                import_.totals.next_offset = sender.log_end()
    finally:  # what was in flight at an interruption has its answer when the sender is closed
        if import_ is not None:
            import_.progress.end()
            edge.confirm(json.dumps(import_.told()))
        source.close()
    return FAILED if import_.totals.refused else OK


@asynccontextmanager
async def _sender(job: Job, name: str, waiting: Waiting) -> AsyncIterator[Sender]:
    """Open the sender, which says what it waits for. Raises UsageError, Refused, OSError."""
    if isinstance(job.to, str):
        try:
            async with Propagator(data=job.to) as p:
                level = AckLevel.DURABLE if job.level is None else job.level
                local = LocalSender(p, name, level)
                waiting.ask = local.waits_for
                yield local
        except LogBusy as busy:
            raise LogBusy(f"{busy}, or send to the server that has it, with --to HOST:PORT") from None
    else:
        link = job.to
        producer = Producer(
            link.addresses, name=name, token=link.token, tls=link.tls, ack_level=job.level, numbered=True
        )
        remote = RemoteSender(producer)
        waiting.ask = remote.waits_for
        async with producer:
            yield remote


@dataclass(slots=True)
class _Import:
    sender: Sender
    acks: bool
    totals: Totals = field(default_factory=Totals)
    progress: edge.Progress = field(default_factory=edge.Progress)
    waiting: Waiting = field(default_factory=Waiting)
    _sizes: dict[int, int] = field(default_factory=dict)  # of the lines in flight, in bytes
    _bytes: int = 0
    _change: anyio.Event = field(default_factory=anyio.Event)
    _scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    _failure: Exception | None = None
    _began: float = field(default_factory=edge.now)

    async def run(self, source: edge.Input) -> None:
        """Send all lines and wait for their answers. Raises Refused, OSError."""
        self.waiting.busy = lambda: bool(self._sizes)
        async with anyio.create_task_group() as tasks:
            self._scope = tasks.cancel_scope
            tasks.start_soon(self._keep_sending)
            try:
                await self._send_all(source)
            except (Refused, OSError) as error:  # a task group would wrap it
                self._failure = self._failure or error
            self._scope.cancel()
        if self._failure is not None:
            raise self._failure

    async def _send_all(self, source: edge.Input) -> None:
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
            "forgotten": totals.forgotten,
            "unanswered": len(self._sizes),
            "next_offset": totals.next_offset,
            "seconds": round(edge.now() - self._began, 3),
        }

    # --- one line

    async def _send(self, number: int, delta: Delta, size: int) -> None:
        """Send it once there is room for it. Raises Refused."""
        self._sizes[number] = size
        self._bytes += size
        try:
            await self.sender.send(number, delta, lambda told: self._note(number, told))
        except Refused:
            self._done(number)
            raise

    def _note(self, number: int, told: Kept | Refused) -> None:
        if isinstance(told, Kept):
            self._done(number)
            self._acknowledged(number, told)
        elif told.code is ErrorCode.OUTCOME_UNKNOWN and told.retry_after_ms is None:
            self._done(number)
            self._forgotten(number, told)
        elif told.voids or told.code is ErrorCode.DOT_REUSED:
            self._done(number)
            self._refused(number, told)
        else:  # the line is not at fault, and stays unanswered
            self._fail(of_line(number, told))
        self._change.set()

    def _done(self, number: int) -> None:
        self._bytes -= self._sizes.pop(number)
        self.waiting.moved()

    # --- waiting

    async def _until(self, lines: int, size: int) -> None:
        """Until fewer lines and bytes are in flight."""
        while len(self._sizes) >= lines or self._bytes >= size:
            self._change = anyio.Event()
            await self._change.wait()
            self._tell()

    async def _keep_sending(self) -> None:
        try:
            await self.sender.run()
        except Refused as refusal:  # a task group would wrap it
            self._fail(refusal)

    def _fail(self, error: Exception) -> None:
        self._failure = self._failure or error
        self._scope.cancel()

    # --- telling

    def _acknowledged(self, number: int, told: Kept) -> None:
        totals, offset = self.totals, told.offset
        totals.acknowledged += 1
        totals.duplicates += told.duplicate
        totals.next_offset = max(totals.next_offset or 0, offset + 1)
        if self.acks:
            self._put({"line": number, "offset": offset, "duplicate": told.duplicate})

    def _refused(self, number: int, refusal: Refused) -> None:
        self.totals.refused += 1
        if self.acks:
            self._put_error(number, refusal)
        else:
            edge.note(f"line {number}: {refusal}")

    def _forgotten(self, number: int, refusal: Refused) -> None:
        self.totals.forgotten += 1
        if self.acks:
            self._put_error(number, refusal)

    def _put_error(self, number: int, refusal: Refused) -> None:
        self._put({"line": number, "error": refusal.code.name, "message": refusal.message})

    def _put(self, told: dict[str, object]) -> None:
        """One line. A failure must not reach the pipeline, whose callback this may be."""
        try:
            edge.put(json.dumps(told, ensure_ascii=False))
        except OSError as error:
            self._fail(error)

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
    # A line of another service's log: what was forwarded to that one is imported here.
    return replace(delta, source=Source.IMPORT) if delta.source is Source.REPLICA else delta
