"""One connected client: reads and dispatches its frames, writes its answers and deliveries.

A client can at worst end its own connection. The handler has two tasks, a reader and a writer; its memory is
bounded by the client's credit, the consumer session, and the answers that the client leaves unread.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import replace
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel

from delta_prop.delivery.backpressure.advice import Advice
from delta_prop.server.close_reasons import (
    connection_in_use,
    log_recovered,
    server_closing,
    silence_reason,
    slowness_reason,
)
from delta_prop.server.connection_writer import ConnectionWriter
from delta_prop.server.consumer_session import NO_SUBSCRIPTION, ConsumerSession
from delta_prop.server.partitions import check_claims, check_partition, resolve_partition
from delta_prop.server.permissions import Unauthorized
from delta_prop.server.query_handler import QueryHandler, make_welcomes
from delta_prop.server.receive_budget import UNBUDGETED_BYTES
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
    Heartbeat,
    Hello,
    JobStatus,
    Nack,
    OriginGrant,
    PressureLevel,
    Subscribe,
    Subscription,
    Unsubscribe,
)
from delta_prop_wire.message_rules import Phase, Role
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anyio.abc import TaskGroup

    from delta_prop.platform.ports import Stream
    from delta_prop.server.permissions import Permissions
    from delta_prop.server.produce_handler import ProduceHandler
    from delta_prop.server.send_queue import SendChunk
    from delta_prop.server.server_context import ServerContext
    from delta_prop_wire.frames import Frame, Request, Response

logger = logging.getLogger("delta_prop.server")

_FINISH_TIMEOUT_S = 5.0
_TICK_MAX_S = 0.002
_PROGRESS_INTERVAL_S = 1.0


class ConnectionHandler:
    """An accepted connection. `run` serves it until it ends."""

    def __init__(self, number: int, stream: Stream, context: ServerContext) -> None:
        self.number = number
        self.address = stream.peer
        self.client: str | None = None
        self.permissions: Permissions | None = None
        self.produce_handler: ProduceHandler | None = None
        self.consumer_session: ConsumerSession | None = None
        self._source = Source.LOCAL  # set by the first hello
        self._stream = stream
        self._context = context
        self._tasks: TaskGroup  # set by `run`
        self._pipeline = context.internals.partition.pipeline
        self._connection = Connection(Role.SERVER, payload_bytes_max=context.settings.frame_bytes_max)
        self._receive_buffer = self._connection.receive_buffer
        self._writer = ConnectionWriter(stream, self._connection, context, self)
        self.notify = self._writer.notify  # wakes the writer
        self.codecs: frozenset[int] = frozenset()  # of compressed frames that the client can read
        self._draining = False  # True once `drain` was called
        self._finishing = False  # True once the client has ended its side
        self._drain_until = self._log_end = inf
        self._pending_answers = 0  # requests whose answer waits for a sync
        self._queries = QueryHandler(context, self._respond, self._refuse_request)
        self._hello_done: anyio.Event | None = None  # later frames wait for the answer to the first hello
        self._started_at = self._received_at = context.now()
        self._frame_started_at: float | None = None  # when the incomplete frame began to arrive
        self._budget_bytes = UNBUDGETED_BYTES  # acquired for the arriving frame
        self._waits_for_budget = False
        self._advice = Advice()  # from the client: how fast to deliver
        self._echo_us: int | None = None  # the time in the client's last heartbeat
        self._heartbeats = 0
        self._progress_sent = (0, 0.0)  # the last progress report: offset, time
        self._sent_level = PressureLevel.OK
        self._known_recoveries = 0  # the pipeline's count of recoveries when the client got its watermarks
        # each is handled once everything below its offset is delivered
        self._pending_unsubscribes: deque[tuple[int, Unsubscribe]] = deque()
        self._scope = anyio.CancelScope()

    # --- running

    async def run(self) -> None:
        """Serve the connection until either side ends it."""
        try:
            with self._scope:
                async with anyio.create_task_group() as tasks:
                    self._tasks = tasks
                    tasks.start_soon(self._write_all)
                    await self._read_all()
                    self._finishing = True
                    self.notify()
                    tasks.cancel_scope.deadline = anyio.current_time() + _FINISH_TIMEOUT_S  # for the writer
        finally:
            # While the server drains, a subscriber may still be reading what was written.
            may_read = self._draining and self.consumer_session is not None
            self._release_all()
            await self._stream.aclose(self._drain_until - self._context.now() if may_read else 0.0)

    def _release_all(self) -> None:
        if self.produce_handler is not None:
            self.produce_handler.close()
        if self.consumer_session is not None:
            self.consumer_session.close()
            self.consumer_session = None
        if self._budget_bytes > UNBUDGETED_BYTES:
            self._release_budget()

    def close(self, nack: Nack | None = None) -> None:
        """Send `nack`, if given, as the last frame, and end."""
        if nack is not None and not self._writer.is_ending:
            self._send(nack)
        self._writer.is_ending = True
        self.notify()

    def abort(self) -> None:
        """End the connection at once."""
        if not self._scope.cancel_called:  # a second cancel costs as much as the first
            self._scope.cancel()

    def drain(self, until: float, log_end: float = inf) -> None:
        """Accept no more deltas; end once all are answered, and all rows below `log_end` are delivered."""
        self._draining, self._drain_until, self._log_end = True, until, log_end
        self.notify()

    @property
    def has_pending_outcomes(self) -> bool:
        """True while something accepted may still be appended to the log."""
        return self.produce_handler is not None and self.produce_handler.pending_frames > 0

    def is_finished(self) -> bool:
        """Return True if the client has nothing more to wait for; called when nothing is to be written."""
        if self._pending_answers or self._queries.pending or self.has_pending_outcomes:
            return False
        if self._draining and not self._finishing:
            session = self.consumer_session
            if session is None or session.standing_by or session.processed >= self._log_end:
                self.close(Nack.of(0, server_closing()))  # written before the end
            return False
        return self._finishing

    # --- reading

    async def _read_all(self) -> None:
        connection, stream, context = self._connection, self._stream, self._context
        try:
            while not self._writer.is_ending:
                # Budget is for bytes that have arrived, not for those that a header announces.
                if connection.buffered_bytes >= self._budget_bytes < connection.incoming_frame_bytes:
                    await self._acquire_budget(connection.incoming_frame_bytes)
                if not await stream.receive_each(connection.get_buffer, self._on_received):
                    return
                while not self._handle_frames():
                    hello = self._hello_done
                    await (anyio.lowlevel.checkpoint() if hello is None else hello.wait())
        except ConnectionError:
            self.abort()
        except ProtocolError as error:
            context.counters.count_nack(error.code)
            self._close_for(error)

    def _on_received(self, byte_count: int) -> bool:
        """Handle received bytes; return True if all were handled and the budget allows more."""
        connection, buffer = self._connection, self._receive_buffer
        self._context.counters.bytes_in += byte_count
        connection.buffer_updated(byte_count)
        if not self._handle_frames() or self._writer.is_ending:
            return False
        return not (buffer.end - buffer.start >= self._budget_bytes < connection.incoming_frame_bytes)

    def _handle_frames(self) -> bool:
        """Handle complete frames for the time of one tick; return True if none is left."""
        if not self._handle_tick():
            return False
        if self._budget_bytes > UNBUDGETED_BYTES and not self._connection.incoming_frame_bytes:
            self._release_budget()
        if self._frame_started_at is None and self._receive_buffer.start < self._receive_buffer.end:
            self._frame_started_at = self._context.now()
        return True

    def _handle_tick(self) -> bool:
        """Handle complete frames in one tick, whose callbacks run at its end; return True if none is left."""
        context, buffer = self._context, self._receive_buffer
        started_at = context.now()
        with context.internals.partition.tick_callbacks:
            while buffer.start < buffer.end:
                if self._hello_done is not None:
                    return False
                if not (self._handle_run() or self._handle_next()):
                    break
                self._frame_started_at = None
                now = self._received_at = context.now()
                if self._writer.is_ending:
                    return True
                if now - started_at > _TICK_MAX_S:
                    return False
        return True

    def _handle_run(self) -> bool:
        """Handle the next frames as one run, the fast path, if they form one."""
        handler = self.produce_handler
        if handler is None or self._draining or self._known_recoveries != self._pipeline.recoveries:
            return False
        run = self._connection.next_run()
        if run is None:
            return False
        self._context.counters.frames_in += len(run.batches)
        handler.handle_run(run)
        return True

    def _handle_next(self) -> bool:
        """Handle the next complete frame, if there is one."""
        frame = self._connection.next_event()
        if frame is NEED_BYTES:
            return False
        self._context.counters.frames_in += 1
        self._handle_frame(frame)
        return True

    async def _acquire_budget(self, size: int) -> None:
        """Wait until there is budget for a large frame; the wait does not count as the client's silence."""
        self._waits_for_budget = True
        await self._context.receive_budget.acquire(size)
        self._waits_for_budget, self._budget_bytes = False, size
        self._frame_started_at = self._context.now()

    def _release_budget(self) -> None:
        self._context.receive_budget.release(self._budget_bytes)
        self._budget_bytes = UNBUDGETED_BYTES

    def _close_for(self, error: ProtocolError) -> None:
        self._context.audit.record_refusal(self.address, self.permissions, "FRAME", error)
        self.close(self._connection.nack_of(error))

    def _handle_frame(self, frame: Frame) -> None:
        match frame:
            case BatchFrame() | DeltaFrame():
                self._handle_deltas(frame)
            case Subscribe(sequence, request):
                self._handle_request(sequence, request)
            case Unsubscribe():
                self._handle_unsubscribe(frame)
            case Ack():
                self._handle_ack(frame)
            case Heartbeat():
                self._echo_us = frame.sent_us
                if frame.sent_us is not None:
                    self._send_heartbeat(self._context.now())
                if frame.processed is not None and self.consumer_session is not None:
                    self.consumer_session.note_processed(frame.processed)
            case Backpressure():
                self._advice.update(frame, self._context.now())
                self.notify()  # deliveries that backpressure held up may go now
            case Nack():
                logger.info("%s sent %s: %s", self.address, frame.code.name, frame.text)

    def _handle_deltas(self, frame: BatchFrame | DeltaFrame) -> None:
        handler = self.produce_handler
        if self._draining:
            self._send(Nack.of_frame(frame.sequence, server_closing()))
        elif self._is_outdated():
            self.close(Nack.of(0, log_recovered()))
        elif handler is None:  # the hello came without the right to publish
            refused = Unauthorized("the token may not publish")
            self._refuse_unauthorized(refused, type(frame).__name__, frame.sequence)
        elif isinstance(frame, BatchFrame):
            handler.handle_batch(frame, self._connection.last_frame_bytes)
        else:
            handler.handle_delta(frame, self._connection.last_frame_bytes)

    def _handle_ack(self, ack: Ack) -> None:
        session, permissions = self.consumer_session, self.permissions
        assert permissions is not None
        if not permissions.subscribe:
            self._refuse_unauthorized(Unauthorized("the token may not subscribe"), "Ack")
        if session is None:
            return
        try:
            check_partition(ack.stream, ack.partition)
            if ack.credit is not None:
                session.grant(ack.credit)
            if ack.processed is not None:
                session.note_processed(ack.processed)
            if ack.cursor is not None:
                session.commit(ack.cursor)
        except Refused as refused:
            self._refuse(0, refused)

    # --- requests

    def _handle_request(self, sequence: int, request: Request) -> None:
        try:
            match request:
                case Hello():
                    self._handle_hello(sequence, request)
                case Decide():
                    self._handle_decide(sequence, request)
                case Subscription():
                    self._handle_subscribe(sequence, request)
                case _:
                    self._queries.handle(sequence, request, self.permissions, self._tasks)
        except Refused as refused:
            self._refuse_request(sequence, request, refused)

    def _refuse_request(self, sequence: int, request: Request, refused: Refused) -> None:
        if refused.code is ErrorCode.UNAUTHORIZED:  # the same text for every cause
            self._refuse_unauthorized(refused, type(request).__name__, correlation_id=sequence)
        else:
            self._refuse(0, refused, correlation_id=sequence)

    def _handle_hello(self, sequence: int, hello: Hello) -> None:
        context, is_first = self._context, self.permissions is None
        if is_first:
            self.permissions = context.access.check(hello.token)
            self.client = hello.client
            self.codecs = frozenset(codec for codec in context.codecs if codec.name.lower() in hello.features)
            self._source = hello.source
        hello = replace(hello, source=self._source)  # the first hello sets the source
        rights = self.permissions
        assert rights is not None
        if hello.origins or hello.source is Source.REPLICA:
            rights.check_origins(hello.source)
        check_claims(hello)
        if rights.publish and (self.produce_handler is None or (hello.job is not None and self._is_unused())):
            self.produce_handler = make_produce_handler(context, rights, hello, self.notify, self.address)
        elif hello.job is not None:
            rights.check_origins(hello.source)
            raise connection_in_use()
        grants: list[OriginGrant] = []
        if hello.origins and self.produce_handler is not None:
            grants = self.produce_handler.claim(hello.origins)
        if hello.source is Source.REPLICA:
            grants = context.forwarder_grants()
        if not grants:
            self._send_welcome(sequence, grants, is_first=is_first)
            return
        self._pending_answers += 1
        hello_done = self._hello_done = anyio.Event() if is_first else None

        def answer(failure: Refused | None) -> None:
            self._pending_answers -= 1
            if hello_done is not None:
                self._hello_done = None
                hello_done.set()
            if self._writer.is_ending:
                return
            if failure is not None:
                self._refuse(0, failure, correlation_id=sequence)
            else:
                self._send_welcome(sequence, grants, is_first=is_first)

        self._pipeline.when_reached(answer)  # watermarks may count rows that the log can still lose

    def _is_unused(self) -> bool:
        """True if nothing was claimed, sent or staged on this connection."""
        handler = self.produce_handler
        return not (handler is None or handler.is_used or isinstance(handler, StagingHandler))

    def _respond(self, sequence: int, response: Response, *, more: bool = False) -> None:
        self._send(Ack(0, correlation_id=sequence, response=response, more=more))

    def _handle_decide(self, sequence: int, request: Decide) -> None:
        permissions = self.permissions
        assert permissions is not None
        permissions.check_origins(Source.LOCAL)
        self._pending_answers += 1

        def respond(outcome: JobStatus | Refused) -> None:
            self._pending_answers -= 1
            if isinstance(outcome, Refused):
                self._refuse_request(sequence, request, outcome)
            elif not self._writer.is_ending:
                self._respond(sequence, outcome)

        try:
            self._context.jobs.decide(request, permissions.name, respond)
        except Refused as refused:
            self._pending_answers -= 1
            raise refused from None

    def _send_welcome(self, sequence: int, grants: list[OriginGrant], *, is_first: bool) -> None:
        settings = self._context.settings
        self._known_recoveries = self._pipeline.recoveries
        credit = None
        if is_first and self.produce_handler is not None:
            credit = Credit(settings.producer_deltas_credit, settings.producer_bytes_credit)
        elif is_first:
            # The client does not learn of it: deltas that it sends are refused for its token, not for credit.
            self._connection.receive_window.grant(Credit(1, 1))
        *pages, last = make_welcomes(self._context, grants)
        for page in pages:
            self._respond(sequence, page, more=True)
        self._send(Ack(0, credit=credit, correlation_id=sequence, response=last))

    def _handle_subscribe(self, sequence: int, request: Subscription) -> None:
        permissions = self.permissions
        assert permissions is not None
        permissions.check_subscribe(request.topics)
        request = resolve_partition(request)
        session = self.consumer_session
        if session is None:
            session = ConsumerSession(
                self._context.internals,
                settings=self._context.settings,
                codecs=self.codecs,
                can_read=permissions.read_filter,
                notify=self.notify,
                groups=self._context.groups,
            )
        try:
            granted = session.subscribe(request, partial(self._respond, sequence))
        except Refused:
            if self.consumer_session is None:
                session.close()
            raise
        self.consumer_session = session
        self._respond(sequence, granted)

    def _handle_unsubscribe(self, frame: Unsubscribe) -> None:
        permissions = self.permissions
        assert permissions is not None
        try:
            permissions.check_subscribe(())
        except Unauthorized as refused:
            self._refuse_unauthorized(refused, "Unsubscribe", correlation_id=frame.sequence)
            return
        high_watermark, session = self._context.internals.partition.log.high_watermark, self.consumer_session
        if frame.drain and session is not None and session.has_to_deliver(frame.subscription):
            self._pending_unsubscribes.append((high_watermark, frame))
        else:
            self._end_subscription(frame)

    def _end_subscription(self, frame: Unsubscribe) -> None:
        try:
            if self.consumer_session is None:
                text = f"subscription {frame.subscription}: not open on this connection: name an open one"
                raise Refused(ErrorCode.BAD_REQUEST, text)
            processed = self.consumer_session.processed  # of all topics subscribed to until now
            self.consumer_session.unsubscribe(frame.subscription)
        except Refused as refused:
            self._refuse(0, refused, correlation_id=frame.sequence)
        else:
            self._send(Ack(0, correlation_id=frame.sequence, processed=processed))

    def _end_drained_subscriptions(self) -> None:
        """End the subscriptions whose last delivery is written."""
        session, pending = self.consumer_session, self._pending_unsubscribes
        while pending and (session is None or session.standing_by or session.processed >= pending[0][0]):
            self._end_subscription(pending.popleft()[1])

    def _refuse(self, sequence: int, refused: Refused, correlation_id: int | None = None) -> None:
        self._context.counters.count_nack(refused.code)
        self._context.audit.record_refusal(self.address, self.permissions, "REQUEST", refused)
        self._send(Nack.of(sequence, refused, correlation_id=correlation_id))
        if self._connection.phase is Phase.ENDED:  # the refused request was the first hello
            self.close()

    def _refuse_unauthorized(
        self, refused: Refused, frame: str, sequence: int = 0, correlation_id: int | None = None
    ) -> None:
        """Refuse what the token does not allow, always with the same text, and end the connection."""
        if not isinstance(refused, Unauthorized):
            refused = Unauthorized(refused.message)
        self._context.audit.record_refusal(self.address, self.permissions, frame, refused)
        self._context.counters.count_nack(refused.code)
        self.close(Nack.of(sequence, refused, correlation_id=correlation_id))

    # --- writing

    def _send(self, frame: Frame) -> None:
        self._writer.send(frame)
        if self._writer.is_overfull:
            self.abort()

    def send_pressure(self, pressure: Backpressure) -> None:
        """Send backpressure advice to a producer."""
        is_open = self._connection.phase is Phase.OPEN and not self._writer.is_ending
        if self.produce_handler is not None and self.produce_handler.is_used and is_open:
            self._send(pressure)

    async def _write_all(self) -> None:
        try:
            await self._writer.run()
        except (ConnectionError, TimeoutError) as error:
            logger.info("connection %d of %s ends: %r", self.number, self.address, error)
        if not self._finishing:  # the reader waits for bytes; cancelling takes longer than returning
            self.abort()

    def take_answers(self) -> Sequence[Frame]:
        """Return the outcomes of received deltas that were not reported yet."""
        handler = self.produce_handler
        is_ended = self._connection.phase is Phase.ENDED  # by invalid bytes
        if handler is None or not handler.has_answers or is_ended:
            return ()
        answers = handler.take_answers(throttled=self._context.throttled)
        if handler.is_unauthorized:
            self._writer.is_ending = True
        return answers

    def next_chunk(self, now: float) -> SendChunk | None:
        """Return the next chunk to deliver; None if there is none now."""
        if self._pending_unsubscribes:
            self._end_drained_subscriptions()
        session, advice = self.consumer_session, self._advice
        if session is None or advice.wait_s(now) > 0:
            return None
        try:
            chunk = session.take(now, self._context.settings.send_bytes_max, rows_max=advice.rows_max)
        except Refused as refused:
            self._refuse(0, refused)
            session.close()
            self.consumer_session = None
            self._end_drained_subscriptions()
            return None
        if chunk is not None:
            advice.spend(chunk.delta_count, now)
        return chunk

    def is_idle(self) -> bool:
        """Return True if nothing is to be written or ended before the next `notify`."""
        if self._draining or self._finishing or self._pending_unsubscribes:
            return False
        handler, session = self.produce_handler, self.consumer_session
        return (handler is None or not handler.has_answers) and (session is None or session.try_idle())

    def wait_s(self, now: float) -> float | None:
        """Return the seconds until there may be more to deliver; None if `notify` will report it."""
        if self.consumer_session is None:
            return None
        return self._advice.wait_s(now) or self.consumer_session.wait_s(now)

    # --- time

    def run_checks(self, now: float, stalled_s: float) -> None:
        """Check timeouts and the token; send what is due. `stalled_s`: how long this server was stalled."""
        if self._writer.is_ending:
            return
        settings = self._context.settings
        self._received_at += stalled_s
        timeout_reason = self._timeout_reason(now)
        if timeout_reason is not None:
            logger.info("connection %d of %s ends: %s", self.number, self.address, timeout_reason)
            self._context.counters.connections_timed_out += 1
            self.abort()
        elif self.produce_handler is not None and self.produce_handler.is_forwarder and self._is_outdated():
            # The forwarder reconnects and resends lost rows, even if it has no new ones for long.
            self.close(Nack.of(0, log_recovered()))
        elif self._connection.phase is Phase.OPEN:
            self.check_token()
            self._send_progress(now)
            if now - self._writer.written_at >= settings.heartbeat_interval_s:
                self._send_heartbeat(now)

    def _is_outdated(self) -> bool:
        """True if a recovery since the hello may have lost rows below the client's watermarks."""
        return self._known_recoveries != self._pipeline.recoveries

    def _timeout_reason(self, now: float) -> str | None:
        settings, frame_started_at = self._context.settings, self._frame_started_at
        if self.permissions is None:
            timed_out = now - self._started_at > settings.handshake_timeout_s
            return f"no hello within {settings.handshake_timeout_s} s" if timed_out else None
        if self._waits_for_budget:
            return None
        if frame_started_at is None:
            return silence_reason(now - self._received_at, settings)
        return slowness_reason(now - frame_started_at, self._connection.buffered_bytes, settings)

    def check_token(self) -> None:
        """End the connection if its token is no longer valid."""
        permissions = self.permissions
        if (
            permissions is not None
            and not self._writer.is_ending
            and not self._context.access.is_valid(permissions)
        ):
            self._refuse_unauthorized(Unauthorized("the token has expired or was revoked"), "CONNECTION")

    def _send_progress(self, now: float) -> None:
        session = self.consumer_session
        if session is None or session.standing_by:
            return
        reported, reported_at = self._progress_sent
        if session.processed > reported and now - reported_at >= _PROGRESS_INTERVAL_S:
            self._progress_sent = (session.processed, now)
            self._send(Ack(0, processed=session.processed))
        warning = session.warning
        level = PressureLevel.OK if warning is None else warning.level
        if level != self._sent_level:
            self._sent_level = level
            self._send(warning or Backpressure(self._context.next_number(), PressureLevel.OK))

    def _send_heartbeat(self, now: float) -> None:
        self._heartbeats += 1
        session = self.consumer_session
        processed = None if session is None else session.reported_offset
        self._send(Heartbeat(self._heartbeats, int(now * 1_000_000), self._echo_us, processed=processed))
        self._writer.written_at = now

    # --- for operators

    def statistics(self) -> dict[str, Any]:
        """Return a snapshot, for people and their tools."""
        session = self.consumer_session
        return {
            "number": self.number,
            "address": self.address,
            "client": self.client,
            "token": None if self.permissions is None else self.permissions.name,
            "seconds": round(self._context.now() - self._started_at, 1),
            "pending_frames": 0 if self.produce_handler is None else self.produce_handler.pending_frames,
            "subscribed": session is not None,
            **(NO_SUBSCRIPTION if session is None else session.statistics()),
        }
