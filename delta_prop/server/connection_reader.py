"""The read side of a connection: receives bytes within a budget, and handles their frames in ticks, by type.

Hellos and decisions about jobs are answered here.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel

from delta_prop.server.answers import Answers, ConnectedClient, ConnectionEnd, log_recovered, server_closing
from delta_prop.server.partition_checks import check_hello, check_served, check_stream_rights
from delta_prop.server.partitions import ServedPartition, explain_open_failure
from delta_prop.server.permissions import Unauthorized
from delta_prop.server.produce_handler import ProduceHandler
from delta_prop.server.query_handler import QueryHandler, make_welcomes
from delta_prop.server.staging import StagingHandler, make_produce_handler
from delta_prop_wire.codec import NEED_BYTES
from delta_prop_wire.connection import Connection
from delta_prop_wire.delta import Source
from delta_prop_wire.errors import ProtocolError, Refused
from delta_prop_wire.frames import (
    Ack,
    Backpressure,
    BatchFrame,
    Credit,
    Decide,
    DeltaFrame,
    Frame,
    Heartbeat,
    Hello,
    JobStatus,
    Nack,
    OriginGrant,
    Request,
    Subscribe,
    Subscription,
    Unsubscribe,
)
from delta_prop_wire.spec import ErrorCode
from delta_prop_wire.stamp import DEFAULT_LOG, LogName

if TYPE_CHECKING:
    from delta_prop.platform.ports import Stream
    from delta_prop.server.consumer_session import ConsumeHandler, Heartbeats
    from delta_prop.server.server_context import ServerContext

logger = logging.getLogger("delta_prop.server")

TICK_MAX_S = 0.002
"""Seconds after which other tasks run; checked after each frame, or run of frames."""
UNBUDGETED_BYTES = 64 * 1024
"""Frames up to this size need no budget: each connection's receive buffer can hold them."""


class ReceiveBudget:
    """Bytes that connections acquire and release."""

    def __init__(self, bytes_max: int) -> None:
        self.free_bytes = bytes_max
        self._waiting: deque[tuple[int, anyio.Event]] = deque()

    async def acquire(self, size: int) -> None:
        """Acquire `size` bytes, after earlier waiters.

        The budget is at least the largest frame, so every waiter gets its turn. If cancelled, nothing is
        acquired.
        """
        if not self._waiting and size <= self.free_bytes:
            self.free_bytes -= size
            return
        admitted = anyio.Event()
        waiter = (size, admitted)
        self._waiting.append(waiter)
        try:
            await admitted.wait()
        except anyio.get_cancelled_exc_class():
            if admitted.is_set():
                self.release(size)
            else:
                self._waiting.remove(waiter)
                self._admit()
            raise

    def release(self, size: int) -> None:
        """Release acquired bytes."""
        self.free_bytes += size
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self._waiting[0][0] <= self.free_bytes:
            size, admitted = self._waiting.popleft()
            self.free_bytes -= size
            admitted.set()


