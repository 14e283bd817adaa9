"""`publish`: publishes JSON lines, many in flight at once, each with an outcome of its own.

A line's dot is (producer, line number), so that a run repeated after a kill has one effect: lines up to the
watermark are answered from the log, the others are sent.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel

from delta_prop.calls.argument_checks import is_transform
from delta_prop.client import Producer
from delta_prop.client.connector import Connector
from delta_prop.client.partition_choice import PartitionChoice, check_open_count
from delta_prop.client.stream_lookup import describe_stream
from delta_prop.commands.connect_options import ConnectOptions, source_of
from delta_prop.commands.publishers import (
    LineAck,
    LocalPublisher,
    PartitionedPublisher,
    Publisher,
    RemotePublisher,
    with_line_number,
)
from delta_prop.commands.wait_reporter import WaitReporter, report_lookup
from delta_prop.directory.log_positions import check_name_argument
from delta_prop.hosting.streams import Streams
from delta_prop.platform import system
from delta_prop_broker.corruption import LogBusy
from delta_prop_wire.delta import AckLevel, Delta, Source
from delta_prop_wire.errors import InvalidDelta, Refused
from delta_prop_wire.jsonlines import delta_from_line
from delta_prop_wire.spec import VECTOR_ID_BYTES_MAX, ErrorCode
from delta_prop_wire.stamp import DEFAULT_LOG, LogName

if TYPE_CHECKING:
    from argparse import Namespace

OK, FAILED = 0, 1
IN_FLIGHT_MAX = 4_000
IN_FLIGHT_BYTES_MAX = 32 * 1024 * 1024
_YIELD_LINES = 500
_FIX = "name one with --partition"


@dataclass(slots=True)
class Totals:
    """Counts of the lines, except blank ones, by outcome: the last line of the output."""

    lines: int = 0
    acknowledged: int = 0
    duplicates: int = 0
    refused: int = 0
    forgotten: int = 0  # lines of an earlier run whose outcome the log no longer holds
    unanswered: int = 0
    next_offset: int | None = None  # None: nothing was acknowledged, or the lines go to several partitions
    seconds: float = 0.0


async def publish(options: Namespace) -> int:
    """Publish all lines; return exit status 0 if none was refused. Raises UsageError, Refused, OSError."""
    target, level = source_of(options), options.ack_level and AckLevel[options.ack_level.upper()]
    choice = PartitionChoice(options.stream, options.partition)
    name = system.draw_producer_name() if options.producer is None else options.producer
    check_name_argument("--producer", name, VECTOR_ID_BYTES_MAX)
    source = system.Input(options.files)
    if source.is_typed:
        system.note("reading deltas from standard input; end with Ctrl-D")
    publish_run: _PublishRun | None = None
    wait_reporter = WaitReporter()
    try:
        async with (
            wait_reporter.report(),
            _open_publisher(target, choice, name, level, wait_reporter) as publisher,
        ):
            publish_run = _PublishRun(publisher, acks=options.acks, wait_reporter=wait_reporter)
            await publish_run.run(source)
            if publish_run.totals.next_offset is None:
                publish_run.totals.next_offset = publisher.log_end()
    finally:  # closing the publisher has waited for the outcomes of the lines in flight
        if publish_run is not None:
            publish_run.progress.end()
            system.confirm(json.dumps(publish_run.to_json()))
        source.close()
    return FAILED if publish_run.totals.refused else OK


@asynccontextmanager
async def _open_publisher(
    target: str | ConnectOptions,
    choice: PartitionChoice,
    name: str,
    level: AckLevel | None,
    wait_reporter: WaitReporter,
) -> AsyncIterator[Publisher]:
    """Open the publisher, and let the wait reporter query it. Raises UsageError, Refused, OSError."""
    opened = (
        _open_local(target, choice, name, AckLevel.DURABLE if level is None else level)
        if isinstance(target, str)
        else _open_remote(target, choice, name, level, wait_reporter)
    )
    async with opened as publishers:
        publisher = publishers[0] if len(publishers) == 1 else PartitionedPublisher(publishers)
        wait_reporter.get_cause = publisher.waits_for
        yield publisher


@asynccontextmanager
async def _open_local(
    data: str, choice: PartitionChoice, name: str, level: AckLevel
) -> AsyncIterator[list[LocalPublisher | RemotePublisher]]:
    """Open the partitions in a data directory. Raises UsageError, Refused, LogBusy, OSError."""
    try:
        async with Streams(data=data) as streams:
            stream = streams.catalogue.require(str(choice.stream))
            numbers = range(stream.partitions) if choice.partition is None else [choice.partition]
            check_open_count(choice.stream, len(numbers), _FIX)
            partitions = [await streams.open_partition(stream, number) for number in numbers]
            yield [LocalPublisher(partition, name, level) for partition in partitions]
    except LogBusy as busy:
        raise LogBusy(f"{busy}, or publish to that server with --to HOST:PORT") from None


@asynccontextmanager
async def _open_remote(
    target: ConnectOptions,
    choice: PartitionChoice,
    name: str,
    level: AckLevel | None,
    wait_reporter: WaitReporter,
) -> AsyncIterator[list[LocalPublisher | RemotePublisher]]:
    """Connect to the partitions of a server. Raises UsageError, Refused, Unreachable."""
    addresses, token, tls = target
    names = [choice.known]
    if choice.known is None:
        connector = Connector(addresses, token=token, tls=tls, settings=None, world=None)
        connector.open()
        stream = await describe_stream(choice.stream, connector, on_link=report_lookup(wait_reporter))
        single = choice.partition is not None or stream.count == 1
        numbers = [choice.resolve(stream).partition] if single else [*range(stream.count)]
        check_open_count(choice.stream, len(numbers), _FIX)
        names = [LogName(stream.stream, number) for number in numbers]
    producers = [
        Producer(
            addresses,
            name=name,
            token=token,
            tls=tls,
            ack_level=level,
            numbered=True,
            stream=DEFAULT_LOG.stream if log is None else log.stream,
            partition=None if log is None else log.partition,
        )
        for log in names
    ]
    publishers = [RemotePublisher(producer) for producer in producers]
    wait_reporter.get_cause = PartitionedPublisher(publishers).waits_for  # while they open
    async with AsyncExitStack() as exits:
        for producer in producers:
            await exits.enter_async_context(producer)
        yield [*publishers]


@dataclass(slots=True)
class _PublishRun:
    """Sends the lines, bounds those in flight, and counts and prints their outcomes."""

    publisher: Publisher
    acks: bool
    totals: Totals = field(default_factory=Totals)
    progress: system.Progress = field(default_factory=system.Progress)
    wait_reporter: WaitReporter = field(default_factory=WaitReporter)
    _in_flight_sizes: dict[int, int] = field(default_factory=dict)  # line number to bytes
    _in_flight_bytes: int = 0
    _changed: anyio.Event = field(default_factory=anyio.Event)
    _scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    _failure: Exception | None = None
    _started_at: float = field(default_factory=system.now)

    async def run(self, source: system.Input) -> None:
        """Send all lines and wait for their outcomes. Raises Refused, OSError."""
        self.wait_reporter.is_waiting = lambda: bool(self._in_flight_sizes)
        async with anyio.create_task_group() as tasks:
            self._scope = tasks.cancel_scope
            tasks.start_soon(self._run_publisher)
            try:
                await self._send_all(source)
            except (Refused, OSError) as error:  # a task group would wrap it
                self._failure = self._failure or error
            self._scope.cancel()
        if self._failure is not None:
            raise self._failure

    async def _send_all(self, source: system.Input) -> None:
        number = 0
        async for line in source.lines():
            number += 1
            if not line.strip():
                continue
            self.totals.lines += 1
            try:
                await self._send(number, _parse_line(line), len(line))
            except Refused as refusal:
                if not refusal.is_final:  # the line is not at fault
                    raise
                self._note_refused(number, refusal)
            if number % _YIELD_LINES == 0:
                await anyio.lowlevel.checkpoint()
                self._report_progress()
            await self._wait_below(IN_FLIGHT_MAX, IN_FLIGHT_BYTES_MAX)
        await self._wait_below(1, 1)

    def to_json(self) -> dict[str, object]:
        """Return the totals, for the last line."""
        seconds = round(system.now() - self._started_at, 3)
        return asdict(replace(self.totals, unanswered=len(self._in_flight_sizes), seconds=seconds))

    # --- one line

    async def _send(self, number: int, delta: Delta, size: int) -> None:
        self._in_flight_sizes[number] = size
        self._in_flight_bytes += size
        try:
            await self.publisher.send(number, delta, lambda outcome: self._note_outcome(number, outcome))
        except Refused:
            self._remove_in_flight(number)
            raise

    def _note_outcome(self, number: int, outcome: LineAck | Refused) -> None:
        if isinstance(outcome, LineAck):
            self._remove_in_flight(number)
            self._note_acknowledged(number, outcome)
        elif outcome.code is ErrorCode.OUTCOME_UNKNOWN and outcome.retry_after_ms is None:
            self._remove_in_flight(number)
            self.totals.forgotten += 1
            self._put_error(number, outcome)
        elif outcome.is_final or outcome.code is ErrorCode.DOT_REUSED:
            self._remove_in_flight(number)
            self._note_refused(number, outcome)
        else:  # the line is not at fault, and stays unanswered
            self._fail(with_line_number(number, outcome))
        self._changed.set()

    def _remove_in_flight(self, number: int) -> None:
        self._in_flight_bytes -= self._in_flight_sizes.pop(number)
        self.wait_reporter.note_progress()

    # --- waiting

    async def _wait_below(self, lines: int, size: int) -> None:
        """Wait until fewer lines and bytes are in flight."""
        while len(self._in_flight_sizes) >= lines or self._in_flight_bytes >= size:
            self._changed = anyio.Event()
            await self._changed.wait()
            self._report_progress()

    async def _run_publisher(self) -> None:
        try:
            await self.publisher.run()
        except Refused as refusal:  # a task group would wrap it
            self._fail(refusal)

    def _fail(self, error: Exception) -> None:
        self._failure = self._failure or error
        self._scope.cancel()

    # --- reporting

    def _note_acknowledged(self, number: int, ack: LineAck) -> None:
        totals, offset = self.totals, ack.offset
        totals.acknowledged += 1
        totals.duplicates += ack.duplicate
        if ack.partition is None:
            totals.next_offset = max(totals.next_offset or 0, offset + 1)
        line: dict[str, object] = {"line": number, "offset": offset, "duplicate": ack.duplicate}
        self._put(line if ack.partition is None else line | {"partition": ack.partition})

    def _note_refused(self, number: int, refusal: Refused) -> None:
        self.totals.refused += 1
        self._put_error(number, refusal)
        if not self.acks:
            system.note(f"line {number}: {refusal}")

    def _put_error(self, number: int, refusal: Refused) -> None:
        self._put({"line": number, "error": refusal.code.name, "message": refusal.message})

    def _put(self, line: dict[str, object]) -> None:
        """Print one line for --acks. A failure must not reach the pipeline, which may be the caller."""
        if not self.acks:
            return
        try:
            system.put(json.dumps(line, ensure_ascii=False))
        except OSError as error:
            self._fail(error)

    def _report_progress(self) -> None:
        totals = self.totals
        self.progress.report(
            f"{totals.lines:,} lines, {totals.acknowledged:,} acknowledged, {totals.refused:,} refused"
        )


def _parse_line(line: bytes) -> Delta:
    delta = delta_from_line(line)
    if is_transform(delta):
        raise InvalidDelta(
            "op", "transform needs a function that a program has registered: publish the function's result"
        )
    # A line may come from another service's log: a delta that was forwarded there is imported here.
    return replace(delta, source=Source.IMPORT) if delta.source is Source.REPLICA else delta
