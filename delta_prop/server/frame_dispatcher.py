"""Passes each frame of a connection on by its type, and answers hellos and decisions about jobs."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import anyio

from delta_prop.server.close_reasons import connection_in_use, log_recovered, server_closing
from delta_prop.server.partitions import check_claims
from delta_prop.server.permissions import Unauthorized
from delta_prop.server.query_handler import QueryHandler, make_welcomes
from delta_prop.server.staging import StagingHandler, make_produce_handler
from delta_prop_wire.codec import NEED_BYTES
from delta_prop_wire.delta import Source
from delta_prop_wire.errors import Refused
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
    Subscribe,
    Subscription,
    Unsubscribe,
)

if TYPE_CHECKING:
    from delta_prop.server.answers import Answers
    from delta_prop.server.connected_client import ConnectedClient
    from delta_prop.server.connection_end import ConnectionEnd
    from delta_prop.server.consume_handler import ConsumeHandler
    from delta_prop.server.heartbeats import Heartbeats
    from delta_prop.server.produce_handler import ProduceHandler
    from delta_prop.server.server_context import ServerContext
    from delta_prop_wire.connection import Connection
    from delta_prop_wire.frames import Frame, Request

logger = logging.getLogger("delta_prop.server")


class FrameDispatcher:
    """Handles the frames of one connection, as `FrameTarget` says.

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
        self.hello_done: anyio.Event | None = None
        self._context = context
        self._client = client
        self._connection = connection
        self._answers = answers
        self._deliveries = deliveries
        self._heartbeats = heartbeats
        self._end = end
        self._known_recoveries = 0  # the pipeline's count of recoveries when the client got its watermarks

    @property
    def is_outdated(self) -> bool:
        """True if a recovery since the hello may have lost rows below the client's watermarks."""
        return self._known_recoveries != self._context.partition.pipeline.recoveries

    @property
    def has_pending_outcomes(self) -> bool:
        """True while something accepted may still be appended to the log."""
        return self.produce_handler is not None and len(self.produce_handler.outcomes.pending) > 0

    def handle_run(self) -> bool:
        """See `FrameTarget`."""
        handler, context = self.produce_handler, self._context
        if (
            handler is None
            or self._end.is_draining
            or self._known_recoveries != context.partition.pipeline.recoveries
        ):
            return False
        run = self._connection.next_run()
        if run is None:
            return False
        context.counters.frames_in += len(run.batches)
        handler.handle_run(run)
        return True

    def handle_next(self) -> bool:
        """See `FrameTarget`."""
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
        handler = self.produce_handler
        if self._end.is_draining:
            self._answers.send(Nack.of_frame(frame.sequence, server_closing()))
        elif self.is_outdated:
            self._answers.close(Nack.of(0, log_recovered()))
        elif handler is None:  # the hello came without the right to publish
            refused = Unauthorized("the token may not publish")
            self._answers.refuse_unauthorized(refused, type(frame).__name__, frame.sequence)
        elif isinstance(frame, BatchFrame):
            handler.handle_batch(frame, self._connection.last_frame_bytes)
        else:
            handler.handle_delta(frame, self._connection.last_frame_bytes)

    def _handle_request(self, sequence: int, request: Request) -> None:
        try:
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
        hello = replace(hello, source=client.source)  # the first hello sets the source
        rights = client.rights
        if hello.origins or hello.source is Source.REPLICA:
            rights.check_origins(hello.source)
        check_claims(hello)
        if rights.publish and (self.produce_handler is None or (hello.job is not None and self._is_unused())):
            self.produce_handler = make_produce_handler(context, client, hello, self._answers)
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
        self.pending_answers += 1
        hello_done = self.hello_done = anyio.Event() if is_first else None

        def answer(failure: Refused | None) -> None:
            self.pending_answers -= 1
            if hello_done is not None:
                self.hello_done = None
                hello_done.set()
            if self._answers.writer.is_ending:
                return
            if failure is not None:
                self._answers.refuse(failure, correlation_id=sequence)
            else:
                self._send_welcome(sequence, grants, is_first=is_first)

        # The watermarks may count rows that the log can still lose.
        context.partition.pipeline.when_reached(answer)

    def _is_unused(self) -> bool:
        """True if nothing was claimed, sent or staged on this connection."""
        handler = self.produce_handler
        return not (handler is None or handler.is_used or isinstance(handler, StagingHandler))

    def _send_welcome(self, sequence: int, grants: list[OriginGrant], *, is_first: bool) -> None:
        settings = self._context.settings
        self._known_recoveries = self._context.partition.pipeline.recoveries
        credit = None
        if is_first and self.produce_handler is not None:
            credit = Credit(settings.producer_deltas_credit, settings.producer_bytes_credit)
        elif is_first:
            # The client does not learn of it: deltas that it sends are refused for its token, not for credit.
            self._connection.receive_window.grant(Credit(1, 1))
        *pages, last = make_welcomes(self._context, grants)
        for page in pages:
            self._answers.respond(sequence, page, more=True)
        self._answers.send(Ack(0, credit=credit, correlation_id=sequence, response=last))

    # --- jobs

    def _handle_decide(self, sequence: int, request: Decide) -> None:
        rights = self._client.rights
        rights.check_origins(Source.LOCAL)
        self.pending_answers += 1

        def respond(outcome: JobStatus | Refused) -> None:
            self.pending_answers -= 1
            if isinstance(outcome, Refused):
                self._answers.refuse_request(sequence, request, outcome)
            elif not self._answers.writer.is_ending:
                self._answers.respond(sequence, outcome)

        try:
            self._context.jobs.decide(request, rights.name, respond)
        except Refused as refused:
            self.pending_answers -= 1
            raise refused from None