class ConnectionReader:
    """Reads one connection. `received_at`: the time of the last frame.

    `frame_started_at`: when the incomplete frame began to arrive; None if there is none. `waits_for_budget`:
    True while a large frame waits, which does not count as the client's silence.
    """

    def __init__(
        self,
        stream: Stream,
        connection: Connection,
        context: ServerContext,
        dispatcher: FrameDispatcher,
        answers: Answers,
    ) -> None:
        self.received_at = context.clock.now()
        self.frame_started_at: float | None = None
        self.waits_for_budget = False
        self._stream = stream
        self._connection = connection
        self._buffer = connection.receive_buffer
        self._context = context
        self._now = context.clock.now
        self._dispatcher = dispatcher
        self._answers = answers
        self._budget_bytes = UNBUDGETED_BYTES  # acquired for the arriving frame

    async def run(self) -> None:
        """Read and handle all frames, until either side ends the connection."""
        connection, stream, dispatcher = self._connection, self._stream, self._dispatcher
        try:
            while not self._answers.writer.is_ending:
                # Budget is for bytes that have arrived, not for those that a header announces.
                if connection.buffered_bytes >= self._budget_bytes < connection.incoming_frame_bytes:
                    await self._acquire_budget(connection.incoming_frame_bytes)
                if not await stream.receive_each(connection.get_buffer, self._on_received):
                    return
                while not self._handle_frames():
                    unblocked = dispatcher.unblocked
                    await (anyio.lowlevel.checkpoint() if unblocked is None else self._wait(unblocked))
        except ConnectionError:
            self._answers.abort()
        except ProtocolError as error:
            self._answers.refuse_bytes(error)

    def close(self) -> None:
        """Release the budget: the connection has closed."""
        if self._budget_bytes > UNBUDGETED_BYTES:
            self._release_budget()

    @property
    def is_waiting(self) -> bool:
        """True while this side keeps the client's frames waiting, which does not count as its silence."""
        return self.waits_for_budget or self._dispatcher.is_held

    # --- helpers

    async def _wait(self, unblocked: anyio.Event) -> None:
        """Wait before the next frame; nothing that the client has sent meanwhile came too late."""
        await unblocked.wait()
        now = self.received_at = self._now()
        if self.frame_started_at is not None:
            self.frame_started_at = now

    def _on_received(self, byte_count: int) -> bool:
        """Handle received bytes; return True if all were handled and the budget allows more."""
        connection, buffer = self._connection, self._buffer
        self._context.counters.bytes_in += byte_count
        connection.buffer_updated(byte_count)
        if not self._handle_frames() or self._answers.writer.is_ending:
            return False
        return not (buffer.end - buffer.start >= self._budget_bytes < connection.incoming_frame_bytes)

    def _handle_frames(self) -> bool:
        """Handle complete frames for the time of one tick; return True if none is left."""
        if not self._handle_tick():
            return False
        if self._budget_bytes > UNBUDGETED_BYTES and not self._connection.incoming_frame_bytes:
            self._release_budget()
        if self.frame_started_at is None and self._buffer.start < self._buffer.end:
            self.frame_started_at = self._now()
        return True

    def _handle_tick(self) -> bool:
        """Handle complete frames in one tick, whose callbacks run at its end; return True if none is left."""
        buffer, dispatcher, writer = self._buffer, self._dispatcher, self._answers.writer
        started_at = self._now()
        with self._context.partition.tick_callbacks:
            while buffer.start < buffer.end:
                if dispatcher.unblocked is not None:
                    return False
                if not (dispatcher.handle_run() or dispatcher.handle_next()):
                    break
                self.frame_started_at = None
                now = self.received_at = self._now()
                if writer.is_ending:
                    return True
                if now - started_at > TICK_MAX_S:
                    return False
        return True

    async def _acquire_budget(self, size: int) -> None:
        """Wait until there is budget for a large frame."""
        self.waits_for_budget = True
        await self._context.receive_budget.acquire(size)
        self.waits_for_budget, self._budget_bytes = False, size
        self.frame_started_at = self._now()

    def _release_budget(self) -> None:
        self._context.receive_budget.release(self._budget_bytes)
        self._budget_bytes = UNBUDGETED_BYTES


@dataclass(slots=True, eq=False)
class Terms:
    """The terms of a connection. `credit`: the first one, with what raised quotas have added to it.

    `recoveries`: the pipeline's count of recoveries when the client got its watermarks. `changed`: set when
    its quotas may have changed.
    """

    recoveries: int = 0
    credit: Credit | None = None
    changed: anyio.Event = field(default_factory=anyio.Event)


class FrameDispatcher:
    """Handles the frames of one connection.

    `unblocked`: set once that is done for which later frames wait; None if none waits. Such are the first
    hello, one whose partition has to be opened, and a frame of deltas that waits for a quota.
    `produce_handler`: None until a hello whose token may publish. `pending_answers`: requests whose answer
    waits for a sync.
    """

    def __init__(
        self,
        context: ServerContext,
        client: ConnectedClient,
        connection: Connection,
        *,
        answers: Answers,
        deliveries: ConsumeHandler,
        heartbeats: Heartbeats,
        end: ConnectionEnd,
    ) -> None:
        self.produce_handler: ProduceHandler | None = None
        self.queries = QueryHandler(context, answers)
        self.pending_answers = 0
        self.unblocked: anyio.Event | None = None
        self._context = context
        self._client = client
        self._connection = connection
        self._answers = answers
        self._deliveries = deliveries
        self._heartbeats = heartbeats
        self._end = end
        self._terms = Terms()

    @property
    def is_outdated(self) -> bool:
        """True if a recovery since the hello may have lost rows below the client's watermarks."""
        return self._terms.recoveries != self._context.partition.pipeline.recoveries

    @property
    def is_held(self) -> bool:
        """True while a frame of deltas waits for a quota."""
        return self._client.is_held

    @property
    def has_pending_outcomes(self) -> bool:
        """True while something accepted may still be appended to the log."""
        return self.produce_handler is not None and len(self.produce_handler.outcomes.pending) > 0

    def handle_run(self) -> bool:
        """Handle the next frames as one run, the fast path; return False if they form none."""
        handler, context = self.produce_handler, self._context
        if (
            handler is None
            or self._client.quota.inbound is not None
            or self._end.is_draining
            or self._terms.recoveries != context.partition.pipeline.recoveries
        ):
            return False
        run = self._connection.next_run()
        if run is None:
            return False
        context.counters.frames_in += len(run.batches)
        handler.handle_run(run)
        return True

    def handle_next(self) -> bool:
        """Handle the next complete frame; return False if there is none."""
        frame = self._connection.next_event()
        if frame is NEED_BYTES:
            return False
        self._context.counters.frames_in += 1
        self._handle_frame(frame)
        return True

    def close(self) -> None:
        """Stop reporting outcomes: the connection has closed."""
        if self.produce_handler is not None:
            self.produce_handler.close()
        if self._client.is_counted:
            self._context.quotas.leave(self._client.rights)

    def update_quota(self) -> None:
        """Follow the quotas of the token, of the client and of the stream that the connection works with."""
        context, client = self._context, self._client
        if client.permissions is None:
            return
        streams = context.partitions.streams.catalogue.streams
        context.quotas.drop_removed(streams)
        stream = streams.get(context.served.stream)
        if stream is not None:
            former, now = client.quota, context.clock.now()
            client.quota = context.quotas.open(client.permissions, client.name, stream, now)
            client.quota.follow(former, now)
            self._terms.changed.set()
            if former.outbound is not None:
                self._answers.writer.notify()  # deliveries that the former quotas held up may go now
            self._raise_credit()

    # --- frames

    def _handle_frame(self, frame: Frame) -> None:
        match frame:
            case BatchFrame() | DeltaFrame():
                self._handle_deltas(frame)
            case Subscribe(sequence, request):
                self._handle_request(sequence, request)
            case Unsubscribe():
                self._deliveries.handle_unsubscribe(frame)
            case Ack():
                self._deliveries.handle_ack(frame)
            case Heartbeat():
                self._heartbeats.receive(frame)
            case Backpressure():
                self._deliveries.follow(frame, self._context.clock.now())
            case Nack():
                logger.info("%s sent %s: %s", self._client.address, frame.code.name, frame.text)

    def _handle_deltas(self, frame: BatchFrame | DeltaFrame) -> None:
        """Handle deltas, at once or when the quotas allow it; frames after them wait as well."""
        inbound, size = self._client.quota.inbound, self._connection.last_frame_bytes
        if inbound is not None:
            rows = frame.batch.count if isinstance(frame, BatchFrame) else 1
            if inbound.charge(rows, size, self._context.clock.now()):
                self.unblocked, self._client.is_held = anyio.Event(), True
                self.queries.tasks.start_soon(self._take_later, frame, size)
                return
        self._take_deltas(frame, size)

    async def _take_later(self, frame: BatchFrame | DeltaFrame, size: int) -> None:
        await self._wait_for_quota()
        unblocked, self.unblocked, self._client.is_held = self.unblocked, None, False
        assert unblocked is not None
        if not self._answers.writer.is_ending:
            with self._context.partition.tick_callbacks:
                self._take_deltas(frame, size)
        unblocked.set()

    async def _wait_for_quota(self) -> None:
        """Wait until the quotas let the last frame pass; those that come meanwhile count from then on."""
        client, clock = self._client, self._context.clock
        while client.quota.inbound is not None and (wait_s := client.quota.inbound.wait_s(clock.now())):
            self._terms.changed = anyio.Event()
            with anyio.move_on_after(wait_s):
                await self._terms.changed.wait()

    def _take_deltas(self, frame: BatchFrame | DeltaFrame, size: int) -> None:
        handler = self.produce_handler
        if self._end.is_draining:
            self._answers.send(Nack.of_frame(frame.sequence, server_closing()))
        elif self.is_outdated:
            self._answers.close(Nack.of(0, log_recovered()))
        elif handler is None:  # the hello came without the right to publish
            refused = Unauthorized("the token may not publish")
            self._answers.refuse_unauthorized(refused, type(frame).__name__, frame.sequence)
        elif isinstance(frame, BatchFrame):
            handler.handle_batch(frame, size)
        else:
            handler.handle_delta(frame, size)

    def _handle_request(self, sequence: int, request: Request) -> None:
        requests = self._client.quota.requests
        try:
            if requests is not None:
                requests.take(self._context.clock.now())
            match request:
                case Hello():
                    self._handle_hello(sequence, request)
                case Decide():
                    self._handle_decide(sequence, request)
                case Subscription():
                    self._deliveries.handle_subscribe(sequence, request)
                case _:
                    self.queries.handle(sequence, request, self._client.permissions)
        except Refused as refused:
            self._answers.refuse_request(sequence, request, refused)

    # --- hellos

    def _handle_hello(self, sequence: int, hello: Hello) -> None:
        context, client, is_first = self._context, self._client, self._client.permissions is None
        if is_first:
            client.permissions = context.access.check(hello.token)
            client.name = hello.client
            client.codecs = frozenset(
                codec for codec in context.codecs if codec.name.lower() in hello.features
            )
            client.source = hello.source
            self._enter()
        hello = replace(hello, source=client.source)  # the first hello sets the source
        rights = client.rights
        if hello.origins or hello.source is Source.REPLICA:
            rights.check_origins(hello.source)
        catalogue = context.partitions.streams.catalogue
        if not (is_first and _names_no_stream(hello)):
            check_stream_rights(rights, {hello.stream, *[claim.stream for claim in hello.origins]}, catalogue)
        name = check_hello(hello, catalogue)
        if name == context.served.name:
            self._finish_hello(sequence, hello, is_first=is_first)
            return
        if not (self._is_unused() and self._deliveries.session is None):
            check_served(name, context.served.name)
        served = context.partitions.find(name)
        if served is not None:
            self._bind(served)
            self._finish_hello(sequence, hello, is_first=is_first)
        else:
            self.unblocked = anyio.Event()
            self.queries.tasks.start_soon(self._open_and_finish, name, sequence, hello, is_first)

    def _enter(self) -> None:
        """Count the connection, whose first hello costs no request. Raises Refused (QUOTA_EXCEEDED)."""
        context, client = self._context, self._client
        context.quotas.enter(client.rights)
        client.is_counted = True
        self.update_quota()

    def _finish_hello(self, sequence: int, hello: Hello, *, is_first: bool) -> None:
        """Answer a hello, in the partition that it names. Raises Refused.

        `is_first`: True for the first hello; the first one that may publish is handled like it.
        """
        context, client = self._context, self._client
        rights = client.rights
        had_handler = self.produce_handler is not None
        may_publish = rights.publish and rights.can_use_stream(context.served.stream)
        if may_publish and (self.produce_handler is None or (hello.job is not None and self._is_unused())):
            self.produce_handler = make_produce_handler(context, client, hello, self._answers)
            client.last_hello = hello
        elif hello.job is not None:
            rights.check_origins(hello.source)
            raise Refused(
                ErrorCode.BAD_REQUEST,
                "this connection publishes or stages something else already: open another one for each part "
                "of a job",
            )
        is_first = is_first or (self.produce_handler is not None and not had_handler)
        grants: list[OriginGrant] = []
        if hello.origins and self.produce_handler is not None:
            grants = self.produce_handler.claim(hello.origins)
        if hello.source is Source.REPLICA:
            grants = context.forwarder_grants()
        if not grants:
            self._send_welcome(sequence, grants, is_first=is_first)
            return
        self.pending_answers += 1
        answered = self.unblocked = anyio.Event() if is_first else None

        def answer(failure: Refused | None) -> None:
            self.pending_answers -= 1
            if answered is not None:
                self.unblocked = None
                answered.set()
            if self._answers.writer.is_ending:
                return
            if failure is not None:
                self._answers.refuse(failure, correlation_id=sequence)
            else:
                self._send_welcome(sequence, grants, is_first=is_first)

        # The watermarks may count rows that the log can still lose.
        context.partition.pipeline.when_reached(answer)

    # --- the partition

    async def _open_and_finish(self, name: LogName, sequence: int, hello: Hello, is_first: bool) -> None:
        """Open a partition, and answer the hello that names it."""
        opened = self.unblocked
        assert opened is not None
        self.pending_answers += 1
        try:
            async with explain_open_failure(name):
                self._bind(await self._context.partitions.open(name))
            self.unblocked = None
            self._finish_hello(sequence, hello, is_first=is_first)
        except Refused as refused:
            self.unblocked = None
            self._answers.refuse_request(sequence, hello, refused)
        finally:
            self.pending_answers -= 1
            opened.set()

    def _bind(self, served: ServedPartition) -> None:
        self._context.bind(served)
        self._connection.stream = served.name.stream
        self._terms.recoveries = served.partition.pipeline.recoveries
        self.update_quota()
        if self.produce_handler is not None:  # of another partition, and unused
            self.produce_handler = make_produce_handler(
                self._context, self._client, self._client.last_hello, self._answers
            )

    def _is_unused(self) -> bool:
        """True if nothing was claimed, sent or staged on this connection."""
        handler = self.produce_handler
        return handler is None or not (handler.is_used or isinstance(handler, StagingHandler))

    def _send_welcome(self, sequence: int, grants: list[OriginGrant], *, is_first: bool) -> None:
        self._terms.recoveries = self._context.partition.pipeline.recoveries
        credit = None
        if is_first and self.produce_handler is not None:
            credit = self._terms.credit = self._allowed_credit()
        elif is_first:
            # The client does not learn of it: deltas that it sends are refused for its token, not for credit.
            self._connection.receive_window.grant(Credit(1, 1))
        *pages, last = make_welcomes(self._context, grants, self._client.rights)
        for page in pages:
            self._answers.respond(sequence, page, more=True)
        self._answers.send(Ack(0, credit=credit, correlation_id=sequence, response=last))

    def _allowed_credit(self) -> Credit:
        """Return the first credit that the settings and the quotas allow."""
        settings, inbound = self._context.settings, self._client.quota.inbound
        credit = Credit(settings.producer_deltas_credit, settings.producer_bytes_credit)
        return credit if inbound is None else inbound.bound_credit(credit)

    def _raise_credit(self) -> None:
        """Grant what raised quotas allow in addition to the first credit."""
        given, allowed = self._terms.credit, self._allowed_credit()
        if given is None or not self._answers.is_open:
            return
        more = Credit(max(allowed.deltas - given.deltas, 0), max(allowed.bytes - given.bytes, 0))
        if more.deltas or more.bytes:
            self._terms.credit = Credit(given.deltas + more.deltas, given.bytes + more.bytes)
            self._answers.send(Ack(0, credit=more))

    # --- jobs

    def _handle_decide(self, sequence: int, request: Decide) -> None:
        rights = self._client.rights
        rights.check_stream(self._context.served.stream)
        rights.check_origins(Source.LOCAL)
        self.pending_answers += 1

        def respond(outcome: JobStatus | Refused) -> None:
            self.pending_answers -= 1
            if isinstance(outcome, Refused):
                self._answers.refuse_request(sequence, request, outcome)
            elif not self._answers.writer.is_ending:
                self._answers.respond(sequence, outcome)

        try:
            self._context.served.jobs.decide(request, rights.name, respond)
        except Refused as refused:
            self.pending_answers -= 1
            raise refused from None


def _names_no_stream(hello: Hello) -> bool:
    """True if a hello claims nothing in the default stream, so that it may be one to ask something only."""
    names_default = LogName(hello.stream, hello.partition) == DEFAULT_LOG
    return names_default and not (hello.origins or hello.job or hello.source is Source.REPLICA)
